// SPDX-License-Identifier: Apache-2.0
//
// The adjoint state, chunk by chunk in reverse, in fp32: docs/algorithm.md, equations (11) to (14).
//
//   Z   = (I + L)^-T (P^T dO + diag(f) K dS)           back substitution, T is never formed
//   dV  = diag(b) Z
//   dS <- e^{G_C} dS + (scale diag(e^G) Q)^T dO - (diag(b e^G) K)^T Z
//
// Work split:  one block = one (sequence, value head, kColumns of V), over all chunks. Half of the
//              threads multiply K dS, the other half P^T dO; all of them update. Substitution: one
//              thread per column.
// Numerics:    every sum runs over K, or over the tokens, in one fixed order that does not depend
//              on kColumns.
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
  const Prepared* prepared;       // [strips * kStripChunks, HV]
  ChunkTable table;               // of strips
  int64_t strips;                 // how many there is room for
  MutableView<4> strip_adjoints;  // [strips, HV, K, V]  dS at the end of each; absent: not wanted
  bool query_quads, key_quads, grad_quads, value_quads, final_quads, initial_quads;
};

template <int kColumns_>
struct AdjointTraits {
  static_assert(kColumns_ == 16 || kColumns_ == 32, "tiles of 64 threads");
  static constexpr int kColumns = kColumns_;
  static constexpr int kThreads = 128;
  static constexpr int kMinBlocks = 4;
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

// The first token of the piece that ends at `end`. All threads read the same.
__device__ __forceinline__ int piece_before(const Prepared& prepared, int end) {
  int first = end - 1;
  while (first > 0 && prepared.end[first - 1] == end) --first;
  return first;
}

template <int kColumns>
class AdjointBlock {
 public:
  using Traits = AdjointTraits<kColumns>;
  using Shared = typename Traits::Shared;
  static constexpr int kRows = Traits::kRows;

  __device__ __forceinline__ AdjointBlock(const RuleBackwardParams& p, const AdjointArguments& x,
                                          float4* memory, int64_t n, int64_t head, int tile)
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

  __device__ __forceinline__ void run() {
    state_.load(p_.grad_final_state, n_, head_, x_.final_quads, false);
    const Sequence s = sequence_at(p_, n_);
    const int64_t strip = first_chunk_of(p_, x_.table, n_);
    int64_t chunks = (s.end - s.begin + kChunk - 1) / kChunk;
    // cu_seqlens that decrease can promise more chunks than there is room for.
    const int64_t room = (x_.strips - strip) * kStripChunks;
    const int64_t used = chunks < room ? chunks : room;
    for (int64_t i = used - 1; i >= 0; --i) {
      const int64_t t = s.begin + i * kChunk;
      const int count = int(s.end - t < kChunk ? s.end - t : kChunk);
      __syncthreads();  // the chunk after has been read, dS is complete (first: it is there)
      if (i == used - 1 || unsigned(i) % kStripChunks == kStripChunks - 1)
        state_.store(x_.strip_adjoints, strip + unsigned(i) / kStripChunks, head_, true);
      load_chunk(s.batch, t, count, strip * kStripChunks + i);
      __syncthreads();  // the chunk is complete, dS has been stored
      for (int end = count; end > 0;) {
        const int first = piece_before(shared_.prepared, end);
        run_piece(s.batch, t, first, end);
        end = first;
        if (end > 0) __syncthreads();  // dS is complete, K dS may be overwritten
      }
    }
    __syncthreads();  // dS is complete
    state_.store(p_.d_initial_state, n_, head_, x_.initial_quads);
  }

 private:
  __device__ __forceinline__ void load_chunk(int64_t batch, int64_t t, int count, int64_t number) {
    load_rows(p_.key, batch, t, count, key_head_, p_.dim_k, x_.key_quads, k_, pitch_,
              Traits::kThreads);
    if (p_.grad_output.data)
      load_rows(p_.query, batch, t, count, key_head_, p_.dim_k, x_.query_quads, q_, pitch_,
                Traits::kThreads);
    load_columns<kColumns, kColumns, Traits::kThreads>(
        p_.grad_output, batch, t, count, head_, column_, p_.dim_v, x_.grad_quads, shared_.grad[0]);
    load_prepared<Traits::kThreads>(x_.prepared + number * p_.value_heads + head_,
                                    shared_.prepared);
  }

  // Tokens first to end of the chunk that starts at t.
  __device__ __forceinline__ void run_piece(int64_t batch, int64_t t, int first, int end) {
    const bool of_output = thread_ >= 64;
    const int row = thread_ % 64 / Traits::kColumnQuads * kRows;
    const int c = thread_ % Traits::kColumnQuads * 4;
    float4 sum[kRows] = {};
    if (!of_output)
      state_.multiply(k_, pitch_, row, c, sum);
    else if (p_.grad_output.data)
      add_outputs(row, c, first, end, sum);
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      *reinterpret_cast<float4*>(of_output ? &shared_.z[row + r][c] : &shared_.y[row + r][c]) =
          sum[r];
    __syncthreads();  // K dS and P^T dO are complete
    if (thread_ < kColumns) substitute(first, end);
    __syncthreads();  // Z is complete, and dS has been read
    if (p_.d_value.data) store_values(batch, t, first, end);
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
      if (p_.grad_output.data) add_rows(q_, shared_.grad, 1.f, first, end, row, c, sum);
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
  const StateTile<kColumns, kColumns, Traits::kThreads> state_;
  float* const k_;  // [16][pitch], as they came
  float* const q_;
  const int pitch_;
  const int64_t n_, head_, key_head_;
  const int column_, thread_;
};

template <int kColumns>
__global__ void __launch_bounds__(AdjointTraits<kColumns>::kThreads,
                                  AdjointTraits<kColumns>::kMinBlocks)
    adjoint_kernel(const __grid_constant__ RuleBackwardParams p,
                   const __grid_constant__ AdjointArguments x) {
  extern __shared__ float4 memory[];
  const RuleBlock block = rule_block(p, kColumns);
  if (block.sequence < p.sequences)
    AdjointBlock<kColumns>(p, x, memory, block.sequence, block.head, block.tile).run();
}

}  // namespace deltanet::cuda::simt
