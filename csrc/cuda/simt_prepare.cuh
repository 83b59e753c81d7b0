// SPDX-License-Identifier: Apache-2.0
//
// Everything of a chunk that does not depend on the state, in fp32: docs/algorithm.md, equations
// (2), (3) and the masked factor of (6).
//
//   L_ij = b_i (k_i . k_j) D_ij  for j < i,     P_ij = scale (q_i . k_j) D_ij  for j <= i
//
// Work split:  one block = one (chunk, key head), with a loop over its value heads. Thread (i, j)
//              makes element (i, j) of each matrix and, where there are fewer threads than
//              elements, those some rows below; gates of up to 16 value heads are scanned at once,
//              half a warp for each.
// Numerics:    G is scanned in fp64 and kept as hi + lo. l2norm, beta, decay and scale are fp32
//              factors of products: k and q are never rescaled. No bit depends on how many threads
//              there are.
// Memory:      reads q and k once per key head, g and beta once; writes 2.7 KB per value head.
// Edges:       tokens beyond the chunk's end count as k = q = b = g = 0, and so do finite rows
//              whose norm overflows: x * rsqrt(inf) is 0. A row that has an infinity is NaN.
#pragma once
#include <cub/warp/warp_scan.cuh>
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/load.cuh"
#include "cuda/rule_params.cuh"
#include "cuda/simt_chunk.cuh"

namespace deltanet::cuda::simt {

template <int kThreads_>
struct PrepareTraits {
  static constexpr int kThreads = kThreads_;
  static constexpr int kHeads = kThreads / kChunk;  // value heads whose gates are scanned at once
  static constexpr int kRows = kChunk / kHeads;     // elements of a matrix for a thread
  static_assert(kThreads % 32 == 0 && kChunk % kHeads == 0, "whole warps share the elements");
  using Scan = cub::WarpScan<double, kChunk>;
  struct Shared {
    float high[kHeads][kChunk], low[kHeads][kChunk];  // G inside a piece
    float beta[kHeads][kChunk];
    int first[kHeads][kChunk];             // of the token's piece
    float k_norm[kChunk], q_norm[kChunk];  // reciprocals, or 1
    typename Scan::TempStorage scan[kHeads];
  };
};

// Eight partial sums: one chain over all of K would lose what they keep apart.
__device__ __forceinline__ float dot(const float* a, const float* b, int dim) {
  float4 even = make_float4(0.f, 0.f, 0.f, 0.f), odd = even;
  for (int c = 0; c < dim; c += 8) {
    const float4 x = *reinterpret_cast<const float4*>(a + c);
    const float4 y = *reinterpret_cast<const float4*>(b + c);
    even.x = fmaf(x.x, y.x, even.x), even.y = fmaf(x.y, y.y, even.y);
    even.z = fmaf(x.z, y.z, even.z), even.w = fmaf(x.w, y.w, even.w);
    if (c + 4 >= dim) break;
    const float4 u = *reinterpret_cast<const float4*>(a + c + 4);
    const float4 w = *reinterpret_cast<const float4*>(b + c + 4);
    odd.x = fmaf(u.x, w.x, odd.x), odd.y = fmaf(u.y, w.y, odd.y);
    odd.z = fmaf(u.z, w.z, odd.z), odd.w = fmaf(u.w, w.w, odd.w);
  }
  return ((even.x + odd.x) + (even.y + odd.y)) + ((even.z + odd.z) + (even.w + odd.w));
}

// e^(high + low), low being what high lost in rounding.
__device__ __forceinline__ float exp_of_sum(float high, float low) {
  const float e = expf(high);
  return fmaf(e, low, e);
}

// A chunk ends early where the decay rises by more than e^kMostRise inside it, which takes positive
// gates: terms that grow like e^{G_i - G_j} would cancel in the substitution, while token by token
// nothing does. A new piece starts there; what was before does not change.
constexpr double kMostRise = 1;

// Called by half a warp, one lane per token. G: the chunk's running sum. Finds the piece [first,
// end) of the lane's own token.
__device__ __forceinline__ void cut_chunk(double G, int count, int& first, int& end) {
  const int token = int(threadIdx.x) % kChunk;
  first = 0;
  end = count;
  double lowest = __shfl_sync(0xffffffffu, G, 0, kChunk);
  bool later = false;  // a cut behind this token was found
  for (int i = 1; i < kChunk; ++i) {
    const double sum = __shfl_sync(0xffffffffu, G, i, kChunk);
    if (i < count && sum - lowest > kMostRise) {
      if (token >= i) {
        first = i;
      } else if (!later) {
        end = i;
        later = true;
      }
      lowest = sum;
    } else if (sum < lowest) {
      lowest = sum;
    }
  }
}

// Where chunk `count` tokens from `first` on lie, and where what is prepared for them goes.
struct PrepareTask {
  int64_t batch, first;
  int count;
  int64_t key_head;
  bool with_query;             // otherwise query, P and what comes of them are zeros
  Prepared* out;               // [HV / HK]  of the value heads of the key
  PreparedGradient* gradient;  // [HV / HK]  null: not wanted
};

template <int kThreads>
class PrepareBlock {
 public:
  using Traits = PrepareTraits<kThreads>;
  static constexpr int kRows = Traits::kRows;
  static constexpr int kHeads = Traits::kHeads;

