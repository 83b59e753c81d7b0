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
// Numerics:    every sum runs over K, or over the tokens, in one fixed order that does not depend
// on
//              kColumns.
// Memory:      S stays in shared memory; q, k, v and what prepare made are read once per V tile, o
// is
//              written once.
// Edges:       rows beyond K, columns beyond V and tokens beyond the chunk's end are zeros. No row
//              ever reads a later one.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/chunk_table.cuh"
#include "cuda/load.cuh"
#include "cuda/rule_params.cuh"
#include "cuda/simt_prepare.cuh"

namespace deltanet::cuda::simt {

struct ScanArguments {
  const Prepared* prepared;  // [chunks, HV]
  ChunkTable table;
  int64_t chunks;  // how many there is room for
  bool query_quads, key_quads, value_quads, output_quads, initial_quads, final_quads;
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
  __host__ __device__ static int padded(int dim_k) { return (dim_k + 3) / 4 * 4; }
  static int64_t shared_bytes(int dim_k) {
    return int64_t(sizeof(Shared)) +
           int64_t(sizeof(float)) *
               (int64_t(padded(dim_k)) * kColumns + 2 * kChunk * PrepareTraits::row_pitch(dim_k));
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
        S_(reinterpret_cast<float*>(memory) + sizeof(Shared) / 4),
        k_(S_ + Traits::padded(p.dim_k) * kColumns),
        q_(k_ + kChunk * PrepareTraits::row_pitch(p.dim_k)),
        pitch_(PrepareTraits::row_pitch(p.dim_k)),
        dim_(Traits::padded(p.dim_k)),
        n_(n),
        head_(head),
        key_head_(key_head_of(p, head)),
        column_(tile * kColumns),
        thread_(int(threadIdx.x)) {}

  __device__ __forceinline__ void run() {
    load_state();
    const Sequence s = sequence_at(p_, n_);
    const int64_t offset = first_chunk_of(p_, x_.table, n_);
    int64_t number = offset;
    for (int64_t t = s.begin; t < s.end && number < x_.chunks; t += kChunk, ++number) {
      const int count = int(s.end - t < kChunk ? s.end - t : kChunk);
      __syncthreads();  // the chunk before has been read (first: the state is there)
      load_chunk(s.batch, t, count, number);
      __syncthreads();  // the chunk is complete
      for (int first = 0; first < count;) {
        const int end = shared_.prepared.end[first];
        run_piece(s.batch, t, first, end);
        first = end;
        if (first < count) __syncthreads();  // S is complete, K S may be overwritten
      }
    }
    __syncthreads();  // S is complete
    store_state();
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
  // ---- the state

  // Calls visit(row, column) for rows x `width` columns each: neighbors in memory for neighbors in
  // the block.
  template <class Visit>
  __device__ __forceinline__ void for_each_entry(int64_t row_stride, int rows, int width,
                                                 const Visit& visit) const {
    const int per_row = kColumns / width;
    if (width == 1 && row_stride == 1) {  // K is the contiguous axis
      for (int c = 0; c < kColumns; ++c)
        for (int r = thread_; r < rows; r += Traits::kThreads) visit(r, c);
    } else {
      for (int e = thread_; e < rows * per_row; e += Traits::kThreads)
        visit(e / per_row, e % per_row * width);
    }
  }

  __device__ __forceinline__ void load_state() {
    const auto& x = p_.initial_state;
    const int64_t base = n_ * x.stride[0] + head_ * x.stride[1] + column_ * x.stride[3];
    if (x.data && x_.initial_quads) {
      for_each_entry(x.stride[2], dim_, 4, [&](int r, int c) {
        const int left = r < p_.dim_k ? p_.dim_v - column_ - c : 0;
        *reinterpret_cast<float4*>(S_ + r * kColumns + c) = load_quad(
            x.data, x.dtype, base + r * x.stride[2] + c * x.stride[3], x.stride[3], left, true);
      });
    } else {
      for_each_entry(x.stride[2], dim_, 1, [&](int r, int c) {
        const bool inside = r < p_.dim_k && column_ + c < p_.dim_v;
        float e = p_.initial_state_is_identity && inside && r == column_ + c ? 1.f : 0.f;
        if (x.data && inside)
          e = load_float(x.data, x.dtype, base + r * x.stride[2] + c * x.stride[3]);
        S_[r * kColumns + c] = e;
      });
    }
  }

  __device__ __forceinline__ void store_state() const {
    const auto& x = p_.final_state;
    if (!x.data) return;
    const int64_t base = n_ * x.stride[0] + head_ * x.stride[1] + column_ * x.stride[3];
    for_each_entry(x.stride[2], p_.dim_k, x_.final_quads ? 4 : 1, [&](int r, int c) {
      const int left = p_.dim_v - column_ - c;
      const int64_t at = base + r * x.stride[2] + c * x.stride[3];
      if (x_.final_quads)
        store_quad(x.data, x.dtype, at, x.stride[3], left, true,
                   *reinterpret_cast<const float4*>(S_ + r * kColumns + c));
      else if (left > 0)
        store_float(x.data, x.dtype, at, S_[r * kColumns + c]);
    });
  }

  // ---- a chunk

  __device__ __forceinline__ void load_chunk(int64_t batch, int64_t t, int count, int64_t number) {
    load_rows(p_.key, batch, t, count, key_head_, p_.dim_k, x_.key_quads, k_, pitch_,
              Traits::kThreads);
    if (p_.output.data)
      load_rows(p_.query, batch, t, count, key_head_, p_.dim_k, x_.query_quads, q_, pitch_,
                Traits::kThreads);
    const auto& v = p_.value;
    const int64_t base = batch * v.stride[0] + t * v.stride[1] + head_ * v.stride[2];
    for (int e = thread_; e < kChunk * Traits::kColumnQuads; e += Traits::kThreads) {
      const int row = e / Traits::kColumnQuads, c = e % Traits::kColumnQuads * 4;
      const int left = v.data && row < count ? p_.dim_v - column_ - c : 0;
      *reinterpret_cast<float4*>(&shared_.v[row][c]) =
          load_quad(v.data, v.dtype, base + row * v.stride[1] + (column_ + c) * v.stride[3],
                    v.stride[3], left, x_.value_quads);
    }
    const auto* from =
        reinterpret_cast<const float4*>(x_.prepared + number * p_.value_heads + head_);
    for (int e = thread_; e < int(sizeof(Prepared) / 16); e += Traits::kThreads)
      reinterpret_cast<float4*>(&shared_.prepared)[e] = from[e];
  }

  // Tokens first to end of the chunk that starts at t. Usually all of them: see cut_chunk.
  __device__ __forceinline__ void run_piece(int64_t batch, int64_t t, int first, int end) {
    const bool of_query = thread_ >= 64;
    const int row = thread_ % 64 / Traits::kColumnQuads * kRows;
    const int c = thread_ % Traits::kColumnQuads * 4;
    float4 sum[kRows] = {};
    if (!of_query || p_.output.data) rows_times_state(of_query ? q_ : k_, row, c, sum);
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

  // sum = A S for rows `row` on of A and columns c to c + 3
  __device__ __forceinline__ void rows_times_state(const float* A, int row, int c,
                                                   float4 (&sum)[kRows]) const {
    A += row * pitch_;
    const float* S = S_ + c;
#pragma unroll 2
    for (int m = 0; m < dim_; m += 4) {
      float4 a[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) a[r] = *reinterpret_cast<const float4*>(A + r * pitch_ + m);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float4 b = *reinterpret_cast<const float4*>(S + (m + k) * kColumns);
#pragma unroll
        for (int r = 0; r < kRows; ++r) add_scaled(sum[r], component(a[r], k), b);
      }
    }
  }
  static __device__ __forceinline__ float component(float4 x, int k) {
    return k == 0 ? x.x : k == 1 ? x.y : k == 2 ? x.z : x.w;
  }
  static __device__ __forceinline__ void add_scaled(float4& sum, float a, float4 b) {
    sum.x = fmaf(a, b.x, sum.x);
    sum.y = fmaf(a, b.y, sum.y);
    sum.z = fmaf(a, b.z, sum.z);
    sum.w = fmaf(a, b.w, sum.w);
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
      const float factor = f.query[row + r];
      sum[r] =
          make_float4(factor * sum[r].x, factor * sum[r].y, factor * sum[r].z, factor * sum[r].w);
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
    for (int tile = thread_; tile < dim_ / 4 * Traits::kColumnQuads; tile += Traits::kThreads) {
      const int row = tile / Traits::kColumnQuads * 4, c = tile % Traits::kColumnQuads * 4;
      float* S = S_ + row * kColumns + c;
      float4 sum[4];
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const float4 e = *reinterpret_cast<const float4*>(S + r * kColumns);
        sum[r] = make_float4(keep * e.x, keep * e.y, keep * e.z, keep * e.w);
      }
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
  float* const S_;  // [K padded][kColumns]
  float* const k_;  // [16][pitch], as they came
  float* const q_;
  const int pitch_, dim_;
  const int64_t n_, head_, key_head_;
  const int column_, thread_;
};

template <int kColumns>
__global__ void __launch_bounds__(ScanTraits<kColumns>::kThreads, ScanTraits<kColumns>::kMinBlocks)
    scan_kernel(const __grid_constant__ RuleParams p, const __grid_constant__ ScanArguments x) {
  extern __shared__ float4 memory[];
  const RuleBlock block = rule_block(p, kColumns);
  if (block.sequence < p.sequences)
    ScanBlock<kColumns>(p, x, memory, block.sequence, block.head, block.tile).run();
  else
    ScanBlock<kColumns>::clear(p, x, block.head, block.tile);
}

}  // namespace deltanet::cuda::simt
