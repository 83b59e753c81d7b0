// SPDX-License-Identifier: Apache-2.0
//
// The reverse scan by key over segments: dS behind each of them, key = (sequence, value head).
//
//   dS_{s-1} = W_s dS_s + U_s            from the last segment, whose U is its dS itself, down to 1
//
// Work split:  one block = one key and 16 columns of V, over the segments of the sequence; a thread
//              makes 4 rows x 4 columns at a time. Maps are applied to a state, never to each
//              other: that is K V instead of K (K + V) multiply-adds, and fewer roundings.
// Numerics:    fp32, every sum over K in one fixed order. Nothing of an old state is dropped.
// Memory:      reads each W once per 16 columns and each U once; writes dS over U.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/simt_adjoint.cuh"

namespace deltanet::cuda::simt {

struct AdjointScanTraits {
  static constexpr int kColumns = 16, kThreads = 128;
  static int64_t shared_bytes(int dim_k) {  // dS behind two segments
    return 2 * int64_t(sizeof(float)) * padded_rows(dim_k) * kColumns;
  }
};

__global__ void __launch_bounds__(AdjointScanTraits::kThreads)
    adjoint_scan_kernel(const __grid_constant__ RuleBackwardParams p,
                        const __grid_constant__ AdjointArguments x) {
  constexpr int kColumns = AdjointScanTraits::kColumns, kThreads = AdjointScanTraits::kThreads;
  constexpr int kQuads = kColumns / 4;
  extern __shared__ float4 memory[];
  const unsigned tiles = unsigned(column_tiles(p.dim_v, kColumns)), key = blockIdx.x / tiles;
  const int64_t n = key / unsigned(p.value_heads), head = key % unsigned(p.value_heads);
  const int64_t last = adjoint_sequence(p, x, n).last;
  if (last < 2) return;  // no segment has one behind it that needs a map

  const int first_column = int(blockIdx.x % tiles) * kColumns;
  const int row_floats = padded_rows(p.dim_v), map_pitch = padded_rows(p.dim_k);
  float* behind = reinterpret_cast<float*>(memory);  // [K padded][16]
  float* before = behind + padded_rows(p.dim_k) * kColumns;
  using Tile = StateTile<kColumns, kColumns, kThreads>;
  Tile{behind, p.dim_k, p.dim_v, first_column}.load(x.end_of(p, last - 1, n, head));
  for (int64_t segment = last - 1; segment > 0; --segment) {
    __syncthreads();  // dS behind this segment is complete, and dS behind the next one used up
    const float* const W = x.map_of(p, segment, n, head);
    float* const end = x.end_of(p, segment - 1, n, head);
    for (int e = int(threadIdx.x); e < padded_rows(p.dim_k) / 4 * kQuads; e += kThreads) {
      const int row = e / kQuads * 4, c = e % kQuads * 4;
      const bool inside = first_column + c < row_floats;
      float* const U = end + int64_t(row) * row_floats + first_column + c;
      float4 sum[4] = {};
#pragma unroll
      for (int r = 0; r < 4; ++r)
        if (row + r < p.dim_k && inside)
          sum[r] = *reinterpret_cast<const float4*>(U + r * row_floats);
      for (int m = 0; m < map_pitch; m += 4) {
        float4 dS[4];
#pragma unroll
        for (int k = 0; k < 4; ++k)
          dS[k] = *reinterpret_cast<const float4*>(behind + (m + k) * kColumns + c);
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          if (row + r >= p.dim_k) continue;
          const float4 w = *reinterpret_cast<const float4*>(W + int64_t(row + r) * map_pitch + m);
#pragma unroll
          for (int k = 0; k < 4; ++k) add_scaled(sum[r], component(w, k), dS[k]);
        }
      }
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        *reinterpret_cast<float4*>(before + (row + r) * kColumns + c) = sum[r];
        if (row + r < p.dim_k && inside) *reinterpret_cast<float4*>(U + r * row_floats) = sum[r];
      }
    }
    float* const next = behind;
    behind = before;
    before = next;
  }
}

}  // namespace deltanet::cuda::simt
