// SPDX-License-Identifier: Apache-2.0
#include "cuda/simt_forward.h"

#include "cuda/launch.cuh"
#include "cuda/simt_prepare_kernel.cuh"
#include "cuda/simt_scan.cuh"

namespace deltanet::cuda::simt {
namespace {

int64_t blocks_of(const RuleParams& p, const ScanArguments& x, int columns) {
  if (!x.strip_states) return rule_blocks(p, columns);
  return max_chunks(p, kStrip) * p.value_heads * ((p.dim_v + columns - 1) / columns);
}

template <int kColumns>
void launch_scan(const RuleParams& p, const ScanArguments& x, cudaStream_t stream) {
  using Traits = ScanTraits<kColumns>;
  launch("chunk_scan", scan_kernel<kColumns>, blocks_of(p, x, kColumns), Traits::kThreads,
         Traits::shared_bytes(p.dim_k), stream, p, x);
}

// The widest tile of V that fits the device and is of use; narrower ones while blocks would leave
// processors idle. The results do not depend on it.
int columns_of_tile(const RuleParams& p, int64_t runs) {
  const auto blocks = [&](int columns) {
    return runs * p.value_heads * ((p.dim_v + columns - 1) / columns);
  };
  const int64_t shared = shared_memory(), wanted = processors();
  if (p.dim_v > 32 && ScanTraits<64>::shared_bytes(p.dim_k) <= shared && blocks(64) >= wanted)
    return 64;
  if (p.dim_v > 16 && ScanTraits<32>::shared_bytes(p.dim_k) <= shared && blocks(32) >= wanted)
    return 32;
  return 16;
}

// `runs`: sequences or segments.
void scan(const RuleParams& p, ScanArguments x, int64_t runs, cudaStream_t stream) {
  x.query_quads = quads_along(p.query, 3);
  x.key_quads = quads_along(p.key, 3);
  x.value_quads = quads_along(p.value, 3);
  x.output_quads = quads_along(p.output, 3);
  x.initial_quads = quads_along(p.initial_state, 3);
  x.final_quads = quads_along(p.final_state, 3);
  x.saved_quads = quads_along(p.saved_states, 3);
  x.segment_quads = quads_along(x.segment_states, 3);
  switch (columns_of_tile(p, runs)) {
    case 64:
      return launch_scan<64>(p, x, stream);
    case 32:
      return launch_scan<32>(p, x, stream);
    default:
      return launch_scan<16>(p, x, stream);
  }
}

void prepare(const RuleParams& p, const ChunkTable& table, int parts, Prepared* prepared,
             PreparedGradient* gradient, cudaStream_t stream) {
  PrepareArguments x = {};
  x.out = prepared;
  x.gradient = gradient;
  x.table = table;
  x.parts = parts;
  x.query_quads = quads_along(p.query, 3);
  x.key_quads = quads_along(p.key, 3);
  launch("chunk_prepare", prepare_kernel, max_chunks(p, table.chunk_size) * parts * p.key_heads,
         PrepareKernelTraits::kThreads, PrepareKernelTraits::shared_bytes(p.dim_k), stream, p, x);
}

}  // namespace

size_t workspace_bytes(const RuleParams& p) {
  const size_t prepared = size_t(max_chunks(p, kChunk)) * size_t(p.value_heads) * sizeof(Prepared);
  return chunk_table_bytes(p, kChunk) + (prepared + 255) / 256 * 256;
}

void forward(const RuleParams& p, void* workspace, cudaStream_t stream) {
  const ChunkTable table = build_chunk_table(p, kChunk, workspace, stream);
  auto* const prepared =
      reinterpret_cast<Prepared*>(static_cast<char*>(workspace) + chunk_table_bytes(p, kChunk));
  prepare(p, table, /*parts=*/1, prepared, nullptr, stream);
  ScanArguments x = {};
  x.prepared = prepared;
  x.table = table;
  x.parts = 1;
  x.chunks = max_chunks(p, kChunk);
  scan(p, x, p.sequences + (p.packed() ? 1 : 0), stream);
}

void prepare_strips(const RuleParams& p, const ChunkTable& strips, Prepared* prepared,
                    PreparedGradient* gradient, cudaStream_t stream) {
  prepare(p, strips, kStripChunks, prepared, gradient, stream);
}

void scan_segments(const RuleParams& p, const ChunkTable& strips, const Prepared* prepared,
                   const View<4>& saved_states, float* strip_states, cudaStream_t stream) {
  RuleParams states = p;
  states.query = {};
  states.output = {};
  states.final_state = {};
  ScanArguments x = {};
  x.prepared = prepared;
  x.table = strips;
  x.parts = kStripChunks;
  x.chunks = max_chunks(p, kStrip) * kStripChunks;
  x.segment_states = saved_states;
  x.strip_states = strip_states;
  scan(states, x, max_chunks(p, int(kSegmentTokens)), stream);
}

}  // namespace deltanet::cuda::simt
