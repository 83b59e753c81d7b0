// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include "cpu/forward.h"
#include "cpu/registry.h"
#include "cpu/tasks.h"

namespace deltanet::cpu {
namespace {

// Tokens behind the last packed sequence belong to nobody: their gradients are zero.
template <int kRank>
void clear_tail(const GatedDeltaRuleBackwardParams& p, const MutableView<kRank>& x, int64_t heads,
                int64_t dim, int64_t dim_stride) {
  if (!p.cu_seqlens || !x) return;
  for (int64_t t = p.cu_seqlens[p.sequences]; t < p.tokens; ++t)
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t i = 0; i < dim; ++i)
        std::memset(x.at(t * x.stride[1] + h * x.stride[2] + i * dim_stride), 0, size_of(x.dtype));
}

}  // namespace

void backward(const GatedDeltaRuleBackwardParams& p, const Parallel& parallel) {
  const Kernels& kernels = p.is_double() ? kernels_f64() : kernels_f32();
  const int64_t heads_per_key = p.value_heads / p.key_heads;
  const int64_t work = 3 * p.batch * p.tokens * p.value_heads * p.dim_k * p.dim_v;
  run_tasks(p.sequences * p.key_heads, work, kernels.backward_scratch_bytes(p), parallel,
            [&](int64_t i, void* mine) {
              RuleTask task;
              task.sequence = i / p.key_heads;
              task.key_head = i % p.key_heads;
              task.value_head_begin = task.key_head * heads_per_key;
              task.value_head_end = task.value_head_begin + heads_per_key;
              task.column_begin = 0;
              task.column_end = p.dim_v;
              kernels.backward(p, task, mine);
            });
  clear_tail(p, p.d_query, p.key_heads, p.dim_k, p.d_query.stride[3]);
  clear_tail(p, p.d_key, p.key_heads, p.dim_k, p.d_key.stride[3]);
  clear_tail(p, p.d_value, p.value_heads, p.dim_v, p.d_value.stride[3]);
  clear_tail(p, p.d_g, p.value_heads, 1, 0);
  clear_tail(p, p.d_beta, p.value_heads, 1, 0);
}

}  // namespace deltanet::cpu
