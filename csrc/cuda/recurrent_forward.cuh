// SPDX-License-Identifier: Apache-2.0
//
// The gated delta rule token by token, for decode and short runs: docs/algorithm.md, equation (1).
//
//   d = b (v - a S^T k),   o = scale (a S^T q + (q . k) d),   S <- a S + k d^T
//
// Both products with the old S are taken in one sweep.
//
// Work split:  one block = one (sequence, value head, 32 columns of V), over all tokens. A thread
//              keeps 4 x 4 pieces of the state in registers: rows 4 r to 4 r + 3 for r = its row
//              group, + 16, + 32, ..., and 4 columns.
// Numerics:    fp32 FMA in a fixed order. q and k are never rescaled: l2norm, decay and scale are
//              factors of sums.
// Memory:      the state is read once and written once per call, q, k, v and the gates once per
//              token and V tile; 16 bytes at a time where strides allow. 4 x 4 pieces make whole
//              32-byte sectors of states that are contiguous along V or along K.
// Edges:       rows beyond K and columns beyond V are zeros, which are exact no-ops.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>
#include <limits>

#include "cuda/load.cuh"
#include "cuda/rule_params.cuh"

namespace deltanet::cuda {

// Which tensors can be moved by quads: found on the host.
struct RecurrentQuads {
  bool query, key, value, output;
  int initial_state, final_state, saved_states;  // 0: no; 1: along V; 2: along K
};

// Row groups of a block are 16, so a thread has kDimK / 64 pieces.
template <int kDimK>
struct RecurrentTraits {
  static_assert(kDimK % 64 == 0 && kDimK <= kMaxHeadDim, "16 row groups of quads");
  static constexpr int kThreads = 128;
  static constexpr int kColumns = 32;
  static constexpr int kColumnQuads = kColumns / 4;           // lanes 0 to 7, 8 to 15, ...
  static constexpr int kRowGroups = kThreads / kColumnQuads;  // 16, four of them in a warp
  static constexpr int kPieces = kDimK / (4 * kRowGroups);
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kGateTokens = 32;  // gates of so many tokens are computed at once

  // Everything is double-buffered by the token (gates: by 32 tokens), so that one barrier per token
  // is enough: what a token writes was last read before the barrier of the token before it.
  struct Shared {
    float4 k[2][kDimK / 4];
    float4 q[2][kDimK / 4];
    float kS[2][kWarps][kColumns];  // sums over the rows of a warp
    float qS[2][kWarps][kColumns];
    float dots[2][kWarps][4];  // k.k, q.q, q.k
    float decay[2][kGateTokens], beta[2][kGateTokens];
  };
};

// The state moves once per call: its quads, which are many, share the code for every dtype and
// edge. With that code inlined at each quad the kernels are twice as large.
__device__ __noinline__ inline float4 load_state_quad(const void* data, DType dtype, int64_t at,
                                                      int64_t stride, int count, bool quads) {
  return load_quad(data, dtype, at, stride, count, quads);
}
__device__ __noinline__ inline void store_state_quad(void* data, DType dtype, int64_t at,
                                                     int64_t stride, int count, bool quads,
                                                     float4 x) {
  store_quad(data, dtype, at, stride, count, quads, x);
}

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Sum over the lanes with the same column quad.
__device__ __forceinline__ float sum_over_row_groups(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 8);
  return x + __shfl_xor_sync(0xffffffffu, x, 16);
}

template <int kDimK>
class RecurrentBlock {
 public:
  using Traits = RecurrentTraits<kDimK>;
  using Shared = typename Traits::Shared;
  static constexpr int kPieces = Traits::kPieces;

  __device__ __forceinline__ RecurrentBlock(const RuleParams& p, const RecurrentQuads& quads,
                                            Shared& shared, int64_t n, int64_t head, int tile)
      : p_(p),
        quads_(quads),
        shared_(shared),
        n_(n),
        head_(head),
        key_head_(key_head_of(p, head)),
        column_(tile * Traits::kColumns + int(threadIdx.x) % Traits::kColumnQuads * 4),
        columns_(p.dim_v - column_),
        group_(int(threadIdx.x) / Traits::kColumnQuads) {}

