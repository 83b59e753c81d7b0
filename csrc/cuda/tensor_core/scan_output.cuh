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

template <class Element_, int kK_, Precision kPrecision_>
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
  // A bound near what is really live. With 255 allowed, ptxas hoists address arithmetic until it
  // has to spill some of it.
  static constexpr int kMaxRegisters = kK == 64 ? 128 : kScaled || !kExact ? 184 : 160;
  using Tile = SwizzledTile<kK * 2>;
  using VTile = SwizzledTile<kWarpColumns * 2>;
  using Blocks = LowerBlocks<kChunk>;
  static constexpr int kTBytes = kTTerms * Record::kPlaneBytes;
  static constexpr int kPBytes = kPTerms * Record::kPlaneBytes;

  struct Shared {
    alignas(256) Element k[2][kChunk * kK];  // two: k is the last tile of a chunk to be released
    alignas(256) Element q[kChunk * kK];
    alignas(128) unsigned char T[kTBytes];
    unsigned char P[kPBytes];
    struct alignas(16) {
      float factor[kFactors][kChunk];
      uint64_t windows, padding;
    } gates[2];
    // Of each warp its 16 columns of v, which o overwrites; as many warps as were launched.
    alignas(128) unsigned char v[1][kChunk * kWarpColumns * 2];
  };
  static_assert(offsetof(Shared, P) == offsetof(Shared, T) + kTBytes, "one copy fills both");
  static int64_t shared_bytes(int warps) {
    return int64_t(offsetof(Shared, v)) + warps * int64_t(sizeof(Shared::v[0]));
  }
};

// A power of two for each row of S, kept with the state of fp16 inputs: fp16 terms of S and V' are
// taken of scaled values, whose largest lies below 2^15. The largest is taken over what is known
// before the chunk, or what goes into the state anyway: later tokens do not touch earlier outputs.
struct RowScales {
  int exponent[2];  // biased: S times 2^(exponent - 127) is what the accumulators hold

  static __device__ __forceinline__ float power(int biased) {
    return __int_as_float((biased < 0 ? 0 : biased > 254 ? 254 : biased) << 23);
  }
  static constexpr int kLargest = 127 + 14;  // scaled values lie in [2^14, 2^15), or below

  __device__ __forceinline__ float unscale(int h) const { return power(254 - exponent[h]); }

