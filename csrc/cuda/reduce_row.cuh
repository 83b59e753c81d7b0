// SPDX-License-Identifier: Apache-2.0
//
// dQ or dK of one token and key head, from sums over V: docs/algorithm.md, equations (25) and (26).
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/load.cuh"
#include "cuda/rule_params.cuh"
#include "cuda/simt_chunk.cuh"

namespace deltanet::cuda::simt {

// By one warp. x: q or k; `sums`: of the first of `group` value heads, `stride` floats apart.
__device__ __forceinline__ void reduce_row(const RuleParams& p, const View<4>& x,
                                           const MutableView<4>& to, int64_t batch, int64_t t,
                                           int64_t key_head, const float* sums, int64_t stride,
                                           int group) {
  const int lane = int(threadIdx.x) % 32;
  const int64_t from = batch * x.stride[0] + t * x.stride[1] + key_head * x.stride[2];
  const auto row_at = [&](int k) { return load_float(x.data, x.dtype, from + k * x.stride[3]); };
  const auto sum_at = [&](int k) {
    float d = 0.f;
    for (int h = 0; h < group; ++h) d += sums[h * stride + k];
    return d;
  };
  float factor = 0.f;
  if (p.l2norm) {
    float squares = 0.f, along = 0.f;
#pragma unroll 1
    for (int k = lane; k < p.dim_k; k += 32) {
      const float row = row_at(k);
      squares = fmaf(row, row, squares);
      along = fmaf(row, sum_at(k), along);
    }
    const float r = reciprocal_norm(sum_of_lanes<32>(squares));
    factor = r * (r * sum_of_lanes<32>(along));
  }
  const int64_t at = batch * to.stride[0] + t * to.stride[1] + key_head * to.stride[2];
#pragma unroll 1
  for (int k = lane; k < p.dim_k; k += 32) {
    float d = sum_at(k);
    if (p.l2norm) d = fmaf(-row_at(k), factor, d);
    store_float(to.data, to.dtype, at + k * to.stride[3], d);
  }
}

}  // namespace deltanet::cuda::simt
