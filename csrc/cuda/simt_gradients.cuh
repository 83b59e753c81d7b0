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
// Work split:  one block = one (strip, key head), with a loop over the value heads of the key, or
//              one (strip, value head) where the former would leave processors idle; of those it
//              takes one after the other. For each tile of V its chunks run forward, for N, and
//              then in reverse; N and S before each chunk are kept in the block's slot of scratch
//              memory. A and B are summed over the tiles in shared memory, the rest of dQ and dK
//              in the slot.
// Numerics:    every sum has one fixed order, the same for both splits. dg adds what crosses from
//              token to token, (22), and never cancels. Rows of k and q are not rescaled:
//              gradients are those of the normalized rows, times the reciprocal norm, which is
//              what (25) starts from.
// Memory:      reads q, k, v, dO, both states of the strip. Writes dQ and dK, or what reduce_kernel
//              sums over the value heads.
// Edges:       as in simt_scan.cuh; what lies outside of a piece is never read.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/chunk_table.cuh"
#include "cuda/gradient_slots.cuh"
#include "cuda/load.cuh"
#include "cuda/reduce_row.cuh"
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
  int64_t items;                     // strips * HK, or strips * HV
  int heads_of_item;                 // HV / HK or 1
  // Before and behind each strip: [strips, HV] of state_floats.
  const float *states, *adjoints;
  GradientSlots slots;
  int64_t blocks;     // and slots
  double* gate_sums;  // [strips, HV, 2]  of A_log and dt_bias; null: not wanted
  bool query_quads, key_quads, value_quads, grad_quads;
};

template <int kColumns_>
struct GradientTraits {
  static_assert(kColumns_ == 16 || kColumns_ == 8, "threads share a row by eight");
  static constexpr int kColumns = kColumns_;
  static constexpr int kThreads = 128, kWarps = kThreads / 32;
  static constexpr int kMinBlocks = 3;  // 168 registers: none is spilled
  // Eight rows of four columns, read at once, then hit 32 banks.
  static constexpr int kPitch = kColumns + 4;
  // Products of rows with a state: kLanes threads for a row, kEach columns for a thread.
  static constexpr int kEach = kColumns / 8;
  static constexpr int kLanes = kColumns / kEach;
  static_assert(kChunk * kLanes == kThreads, "every thread has a part of a row");