  static __device__ __forceinline__ int biased_exponent(float largest) {
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
    return __float_as_int(largest) >> 23;
  }
  // What the accumulators must be multiplied by so that `largest` of them fills the range.
  __device__ __forceinline__ float fit(int h, float largest) {
    const int before = exponent[h];
    int after = before + min(kLargest - biased_exponent(largest), 127);
    after = after < 1 ? 1 : after > 253 ? 253 : after;
    exponent[h] = after;
    return power(127 + after - before);
  }
  // In place of `keep`: what makes room for keep S and for new terms of at most `largest`.
  __device__ __forceinline__ float admit(int h, float keep, float largest) {
    const int before = exponent[h], room = 126 - (__float_as_int(keep) >> 23);
    int after = min(before + room, 127 + kLargest - biased_exponent(largest));
    after = after < 1 ? 1 : after > 253 ? 253 : after;
    exponent[h] = after;  // the change may be beyond what one float holds
    return keep * power(127 + ((after - before) >> 1)) * power(127 + ((after - before + 1) >> 1));
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
  static constexpr int kVBytes = sizeof(Shared::v[0]);
  using State = Accumulator[kK / 8];  // S^T of 16 columns of V: rows V, columns K
  using Values = Accumulator[C / 8];  // X^T, V'^T, O^T: rows V, columns tokens

  const Params& p;
  Shared& s;
  int warp, row, pair;  // row = lane / 4, pair = lane % 4 of the fragments
  int v_first;          // the block's first column of V
  bool is_M;            // a map's M: v = 0 and columns of I instead of columns of V
  int dim_v;
  int head, key_head, sequence, segment, first_chunk;
  int batch, begin, end;                  // the sequence's tokens: counts are below 2^31
  uint32_t k_a, k_b, q_b, v_b, t_b, p_b;  // this lane's ldmatrix address in each tile

  __device__ __forceinline__ ScanOutput(const Params& params, Shared& shared)
      : p(params), s(shared) {
    const int lane = threadIdx.x % 32;
    warp = threadIdx.x / 32;
    row = lane / 4;
    pair = lane % 4;
    // Column tiles of one head are neighbours: they find q, k, T in L2.
    const int columns = p.warps * kWarpColumns;
    const int value_tiles = (p.rule.dim_v + columns - 1) / columns;
    const int map_tiles = p.making_maps ? (p.rule.dim_k + columns - 1) / columns : 0;
    unsigned block = blockIdx.x;  // numbers of blocks are below 2^31: 32-bit divisions
    int tile = int(block % unsigned(value_tiles + map_tiles));
    block /= unsigned(value_tiles + map_tiles);
    is_M = tile >= value_tiles;
    if (is_M) tile -= value_tiles;
    dim_v = is_M ? p.rule.dim_k : p.rule.dim_v;
    v_first = tile * columns;
    head = int(block % unsigned(p.rule.value_heads));
    block /= unsigned(p.rule.value_heads);
    sequence = int(block % unsigned(p.rule.sequences));
    segment = int(block / unsigned(p.rule.sequences));
    key_head = int(key_head_of(p.rule, head));
    const Sequence tokens = sequence_at(p.rule, sequence);
    batch = int(tokens.batch);
    begin = int(tokens.begin);
    end = int(tokens.end);
    first_chunk = int(first_chunk_of(p.rule, p.table, sequence));
    const LaneMap la = lanes_for_a(lane), lb = lanes_for_b(lane);
    k_a = smem_address(s.k) + Tile::offset(la.row, la.piece);
    k_b = smem_address(s.k) + Tile::offset(lb.row, lb.piece);
    q_b = smem_address(s.q) + Tile::offset(lb.row, lb.piece);
    v_b = smem_address(s.v) + warp * kVBytes + VTile::offset(lb.row, lb.piece);
    t_b = smem_address(s.T) + Blocks::offset(0, lb.row, lb.piece);
    p_b = smem_address(s.P) + Blocks::offset(0, lb.row, lb.piece);
  }

  // ---- loads ----

  // The thread's number again, opaque to the compiler: addresses made of it are made anew at each
  // use, by a few integer operations, and not kept in registers across the loop, or spilled.
  static __device__ __forceinline__ int fresh_thread() {
    int x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return x;
  }
  // Tokens of the sequence from the chunk's first one on.
  __device__ __forceinline__ int left_from(int chunk) const { return end - begin - chunk * C; }
  static __device__ __forceinline__ int bytes_left(int elements) {
    return elements < 0 ? 0 : elements < 8 ? elements * 2 : 16;
  }
  // Rows of q or k, zero-padded.
  __device__ __forceinline__ void load_rows(uint32_t tile, const View<4>& x, int chunk) const {
    constexpr int kPieces = kK / 8;
    const int thread = fresh_thread(), piece = thread % kPieces;
    const int step = p.warps * 32 / kPieces, bytes = bytes_left(p.rule.dim_k - piece * 8);
    int r = thread / kPieces;
    const auto* from = static_cast<const Element*>(x.data) + batch * x.stride[0] +
                       (begin + chunk * C + r) * x.stride[1] + key_head * x.stride[2] + piece * 8;
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
    for (int at = fresh_thread() * 16; at < bytes; at += step) cp_async_16(to + at, from + at, 16);
  }
  __device__ __forceinline__ const unsigned char* record(int chunk) const {
    return record_of(p, first_chunk + chunk, head);
  }
  __device__ __forceinline__ void load_k_and_gates(int chunk) const {
    load_rows(smem_address(s.k[chunk & 1]), p.rule.key, chunk);
    load_linear(smem_address(&s.gates[chunk & 1]), record(chunk), sizeof(s.gates[0]));
  }
  __device__ __forceinline__ void load_q(int chunk) const {
    if (p.rule.query.data && !p.making_maps) load_rows(smem_address(s.q), p.rule.query, chunk);
  }
  __device__ __forceinline__ void load_v_t_p(int chunk) const {
    const auto& x = p.rule.value;
    const int thread = fresh_thread(), pieces = 2 * p.warps, piece = thread / 8 % pieces;
    const int r = thread / (8 * pieces) * 8 + thread % 8, column = v_first + piece * 8;
    const int bytes = x.data && !is_M ? bytes_left(dim_v - column) : 0;
    const int left = left_from(chunk);
    const auto* from = static_cast<const Element*>(x.data) + batch * x.stride[0] +
                       (begin + chunk * C + r) * x.stride[1] + head * x.stride[2] + column;
    const uint32_t to = smem_address(s.v) + piece / 2 * kVBytes + VTile::offset(r, piece % 2);
    // An absent v is zero; a copy of no bytes still wants an address.
    const void* const nothing = p.rule.key.data;
#pragma unroll
    for (int i = 0; i < C / 16; ++i, from += 16 * x.stride[1]) {
      const bool inside = r + i * 16 < left && bytes > 0;
      cp_async_16(to + i * 16 * kWarpColumns * 2, inside ? from : nothing, inside ? bytes : 0);
    }
    const bool output = p.rule.output.data && !p.making_maps;
    load_linear(smem_address(s.T), record(chunk) + Record::kBlocks,
                Traits::kTBytes + (output ? Traits::kPBytes : 0));
  }

  // ---- states: once per segment, so plain accesses will do; 8 lanes fill a sector ----

  // fn(n, e, offset) for each of this thread's elements that exist.
  template <class Function>
  __device__ __forceinline__ void for_each_state_element(int64_t base, int64_t stride_k,
                                                         int64_t stride_v, Function fn) const {
    const int v = v_first + warp * kWarpColumns + row;
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
    return ((slot * p.rule.sequences + sequence) * p.rule.value_heads + head) * p.rule.dim_k *
           columns;
  }
  __device__ __forceinline__ void load_state(State& S) const {
    const auto& from = p.rule.initial_state;
    const bool starts = p.starts && !p.making_maps;
    if (starts || (!p.making_maps && from.data && from.dtype == DType::kFloat32)) {
      const float* const data = starts ? p.starts : static_cast<const float*>(from.data);
      for_each_state_element(starts ? segment_matrix(segment, dim_v)
                                    : sequence * from.stride[0] + head * from.stride[1],
                             starts ? dim_v : from.stride[2], starts ? 1 : from.stride[3],
                             [&](int n, int e, int64_t at) { S[n][e] = data[at]; });
    } else if (!p.making_maps && from.data) {
      const bool is_bf16 = from.dtype == DType::kBFloat16;
      for_each_state_element(sequence * from.stride[0] + head * from.stride[1], from.stride[2],
                             from.stride[3], [&](int n, int e, int64_t at) {
                               const uint32_t x = static_cast<const uint16_t*>(from.data)[at];
                               S[n][e] = is_bf16 ? unpack<bf16>(x).x : unpack<fp16>(x).x;
                             });
    } else if (is_M || (!p.making_maps && p.rule.initial_state_is_identity)) {
      const int v = v_first + warp * kWarpColumns + row;
#pragma unroll
      for (int n = 0; n < kK / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (n * 8 + pair * 2 + (e & 1) == v + (e >> 1) * 8) S[n][e] = 1.f;
    }
  }
  __device__ __forceinline__ void store_state(const State& S, const RowScales& scales) const {
    const auto& to = p.rule.final_state;
    float* data = static_cast<float*>(to.data);
    int64_t base = sequence * to.stride[0] + head * to.stride[1];
    int64_t stride_k = to.stride[2], stride_v = to.stride[3];
    if (p.making_maps) {
      data = is_M ? p.maps : p.starts;
      base = segment_matrix(is_M ? segment : segment + 1, dim_v);
      stride_k = dim_v;
      stride_v = 1;
    }
    const float unscale[2] = {Traits::kScaled ? scales.unscale(0) : 1.f,
                              Traits::kScaled ? scales.unscale(1) : 1.f};
    for_each_state_element(base, stride_k, stride_v,
                           [&](int n, int e, int64_t at) { data[at] = S[n][e] * unscale[e >> 1]; });
  }

  // ---- products ----

  // acc^T += S^T tile^T for a tile of k or q
  template <bool kOtherwise>
  __device__ __forceinline__ void multiply_state(Values& acc, const State& S, uint32_t tile) const {
#pragma unroll
    for (int kk = 0; kk < kKTiles; ++kk) {
      uint32_t a[Traits::kReadTerms][4], b[kTokenTiles][4];
      to_operand<Element, Traits::kReadTerms, kOtherwise>(S[2 * kk], S[2 * kk + 1], a);
#pragma unroll
      for (int n = 0; n < kTokenTiles; ++n) ldmatrix_x4(b[n], Tile::step(tile, n, kk));
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
                                                 uint32_t plane_address) const {
    constexpr int kKept = kA > kB ? kA : kB;
#pragma unroll
    for (int j = 0; j < kTokenTiles; ++j) {
      uint32_t a[kA][4];
      to_operand<bf16, kA>(x[2 * j], x[2 * j + 1], a);
#pragma unroll
      for (int plane = 0; plane < kB; ++plane) {
        uint32_t b[kTokenTiles][4];
#pragma unroll
        for (int i = j; i < kTokenTiles; ++i)
          ldmatrix_x4(b[i],
                      plane_address + plane * Record::kPlaneBytes + Blocks::index(i, j) * 512);
#pragma unroll
        for (int term = 0; term < kA && term + plane < kKept; ++term)
#pragma unroll
          for (int i = j; i < kTokenTiles; ++i) {
            mma<bf16>(acc[2 * i], a[term], b[i][0], b[i][1]);
            mma<bf16>(acc[2 * i + 1], a[term], b[i][2], b[i][3]);
          }
      }
    }
  }

  // X^T = V^T - (K S)^T diag(e^G / |k|), in place of (K S)^T
  __device__ __forceinline__ void subtract_from_values(Values& x, const float (&decay)[C],
                                                       const RowScales& scales) const {
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) {
      // v[0]: rows `row`, tokens 2 pair.. of the first 8; v[1]: rows 8 further; v[2], v[3]: the
      // next 8 tokens.
      uint32_t v[4];
      ldmatrix_x4_trans(v, VTile::step(v_b, n, 0));
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        float2 f = *reinterpret_cast<const float2*>(&decay[n * 16 + (r >> 1) * 8 + pair * 2]);
        if constexpr (Traits::kScaled) {
          f.x *= scales.unscale(r & 1);
          f.y *= scales.unscale(r & 1);
        }
        const float2 value = unpack<Element>(v[r]);
        float* const y = &x[2 * n + (r >> 1)][(r & 1) * 2];
        y[0] = fmaf(-f.x, y[0], value.x);
        y[1] = fmaf(-f.y, y[1], value.y);
      }
    }
  }

  // Tokens outside of [first, end) take no part in this window.
  __device__ __forceinline__ void mask_tokens(Values& x, int first, int end) const {
#pragma unroll
    for (int n = 0; n < C / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int token = n * 8 + pair * 2 + (e & 1);
        if (token < first || token >= end) x[n][e] = 0.f;
      }
  }

  // S <- keep S + (diag(out) K)^T V'; V' is used up
  __device__ __forceinline__ void update_state(State& S, Values& v_new, const float (&out)[C],
                                               float keep, uint32_t keys, RowScales& scales) const {
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
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float largest = 0.f;
#pragma unroll
        for (int n = 0; n < C / 8; ++n)
          largest = fmaxf(largest, fmaxf(fabsf(v_new[n][2 * h]), fabsf(v_new[n][2 * h + 1])));
        keeps[h] = scales.admit(h, keep, largest);
        const float scale = RowScales::power(scales.exponent[h]);
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
        for (int n = 0; n < kBatch; ++n) ldmatrix_x4_trans(b[n], Tile::step(keys, j, first + n));
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

  __device__ __forceinline__ void scale_state(State& S, RowScales& scales) const {
    if constexpr (Traits::kScaled) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float largest = 0.f;
#pragma unroll
        for (int n = 0; n < kK / 8; ++n)
          largest = fmaxf(largest, fmaxf(fabsf(S[n][2 * h]), fabsf(S[n][2 * h + 1])));
        const float factor = scales.fit(h, largest);
#pragma unroll
        for (int n = 0; n < kK / 8; ++n) S[n][2 * h] *= factor, S[n][2 * h + 1] *= factor;
      }
    }
  }

