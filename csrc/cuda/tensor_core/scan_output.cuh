// SPDX-License-Identifier: Apache-2.0
//
// The pass over the chunks of a segment: new values, output, state, with the state in registers
// throughout.
//
//   X = V - diag(e^G) K S,   V' = (T diag(b)) X                                          (5)
//   O = scale (diag(e^G) Q S + (Q K^T o D) V')                                           (6)
//   S <- e^{G_C} S + (diag(e^{G_C - G}) K)^T V'                                          (7)
//
// Work split:  a block = some columns of V of one value head, sequence and segment; a warp = 16 of
//              these columns and all of K. Everything is computed transposed: S^T (rows V, columns
//              K) is the accumulator, so that S^T, X^T and V'^T become A operands in registers, and
//              K, Q, T, P are B operands read as they lie. Warps share the tiles, nothing else.
// Numerics:    fp32 sums; S, X, V', P, T enter the tensor cores as 16-bit terms (hi + lo and, for
//              the product T X, which cancels when keys repeat, a third one); q, k, v are exact.
//              Scale, decay and l2norm are fp32 factors on rows and columns of the products.
// Memory:      q, k, v, T, P are read once per block by cp.async, each tile refilled as soon as its
//              last reader has passed; o is written once; the state once per segment.
#pragma once
#include "cuda/launch.cuh"
#include "cuda/load.cuh"
#include "cuda/tensor_core/layout.cuh"

namespace deltanet::cuda::tensor_core {

// A power of two for each row of S, kept with the state of fp16 inputs: fp16 terms of S and V' are
// taken of scaled values, whose largest lies below 2^15. The largest is taken over what is known
// before the chunk, or what goes into the state anyway: later tokens do not touch earlier outputs.
//
// Each lane has the scales of its two rows here, in shared memory: registers are scarce. Lanes of
// one row hold the same.
struct RowScales {
  int exponent[2][32];  // biased: S times 2^(exponent - 127) is what the accumulators hold

  static constexpr int kLargest = 127 + 14;  // scaled values lie in [2^14, 2^15), or below

  static __device__ __forceinline__ float power(int biased) {
    return __int_as_float((biased < 0 ? 0 : biased > 254 ? 254 : biased) << 23);
  }
  // The largest of a row from those of its 4 lanes.
  static __device__ __forceinline__ float of_row(float largest) {
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
    return fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
  }
  static __device__ __forceinline__ int biased_exponent(float x) { return __float_as_int(x) >> 23; }
  static __device__ __forceinline__ int in_range(int biased) {
    return biased < 1 ? 1 : biased > 253 ? 253 : biased;
  }
  __device__ __forceinline__ float unscale(int lane, int h) const {
    return power(254 - exponent[h][lane]);
  }
  // Whether the accumulators, of which `largest` is the largest in a row, must be scaled anew.
  // Their terms hold 2^-32 of the row's largest, or better, while it lies in a range this wide.
  static __device__ __forceinline__ bool is_far(float largest) {
    return largest >= 32768.f || (largest < 256.f && largest > 0.f);
  }
  // What the accumulators must be multiplied by so that `largest` of them fills the range.
  __device__ __forceinline__ float fit(int lane, int h, float largest) {
    const int before = exponent[h][lane];
    const int after = in_range(before + min(kLargest - biased_exponent(largest), 127));
    exponent[h][lane] = after;
    return power(127 + after - before);
  }
  // In place of `keep`: what makes room for keep S and for new terms of at most `largest`.
  __device__ __forceinline__ float admit(int lane, int h, float keep, float largest) {
    const int before = exponent[h][lane], room = 126 - (__float_as_int(keep) >> 23);
    const int after = in_range(min(before + room, 127 + kLargest - biased_exponent(largest)));
    exponent[h][lane] = after;  // the change may be beyond what one float holds
    return keep * power(127 + ((after - before) >> 1)) * power(127 + ((after - before + 1) >> 1));
  }
};

template <class Element_, int kK_, Precision kPrecision_, bool kRoles_ = false>
struct ScanTraits {
  using Element = Element_;
  static constexpr int kK = kK_;  // the bucket that K is padded to
  static constexpr Precision kPrecision = kPrecision_;
  static constexpr bool kExact = kPrecision == Precision::kExact;
  static constexpr int kReadTerms = kExact ? 2 : 1;                // of S in K S and Q S
  static constexpr int kUpdateTerms = 2;                           // of V' in the new state
  static constexpr int kTTerms = Record::planes_of_T(kPrecision);  // of T and of X
  static constexpr int kPTerms = Record::kPlanesOfP;               // of P and of its V'
  static constexpr int kTokenTiles = kChunk / 16, kKTiles = kK / 16;
  static constexpr bool kScaled = std::is_same_v<Element, fp16>;
  // Whether warps have roles: scan_roles.cuh. Two warps then share their columns of V, and what a
  // chunk is made of lies in two buffers.
  static constexpr bool kRoles = kRoles_;
  static constexpr int kStages = kRoles ? 2 : 1;
  // With 4 warps, two blocks per multiprocessor. K = 128 has no more by its shared memory; K = 64
  // could have three or four, but with 192 registers every instance still spills in the chunk loop.
  // ptxas is erratic: scripts/cuda_resources.py looks at what it made of this.
  static constexpr int kMaxRegisters = kK == 128 && !kScaled && !kExact ? 240 : 255;
  using Tile = SwizzledTile<kK * 2>;
  using VTile = SwizzledTile<kWarpColumns * 2>;
  using Blocks = LowerBlocks<kChunk>;
  static constexpr int kTBytes = kTTerms * Record::kPlaneBytes;
  static constexpr int kPBytes = kPTerms * Record::kPlaneBytes;

