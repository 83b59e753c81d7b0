// SPDX-License-Identifier: Apache-2.0
//
// A block that makes the gradients of a strip of tokens, in fp32, from the state before the strip
// and the adjoint state behind it: docs/algorithm.md, equations (10) to (19).
//
//   N   = (I + L)^-1 diag(b) (V - diag(e) K S)           Z = (I + L)^-T (P^T dO + diag(f) K dS)
//   A   = scale (dO N^T) o D,   B = -(Z N^T) o D
//   dQ  = scale diag(e) dO S^T + A K
//   dK  = diag(f) N dS^T - diag(b e) Z S^T + A^T Q + (X + X^T) K,   X = diag(b) B
//
// Work split:  value head after value head. For each tile of V the chunks of the strip run forward,
//              for N, and then in reverse; N and S before each chunk are kept in the block's slot
//              of scratch memory. dO N^T and Z N^T are summed over the tiles in shared memory, the
//              rest of dQ and dK in the slot. simt_gradient_finish.cuh does what follows.
// Numerics:    every sum has one fixed order: N and S those of the scan (simt_scan.cuh), Z and dS
//              those of the adjoint scan (simt_adjoint.cuh), bit for bit.
// Edges:       as in simt_scan.cuh; what lies outside of a piece is never read.
//
// What derives from it says where states come from and go to:
//   kWalks                       whether the block goes on to the strip before; if so, it writes dV
//                                (value_gradient_quads(): as quads_along says of it)
//   load_before(), load_behind() S before the strip, dS behind it: tile, head of place()
//   leave_behind()               S behind the strip; kWalks only
//   wants_before()               whether anybody asks for dS before the strip
//   leave_before()               keeps that; kWalks only
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/load.cuh"
#include "cuda/simt_gradient_finish.cuh"

namespace deltanet::cuda::simt {

// sum + a . b
template <int kQuads>
__device__ __forceinline__ float add_dot(const float4 (&a)[kQuads], const float4 (&b)[kQuads],
                                         float sum) {
#pragma unroll
  for (int i = 0; i < kQuads; ++i)
#pragma unroll
    for (int k = 0; k < 4; ++k) sum = fmaf(component(a[i], k), component(b[i], k), sum);
  return sum;
}
template <int kQuads>
__device__ __forceinline__ float dot(const float* a, const float4 (&b)[kQuads]) {
  float4 x[kQuads];
#pragma unroll
  for (int i = 0; i < kQuads; ++i) x[i] = *reinterpret_cast<const float4*>(a + 4 * i);
  return add_dot(x, b, 0.f);
}

template <class Block, int kColumns>
class GradientBlock : public GradientFinish<kColumns> {
 protected:
  using Base = GradientFinish<kColumns>;
  using Base::Base, Base::kPitch, Base::kThreads;
  using Base::chunks, Base::count_of, Base::first_of, Base::prepared_of, Base::place, Base::slot;
  using Base::dS_, Base::k_, Base::p_, Base::pitch_, Base::S_, Base::shared_, Base::thread_;
  using Base::load_rows_of, Base::load_tile, Base::tile_of, Base::x_;
  using typename Base::Traits;
  static constexpr int kQuads = Traits::kQuads;
  static constexpr int kRowThreads = Traits::kRowThreads;

  // The strip at place(), for `heads` value heads; gradients, or the state behind it.
  __device__ __forceinline__ void run_heads(int heads) {
    for (int h = 0; h < heads; ++h) {
      __syncthreads();  // the head before has been read (first: place and prepared are there)
      if (h > 0 && thread_ == 0) ++shared_.place.head;
      if (!states_only()) clear();
      for (int tile = 0; tile < p_.dim_v; tile = place().tile + kColumns) {
        __syncthreads();  // the tile before has been read
        if (thread_ == 0) shared_.place.tile = tile;
        run_tile();
      }
      if (states_only()) continue;
      for (int c = 0; c < chunks(); ++c) this->finish_chunk(c);
    }
  }

 private:
  __device__ __forceinline__ const Block& block() const { return static_cast<const Block&>(*this); }
  __device__ __forceinline__ bool states_only() const {
    return Block::kWalks && place().states_only;
  }
  // Of products of rows with a state: kRowThreads threads share the rows.
  __device__ __forceinline__ int row() const { return thread_ % kRowThreads / kQuads; }
  __device__ __forceinline__ int column() const { return thread_ % kQuads * 4; }