  // ---- output ----

  // O^T to o, tokens [first, end) of the chunk. movmatrix turns each 8x8 tile, the warp's columns
  // of the v tile stage it, and 16-byte pieces go out.
  __device__ __forceinline__ void store_output(int chunk, const Values& o,
                                               const float (&out_scale)[C], int first,
                                               int end) const {
    const bool whole = first == 0 && end == C;
    __syncwarp();  // every lane has read its part of v
#pragma unroll
    for (int n = 0; n < C / 8; ++n) {
      const float2 f = *reinterpret_cast<const float2*>(&out_scale[n * 8 + pair * 2]);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32_t word = movmatrix(pack<Element>(o[n][2 * h] * f.x, o[n][2 * h + 1] * f.y));
        const int token = n * 8 + row;
        if (whole || (token >= first && token < end))  // later windows still need their v
          *reinterpret_cast<uint32_t*>(s.v[0] + warp * kVBytes + VTile::offset(token, h) +
                                       pair * 4) = word;
      }
    }
    __syncwarp();
    // 8 lanes take 8 rows of one piece: no bank conflicts.
    const int lane = fresh_thread() % 32, piece = lane / 8 % 2, r = lane / 16 * 8 + lane % 8;
    const int column = v_first + warp * kWarpColumns + piece * 8, valid = dim_v - column;
    if (valid <= 0) return;
    const int left = left_from(chunk);
    if (left < end) end = left;
    const auto& y = p.rule.output;
    const unsigned char* from = s.v[0] + warp * kVBytes + VTile::offset(r, piece);
    auto* to = static_cast<Element*>(y.data) + batch * y.stride[0] +
               (begin + chunk * C + r) * y.stride[1] + head * y.stride[2] + column;
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

