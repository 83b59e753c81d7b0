// SPDX-License-Identifier: Apache-2.0
//
// A chunk of the fp32 kernels: how large it is, what is prepared for it, how its rows come to
// shared memory, and the arithmetic of quads that all of them use.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/load.cuh"
#include "cuda/rule_params.cuh"

namespace deltanet::cuda::simt {

// 16 tokens: substitution on the right-hand side then costs less than a product with T would, and T
// is never formed.
constexpr int kChunk = 16;

// One (chunk, value head) in the workspace.
struct alignas(16) Prepared {
  float L[kChunk][kChunk];      // j < i, zero elsewhere
  float P[kChunk][kChunk + 4];  // j <= i, zero elsewhere; two rows at a time: different banks
  float value[kChunk];          // b_i
  float key[kChunk];            // b_i e^{G_i} / |k_i|
  float query[kChunk];          // scale e^{G_i} / |q_i|
  float update[kChunk];         // e^{G_end - G_i} / |k_i|
  // A chunk is cut where the decay rises steeply (see cut_chunk). These are of token i's piece.
  float keep[kChunk];   // e^{G_end}
  int32_t end[kChunk];  // one past its last token
  // [0]: rows whose norm overflows, which count as zeros: bit i is k_i, bit kChunk + i is q_i. The
  // others fill the struct.
  uint32_t zero_rows[4];
};

// What the backward pass needs besides.
struct alignas(16) PreparedGradient {
  float D[kChunk][kChunk];   // D_ij / |k_j|         j <= i, zero elsewhere
  float KK[kChunk][kChunk];  // (k_i . k_j) D_ij / (|k_i| |k_j|)  j < i, zero elsewhere: L without b
  float decay[kChunk];       // e^{G_i} / |k_i|
  float k_norm[kChunk];      // 1 / |k_i|
  float q_scale[kChunk];     // scale / |q_i|
};

// Rows of K in shared memory, K padded to a multiple of 4 with zeros.
__host__ __device__ inline int padded_rows(int dim_k) { return (dim_k + 3) / 4 * 4; }

// Floats between rows of k or q in shared memory. 4 mod 32 for the usual head dims: 8 rows read at
// one column hit 32 banks.
__host__ __device__ inline int row_pitch(int dim_k) { return padded_rows(dim_k) + 4; }

// The first token of the piece that ends at `end`. All threads read the same.
__device__ __forceinline__ int piece_before(const Prepared& prepared, int end) {
  int first = end - 1;
  while (first > 0 && prepared.end[first - 1] == end) --first;
  return first;
}

// ---- arithmetic
// ----------------------------------------------------------------------------------

__device__ __forceinline__ float component(float4 x, int k) {
  return k == 0 ? x.x : k == 1 ? x.y : k == 2 ? x.z : x.w;
}
__device__ __forceinline__ void add_scaled(float4& sum, float a, float4 b) {
  sum.x = fmaf(a, b.x, sum.x);
  sum.y = fmaf(a, b.y, sum.y);
  sum.z = fmaf(a, b.z, sum.z);
  sum.w = fmaf(a, b.w, sum.w);
}
__device__ __forceinline__ float4 scaled(float a, float4 x) {
  return make_float4(a * x.x, a * x.y, a * x.z, a * x.w);
}

// Over groups of kWidth neighbors of a warp, all of whose lanes call it.
template <int kWidth, class T>
__device__ __forceinline__ T sum_of_lanes(T x) {
#pragma unroll
  for (int i = kWidth / 2; i > 0; i /= 2) x += __shfl_xor_sync(0xffffffffu, x, i);
  return x;
}

// ---- rows
// ----------------------------------------------------------------------------------------

// Rows of one head to shared memory as fp32, zero-padded to whole quads and `kChunk` rows: warps
// take rows, lanes take quads.
__device__ __forceinline__ void load_rows(const View<4>& x, int64_t batch, int64_t first, int count,
                                          int64_t head, int dim, bool quads, float* to, int pitch,
                                          int threads) {
  const int lane = int(threadIdx.x) % 32;
  const int64_t base = batch * x.stride[0] + first * x.stride[1] + head * x.stride[2];
  for (int row = int(threadIdx.x) / 32; row < kChunk; row += threads / 32)
    for (int c = 4 * lane; c < dim; c += 4 * 32) {
      float4 e = make_float4(0.f, 0.f, 0.f, 0.f);
      if (row < count && x.data)
        e = load_quad(x.data, x.dtype, base + row * x.stride[1] + c * x.stride[3], x.stride[3],
                      dim - c, quads);
      *reinterpret_cast<float4*>(to + row * pitch + c) = e;
    }
}

// Multiplies rows by zero, where their bits are set: later their products, which overflow, could
// not be told from 0 times infinity. Rows with infinities become NaN.
__device__ __forceinline__ void clear_rows(float* rows, int pitch, int dim, uint32_t which,
                                           int threads) {
#pragma unroll 1
  for (int row = int(threadIdx.x) / 32; row < kChunk; row += threads / 32) {
    if ((which >> row & 1) == 0) continue;
#pragma unroll 1
    for (int c = int(threadIdx.x) % 32; c < dim; c += 32) rows[row * pitch + c] *= 0.f;
  }
}
// Rows of k and (where `q`) of q that what was prepared says count as zeros. All threads call it
// once both are complete; they are complete behind it.
__device__ __forceinline__ void clear_overflowing(const Prepared& prepared, float* k, float* q,
                                                  int pitch, int dim, int threads) {
  const uint32_t which = prepared.zero_rows[0];
  if (which == 0) return;
  clear_rows(k, pitch, dim, which, threads);
  if (q) clear_rows(q, pitch, dim, which >> kChunk, threads);
  __syncthreads();  // rows are complete
}

// Rows of one head, kColumns columns from `column` on, to shared memory as fp32; zeros beyond.
template <int kColumns, int kPitch, int kThreads>
__device__ __forceinline__ void load_columns(const View<4>& x, int64_t batch, int64_t first,
                                             int count, int64_t head, int column, int dim,
                                             bool quads, float* to) {
  const int64_t base =
      batch * x.stride[0] + first * x.stride[1] + head * x.stride[2] + column * x.stride[3];
  for (int e = int(threadIdx.x); e < kChunk * (kColumns / 4); e += kThreads) {
    const int row = e / (kColumns / 4), c = e % (kColumns / 4) * 4;
    const int left = x.data && row < count ? dim - column - c : 0;
    *reinterpret_cast<float4*>(to + row * kPitch + c) = load_quad(
        x.data, x.dtype, base + row * x.stride[1] + c * x.stride[3], x.stride[3], left, quads);
  }
}

template <int kThreads, class T>
__device__ __forceinline__ void load_prepared(const T* from, T& to) {
  for (int e = int(threadIdx.x); e < int(sizeof(T) / 16); e += kThreads)
    reinterpret_cast<float4*>(&to)[e] = reinterpret_cast<const float4*>(from)[e];
}

// A chunk as the scans of both passes read it: where it lies, and the number of what was prepared.
struct ChunkPlace {
  int64_t batch, first;
  int count;
  int64_t number;
};

// Rows of k and (where `q`) of q, kColumns columns of v or dO, and what was prepared.
template <int kColumns, int kThreads>
struct ChunkLoader {
  const RuleParams& p;
  const Prepared* prepared;  // [chunks, HV]
  const View<4>& columns;    // v or dO
  bool query_quads, key_quads, column_quads;
  int64_t head, key_head;
  int column, dim_v;

  __device__ __forceinline__ void load(const ChunkPlace& at, float* k, float* q, int pitch,
                                       float* to, Prepared& to_prepared) const {
    load_rows(p.key, at.batch, at.first, at.count, key_head, p.dim_k, key_quads, k, pitch,
              kThreads);
    if (q)
      load_rows(p.query, at.batch, at.first, at.count, key_head, p.dim_k, query_quads, q, pitch,
                kThreads);
    load_columns<kColumns, kColumns, kThreads>(columns, at.batch, at.first, at.count, head, column,
                                               dim_v, column_quads, to);
    load_prepared<kThreads>(prepared + at.number * p.value_heads + head, to_prepared);
  }
};

}  // namespace deltanet::cuda::simt