  __device__ __forceinline__ void clear() {
    float* const squares = &shared_.squares[0][0][0];
    for (int e = thread_; e < kStripChunks * kChunk * kChunk; e += kThreads) squares[e] = 0.f;
    for (int e = thread_; e < kStrip; e += kThreads) {
      shared_.past[e] = shared_.future[e] = shared_.d_beta[e] = 0.f;
      for (int w = 0; w < Traits::kWarps; ++w) shared_.through[e][w] = 0.f;
    }
  }

  // ---- one tile of V

  // Forward over the chunks, for N and S before each of them, and back.
  __device__ __forceinline__ void run_tile() {
    const int steps = states_only() ? chunks() : 2 * chunks();
    for (int step = 0; step < steps; ++step) {
      const bool back = step >= chunks();
      const int c = back ? 2 * chunks() - 1 - step : step;
      __syncthreads();  // the chunk before has been read, S is complete (first: the tile is set)
      if (step == 0) {
        block().load_before();
        if (!states_only()) block().load_behind();
      } else if (!back && !states_only()) {
        keep_state(c);
      }
      load_rows_of(p_.key, c, x_.key_quads, k_);
      load_prepared<kThreads>(place().prepared + prepared_of(c), shared_.prepared);
      if (thread_ < kChunk && !states_only())
        shared_.decay[thread_] = place().gradient[prepared_of(c)].decay[thread_];
      load_tile(p_.value, c, x_.value_quads, shared_.tile.value[0]);
      if (back) {
        load_values(c);
        load_tile(p_.grad_output, c, x_.grad_quads, shared_.tile.grad[0]);
        reverse_chunk(c);
      } else {
        forward_chunk(c);
      }
    }
    if constexpr (Block::kWalks) {
      if (!states_only() && !block().wants_before()) return;
      __syncthreads();  // S or dS is complete
      if (states_only())
        block().leave_behind();
      else
        block().leave_before();
    }
  }

  // diag(e) K S, this thread's columns of its row.
  __device__ __forceinline__ float4& x_of(int c) const {
    return *reinterpret_cast<float4*>(slot() + x_.slots.X + (c * kChunk + row()) * kColumns +
                                      column());
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
    if (c == 0) return block().load_before();
    const float* const from = slot() + (c - 1) * x_.slots.state_floats;
#pragma unroll 2
    for (int e = 4 * thread_; e < padded_rows(p_.dim_k) * kColumns; e += 4 * kThreads)
      *reinterpret_cast<float4*>(S_ + e / kColumns * kPitch + e % kColumns) =
          *reinterpret_cast<const float4*>(from + e);
  }

  // ---- forward: N

  __device__ __forceinline__ void forward_chunk(int c) {
    __syncthreads();  // the chunk is complete (first: and S)
    clear_overflowing(shared_.prepared, k_, nullptr, pitch_, p_.dim_k, kThreads);
    for (int first = 0, end; first < count_of(c); first = end) {
      end = shared_.prepared.end[first];
      project(c, first, end);
      __syncthreads();  // K S is complete
      if (thread_ < kColumns) substitute(c, first, end);
      __syncthreads();  // N is complete, S has been read
      if (c == chunks() - 1 && end == count_of(c) && !states_only()) break;
      update_state(first, end);
      if (end < count_of(c)) __syncthreads();  // S is complete
    }
  }

  // K S. diag(e) K S is kept.
  __device__ __forceinline__ void project(int c, int first, int end) {
    if (thread_ >= kRowThreads || row() < first || row() >= end) return;
    const float4 x = row_times(S_);
    quad_of(shared_.tile.X) = x;
    if (!states_only()) x_of(c) = scaled(shared_.decay[row()], x);
  }
  // This thread's columns of its row of a tile, and of K S.
  __device__ __forceinline__ float4& quad_of(float (&tile)[kChunk][kPitch]) const {
    return *reinterpret_cast<float4*>(&tile[row()][column()]);
  }
  __device__ __forceinline__ float4 row_times(float* S) const {
    float4 sum[1] = {};
    tile_of(S).multiply(k_, pitch_, row(), column(), sum);
    return sum[0];
  }

  // (10) for one column
  __device__ __forceinline__ void substitute(int c, int first, int end) {
    const Prepared& f = shared_.prepared;
    float n[kChunk];
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      n[i] = 0.f;
      if (i < first || i >= end) continue;
      float sum =
          fmaf(-f.key[i], shared_.tile.X[i][thread_], f.value[i] * shared_.tile.value[i][thread_]);
#pragma unroll
      for (int m = 0; m < i; ++m) sum = fmaf(-f.L[i][m], n[m], sum);
      n[i] = sum;
      shared_.tile.X[i][thread_] = f.update[i] * sum;
      if (!states_only()) slot()[x_.slots.N + (c * kChunk + i) * kColumns + thread_] = sum;
    }
  }

