// SPDX-License-Identifier: Apache-2.0
#include "cuda/simt_gradients.cuh"

#include <algorithm>

#include "cuda/launch.cuh"
#include "cuda/simt_backward.h"

namespace deltanet::cuda::simt {
namespace {

template <int kColumns>
void run(const RuleBackwardParams& p, const GradientArguments& x, cudaStream_t stream) {
  using Traits = GradientTraits<kColumns>;
  launch("chunk_gradients", gradient_kernel<kColumns>, x.blocks, Traits::kThreads,
         Traits::shared_bytes(p.dim_k), stream, p, x);
}

}  // namespace

// Wider tiles read k, q and what was prepared less often. Two of the states must fit.
int gradient_columns(const RuleParams& p) {
  const bool wide =
      p.dim_k <= 128 && p.dim_v > 8 && GradientTraits<16>::shared_bytes(p.dim_k) <= shared_memory();
  return wide ? 16 : 8;
}

int64_t gradient_blocks_at_once() { return processors() * GradientTraits<16>::kMinBlocks; }

// Bits do not depend on it.
GradientArguments plan_gradients(const RuleBackwardParams& p, bool query, bool key) {
  const int64_t strips = max_chunks(p, kStrip), group = p.value_heads / p.key_heads;
  const int64_t at_once = gradient_blocks_at_once();
  // A block for all value heads of a key needs no sums in memory. Not where half of the blocks that
  // the device holds would be missing.
  const bool together = group == 1 || 2 * strips * p.key_heads >= at_once;
  GradientArguments x = {};
  x.heads_of_item = int(together ? group : 1);
  x.items = strips * p.value_heads / x.heads_of_item;
  x.blocks = together ? std::min(x.items, at_once) : x.items;
  x.slots =
      GradientSlots(p.dim_k, gradient_columns(p), query, key, /*with_totals=*/x.heads_of_item > 1);
  return x;
}

void gradients(const RuleBackwardParams& p, GradientArguments x, cudaStream_t stream) {
  x.query_quads = quads_along(p.query, 3);
  x.key_quads = quads_along(p.key, 3);
  x.value_quads = quads_along(p.value, 3);
  x.grad_quads = quads_along(p.grad_output, 3);
  if (gradient_columns(p) == 16) return run<16>(p, x, stream);
  run<8>(p, x, stream);
}

}  // namespace deltanet::cuda::simt
