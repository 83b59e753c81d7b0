// SPDX-License-Identifier: Apache-2.0
//
// What a block that makes gradients has, strip by strip: its shared memory, its slot of scratch
// memory, and where the chunks of the strip lie. What is done with it stands in
// simt_gradient_block.cuh (the tiles of V) and simt_gradient_finish.cuh (what follows once they are
// summed).
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/chunk_table.cuh"
#include "cuda/gradient_slots.cuh"
#include "cuda/rule_params.cuh"
#include "cuda/simt_chunk.cuh"
#include "cuda/simt_prepare.cuh"
#include "cuda/simt_state.cuh"
#include "cuda/strips.cuh"

namespace deltanet::cuda::simt {

// What every kernel with such blocks is told.
struct GradientInputs {
  int64_t items, blocks;  // a block takes one item after the other; blocks are as many as slots
  GradientSlots slots;
  double* gate_sums;  // [rows, HV, 2]  of A_log and dt_bias; null: not wanted
  bool query_quads, key_quads, value_quads, grad_quads;
};

template <int kColumns_>
struct GradientTraits {
  static_assert(kColumns_ == 16 || kColumns_ == 8, "two groups of threads for rows");
  static constexpr int kColumns = kColumns_;
  static constexpr int kThreads = 128, kWarps = kThreads / 32;
  static constexpr int kMinBlocks = 3;  // 168 registers: none is spilled
  // Eight rows of four columns, read at once, then hit 32 banks.
  static constexpr int kPitch = kColumns + 4;
  // Products of rows with a state: kQuads threads for a row, four columns for each. That leaves
  // threads idle, but shared memory is what limits these products, and wide loads are few.
  static constexpr int kQuads = kColumns / 4;
  static constexpr int kRowThreads = kChunk * kQuads;
  static_assert(kRowThreads % 32 == 0 && 2 * kRowThreads <= kThreads, "whole warps");

  // What the block works on. In shared memory: registers are scarce.
  struct Place {
    Chunk strip;
    int batch, first_head, head, key_head;
    int tile;  // first column of V
    // Of chunk c and value head h behind first_head: entry c * prepared_stride + h.
    int prepared_stride;
    const Prepared* prepared;
    const PreparedGradient* gradient;
    // The strip's row of gate_sums, and whether it is the first that adds to it.
    int sums;
    bool first_of_sums;
    bool states_only;  // no gradients of this strip are made, only the state behind it
  };
  struct Tile {               // one chunk of one tile of V
    float N[kChunk][kPitch];  // new values
    // K S, later K dS; then rows as the update of a state adds them: f N, later -b e Z
    float X[kChunk][kPitch];
    float grad[kChunk][kPitch];   // dO
    float Z[kChunk][kPitch];      // P^T dO, then Z
    float value[kChunk][kPitch];  // V, then dO as the update of dS adds it
  };
  struct Finish {  // one chunk, once all tiles are summed
    PreparedGradient gradient;
    float W[kChunk][kChunk];
  };
  struct Shared {
    Prepared prepared;
    float decay[kChunk];  // of PreparedGradient
    union {
      Tile tile;
      Finish finish;
      typename PrepareTraits<kThreads>::Shared prepare;
    };
    // For j <= i: [i][j] is dO_i . N_j, then A with norms. For j < i: [j][i] is Z_i . N_j, then X.
    float squares[kStripChunks][kChunk][kChunk];
    float past[kStrip], future[kStrip];  // (21b), (21c)
    float d_beta[kStrip];
    float through[kStrip][kWarps];  // (21d) of the piece that begins here, by warps
    Place place;
  };
  // Two states [K padded][kPitch] and the rows of a chunk, [16][row pitch], follow. Rows of q take
  // the place of the states where these are not needed.
  __host__ __device__ static int state_floats(int dim_k) {
    const int state = padded_rows(dim_k) * kPitch;
    const int rows = kChunk * row_pitch(dim_k);
    return 2 * state > rows ? state : rows / 2;
  }
  static int64_t shared_bytes(int dim_k) {
    return int64_t(sizeof(Shared)) +
           int64_t(sizeof(float)) * (2 * int64_t(state_floats(dim_k)) + kChunk * row_pitch(dim_k));
  }
};

template <int kColumns>
class GradientMemory {
 public:
  using Traits = GradientTraits<kColumns>;
  using Shared = typename Traits::Shared;
  static constexpr int kThreads = Traits::kThreads;
  static constexpr int kPitch = Traits::kPitch;

  __device__ __forceinline__ GradientMemory(const RuleBackwardParams& p, const GradientInputs& x,
                                            float4* memory)
      : p_(p),
        x_(x),
        shared_(*reinterpret_cast<Shared*>(memory)),
        S_(reinterpret_cast<float*>(memory) + sizeof(Shared) / 4),
        dS_(S_ + Traits::state_floats(p.dim_k)),
        k_(dS_ + Traits::state_floats(p.dim_k)),
        pitch_(row_pitch(p.dim_k)),
        thread_(int(threadIdx.x)) {}

 protected:
  __device__ __forceinline__ const typename Traits::Place& place() const { return shared_.place; }
  __device__ __forceinline__ float* slot() const {
    return x_.slots.data + blockIdx.x * x_.slots.floats;
  }
  __device__ __forceinline__ int heads_of_key() const {
    return int(unsigned(p_.value_heads) / unsigned(p_.key_heads));
  }

  // Chunk c of the strip.
  __device__ __forceinline__ int chunks() const {
    return (place().strip.count + kChunk - 1) / kChunk;
  }
  __device__ __forceinline__ int count_of(int c) const {
    return place().strip.count - c * kChunk < kChunk ? place().strip.count - c * kChunk : kChunk;
  }
  __device__ __forceinline__ int64_t first_of(int c) const {
    return place().strip.first + c * kChunk;
  }
  __device__ __forceinline__ int64_t prepared_of(int c) const {
    return int64_t(c) * place().prepared_stride + place().head - place().first_head;
  }

  __device__ __forceinline__ StateTile<kColumns, kPitch, kThreads> tile_of(float* S) const {
    return {S, p_.dim_k, p_.dim_v, place().tile};
  }
  __device__ __forceinline__ void load_rows_of(const View<4>& x, int c, bool quads,
                                               float* to) const {
    load_rows(x, place().batch, first_of(c), count_of(c), place().key_head, p_.dim_k, quads, to,
              pitch_, kThreads);
  }
  __device__ __forceinline__ void load_tile(const View<4>& x, int c, bool quads, float* to) const {
    load_columns<kColumns, kPitch, kThreads>(x, place().batch, first_of(c), count_of(c),
                                             place().head, place().tile, p_.dim_v, quads, to);
  }

  const RuleBackwardParams& p_;
  const GradientInputs& x_;
  Shared& shared_;
  float* const S_;   // [K padded][kPitch]
  float* const dS_;  // the same
  float* const k_;   // [16][pitch], as they came
  const int pitch_;
  const int thread_;
};

}  // namespace deltanet::cuda::simt
