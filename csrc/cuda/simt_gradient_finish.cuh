// SPDX-License-Identifier: Apache-2.0
//
// Gradients of a strip once all tiles of V are summed: docs/algorithm.md, equations (15) to (22).
//
//   A   = scale (dO N^T) o D,   B = -(Z N^T) o D,   X = diag(b) B
//   dQ += A K,   dK += A^T Q + (X + X^T) K,   dg by (22), db by (20)
//
// Work split:  by a block of simt_gradient_block.cuh, chunk after chunk of one value head. A thread
//              has a column of dQ and dK; gates have one warp, a thread for a token.
// Numerics:    dg adds what crosses from token to token, (22), and never cancels. Rows of k and q
//              are not rescaled: gradients are those of the normalized rows, times the reciprocal
//              norm, which is what (25) starts from.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/load.cuh"
#include "cuda/reduce_row.cuh"
#include "cuda/simt_gradient_memory.cuh"

namespace deltanet::cuda::simt {

template <int kColumns>
class GradientFinish : public GradientMemory<kColumns> {
 protected:
  using Base = GradientMemory<kColumns>;
  using Base::Base, Base::kThreads;
  using Base::chunks, Base::count_of, Base::first_of, Base::prepared_of, Base::place, Base::slot;
  using Base::load_rows_of, Base::k_, Base::p_, Base::pitch_, Base::S_, Base::shared_;
  using Base::thread_, Base::x_;
  using typename Base::Traits;

  __device__ __forceinline__ void finish_chunk(int c) {
    float* const q = S_;
    __syncthreads();  // the chunk before has been read (first: sums over V are complete)
    load_rows_of(p_.key, c, x_.key_quads, k_);
    load_rows_of(p_.query, c, x_.query_quads, q);
    load_prepared<kThreads>(place().prepared + prepared_of(c), shared_.prepared);
    load_prepared<kThreads>(place().gradient + prepared_of(c), shared_.finish.gradient);
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

 private:
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
    double* const to = x_.gate_sums + 2 * (place().sums * p_.value_heads + place().head);
    const bool first = c == 0 && place().first_of_sums;
    to[0] = first ? product : to[0] + product;
    to[1] = first ? sum : to[1] + sum;
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
};

}  // namespace deltanet::cuda::simt
