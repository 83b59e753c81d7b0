// SPDX-License-Identifier: Apache-2.0
#include "cuda/tensor_core.h"

#include <stdexcept>

#include "cuda/launch.cuh"
#include "cuda/tensor_core/layout.cuh"
#include "cuda/tensor_core/segments.cuh"

namespace deltanet::cuda::tensor_core {
namespace {

size_t aligned(size_t bytes) { return (bytes + 255) / 256 * 256; }

struct Device {
  int capability, processors, shared;  // major * 10 + minor; SMs; opt-in bytes of a block
};
Device current_device() {
  const auto attribute = [](cudaDeviceAttr a, int device) {
    int value = 0;
    check(cudaDeviceGetAttribute(&value, a, device), "tensor_core: device attributes");
    return value;
  };
  int device = 0;
  check(cudaGetDevice(&device), "tensor_core: current device");
  return {attribute(cudaDevAttrComputeCapabilityMajor, device) * 10 +
              attribute(cudaDevAttrComputeCapabilityMinor, device),
          attribute(cudaDevAttrMultiProcessorCount, device),
          attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device)};
}

// Whether any architecture of this build has the kernels: sm_75 code has no bf16 products, and a
// newer device may run it, compiled from PTX.
constexpr bool is_built() {
  for (const int architecture : {__CUDA_ARCH_LIST__})
    if (architecture >= 800) return true;
  return false;
}

// The instances of one element type and bucket of K.
struct Kernels {
  void (*prepare)(const Params&, cudaStream_t);
  void (*scan_output)(const Params&, cudaStream_t);
  int64_t (*shared_bytes)(int warps);
  void (*scan_roles)(const Params&, cudaStream_t);  // null where there is none
  int64_t roles_shared_bytes;
};
template <class Element, int kK, Precision kPrecision>
Kernels kernels_of() {
  Kernels kernels = {prepare<Element, kK>, scan_output<Element, kK, kPrecision>,
                     scan_output_shared_bytes<Element, kK, kPrecision>, nullptr, 0};
  if constexpr (kK == 128) {
    kernels.scan_roles = scan_roles<Element, kK, kPrecision>;
    kernels.roles_shared_bytes = scan_roles_shared_bytes<Element, kK, kPrecision>();
  }
  return kernels;
}
template <class Element, int kK>
Kernels kernels_of(Precision precision) {
  return precision == Precision::kExact ? kernels_of<Element, kK, Precision::kExact>()
                                        : kernels_of<Element, kK, Precision::kFast>();
}
Kernels kernels_of(const RuleParams& p, Precision precision) {
  if (p.key.dtype == DType::kBFloat16)
    return p.dim_k <= 64 ? kernels_of<bf16, 64>(precision) : kernels_of<bf16, 128>(precision);
  return p.dim_k <= 64 ? kernels_of<fp16, 64>(precision) : kernels_of<fp16, 128>(precision);
}

// Rows of 16-bit elements that cp.async can copy: contiguous, each at a multiple of 16 bytes.
template <class AnyView>
bool has_aligned_rows(const AnyView& x, int64_t batch, int64_t tokens, int64_t heads, int dim) {
  const int64_t sizes[] = {batch, tokens, heads};
  for (int i = 0; i < 3; ++i)
    if (sizes[i] > 1 && x.stride[i] % 8 != 0) return false;
  return reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && (x.stride[3] == 1 || dim == 1);
}

int columns_of(int warps) { return warps * kWarpColumns; }

// Blocks of the chunk pass, for whole sequences.
int64_t blocks_of(const RuleParams& p, int64_t sequences, int warps) {
  return sequences * p.value_heads * ((p.dim_v + columns_of(warps) - 1) / columns_of(warps));
}

// Whether scan_roles can take this call, with blocks of one or two warps. States alone have no
// second role.
bool has_roles(const RuleParams& p, const Options& options, const Kernels& kernels,
               const Device& device) {
  return options.roles != Roles::kNever && kernels.scan_roles && p.output &&
         kernels.roles_shared_bytes <= device.shared;
}

// As many columns of V as share a block: 64, or 32 where blocks would fill less than half of the
// device. Wider blocks read q, k, T, P less often, narrower ones are more. With roles 16, where 32
// fill half of the device and so are not worth segments.
int choose_warps(const RuleParams& p, const Options& options, bool roles, const Device& device) {
  if (options.warps) return options.warps;
  int warps = 4;
  const int64_t sequences = p.batch_invariant ? 1 : p.sequences;
  const auto blocks = [&](int w) { return blocks_of(p, sequences, w); };
  while (warps > 1 && columns_of(warps / 2) >= p.dim_v) warps /= 2;
  if (warps == 4 && 2 * blocks(4) <= device.processors) warps = 2;
  if (roles && warps == 2 && blocks(1) <= device.processors && 3 * blocks(2) > device.processors)
    warps = 1;
  return warps;
}

// Few blocks for short runs, so that keys are multiplied once; more where the device would idle.
int choose_heads_per_block(const RuleParams& p, int64_t chunks, const Device& device) {
  const int64_t group = p.value_heads / p.key_heads;
  constexpr int kBlocksPerProcessor = 4;
  int64_t heads = group;
  while (heads > 1 && chunks * p.key_heads * ((group + heads - 1) / heads) <
                          int64_t(device.processors) * kBlocksPerProcessor)
    heads = (heads + 1) / 2;
  return int(heads);
}

int record_bytes_of(const RuleParams& p, Precision precision) {
  return Record::bytes(precision, p.query.data != nullptr);
}

// Chunks in a segment; sequences of up to so many are not cut.
//
// The maps cost about as much as the pass itself (1.25 times its mma beside 1, at the width of the
// pass), so segments pay where they double the blocks that run, or more: where those of whole
// sequences fill less than half of the device. With roles the pass takes as long as its maps, so
// they must triple the blocks. As many segments as fill the device, of 8 chunks or more: a
// composition costs about a chunk. The choice depends on N, HV, V, T and the device alone, never on
// what cu_seqlens holds.
int64_t choose_segment_chunks(const RuleParams& p, const Options& options, int warps, bool roles,
                              const Device& device) {
  const int64_t chunks = (p.tokens + kChunk - 1) / kChunk;
  if (options.segment_chunks > 0) return options.segment_chunks;
  constexpr int64_t kFewestChunks = 8;
  const int64_t blocks = blocks_of(p, p.sequences, warps);
  const int64_t wanted = blocks > 0 ? device.processors / blocks : 1;
  const int64_t fewest = roles && warps <= kMostRolePairs ? 3 : 2;
  if (options.segment_chunks < 0 || wanted < fewest || chunks < 2 * kFewestChunks)
    return chunks > 0 ? chunks : 1;
  const int64_t length = (chunks + wanted - 1) / wanted;
  return length > kFewestChunks ? length : kFewestChunks;
}

// How a call runs, and where its parts of the workspace lie.
struct Plan {
  int warps;
  bool roles;  // warps of the pass that makes outputs are split into roles
  int64_t segment_chunks, segments;
  size_t records, maps, starts, bytes;  // offsets, and the end

