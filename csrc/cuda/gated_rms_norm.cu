// SPDX-License-Identifier: Apache-2.0
//
// The gated norm behind the rule: docs/algorithm.md, equation (30), row by row.
//
//   n = x r with r = rsqrt(mean(x^2) + eps),   y = weight n silu(gate)
//
// Work split:  kGroup threads = one row: a warp up to 1024 columns, a block above. A thread has
//              every kGroup-th quad of columns, kept in registers.
// Numerics:    fp32; a row's sums depend on nothing but the row.
// Memory:      reads x and gate once, writes y once, eight or sixteen bytes at a time.
#include "cuda/gated_rms_norm.h"

#include <cstdint>

#include "cuda/gated_rms_norm.cuh"
#include "cuda/launch.cuh"

namespace deltanet::cuda {
namespace {

using namespace norm;

struct ForwardQuads {
  bool x, gate, weight, output;
};

template <int kGroup, int kQuads>
__global__ void __launch_bounds__(kThreads)
    gated_rms_norm_kernel(const __grid_constant__ GatedRmsNormParams p, ForwardQuads quads) {
  __shared__ GroupSum<kGroup> shared;
  const int64_t row = int64_t(blockIdx.x) * (kThreads / kGroup) + threadIdx.x / kGroup;
  if (row >= p.rows) return;  // a whole group
  const RowOf<kGroup, kQuads> x(p.x, row, p.columns, quads.x);
  const RowOf<kGroup, kQuads> gate(p.gate, row, p.columns, quads.gate);
  const float r = reciprocal_rms(shared.sum(x.squares()), p.columns, p.eps);
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    const int64_t c = column_of<kGroup>(i);
    const int count = columns_left(p.columns, c);
    if (count == 0) continue;
    const float4 w = load_quad(p.weight.data, p.weight.dtype, c * p.weight.stride[0],
                               p.weight.stride[0], count, quads.weight);
    const float4 y = make_float4(w.x * (x.quad[i].x * r) * silu(gate.quad[i].x),
                                 w.y * (x.quad[i].y * r) * silu(gate.quad[i].y),
                                 w.z * (x.quad[i].z * r) * silu(gate.quad[i].z),
                                 w.w * (x.quad[i].w * r) * silu(gate.quad[i].w));
    store_row_quad(p.output, row, c, count, quads.output, y);
  }
}

template <int kGroup, int kQuads>
void run(const GatedRmsNormParams& p, cudaStream_t stream) {
  constexpr int kRows = kThreads / kGroup;
  const ForwardQuads quads = {quads_along(p.x, 1), quads_along(p.gate, 1), quads_along(p.weight, 0),
                              quads_along(p.output, 1)};
  launch("gated_rms_norm", gated_rms_norm_kernel<kGroup, kQuads>, (p.rows + kRows - 1) / kRows,
         kThreads,
         /*dynamic_shared=*/0, stream, p, quads);
}

}  // namespace

void gated_rms_norm(const GatedRmsNormParams& p, cudaStream_t stream) {
  check_supported("gated_rms_norm", p);
  if (p.columns <= 128) return run<32, 1>(p, stream);
  if (p.columns <= 256) return run<32, 2>(p, stream);
  if (p.columns <= 1024) return run<32, 8>(p, stream);
  run<kThreads, 8>(p, stream);
}

}  // namespace deltanet::cuda