  // What belongs to 16 columns of V. Without roles o is staged over v.
  struct PlainColumns {
    alignas(128) unsigned char v[kStages][kChunk * kWarpColumns * 2];
  };
  struct ScaledColumns {
    alignas(128) unsigned char v[kStages][kChunk * kWarpColumns * 2];
    RowScales scales;
  };
  using Columns = std::conditional_t<kScaled, ScaledColumns, PlainColumns>;

  struct Shared {
    alignas(256) Element k[2][kChunk * kK];  // two: k is the last tile of a chunk to be released
    alignas(256) Element q[kStages][kChunk * kK];
    alignas(128) unsigned char T[kStages][kTBytes];
    unsigned char P[kPBytes];
    struct alignas(16) {
      float factor[kFactors][kChunk];
      TokenSets tokens;
    } gates[2];
    // Which part of the call this block does. Here and not in registers: the chunk loop has none to
    // spare, and asks once per chunk.
    struct alignas(16) {
      int head, key_head, sequence, segment, first_chunk;
      int batch, begin, end;  // the sequence's tokens: counts are below 2^31
      int behind;             // the chunk that the segment ends before
      int v_first;            // the block's first column of V
      int dim_v;
      bool is_M;  // a map's M: v = 0 and columns of I instead of columns of V
    } work;
    Columns columns[kRoles ? kMostRolePairs : 1];  // Params::warps of them
  };
  static_assert(offsetof(Shared, P) == offsetof(Shared, T) + kStages * kTBytes,
                "one copy fills both");
  static int64_t shared_bytes(int warps) {
    return int64_t(offsetof(Shared, columns)) + warps * int64_t(sizeof(Columns));
  }
};

template <class Traits>
struct ScanOutput {
  using Element = typename Traits::Element;
  using Shared = typename Traits::Shared;
  using Tile = typename Traits::Tile;
  using VTile = typename Traits::VTile;
  using Blocks = typename Traits::Blocks;
  static constexpr int C = kChunk, kK = Traits::kK;
  static constexpr int kTokenTiles = Traits::kTokenTiles, kKTiles = Traits::kKTiles;
  static constexpr int kColumnBytes = sizeof(typename Traits::Columns);
  using State = Accumulator[kK / 8];  // S^T of 16 columns of V: rows V, columns K
  using Values = Accumulator[C / 8];  // X^T, V'^T, O^T: rows V, columns tokens

  const Params& p;
  Shared& s;

  __device__ __forceinline__ ScanOutput(const Params& params, Shared& shared)
      : p(params), s(shared) {}

  // The thread's number again, opaque to the compiler: addresses made of it are made anew at each
  // use, by a few integer operations, and not kept in registers across the loop, or spilled.
  static __device__ __forceinline__ int fresh_thread() {
    int x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return x;
  }
  struct Place {
    int columns;          // which 16 columns of the block's this warp works on
    int lane, row, pair;  // row = lane / 4, pair = lane % 4 of the fragments
  };
  __device__ __forceinline__ Place fresh_place() const {
    int thread = fresh_thread();
    if (Traits::kRoles && thread >= p.warps * 32) thread -= p.warps * 32;
    return {thread / 32, thread % 32, thread % 32 / 4, thread % 4};
  }
  // This thread's number among those that copy: with roles, the output's.
  __device__ __forceinline__ int fresh_copier() const {
    return Traits::kRoles ? fresh_thread() - p.warps * 32 : fresh_thread();
  }
  // Which buffer of q, v and T a chunk lies in.
  static __device__ __forceinline__ int stage_of(int chunk) {
    return chunk & (Traits::kStages - 1);
  }

