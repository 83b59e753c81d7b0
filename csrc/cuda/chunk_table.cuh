// SPDX-License-Identifier: Apache-2.0
//
// Which tokens each chunk holds. Chunks are anchored at the starts of sequences, so a packed call
// has a number of chunks that only the device knows: the table is built there, and the host counts
// with an upper bound that depends on shapes alone.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/rule_params.cuh"

namespace deltanet::cuda {

// Tokens first to first + count of batch row (packed ? 0 : sequence).
struct alignas(16) Chunk {
  int32_t sequence;
  int32_t first;
  int32_t count;  // 1 to the chunk size; 0: a surplus entry
  int32_t index;  // which chunk of its sequence this is
};

struct ChunkTable {
  int chunk_size = 0;
  // Null unless the call is packed: chunks of equal sequences need no table.
  const int32_t* offsets = nullptr;  // [N+1]  first chunk of each sequence; [N]: number of chunks
  const Chunk* chunks = nullptr;     // [max_chunks]  surplus entries at the end
};

// ceil(T/C) + N if packed, B * ceil(T/C) else.
inline int64_t max_chunks(const RuleParams& p, int chunk_size) {
  const int64_t whole = (p.tokens + chunk_size - 1) / chunk_size;
  return p.packed() ? whole + p.sequences : p.batch * whole;
}

// Bytes of device memory that the table takes, a multiple of 256; 0 unless packed.
size_t chunk_table_bytes(const RuleParams& p, int chunk_size);

// Fills `memory` (256-byte aligned, chunk_table_bytes long) by one launch, none unless packed.
// Throws std::invalid_argument from 2^31 tokens or chunks on.
ChunkTable build_chunk_table(const RuleParams& p, int chunk_size, void* memory,
                             cudaStream_t stream);

// Chunk i of 0 .. max_chunks - 1.
__device__ __forceinline__ Chunk chunk_at(const RuleParams& p, const ChunkTable& table, int64_t i) {
  if (table.chunks) return table.chunks[i];
  // Chunks and tokens are below 2^31: 32-bit divisions.
  const unsigned per_sequence =
      (unsigned(p.tokens) + unsigned(table.chunk_size) - 1) / unsigned(table.chunk_size);
  const unsigned sequence = unsigned(i) / per_sequence, index = unsigned(i) % per_sequence;
  const int64_t first = int64_t(index) * table.chunk_size, left = p.tokens - first;
  return {int32_t(sequence), int32_t(first),
          int32_t(left < table.chunk_size ? left : table.chunk_size), int32_t(index)};
}

// Part i of a chunk that is cut into parts of `size` tokens.
__device__ __forceinline__ Chunk part_of(Chunk chunk, int i, int size) {
  const int left = chunk.count - i * size;
  chunk.first += i * size;
  chunk.count = left < 0 ? 0 : left < size ? left : size;
  return chunk;
}

// The number of sequence n's first chunk.
__device__ __forceinline__ int64_t first_chunk_of(const RuleParams& p, const ChunkTable& table,
                                                  int64_t n) {
  if (table.offsets) return table.offsets[n];
  return n * ((unsigned(p.tokens) + unsigned(table.chunk_size) - 1) / unsigned(table.chunk_size));
}

}  // namespace deltanet::cuda