  __device__ __forceinline__ void run() {
    load_state();
    const Sequence s = sequence_at(p_, n_);
    if (s.begin < s.end) {
      fetch(s, s.begin);
      store_rows(0);
    }
    for (int64_t t = s.begin; t < s.end; ++t) {
      const int64_t i = t - s.begin;
      const int buffer = int(i & 1);
      if (i % Traits::kGateTokens == 0) load_gates(s, t, int(i / Traits::kGateTokens & 1));
      const float4 v = value_;
      // The next token's rows travel while this one's sums are taken.
      if (t + 1 < s.end) fetch(s, t + 1);
      if (i == 0) __syncthreads();  // the first rows are there
      float4 k[kPieces];
      read_state(buffer, k);
      if (t + 1 < s.end) store_rows(buffer ^ 1);
      __syncthreads();
      update(s, t, int(i / Traits::kGateTokens & 1), int(i % Traits::kGateTokens), buffer, k, v);
      // For a backward pass to come: where its segments start.
      if (p_.saved_states.data && unsigned(i + 1) % unsigned(kSegmentTokens) == 0 && t + 1 < s.end)
        store_state(p_.saved_states, p_.saved_state(s.batch, t + 1), quads_.saved_states);
    }
    store_state(p_.final_state, n_, quads_.final_state);
  }

  // The tail of a packed call: zeros.
  static __device__ __forceinline__ void clear(const RuleParams& p, const RecurrentQuads& quads,
                                               int64_t head, int tile) {
    if (!p.output.data) return;
    const Sequence s = tail_of(p);
    const int column = tile * Traits::kColumns + int(threadIdx.x) % Traits::kColumnQuads * 4;
    for (int64_t t = s.begin + threadIdx.x / Traits::kColumnQuads; t < s.end;
         t += Traits::kRowGroups)
      store_quad(p.output.data, p.output.dtype,
                 t * p.output.stride[1] + head * p.output.stride[2] + column * p.output.stride[3],
                 p.output.stride[3], p.dim_v - column, quads.output,
                 make_float4(0.f, 0.f, 0.f, 0.f));
  }

 private:
  __device__ __forceinline__ int row_of(int piece) const {
    return 4 * (group_ + piece * Traits::kRowGroups);
  }

  // ---- the state: S_[piece][row][column]

