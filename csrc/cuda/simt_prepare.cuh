// SPDX-License-Identifier: Apache-2.0
//
// Everything of a chunk that does not depend on the state, in fp32: docs/algorithm.md, equations
// (2), (3) and the masked factor of (6).
//
//   L_ij = b_i (k_i . k_j) D_ij  for j < i,     P_ij = scale (q_i . k_j) D_ij  for j <= i
//
// Work split:  one block = one (chunk, key head), with a loop over its value heads. Thread (i, j)
//              makes element (i, j) of each matrix; gates of 16 value heads are scanned at once,
//              half a warp for each.
// Numerics:    G is scanned in fp64 and kept as hi + lo. l2norm, beta, decay and scale are fp32
//              factors of products: k and q are never rescaled.
// Memory:      reads q and k once per key head, g and beta once; writes 2.6 KB per value head.
// Edges:       tokens beyond the chunk's end count as k = q = b = g = 0.
#pragma once
#include <cub/warp/warp_scan.cuh>
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/chunk_table.cuh"
#include "cuda/load.cuh"
#include "cuda/rule_params.cuh"
#include "cuda/simt_chunk.cuh"

namespace deltanet::cuda::simt {

struct PrepareArguments {
  Prepared* out;               // [chunks, HV]
  PreparedGradient* gradient;  // [chunks, HV]  null: not wanted
  ChunkTable table;
  int parts;                    // chunks of an entry of the table
  bool query_quads, key_quads;  // what quads_along says
};

struct PrepareTraits {
  static constexpr int kThreads = kChunk * kChunk;
  static constexpr int kMinBlocks = 4;              // 64 registers: none is spilled
  static constexpr int kHeads = kThreads / kChunk;  // value heads whose gates are scanned at once
  using Scan = cub::WarpScan<double, kChunk>;
  struct Shared {
    float high[kHeads][kChunk], low[kHeads][kChunk];  // G inside a piece
    float beta[kHeads][kChunk];
    int first[kHeads][kChunk];             // of the token's piece
    float k_norm[kChunk], q_norm[kChunk];  // reciprocals, or 1
    typename Scan::TempStorage scan[kHeads];
  };
  // k and q rows follow, [16][row_pitch] each.
  static int64_t shared_bytes(int dim_k) {
    return rows_offset() + int64_t(2) * kChunk * row_pitch(dim_k) * int64_t(sizeof(float));
  }
  __host__ __device__ static constexpr int rows_offset() { return (sizeof(Shared) + 15) / 16 * 16; }
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

__global__ void __launch_bounds__(PrepareTraits::kThreads, PrepareTraits::kMinBlocks)
    prepare_kernel(const __grid_constant__ RuleParams p,
                   const __grid_constant__ PrepareArguments x) {
  using Traits = PrepareTraits;
  extern __shared__ float4 memory[];
  auto& shared = *reinterpret_cast<Traits::Shared*>(memory);
  const int pitch = row_pitch(p.dim_k);
  float* const k = reinterpret_cast<float*>(memory) + Traits::rows_offset() / 4;
  float* const q = k + kChunk * pitch;

  const unsigned part = blockIdx.x / unsigned(p.key_heads);
  const int64_t number = part, key_head = blockIdx.x % unsigned(p.key_heads);
  const Chunk chunk = part_of(chunk_at(p, x.table, part / unsigned(x.parts)),
                              int(part % unsigned(x.parts)), kChunk);
  if (chunk.count == 0) return;
  const int64_t batch = p.device_cu_seqlens ? 0 : chunk.sequence;
  const int i = int(threadIdx.x) / kChunk, j = int(threadIdx.x) % kChunk;

  load_rows(p.key, batch, chunk.first, chunk.count, key_head, p.dim_k, x.key_quads, k, pitch,
            Traits::kThreads);
  load_rows(p.query, batch, chunk.first, chunk.count, key_head, p.dim_k, x.query_quads, q, pitch,
            Traits::kThreads);
  __syncthreads();  // rows are complete

  const int dim = (p.dim_k + 3) / 4 * 4;
  const float kk = j <= i ? dot(k + i * pitch, k + j * pitch, dim) : 0.f;
  const float qk = j <= i ? dot(q + i * pitch, k + j * pitch, dim) : 0.f;
  if (i == j) {
    shared.k_norm[i] = p.l2norm ? reciprocal_norm(kk) : 1.f;  // |k|^2 is the diagonal of K K^T
    shared.q_norm[i] = p.l2norm ? reciprocal_norm(dot(q + i * pitch, q + i * pitch, dim)) : 1.f;
  }
  const float scale = float(p.scale);

  const int64_t group = unsigned(p.value_heads) / unsigned(p.key_heads);
  for (int64_t base = 0; base < group; base += Traits::kHeads) {
    __syncthreads();  // norms are complete; gates of the heads before have been read
    {                 // equation (2): thread (i, j) is token j of value head base + i
      const int64_t head = key_head * group + base + i;
      const bool inside = j < chunk.count && base + i < group;
      double G = inside ? load_log_decay(p, batch, chunk.first + j, head) : 0.f;
      const float beta = inside ? load_beta(p, batch, chunk.first + j, head) : 0.f;
      Traits::Scan(shared.scan[i]).InclusiveSum(G, G);
      int first, end;
      cut_chunk(G, chunk.count, first, end);
      const double before = __shfl_sync(0xffffffffu, G, first > 0 ? first - 1 : 0, kChunk);
      const double last = __shfl_sync(0xffffffffu, G, end - 1, kChunk);
      const double inner = first > 0 ? G - before : G, left = last - G;
      const double all = first > 0 ? last - before : last;
      const float high = float(inner), low = float(inner - double(high));
      shared.high[i][j] = high;
      shared.low[i][j] = low;
      shared.beta[i][j] = beta;
      shared.first[i][j] = first;
      if (base + i < group) {
        Prepared& to = x.out[number * p.value_heads + head];
        const bool token = j < chunk.count;
        const float decay = exp_of_sum(high, low);
        const float left_high = float(left), all_high = float(all);
        to.value[j] = beta;
        to.key[j] = token ? beta * decay * shared.k_norm[j] : 0.f;
        to.query[j] = token ? scale * decay * shared.q_norm[j] : 0.f;
        to.update[j] =
            token ? exp_of_sum(left_high, float(left - double(left_high))) * shared.k_norm[j] : 0.f;
        to.keep[j] = exp_of_sum(all_high, float(all - double(all_high)));
        to.end[j] = end;
        if (x.gradient) {
          PreparedGradient& more = x.gradient[number * p.value_heads + head];
          more.decay[j] = token ? decay * shared.k_norm[j] : 0.f;
          more.k_norm[j] = shared.k_norm[j];
          more.q_scale[j] = scale * shared.q_norm[j];
        }
      }
    }
    __syncthreads();  // gates are complete
    for (int h = 0; h < Traits::kHeads && base + h < group; ++h) {
      // Only masked differences go through exp: for j > i they can be huge.
      float l = 0.f, score = 0.f, D = 0.f, similarity = 0.f;
      if (j <= i && i < chunk.count && j >= shared.first[h][i]) {
        D = shared.k_norm[j] *
            exp_of_sum(shared.high[h][i] - shared.high[h][j], shared.low[h][i] - shared.low[h][j]);
        if (j < i) {
          l = shared.beta[h][i] * shared.k_norm[i] * (kk * D);
          similarity = shared.k_norm[i] * (kk * D);
        }
        score = scale * shared.q_norm[i] * (qk * D);
      }
      Prepared& to = x.out[number * p.value_heads + key_head * group + base + h];
      to.L[i][j] = l;
      to.P[i][j] = score;
      if (j < 4) to.P[i][kChunk + j] = 0.f;  // copied along
      if (x.gradient) {
        PreparedGradient& more = x.gradient[number * p.value_heads + key_head * group + base + h];
        more.D[i][j] = D;
        more.KK[i][j] = similarity;
      }
    }
  }
}

}  // namespace deltanet::cuda::simt
