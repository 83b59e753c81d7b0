// SPDX-License-Identifier: Apache-2.0
#include "cuda/simt_gradients.cuh"

#include "cuda/launch.cuh"
#include "cuda/simt_backward.h"

namespace deltanet::cuda::simt {
namespace {

template <int kColumns>
void run(const RuleBackwardParams& p, const GradientArguments& x, cudaStream_t stream) {
  using Traits = GradientTraits<kColumns>;
  launch("chunk_gradients", gradient_kernel<kColumns>, max_chunks(p, kStrip) * p.value_heads,
         Traits::kThreads, Traits::shared_bytes(p.dim_k), stream, p, x);
}

}  // namespace

void gradients(const RuleBackwardParams& p, GradientArguments x, cudaStream_t stream) {
  x.query_quads = quads_along(p.query, 3);
  x.key_quads = quads_along(p.key, 3);
  x.value_quads = quads_along(p.value, 3);
  x.grad_quads = quads_along(p.grad_output, 3);
  // Wider tiles read k, q and what was prepared less often. Two of the states must fit.
  const int64_t shared = shared_memory();
  if (p.dim_k <= 128 && p.dim_v > 8 && GradientTraits<16>::shared_bytes(p.dim_k) <= shared)
    return run<16>(p, x, stream);
  if (p.dim_v > 4 && GradientTraits<8>::shared_bytes(p.dim_k) <= shared)
    return run<8>(p, x, stream);
  run<4>(p, x, stream);
}

}  // namespace deltanet::cuda::simt
