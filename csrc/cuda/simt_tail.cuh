// SPDX-License-Identifier: Apache-2.0
//
// The tokens behind the last packed sequence: their gradients are zeros.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/load.cuh"
#include "cuda/rule_params.cuh"

namespace deltanet::cuda::simt {

// Zeros for one token and head, by one warp.
__device__ __forceinline__ void clear_row(const MutableView<4>& to, int64_t t, int64_t head,
                                          int dim) {
  if (!to.data) return;
  for (int k = int(threadIdx.x) % 32; k < dim; k += 32)
    store_float(to.data, to.dtype, t * to.stride[1] + head * to.stride[2] + k * to.stride[3], 0.f);
}
__device__ __forceinline__ void clear_number(const MutableView<3>& to, int64_t t, int64_t head) {
  if (to.data && threadIdx.x % 32 == 0)
    store_float(to.data, to.dtype, t * to.stride[1] + head * to.stride[2], 0.f);
}

// Tokens begin to end of a key head and its value heads, by a block of kWarps warps.
template <int kWarps>
__device__ __forceinline__ void clear_tokens(const RuleBackwardParams& p, int64_t begin,
                                             int64_t end, int64_t key_head) {
  const int group = int(unsigned(p.value_heads) / unsigned(p.key_heads));
  const int64_t head = key_head * group;
  for (int64_t t = begin + int(threadIdx.x) / 32; t < end; t += kWarps) {
    clear_row(p.d_query, t, key_head, p.dim_k);
    clear_row(p.d_key, t, key_head, p.dim_k);
    for (int h = 0; h < group; ++h) {
      clear_row(p.d_value, t, head + h, p.dim_v);
      clear_number(p.d_g, t, head + h);
      clear_number(p.d_beta, t, head + h);
    }
  }
}

}  // namespace deltanet::cuda::simt
