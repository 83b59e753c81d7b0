// SPDX-License-Identifier: Apache-2.0
//
// The gradients of the gated norm: docs/algorithm.md, equations (34) to (36), row by row.
//
//   e = dy silu(gate) weight,   dx = r (e - n mean(e n)),   dgate = dy weight n silu'(gate),
//   dweight = sum over rows of dy silu(gate) n,             with n = x r as in the forward pass
//
// Work split:  as forward; a group of threads takes kRowsOfGroup rows one after the other, and
//              keeps the sums of its columns. column_sums_kernel adds up what blocks leave.
// Numerics:    fp32; sums over the rows of a block in fp32, these sums in double. No order but that
//              of shapes.
// Memory:      reads x, gate and dy once, writes dx and dgate once, and C sums per block.
#include <cstdint>

#include "cuda/column_sums.cuh"
#include "cuda/gated_rms_norm.cuh"

namespace deltanet::cuda {
namespace {

using namespace norm;

constexpr int kRowsOfGroup = 8;

struct BackwardOptions {
  bool x_quads, gate_quads, weight_quads, grad_output_quads, d_x_quads, d_gate_quads;
  float* sums;  // [blocks, C]; null: not wanted
};

// One number's part: dx before the mean is taken off, in place of x its n, in place of dy dgate.
__device__ __forceinline__ void step(float w, float r, float& x, float gate, float& dy, float& e,
                                     float& weight_sum) {
  float value, slope;
  silu_and_slope(gate, value, slope);
  x *= r;
  const float d = dy * value;
  weight_sum = fmaf(d, x, weight_sum);
  e = d * w;
  dy = dy * w * (x * slope);
}

// Three blocks of a multiprocessor for narrow rows: ptxas by itself aims at four, and spills.
template <int kGroup, int kQuads>
__global__ void __launch_bounds__(kThreads, kQuads <= 2 ? 3 : 1)
    gated_rms_norm_backward_kernel(const __grid_constant__ GatedRmsNormBackwardParams p,
                                   const __grid_constant__ BackwardOptions options) {
  constexpr int kGroups = kThreads / kGroup;
  __shared__ GroupSum<kGroup> group_sum;
  __shared__ float4 block_sums[kGroups][kQuads * kGroup];
  const int group = int(threadIdx.x) / kGroup;

  float4 sums[kQuads];
#pragma unroll
  for (int i = 0; i < kQuads; ++i) sums[i] = make_float4(0.f, 0.f, 0.f, 0.f);
  for (int k = 0; k < kRowsOfGroup; ++k) {
    const int64_t row = (int64_t(blockIdx.x) * kRowsOfGroup + k) * kGroups + group;
    if (row >= p.rows) break;  // a whole group
    RowOf<kGroup, kQuads> x(p.x, row, p.columns, options.x_quads);
    RowOf<kGroup, kQuads> e(p.gate, row, p.columns, options.gate_quads);
    RowOf<kGroup, kQuads> dy(p.grad_output, row, p.columns, options.grad_output_quads);
    const float r = reciprocal_rms(group_sum.sum(x.squares()), p.columns, p.eps);
    float along = 0.f;
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      const int64_t c = column_of<kGroup>(i);
      const float4 w =
          load_quad(p.weight.data, p.weight.dtype, c * p.weight.stride[0], p.weight.stride[0],
                    columns_left(p.columns, c), options.weight_quads);
      float4 &n = x.quad[i], &ei = e.quad[i], &d = dy.quad[i], &sum = sums[i];
      const float4 gate = ei;
      step(w.x, r, n.x, gate.x, d.x, ei.x, sum.x);
      step(w.y, r, n.y, gate.y, d.y, ei.y, sum.y);
      step(w.z, r, n.z, gate.z, d.z, ei.z, sum.z);
      step(w.w, r, n.w, gate.w, d.w, ei.w, sum.w);
      along = fmaf(ei.x, n.x, fmaf(ei.y, n.y, fmaf(ei.z, n.z, fmaf(ei.w, n.w, along))));
    }
    const float mean = group_sum.sum(along) / float(p.columns);
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      const int64_t c = column_of<kGroup>(i);
      const int count = columns_left(p.columns, c);
      const float4 n = x.quad[i], ei = e.quad[i];
      if (p.d_x.data)
        store_row_quad(p.d_x, row, c, count, options.d_x_quads,
                       make_float4(r * fmaf(-n.x, mean, ei.x), r * fmaf(-n.y, mean, ei.y),
                                   r * fmaf(-n.z, mean, ei.z), r * fmaf(-n.w, mean, ei.w)));
      if (p.d_gate.data) store_row_quad(p.d_gate, row, c, count, options.d_gate_quads, dy.quad[i]);
    }
  }

  if (!options.sums) return;
#pragma unroll
  for (int i = 0; i < kQuads; ++i) block_sums[group][threadIdx.x % kGroup + i * kGroup] = sums[i];
  __syncthreads();  // every group's sums are there
  const float* const from = reinterpret_cast<const float*>(block_sums);
  for (int c = int(threadIdx.x); c < p.columns; c += kThreads) {
    float sum = 0.f;
    for (int g = 0; g < kGroups; ++g) sum += from[g * (4 * kQuads * kGroup) + c];
    options.sums[int64_t(blockIdx.x) * p.columns + c] = sum;
  }
}

struct StoreWeight {
  MutableView<1> d_weight;
  __device__ void operator()(int64_t c, float sum) const {
    store_float(d_weight.data, d_weight.dtype, c * d_weight.stride[0], sum);
  }
};

int64_t groups_of_block(const GatedRmsNormParams& p) { return p.columns <= 1024 ? 8 : 1; }

int64_t blocks_of(const GatedRmsNormParams& p) {
  const int64_t rows = groups_of_block(p) * kRowsOfGroup;
  return (p.rows + rows - 1) / rows;
}

template <int kGroup, int kQuads>
void run(const GatedRmsNormBackwardParams& p, float* sums, cudaStream_t stream) {
  const BackwardOptions options = {quads_along(p.x, 1),
                                   quads_along(p.gate, 1),
                                   quads_along(p.weight, 0),
                                   quads_along(p.grad_output, 1),
                                   quads_along(p.d_x, 1),
                                   quads_along(p.d_gate, 1),
                                   sums};
  launch("gated_rms_norm_backward", gated_rms_norm_backward_kernel<kGroup, kQuads>, blocks_of(p),
         kThreads,
         /*dynamic_shared=*/0, stream, p, options);
}

}  // namespace

size_t gated_rms_norm_backward_workspace(const GatedRmsNormBackwardParams& p) {
  if (!p.d_weight) return 0;
  const size_t bytes = size_t(blocks_of(p) * p.columns) * sizeof(float);
  return (bytes + 255) / 256 * 256;
}

void gated_rms_norm_backward(const GatedRmsNormBackwardParams& p, void* workspace,
                             cudaStream_t stream) {
  check_supported("gated_rms_norm_backward", p);
  float* const sums = p.d_weight ? static_cast<float*>(workspace) : nullptr;
  if (p.columns <= 128)
    run<32, 1>(p, sums, stream);
  else if (p.columns <= 256)
    run<32, 2>(p, sums, stream);
  else if (p.columns <= 1024)
    run<32, 8>(p, sums, stream);
  else
    run<kThreads, 8>(p, sums, stream);
  if (p.d_weight)
    sum_columns("gated_rms_norm_backward", sums, blocks_of(p), p.columns, StoreWeight{p.d_weight},
                stream);
}

}  // namespace deltanet::cuda
