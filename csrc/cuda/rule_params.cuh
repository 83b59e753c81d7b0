// SPDX-License-Identifier: Apache-2.0
//
// What a call of the rule hands to the CUDA kernels: core's parameters with device pointers, and
// what only a device can hold. Kernels take it by value.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "core/params.h"

namespace deltanet::cuda {

// All pointers are device pointers. core's `cu_seqlens` (host memory) stays null.
struct RuleParams : GatedDeltaRuleParams {
  // [N+1], int32 or int64, or null: each batch row is one sequence. The host never reads it:
  // launches and allocations depend on shapes alone. Kernels clamp what it says to [0, T].
  const void* device_cu_seqlens = nullptr;
  bool cu_seqlens_is_int64 = false;
  int64_t cu_seqlens_stride = 1;

  // Choose the kernels as if each sequence came alone: the same bits in any company.
  bool batch_invariant = false;
  // The cheapest mix of split operands instead of splitting all (docs/numerics.md).
  bool fast = false;

  bool packed() const { return device_cu_seqlens != nullptr; }
};

// The backward pass of a call. output, final_state and their kin of the base are not used.
struct RuleBackwardParams : RuleParams, RuleGradients {
  MutableView<1> d_A_log, d_dt_bias;  // [HV]  fp32
};

// Kernels that carry a state run one block per (sequence, value head, tile of V). A packed call has
// one sequence more, N: its blocks clear the outputs behind the last sequence.
struct RuleBlock {
  int64_t sequence, head;
  int tile;
};

inline int64_t rule_blocks(const RuleParams& p, int columns_of_tile) {
  const int64_t tiles = (p.dim_v + columns_of_tile - 1) / columns_of_tile;
  return (p.sequences + (p.packed() ? 1 : 0)) * p.value_heads * tiles;
}

// Everything below runs on the device; host compilers see what stands above.
#ifdef __CUDACC__

// Which one this block is. Block numbers are below 2^31, and so are heads: 32-bit divisions.
__device__ __forceinline__ RuleBlock rule_block(const RuleParams& p, int columns_of_tile) {
  const unsigned tiles = unsigned(p.dim_v + columns_of_tile - 1) / unsigned(columns_of_tile);
  const unsigned heads = unsigned(p.value_heads), rest = blockIdx.x / tiles;
  return {rest / heads, rest % heads, int(blockIdx.x % tiles)};
}

// The key head that value head `head` reads.
__device__ __forceinline__ int64_t key_head_of(const RuleParams& p, int64_t head) {
  return unsigned(head) / (unsigned(p.value_heads) / unsigned(p.key_heads));
}

// The tokens of one sequence: begin to end of batch row `batch`.
struct Sequence {
  int64_t batch, begin, end;
};

__device__ __forceinline__ int64_t cu_seqlens_at(const RuleParams& p, int64_t n) {
  const int64_t at = n * p.cu_seqlens_stride;
  const int64_t x = p.cu_seqlens_is_int64 ? static_cast<const int64_t*>(p.device_cu_seqlens)[at]
                                          : static_cast<const int32_t*>(p.device_cu_seqlens)[at];
  return x < 0 ? 0 : x < p.tokens ? x : p.tokens;
}

// Sequence n of 0 .. N-1. Whatever cu_seqlens holds, the tokens lie inside the tensors.
__device__ __forceinline__ Sequence sequence_at(const RuleParams& p, int64_t n) {
  if (!p.device_cu_seqlens) return {n, 0, p.tokens};
  const int64_t begin = cu_seqlens_at(p, n), end = cu_seqlens_at(p, n + 1);
  return {0, begin, end < begin ? begin : end};
}

// The tokens behind the last packed sequence, which belong to nobody: their outputs are zero.
__device__ __forceinline__ Sequence tail_of(const RuleParams& p) {
  return {0, cu_seqlens_at(p, p.sequences), p.tokens};
}

#endif  // __CUDACC__

}  // namespace deltanet::cuda
