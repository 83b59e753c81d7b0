// SPDX-License-Identifier: Apache-2.0
//
// What is prepared for all chunks of a call, side by side: simt_prepare.cuh. One block = one
// (chunk, key head).
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/chunk_table.cuh"
#include "cuda/simt_prepare.cuh"

namespace deltanet::cuda::simt {

struct PrepareArguments {
  Prepared* out;               // [chunks, HV]
  PreparedGradient* gradient;  // [chunks, HV]  null: not wanted
  ChunkTable table;
  int parts;                    // chunks of an entry of the table
  bool query_quads, key_quads;  // what quads_along says
};

struct PrepareKernelTraits {
  static constexpr int kThreads = kChunk * kChunk;
  static constexpr int kMinBlocks = 4;  // 64 registers: none is spilled
  using Shared = PrepareTraits<kThreads>::Shared;
  // k and q rows follow, [16][row_pitch] each.
  __host__ __device__ static constexpr int rows_offset() { return (sizeof(Shared) + 15) / 16 * 16; }
  static int64_t shared_bytes(int dim_k) {
    return rows_offset() + int64_t(2) * kChunk * row_pitch(dim_k) * int64_t(sizeof(float));
  }
};

__global__ void __launch_bounds__(PrepareKernelTraits::kThreads, PrepareKernelTraits::kMinBlocks)
    prepare_kernel(const __grid_constant__ RuleParams p,
                   const __grid_constant__ PrepareArguments x) {
  using Traits = PrepareKernelTraits;
  extern __shared__ float4 memory[];
  float* const k = reinterpret_cast<float*>(memory) + Traits::rows_offset() / 4;

  const unsigned part = blockIdx.x / unsigned(p.key_heads);
  const int64_t key_head = blockIdx.x % unsigned(p.key_heads);
  const Chunk chunk = part_of(chunk_at(p, x.table, part / unsigned(x.parts)),
                              int(part % unsigned(x.parts)), kChunk);
  if (chunk.count == 0) return;
  const int64_t head = key_head * (unsigned(p.value_heads) / unsigned(p.key_heads));
  const int64_t to = part * p.value_heads + head;
  PrepareBlock<Traits::kThreads>(p, *reinterpret_cast<Traits::Shared*>(memory), k,
                                 k + kChunk * row_pitch(p.dim_k))
      .run({p.device_cu_seqlens ? 0 : chunk.sequence, chunk.first, chunk.count, key_head,
            /*with_query=*/true, x.out + to, x.gradient ? x.gradient + to : nullptr},
           x.key_quads, x.query_quads);
}

}  // namespace deltanet::cuda::simt