  // What the block works on. In shared memory: registers are scarce.
  struct Place {
    Chunk strip;
    int number, batch, first_head, head, key_head;
    int tile;  // first column of V
  };
  struct Tile {                   // one chunk of one tile of V
    float N[kChunk][kPitch];      // new values
    float X[kChunk][kPitch];      // diag(e) K S
    float grad[kChunk][kPitch];   // dO
    float Z[kChunk][kPitch];      // dN, then Z
    float value[kChunk][kPitch];  // V
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
    };
    // For j <= i: [i][j] is dO_i . N_j, then A with norms. For j < i: [j][i] is Z_i . N_j, then X.
    float squares[kStripChunks][kChunk][kChunk];
    float past[kStrip], future[kStrip];  // (21b), (21c)
    float d_beta[kStrip];
    float through[kStrip][kWarps];  // (21d) of the piece that begins here, by warps
    Place place;
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
                                           float4* memory)
      : p_(p),
        x_(x),
        shared_(*reinterpret_cast<Shared*>(memory)),
        S_(reinterpret_cast<float*>(memory) + sizeof(Shared) / 4),
        dS_(S_ + Traits::state_floats(p.dim_k)),
        k_(dS_ + Traits::state_floats(p.dim_k)),
        pitch_(row_pitch(p.dim_k)),
        thread_(int(threadIdx.x)) {}

  // The gradients of one strip, for heads_of_item value heads from `head` on.
  __device__ __forceinline__ void run(const Chunk& strip, int number, int head) {
    __syncthreads();  // the strip before has been read
    if (thread_ == 0)
      shared_.place = {strip, number, p_.device_cu_seqlens ? 0 : strip.sequence,
                       head,  head,   int(key_head_of(p_, head)),
                       0};
    for (int h = 0; h < x_.heads_of_item; ++h) {
      __syncthreads();  // the head before has been read (first: the place is there)
      if (h > 0 && thread_ == 0) ++shared_.place.head;
      clear();
      for (int tile = 0; tile < p_.dim_v; tile = place().tile + kColumns) {
        __syncthreads();  // the tile before has been read
        if (thread_ == 0) shared_.place.tile = tile;
        run_tile();
      }
      for (int c = 0; c < chunks(); ++c) finish_chunk(c);
    }
    if (x_.heads_of_item == unsigned(p_.value_heads) / unsigned(p_.key_heads)) write_rows();
  }

 private:
  // ---- chunks

  __device__ __forceinline__ const typename Traits::Place& place() const { return shared_.place; }
  // Of products of rows with a state.
  __device__ __forceinline__ int row() const { return thread_ / Traits::kLanes; }
  __device__ __forceinline__ int column() const { return thread_ % Traits::kLanes * kEach; }
  __device__ __forceinline__ float* slot() const {
    return x_.slots.data + blockIdx.x * x_.slots.floats;
  }
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
    return (int64_t(place().number) * kStripChunks + c) * p_.value_heads + place().head;
  }
  __device__ __forceinline__ StateTile<kColumns, kPitch, kThreads> tile_of(float* S) const {
    return {S, p_.dim_k, p_.dim_v, place().tile};
  }
  __device__ __forceinline__ int64_t state_of_strip() const {
    return (place().number * p_.value_heads + place().head) * state_floats(p_.dim_k, p_.dim_v);
  }

  __device__ __forceinline__ void clear() {
    float* const squares = &shared_.squares[0][0][0];
    for (int e = thread_; e < kStripChunks * kChunk * kChunk; e += kThreads) squares[e] = 0.f;
    for (int e = thread_; e < kStrip; e += kThreads) {
      shared_.past[e] = shared_.future[e] = shared_.d_beta[e] = 0.f;
      for (int w = 0; w < Traits::kWarps; ++w) shared_.through[e][w] = 0.f;
    }
  }

  __device__ __forceinline__ void load_rows_of(const View<4>& x, int c, bool quads,
                                               float* to) const {
    load_rows(x, place().batch, first_of(c), count_of(c), place().key_head, p_.dim_k, quads, to,
              pitch_, kThreads);
  }
  __device__ __forceinline__ void load_tile(const View<4>& x, int c, bool quads, float* to) {
    load_columns<kColumns, kPitch, kThreads>(x, place().batch, first_of(c), count_of(c),
                                             place().head, place().tile, p_.dim_v, quads, to);
  }

  // ---- one tile of V

  // Forward over the chunks, for N and S before each of them, and back.
  __device__ __forceinline__ void run_tile() {
    for (int step = 0; step < 2 * chunks(); ++step) {
      const bool back = step >= chunks();
      const int c = back ? 2 * chunks() - 1 - step : step;
      __syncthreads();  // the chunk before has been read, S is complete (first: the tile is set)
      if (step == 0) {
        tile_of(S_).load(x_.states + state_of_strip());
        tile_of(dS_).load(x_.adjoints + state_of_strip());
      } else if (!back) {
        keep_state(c);
      }
      load_rows_of(p_.key, c, x_.key_quads, k_);
      load_prepared<kThreads>(x_.prepared + prepared_of(c), shared_.prepared);
      if (thread_ < kChunk) shared_.decay[thread_] = x_.gradient[prepared_of(c)].decay[thread_];
      load_tile(p_.value, c, x_.value_quads, shared_.tile.value[0]);
      if (back) {
        load_values(c);
        load_tile(p_.grad_output, c, x_.grad_quads, shared_.tile.grad[0]);
        reverse_chunk(c);
      } else {
        forward_chunk(c);
      }
    }
  }

  // Column column() + j of this thread's row of X, which no other thread reads.
  __device__ __forceinline__ float* x_of(int c, int j) const {
    return slot() + x_.slots.X + (c * kChunk + row()) * kColumns + column() + j;
  }
  __device__ __forceinline__ void load_values(int c) {
    const float* const from = slot() + x_.slots.N + c * kChunk * kColumns;
    for (int e = 4 * thread_; e < count_of(c) * kColumns; e += 4 * kThreads)
      *reinterpret_cast<float4*>(&shared_.tile.N[e / kColumns][e % kColumns]) =
          *reinterpret_cast<const float4*>(from + e);
  }

  // Between a state in shared memory and one in the slot.
  __device__ __forceinline__ void keep_state(int c) const {
    float* const to = slot() + (c - 1) * x_.slots.state_floats;
#pragma unroll 2
    for (int e = 4 * thread_; e < padded_rows(p_.dim_k) * kColumns; e += 4 * kThreads)
      *reinterpret_cast<float4*>(to + e) =
          *reinterpret_cast<const float4*>(S_ + e / kColumns * kPitch + e % kColumns);
  }
  __device__ __forceinline__ void load_state(int c) const {
    if (c == 0) return tile_of(S_).load(x_.states + state_of_strip());
    const float* const from = slot() + (c - 1) * x_.slots.state_floats;
#pragma unroll 2
    for (int e = 4 * thread_; e < padded_rows(p_.dim_k) * kColumns; e += 4 * kThreads)
      *reinterpret_cast<float4*>(S_ + e / kColumns * kPitch + e % kColumns) =
          *reinterpret_cast<const float4*>(from + e);
  }

  // ---- forward: N

  __device__ __forceinline__ void forward_chunk(int c) {
    __syncthreads();  // the chunk is complete (first: and S)
    for (int first = 0, end; first < count_of(c); first = end) {
      end = shared_.prepared.end[first];
      project(c, first, end);
      __syncthreads();  // K S is complete
      if (thread_ < kColumns) substitute(c, first, end);
      __syncthreads();  // N is complete, S has been read
      if (c == chunks() - 1 && end == count_of(c)) break;
      update_state(c, first, end);
      if (end < count_of(c)) __syncthreads();  // S is complete
    }
  }

  // diag(e) K S, a row for kLanes threads
  __device__ __forceinline__ void project(int c, int first, int end) {
    if (row() < first || row() >= end) return;
    float sum[kEach];
    row_times(S_, sum);
#pragma unroll
    for (int j = 0; j < kEach; ++j)
      *x_of(c, j) = shared_.tile.X[row()][column() + j] = shared_.decay[row()] * sum[j];
  }
  __device__ __forceinline__ void row_times(const float* S, float (&sum)[kEach]) const {
    const float* k = k_ + row() * pitch_;
#pragma unroll
    for (int j = 0; j < kEach; ++j) sum[j] = 0.f;
#pragma unroll 2
    for (int m = 0; m < padded_rows(p_.dim_k); m += 4) {
      const float4 a = *reinterpret_cast<const float4*>(k + m);
#pragma unroll
      for (int r = 0; r < 4; ++r)
#pragma unroll
        for (int j = 0; j < kEach; ++j)
          sum[j] = fmaf(component(a, r), S[(m + r) * kPitch + column() + j], sum[j]);
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
      float sum = f.value[i] * (shared_.tile.value[i][thread_] - shared_.tile.X[i][thread_]);
#pragma unroll
      for (int m = 0; m < i; ++m) sum = fmaf(-f.L[i][m], n[m], sum);
      n[i] = sum;
      shared_.tile.N[i][thread_] = sum;
      slot()[x_.slots.N + (c * kChunk + i) * kColumns + thread_] = sum;
    }
  }

  // (7), 4 rows x 4 columns at a time
  __device__ __forceinline__ void update_state(int c, int first, int end) {
    const float keep = shared_.prepared.keep[first];
#pragma unroll 1
    for (int e = thread_; e < padded_rows(p_.dim_k) / 4 * kQuads; e += kThreads) {
      const int row = e / kQuads * 4, column = e % kQuads * 4;
      float* const S = S_ + row * kPitch + column;
      float4 sum[4];
      load_scaled(S, keep, sum);
      for (int m = first; m < end; ++m)
        add_outer(*reinterpret_cast<const float4*>(k_ + m * pitch_ + row),
                  scaled(shared_.prepared.update[m],
                         *reinterpret_cast<const float4*>(&shared_.tile.N[m][column])),
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

  __device__ __forceinline__ void reverse_chunk(int c) {
    for (int end = count_of(c); end > 0;) {
      load_state(c);
      __syncthreads();  // the chunk and both states are complete
      const int first = piece_before(shared_.prepared, end);
      // S before a piece that is not the first one. A thread always updates the same entries.
      for (int i = 0; i < first; i = shared_.prepared.end[i])
        update_state(c, i, shared_.prepared.end[i]);
      if (first > 0) __syncthreads();  // S is complete
      run_piece(c, first, end);
      end = first;
      if (end > 0) __syncthreads();  // the piece has been read
    }
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
    const Prepared& f = shared_.prepared;
    float future = 0.f;
    if (row() >= first && row() < end) {
      float y[kEach], sum[kEach];
      row_times(dS_, y);
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        y[j] *= f.update[row()];
        future = fmaf(shared_.tile.N[row()][column() + j], y[j], future);
        sum[j] = 0.f;
      }
      for (int i = row(); i < end; ++i)
#pragma unroll
        for (int j = 0; j < kEach; ++j)
          sum[j] = fmaf(f.P[i][row()], shared_.tile.grad[i][column() + j], sum[j]);
#pragma unroll
      for (int j = 0; j < kEach; ++j) shared_.tile.Z[row()][column() + j] = sum[j] + y[j];
    }
    future = sum_of_lanes<Traits::kLanes>(future);
    if (thread_ % Traits::kLanes == 0 && row() >= first && row() < end)
      shared_.future[c * kChunk + row()] += future;
  }

  // (12) for one column, from the last row to the first
  __device__ __forceinline__ void substitute_back(int first, int end) {
    const Prepared& f = shared_.prepared;
    float z[kChunk];
#pragma unroll
    for (int i = kChunk - 1; i >= 0; --i) {
      z[i] = 0.f;
      if (i < first || i >= end) continue;
      float sum = shared_.tile.Z[i][thread_];
#pragma unroll
      for (int j = kChunk - 1; j > i; --j) sum = fmaf(-f.L[j][i], z[j], sum);
      z[i] = sum;
      shared_.tile.Z[i][thread_] = sum;
    }
  }

  // What (20) and (21b) sum over V: Z . R, and k . k_past = -b Z . e (K S)
  __device__ __forceinline__ void row_sums(int c, int first, int end) {
    const int token = c * kChunk + row();
    float with_residual = 0.f, with_state = 0.f;
    const bool inside = row() >= first && row() < end;
    if (inside)
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        const float z = shared_.tile.Z[row()][column() + j], x = *x_of(c, j);
        with_residual = fmaf(z, shared_.tile.value[row()][column() + j] - x, with_residual);
        with_state = fmaf(z, x, with_state);
      }
    with_residual = sum_of_lanes<Traits::kLanes>(with_residual);
    with_state = sum_of_lanes<Traits::kLanes>(with_state);
    if (inside && thread_ % Traits::kLanes == 0) {
      shared_.d_beta[token] += with_residual;
      shared_.past[token] -= shared_.prepared.value[row()] * with_state;
    }
  }

  // dO N^T and Z N^T, the sums of this tile
  __device__ __forceinline__ void products_of_rows(int c, int first, int end) {
#pragma unroll 1
    for (int e = thread_; e < kChunk * kChunk; e += kThreads) {
      const int i = e / kChunk, j = e % kChunk;
      if (j > i || j < first || i >= end) continue;
      float4 n[kQuads];
#pragma unroll
      for (int v = 0; v < kQuads; ++v)
        n[v] = *reinterpret_cast<const float4*>(&shared_.tile.N[j][4 * v]);
      shared_.squares[c][i][j] += dot(shared_.tile.grad[i], n);
      if (j < i) shared_.squares[c][j][i] += dot(shared_.tile.Z[i], n);
    }
  }

  // (17) and (21d), one row of both states for a thread
  __device__ __forceinline__ void products_with_states(int c, int first, int end) {
    const Prepared& f = shared_.prepared;
    float* const d_query = slot() + x_.slots.d_query + c * kChunk * p_.dim_k;
    float* const d_key = slot() + x_.slots.d_key + c * kChunk * p_.dim_k;
    float through = 0.f;
    for (int k = thread_; k < p_.dim_k; k += kThreads) {
      float4 s[kQuads], d[kQuads];
#pragma unroll
      for (int v = 0; v < kQuads; ++v) {
        s[v] = *reinterpret_cast<const float4*>(S_ + k * kPitch + 4 * v);
        d[v] = *reinterpret_cast<const float4*>(dS_ + k * kPitch + 4 * v);
        through += dot(s[v], d[v]);
      }
#pragma unroll 2
      for (int i = first; i < end; ++i) {
        const int at = i * p_.dim_k + k;
        if (x_.slots.query) add(d_query + at, f.query[i] * dot(shared_.tile.grad[i], s));
        if (x_.slots.key)
          add(d_key + at,
              fmaf(f.update[i], dot(shared_.tile.N[i], d), -f.key[i] * dot(shared_.tile.Z[i], s)));
      }
    }
    through = sum_of_lanes<32>(through);
    if (thread_ % 32 == 0)
      shared_.through[c * kChunk + first][thread_ / 32] += f.keep[first] * through;
  }
  __device__ __forceinline__ void add(float* to, float x) const {
    *to = place().tile == 0 ? x : *to + x;
  }

  // (14)
  __device__ __forceinline__ void update_adjoint(int c, int first, int end) {
    const Prepared& f = shared_.prepared;
    const int64_t q = place().batch * p_.query.stride[0] + first_of(c) * p_.query.stride[1] +
                      place().key_head * p_.query.stride[2];
#pragma unroll 1
    for (int e = thread_; e < padded_rows(p_.dim_k) / 4 * kQuads; e += kThreads) {
      const int row = e / kQuads * 4, column = e % kQuads * 4;
      float* const dS = dS_ + row * kPitch + column;
      float4 sum[4];
      load_scaled(dS, f.keep[first], sum);
      for (int m = first; m < end; ++m)
        add_outer(*reinterpret_cast<const float4*>(k_ + m * pitch_ + row),
                  scaled(-f.key[m], *reinterpret_cast<const float4*>(&shared_.tile.Z[m][column])),
                  sum);
      if (p_.grad_output.data)
        for (int m = first; m < end; ++m)
          add_outer(
              load_quad(p_.query.data, p_.query.dtype,
                        q + m * p_.query.stride[1] + row * p_.query.stride[3], p_.query.stride[3],
                        p_.dim_k - row, x_.query_quads),
              scaled(f.query[m], *reinterpret_cast<const float4*>(&shared_.tile.grad[m][column])),
              sum);
      store_tile(dS, sum);
    }
  }

  // ---- once all tiles of V are summed

  __device__ __forceinline__ void finish_chunk(int c) {
    float* const q = S_;
    __syncthreads();  // the chunk before has been read (first: sums over V are complete)
    load_rows_of(p_.key, c, x_.key_quads, k_);
    load_rows_of(p_.query, c, x_.query_quads, q);
    load_prepared<kThreads>(x_.prepared + prepared_of(c), shared_.prepared);
    load_prepared<kThreads>(x_.gradient + prepared_of(c), shared_.finish.gradient);
    __syncthreads();  // the chunk is complete
    if (x_.slots.query) add_query_past(c, q);
    crossings(c);
    __syncthreads();  // past and W are complete
    if (thread_ < 32) gate_gradients(c);
    __syncthreads();  // dO N^T and Z N^T have been read
    make_squares(c);
    __syncthreads();  // A and X are complete
    add_chunk_products(c, q);
  }
  // (21b): q . q_past, a warp for a row
  __device__ __forceinline__ void add_query_past(int c, const float* q) {
    const float* const d_query = slot() + x_.slots.d_query + c * kChunk * p_.dim_k;
    for (int i = thread_ / 32; i < count_of(c); i += Traits::kWarps) {
      float sum = 0.f;
      for (int k = thread_ % 32; k < p_.dim_k; k += 32)
        sum = fmaf(q[i * pitch_ + k], d_query[i * p_.dim_k + k], sum);
      sum = sum_of_lanes<32>(sum);
      if (thread_ % 32 == 0) shared_.past[c * kChunk + i] += sum;
    }
  }

  // (21a)
  __device__ __forceinline__ void crossings(int c) {
#pragma unroll 1
    for (int e = thread_; e < kChunk * kChunk; e += kThreads) {
      const int i = e / kChunk, j = e % kChunk;
      shared_.finish.W[i][j] = j < i ? shared_.prepared.P[i][j] * shared_.squares[c][i][j] -
                                           shared_.prepared.L[i][j] * shared_.squares[c][j][i]
                                     : 0.f;
    }
  }

  // (20), (22), and what options make of them; a thread for a token
  __device__ __forceinline__ void gate_gradients(int c) {
    double product = 0, sum = 0;
    if (thread_ < count_of(c)) {
      const int64_t t = first_of(c) + thread_;
      if (p_.d_g.data || x_.gate_sums) {
        double d = decay_gradient(c, thread_);
        if (p_.gate_in_kernel) {
          product = d * load_log_decay(p_, place().batch, t, place().head);
          sum = d = raw_gate_gradient(p_, place().batch, t, place().head, d);
        }
        const auto& x = p_.d_g;
        if (x.data)
          store_float(x.data, x.dtype,
                      place().batch * x.stride[0] + t * x.stride[1] + place().head * x.stride[2],
                      float(d));
      }
      if (p_.d_beta.data) {
        float d = shared_.d_beta[c * kChunk + thread_];
        for (int j = 0; j < thread_; ++j)
          d = fmaf(-shared_.finish.gradient.KK[thread_][j], shared_.squares[c][j][thread_], d);
        const auto& x = p_.d_beta;
        store_float(x.data, x.dtype,
                    place().batch * x.stride[0] + t * x.stride[1] + place().head * x.stride[2],
                    raw_beta_gradient(p_, place().batch, t, place().head, d));
      }
    }
    if (!x_.gate_sums) return;
    product = sum_of_lanes<32>(product);
    sum = sum_of_lanes<32>(sum);
    if (thread_ > 0) return;
    double* const to = x_.gate_sums + 2 * (place().number * p_.value_heads + place().head);
    to[0] = c == 0 ? product : to[0] + product;
    to[1] = c == 0 ? sum : to[1] + sum;
  }

  // (22)
  __device__ __forceinline__ float decay_gradient(int c, int t) {
    const int end = shared_.prepared.end[t], first = piece_before(shared_.prepared, end);
    float sum = 0.f;
    for (int w = 0; w < Traits::kWarps; ++w) sum += shared_.through[c * kChunk + first][w];
    for (int i = t; i < end; ++i) sum += shared_.past[c * kChunk + i];
    for (int j = first; j < t; ++j) {
      sum += shared_.future[c * kChunk + j];
      for (int i = t; i < end; ++i) sum += shared_.finish.W[i][j];
    }
    return sum;
  }

  // (15), (16) and X of (19), with the norms of the rows that they multiply, in place
  __device__ __forceinline__ void make_squares(int c) {
    const PreparedGradient& g = shared_.finish.gradient;
#pragma unroll 1
    for (int e = thread_; e < kChunk * kChunk; e += kThreads) {
      const int i = e / kChunk, j = e % kChunk;
      if (j > i) continue;
      const float D = g.D[i][j];
      shared_.squares[c][i][j] *= g.q_scale[i] * D;
      if (j < i) shared_.squares[c][j][i] *= -shared_.prepared.value[i] * g.k_norm[i] * D;
    }
  }

  // (18), (19): one column of all rows for a thread. Then the sum over the value heads of the key.
  __device__ __forceinline__ void add_chunk_products(int c, const float* q) {
#pragma unroll 1
    for (int k = thread_; k < p_.dim_k; k += kThreads) {
      float keys[kChunk], queries[kChunk];
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        keys[i] = k_[i * pitch_ + k];
        queries[i] = q[i * pitch_ + k];
      }
#pragma unroll 1
      for (int i = 0; i < count_of(c); ++i) {
        float* const at = slot() + (c * kChunk + i) * p_.dim_k + k;
        float of_query = x_.slots.query ? at[x_.slots.d_query] : 0.f;
        float of_key = x_.slots.key ? at[x_.slots.d_key] : 0.f;
#pragma unroll
        for (int j = 0; j < kChunk; ++j) {
          const float down = shared_.squares[c][i][j], up = shared_.squares[c][j][i];
          if (j <= i) of_query = fmaf(down, keys[j], of_query);
          if (j >= i) of_key = fmaf(up, queries[j], of_key);
          if (j != i) of_key = fmaf(j < i ? up : down, keys[j], of_key);
        }
        if (x_.slots.query) add_head(at + x_.slots.query_total, of_query);
        if (x_.slots.key) add_head(at + x_.slots.key_total, of_key);
      }
    }
  }
  __device__ __forceinline__ void add_head(float* to, float x) const {
    *to = x_.slots.totals && place().head != place().first_head ? *to + x : x;
  }

  // (25) and (26), where this block has summed all value heads of the key
  __device__ __forceinline__ void write_rows() {
    __syncthreads();  // the sums are complete
    for (int i = thread_ / 32; i < place().strip.count; i += Traits::kWarps) {
      const int64_t t = place().strip.first + i;
      const float* const sums = slot() + i * p_.dim_k;
      if (p_.d_query.data)
        reduce_row(p_, p_.query, p_.d_query, place().batch, t, place().key_head,
                   sums + x_.slots.query_total, 0, 1);
      if (p_.d_key.data)
        reduce_row(p_, p_.key, p_.d_key, place().batch, t, place().key_head,
                   sums + x_.slots.key_total, 0, 1);
    }
  }

  const RuleBackwardParams& p_;
  const GradientArguments& x_;
  Shared& shared_;
  float* const S_;   // [K padded][kPitch]
  float* const dS_;  // the same
  float* const k_;   // [16][pitch], as they came
  const int pitch_;
  const int thread_;
};

template <int kColumns>
__global__ void __launch_bounds__(GradientTraits<kColumns>::kThreads,
                                  GradientTraits<kColumns>::kMinBlocks)
    gradient_kernel(const __grid_constant__ RuleBackwardParams p,
                    const __grid_constant__ GradientArguments x) {
  extern __shared__ float4 memory[];
  const unsigned per_strip = unsigned(p.value_heads) / unsigned(x.heads_of_item);
  for (unsigned item = blockIdx.x; item < x.items; item += gridDim.x) {
    const int number = int(item / per_strip), head = int(item % per_strip) * x.heads_of_item;
    const Chunk strip = chunk_at(p, x.table, number);
    if (strip.count > 0) {
      GradientBlock<kColumns>(p, x, memory).run(strip, number, head);
    } else if (x.gate_sums) {
      for (int i = int(threadIdx.x); i < 2 * x.heads_of_item;
           i += GradientTraits<kColumns>::kThreads)
        x.gate_sums[2 * (number * p.value_heads + head) + i] = 0;
    }
  }
}

}  // namespace deltanet::cuda::simt
