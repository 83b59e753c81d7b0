// SPDX-License-Identifier: Apache-2.0
//
// State and output, chunk by chunk, in fp32: docs/algorithm.md, equations (5) to (7).
//
//   V' = (I + L)^-1 diag(b) (V - diag(e^G) K S)        forward substitution, T is never formed
//   O  = scale (diag(e^G) Q S + (Q K^T o D) V')
//   S <- e^{G_C} S + (diag(e^{G_C - G}) K)^T V'
//
// Work split:  one block = one (sequence, value head, kColumns of V), over all chunks. Half of the
//              threads multiply K S, the other half Q S and later the output; all of them update.
//              Substitution: one thread per column.
//              In the backward pass one block = one (segment, value head, kColumns of V), which
//              starts from a saved state and leaves the state before every strip.
// Numerics:    every sum runs over K, or over the tokens, in one fixed order that does not depend
//              on kColumns.
// Memory:      S stays in shared memory; q, k, v and what prepare made are read once per V tile,
//              o is written once.
// Edges:       rows beyond K, columns beyond V and tokens beyond the chunk's end are zeros. No row
//              ever reads a later one.
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

struct ScanArguments {
  const Prepared* prepared;  // [chunks, HV]
  ChunkTable table;
  int parts;       // chunks of an entry of the table
  int64_t chunks;  // how many there is room for
  // Backward pass: blocks run segments, from these states, and leave the state before each strip.
  View<4> segment_states;  // [B * (T / kSegmentTokens), HV, K, V]
  float* strip_states;     // [strips, HV] of state_floats; null: whole sequences
  bool query_quads, key_quads, value_quads, output_quads, initial_quads, final_quads, saved_quads,
      segment_quads;
};

template <int kColumns_>
struct ScanTraits {
  static_assert(kColumns_ == 16 || kColumns_ == 32 || kColumns_ == 64, "tiles of 64 threads");
  static constexpr int kColumns = kColumns_;
  static constexpr int kThreads = 128;
  static constexpr int kMinBlocks = kColumns == 64 ? 3 : 4;  // as many as shared memory holds
  static constexpr int kColumnQuads = kColumns / 4;
  // K S and Q S have 64 threads each; a thread has kRows x 4 sums.
  static constexpr int kRows = kChunk * kColumnQuads / 64;
  // [K, kColumns] S and two times [16, row pitch] follow.
  struct Shared {
    Prepared prepared;
    float x[kChunk][kColumns];  // K S, then V' with the update's factors
    float v[kChunk][kColumns];  // V, then V'
  };
  static int64_t shared_bytes(int dim_k) {
    return int64_t(sizeof(Shared)) +
           int64_t(sizeof(float)) *
               (int64_t(padded_rows(dim_k)) * kColumns + 2 * kChunk * row_pitch(dim_k));
  }
};

template <int kColumns>
class ScanBlock {
 public:
  using Traits = ScanTraits<kColumns>;
  using Shared = typename Traits::Shared;
  static constexpr int kRows = Traits::kRows;

  __device__ __forceinline__ ScanBlock(const RuleParams& p, const ScanArguments& x, float4* memory,
                                       int64_t n, int64_t head, int tile)
      : p_(p),
        x_(x),
        shared_(*reinterpret_cast<Shared*>(memory)),
        state_{reinterpret_cast<float*>(memory) + sizeof(Shared) / 4, p.dim_k, p.dim_v,
               tile * kColumns},
        k_(state_.S + padded_rows(p.dim_k) * kColumns),
        q_(k_ + kChunk * row_pitch(p.dim_k)),
        pitch_(row_pitch(p.dim_k)),
        n_(n),
        head_(head),
        key_head_(key_head_of(p, head)),
        column_(tile * kColumns),
        thread_(int(threadIdx.x)) {}

  // The whole sequence: the final state and, for a backward pass to come, those to start from.
  __device__ __forceinline__ void run() {
    state_.load(p_.initial_state, n_, head_, x_.initial_quads, p_.initial_state_is_identity);
    const Sequence s = sequence_at(p_, n_);
    run_chunks(s, s.begin, s.end, [&](int64_t t) {
      if (p_.saved_states.data && t > s.begin &&
          unsigned(t - s.begin) % unsigned(kSegmentTokens) == 0)
        state_.store(p_.saved_states, p_.saved_state(s.batch, t), head_, x_.saved_quads);
    });
    __syncthreads();  // S is complete
    state_.store(p_.final_state, n_, head_, x_.final_quads);
  }

