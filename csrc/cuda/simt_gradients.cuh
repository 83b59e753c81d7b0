// SPDX-License-Identifier: Apache-2.0
//
// The gradients of every strip of tokens, in parallel, in fp32: docs/algorithm.md, equations (10)
// to (22), from the state before the strip and the adjoint state behind it.
//
//   N   = (I + L)^-1 diag(b) (V - diag(e) K S)           Z = (I + L)^-T (P^T dO + diag(f) K dS)
//   A   = scale (dO N^T) o D,   B = -(Z N^T) o D
//   dQ  = scale diag(e) dO S^T + A K
//   dK  = diag(f) N dS^T - diag(b e) Z S^T + A^T Q + (X + X^T) K,   X = diag(b) B
//
// Work split:  one block = one (strip, value head), with a loop over tiles of V. For each tile its
//              chunks run forward, for N, and then in reverse. States inside the strip are made
//              again from its start, by updates alone: N is known. A and B are summed over the
//              tiles in shared memory, the rest of dQ and dK in scratch memory, where they stay for
//              the sum over the value heads of a key.
// Numerics:    every sum has one fixed order. dg adds what crosses a token boundary, (22), and
//              never cancels. Rows of k and q are not rescaled: gradients are those of the
//              normalized rows, times the reciprocal norm, which is what (25) starts from.
// Memory:      reads q, k, v, dO, both states of the strip; writes K fp32 numbers each for dQ and
//              dK per token and value head.
// Edges:       as in simt_scan.cuh; what lies outside of a piece is never read.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/chunk_table.cuh"
#include "cuda/load.cuh"
#include "cuda/rule_params.cuh"
#include "cuda/simt_adjoint.cuh"
#include "cuda/simt_chunk.cuh"
#include "cuda/simt_state.cuh"
#include "cuda/strips.cuh"

namespace deltanet::cuda::simt {

struct GradientArguments {
  const Prepared* prepared;          // [strips * kStripChunks, HV]
  const PreparedGradient* gradient;  // the same
  ChunkTable table;                  // of strips
  View<4> states, adjoints;          // [strips, HV, K, V]  before and behind each strip
  // Sums over V, one row per token and value head, times the reciprocal norm of the row of q or k.
  float *d_query, *d_key;  // [B * T, HV, K]  null: not wanted
  double* gate_sums;       // [strips, HV, 2]  of A_log and dt_bias; null: not wanted
  bool query_quads, key_quads, value_quads, grad_quads;
};

template <int kColumns_>
struct GradientTraits {
  static_assert(kColumns_ == 16 || kColumns_ == 8 || kColumns_ == 4, "whole quads");
  static constexpr int kColumns = kColumns_;
  static constexpr int kThreads = 128, kWarps = kThreads / 32;
  static constexpr int kMinBlocks = 4;
  // Eight rows of four columns, read at once, then hit 32 banks.
  static constexpr int kPitch = kColumns + 4;
  // Products of rows with a state: kLanes threads for a row, kEach columns for a thread.
  static constexpr int kEach = kColumns >= 8 ? kColumns / 8 : 1;
  static constexpr int kLanes = kColumns / kEach;
  static constexpr int kRowThreads = kChunk * kLanes;

