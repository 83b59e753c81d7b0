// SPDX-License-Identifier: Apache-2.0
#include "cpu/forward.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "cpu/registry.h"
#include "cpu/tasks.h"

namespace deltanet::cpu {
namespace {

// Tasks per worker at which it no longer matters that they do not divide evenly.
constexpr int64_t kManyTasks = 3;

// Working states of one task, all value heads together, stay in a core's L2.
constexpr int64_t kMaxStateBytes = 256 * 1024;

// Up to this many tokens the token-by-token kernel is faster: a chunk costs the same however full
// it is.
constexpr int64_t kShortRun = 4;

// Tasks that the token-by-token kernel is given at once: of the first and the last state of them
// one sweep has nothing to overlap with.
constexpr int64_t kTasksTogether = 32;

// How many neighboring units of work (a sequence, a value head, column_granularity columns) form a
// task: as many as possible while every worker has enough, since tasks of one key head each compute
// its products and pack its rows (a tenth of the work for 64 columns). The units themselves depend
// on shapes alone, and no grouping changes a bit: heads know nothing of each other, and units end
// between two tiles of the widest kind.
class RulePlan {
 public:
  RulePlan(const GatedDeltaRuleParams& p, int column_granularity, int workers)
      : p_(p), workers_(workers) {
    heads_per_key_ = p.value_heads / p.key_heads;
    const int64_t state_bytes = int64_t(p.dim_k) * p.dim_v * (p.is_double() ? 8 : 4);
    // As many value heads as possible share one task, and with it K K^T, Q K^T and the rows of q
    // and k.
    group_ = std::clamp<int64_t>(kMaxStateBytes / state_bytes, 1, heads_per_key_);
    columns_ = p.dim_v;
    while (group_ > 1 && !enough()) group_ = (group_ + 1) / 2;
    while (columns_ > column_granularity && !enough())
      columns_ = (columns_ / column_granularity + 1) / 2 * column_granularity;
  }
  int64_t tasks() const { return p_.sequences * p_.key_heads * groups() * tiles(); }
  int heads_per_task() const { return int(group_); }
  int columns_per_task() const { return columns_; }

  RuleTask task(int64_t i) const {
    const int64_t tile = i % tiles(), group = i / tiles() % groups();
    const int64_t key = i / tiles() / groups();
    RuleTask t;
    t.sequence = key / p_.key_heads;
    t.key_head = key % p_.key_heads;
    t.value_head_begin = t.key_head * heads_per_key_ + group * group_;
    t.value_head_end = std::min(t.value_head_begin + group_, (t.key_head + 1) * heads_per_key_);
    t.column_begin = int(tile) * columns_;
    t.column_end = std::min(t.column_begin + columns_, p_.dim_v);
    return t;
  }

 private:
  bool enough() const {
    const bool alike = !p_.cu_seqlens && heads_per_key_ % group_ == 0 && p_.dim_v % columns_ == 0;
    return workers_ == 1 || tasks() >= kManyTasks * workers_ || (alike && tasks() % workers_ == 0);
  }
  int64_t groups() const { return (heads_per_key_ + group_ - 1) / group_; }
  int64_t tiles() const { return (p_.dim_v + columns_ - 1) / columns_; }

