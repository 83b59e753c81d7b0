// SPDX-License-Identifier: Apache-2.0
//
// The adjoint state, chunk by chunk in reverse, in fp32: docs/algorithm.md, equations (11) to (14).
//
//   Z   = (I + L)^-T (P^T dO + diag(f) K dS)           back substitution, T is never formed
//   dV  = diag(b) Z
//   dS <- e^{G_C} dS + (scale diag(e^G) Q)^T dO - (diag(b e^G) K)^T Z
//
// Over a run of tokens that is dS -> W dS + U, and W is the transpose of (8)'s M. A sequence is cut
// into segments of whole strips, anchored at its start, when one chain per sequence would leave the
// device idle. Then this kernel runs twice: first it makes the maps, U from zero and W from I with
// dO = 0; scan_adjoints (simt_adjoint_scan.cuh) finds where each segment starts; and with that
// each runs again. The last segment starts from the gradient of the final state and needs no W, the
// first one needs neither.
//
// Work split:  one block = one (segment, sequence, value head, kColumns of V or of W), over all
//              chunks. Half of the threads multiply K dS, the other half P^T dO; all of them
//              update. Substitution: one thread per column.
// Numerics:    every sum runs over K, or over the tokens, in one fixed order that does not depend
//              on kColumns. Where a sequence is cut changes rounding.
// Memory:      dS stays in shared memory; q, k, dO and what prepare made are read once per V tile.
//              dV is written once, and dS at the end of every strip where gradients need it.
// Edges:       as in the forward pass (simt_scan.cuh). A chunk that positive gates cut runs piece
//              by piece, the last one first.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/chunk_table.cuh"
#include "cuda/load.cuh"
#include "cuda/rule_params.cuh"
#include "cuda/simt_chunk.cuh"
#include "cuda/simt_state.cuh"
#include "cuda/strips.cuh"

namespace deltanet::cuda::simt {

struct AdjointArguments {
  const Prepared* prepared;  // [strips * kStripChunks, HV]
  ChunkTable table;          // of strips
  int64_t strips;            // how many there is room for
  float* strip_adjoints;     // [strips, HV] of state_floats: dS behind each; null: not wanted
  // Segments of the longest sequence there can be, and strips in each of them but the last.
  int64_t segments, segment_strips;
  float* ends;  // [segments - 1, N, HV] of state_floats: U of segment s + 1, then dS behind s
  float* maps;  // [segments - 2, N, HV, K, K padded]: W of segment s + 1
  bool making_maps;
  bool query_quads, key_quads, grad_quads, value_quads, final_quads, initial_quads;