  // This lane's ldmatrix address in a tile of keys or queries, as A or as B operand, and in T, P or
  // the warp's v.
  template <bool kA>
  static __device__ __forceinline__ uint32_t lane_address(const Element* tile) {
    const LaneMap x = kA ? lanes_for_a(fresh_thread() % 32) : lanes_for_b(fresh_thread() % 32);
    return smem_address(tile) + Tile::offset(x.row, x.piece);
  }
  static __device__ __forceinline__ uint32_t lane_address(const unsigned char* blocks) {
    const LaneMap x = lanes_for_b(fresh_thread() % 32);
    return smem_address(blocks) + Blocks::offset(0, x.row, x.piece);
  }

  __device__ __forceinline__ void find_work() const {
    auto& work = s.work;
    // Column tiles of one head are neighbours: they find q, k, T in L2.
    const int columns = p.warps * kWarpColumns;
    const int value_tiles = (p.rule.dim_v + columns - 1) / columns;
    const int map_tiles = p.making_maps ? (p.rule.dim_k + columns - 1) / columns : 0;
    unsigned block = blockIdx.x;  // numbers of blocks are below 2^31: 32-bit divisions
    int tile = int(block % unsigned(value_tiles + map_tiles));
    block /= unsigned(value_tiles + map_tiles);
    work.is_M = tile >= value_tiles;
    if (work.is_M) tile -= value_tiles;
    work.dim_v = work.is_M ? p.rule.dim_k : p.rule.dim_v;
    work.v_first = tile * columns;
    work.head = int(block % unsigned(p.rule.value_heads));
    block /= unsigned(p.rule.value_heads);
    work.sequence = int(block % unsigned(p.rule.sequences));
    work.segment = int(block / unsigned(p.rule.sequences));
    work.key_head = int(key_head_of(p.rule, work.head));
    const Sequence tokens = sequence_at(p.rule, work.sequence);
    work.batch = int(tokens.batch);
    work.begin = int(tokens.begin);
    work.end = int(tokens.end);
    work.first_chunk = int(first_chunk_of(p.rule, p.table, work.sequence));
    const int chunks = (work.end - work.begin + C - 1) / C;
    work.behind = min((work.segment + 1) * int(p.segment_chunks), chunks);
  }

  // ---- loads ----

  // Tokens of the sequence from the chunk's first one on.
  __device__ __forceinline__ int left_from(int chunk) const {
    return s.work.end - s.work.begin - chunk * C;
  }
  static __device__ __forceinline__ int bytes_left(int elements) {
    return elements < 0 ? 0 : elements < 8 ? elements * 2 : 16;
  }
  // Rows of q or k, zero-padded.
  __device__ __forceinline__ void load_rows(uint32_t tile, const View<4>& x, int chunk) const {
    constexpr int kPieces = kK / 8;
    const int thread = fresh_copier(), piece = thread % kPieces;
    const int step = p.warps * 32 / kPieces, bytes = bytes_left(p.rule.dim_k - piece * 8);
    int r = thread / kPieces;
    const auto& work = s.work;
    const auto* from = static_cast<const Element*>(x.data) + work.batch * x.stride[0] +
                       (work.begin + chunk * C + r) * x.stride[1] + work.key_head * x.stride[2] +
                       piece * 8;
    const int64_t stride = step * x.stride[1];
    const int left = left_from(chunk);
#pragma unroll 2
    for (; r < C; r += step, from += stride) {
      const bool inside = r < left && bytes > 0;
      cp_async_16(tile + Tile::offset(r, piece), inside ? from : x.data, inside ? bytes : 0);
    }
  }
  __device__ __forceinline__ void load_linear(uint32_t to, const unsigned char* from,
                                              int bytes) const {
    const int step = p.warps * 32 * 16;
#pragma unroll 2
    for (int at = fresh_copier() * 16; at < bytes; at += step) cp_async_16(to + at, from + at, 16);
  }
  __device__ __forceinline__ const unsigned char* record(int chunk) const {
    return record_of(p, s.work.first_chunk + chunk, s.work.head);
  }
  __device__ __forceinline__ void load_k(int chunk) const {
    load_rows(smem_address(s.k[chunk & 1]), p.rule.key, chunk);
  }
  __device__ __forceinline__ void load_gates(int chunk) const {
    load_linear(smem_address(&s.gates[chunk & 1]), record(chunk), sizeof(s.gates[0]));
  }
  __device__ __forceinline__ void load_q(int chunk) const {
    if (p.rule.query.data && !p.making_maps)
      load_rows(smem_address(s.q[stage_of(chunk)]), p.rule.query, chunk);
  }
  __device__ __forceinline__ void load_v(int chunk) const {
    const auto& x = p.rule.value;
    const auto& work = s.work;
    const int thread = fresh_copier(), pieces = 2 * p.warps, piece = thread / 8 % pieces;
    const int r = thread / (8 * pieces) * 8 + thread % 8, column = work.v_first + piece * 8;
    const int bytes = x.data && !work.is_M ? bytes_left(work.dim_v - column) : 0;
    const int left = left_from(chunk);
    const auto* from = static_cast<const Element*>(x.data) + work.batch * x.stride[0] +
                       (work.begin + chunk * C + r) * x.stride[1] + work.head * x.stride[2] +
                       column;
    const uint32_t to = smem_address(s.columns[0].v[stage_of(chunk)]) + piece / 2 * kColumnBytes +
                        VTile::offset(r, piece % 2);
    // An absent v is zero; a copy of no bytes still wants an address.
    const void* const nothing = p.rule.key.data;
#pragma unroll
    for (int i = 0; i < C / 16; ++i, from += 16 * x.stride[1]) {
      const bool inside = r + i * 16 < left && bytes > 0;
      cp_async_16(to + i * 16 * kWarpColumns * 2, inside ? from : nothing, inside ? bytes : 0);
    }
  }
  __device__ __forceinline__ void load_T(int chunk) const {
    load_linear(smem_address(s.T[stage_of(chunk)]), record(chunk) + Record::kBlocks,
                Traits::kTBytes);
  }
  __device__ __forceinline__ void load_P(int chunk) const {
    load_linear(smem_address(s.P), record(chunk) + Record::kBlocks + Traits::kTBytes,
                Traits::kPBytes);
  }
  __device__ __forceinline__ void load_T_and_P(int chunk) const {
    const bool output = p.rule.output.data && !p.making_maps;
    load_linear(smem_address(s.T[0]), record(chunk) + Record::kBlocks,
                Traits::kTBytes + (output ? Traits::kPBytes : 0));
  }