  struct Shared {
    Prepared prepared;
    PreparedGradient gradient;
    float N[kStrip][kPitch];                 // new values; at the end: W of one chunk
    float X[kStrip][kPitch];                 // diag(e) K S
    float grad[kChunk][kPitch];              // dO
    float Z[kChunk][kPitch];                 // dN, then Z
    float value[kChunk][kPitch];             // V
    float ON[kStripChunks][kChunk][kChunk];  // dO N^T, then A with norms
    float ZN[kStripChunks][kChunk][kChunk];  // Z N^T, then X + X^T with norms
    float past[kStrip], future[kStrip];      // (21b), (21c)
    float d_beta[kStrip];
    float through[kStrip][kWarps];  // (21d) of the piece that begins here, by warps
  };
  // Two states [K padded][kPitch] and the rows of a chunk, [16][row pitch], follow. Rows of q take
  // the place of the states in the end.
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

__device__ __forceinline__ float dot(float4 a, float4 b) {
  return fmaf(a.x, b.x, a.y * b.y) + fmaf(a.z, b.z, a.w * b.w);
}
template <int kQuads>
__device__ __forceinline__ float dot(const float* a, const float4 (&b)[kQuads]) {
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < kQuads; ++i) sum += dot(*reinterpret_cast<const float4*>(a + 4 * i), b[i]);
  return sum;
}
template <int kColumns>
class GradientBlock {
 public:
  using Traits = GradientTraits<kColumns>;
  using Shared = typename Traits::Shared;
  static constexpr int kThreads = Traits::kThreads;
  static constexpr int kPitch = Traits::kPitch;
  static constexpr int kEach = Traits::kEach;
  static constexpr int kQuads = kColumns / 4;

  __device__ __forceinline__ GradientBlock(const RuleBackwardParams& p, const GradientArguments& x,
                                           float4* memory, int64_t number, int64_t head)
      : p_(p),
        x_(x),
        shared_(*reinterpret_cast<Shared*>(memory)),
        S_(reinterpret_cast<float*>(memory) + sizeof(Shared) / 4),
        dS_(S_ + Traits::state_floats(p.dim_k)),
        k_(dS_ + Traits::state_floats(p.dim_k)),
        pitch_(row_pitch(p.dim_k)),
        number_(number),
        head_(head),
        key_head_(key_head_of(p, head)),
        strip_(chunk_at(p, x.table, number)),
        batch_(p.device_cu_seqlens ? 0 : strip_.sequence),
        chunks_((strip_.count + kChunk - 1) / kChunk),
        thread_(int(threadIdx.x)),
        row_(thread_ / Traits::kLanes),
        column_(thread_ % Traits::kLanes * kEach) {}

  __device__ __forceinline__ void run() {
    clear();
    for (int tile = 0; tile < p_.dim_v; tile += kColumns) {
      tile_ = tile;
      forward();
      reverse();
    }
    double sums[2] = {};
    for (int c = 0; c < chunks_; ++c) finish_chunk(c, sums);
    if (x_.gate_sums && thread_ == 0) {
      double* to = x_.gate_sums + 2 * (number_ * p_.value_heads + head_);
      to[0] = sums[0];
      to[1] = sums[1];
    }
  }

 private:
  // ---- chunks

  __device__ __forceinline__ int count_of(int c) const {
    return strip_.count - c * kChunk < kChunk ? strip_.count - c * kChunk : kChunk;
  }
  __device__ __forceinline__ int64_t first_of(int c) const { return strip_.first + c * kChunk; }
  __device__ __forceinline__ int64_t prepared_of(int c) const {
    return (number_ * kStripChunks + c) * p_.value_heads + head_;
  }
  __device__ __forceinline__ StateTile<kColumns, kPitch, kThreads> tile_of(float* S) const {
    return {S, p_.dim_k, p_.dim_v, tile_};
  }

  __device__ __forceinline__ void clear() {
    float* const squares[] = {&shared_.ON[0][0][0], &shared_.ZN[0][0][0]};
    for (float* to : squares)
      for (int e = thread_; e < kStripChunks * kChunk * kChunk; e += kThreads) to[e] = 0.f;
    for (int e = thread_; e < kStrip; e += kThreads) {
      shared_.past[e] = shared_.future[e] = shared_.d_beta[e] = 0.f;
      for (int w = 0; w < Traits::kWarps; ++w) shared_.through[e][w] = 0.f;
    }
  }

  __device__ __forceinline__ void load_keys(int c) {
    load_rows(p_.key, batch_, first_of(c), count_of(c), key_head_, p_.dim_k, x_.key_quads, k_,
              pitch_, kThreads);
    load_prepared<kThreads>(x_.prepared + prepared_of(c), shared_.prepared);
    load_prepared<kThreads>(x_.gradient + prepared_of(c), shared_.gradient);
  }
  __device__ __forceinline__ void load_tile(const View<4>& x, int c, bool quads, float* to) {
    load_columns<kColumns, kPitch, kThreads>(x, batch_, first_of(c), count_of(c), head_, tile_,
                                             p_.dim_v, quads, to);
  }

