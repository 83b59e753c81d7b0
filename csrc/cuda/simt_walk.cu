// SPDX-License-Identifier: Apache-2.0
#include "cuda/simt_walk.cuh"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "cuda/launch.cuh"
#include "cuda/simt_backward.h"

namespace deltanet::cuda::simt {
namespace {

template <int kColumns>
void run(const RuleBackwardParams& p, const WalkArguments& x, cudaStream_t stream) {
  using Traits = GradientTraits<kColumns>;
  launch("chunk_walk", walk_kernel<kColumns>, x.blocks, Traits::kThreads,
         Traits::shared_bytes(p.dim_k), stream, p, x);
}

}  // namespace

WalkArguments plan_walk(const RuleBackwardParams& p, bool query, bool key) {
  WalkArguments x = {};
  x.items = (p.sequences + (p.packed() ? 1 : 0)) * p.key_heads;
  x.blocks = std::min(x.items, gradient_blocks_at_once());
  const int heads = int(p.value_heads / p.key_heads);
  x.slots = GradientSlots(p.dim_k, gradient_columns(p), query, key, /*with_totals=*/heads > 1);
  x.slots.add_walk(heads, std::max<int64_t>((p.tokens + kStrip - 1) / kStrip, 1),
                   state_floats(p.dim_k, p.dim_v));
  return x;
}

void walk(const RuleBackwardParams& p, WalkArguments x, cudaStream_t stream) {
  if (p.tokens > 0x7fffffff)
    throw std::invalid_argument("chunk_walk: " + std::to_string(p.tokens) +
                                " tokens; supported: below 2^31");
  x.query_quads = quads_along(p.query, 3);
  x.key_quads = quads_along(p.key, 3);
  x.value_quads = quads_along(p.value, 3);
  x.grad_quads = quads_along(p.grad_output, 3);
  x.initial_quads = quads_along(p.initial_state, 3);
  x.saved_quads = quads_along(p.states, 3);
  x.final_quads = quads_along(p.grad_final_state, 3);
  x.d_value_quads = quads_along(p.d_value, 3);
  x.d_initial_quads = quads_along(p.d_initial_state, 3);
  if (gradient_columns(p) == 16) return run<16>(p, x, stream);
  run<8>(p, x, stream);
}

}  // namespace deltanet::cuda::simt