  const GatedDeltaRuleParams& p_;
  int64_t workers_;
  int64_t heads_per_key_, group_;
  int columns_;
};

// Tokens behind the last packed sequence belong to nobody: their outputs are zero.
void clear_tail(const GatedDeltaRuleParams& p) {
  if (!p.cu_seqlens || !p.output) return;
  for (int64_t t = p.cu_seqlens[p.sequences]; t < p.tokens; ++t)
    for (int64_t h = 0; h < p.value_heads; ++h)
      for (int j = 0; j < p.dim_v; ++j)
        std::memset(
            p.output.at(t * p.output.stride[1] + h * p.output.stride[2] + j * p.output.stride[3]),
            0, size_of(p.output.dtype));
}

// Places of saved states that no sequence has a state for hold zeros, not leftovers.
void clear_unused_states(const GatedDeltaRuleParams& p) {
  if (!p.saved_states) return;
  const int64_t places = p.batch * (p.tokens / kSegmentTokens);
  std::vector<bool> used(static_cast<size_t>(places));
  for (int64_t n = 0; n < p.sequences; ++n)
    for (int64_t t = p.sequence_begin(n) + kSegmentTokens; t < p.sequence_end(n);
         t += kSegmentTokens)
      used[size_t(p.saved_state(p.sequence_batch(n), t))] = true;
  const size_t bytes = size_t(p.saved_states.stride[0] * size_of(p.saved_states.dtype));
  for (int64_t i = 0; i < places; ++i)
    if (!used[size_t(i)]) std::memset(p.saved_states.at(i * p.saved_states.stride[0]), 0, bytes);
}

// Up to a small factor, and no more than that is asked of it.
int64_t multiply_adds(const GatedDeltaRuleParams& p) {
  return p.batch * p.tokens * p.value_heads * p.dim_k * p.dim_v;
}

const Kernels& kernels_for(const GatedDeltaRuleParams& p) {
  return p.is_double() ? kernels_f64() : kernels_f32();
}

// Pairs of bf16 need no rounding of q and k then. What a backward pass starts from is exact, as the
// states that it makes again are.
bool may_multiply_bf16(const GatedDeltaRuleParams& p) {
  const auto is_bf16 = [](const View<4>& x) { return x && x.dtype == DType::kBFloat16; };
  return is_bf16(p.query) && is_bf16(p.key) && is_bf16(p.value) && !p.saved_states;
}

}  // namespace

void chunk_forward(const GatedDeltaRuleParams& p, const Parallel& parallel) {
  const Kernels& kernels = kernels_for(p);
  const RulePlan plan(p, kernels.column_granularity, workers_for(multiply_adds(p), parallel));
  const Bf16Kernels* bf16 = may_multiply_bf16(p) ? kernels_bf16() : nullptr;
  const auto chunk = bf16 ? bf16->chunk_forward : kernels.chunk_forward;
  const auto chunk_scratch_bytes = bf16 ? bf16->scratch_bytes : kernels.chunk_scratch_bytes;
  const size_t scratch =
      std::max(chunk_scratch_bytes(p, plan.heads_per_task(), plan.columns_per_task()),
               kernels.recurrent_scratch_bytes(p, plan.columns_per_task()));
  const bool may_be_short = p.query && p.value;
  run_tasks(plan.tasks(), multiply_adds(p), scratch, parallel, [&](int64_t i, void* mine) {
    const RuleTask task = plan.task(i);
    const int64_t tokens = p.sequence_end(task.sequence) - p.sequence_begin(task.sequence);
    if (may_be_short && tokens <= kShortRun)
      kernels.recurrent_forward(p, &task, 1, mine);
    else
      chunk(p, task, mine);
  });
  clear_tail(p);
  clear_unused_states(p);
}

void recurrent_forward(const GatedDeltaRuleParams& p, const Parallel& parallel) {
  const Kernels& kernels = kernels_for(p);
  const int workers = workers_for(multiply_adds(p), parallel);
  const RulePlan plan(p, kernels.column_granularity, workers);
  const int64_t tasks = plan.tasks();
  const int64_t together = std::clamp<int64_t>((tasks + workers - 1) / workers, 1, kTasksTogether);
  run_tasks((tasks + together - 1) / together, multiply_adds(p),
            kernels.recurrent_scratch_bytes(p, plan.columns_per_task()), parallel,
            [&](int64_t i, void* mine) {
              RuleTask some[kTasksTogether];
              const int64_t first = i * together, count = std::min(together, tasks - first);
              for (int64_t j = 0; j < count; ++j) some[j] = plan.task(first + j);
              kernels.recurrent_forward(p, some, int(count), mine);
            });
  clear_tail(p);
  clear_unused_states(p);
}

void triangular_inverse(const TriangularInverseParams& p, const Parallel& parallel) {
  const Kernels& kernels = p.dtype == DType::kFloat64 ? kernels_f64() : kernels_f32();
  run_tasks(p.count, p.count * p.size * p.size * p.size / 6, kernels.inverse_scratch_bytes(p.size),
            parallel, [&](int64_t i, void* mine) { kernels.triangular_inverse(p, i, mine); });
}

}  // namespace deltanet::cpu