  // ---- forward: N of every chunk

  // Leaves S before the last piece, and the last chunk in shared memory.
  __device__ __forceinline__ void forward() {
    __syncthreads();  // the tile before has been read (first: everything is clear)
    tile_of(S_).load(x_.states, number_, head_, true, false);
    for (int c = 0; c < chunks_; ++c) {
      __syncthreads();  // the chunk before has been read
      load_keys(c);
      load_tile(p_.value, c, x_.value_quads, shared_.value[0]);
      __syncthreads();  // the chunk is complete (first: and S)
      for (int first = 0, end; first < count_of(c); first = end) {
        end = shared_.prepared.end[first];
        project(c, first, end);
        __syncthreads();  // K S is complete
        if (thread_ < kColumns) substitute(c, first, end);
        __syncthreads();  // N is complete, S has been read
        if (c == chunks_ - 1 && end == count_of(c)) break;
        update_state(c, first, end);
        __syncthreads();  // S is complete
      }
    }
  }

  // diag(e) K S, a row for kLanes threads
  __device__ __forceinline__ void project(int c, int first, int end) {
    if (row_ < first || row_ >= end) return;
    float sum[kEach];
    row_times(S_, sum);
#pragma unroll
    for (int j = 0; j < kEach; ++j)
      shared_.X[c * kChunk + row_][column_ + j] = shared_.gradient.decay[row_] * sum[j];
  }
  __device__ __forceinline__ void row_times(const float* S, float (&sum)[kEach]) const {
    const float* k = k_ + row_ * pitch_;
#pragma unroll
    for (int j = 0; j < kEach; ++j) sum[j] = 0.f;
    for (int m = 0; m < padded_rows(p_.dim_k); m += 4) {
      const float4 a = *reinterpret_cast<const float4*>(k + m);
#pragma unroll
      for (int r = 0; r < 4; ++r)
#pragma unroll
        for (int j = 0; j < kEach; ++j)
          sum[j] = fmaf(component(a, r), S[(m + r) * kPitch + column_ + j], sum[j]);
    }
  }

  // (10) for one column
  __device__ __forceinline__ void substitute(int c, int first, int end) {
    const Prepared& f = shared_.prepared;
    float n[kChunk];
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      n[i] = 0.f;
      if (i < first || i >= end) continue;
      float sum = f.value[i] * (shared_.value[i][thread_] - shared_.X[c * kChunk + i][thread_]);
#pragma unroll
      for (int m = 0; m < i; ++m) sum = fmaf(-f.L[i][m], n[m], sum);
      n[i] = sum;
      shared_.N[c * kChunk + i][thread_] = sum;
    }
  }

  // (7), 4 rows x 4 columns at a time
  __device__ __forceinline__ void update_state(int c, int first, int end) {
    const float keep = shared_.prepared.keep[first];
    for (int e = thread_; e < padded_rows(p_.dim_k) / 4 * kQuads; e += kThreads) {
      const int row = e / kQuads * 4, column = e % kQuads * 4;
      float* const S = S_ + row * kPitch + column;
      float4 sum[4];
      load_scaled(S, keep, sum);
      for (int m = first; m < end; ++m)
        add_outer(*reinterpret_cast<const float4*>(k_ + m * pitch_ + row),
                  scaled(shared_.prepared.update[m],
                         *reinterpret_cast<const float4*>(&shared_.N[c * kChunk + m][column])),
                  sum);
      store_tile(S, sum);
    }
  }
  static __device__ __forceinline__ void load_scaled(const float* S, float keep, float4 (&sum)[4]) {
#pragma unroll
    for (int r = 0; r < 4; ++r)
      sum[r] = scaled(keep, *reinterpret_cast<const float4*>(S + r * kPitch));
  }
  static __device__ __forceinline__ void store_tile(float* S, const float4 (&sum)[4]) {
#pragma unroll
    for (int r = 0; r < 4; ++r) *reinterpret_cast<float4*>(S + r * kPitch) = sum[r];
  }
  static __device__ __forceinline__ void add_outer(float4 a, float4 x, float4 (&sum)[4]) {
    add_scaled(sum[0], a.x, x);
    add_scaled(sum[1], a.y, x);
    add_scaled(sum[2], a.z, x);
    add_scaled(sum[3], a.w, x);
  }

