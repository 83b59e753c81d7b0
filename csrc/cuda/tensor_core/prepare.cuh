// SPDX-License-Identifier: Apache-2.0
//
// Everything of a chunk that does not depend on the state: decay, scores, system, inverse.
//
//   G_i = sum_{s<=i} g_s,   L_ij = b_i (k_i . k_j) e^{G_i - G_j},   T = (I + L)^-1   (2), (3), (4)
//   P_ij = (q_i . k_j) e^{G_i - G_j}  for j <= i                     the masked factor of (6)
//
// Work split:  a block of 128 threads = one chunk and key head, and some of its value heads. K K^T
//              and Q K^T are computed once and kept in registers.
// Numerics:    G scanned in fp64 and kept as hi + lo, in units of log2. K K^T by mma of the raw
// keys
//              (exact products, fp32 sums); l2norm is an fp32 factor of the product, so normalized
//              keys are never rounded. Inverse in fp32 and 3xTF32.
// Memory:      reads q, k, g, beta once; writes one Record per value head.
#pragma once
#include <cub/block/block_scan.cuh>

#include "cuda/block_triangular_inverse.cuh"
#include "cuda/launch.cuh"
#include "cuda/load.cuh"
#include "cuda/tensor_core/layout.cuh"

namespace deltanet::cuda::tensor_core {

template <class Element_, int kK_>
struct PrepareTraits {
  using Element = Element_;
  static constexpr int kK = kK_;  // the bucket that K is padded to
  static constexpr int kThreads = 128, kWarps = kThreads / 32;
  static constexpr int kBlocksPerProcessor = 4;  // 128 registers; left alone, ptxas takes 213
  using Blocks = LowerBlocks<kChunk>;
  using Tile = SwizzledTile<kK * 2>;
  using Inverse = BlockTriangularInverse<kChunk, kThreads, BLOCK_TRIANGULAR_INVERSE_RAKING_TF32X3>;
  // Not the raking scan: 64 items are two warps, and a serial part does not pay.
  using Scan = cub::BlockScan<double, kThreads, cub::BLOCK_SCAN_WARP_SCANS>;
  static constexpr int kBlocksPerWarp = (Blocks::kCount + kWarps - 1) / kWarps;

  struct Shared {
    // Barriers stand between the uses of a union: the tile until K K^T and Q K^T are in registers,
    // then, per value head, scan and inverse.
    union alignas(256) {
      Element k[kChunk * kK];
      typename Scan::TempStorage scan;
      typename Inverse::TempStorage inverse;
    };
    union alignas(256) {
      Element q[kChunk * kK];
      float matrix[Inverse::kMatrixSize];  // L, then T
    };
    alignas(16) float G_hi[kChunk], G_lo[kChunk], beta[kChunk];
    alignas(16) float k_norm[kChunk], q_norm[kChunk];  // 1 / |k_i|, 1 / |q_i|, or 1
    alignas(16) float k_square[kChunk], q_square[kThreads / kChunk][kChunk];  // the latter in parts
    alignas(16) double G[kChunk];
    alignas(16) int window[kChunk];  // the first token of each token's window
    uint64_t windows;                // where windows start
    // Which norms overflow: tokens 0 to 31, and the others.
    alignas(8) uint32_t keys_overflow[kChunk / 32];
    alignas(8) uint32_t queries_overflow[kChunk / 32];
  };
};

template <class Traits>
struct Prepare {
  using Element = typename Traits::Element;
  using Blocks = typename Traits::Blocks;
  using Tile = typename Traits::Tile;
  static constexpr int kK = Traits::kK, kThreads = Traits::kThreads, kWarps = Traits::kWarps;
  static constexpr int kBlocksPerWarp = Traits::kBlocksPerWarp;

  const Params& p;
  typename Traits::Shared& shared;
  int thread, warp, lane;

  __device__ __forceinline__ Prepare(const Params& params, typename Traits::Shared& storage)
      : p(params),
        shared(storage),
        thread(int(threadIdx.x)),
        warp(thread / 32),
        lane(thread % 32) {}