  // ---- states: once per segment, so plain accesses will do; 8 lanes fill a sector ----

  // fn(n, e, offset) for each of this thread's elements that exist.
  template <class Function>
  __device__ __forceinline__ void for_each_state_element(int64_t base, int64_t stride_k,
                                                         int64_t stride_v, Function fn) const {
    const auto [columns, lane, row, pair] = fresh_place();
    const int v = s.work.v_first + columns * kWarpColumns + row, dim_v = s.work.dim_v;
#pragma unroll
    for (int n = 0; n < kK / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int k = n * 8 + pair * 2 + (e & 1), column = v + (e >> 1) * 8;
        if (k < p.rule.dim_k && column < dim_v) fn(n, e, base + k * stride_k + column * stride_v);
      }
  }
  // Offset of matrix [K, columns] of this key in an array of segments' matrices.
  __device__ __forceinline__ int64_t segment_matrix(int slot, int columns) const {
    return ((slot * p.rule.sequences + s.work.sequence) * p.rule.value_heads + s.work.head) *
           p.rule.dim_k * columns;
  }
  __device__ __forceinline__ void load_state(State& S) const {
    const auto& from = p.rule.initial_state;
    const auto& work = s.work;
    const int64_t base = work.sequence * from.stride[0] + work.head * from.stride[1];
    const bool starts = p.starts && !p.making_maps;
    if (starts || (!p.making_maps && from.data && from.dtype == DType::kFloat32)) {
      const float* const data = starts ? p.starts : static_cast<const float*>(from.data);
      for_each_state_element(starts ? segment_matrix(work.segment, work.dim_v) : base,
                             starts ? work.dim_v : from.stride[2], starts ? 1 : from.stride[3],
                             [&](int n, int e, int64_t at) { S[n][e] = data[at]; });
    } else if (!p.making_maps && from.data) {
      const bool is_bf16 = from.dtype == DType::kBFloat16;
      for_each_state_element(base, from.stride[2], from.stride[3], [&](int n, int e, int64_t at) {
        const uint32_t x = static_cast<const uint16_t*>(from.data)[at];
        S[n][e] = is_bf16 ? unpack<bf16>(x).x : unpack<fp16>(x).x;
      });
    } else if (work.is_M || (!p.making_maps && p.rule.initial_state_is_identity)) {
      const auto [columns, lane, row, pair] = fresh_place();
      const int v = work.v_first + columns * kWarpColumns + row;
#pragma unroll
      for (int n = 0; n < kK / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (n * 8 + pair * 2 + (e & 1) == v + (e >> 1) * 8) S[n][e] = 1.f;
    }
  }
  __device__ __forceinline__ void store_state(const State& S) const {
    const auto& to = p.rule.final_state;
    float* data = static_cast<float*>(to.data);
    const auto& work = s.work;
    int64_t base = work.sequence * to.stride[0] + work.head * to.stride[1];
    int64_t stride_k = to.stride[2], stride_v = to.stride[3];
    if (p.making_maps) {
      data = work.is_M ? p.maps : p.starts;
      base = segment_matrix(work.is_M ? work.segment : work.segment + 1, work.dim_v);
      stride_k = work.dim_v;
      stride_v = 1;
    }
    const auto [columns, lane, row, pair] = fresh_place();
    const float unscale[2] = {row_unscale(columns, lane, 0), row_unscale(columns, lane, 1)};
    for_each_state_element(base, stride_k, stride_v,
                           [&](int n, int e, int64_t at) { data[at] = S[n][e] * unscale[e >> 1]; });
  }

  // ---- products ----

  // acc^T += S^T tile^T for a tile of k or q
  template <bool kOtherwise>
  __device__ __forceinline__ void multiply_state(Values& acc, const State& S,
                                                 const Element* tile) const {
    const uint32_t lane_tile = lane_address<false>(tile);
#pragma unroll
    for (int kk = 0; kk < kKTiles; ++kk) {
      uint32_t a[Traits::kReadTerms][4], b[kTokenTiles][4];
      to_operand<Element, Traits::kReadTerms, kOtherwise>(S[2 * kk], S[2 * kk + 1], a);
#pragma unroll
      for (int n = 0; n < kTokenTiles; ++n) ldmatrix_x4(b[n], Tile::step(lane_tile, n, kk));
      // Terms outside, tiles inside: a lone warp waits for an accumulator that it has just used.
#pragma unroll
      for (int term = 0; term < Traits::kReadTerms; ++term)
#pragma unroll
        for (int n = 0; n < kTokenTiles; ++n) {
          mma<Element>(acc[2 * n], a[term], b[n][0], b[n][1]);
          mma<Element>(acc[2 * n + 1], a[term], b[n][2], b[n][3]);
        }
    }
  }

  // acc^T += x^T B^T over the lower blocks of B (T or P), x in kA terms and B in kB; products of
  // low terms with low terms are left out.
  template <int kA, int kB>
  __device__ __forceinline__ void multiply_lower(Values& acc, const Values& x,
                                                 const unsigned char* planes) const {
    constexpr int kKept = kA > kB ? kA : kB;
    const uint32_t lane_planes = lane_address(planes);
#pragma unroll
    for (int j = 0; j < kTokenTiles; ++j) {
      uint32_t a[kA][4];
      to_operand<bf16, kA>(x[2 * j], x[2 * j + 1], a);
#pragma unroll
      for (int plane = 0; plane < kB; ++plane) {
        uint32_t b[kTokenTiles][4];
#pragma unroll
        for (int i = j; i < kTokenTiles; ++i)
          ldmatrix_x4(b[i], lane_planes + plane * Record::kPlaneBytes + Blocks::index(i, j) * 512);
#pragma unroll
        for (int term = 0; term < kA && term + plane < kKept; ++term)
#pragma unroll
          for (int i = j; i < kTokenTiles; ++i) {
            // Of a diagonal block, the first 8 tokens read nothing of the next 8.
            if (i == j)
              mma_half<bf16>(acc[2 * i], a[term], b[i][0]);
            else
              mma<bf16>(acc[2 * i], a[term], b[i][0], b[i][1]);
            mma<bf16>(acc[2 * i + 1], a[term], b[i][2], b[i][3]);
          }
      }
    }
  }

  // X^T = V^T - (K S)^T diag(e^G / |k|), in place of (K S)^T
  __device__ __forceinline__ void subtract_from_values(Values& x, const float (&decay)[C],
                                                       const unsigned char* v_tile) const {
    const auto [columns, lane, row, pair] = fresh_place();
    const float unscale[2] = {row_unscale(columns, lane, 0), row_unscale(columns, lane, 1)};
    const uint32_t v_of_lane = lane_address(v_tile + columns * kColumnBytes);
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) {
      // v[0]: rows `row`, tokens 2 pair.. of the first 8; v[1]: rows 8 further; v[2], v[3]: the
      // next 8 tokens.
      uint32_t v[4];
      ldmatrix_x4_trans(v, VTile::step(v_of_lane, n, 0));
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        float2 f = *reinterpret_cast<const float2*>(&decay[n * 16 + (r >> 1) * 8 + pair * 2]);
        f.x *= unscale[r & 1];
        f.y *= unscale[r & 1];
        const float2 value = unpack<Element>(v[r]);
        float* const y = &x[2 * n + (r >> 1)][(r & 1) * 2];
        y[0] = fmaf(-f.x, y[0], value.x);
        y[1] = fmaf(-f.y, y[1], value.y);
      }
    }
  }