  Plan(const RuleParams& p, const Options& options, const Kernels& kernels, const Device& device) {
    roles = has_roles(p, options, kernels, device);
    warps = choose_warps(p, options, roles, device);
    segment_chunks = choose_segment_chunks(p, options, warps, roles, device);
    const int64_t chunks = (p.tokens + kChunk - 1) / kChunk;
    segments = chunks > segment_chunks ? (chunks + segment_chunks - 1) / segment_chunks : 1;
    // Roles shorten the chain of a block that has a multiprocessor to itself; more of them would
    // share what roles take twice of.
    roles = roles && warps <= kMostRolePairs &&
            (options.roles == Roles::kAlways ||
             blocks_of(p, p.sequences, warps) * segments <= device.processors);
    const size_t keys = size_t(p.sequences) * size_t(p.value_heads);
    records = chunk_table_bytes(p, kChunk);
    maps = records + aligned(size_t(max_chunks(p, kChunk)) * size_t(p.value_heads) *
                             size_t(record_bytes_of(p, options.precision)));
    starts = maps + aligned(size_t(segments - 1) * keys * p.dim_k * p.dim_k * sizeof(float));
    bytes =
        starts +
        (segments > 1 ? aligned(size_t(segments) * keys * p.dim_k * p.dim_v * sizeof(float)) : 0);
  }
};

}  // namespace

bool supports(const RuleParams& p) {
  if (p.key.dtype != DType::kBFloat16 && p.key.dtype != DType::kFloat16) return false;
  if (p.dim_k > 128 || p.tokens > 0x7fffff00) return false;
  // Whether rows of other widths are aligned depends on the axes of size 1, and so on the company.
  if (p.batch_invariant && (p.dim_k % 8 != 0 || p.dim_v % 8 != 0)) return false;
  if (p.initial_state && p.initial_state.dtype == DType::kFloat64) return false;
  const auto aligned_keys = [&](const View<4>& x) {
    return has_aligned_rows(x, p.batch, p.tokens, p.key_heads, p.dim_k);
  };
  if (!aligned_keys(p.key) || (p.query && !aligned_keys(p.query))) return false;
  if (p.value && !has_aligned_rows(p.value, p.batch, p.tokens, p.value_heads, p.dim_v))
    return false;
  if (p.output && p.output.stride[3] != 1 && p.dim_v > 1) return false;
  const Device device = current_device();
  return is_built() && device.capability >= 80 &&
         kernels_of(p, Precision::kExact).shared_bytes(4) <= device.shared;
}

size_t workspace_bytes(const RuleParams& p, const Options& options) {
  return Plan(p, options, kernels_of(p, options.precision), current_device()).bytes;
}

void forward(const RuleParams& rule, void* workspace, cudaStream_t stream, const Options& options) {
  if (rule.value_heads == 0) return;
  const Device device = current_device();
  const Kernels kernels = kernels_of(rule, options.precision);
  const Plan plan(rule, options, kernels, device);
  auto* const memory = static_cast<unsigned char*>(workspace);
  Params p;
  p.rule = rule;
  p.precision = options.precision;
  p.chunks = max_chunks(rule, kChunk);
  p.record_bytes = record_bytes_of(rule, options.precision);
  p.records = memory + plan.records;
  p.heads_per_block = choose_heads_per_block(rule, p.chunks, device);
  p.warps = plan.warps;
  p.output_pieces =
      has_aligned_rows(rule.output, rule.batch, rule.tokens, rule.value_heads, rule.dim_v);
  p.segments = plan.segments;
  p.segment_chunks = plan.segment_chunks;
  p.table = build_chunk_table(rule, kChunk, memory, stream);
  kernels.prepare(p, stream);
  if (p.segments > 1) {
    p.maps = reinterpret_cast<float*>(memory + plan.maps);
    p.starts = reinterpret_cast<float*>(memory + plan.starts);
    p.making_maps = true;
    kernels.scan_output(p, stream);
    p.making_maps = false;
    scan_segments(p, stream);
  }
  (plan.roles ? kernels.scan_roles : kernels.scan_output)(p, stream);
}

}  // namespace deltanet::cuda::tensor_core