  // ---- reverse

  __device__ __forceinline__ void reverse() {
    tile_of(dS_).load(x_.adjoints, number_, head_, true, false);
    for (int c = chunks_ - 1; c >= 0; --c) {
      for (int end = count_of(c); end > 0;) {
        const bool at_hand = c == chunks_ - 1 && end == count_of(c);
        int first = at_hand ? piece_before(shared_.prepared, end) : 0;
        if (!at_hand) first = replay(c, end);
        load_tile(p_.grad_output, c, x_.grad_quads, shared_.grad[0]);
        load_tile(p_.value, c, x_.value_quads, shared_.value[0]);
        __syncthreads();  // dO, V and dS are complete
        run_piece(c, first, end);
        end = first;
      }
    }
  }

  // Makes S again before the piece of chunk `last` that ends at `end`; returns its first token.
  __device__ __forceinline__ int replay(int last, int end) {
    __syncthreads();  // the piece after has been read
    tile_of(S_).load(x_.states, number_, head_, true, false);
    int until = 0;
    for (int c = 0; c <= last; ++c) {
      __syncthreads();  // the chunk before has been read
      load_keys(c);
      __syncthreads();  // the chunk is complete (first: and S)
      until = c < last ? count_of(c) : piece_before(shared_.prepared, end);
      // A thread always updates the same entries: no barrier between pieces.
      for (int first = 0; first < until; first = shared_.prepared.end[first])
        update_state(c, first, shared_.prepared.end[first]);
    }
    return until;  // the caller's barrier makes S complete
  }

  // From the adjoint state behind tokens first to end of chunk c to the one before them.
  __device__ __forceinline__ void run_piece(int c, int first, int end) {
    adjoint_values(c, first, end);
    __syncthreads();  // dN is complete
    if (thread_ < kColumns) substitute_back(first, end);
    __syncthreads();  // Z is complete
    row_sums(c, first, end);
    products_of_rows(c, first, end);
    products_with_states(c, first, end);
    __syncthreads();  // dS has been read
    if (c > 0 || first > 0) update_adjoint(c, first, end);
  }