  // Where the window ends that starts at token `first`. Asked for at each use: kept in a register,
  // it costs another one its place.
  static __device__ __forceinline__ int end_of_window(uint64_t windows, int first) {
    const uint64_t later = windows >> first >> 1;
    return later ? first + __ffsll(static_cast<long long>(later)) : C;
  }
  // Tokens outside of [first, end) take no part in this window.
  __device__ __forceinline__ void mask_tokens(Values& x, int first, int end) const {
    const int pair = fresh_place().pair;
#pragma unroll
    for (int n = 0; n < C / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int token = n * 8 + pair * 2 + (e & 1);
        if (token < first || token >= end) x[n][e] = 0.f;
      }
  }

  // Rows of K S or Q S whose key or query has a norm that overflows.
  __device__ __forceinline__ void clear_tokens(Values& x, uint64_t tokens) const {
    const int pair = fresh_place().pair;
#pragma unroll
    for (int n = 0; n < C / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (tokens >> (n * 8 + pair * 2 + (e & 1)) & 1) x[n][e] = 0.f;
  }

  // S <- keep S + (diag(out) K)^T V'; V' is used up
  __device__ __forceinline__ void update_state(State& S, Values& v_new, const float (&out)[C],
                                               float keep, const Element* keys) const {
    const uint32_t lane_keys = lane_address<true>(keys);
    const auto [columns, lane, row, pair] = fresh_place();
#pragma unroll
    for (int n = 0; n < C / 8; ++n) {
      const float2 f = *reinterpret_cast<const float2*>(&out[n * 8 + pair * 2]);
      v_new[n][0] *= f.x;
      v_new[n][1] *= f.y;
      v_new[n][2] *= f.x;
      v_new[n][3] *= f.y;
    }
    float keeps[2] = {keep, keep};
    if constexpr (Traits::kScaled) {
      RowScales& scales = s.columns[columns].scales;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float largest = 0.f;
#pragma unroll
        for (int n = 0; n < C / 8; ++n)
          largest = fmaxf(largest, fmaxf(fabsf(v_new[n][2 * h]), fabsf(v_new[n][2 * h + 1])));
        keeps[h] = scales.admit(lane, h, keep, RowScales::of_row(largest));
        const float scale = RowScales::power(scales.exponent[h][lane]);
#pragma unroll
        for (int n = 0; n < C / 8; ++n) v_new[n][2 * h] *= scale, v_new[n][2 * h + 1] *= scale;
      }
    }
#pragma unroll
    for (int n = 0; n < kK / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) S[n][e] *= keeps[e >> 1];
    constexpr int kBatch = kKTiles < 4 ? kKTiles : 4;
#pragma unroll
    for (int j = 0; j < kTokenTiles; ++j) {
      uint32_t a[Traits::kUpdateTerms][4];
      to_operand<Element, Traits::kUpdateTerms>(v_new[2 * j], v_new[2 * j + 1], a);
#pragma unroll
      for (int first = 0; first < kKTiles; first += kBatch) {
        uint32_t b[kBatch][4];  // .trans: the sum runs over tokens, which are the tile's rows
#pragma unroll
        for (int n = 0; n < kBatch; ++n)
          ldmatrix_x4_trans(b[n], Tile::step(lane_keys, j, first + n));
#pragma unroll
        for (int term = 0; term < Traits::kUpdateTerms; ++term)
#pragma unroll
          for (int n = 0; n < kBatch; ++n) {
            mma<Element>(S[2 * (first + n)], a[term], b[n][0], b[n][1]);
            mma<Element>(S[2 * (first + n) + 1], a[term], b[n][2], b[n][3]);
          }
      }
    }
  }

