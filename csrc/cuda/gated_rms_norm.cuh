// SPDX-License-Identifier: Apache-2.0
//
// What the kernels of the gated norm and of its gradients share: rows in registers, and sums over
// the threads of a row.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "cuda/gated_rms_norm.h"
#include "cuda/load.cuh"
#include "cuda/silu.cuh"

namespace deltanet::cuda::norm {

constexpr int kThreads = 256;  // of a block

// The first column of quad i of this thread.
template <int kGroup>
__device__ __forceinline__ int64_t column_of(int i) {
  return 4 * (int64_t(threadIdx.x % kGroup) + int64_t(i) * kGroup);
}
__device__ __forceinline__ int columns_left(int64_t columns, int64_t c) {
  return int(columns - c < 0 ? 0 : columns - c < 4 ? columns - c : 4);
}

// This thread's share of a row, as fp32; zeros behind the last column.
template <int kGroup, int kQuads>
struct RowOf {
  float4 quad[kQuads];

  __device__ RowOf(const View<2>& x, int64_t row, int64_t columns, bool quads) {
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      const int64_t c = column_of<kGroup>(i);
      quad[i] = load_quad(x.data, x.dtype, row * x.stride[0] + c * x.stride[1], x.stride[1],
                          columns_left(columns, c), quads);
    }
  }
  __device__ float squares() const {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      sum = fmaf(quad[i].x, quad[i].x, sum);
      sum = fmaf(quad[i].y, quad[i].y, sum);
      sum = fmaf(quad[i].z, quad[i].z, sum);
      sum = fmaf(quad[i].w, quad[i].w, sum);
    }
    return sum;
  }
};

// A sum over the threads of a row, the same for each of them. All of them call it.
template <int kGroup>
struct GroupSum {
  static_assert(kGroup == 32 || kGroup == kThreads, "a warp or a block");
  float of_warp[kGroup == 32 ? 1 : kThreads / 32];

  __device__ float sum(float x) {
#pragma unroll
    for (int i = 16; i > 0; i /= 2) x += __shfl_xor_sync(0xffffffffu, x, i);
    if constexpr (kGroup == 32) return x;
    __syncthreads();  // the sums before have been read
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = x;
    __syncthreads();  // every warp's sum is there
    x = 0.f;
#pragma unroll
    for (const float part : of_warp) x += part;
    return x;
  }
};

__device__ __forceinline__ float reciprocal_rms(float squares, int64_t columns, double eps) {
  return 1.f / sqrtf(squares / float(columns) + float(eps));
}

__device__ __forceinline__ void store_row_quad(const MutableView<2>& to, int64_t row, int64_t c,
                                               int count, bool quads, float4 x) {
  store_quad(to.data, to.dtype, row * to.stride[0] + c * to.stride[1], to.stride[1], count, quads,
             x);
}

inline void check_supported(const char* op, const GatedRmsNormParams& p) {
  if (p.is_double())
    throw std::invalid_argument(std::string(op) +
                                ": x is float64; supported on CUDA: float32, bfloat16, float16 "
                                "(float64 runs on the CPU)");
  if (p.columns < 1 || p.columns > kMaxNormColumns)
    throw std::invalid_argument(std::string(op) + ": x has " + std::to_string(p.columns) +
                                " columns; supported on CUDA: 1 to " +
                                std::to_string(kMaxNormColumns));
}

}  // namespace deltanet::cuda::norm