  // k, q: [16][row_pitch] each.
  __device__ __forceinline__ PrepareBlock(const RuleParams& p, typename Traits::Shared& shared,
                                          float* k, float* q)
      : p_(p),
        shared_(shared),
        k_(k),
        q_(q),
        pitch_(row_pitch(p.dim_k)),
        i_(int(threadIdx.x) / kChunk),
        j_(int(threadIdx.x) % kChunk) {}

  // What was in shared memory must have been read.
  __device__ __forceinline__ void run(const PrepareTask& task, bool key_quads, bool query_quads) {
    load_rows(p_.key, task.batch, task.first, task.count, task.key_head, p_.dim_k, key_quads, k_,
              pitch_, kThreads);
    load_rows(task.with_query ? p_.query : View<4>(), task.batch, task.first, task.count,
              task.key_head, p_.dim_k, query_quads, q_, pitch_, kThreads);
    __syncthreads();  // rows are complete
    multiply(task.with_query, 0);
    uint32_t zero_rows = 0;
    if (p_.l2norm) {
      __syncthreads();  // norms are complete
      zero_rows = overflowing();
      if (zero_rows) {
        clear_rows(k_, pitch_, p_.dim_k, zero_rows, kThreads);
        clear_rows(q_, pitch_, p_.dim_k, zero_rows >> kChunk, kThreads);
        __syncthreads();  // rows are complete, norms have been read
        multiply(task.with_query, zero_rows);
      }
    }
    const int group = int(unsigned(p_.value_heads) / unsigned(p_.key_heads));
    for (int base = 0; base < group; base += kHeads) {
      __syncthreads();  // norms are complete; gates of the heads before have been read
      scan_gates(task, base, group, zero_rows);
      __syncthreads();  // gates are complete
      for (int h = 0; h < kHeads && base + h < group; ++h) make_triangles(task, base, h);
    }
  }

 private:
  // K K^T, Q K^T and norms. zero_rows: the rows that have been cleared, whose norm is 0 or NaN.
  __device__ __forceinline__ void multiply(bool with_query, uint32_t zero_rows) {
    const int dim = padded_rows(p_.dim_k);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int i = i_ + r * kHeads;
      kk_[r] = j_ <= i ? dot(k_ + i * pitch_, k_ + j_ * pitch_, dim) : 0.f;
      qk_[r] = with_query && j_ <= i ? dot(q_ + i * pitch_, k_ + j_ * pitch_, dim) : 0.f;
      if (i != j_) continue;
      const float qq = p_.l2norm ? dot(q_ + i * pitch_, q_ + i * pitch_, dim) : 0.f;
      if (zero_rows == 0) {
        shared_.k_norm[i] = p_.l2norm ? reciprocal_norm(kk_[r]) : 1.f;  // |k|^2: the diagonal
        shared_.q_norm[i] = p_.l2norm ? reciprocal_norm(qq) : 1.f;
      } else {
        if (zero_rows >> i & 1) shared_.k_norm[i] += kk_[r];
        if (zero_rows >> (kChunk + i) & 1) shared_.q_norm[i] += qq;
      }
    }
  }
  // The bits of Prepared::zero_rows. Every warp finds all of them.
  __device__ __forceinline__ uint32_t overflowing() const {
    const float norm = int(threadIdx.x) % 32 < kChunk ? shared_.k_norm[j_] : shared_.q_norm[j_];
    return __ballot_sync(0xffffffffu, norm == 0.f);
  }