  __device__ __forceinline__ void scale_state(State& S) const {
    if constexpr (Traits::kScaled) {
      const auto [columns, lane, row, pair] = fresh_place();
      float largest[2] = {0.f, 0.f};
#pragma unroll
      for (int n = 0; n < kK / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) largest[e >> 1] = fmaxf(largest[e >> 1], fabsf(S[n][e]));
      for (int h = 0; h < 2; ++h) largest[h] = RowScales::of_row(largest[h]);
      const bool far = RowScales::is_far(largest[0]) || RowScales::is_far(largest[1]);
      if (!__any_sync(0xffffffffu, far)) return;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float factor = s.columns[columns].scales.fit(lane, h, largest[h]);
#pragma unroll
        for (int n = 0; n < kK / 8; ++n) S[n][2 * h] *= factor, S[n][2 * h + 1] *= factor;
      }
    }
  }
  __device__ __forceinline__ float row_unscale(int columns, int lane, int h) const {
    if constexpr (Traits::kScaled)
      return s.columns[columns].scales.unscale(lane, h);
    else
      return 1.f;
  }

  // ---- output ----

  // O^T to o, tokens [first, end) of the chunk. movmatrix turns each 8x8 tile, a tile of the warp's
  // own stages it, and 16-byte pieces go out.
  __device__ __forceinline__ void store_output(int chunk, const Values& o,
                                               const float (&out_scale)[C], int first, int end,
                                               unsigned char* staging) const {
    const bool whole = first == 0 && end == C;
    const auto [columns, lane, row, pair] = fresh_place();
    __syncwarp();  // every lane has read its part of what lies there
#pragma unroll
    for (int n = 0; n < C / 8; ++n) {
      const float2 f = *reinterpret_cast<const float2*>(&out_scale[n * 8 + pair * 2]);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32_t word = movmatrix(pack<Element>(o[n][2 * h] * f.x, o[n][2 * h + 1] * f.y));
        const int token = n * 8 + row;
        if (whole || (token >= first && token < end))  // later windows still need their v
          *reinterpret_cast<uint32_t*>(staging + VTile::offset(token, h) + pair * 4) = word;
      }
    }
    __syncwarp();
    // 8 lanes take 8 rows of one piece: no bank conflicts.
    const int piece = lane / 8 % 2, r = lane / 16 * 8 + lane % 8;
    const auto& work = s.work;
    const int column = work.v_first + columns * kWarpColumns + piece * 8;
    const int valid = work.dim_v - column;
    if (valid <= 0) return;
    const int left = left_from(chunk);
    if (left < end) end = left;
    const auto& y = p.rule.output;
    const unsigned char* from = staging + VTile::offset(r, piece);
    auto* to = static_cast<Element*>(y.data) + work.batch * y.stride[0] +
               (work.begin + chunk * C + r) * y.stride[1] + work.head * y.stride[2] + column;
