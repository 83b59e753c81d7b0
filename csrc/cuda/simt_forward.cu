// SPDX-License-Identifier: Apache-2.0
#include "cuda/simt_forward.h"

#include "cuda/launch.cuh"
#include "cuda/simt_prepare.cuh"
#include "cuda/simt_scan.cuh"

namespace deltanet::cuda::simt {
namespace {

template <int kColumns>
void scan(const RuleParams& p, const ScanArguments& x, cudaStream_t stream) {
  using Traits = ScanTraits<kColumns>;
  launch("chunk_scan", scan_kernel<kColumns>, rule_blocks(p, kColumns), Traits::kThreads,
         Traits::shared_bytes(p.dim_k), stream, p, x);
}

int device_attribute(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  check(cudaGetDevice(&device), "chunk_forward");
  check(cudaDeviceGetAttribute(&value, attribute, device), "chunk_forward");
  return value;
}

// The widest tile of V that fits the device and is of use; narrower ones while blocks would leave
// processors idle. The results do not depend on it.
int columns_of_tile(const RuleParams& p) {
  const int64_t shared = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  const int64_t processors = device_attribute(cudaDevAttrMultiProcessorCount);
  if (p.dim_v > 32 && ScanTraits<64>::shared_bytes(p.dim_k) <= shared &&
      rule_blocks(p, 64) >= processors)
    return 64;
  if (p.dim_v > 16 && ScanTraits<32>::shared_bytes(p.dim_k) <= shared &&
      rule_blocks(p, 32) >= processors)
    return 32;
  return 16;
}

}  // namespace

size_t workspace_bytes(const RuleParams& p) {
  const size_t prepared = size_t(max_chunks(p, kChunk)) * size_t(p.value_heads) * sizeof(Prepared);
  return chunk_table_bytes(p, kChunk) + (prepared + 255) / 256 * 256;
}

void forward(const RuleParams& p, void* workspace, cudaStream_t stream) {
  PrepareArguments prepare = {};
  prepare.table = build_chunk_table(p, kChunk, workspace, stream);
  prepare.out =
      reinterpret_cast<Prepared*>(static_cast<char*>(workspace) + chunk_table_bytes(p, kChunk));
  prepare.query_quads = quads_along(p.query, 3);
  prepare.key_quads = quads_along(p.key, 3);
  launch("chunk_prepare", prepare_kernel, max_chunks(p, kChunk) * p.key_heads,
         PrepareTraits::kThreads, PrepareTraits::shared_bytes(p.dim_k), stream, p, prepare);

  ScanArguments x = {};
  x.prepared = prepare.out;
  x.table = prepare.table;
  x.chunks = max_chunks(p, kChunk);
  x.query_quads = prepare.query_quads;
  x.key_quads = prepare.key_quads;
  x.value_quads = quads_along(p.value, 3);
  x.output_quads = quads_along(p.output, 3);
  x.initial_quads = quads_along(p.initial_state, 3);
  x.final_quads = quads_along(p.final_state, 3);
  switch (columns_of_tile(p)) {
    case 64:
      return scan<64>(p, x, stream);
    case 32:
      return scan<32>(p, x, stream);
    default:
      return scan<16>(p, x, stream);
  }
}

}  // namespace deltanet::cuda::simt