  // Rows of the chunk, zero-padded to kChunk x kK. Padding with k = 0 and b = 0 leaves the state
  // alone: equation (7).
  __device__ __forceinline__ void load_rows(Element* tile, const View<4>& x, int64_t batch,
                                            int64_t first, int count, int64_t head) const {
    constexpr int kPieces = kK / 8, kStep = kThreads / kPieces;
    const int piece = thread % kPieces;
    const int left = (p.rule.dim_k - piece * 8) * 2, bytes = left < 0 ? 0 : left < 16 ? left : 16;
    const Element* from = static_cast<const Element*>(x.data) + batch * x.stride[0] +
                          first * x.stride[1] + head * x.stride[2] + piece * 8;
    for (int row = thread / kPieces; row < kChunk; row += kStep) {
      const bool inside = row < count && bytes > 0;
      cp_async_16(smem_address(tile) + Tile::offset(row, piece),
                  inside ? from + row * x.stride[1] : x.data, inside ? bytes : 0);
    }
  }

  // Partial sums of |q_i|^2. Lanes take different rows: no bank conflicts.
  __device__ __forceinline__ void square_query() const {
    constexpr int kParts = kThreads / kChunk, kPieces = kK / 8 / kParts;
    const int row = thread % kChunk, part = thread / kChunk;
    float sum = 0;
#pragma unroll 4
    for (int piece = part * kPieces; piece < (part + 1) * kPieces; ++piece) {
      const uint4 x = *reinterpret_cast<const uint4*>(reinterpret_cast<const char*>(shared.q) +
                                                      Tile::offset(row, piece));
      for (uint32_t word : {x.x, x.y, x.z, x.w}) {
        const float2 pair = unpack<Element>(word);
        sum = fmaf(pair.x, pair.x, sum);
        sum = fmaf(pair.y, pair.y, sum);
      }
    }
    shared.q_square[part][row] = sum;
  }

  // Lower blocks of Q K^T and K K^T, both from one read of the keys. |k_i|^2 is the diagonal of the
  // latter.
  using Products = float[kBlocksPerWarp][2][4];
  __device__ __forceinline__ void multiply_keys(Products& qk, Products& kk, bool query) const {
    const LaneMap la = lanes_for_a(lane), lb = lanes_for_b(lane);
    const int row_of_lane = lane / 4, pair = lane % 4;
#pragma unroll
    for (int n = 0; n < kBlocksPerWarp; ++n) {
      const int block = warp + n * kWarps;
      if (block >= Blocks::kCount) break;
      const int row = Blocks::row_of(block), column = block - Blocks::index(row, 0);
      const uint32_t keys = smem_address(shared.k), queries = smem_address(shared.q);
      const uint32_t k_a = keys + Tile::offset(row * 16 + la.row, la.piece);
      const uint32_t k_b = keys + Tile::offset(column * 16 + lb.row, lb.piece);
      const uint32_t q_a = queries + Tile::offset(row * 16 + la.row, la.piece);
#pragma unroll 2
      for (int c = 0; c < kK / 16; ++c) {
        uint32_t a[4], b[4];
        ldmatrix_x4(b, Tile::step(k_b, 0, c));
        if (query) {
          ldmatrix_x4(a, Tile::step(q_a, 0, c));
          mma<Element>(qk[n][0], a, b[0], b[1]);
          mma<Element>(qk[n][1], a, b[2], b[3]);
        }
        ldmatrix_x4(a, Tile::step(k_a, 0, c));
        mma<Element>(kk[n][0], a, b[0], b[1]);
        mma<Element>(kk[n][1], a, b[2], b[3]);
      }
      if (row != column) continue;
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const int i = row_of_lane + (e / 2 % 2) * 8, j = (e / 4) * 8 + pair * 2 + e % 2;
        if (i == j) shared.k_square[row * 16 + i] = kk[n][e / 4][e % 4];
      }
    }
  }

  // 1 / |x| of each row; 0 where the norm overflows. Whether one does. By the first kChunk threads,
  // whole warps.
  __device__ __forceinline__ bool make_norms(bool query) const {
    float square = 0.f;
    if (query)
      for (int i = 0; i < kThreads / kChunk; ++i) square += shared.q_square[i][thread];
    const float k = reciprocal_norm(shared.k_square[thread]), q = reciprocal_norm(square);
    shared.k_norm[thread] = k;
    shared.q_norm[thread] = q;
    const uint32_t keys = __ballot_sync(0xffffffffu, k == 0.f);
    const uint32_t queries = __ballot_sync(0xffffffffu, q == 0.f);
    if (lane == 0) {
      shared.keys_overflow[warp] = keys;
      shared.queries_overflow[warp] = queries;
    }
    return (keys | queries) != 0;
  }

