// SPDX-License-Identifier: Apache-2.0
#include "cuda/simt_adjoint.cuh"

#include "cuda/launch.cuh"
#include "cuda/simt_adjoint_scan.cuh"
#include "cuda/simt_backward.h"

namespace deltanet::cuda::simt {
namespace {

template <int kColumns>
int64_t blocks_of(const RuleBackwardParams& p, const AdjointArguments& x) {
  return x.segments * p.sequences * p.value_heads * adjoint_tiles<kColumns>(p, x);
}

template <int kColumns>
void run(const RuleBackwardParams& p, const AdjointArguments& x, cudaStream_t stream) {
  using Traits = AdjointTraits<kColumns>;
  launch("chunk_adjoint", adjoint_kernel<kColumns>, blocks_of<kColumns>(p, x), Traits::kThreads,
         Traits::shared_bytes(p.dim_k), stream, p, x);
}

void run_all(const RuleBackwardParams& p, const AdjointArguments& x, cudaStream_t stream) {
  // Narrow tiles while blocks would leave processors idle. The results do not depend on it.
  const bool wide = p.dim_v > 16 && AdjointTraits<32>::shared_bytes(p.dim_k) <= shared_memory() &&
                    blocks_of<32>(p, x) >= processors();
  if (wide) return run<32>(p, x, stream);
  run<16>(p, x, stream);
}

}  // namespace

void adjoint(const RuleBackwardParams& p, AdjointArguments x, cudaStream_t stream) {
  x.query_quads = quads_along(p.query, 3);
  x.key_quads = quads_along(p.key, 3);
  x.grad_quads = quads_along(p.grad_output, 3);
  x.value_quads = quads_along(p.d_value, 3);
  x.final_quads = quads_along(p.grad_final_state, 3);
  x.initial_quads = quads_along(p.d_initial_state, 3);
  if (x.segments > 1) {
    x.making_maps = true;
    run_all(p, x, stream);
    x.making_maps = false;
    launch("adjoint_scan", adjoint_scan_kernel,
           p.sequences * p.value_heads * column_tiles(p.dim_v, AdjointScanTraits::kColumns),
           AdjointScanTraits::kThreads, AdjointScanTraits::shared_bytes(p.dim_k), stream, p, x);
  }
  run_all(p, x, stream);
}

}  // namespace deltanet::cuda::simt