  __device__ __forceinline__ void write_output(int chunk, const State& S, const Values& v_new,
                                               const float (&factor)[kFactors][C], int first,
                                               int end, const RowScales& scales) const {
    // S is split a second time, which keeps x and o from being live together. Nothing of the output
    // stands before V', so the chain from state to state is short.
    Values o = {};
    multiply_state<true>(o, S, q_b);
#pragma unroll
    for (int n = 0; n < C / 8; ++n) {
      const float2 f = *reinterpret_cast<const float2*>(&factor[kDecayQ][n * 8 + pair * 2]);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float unscale = Traits::kScaled ? scales.unscale(h) : 1.f;
        o[n][2 * h] *= f.x * unscale;
        o[n][2 * h + 1] *= f.y * unscale;
      }
    }
    multiply_lower<2, Traits::kPTerms>(o, v_new, p_b);
    store_output(chunk, o, factor[kOutScale], first, end);
  }

  __device__ __forceinline__ void run() {
    const int chunks = (end - begin + C - 1) / C;
    const int length = int(p.segment_chunks), first_of_segment = segment * length;
    // A shorter sequence has fewer segments.
    if (segment > 0 && first_of_segment >= chunks) return;
    const int behind = min(first_of_segment + length, chunks);

    // Three groups per chunk, always committed in this order, so that "all but the newest" is the
    // right wait at both places.
    if (first_of_segment < behind) load_k_and_gates(first_of_segment);
    cp_async_commit();
    if (first_of_segment < behind) load_q(first_of_segment);
    cp_async_commit();
    if (first_of_segment < behind) load_v_t_p(first_of_segment);
    cp_async_commit();

    State S = {};
    RowScales scales = {{127, 127}};
    load_state(S);

    int first = 0;  // of the window
#pragma unroll 1
    for (int chunk = first_of_segment; chunk < behind;) {
      const uint32_t stage = uint32_t(chunk & 1) * (C * kK * 2);
      const auto& gates = s.gates[chunk & 1];
      cp_async_wait<1>();
      __syncthreads();  // k, q, gates are here, and nobody reads the other k and gates any more
      if (first == 0 && chunk + 1 < behind) load_k_and_gates(chunk + 1);
      cp_async_commit();
      const uint64_t windows = gates.windows, later = windows >> first >> 1;
      const int last = later ? first + __ffsll(static_cast<long long>(later)) : C;  // its end

      scale_state(S, scales);
      Values x = {};
      multiply_state<false>(x, S, k_b + stage);

      cp_async_wait<1>();
      __syncthreads();  // v, T, P are here
      subtract_from_values(x, gates.factor[kDecayIn], scales);
      if (windows) mask_tokens(x, first, last);
      Values v_new = {};  // V'^T = X^T (T diag(b))^T
      multiply_lower<Traits::kTTerms, Traits::kTTerms>(v_new, x, t_b);
      if (p.rule.output.data && !p.making_maps)
        write_output(chunk, S, v_new, gates.factor, first, last, scales);

      __syncthreads();  // q, v, T, P are free
      const bool done = last == C;
      if (done && chunk + 1 < behind) load_q(chunk + 1);
      cp_async_commit();
      if (done && chunk + 1 < behind) load_v_t_p(chunk + 1);
      cp_async_commit();

      update_state(S, v_new, gates.factor[kDecayOut], gates.factor[kDecayQ][last - 1], k_a + stage,
                   scales);
      first = done ? 0 : last;
      chunk += done;
    }

    if (p.making_maps || (p.rule.final_state.data && behind == chunks)) store_state(S, scales);
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