  // Equation (2): this thread is token j of value head base + i.
  __device__ __forceinline__ void scan_gates(const PrepareTask& task, int base, int group,
                                             uint32_t zero_rows) {
    const int i = i_, j = j_;
    const int64_t head = task.key_head * group + base + i;
    const bool inside = j < task.count && base + i < group;
    double G = inside ? load_log_decay(p_, task.batch, task.first + j, head) : 0.f;
    const float beta = inside ? load_beta(p_, task.batch, task.first + j, head) : 0.f;
    typename Traits::Scan(shared_.scan[i]).InclusiveSum(G, G);
    int first, end;
    cut_chunk(G, task.count, first, end);
    const double before = __shfl_sync(0xffffffffu, G, first > 0 ? first - 1 : 0, kChunk);
    const double last = __shfl_sync(0xffffffffu, G, end - 1, kChunk);
    const double inner = first > 0 ? G - before : G, left = last - G;
    const double all = first > 0 ? last - before : last;
    const float high = float(inner), low = float(inner - double(high));
    shared_.high[i][j] = high;
    shared_.low[i][j] = low;
    shared_.beta[i][j] = beta;
    shared_.first[i][j] = first;
    if (base + i >= group) return;
    Prepared& to = task.out[base + i];
    const bool token = j < task.count;
    const float decay = exp_of_sum(high, low), scale = float(p_.scale);
    const float left_high = float(left), all_high = float(all);
    to.value[j] = beta;
    to.key[j] = token ? beta * decay * shared_.k_norm[j] : 0.f;
    to.query[j] = token ? scale * decay * shared_.q_norm[j] : 0.f;
    to.update[j] =
        token ? exp_of_sum(left_high, float(left - double(left_high))) * shared_.k_norm[j] : 0.f;
    to.keep[j] = exp_of_sum(all_high, float(all - double(all_high)));
    to.end[j] = end;
    if (j < 4) to.zero_rows[j] = j == 0 ? zero_rows : 0;
    if (!task.gradient) return;
    PreparedGradient& more = task.gradient[base + i];
    more.decay[j] = token ? decay * shared_.k_norm[j] : 0.f;
    more.k_norm[j] = shared_.k_norm[j];
    more.q_scale[j] = scale * shared_.q_norm[j];
  }

  // L, P and their like of value head base + h.
  __device__ __forceinline__ void make_triangles(const PrepareTask& task, int base, int h) {
    const int j = j_;
    const float scale = float(p_.scale);
    Prepared& to = task.out[base + h];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int i = i_ + r * kHeads;
      // Only masked differences go through exp: for j > i they can be huge.
      float l = 0.f, score = 0.f, D = 0.f, similarity = 0.f;
      if (j <= i && i < task.count && j >= shared_.first[h][i]) {
        D = shared_.k_norm[j] * exp_of_sum(shared_.high[h][i] - shared_.high[h][j],
                                           shared_.low[h][i] - shared_.low[h][j]);
        if (j < i) {
          l = shared_.beta[h][i] * shared_.k_norm[i] * (kk_[r] * D);
          similarity = shared_.k_norm[i] * (kk_[r] * D);
        }
        score = scale * shared_.q_norm[i] * (qk_[r] * D);
      }
      to.L[i][j] = l;
      to.P[i][j] = score;
      if (j < 4) to.P[i][kChunk + j] = 0.f;  // copied along
      if (!task.gradient) continue;
      PreparedGradient& more = task.gradient[base + h];
      more.D[i][j] = D;
      more.KK[i][j] = similarity;
    }
  }

  const RuleParams& p_;
  typename Traits::Shared& shared_;
  float *const k_, *const q_;
  const int pitch_, i_, j_;
  float kk_[kRows], qk_[kRows];
};

}  // namespace deltanet::cuda::simt