  __device__ __forceinline__ float* end_of(const RuleParams& p, int64_t segment, int64_t n,
                                           int64_t head) const {
    return ends +
           ((segment * p.sequences + n) * p.value_heads + head) * state_floats(p.dim_k, p.dim_v);
  }
  __device__ __forceinline__ float* map_of(const RuleParams& p, int64_t segment, int64_t n,
                                           int64_t head) const {
    return maps + (((segment - 1) * p.sequences + n) * p.value_heads + head) *
                      state_floats(p.dim_k, p.dim_k);
  }
};

// Chunks of sequence n, and the last of its segments. An empty sequence has one, segment 0.
struct AdjointSequence {
  Sequence tokens;
  int64_t strip;  // its first one
  int64_t chunks, last;
};
__device__ __forceinline__ AdjointSequence adjoint_sequence(const RuleParams& p,
                                                            const AdjointArguments& x, int64_t n) {
  AdjointSequence s;
  s.tokens = sequence_at(p, n);
  s.strip = first_chunk_of(p, x.table, n);
  s.chunks = (s.tokens.end - s.tokens.begin + kChunk - 1) / kChunk;
  // cu_seqlens that decrease can promise more chunks than there is room for.
  const int64_t room = (x.strips - s.strip) * kStripChunks;
  if (s.chunks > room) s.chunks = room;
  // Chunks are below 2^31: a 32-bit division.
  s.last = s.chunks > 0 ? unsigned(s.chunks - 1) / unsigned(x.segment_strips * kStripChunks) : 0;
  return s;
}

__host__ __device__ inline int column_tiles(int dim, int columns) {
  return (dim + columns - 1) / columns;
}

template <int kColumns_>
struct AdjointTraits {
  static_assert(kColumns_ == 16 || kColumns_ == 32, "tiles of 64 threads");
  static constexpr int kColumns = kColumns_;
  static constexpr int kThreads = 128;
  static constexpr int kMinBlocks = 3;  // 168 registers: none is spilled
  static constexpr int kColumnQuads = kColumns / 4;
  // K dS and P^T dO have 64 threads each; a thread has kRows x 4 sums.
  static constexpr int kRows = kChunk * kColumnQuads / 64;
  // [K, kColumns] dS and two times [16, row pitch] follow.
  struct Shared {
    Prepared prepared;
    float grad[kChunk][kColumns];  // dO, then dO with the update's factors
    float y[kChunk][kColumns];     // K dS, then Z with the update's factors
    float z[kChunk][kColumns];     // P^T dO, then Z
  };
  static int64_t shared_bytes(int dim_k) {
    return int64_t(sizeof(Shared)) +
           int64_t(sizeof(float)) *
               (int64_t(padded_rows(dim_k)) * kColumns + 2 * kChunk * row_pitch(dim_k));
  }
};

template <int kColumns>
class AdjointBlock {
 public:
  using Traits = AdjointTraits<kColumns>;
  using Shared = typename Traits::Shared;
  static constexpr int kRows = Traits::kRows;

  // Tiles of W stand behind those of V.
  __device__ __forceinline__ AdjointBlock(const RuleBackwardParams& p, const AdjointArguments& x,
                                          float4* memory, int64_t n, int64_t head, int tile)
      : p_(p),
        x_(x),
        shared_(*reinterpret_cast<Shared*>(memory)),
        of_map_(tile >= column_tiles(p.dim_v, kColumns)),
        with_output_(p.grad_output.data && !of_map_),
        column_((of_map_ ? tile - column_tiles(p.dim_v, kColumns) : tile) * kColumns),
        state_{reinterpret_cast<float*>(memory) + sizeof(Shared) / 4, p.dim_k,
               of_map_ ? p.dim_k : p.dim_v, column_},
        k_(state_.S + padded_rows(p.dim_k) * kColumns),
        q_(k_ + kChunk * row_pitch(p.dim_k)),
        pitch_(row_pitch(p.dim_k)),
        n_(n),
        head_(head),
        key_head_(key_head_of(p, head)),
        thread_(int(threadIdx.x)) {}

  __device__ __forceinline__ void run(int64_t segment) {
    const AdjointSequence s = adjoint_sequence(p_, x_, n_);
    if (segment > s.last) return;
    if (x_.making_maps && (segment == 0 || (of_map_ && segment == s.last))) return;
    start(segment, s.last);
    const int64_t length = x_.segment_strips * kStripChunks, before = segment * length;
    const int64_t end = segment < s.last ? before + length : s.chunks;
    for (int64_t i = end - 1; i >= before; --i) {
      const int64_t t = s.tokens.begin + i * kChunk, left = s.tokens.end - t;
      const int count = int(left < kChunk ? left : kChunk);
      __syncthreads();  // the chunk after has been read, dS is complete (first: it is there)
      if (x_.strip_adjoints && !x_.making_maps &&
          (i == end - 1 || unsigned(i) % kStripChunks == kStripChunks - 1))
        state_.store(x_.strip_adjoints +
                     ((s.strip + unsigned(i) / kStripChunks) * p_.value_heads + head_) *
                         state_floats(p_.dim_k, p_.dim_v));
      loader().load({s.tokens.batch, t, count, s.strip * kStripChunks + i}, k_,
                    with_output_ ? q_ : nullptr, pitch_, shared_.grad[0], shared_.prepared);
      __syncthreads();  // the chunk is complete, dS has been stored
      clear_overflowing(shared_.prepared, k_, with_output_ ? q_ : nullptr, pitch_, p_.dim_k,
                        Traits::kThreads);
      for (int stop = count; stop > 0;) {
        const int first = piece_before(shared_.prepared, stop);
        run_piece(s.tokens.batch, t, first, stop);
        stop = first;
        if (stop > 0) __syncthreads();  // dS is complete, K dS may be overwritten
      }
    }
    __syncthreads();  // dS is complete
    if (of_map_)
      state_.store(x_.map_of(p_, segment, n_, head_));
    else if (x_.making_maps)
      state_.store(x_.end_of(p_, segment - 1, n_, head_));
    else if (segment == 0)
      state_.store(p_.d_initial_state, n_, head_, x_.initial_quads);
  }