  // (11), and (21c) = N_j . f_j (K dS)_j
  __device__ __forceinline__ void adjoint_values(int c, int first, int end) {
    if (thread_ >= Traits::kRowThreads) return;  // whole warps
    const Prepared& f = shared_.prepared;
    float future = 0.f;
    if (row_ >= first && row_ < end) {
      float y[kEach], sum[kEach];
      row_times(dS_, y);
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        y[j] *= f.update[row_];
        future = fmaf(shared_.N[c * kChunk + row_][column_ + j], y[j], future);
        sum[j] = 0.f;
      }
      for (int i = row_; i < end; ++i)
#pragma unroll
        for (int j = 0; j < kEach; ++j)
          sum[j] = fmaf(f.P[i][row_], shared_.grad[i][column_ + j], sum[j]);
#pragma unroll
      for (int j = 0; j < kEach; ++j) shared_.Z[row_][column_ + j] = sum[j] + y[j];
    }
    future = sum_of_lanes<Traits::kLanes>(future);
    if (thread_ % Traits::kLanes == 0 && row_ >= first && row_ < end)
      shared_.future[c * kChunk + row_] += future;
  }

  // (12) for one column, from the last row to the first
  __device__ __forceinline__ void substitute_back(int first, int end) {
    const Prepared& f = shared_.prepared;
    float z[kChunk];
#pragma unroll
    for (int i = kChunk - 1; i >= 0; --i) {
      z[i] = 0.f;
      if (i < first || i >= end) continue;
      float sum = shared_.Z[i][thread_];
#pragma unroll
      for (int j = kChunk - 1; j > i; --j) sum = fmaf(-f.L[j][i], z[j], sum);
      z[i] = sum;
      shared_.Z[i][thread_] = sum;
    }
  }

  // What (20) and (21b) sum over V: Z . R, and k . k_past = -b Z . e (K S)
  __device__ __forceinline__ void row_sums(int c, int first, int end) {
    if (thread_ >= Traits::kRowThreads) return;  // whole warps
    const int token = c * kChunk + row_;
    float with_residual = 0.f, with_state = 0.f;
    const bool inside = row_ >= first && row_ < end;
    if (inside)
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        const float z = shared_.Z[row_][column_ + j], x = shared_.X[token][column_ + j];
        with_residual = fmaf(z, shared_.value[row_][column_ + j] - x, with_residual);
        with_state = fmaf(z, x, with_state);
      }
    with_residual = sum_of_lanes<Traits::kLanes>(with_residual);
    with_state = sum_of_lanes<Traits::kLanes>(with_state);
    if (inside && thread_ % Traits::kLanes == 0) {
      shared_.d_beta[token] += with_residual;
      shared_.past[token] -= shared_.prepared.value[row_] * with_state;
    }
  }

  // dO N^T and Z N^T, the sums of this tile
  __device__ __forceinline__ void products_of_rows(int c, int first, int end) {
    for (int e = thread_; e < kChunk * kChunk; e += kThreads) {
      const int i = e / kChunk, j = e % kChunk;
      if (j > i || j < first || i >= end) continue;
      float4 n[kQuads];
#pragma unroll
      for (int v = 0; v < kQuads; ++v)
        n[v] = *reinterpret_cast<const float4*>(&shared_.N[c * kChunk + j][4 * v]);
      shared_.ON[c][i][j] += dot(shared_.grad[i], n);
      if (j < i) shared_.ZN[c][i][j] += dot(shared_.Z[i], n);
    }
  }

  // (17) and (21d), one row of both states for a thread
  __device__ __forceinline__ void products_with_states(int c, int first, int end) {
    const Prepared& f = shared_.prepared;
    float through = 0.f;
    for (int k = thread_; k < p_.dim_k; k += kThreads) {
      float4 s[kQuads], d[kQuads];
#pragma unroll
      for (int v = 0; v < kQuads; ++v) {
        s[v] = *reinterpret_cast<const float4*>(S_ + k * kPitch + 4 * v);
        d[v] = *reinterpret_cast<const float4*>(dS_ + k * kPitch + 4 * v);
        through += dot(s[v], d[v]);
      }
      for (int i = first; i < end; ++i) {
        const int64_t at = row_of(c, i) + k;
        if (x_.d_query) add(x_.d_query + at, f.query[i] * dot(shared_.grad[i], s));
        if (x_.d_key)
          add(x_.d_key + at, fmaf(f.update[i], dot(shared_.N[c * kChunk + i], d),
                                  -f.key[i] * dot(shared_.Z[i], s)));
      }
    }
    through = sum_of_lanes<32>(through);
    if (thread_ % 32 == 0)
      shared_.through[c * kChunk + first][thread_ / 32] += f.keep[first] * through;
  }
  // Where the sums of token i of chunk c lie.
  __device__ __forceinline__ int64_t row_of(int c, int i) const {
    return ((batch_ * p_.tokens + first_of(c) + i) * p_.value_heads + head_) * p_.dim_k;
  }
  __device__ __forceinline__ void add(float* to, float x) const { *to = tile_ == 0 ? x : *to + x; }

  // (14)
  __device__ __forceinline__ void update_adjoint(int c, int first, int end) {
    const Prepared& f = shared_.prepared;
    const int64_t q = batch_ * p_.query.stride[0] + first_of(c) * p_.query.stride[1] +
                      key_head_ * p_.query.stride[2];
    for (int e = thread_; e < padded_rows(p_.dim_k) / 4 * kQuads; e += kThreads) {
      const int row = e / kQuads * 4, column = e % kQuads * 4;
      float* const dS = dS_ + row * kPitch + column;
      float4 sum[4];
      load_scaled(dS, f.keep[first], sum);
      for (int m = first; m < end; ++m)
        add_outer(*reinterpret_cast<const float4*>(k_ + m * pitch_ + row),
                  scaled(-f.key[m], *reinterpret_cast<const float4*>(&shared_.Z[m][column])), sum);
      if (p_.grad_output.data)
        for (int m = first; m < end; ++m)
          add_outer(load_quad(p_.query.data, p_.query.dtype,
                              q + m * p_.query.stride[1] + row * p_.query.stride[3],
                              p_.query.stride[3], p_.dim_k - row, x_.query_quads),
                    scaled(f.query[m], *reinterpret_cast<const float4*>(&shared_.grad[m][column])),
                    sum);
      store_tile(dS, sum);
    }
  }

  // ---- once all tiles of V are summed

  __device__ __forceinline__ void finish_chunk(int c, double (&sums)[2]) {
    float* const q = S_;
    __syncthreads();  // the chunk before has been read (first: sums over V are complete)
    load_keys(c);
    load_rows(p_.query, batch_, first_of(c), count_of(c), key_head_, p_.dim_k, x_.query_quads, q,
              pitch_, kThreads);
    __syncthreads();  // the chunk is complete
    if (x_.d_query) add_query_past(c, q);
    crossings(c);
    __syncthreads();  // past and W are complete
    if (thread_ < 32) gate_gradients(c, sums);
    __syncthreads();  // dO N^T and Z N^T have been read
    make_squares(c);
    __syncthreads();  // A and X + X^T are complete
    add_chunk_products(c, q);
  }

  // (21b): q . q_past, a warp for a row
  __device__ __forceinline__ void add_query_past(int c, const float* q) {
    for (int i = thread_ / 32; i < count_of(c); i += Traits::kWarps) {
      float sum = 0.f;
      for (int k = thread_ % 32; k < p_.dim_k; k += 32)
        sum = fmaf(q[i * pitch_ + k], x_.d_query[row_of(c, i) + k], sum);
      sum = sum_of_lanes<32>(sum);
      if (thread_ % 32 == 0) shared_.past[c * kChunk + i] += sum;
    }
  }

  // (21a): W, in the place of N
  __device__ __forceinline__ float* crossing(int i, int j) {
    return &shared_.N[0][0] + i * kChunk + j;
  }
  __device__ __forceinline__ void crossings(int c) {
    for (int e = thread_; e < kChunk * kChunk; e += kThreads) {
      const int i = e / kChunk, j = e % kChunk;
      *crossing(i, j) = j < i ? shared_.prepared.P[i][j] * shared_.ON[c][i][j] -
                                    shared_.prepared.L[i][j] * shared_.ZN[c][i][j]
                              : 0.f;
    }
  }

  // (20), (22), and what options make of them; a thread for a token
  __device__ __forceinline__ void gate_gradients(int c, double (&sums)[2]) {
    double product = 0, sum = 0;
    if (thread_ < count_of(c)) {
      const int64_t t = first_of(c) + thread_;
      if (p_.d_g.data || x_.gate_sums) {
        double d = decay_gradient(c, thread_);
        if (p_.gate_in_kernel) {
          product = d * load_log_decay(p_, batch_, t, head_);
          sum = d = raw_gate_gradient(p_, batch_, t, head_, d);
        }
        const auto& x = p_.d_g;
        if (x.data)
          store_float(x.data, x.dtype, batch_ * x.stride[0] + t * x.stride[1] + head_ * x.stride[2],
                      float(d));
      }
      if (p_.d_beta.data) {
        float d = shared_.d_beta[c * kChunk + thread_];
        for (int j = 0; j < thread_; ++j)
          d = fmaf(-shared_.gradient.KK[thread_][j], shared_.ZN[c][thread_][j], d);
        const auto& x = p_.d_beta;
        store_float(x.data, x.dtype, batch_ * x.stride[0] + t * x.stride[1] + head_ * x.stride[2],
                    raw_beta_gradient(p_, batch_, t, head_, d));
      }
    }
    if (!x_.gate_sums) return;
    sums[0] += sum_of_lanes<32>(product);
    sums[1] += sum_of_lanes<32>(sum);
  }

  // (22)
  __device__ __forceinline__ float decay_gradient(int c, int t) {
    const int end = shared_.prepared.end[t], first = piece_before(shared_.prepared, end);
    float sum = 0.f;
    for (int w = 0; w < Traits::kWarps; ++w) sum += shared_.through[c * kChunk + first][w];
    for (int i = t; i < end; ++i) sum += shared_.past[c * kChunk + i];
    for (int j = first; j < t; ++j) {
      sum += shared_.future[c * kChunk + j];
      for (int i = t; i < end; ++i) sum += *crossing(i, j);
    }
    return sum;
  }

  // (15), (16) and X + X^T, with the norms of the rows that they multiply, in place
  __device__ __forceinline__ void make_squares(int c) {
    for (int e = thread_; e < kChunk * kChunk; e += kThreads) {
      const int i = e / kChunk, j = e % kChunk;
      if (j > i) continue;
      const PreparedGradient& g = shared_.gradient;
      const float D = g.D[i][j];
      shared_.ON[c][i][j] *= g.q_scale[i] * D;
      if (j == i) continue;
      const float x = -shared_.prepared.value[i] * g.k_norm[i] * D * shared_.ZN[c][i][j];
      shared_.ZN[c][i][j] = shared_.ZN[c][j][i] = x;
    }
  }

  // (18), (19): one column of all rows for a thread
  __device__ __forceinline__ void add_chunk_products(int c, const float* q) {
    for (int k = thread_; k < p_.dim_k; k += kThreads) {
      float keys[kChunk], queries[kChunk];
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        keys[i] = k_[i * pitch_ + k];
        queries[i] = q[i * pitch_ + k];
      }
      for (int i = 0; i < count_of(c); ++i) {
        const int64_t at = row_of(c, i) + k;
        if (x_.d_query) {
          float sum = x_.d_query[at];
#pragma unroll
          for (int j = 0; j < kChunk; ++j) sum = fmaf(shared_.ON[c][i][j], keys[j], sum);
          x_.d_query[at] = sum;
        }
        if (x_.d_key) {
          float sum = x_.d_key[at];
#pragma unroll
          for (int j = 0; j < kChunk; ++j) {
            sum = fmaf(shared_.ON[c][j][i], queries[j], sum);
            sum = fmaf(shared_.ZN[c][i][j], keys[j], sum);
          }
          x_.d_key[at] = sum;
        }
      }
    }
  }

  const RuleBackwardParams& p_;
  const GradientArguments& x_;
  Shared& shared_;
  float* const S_;   // [K padded][kPitch]
  float* const dS_;  // the same
  float* const k_;   // [16][pitch], as they came
  const int pitch_;
  const int64_t number_, head_, key_head_;
  const Chunk strip_;
  const int64_t batch_;
  const int chunks_, thread_;
  const int row_, column_;  // of products of rows with a state
  int tile_ = 0;            // first column of V
};

template <int kColumns>
__global__ void __launch_bounds__(GradientTraits<kColumns>::kThreads,
                                  GradientTraits<kColumns>::kMinBlocks)
    gradient_kernel(const __grid_constant__ RuleBackwardParams p,
                    const __grid_constant__ GradientArguments x) {
  extern __shared__ float4 memory[];
  const int64_t number = blockIdx.x / unsigned(p.value_heads);
  const int64_t head = blockIdx.x % unsigned(p.value_heads);
  if (chunk_at(p, x.table, number).count > 0) {
    GradientBlock<kColumns>(p, x, memory, number, head).run();
  } else if (x.gate_sums && threadIdx.x < 2) {
    x.gate_sums[2 * (number * p.value_heads + head) + threadIdx.x] = 0;
  }
}

}  // namespace deltanet::cuda::simt
