// SPDX-License-Identifier: Apache-2.0
//
// A tile of a state in shared memory, kColumns columns of V with all rows of K: how it is filled,
// written out, and multiplied by rows of k or q. What the scans of both passes share.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/load.cuh"
#include "cuda/simt_chunk.cuh"

namespace deltanet::cuda::simt {

// Floats of one state in scratch memory, [K][V padded to whole quads]. The padding holds zeros.
__host__ __device__ inline int64_t state_floats(int dim_k, int dim_v) {
  return int64_t(dim_k) * padded_rows(dim_v);
}

// kPitch: floats between rows in shared memory. The tile begins at column `column` of V.
template <int kColumns, int kPitch, int kThreads>
struct StateTile {
  float* S;  // [K padded][kPitch]
  int dim_k, dim_v, column;

  // From entry `n`, `head` of states [., HV, K, V] of any dtype and strides; absent: zeros, or I.
  __device__ __forceinline__ void load(const View<4>& x, int64_t n, int64_t head, bool quads,
                                       bool identity) const {
    const int64_t base = n * x.stride[0] + head * x.stride[1] + column * x.stride[3];
    if (x.data && quads) {
      for_each_entry(x.stride[2], padded_rows(dim_k), 4, [&](int r, int c) {
        const int left = r < dim_k ? dim_v - column - c : 0;
        *reinterpret_cast<float4*>(S + r * kPitch + c) = load_quad(
            x.data, x.dtype, base + r * x.stride[2] + c * x.stride[3], x.stride[3], left, true);
      });
    } else {
      for_each_entry(x.stride[2], padded_rows(dim_k), 1, [&](int r, int c) {
        const bool inside = r < dim_k && column + c < dim_v;
        float e = identity && inside && r == column + c ? 1.f : 0.f;
        if (x.data && inside)
          e = load_float(x.data, x.dtype, base + r * x.stride[2] + c * x.stride[3]);
        S[r * kPitch + c] = e;
      });
    }
  }

  __device__ __forceinline__ void store(const MutableView<4>& x, int64_t n, int64_t head,
                                        bool quads) const {
    if (!x.data) return;
    const int64_t base = n * x.stride[0] + head * x.stride[1] + column * x.stride[3];
    for_each_entry(x.stride[2], dim_k, quads ? 4 : 1, [&](int r, int c) {
      const int left = dim_v - column - c;
      const int64_t at = base + r * x.stride[2] + c * x.stride[3];
      if (quads)
        store_quad(x.data, x.dtype, at, x.stride[3], left, true,
                   *reinterpret_cast<const float4*>(S + r * kPitch + c));
      else if (left > 0)
        store_float(x.data, x.dtype, at, S[r * kPitch + c]);
    });
  }

  // From and to a state in scratch memory.
  __device__ __forceinline__ void load(const float* from) const {
    const int pitch = padded_rows(dim_v);
    for_each_entry(pitch, padded_rows(dim_k), 4, [&](int r, int c) {
      float4 e = make_float4(0.f, 0.f, 0.f, 0.f);
      if (r < dim_k && column + c < pitch)
        e = *reinterpret_cast<const float4*>(from + int64_t(r) * pitch + column + c);
      *reinterpret_cast<float4*>(S + r * kPitch + c) = e;
    });
  }
  __device__ __forceinline__ void store(float* to) const {
    const int pitch = padded_rows(dim_v);
    for_each_entry(pitch, dim_k, 4, [&](int r, int c) {
      if (column + c < pitch)
        *reinterpret_cast<float4*>(to + int64_t(r) * pitch + column + c) =
            *reinterpret_cast<const float4*>(S + r * kPitch + c);
    });
  }

  // sum = A S for rows `row` on of A and columns c to c + 3
  template <int kRows>
  __device__ __forceinline__ void multiply(const float* A, int pitch, int row, int c,
                                           float4 (&sum)[kRows]) const {
    A += row * pitch;
    const float* from = S + c;
    const int dim = padded_rows(dim_k);
#pragma unroll 2
    for (int m = 0; m < dim; m += 4) {
      float4 a[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) a[r] = *reinterpret_cast<const float4*>(A + r * pitch + m);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float4 b = *reinterpret_cast<const float4*>(from + (m + k) * kPitch);
#pragma unroll
        for (int r = 0; r < kRows; ++r) add_scaled(sum[r], component(a[r], k), b);
      }
    }
  }

  // Calls visit(row, column) for rows x `width` columns each: neighbors in memory for neighbors in
  // the block. Not unrolled: a state moves once per call, and unrolled it is a fifth of the kernel.
  template <class Visit>
  __device__ __forceinline__ void for_each_entry(int64_t row_stride, int rows, int width,
                                                 const Visit& visit) const {
    const int thread = int(threadIdx.x), per_row = kColumns / width;
    if (width == 1 && row_stride == 1) {  // K is the contiguous axis
#pragma unroll 1
      for (int c = 0; c < kColumns; ++c)
#pragma unroll 1
        for (int r = thread; r < rows; r += kThreads) visit(r, c);
    } else {
#pragma unroll 1
      for (int e = thread; e < rows * per_row; e += kThreads)
        visit(e / per_row, e % per_row * width);
    }
  }
};

}  // namespace deltanet::cuda::simt