 private:
  __device__ __forceinline__ void start(int64_t segment, int64_t last) const {
    const bool at_end = segment == last;
    if (!at_end && !x_.making_maps)
      state_.load(x_.end_of(p_, segment, n_, head_));
    else if (at_end)
      state_.load(p_.grad_final_state, n_, head_, x_.final_quads, false);
    else
      state_.load(View<4>(), n_, head_, false, of_map_);
  }

  __device__ __forceinline__ ChunkLoader<kColumns, Traits::kThreads> loader() const {
    return {p_,
            x_.prepared,
            p_.grad_output,
            x_.query_quads,
            x_.key_quads,
            x_.grad_quads,
            head_,
            key_head_,
            column_,
            with_output_ ? p_.dim_v : 0};
  }

  // Tokens first to end of the chunk that starts at t.
  __device__ __forceinline__ void run_piece(int64_t batch, int64_t t, int first, int end) {
    const bool of_output = thread_ >= 64;
    const int row = thread_ % 64 / Traits::kColumnQuads * kRows;
    const int c = thread_ % Traits::kColumnQuads * 4;
    float4 sum[kRows] = {};
    if (!of_output)
      state_.multiply(k_, pitch_, row, c, sum);
    else if (with_output_)
      add_outputs(row, c, first, end, sum);
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      *reinterpret_cast<float4*>(of_output ? &shared_.z[row + r][c] : &shared_.y[row + r][c]) =
          sum[r];
    __syncthreads();  // K dS and P^T dO are complete
    if (thread_ < kColumns) substitute(first, end);
    __syncthreads();  // Z is complete, and dS has been read
    if (p_.d_value.data && !x_.making_maps) store_values(batch, t, first, end);
    update_state(first, end);
  }

  // P^T dO: token j <= i of the same piece reaches the output of token i.
  __device__ __forceinline__ void add_outputs(int row, int c, int first, int end,
                                              float4 (&sum)[kRows]) const {
    for (int i = first; i < end; ++i) {
      const float4 grad = *reinterpret_cast<const float4*>(&shared_.grad[i][c]);
#pragma unroll
      for (int r = 0; r < kRows; ++r)
        if (row + r <= i) add_scaled(sum[r], shared_.prepared.P[i][row + r], grad);
    }
  }

  // Equation (12) for one column, from the last row to the first.
  __device__ __forceinline__ void substitute(int first, int end) {
    const Prepared& f = shared_.prepared;
    float z[kChunk];
#pragma unroll
    for (int i = kChunk - 1; i >= 0; --i) {
      z[i] = 0.f;
      if (i < first || i >= end) continue;
      float sum = fmaf(f.update[i], shared_.y[i][thread_], shared_.z[i][thread_]);
#pragma unroll
      for (int j = kChunk - 1; j > i; --j) sum = fmaf(-f.L[j][i], z[j], sum);
      z[i] = sum;
      shared_.z[i][thread_] = sum;
      shared_.y[i][thread_] = f.key[i] * sum;
      shared_.grad[i][thread_] *= f.query[i];
    }
  }

