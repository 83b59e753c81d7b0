// SPDX-License-Identifier: Apache-2.0
//
// The sums that end the backward pass, in one fixed order each: docs/algorithm.md, equations (25),
// (26) and (27).
//
//   d_row = r (sum over the value heads of a key head)      r = 1 / |row|, where rows are
//   normalized d_row <- d_row - row r^2 (row . d_row)                  (25) dA_log = sum_t dg g, d
//   dt_bias = sum_t da
//
// Work split:  first one block = one (strip, key head), a warp for a token. Blocks of strips that
//              the table has too many clear the tail of a packed call. Then one block = one value
//              head, for the sums over gates.
// Memory:      reads the sums of gradient_kernel once, and q and k; writes dQ and dK once, unless
//              gradient_kernel did.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/chunk_table.cuh"
#include "cuda/gradient_slots.cuh"
#include "cuda/load.cuh"
#include "cuda/reduce_row.cuh"
#include "cuda/rule_params.cuh"
#include "cuda/simt_chunk.cuh"
#include "cuda/simt_tail.cuh"
#include "cuda/strips.cuh"

namespace deltanet::cuda::simt {

struct ReduceArguments {
  ChunkTable table;     // of strips
  int64_t row_blocks;   // strips * HK, or 0: nothing to do for rows
  GradientSlots slots;  // one for each (strip, value head); no data: dQ and dK are written
  int64_t gate_rows;
  const double* gate_sums;  // [gate_rows, HV, 2]  null: not wanted
};

constexpr int kReduceThreads = 128;

__device__ __forceinline__ void reduce_rows(const RuleBackwardParams& p, const ReduceArguments& x) {
  constexpr int kWarps = kReduceThreads / 32;
  const int64_t number = blockIdx.x / unsigned(p.key_heads);
  const int64_t key_head = blockIdx.x % unsigned(p.key_heads);
  const int group = int(unsigned(p.value_heads) / unsigned(p.key_heads));
  const int64_t head = key_head * group;
  const int warp = int(threadIdx.x) / 32;
  const Chunk strip = chunk_at(p, x.table, number);
  if (strip.count > 0) {
    if (!x.slots.data) return;
    const int64_t batch = p.device_cu_seqlens ? 0 : strip.sequence;
    const float* const slot = x.slots.data + (number * p.value_heads + head) * x.slots.floats;
    for (int i = warp; i < strip.count; i += kWarps) {
      const int64_t t = strip.first + i;
      const float* const sums = slot + i * p.dim_k;
      if (p.d_query.data)
        reduce_row(p, p.query, p.d_query, batch, t, key_head, sums + x.slots.d_query,
                   x.slots.floats, group);
      if (p.d_key.data)
        reduce_row(p, p.key, p.d_key, batch, t, key_head, sums + x.slots.d_key, x.slots.floats,
                   group);
    }
    return;
  }
  // There are at least as many surplus strips as the tail has.
  const Sequence tail = tail_of(p);
  const int64_t begin = tail.begin + (number - x.table.offsets[p.sequences]) * kStrip;
  const int64_t end = tail.end - begin < kStrip ? tail.end : begin + kStrip;
  clear_tokens<kWarps>(p, begin, end, key_head);
}

__device__ __forceinline__ void reduce_gates(const RuleBackwardParams& p, const ReduceArguments& x,
                                             int64_t head) {
  __shared__ double shared[2][kReduceThreads / 32];
  double sums[2] = {};
  for (int64_t i = threadIdx.x; i < x.gate_rows; i += kReduceThreads)
    for (int j = 0; j < 2; ++j) sums[j] += x.gate_sums[2 * (i * p.value_heads + head) + j];
  for (int j = 0; j < 2; ++j) {
    sums[j] = sum_of_lanes<32>(sums[j]);
    if (threadIdx.x % 32 == 0) shared[j][threadIdx.x / 32] = sums[j];
  }
  __syncthreads();  // every warp's sums are there
  if (threadIdx.x >= 2) return;
  double sum = 0;
  for (const double of_warp : shared[threadIdx.x]) sum += of_warp;
  const auto& to = threadIdx.x == 0 ? p.d_A_log : p.d_dt_bias;
  if (to.data) store_float(to.data, to.dtype, head * to.stride[0], float(sum));
}

__global__ void __launch_bounds__(kReduceThreads, 4)
    reduce_kernel(const __grid_constant__ RuleBackwardParams p,
                  const __grid_constant__ ReduceArguments x) {
  if (blockIdx.x < x.row_blocks)
    reduce_rows(p, x);
  else
    reduce_gates(p, x, blockIdx.x - x.row_blocks);
}

}  // namespace deltanet::cuda::simt
