// SPDX-License-Identifier: Apache-2.0
//
// What the stages of the tensor-core forward share: the parameters of their kernels, and the record
// that `prepare` hands to `scan_output` for each (chunk, value head).
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/chunk_table.cuh"
#include "cuda/mma.cuh"
#include "cuda/rule_params.cuh"
#include "cuda/tensor_core.h"

namespace deltanet::cuda::tensor_core {

constexpr int kChunk = 64;         // C
constexpr int kWarpColumns = 16;   // columns of V that one warp of scan_output owns
constexpr int kMostRolePairs = 2;  // warps of scan_roles that carry a state

// Everything of one chunk and value head that does not depend on the state, as prepare writes it
// and scan_output copies it to shared memory:
//   T diag(b)    planes() bf16 terms of its lower 16x16 blocks, ready for ldmatrix
//   P            2 bf16 terms likewise: Q K^T o D without the norm of q (made once here, not once
//                per column tile; absent when no output is computed)
//   factors      fp32 per token, see Factor
//   windows      a bit per token: a new window starts there
//   overflowing  a bit per token: the norm of its key, or of its query, overflows
//
// Windows. Where the decay rises by more than e inside a chunk, which takes g > 0, terms that grow
// like e^{G_i - G_j} would cancel in (I + L)^-1, while token by token nothing does. Such a chunk is
// cut there: its windows are chunks of their own that share the tiles of one pass. G restarts in
// each of them, T and P do not connect them, and scan_output runs over the chunk once per window. A
// cut depends on the tokens before it only, so that later tokens do not touch earlier outputs.
//
// Overflow. A row whose norm overflows is a row of zeros once it is normalized. Its products with
// other rows, and in scan_output with the state, may be infinite, which a factor of zero would not
// mend: they are set to zero.
struct alignas(16) TokenSets {
  uint64_t windows;
  uint64_t keys, queries;  // overflowing
  uint64_t padding;
};

enum Factor {
  kDecayIn,   // e^{G_i} / |k_i|         of the rows of K S_0
  kDecayQ,    // e^{G_i}                 of the rows of Q S_0; the last of a window: of S_0 itself
  kDecayOut,  // e^{G_C - G_i} / |k_i|   of V' on its way into the state
  kOutScale,  // scale / |q_i|
  kFactors
};

constexpr float kMostRise = 1.f;  // of G inside a window

struct Record {
  static constexpr int kPlaneBytes = LowerBlocks<kChunk>::kCount * 512;
  static constexpr int kPlanesOfP = 2;
  static constexpr int kFactorBytes = kFactors * kChunk * 4;
  static constexpr __host__ __device__ int planes_of_T(Precision precision) {
    return precision == Precision::kExact ? 3 : 2;
  }
  // Offsets: factors and sets of tokens first, then T, then P.
  static constexpr int kBlocks = kFactorBytes + int(sizeof(TokenSets));
  static constexpr __host__ __device__ int bytes(Precision precision, bool output) {
    const int planes = planes_of_T(precision) + (output ? kPlanesOfP : 0);
    return (kBlocks + planes * kPlaneBytes + 127) / 128 * 128;
  }
};

struct Params {
  RuleParams rule;
  ChunkTable table;
  int64_t chunks = 0;                // chunks that the workspace has room for
  unsigned char* records = nullptr;  // [chunks, HV, record_bytes]
  int record_bytes = 0;
  Precision precision = Precision::kExact;
  bool output_pieces = true;  // 16-byte pieces of output rows are aligned

  // prepare: value heads of one key head that a block handles.
  int heads_per_block = 1;

  // scan_output: 16 columns of V for each warp of a block.
  int warps = 4;

  // Segments of a sequence, which run in parallel, and chunks in each of them: segments.cuh. Slot s
  // of maps is the M of segment s; slot s of starts is first the U of segment s - 1, then the state
  // that segment s starts from.
  int64_t segments = 1;
  int64_t segment_chunks = 0;
  bool making_maps = false;  // scan_output makes M and U; else it reads starts, if any
  float* maps = nullptr;     // [segments - 1, N, HV, K, K]
  float* starts = nullptr;   // [segments, N, HV, K, V]; null: one segment
};

__device__ __forceinline__ unsigned char* record_of(const Params& p, int64_t chunk, int64_t head) {
  return p.records + (chunk * p.rule.value_heads + head) * p.record_bytes;
}

// The stages. Each element type and kK is compiled in a file of its own; K <= kK.

// Writes the records of all chunks, and zeros to the outputs behind the last packed sequence.
template <class Element, int kK>
void prepare(const Params& p, cudaStream_t stream);

// Reads the records that prepare wrote.
template <class Element, int kK, Precision kPrecision>
void scan_output(const Params& p, cudaStream_t stream);

// Bytes of shared memory that scan_output needs.
template <class Element, int kK, Precision kPrecision>
int64_t scan_output_shared_bytes(int warps);

// The same pass for few blocks, of up to kMostRolePairs warps, with outputs and kK = 128: another
// warp beside each makes the output.
template <class Element, int kK, Precision kPrecision>
void scan_roles(const Params& p, cudaStream_t stream);
template <class Element, int kK, Precision kPrecision>
int64_t scan_roles_shared_bytes();

}  // namespace deltanet::cuda::tensor_core