  // Equation (13).
  __device__ __forceinline__ void store_values(int64_t batch, int64_t t, int first, int end) const {
    const auto& x = p_.d_value;
    const int64_t base =
        batch * x.stride[0] + t * x.stride[1] + head_ * x.stride[2] + column_ * x.stride[3];
    for (int e = thread_; e < kChunk * Traits::kColumnQuads; e += Traits::kThreads) {
      const int row = e / Traits::kColumnQuads, c = e % Traits::kColumnQuads * 4;
      if (row < first || row >= end) continue;
      store_quad(x.data, x.dtype, base + row * x.stride[1] + c * x.stride[3], x.stride[3],
                 p_.dim_v - column_ - c, x_.value_quads,
                 scaled(shared_.prepared.value[row],
                        *reinterpret_cast<const float4*>(&shared_.z[row][c])));
    }
  }

  // Equation (14), 4 rows x 4 columns at a time.
  __device__ __forceinline__ void update_state(int first, int end) {
    const float keep = shared_.prepared.keep[first];
    for (int tile = thread_; tile < padded_rows(p_.dim_k) / 4 * Traits::kColumnQuads;
         tile += Traits::kThreads) {
      const int row = tile / Traits::kColumnQuads * 4, c = tile % Traits::kColumnQuads * 4;
      float* dS = state_.S + row * kColumns + c;
      float4 sum[4];
#pragma unroll
      for (int r = 0; r < 4; ++r)
        sum[r] = scaled(keep, *reinterpret_cast<const float4*>(dS + r * kColumns));
      if (with_output_) add_rows(q_, shared_.grad, 1.f, first, end, row, c, sum);
      add_rows(k_, shared_.y, -1.f, first, end, row, c, sum);
#pragma unroll
      for (int r = 0; r < 4; ++r) *reinterpret_cast<float4*>(dS + r * kColumns) = sum[r];
    }
  }
  // sum += sign A^T X over rows first to end
  __device__ __forceinline__ void add_rows(const float* A, const float (&X)[kChunk][kColumns],
                                           float sign, int first, int end, int row, int c,
                                           float4 (&sum)[4]) const {
    for (int m = first; m < end; ++m) {
      const float4 a = *reinterpret_cast<const float4*>(A + m * pitch_ + row);
      const float4 x = *reinterpret_cast<const float4*>(&X[m][c]);
      add_scaled(sum[0], sign * a.x, x);
      add_scaled(sum[1], sign * a.y, x);
      add_scaled(sum[2], sign * a.z, x);
      add_scaled(sum[3], sign * a.w, x);
    }
  }

  const RuleBackwardParams& p_;
  const AdjointArguments& x_;
  Shared& shared_;
  const bool of_map_, with_output_;
  const int column_;
  const StateTile<kColumns, kColumns, Traits::kThreads> state_;
  float* const k_;  // [16][pitch], as they came
  float* const q_;
  const int pitch_;
  const int64_t n_, head_, key_head_;
  const int thread_;
};

// Tiles of V and, where maps are made, of W.
template <int kColumns>
__host__ __device__ inline int adjoint_tiles(const RuleParams& p, const AdjointArguments& x) {
  return column_tiles(p.dim_v, kColumns) + (x.making_maps ? column_tiles(p.dim_k, kColumns) : 0);
}

template <int kColumns>
__global__ void __launch_bounds__(AdjointTraits<kColumns>::kThreads,
                                  AdjointTraits<kColumns>::kMinBlocks)
    adjoint_kernel(const __grid_constant__ RuleBackwardParams p,
                   const __grid_constant__ AdjointArguments x) {
  extern __shared__ float4 memory[];
  // Blocks are below 2^31, and so is all that they count: 32-bit divisions.
  const unsigned tiles = unsigned(adjoint_tiles<kColumns>(p, x));
  const unsigned key = blockIdx.x / tiles, run = key / unsigned(p.value_heads);
  const unsigned sequences = unsigned(p.sequences);
  AdjointBlock<kColumns>(p, x, memory, run % sequences, key % unsigned(p.value_heads),
                         int(blockIdx.x % tiles))
      .run(run / sequences);
}

}  // namespace deltanet::cuda::simt