  // Of rows whose norm overflows: the norm of one that has an infinity becomes NaN, and products
  // with the others 0, which could not be told from 0 times infinity later.
  __device__ __forceinline__ void clear_overflowing(Products& qk, Products& kk) const {
    static_assert(kThreads == 2 * kChunk, "a row for a thread: keys, then queries");
    const int r = thread % kChunk;
    float& norm = thread < kChunk ? shared.k_norm[r] : shared.q_norm[r];
    if (norm == 0.f) {
      const auto* tile = reinterpret_cast<const char*>(thread < kChunk ? shared.k : shared.q);
      float sum = 0.f;
#pragma unroll 1
      for (int c = 0; c < kK; c += 2) {
        const float2 pair = unpack<Element>(
            *reinterpret_cast<const uint32_t*>(tile + Tile::offset(r, c / 8) + c % 8 * 2));
        sum += pair.x * 0.f + pair.y * 0.f;
      }
      norm = sum;
    }
    __syncthreads();  // norms are complete
#pragma unroll
    for (int n = 0; n < kBlocksPerWarp; ++n) {
      const int block = warp + n * kWarps;
      if (block >= Blocks::kCount) break;
      const int row = Blocks::row_of(block), column = block - Blocks::index(row, 0);
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const int i = row * 16 + lane / 4 + (e / 2 % 2) * 8;
        const int j = column * 16 + (e / 4) * 8 + lane % 4 * 2 + e % 2;
        if (shared.k_norm[j] == 0.f || shared.k_norm[i] == 0.f) kk[n][e / 4][e % 4] = 0.f;
        if (shared.k_norm[j] == 0.f || shared.q_norm[i] == 0.f) qk[n][e / 4][e % 4] = 0.f;
      }
    }
  }

  // Cuts the chunk into windows: where G rises by more than kMostRise above its lowest value since
  // the window began, counted from behind the window's first token, a new one starts.
  __device__ __forceinline__ void cut_windows(int count) const {
    if (thread == 0) {
      uint64_t starts = 0;
      double lowest = shared.G[0];
      for (int i = 1; i < count; ++i) {
        const double G = shared.G[i];
        if (G - lowest > kMostRise) {
          starts |= uint64_t(1) << i;
          lowest = G;
        } else if (G < lowest) {
          lowest = G;
        }
      }
      shared.windows = starts;
    }
  }

  // Equation (2): hi + lo of G, restarted in each window. Ends with a barrier.
  __device__ __forceinline__ void scan_gates(int64_t batch, int64_t first, int count,
                                             int64_t head) const {
    double G = 0;
    if (thread < kChunk) {
      // Beyond the end k = b = g = 0: the rows of L are zero, and T is the identity.
      const bool inside = thread < count;
      if (inside) G = load_log_decay(p.rule, batch, first + thread, head);
      shared.beta[thread] = inside ? load_beta(p.rule, batch, first + thread, head) : 0.f;
    }
    const bool rises = __syncthreads_or(G > 0);  // and the scan's storage is free
    typename Traits::Scan(shared.scan).InclusiveSum(G, G);
    int window = 0;
    uint64_t starts = 0;
    if (rises) {
      if (thread < kChunk) shared.G[thread] = G;
      __syncthreads();
      cut_windows(count);
      __syncthreads();
      starts = shared.windows;
      if (thread < kChunk) {
        const uint64_t upto = starts << (63 - thread);  // the starts at or before this token
        window = upto ? thread - __clzll(static_cast<long long>(upto)) : 0;
        if (window > 0) G -= shared.G[window - 1];
      }
    } else if (thread == 0) {
      shared.windows = 0;
    }
    if (thread < kChunk) {
      G *= 1.4426950408889634074;  // 1 / ln 2
      shared.window[thread] = window;
      shared.G_hi[thread] = float(G);
      shared.G_lo[thread] = float(G - double(float(G)));
    }
    __syncthreads();  // G is complete, and the scan's storage is free
  }

  // Equation (3) and P of one value head. They share the decay. Only masked differences go through
  // exp: for j > i, and between windows, they can be huge.
  __device__ __forceinline__ void make_system(const Products& qk, const Products& kk, bool query,
                                              unsigned char* P) const {
    const int row_of_lane = lane / 4, pair = lane % 4;
    float* const to = shared.matrix + Traits::Inverse::Offset(row_of_lane, pair * 2);
#pragma unroll
    for (int n = 0; n < kBlocksPerWarp; ++n) {
      const int block = warp + n * kWarps;
      if (block >= Blocks::kCount) break;
      const int row = Blocks::row_of(block), column = block - Blocks::index(row, 0);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int i = row * 16 + row_of_lane + h * 8, window = shared.window[i];
        const float hi = shared.G_hi[i], lo = shared.G_lo[i];
        const float b = shared.beta[i] * shared.k_norm[i];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int j = column * 16 + half * 8 + pair * 2;
          const float2 hi_j = *reinterpret_cast<const float2*>(&shared.G_hi[j]);
          const float2 lo_j = *reinterpret_cast<const float2*>(&shared.G_lo[j]);
          const float2 norm_j = *reinterpret_cast<const float2*>(&shared.k_norm[j]);
          float score[2], l[2];
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const float d = (hi - (e ? hi_j.y : hi_j.x)) + (lo - (e ? lo_j.y : lo_j.x));
            const bool connected = j + e <= i && j + e >= window;
            const float decay = connected ? exp2_approx(d) * (e ? norm_j.y : norm_j.x) : 0.f;
            score[e] = qk[n][half][2 * h + e] * decay;
            l[e] = j + e < i && connected ? b * kk[n][half][2 * h + e] * decay : 0.f;
          }
          if (query) {
            uint32_t term[Record::kPlanesOfP];
            split<bf16, Record::kPlanesOfP>(score[0], score[1], term);
            // Runs of 16 bytes, which L2 joins to sectors.
#pragma unroll
            for (int plane = 0; plane < Record::kPlanesOfP; ++plane)
              *reinterpret_cast<uint32_t*>(P + plane * Record::kPlaneBytes +
                                           Blocks::offset(block, row_of_lane + h * 8, half) +
                                           pair * 4) = term[plane];
          }
          *reinterpret_cast<float2*>(
              to + Traits::Inverse::Offset(row * 16 + h * 8, column * 16 + half * 8)) =
              make_float2(l[0], l[1]);
        }
      }
    }
  }

  // T diag(b) as bf16 terms.
  template <int kPlanes>
  __device__ __forceinline__ void store_inverse(unsigned char* to) const {
    for (int e = thread; e < Blocks::kCount * 32; e += kThreads) {
      const int block = e / 32, i = e % 16, piece = e / 16 % 2;
      const int row = Blocks::row_of(block), column = block - Blocks::index(row, 0);
      const int j = column * 16 + piece * 8;
      const auto* T =
          reinterpret_cast<const float4*>(&shared.matrix[Traits::Inverse::Offset(row * 16 + i, j)]);
      const auto* beta = reinterpret_cast<const float4*>(&shared.beta[j]);
      const float4 x0 = T[0], x1 = T[1], b0 = beta[0], b1 = beta[1];
      uint32_t word[4][kPlanes];
      split<bf16, kPlanes>(x0.x * b0.x, x0.y * b0.y, word[0]);
      split<bf16, kPlanes>(x0.z * b0.z, x0.w * b0.w, word[1]);
      split<bf16, kPlanes>(x1.x * b1.x, x1.y * b1.y, word[2]);
      split<bf16, kPlanes>(x1.z * b1.z, x1.w * b1.w, word[3]);
#pragma unroll
      for (int plane = 0; plane < kPlanes; ++plane)
        *reinterpret_cast<uint4*>(to + plane * Record::kPlaneBytes +
                                  Blocks::offset(block, i, piece)) =
            make_uint4(word[0][plane], word[1][plane], word[2][plane], word[3][plane]);
    }
  }

  __device__ __forceinline__ void store_factors(unsigned char* record) const {
    if (thread >= kChunk) return;
    auto* factor = reinterpret_cast<float*>(record) + thread;
    // The window's last token; padding carries the last window on to the end of the chunk.
    const uint64_t later = shared.windows >> thread >> 1;
    const int last = later ? thread + __ffsll(static_cast<long long>(later)) - 1 : kChunk - 1;
    const float in = exp2_approx(shared.G_hi[thread] + shared.G_lo[thread]);
    const float left = exp2_approx((shared.G_hi[last] - shared.G_hi[thread]) +
                                   (shared.G_lo[last] - shared.G_lo[thread]));
    factor[kDecayIn * kChunk] = in * shared.k_norm[thread];
    factor[kDecayQ * kChunk] = in;
    factor[kDecayOut * kChunk] = left * shared.k_norm[thread];
    factor[kOutScale * kChunk] = float(p.rule.scale) * shared.q_norm[thread];
    if (thread == 0)
      *reinterpret_cast<TokenSets*>(record + Record::kFactorBytes) = {
          shared.windows, *reinterpret_cast<const uint64_t*>(shared.keys_overflow),
          *reinterpret_cast<const uint64_t*>(shared.queries_overflow), 0};
  }

  // Tokens behind the last packed sequence belong to nobody: their output is zero. The block takes
  // those of the kChunk tokens that its number names.
  __device__ __forceinline__ void zero_tail(int64_t chunk, int64_t first_head, int heads) const {
    if (!p.rule.device_cu_seqlens || !p.rule.output.data) return;
    const Sequence tail = tail_of(p.rule);
    int64_t begin = chunk * kChunk, end = begin + kChunk;
    if (begin < tail.begin) begin = tail.begin;
    if (end > tail.end) end = tail.end;
    const auto& o = p.rule.output;
    for (int64_t t = begin; t < end; ++t)
      for (int e = thread; e < heads * p.rule.dim_v; e += kThreads)
        static_cast<Element*>(
            o.data)[t * o.stride[1] + (first_head + e / p.rule.dim_v) * o.stride[2] +
                    e % p.rule.dim_v] = from_float<Element>(0.f);
  }

  __device__ __forceinline__ void run() {
    // Blocks of one chunk are neighbours: they share its keys.
    const unsigned group = unsigned(p.rule.value_heads) / unsigned(p.rule.key_heads);
    const unsigned parts = (group + unsigned(p.heads_per_block) - 1) / unsigned(p.heads_per_block);
    unsigned block = blockIdx.x;  // numbers of blocks are below 2^31: 32-bit divisions
    const unsigned part = block % parts;
    block /= parts;
    const int64_t key_head = block % unsigned(p.rule.key_heads);
    const int64_t number = block / unsigned(p.rule.key_heads);
    const int64_t first_head = key_head * group + part * unsigned(p.heads_per_block);
    const int rest = int(group) - int(part) * p.heads_per_block;
    const int heads = rest < p.heads_per_block ? rest : p.heads_per_block;

    zero_tail(number, first_head, heads);
    const Chunk chunk = chunk_at(p.rule, p.table, number);
    if (chunk.count == 0) return;
    const int64_t batch = p.rule.device_cu_seqlens ? 0 : chunk.sequence;
    const bool query = p.rule.query.data != nullptr;

    load_rows(shared.k, p.rule.key, batch, chunk.first, chunk.count, key_head);
    if (query) load_rows(shared.q, p.rule.query, batch, chunk.first, chunk.count, key_head);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();

    if (query && p.rule.l2norm) square_query();
    Products qk = {}, kk = {};
    multiply_keys(qk, kk, query);
    __syncthreads();  // squares are here, products are complete
    if (p.rule.l2norm) {
      const bool overflows = thread < kChunk && make_norms(query);
      if (__syncthreads_or(overflows)) clear_overflowing(qk, kk);
    } else if (thread < kChunk) {
      shared.k_norm[thread] = shared.q_norm[thread] = 1.f;
      if (lane == 0) shared.keys_overflow[warp] = shared.queries_overflow[warp] = 0;
    }

    for (int64_t head = first_head; head < first_head + heads; ++head) {
      unsigned char* const record = record_of(p, number, head);
      scan_gates(batch, chunk.first, chunk.count, head);
      const int planes = Record::planes_of_T(p.precision);
      make_system(qk, kk, query, record + Record::kBlocks + planes * Record::kPlaneBytes);
      __syncthreads();  // L is complete
      // Equation (4).
      typename Traits::Inverse(shared.inverse).Invert(shared.matrix);
      if (planes == 3)
        store_inverse<3>(record + Record::kBlocks);
      else
        store_inverse<2>(record + Record::kBlocks);
      store_factors(record);
      __syncthreads();  // gates and matrix are used up
    }
  }
};

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kBlocksPerProcessor)
    prepare_kernel(const __grid_constant__ Params p) {
#if __CUDA_ARCH__ >= 800
  __shared__ typename Traits::Shared shared;
  Prepare<Traits>(p, shared).run();
#else
  __trap();  // supports() declines where this would run
#endif
}

template <class Element, int kK>
void prepare(const Params& p, cudaStream_t stream) {
  using Traits = PrepareTraits<Element, kK>;
  const int64_t group = p.rule.value_heads / p.rule.key_heads;
  const int64_t parts = (group + p.heads_per_block - 1) / p.heads_per_block;
  launch("prepare", prepare_kernel<Traits>, p.chunks * p.rule.key_heads * parts, Traits::kThreads,
         /*dynamic_shared=*/0, stream, p);
}

}  // namespace deltanet::cuda::tensor_core