#pragma unroll
    for (int i = 0; i < C / 16; ++i, to += 16 * y.stride[1]) {
      const int token = r + i * 16;
      if (token < first || token >= end) continue;
      const uint4 x = *reinterpret_cast<const uint4*>(from + i * 16 * kWarpColumns * 2);
      if (valid >= 8 && p.output_pieces) {
        *reinterpret_cast<uint4*>(to) = x;
      } else {
#pragma unroll 1
        for (int e = 0; e < (valid < 8 ? valid : 8); ++e)
          reinterpret_cast<uint16_t*>(to)[e] =
              reinterpret_cast<const uint16_t*>(from + i * 16 * kWarpColumns * 2)[e];
      }
    }
  }

  // o = diag(e^G) Q S, for the stored factors of the rows of S. S is split a second time, which
  // keeps x and o from being live together.
  __device__ __forceinline__ void query_state(Values& o, const State& S, const Element* queries,
                                              uint64_t overflowing, const float (&decay)[C],
                                              const float (&unscale)[2]) const {
    multiply_state<true>(o, S, queries);
    if (overflowing) clear_tokens(o, overflowing);
    const int pair = fresh_place().pair;
#pragma unroll
    for (int n = 0; n < C / 8; ++n) {
      const float2 f = *reinterpret_cast<const float2*>(&decay[n * 8 + pair * 2]);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        o[n][2 * h] *= f.x * unscale[h];
        o[n][2 * h + 1] *= f.y * unscale[h];
      }
    }
  }
  __device__ __forceinline__ void add_scores(Values& o, const Values& v_new) const {
    multiply_lower<2, Traits::kPTerms>(o, v_new, s.P);
  }

  // ---- the pass ----

  // False where the block has nothing to do: a shorter sequence has fewer segments.
  __device__ __forceinline__ bool start() const {
    if (threadIdx.x == 0) find_work();
    __syncthreads();  // the block's work is known
    return s.work.segment == 0 || first_of_segment() < s.work.behind;
  }
  __device__ __forceinline__ int first_of_segment() const {
    return s.work.segment * int(p.segment_chunks);
  }
  __device__ __forceinline__ void start_scales() const {
    if constexpr (Traits::kScaled) {
      const auto [columns, lane, row, pair] = fresh_place();
      for (int h = 0; h < 2; ++h) s.columns[columns].scales.exponent[h][lane] = 127;
    }
  }
  __device__ __forceinline__ bool stores_state() const {
    return p.making_maps || (p.rule.final_state.data && left_from(s.work.behind) <= 0);
  }

  __device__ __forceinline__ void run() {
    if (!start()) return;
    const auto& work = s.work;
    const auto load_k_and_gates = [&](int chunk) { load_k(chunk), load_gates(chunk); };
    const auto load_v_T_and_P = [&](int chunk) { load_v(chunk), load_T_and_P(chunk); };
    const int first_of_segment = this->first_of_segment();

    // Three groups per chunk, always committed in this order, so that "all but the newest" is the
    // right wait at both places.
    if (first_of_segment < work.behind) load_k_and_gates(first_of_segment);
    cp_async_commit();
    if (first_of_segment < work.behind) load_q(first_of_segment);
    cp_async_commit();
    if (first_of_segment < work.behind) load_v_T_and_P(first_of_segment);
    cp_async_commit();

    State S = {};
    start_scales();
    load_state(S);

    int first = 0;  // of the window
#pragma unroll 1
    for (int chunk = first_of_segment; chunk < work.behind;) {
      const auto& gates = s.gates[chunk & 1];
      cp_async_wait<1>();
      __syncthreads();  // k, q, gates are here, and nobody reads the other k and gates any more
      if (first == 0 && chunk + 1 < work.behind) load_k_and_gates(chunk + 1);
      cp_async_commit();
      scale_state(S);
      Values x = {};
      multiply_state<false>(x, S, s.k[chunk & 1]);
      if (gates.tokens.keys) clear_tokens(x, gates.tokens.keys);

      cp_async_wait<1>();
      __syncthreads();  // v, T, P are here
      subtract_from_values(x, gates.factor[kDecayIn], s.columns[0].v[0]);
      if (gates.tokens.windows) mask_tokens(x, first, end_of_window(gates.tokens.windows, first));
      Values v_new = {};  // V'^T = X^T (T diag(b))^T
      multiply_lower<Traits::kTTerms, Traits::kTTerms>(v_new, x, s.T[0]);
      // Nothing of the output stands before V', so the chain from state to state is short.
      if (p.rule.output.data && !p.making_maps) {
        const auto [columns, lane, row, pair] = fresh_place();
        Values o = {};
        query_state(o, S, s.q[0], gates.tokens.queries, gates.factor[kDecayQ],
                    {row_unscale(columns, lane, 0), row_unscale(columns, lane, 1)});
        add_scores(o, v_new);
        store_output(chunk, o, gates.factor[kOutScale], first,
                     end_of_window(gates.tokens.windows, first),
                     s.columns[fresh_place().columns].v[0]);
      }

      __syncthreads();  // q, v, T, P are free
      const int last = end_of_window(gates.tokens.windows, first);
      const bool done = last == C;
      if (done && chunk + 1 < work.behind) load_q(chunk + 1);
      cp_async_commit();
      if (done && chunk + 1 < work.behind) load_v_T_and_P(chunk + 1);
      cp_async_commit();

      update_state(S, v_new, gates.factor[kDecayOut], gates.factor[kDecayQ][last - 1],
                   s.k[chunk & 1]);
      first = done ? 0 : last;
      chunk += done;
    }

    if (stores_state()) store_state(S);
  }
};