  // One segment, whose first strip is `strip`: the state before each of its strips.
  __device__ __forceinline__ void run_segment(int64_t strip, int64_t segment) {
    const Sequence s = sequence_at(p_, n_);
    const int64_t begin = s.begin + segment * kSegmentTokens;
    const int64_t end = s.end - begin < kSegmentTokens ? s.end : begin + kSegmentTokens;
    // Nothing behind the start of the last strip is asked for.
    const int64_t enough = begin + unsigned(end - begin - 1) / kStrip * kStrip + kChunk;
    if (segment == 0)
      state_.load(p_.initial_state, n_, head_, x_.initial_quads, false);
    else
      state_.load(x_.segment_states, p_.saved_state(s.batch, begin), head_, x_.segment_quads,
                  false);
    run_chunks(s, begin, end < enough ? end : enough, [&](int64_t t) {
      if (unsigned(t - begin) % kStrip == 0)
        state_.store(x_.strip_states +
                     ((strip + unsigned(t - begin) / kStrip) * p_.value_heads + head_) *
                         state_floats(p_.dim_k, p_.dim_v));
    });
  }

  // The tail of a packed call: zeros.
  static __device__ __forceinline__ void clear(const RuleParams& p, const ScanArguments& x,
                                               int64_t head, int tile) {
    const auto& o = p.output;
    if (!o.data) return;
    const Sequence s = tail_of(p);
    const int column = tile * kColumns + int(threadIdx.x) % Traits::kColumnQuads * 4;
    for (int64_t t = s.begin + threadIdx.x / Traits::kColumnQuads; t < s.end;
         t += Traits::kThreads / Traits::kColumnQuads)
      store_quad(o.data, o.dtype, t * o.stride[1] + head * o.stride[2] + column * o.stride[3],
                 o.stride[3], p.dim_v - column, x.output_quads, make_float4(0.f, 0.f, 0.f, 0.f));
  }

 private:
  __device__ __forceinline__ ChunkLoader<kColumns, Traits::kThreads> loader() const {
    return {p_,    x_.prepared, p_.value, x_.query_quads, x_.key_quads, x_.value_quads,
            head_, key_head_,   column_,  p_.dim_v};
  }

  // Chunks of tokens `begin` to `end` of sequence s; `before` is called where each of them begins.
  template <class Before>
  __device__ __forceinline__ void run_chunks(const Sequence& s, int64_t begin, int64_t end,
                                             const Before& before) {
    int64_t number = first_chunk_of(p_, x_.table, n_) * x_.parts + (begin - s.begin) / kChunk;
    for (int64_t t = begin; t < end && number < x_.chunks; t += kChunk, ++number) {
      const int count = int(end - t < kChunk ? end - t : kChunk);
      __syncthreads();  // the chunk before has been read, S is complete (first: it is there)
      before(t);
      loader().load({s.batch, t, count, number}, k_, p_.output.data ? q_ : nullptr, pitch_,
                    shared_.v[0], shared_.prepared);
      __syncthreads();  // the chunk is complete
      clear_overflowing(shared_.prepared, k_, p_.output.data ? q_ : nullptr, pitch_, p_.dim_k,
                        Traits::kThreads);
      for (int first = 0; first < count;) {
        const int end = shared_.prepared.end[first];
        run_piece(s.batch, t, first, end);
        first = end;
        if (first < count) __syncthreads();  // S is complete, K S may be overwritten
      }
    }
  }