  // (7)
  __device__ __forceinline__ void update_state(int first, int end) {
    update(S_, first, end, [&](int row, int column, float4(&sum)[4]) {
      for (int m = first; m < end; ++m)
        add_outer(*reinterpret_cast<const float4*>(k_ + m * pitch_ + row),
                  *reinterpret_cast<const float4*>(&shared_.tile.X[m][column]), sum);
    });
  }
  // S <- keep S + what add(row, column, sum) adds, 4 rows x 4 columns at a time. A thread always
  // updates the same entries.
  template <class Add>
  __device__ __forceinline__ void update(float* S, int first, int end, const Add& add) {
    const float keep = shared_.prepared.keep[first];
#pragma unroll 1
    for (int e = thread_; e < padded_rows(p_.dim_k) / 4 * kQuads; e += kThreads) {
      const int row = e / kQuads * 4, column = e % kQuads * 4;
      float* const at = S + row * kPitch + column;
      float4 sum[4];
#pragma unroll
      for (int r = 0; r < 4; ++r)
        sum[r] = scaled(keep, *reinterpret_cast<const float4*>(at + r * kPitch));
      add(row, column, sum);
#pragma unroll
      for (int r = 0; r < 4; ++r) *reinterpret_cast<float4*>(at + r * kPitch) = sum[r];
    }
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
      if (end == count_of(c))
        clear_overflowing(shared_.prepared, k_, nullptr, pitch_, p_.dim_k, kThreads);
      const int first = piece_before(shared_.prepared, end);
      if (first > 0) make_state(first);
      run_piece(c, first, end);
      end = first;
      if (end > 0) __syncthreads();  // the piece has been read
    }
  }

  // S before a piece that is not the first one.
  __device__ __forceinline__ void make_state(int first) {
    for (int e = thread_; e < first * kColumns; e += kThreads) {
      const int m = e / kColumns, column = e % kColumns;
      shared_.tile.X[m][column] = shared_.prepared.update[m] * shared_.tile.N[m][column];
    }
    __syncthreads();  // X is complete
    for (int i = 0; i < first; i = shared_.prepared.end[i])
      update_state(i, shared_.prepared.end[i]);
    __syncthreads();  // S is complete
  }

  // From the adjoint state behind tokens first to end of chunk c to the one before them.
  __device__ __forceinline__ void run_piece(int c, int first, int end) {
    adjoint_values(c, first, end);
    __syncthreads();  // K dS and P^T dO are complete
    if (thread_ < kColumns) substitute_back(first, end);
    __syncthreads();  // Z is complete
    if constexpr (Block::kWalks)
      if (p_.d_value.data) store_values(c, first, end);
    row_sums(c, first, end);
    products_of_rows(c, first, end);
    products_with_states(c, first, end);
    __syncthreads();  // dS has been read, dO of the update is complete
    if (c > 0 || first > 0 || block().wants_before()) update_adjoint(c, first, end);
  }

  // The two terms of (11): K dS has kRowThreads threads, P^T dO as many others. And (21c) = N_j .
  // f_j (K dS)_j
  __device__ __forceinline__ void adjoint_values(int c, int first, int end) {
    const bool inside = row() >= first && row() < end;
    if (thread_ < kRowThreads) {
      float future = 0.f;
      if (inside) {
        const float4 y = row_times(dS_);
        quad_of(shared_.tile.X) = y;
        const float4 n[1] = {quad_of(shared_.tile.N)};
        const float4 of_values[1] = {scaled(shared_.prepared.update[row()], y)};
        future = add_dot(n, of_values, 0.f);
      }
      future = sum_of_lanes<kQuads>(future);
      if (inside && column() == 0) shared_.future[c * kChunk + row()] += future;
    } else if (thread_ < 2 * kRowThreads && inside) {
      float4 sum = {};
      for (int i = row(); i < end; ++i)
        add_scaled(sum, shared_.prepared.P[i][row()],
                   *reinterpret_cast<const float4*>(&shared_.tile.grad[i][column()]));
      quad_of(shared_.tile.Z) = sum;
    }
  }

  // (12) for one column, from the last row to the first
  __device__ __forceinline__ void substitute_back(int first, int end) {
    const Prepared& f = shared_.prepared;
    float z[kChunk];
#pragma unroll
    for (int i = kChunk - 1; i >= 0; --i) {
      z[i] = 0.f;
      if (i < first || i >= end) continue;
      float sum = fmaf(f.update[i], shared_.tile.X[i][thread_], shared_.tile.Z[i][thread_]);
#pragma unroll
      for (int j = kChunk - 1; j > i; --j) sum = fmaf(-f.L[j][i], z[j], sum);
      z[i] = sum;
      shared_.tile.Z[i][thread_] = sum;
      shared_.tile.X[i][thread_] = -f.key[i] * sum;
    }
  }

  // (13)
  __device__ __forceinline__ void store_values(int c, int first, int end) const {
    const auto& x = p_.d_value;
    const int64_t base = place().batch * x.stride[0] + first_of(c) * x.stride[1] +
                         place().head * x.stride[2] + place().tile * x.stride[3];
    for (int e = first * kQuads + thread_; e < end * kQuads; e += kThreads) {
      const int row = e / kQuads, column = e % kQuads * 4;
      store_quad(x.data, x.dtype, base + row * x.stride[1] + column * x.stride[3], x.stride[3],
                 p_.dim_v - place().tile - column, block().value_gradient_quads(),
                 scaled(shared_.prepared.value[row],
                        *reinterpret_cast<const float4*>(&shared_.tile.Z[row][column])));
    }
  }

  // What (20) and (21b) sum over V: Z . R, and k . k_past = -b Z . e (K S). In the place of V,
  // which no other thread reads, then stands what the update of dS adds.
  __device__ __forceinline__ void row_sums(int c, int first, int end) {
    if (thread_ >= kRowThreads) return;
    float with_residual = 0.f, with_state = 0.f;
    const bool inside = row() >= first && row() < end;
    if (inside) {
      const float4 z[1] = {quad_of(shared_.tile.Z)}, x[1] = {x_of(c)};
      float4& value = quad_of(shared_.tile.value);
      const float4 residual[1] = {
          make_float4(value.x - x[0].x, value.y - x[0].y, value.z - x[0].z, value.w - x[0].w)};
      with_residual = add_dot(z, residual, 0.f);
      with_state = add_dot(z, x, 0.f);
      value = scaled(shared_.prepared.query[row()], quad_of(shared_.tile.grad));
    }
    with_residual = sum_of_lanes<kQuads>(with_residual);
    with_state = sum_of_lanes<kQuads>(with_state);
    if (inside && column() == 0) {
      shared_.d_beta[c * kChunk + row()] += with_residual;
      shared_.past[c * kChunk + row()] -= shared_.prepared.value[row()] * with_state;
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
    const bool fresh = place().tile == 0;
    float through = 0.f;
    for (int k = thread_; k < p_.dim_k; k += kThreads) {
      float4 s[kQuads], d[kQuads];
#pragma unroll
      for (int v = 0; v < kQuads; ++v) {
        s[v] = *reinterpret_cast<const float4*>(S_ + k * kPitch + 4 * v);
        d[v] = *reinterpret_cast<const float4*>(dS_ + k * kPitch + 4 * v);
      }
      through = add_dot(s, d, through);
#pragma unroll 2
      for (int i = first; i < end; ++i) {
        const int at = i * p_.dim_k + k;
        if (x_.slots.query)
          d_query[at] = fmaf(f.query[i], dot(shared_.tile.grad[i], s), fresh ? 0.f : d_query[at]);
        if (x_.slots.key)
          d_key[at] = fmaf(f.update[i], dot(shared_.tile.N[i], d),
                           dot(shared_.tile.X[i], s) + (fresh ? 0.f : d_key[at]));
      }
    }
    through = sum_of_lanes<32>(through);
    if (thread_ % 32 == 0)
      shared_.through[c * kChunk + first][thread_ / 32] += f.keep[first] * through;
  }

  // (14): rows of q first, as the adjoint scan does
  __device__ __forceinline__ void update_adjoint(int c, int first, int end) {
    const int64_t q = place().batch * p_.query.stride[0] + first_of(c) * p_.query.stride[1] +
                      place().key_head * p_.query.stride[2];
    update(dS_, first, end, [&](int row, int column, float4(&sum)[4]) {
      if (p_.grad_output.data)
        for (int m = first; m < end; ++m)
          add_outer(load_quad(p_.query.data, p_.query.dtype,
                              q + m * p_.query.stride[1] + row * p_.query.stride[3],
                              p_.query.stride[3], p_.dim_k - row, x_.query_quads),
                    *reinterpret_cast<const float4*>(&shared_.tile.value[m][column]), sum);
      for (int m = first; m < end; ++m)
        add_outer(*reinterpret_cast<const float4*>(k_ + m * pitch_ + row),
                  *reinterpret_cast<const float4*>(&shared_.tile.X[m][column]), sum);
    });
  }
};

}  // namespace deltanet::cuda::simt
