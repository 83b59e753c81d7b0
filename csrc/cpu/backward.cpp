// SPDX-License-Identifier: Apache-2.0
//
// The backward pass of a call, cut into tasks.
//
// A key head of a sequence is one task where there are as many of these as workers. Where there are
// fewer, its value heads are tasks that go through the sequence side by side, segment by segment;
// the sums over them, dQ and dK, are taken in the same order either way. (Columns of V stay
// together: dQ, dK, dg and dbeta are sums over V, and a cut would change their order.)
#include <algorithm>
#include <cstring>
#include <vector>

#include "cpu/forward.h"
#include "cpu/registry.h"
#include "cpu/tasks.h"

namespace deltanet::cpu {
namespace {

using Params = GatedDeltaRuleBackwardParams;

int64_t segments_of(const Params& p, int64_t sequence) {
  const int64_t tokens = p.sequence_end(sequence) - p.sequence_begin(sequence);
  return (tokens + kSegmentTokens - 1) / kSegmentTokens;
}

RuleTask task_of(const Params& p, int64_t key, int64_t first_head, int64_t heads) {
  RuleTask task;
  task.sequence = key / p.key_heads;
  task.key_head = key % p.key_heads;
  task.value_head_begin = task.key_head * (p.value_heads / p.key_heads) + first_head;
  task.value_head_end = task.value_head_begin + heads;
  task.column_begin = 0;
  task.column_end = p.dim_v;
  return task;
}

void run_alone(const Kernels& kernels, const BackwardTask& task) {
  kernels.backward_begin(task);
  for (int64_t i = segments_of(task.p, task.task.sequence) - 1; i >= 0; --i) {
    kernels.backward_segment(task, i);
    kernels.backward_store_segment(&task, 1, i);
  }
  kernels.backward_end(task);
}

// All value heads side by side. There are fewer key heads than workers, so scratch stays small.
void run_by_heads(const Kernels& kernels, const Params& p, int64_t work, const Parallel& parallel) {
  const int64_t heads = p.value_heads / p.key_heads, keys = p.sequences * p.key_heads;
  if (keys == 0) return;
  const size_t bytes = kernels.backward_scratch_bytes(p, 1);
  const AlignedMemory scratch = aligned_memory(bytes, keys * heads);
  std::vector<BackwardTask> tasks;
  int64_t most_segments = 0;
  for (int64_t i = 0; i < keys * heads; ++i) {
    const RuleTask task = task_of(p, i / heads, i % heads, 1);
    tasks.push_back({p, task, scratch.get() + aligned(bytes) * size_t(i)});
    most_segments = std::max(most_segments, segments_of(p, task.sequence));
  }
  const auto each = [&](int64_t count, auto&& run) {
    run_tasks(count, work, 0, parallel, [&](int64_t i, void*) { run(i); });
  };
  each(keys * heads, [&](int64_t i) { kernels.backward_begin(tasks[size_t(i)]); });
  for (int64_t step = 1; step <= most_segments; ++step) {
    const auto segment = [&](int64_t i) {
      return segments_of(p, tasks[size_t(i)].task.sequence) - step;
    };
    each(keys * heads, [&](int64_t i) {
      if (segment(i) >= 0) kernels.backward_segment(tasks[size_t(i)], segment(i));
    });
    each(keys, [&](int64_t key) {
      const int64_t i = key * heads;
      if (segment(i) >= 0)
        kernels.backward_store_segment(&tasks[size_t(i)], int(heads), segment(i));
    });
  }
  each(keys * heads, [&](int64_t i) { kernels.backward_end(tasks[size_t(i)]); });
}

// Tokens behind the last packed sequence belong to nobody: their gradients are zero.
template <int kRank>
void clear_tail(const Params& p, const MutableView<kRank>& x, int64_t heads, int64_t dim,
                int64_t dim_stride) {
  if (!p.cu_seqlens || !x) return;
  for (int64_t t = p.cu_seqlens[p.sequences]; t < p.tokens; ++t)
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t i = 0; i < dim; ++i)
        std::memset(x.at(t * x.stride[1] + h * x.stride[2] + i * dim_stride), 0, size_of(x.dtype));
}

}  // namespace

void backward(const Params& p, const Parallel& parallel) {
  const Kernels& kernels = p.is_double() ? kernels_f64() : kernels_f32();
  const int64_t keys = p.sequences * p.key_heads, heads = p.value_heads / p.key_heads;
  const int64_t work = 3 * p.batch * p.tokens * p.value_heads * p.dim_k * p.dim_v;
  if (heads > 1 && keys < workers_for(work, parallel))
    run_by_heads(kernels, p, work, parallel);
  else
    run_tasks(
        keys, work, kernels.backward_scratch_bytes(p, int(heads)), parallel,
        [&](int64_t i, void* mine) { run_alone(kernels, {p, task_of(p, i, 0, heads), mine}); });
  clear_tail(p, p.d_query, p.key_heads, p.dim_k, p.d_query.stride[3]);
  clear_tail(p, p.d_key, p.key_heads, p.dim_k, p.d_key.stride[3]);
  clear_tail(p, p.d_value, p.value_heads, p.dim_v, p.d_value.stride[3]);
  clear_tail(p, p.d_g, p.value_heads, 1, 0);
  clear_tail(p, p.d_beta, p.value_heads, 1, 0);
}

}  // namespace deltanet::cpu