  // Tokens first to end of the chunk that starts at t. Usually all of them: see cut_chunk.
  __device__ __forceinline__ void run_piece(int64_t batch, int64_t t, int first, int end) {
    const bool of_query = thread_ >= 64;
    const int row = thread_ % 64 / Traits::kColumnQuads * kRows;
    const int c = thread_ % Traits::kColumnQuads * 4;
    float4 sum[kRows] = {};
    if (!of_query || p_.output.data) state_.multiply(of_query ? q_ : k_, pitch_, row, c, sum);
    if (!of_query) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) *reinterpret_cast<float4*>(&shared_.x[row + r][c]) = sum[r];
    }
    __syncthreads();  // K S is complete
    if (thread_ < kColumns) substitute(first, end);
    __syncthreads();  // V' is complete, and S has been read
    if (of_query && p_.output.data) store_output(batch, t, first, end, row, c, sum);
    update_state(first, end);
  }

  // Equation (5) for one column: x_i = b_i v_i - b_i e^{G_i} (K S)_i - sum_{m < i} L_im x_m.
  __device__ __forceinline__ void substitute(int first, int end) {
    const Prepared& f = shared_.prepared;
    float x[kChunk];
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      x[i] = 0.f;
      if (i < first || i >= end) continue;
      float sum = fmaf(-f.key[i], shared_.x[i][thread_], f.value[i] * shared_.v[i][thread_]);
#pragma unroll
      for (int m = 0; m < i; ++m) sum = fmaf(-f.L[i][m], x[m], sum);
      x[i] = sum;
      shared_.v[i][thread_] = sum;
      shared_.x[i][thread_] = f.update[i] * sum;
    }
  }

  // Equation (6): sum holds Q S.
  __device__ __forceinline__ void store_output(int64_t batch, int64_t t, int first, int end,
                                               int row, int c, float4 (&sum)[kRows]) const {
    const Prepared& f = shared_.prepared;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      sum[r] = scaled(f.query[row + r], sum[r]);
    }
    for (int m = first; m < row + kRows && m < end; ++m) {
      const float4 v = *reinterpret_cast<const float4*>(&shared_.v[m][c]);
#pragma unroll
      for (int r = 0; r < kRows; ++r)
        if (m <= row + r) add_scaled(sum[r], f.P[row + r][m], v);
    }
    const auto& o = p_.output;
    const int64_t base =
        batch * o.stride[0] + t * o.stride[1] + head_ * o.stride[2] + (column_ + c) * o.stride[3];
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      if (row + r >= first && row + r < end)
        store_quad(o.data, o.dtype, base + (row + r) * o.stride[1], o.stride[3],
                   p_.dim_v - column_ - c, x_.output_quads, sum[r]);
  }

  // Equation (7), 4 rows x 4 columns at a time.
  __device__ __forceinline__ void update_state(int first, int end) {
    const float keep = shared_.prepared.keep[first];
    for (int tile = thread_; tile < padded_rows(p_.dim_k) / 4 * Traits::kColumnQuads;
         tile += Traits::kThreads) {
      const int row = tile / Traits::kColumnQuads * 4, c = tile % Traits::kColumnQuads * 4;
      float* S = state_.S + row * kColumns + c;
      float4 sum[4];
#pragma unroll
      for (int r = 0; r < 4; ++r)
        sum[r] = scaled(keep, *reinterpret_cast<const float4*>(S + r * kColumns));
      for (int m = first; m < end; ++m) {
        const float4 k = *reinterpret_cast<const float4*>(k_ + m * pitch_ + row);
        const float4 v = *reinterpret_cast<const float4*>(&shared_.x[m][c]);
        add_scaled(sum[0], k.x, v);
        add_scaled(sum[1], k.y, v);
        add_scaled(sum[2], k.z, v);
        add_scaled(sum[3], k.w, v);
      }
#pragma unroll
      for (int r = 0; r < 4; ++r) *reinterpret_cast<float4*>(S + r * kColumns) = sum[r];
    }
  }

  const RuleParams& p_;
  const ScanArguments& x_;
  Shared& shared_;
  const StateTile<kColumns, kColumns, Traits::kThreads> state_;
  float* const k_;  // [16][pitch], as they came
  float* const q_;
  const int pitch_;
  const int64_t n_, head_, key_head_;
  const int column_, thread_;
};

template <int kColumns>
__global__ void __launch_bounds__(ScanTraits<kColumns>::kThreads, ScanTraits<kColumns>::kMinBlocks)
    scan_kernel(const __grid_constant__ RuleParams p, const __grid_constant__ ScanArguments x) {
  extern __shared__ float4 memory[];
  const RuleBlock block = rule_block(p, kColumns);
  if (x.strip_states) {  // of all strips those that start a segment
    const Chunk strip = chunk_at(p, x.table, block.sequence);
    if (strip.count > 0 && unsigned(strip.index) % kSegmentStrips == 0)
      ScanBlock<kColumns>(p, x, memory, strip.sequence, block.head, block.tile)
          .run_segment(block.sequence, unsigned(strip.index) / kSegmentStrips);
  } else if (block.sequence < p.sequences) {
    ScanBlock<kColumns>(p, x, memory, block.sequence, block.head, block.tile).run();
  } else {
    ScanBlock<kColumns>::clear(p, x, block.head, block.tile);
  }
}

}  // namespace deltanet::cuda::simt