  __device__ __forceinline__ void load_state() {
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      const int row = row_of(piece), rows = p_.dim_k - row;
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j)
          S_[piece][i][j] =
              p_.initial_state_is_identity && row + i == column_ + j && row + i < p_.dim_k ? 1.f
                                                                                           : 0.f;
      const auto& x = p_.initial_state;
      if (!x.data || rows <= 0 || columns_ <= 0) continue;
      const int64_t at =
          n_ * x.stride[0] + head_ * x.stride[1] + row * x.stride[2] + column_ * x.stride[3];
      if (quads_.initial_state == 2) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (j >= columns_) continue;
          const float4 e = load_state_quad(x.data, x.dtype, at + j * x.stride[3], 1, rows, true);
          S_[piece][0][j] = e.x, S_[piece][1][j] = e.y, S_[piece][2][j] = e.z,
          S_[piece][3][j] = e.w;
        }
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (i >= rows) continue;
          const float4 e = load_state_quad(x.data, x.dtype, at + i * x.stride[2], x.stride[3],
                                           columns_, quads_.initial_state == 1);
          S_[piece][i][0] = e.x, S_[piece][i][1] = e.y, S_[piece][i][2] = e.z,
          S_[piece][i][3] = e.w;
        }
      }
    }
  }

  __device__ __forceinline__ void store_state(const MutableView<4>& x, int64_t n, int quads) {
    if (!x.data || columns_ <= 0) return;
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      const int row = row_of(piece), rows = p_.dim_k - row;
      if (rows <= 0) continue;
      const auto& e = S_[piece];
      const int64_t at =
          n * x.stride[0] + head_ * x.stride[1] + row * x.stride[2] + column_ * x.stride[3];
      if (quads == 2) {
#pragma unroll
        for (int j = 0; j < 4; ++j)
          if (j < columns_)
            store_state_quad(x.data, x.dtype, at + j * x.stride[3], 1, rows, true,
                             make_float4(e[0][j], e[1][j], e[2][j], e[3][j]));
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (i < rows)
            store_state_quad(x.data, x.dtype, at + i * x.stride[2], x.stride[3], columns_,
                             quads == 1, make_float4(e[i][0], e[i][1], e[i][2], e[i][3]));
      }
    }
  }

  // ---- a token's inputs

  // Thread i takes quad i of k, thread 64 + i quad i of q; all take the quad of v that they need.
  __device__ __forceinline__ void fetch(const Sequence& s, int64_t t) {
    const int quad = int(threadIdx.x) % 64;
    const bool is_query = threadIdx.x >= 64;
    const auto& x = is_query ? p_.query : p_.key;
    row_ = make_float4(0.f, 0.f, 0.f, 0.f);
    if (x.data && 4 * quad < p_.dim_k)
      row_ = load_quad(x.data, x.dtype,
                       s.batch * x.stride[0] + t * x.stride[1] + key_head_ * x.stride[2] +
                           4 * quad * x.stride[3],
                       x.stride[3], p_.dim_k - 4 * quad, is_query ? quads_.query : quads_.key);
    const auto& v = p_.value;
    value_ = make_float4(0.f, 0.f, 0.f, 0.f);
    if (v.data)
      value_ = load_quad(
          v.data, v.dtype,
          s.batch * v.stride[0] + t * v.stride[1] + head_ * v.stride[2] + column_ * v.stride[3],
          v.stride[3], columns_, quads_.value);
  }
  __device__ __forceinline__ void store_rows(int buffer) {
    const int quad = int(threadIdx.x) % 64;
    if (quad < kDimK / 4) (threadIdx.x >= 64 ? shared_.q : shared_.k)[buffer][quad] = row_;
  }

  // Gates of the next 32 tokens, one per lane of the last warp, which has no other extra work.
  __device__ __forceinline__ void load_gates(const Sequence& s, int64_t t, int buffer) {
    const int lane = int(threadIdx.x) - (Traits::kThreads - Traits::kGateTokens);
    if (lane < 0 || t + lane >= s.end) return;
    shared_.decay[buffer][lane] = expf(load_log_decay(p_, s.batch, t + lane, head_));
    shared_.beta[buffer][lane] = load_beta(p_, s.batch, t + lane, head_);
  }

  // ---- equation (1)

  // Sums over this thread's rows and its warp's: S^T k, S^T q, and the products of k and q.
  __device__ __forceinline__ void read_state(int buffer, float4 (&k)[kPieces]) {
    float kS[4] = {}, qS[4] = {}, kk = 0.f, qq = 0.f, qk = 0.f;
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      const int quad = group_ + piece * Traits::kRowGroups;
      k[piece] = shared_.k[buffer][quad];
      const float4 q = shared_.q[buffer][quad];
      const float ks[4] = {k[piece].x, k[piece].y, k[piece].z, k[piece].w};
      const float qs[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        kk = fmaf(ks[i], ks[i], kk);
        qq = fmaf(qs[i], qs[i], qq);
        qk = fmaf(qs[i], ks[i], qk);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          kS[j] = fmaf(ks[i], S_[piece][i][j], kS[j]);
          qS[j] = fmaf(qs[i], S_[piece][i][j], qS[j]);
        }
      }
    }
    if (kk == kInfinity || qq == kInfinity) mark_infinities(buffer, kk, qq);
    kk = sum_over_row_groups(kk);
    qq = sum_over_row_groups(qq);
    qk = sum_over_row_groups(qk);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      kS[j] = sum_over_row_groups(kS[j]);
      qS[j] = sum_over_row_groups(qS[j]);
    }
    const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
    if (lane < Traits::kColumnQuads) {
      *reinterpret_cast<float4*>(&shared_.kS[buffer][warp][4 * lane]) =
          make_float4(kS[0], kS[1], kS[2], kS[3]);
      *reinterpret_cast<float4*>(&shared_.qS[buffer][warp][4 * lane]) =
          make_float4(qS[0], qS[1], qS[2], qS[3]);
    }
    if (lane == 0)
      *reinterpret_cast<float4*>(&shared_.dots[buffer][warp][0]) = make_float4(kk, qq, qk, 0.f);
  }

  // A row whose norm overflows counts as zeros, one that has an infinity as NaN: its sum of squares
  // is NaN from here on.
  __device__ __forceinline__ void mark_infinities(int buffer, float& kk, float& qq) const {
#pragma unroll 1
    for (int piece = 0; piece < kPieces; ++piece) {
      const int quad = group_ + piece * Traits::kRowGroups;
      const float4 k = shared_.k[buffer][quad], q = shared_.q[buffer][quad];
      kk += 0.f * k.x + 0.f * k.y + 0.f * k.z + 0.f * k.w;
      qq += 0.f * q.x + 0.f * q.y + 0.f * q.z + 0.f * q.w;
    }
  }

  __device__ __forceinline__ static float4 sum_over_warps(const float* x, int pitch) {
    float4 sum = *reinterpret_cast<const float4*>(x);
#pragma unroll
    for (int warp = 1; warp < Traits::kWarps; ++warp) {
      const float4 y = *reinterpret_cast<const float4*>(x + warp * pitch);
      sum = make_float4(sum.x + y.x, sum.y + y.y, sum.z + y.z, sum.w + y.w);
    }
    return sum;
  }

  __device__ __forceinline__ void update(const Sequence& s, int64_t t, int gates, int token,
                                         int buffer, const float4 (&k)[kPieces], float4 value) {
    const int quad = 4 * (int(threadIdx.x) % Traits::kColumnQuads);
    float4 x = sum_over_warps(&shared_.kS[buffer][0][quad], Traits::kColumns);
    const float4 dots = sum_over_warps(&shared_.dots[buffer][0][0], 4);
    const float rk = p_.l2norm ? reciprocal_norm(dots.x) : 1.f;
    const float rq = p_.l2norm ? reciprocal_norm(dots.y) : 1.f;
    if (rk == 0.f) x = make_float4(0.f, 0.f, 0.f, 0.f);  // it overflows, and x may be infinite
    const float qk = rk == 0.f || rq == 0.f ? 0.f : dots.z;
    const float a = shared_.decay[gates][token], b = shared_.beta[gates][token];
    const float xs[4] = {x.x, x.y, x.z, x.w}, vs[4] = {value.x, value.y, value.z, value.w};
    float d[4];  // d / |k|: the update takes k as it came
#pragma unroll
    for (int j = 0; j < 4; ++j) d[j] = rk * (b * fmaf(-a * rk, xs[j], vs[j]));

    if (p_.output.data && group_ == 0) {  // one row group writes
      float4 y = sum_over_warps(&shared_.qS[buffer][0][quad], Traits::kColumns);
      if (rq == 0.f) y = make_float4(0.f, 0.f, 0.f, 0.f);
      const float factor = float(p_.scale) * rq;
      const auto& o = p_.output;
      store_quad(
          o.data, o.dtype,
          s.batch * o.stride[0] + t * o.stride[1] + head_ * o.stride[2] + column_ * o.stride[3],
          o.stride[3], columns_, quads_.output,
          make_float4(factor * fmaf(qk, d[0], a * y.x), factor * fmaf(qk, d[1], a * y.y),
                      factor * fmaf(qk, d[2], a * y.z), factor * fmaf(qk, d[3], a * y.w)));
    }
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      const float ks[4] = {k[piece].x, k[piece].y, k[piece].z, k[piece].w};
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) S_[piece][i][j] = fmaf(ks[i], d[j], a * S_[piece][i][j]);
    }
  }

  const RuleParams& p_;
  const RecurrentQuads& quads_;
  Shared& shared_;
  const int64_t n_, head_, key_head_;
  const int column_, columns_;  // of the thread's quad; how many columns there are from it on
  const int group_;
  float S_[kPieces][4][4];
  float4 row_, value_;  // the next token's
};

template <int kDimK>
__global__ void __launch_bounds__(RecurrentTraits<kDimK>::kThreads)
    recurrent_forward_kernel(const __grid_constant__ RuleParams p,
                             const __grid_constant__ RecurrentQuads quads) {
  using Traits = RecurrentTraits<kDimK>;
  __shared__ typename Traits::Shared shared;
  const RuleBlock block = rule_block(p, Traits::kColumns);
  if (block.sequence < p.sequences)
    RecurrentBlock<kDimK>(p, quads, shared, block.sequence, block.head, block.tile).run();
  else
    RecurrentBlock<kDimK>::clear(p, quads, block.head, block.tile);
}

}  // namespace deltanet::cuda
