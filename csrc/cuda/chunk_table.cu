// SPDX-License-Identifier: Apache-2.0
#include "cuda/chunk_table.cuh"

#include <cub/block/block_scan.cuh>

#include <stdexcept>
#include <string>

#include "cuda/launch.cuh"

namespace deltanet::cuda {
namespace {

constexpr int kThreads = 256;

// Carries the sum of earlier tiles into the scan of the next one.
struct RunningSum {
  int64_t sum = 0;
  __device__ int64_t operator()(int64_t tile) {
    const int64_t before = sum;
    sum += tile;
    return before;
  }
};

// One block. First a running scan over the sequences' numbers of chunks, then every entry looks for
// its sequence: one long sequence is no slower than many short ones.
__global__ void __launch_bounds__(kThreads)
    chunk_table_kernel(const __grid_constant__ RuleParams p, int chunk_size, int64_t entries,
                       int32_t* offsets, Chunk* chunks) {
  using Scan = cub::BlockScan<int64_t, kThreads>;
  __shared__ typename Scan::TempStorage storage;
  RunningSum carry;
  for (int64_t base = 0; base < p.sequences; base += kThreads) {
    const int64_t n = base + threadIdx.x;
    int64_t count = 0, before;
    if (n < p.sequences) {
      const Sequence s = sequence_at(p, n);
      count = (s.end - s.begin + chunk_size - 1) / chunk_size;
    }
    Scan(storage).ExclusiveSum(count, before, carry);
    // cu_seqlens that decrease can promise more chunks than there is room for.
    if (n < p.sequences) offsets[n] = int32_t(before < entries ? before : entries);
    if (n == p.sequences - 1)
      offsets[p.sequences] = int32_t(before + count < entries ? before + count : entries);
    __syncthreads();  // the next tile reuses the storage; at last: offsets are complete
  }
  if (p.sequences == 0 && threadIdx.x == 0) offsets[0] = 0;
  if (p.sequences == 0) __syncthreads();

  const int32_t total = offsets[p.sequences];
  for (int64_t i = threadIdx.x; i < entries; i += kThreads) {
    Chunk chunk = {0, 0, 0, 0};
    if (i < total) {
      // The last sequence that starts at or before chunk i; empty ones start with their successor.
      int64_t low = 0, high = p.sequences - 1;
      while (low < high) {
        const int64_t middle = (low + high + 1) / 2;
        if (offsets[middle] <= i)
          low = middle;
        else
          high = middle - 1;
      }
      const Sequence s = sequence_at(p, low);
      const int64_t index = i - offsets[low], first = s.begin + index * chunk_size;
      const int64_t left = s.end - first;
      if (left > 0)
        chunk = {int32_t(low), int32_t(first), int32_t(left < chunk_size ? left : chunk_size),
                 int32_t(index)};
    }
    chunks[i] = chunk;
  }
}

size_t aligned(size_t bytes) { return (bytes + 255) / 256 * 256; }

}  // namespace

size_t chunk_table_bytes(const RuleParams& p, int chunk_size) {
  if (!p.packed()) return 0;
  return aligned(size_t(p.sequences + 1) * sizeof(int32_t)) +
         aligned(size_t(max_chunks(p, chunk_size)) * sizeof(Chunk));
}

ChunkTable build_chunk_table(const RuleParams& p, int chunk_size, void* memory,
                             cudaStream_t stream) {
  const int64_t entries = max_chunks(p, chunk_size);
  if (p.tokens > 0x7fffffff || entries > 0x7fffffff)
    throw std::invalid_argument("chunk_table: " + std::to_string(p.tokens) + " tokens in " +
                                std::to_string(entries) + " chunks; supported: below 2^31");
  ChunkTable table;
  table.chunk_size = chunk_size;
  if (!p.packed()) return table;
  auto* offsets = static_cast<int32_t*>(memory);
  auto* chunks = reinterpret_cast<Chunk*>(static_cast<char*>(memory) +
                                          aligned(size_t(p.sequences + 1) * sizeof(int32_t)));
  launch("chunk_table", chunk_table_kernel, 1, kThreads, /*dynamic_shared=*/0, stream, p,
         chunk_size, entries, offsets, chunks);
  table.offsets = offsets;
  table.chunks = chunks;
  return table;
}

}  // namespace deltanet::cuda