template <class Traits>
__global__ void __maxnreg__(Traits::kMaxRegisters)
    scan_output_kernel(const __grid_constant__ Params p) {
#if __CUDA_ARCH__ >= 800
  extern __shared__ __align__(1024) unsigned char storage[];
  ScanOutput<Traits>(p, *reinterpret_cast<typename Traits::Shared*>(storage)).run();
#else
  __trap();  // supports() declines where this would run
#endif
}

template <class Element, int kK, Precision kPrecision>
int64_t scan_output_shared_bytes(int warps) {
  return ScanTraits<Element, kK, kPrecision>::shared_bytes(warps);
}

template <class Element, int kK, Precision kPrecision>
void scan_output(const Params& p, cudaStream_t stream) {
  using Traits = ScanTraits<Element, kK, kPrecision>;
  const int columns = p.warps * kWarpColumns;
  int64_t column_tiles = (p.rule.dim_v + columns - 1) / columns;
  if (p.making_maps) column_tiles += (p.rule.dim_k + columns - 1) / columns;
  // Nothing starts from where the last segment ends.
  const int64_t segments = p.making_maps ? p.segments - 1 : p.segments;
  launch("scan_output", scan_output_kernel<Traits>,
         column_tiles * p.rule.value_heads * p.rule.sequences * segments, p.warps * 32,
         Traits::shared_bytes(p.warps), stream, p);
}

}  // namespace deltanet::cuda::tensor_core
