// SPDX-License-Identifier: Apache-2.0
//
// Tensor-core primitives of one warp (sm_80 and newer), and the shared-memory layouts that feed
// them without bank conflicts.
//
// Fragments of mma.m16n8k16, which everything below relies on (g = lane / 4, t = lane % 4):
//   accumulator  c0 c1 = D[g][2t, 2t+1]   c2 c3 = D[g+8][2t, 2t+1]
//   A operand    a0 = A[g][2t..]  a1 = A[g+8][2t..]  a2 = A[g][8+2t..]  a3 = A[g+8][8+2t..]
//   B operand    b0 = B[2t..][g]  b1 = B[8+2t..][g]
// Two neighbouring accumulators, once rounded, therefore are an A operand: no shuffle, no shared
// memory.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace deltanet::cuda {

using bf16 = __nv_bfloat16;
using fp16 = __half;
typedef float Accumulator[4];

__device__ __forceinline__ uint32_t smem_address(const void* p) {
  return uint32_t(__cvta_generic_to_shared(p));
}

// ---- loads
// ---------------------------------------------------------------------------------------

__device__ __forceinline__ void ldmatrix_x4(uint32_t (&d)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&d)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(address)
               : "memory");
}
// Transposes an 8x8 matrix of 16-bit values, a pair of which lies in each lane.
__device__ __forceinline__ uint32_t movmatrix(uint32_t a) {
  uint32_t d;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(a));
  return d;
}

// 16 bytes from global to shared memory; those beyond `valid` arrive as zero. The source must be a
// valid address even for no bytes.
__device__ __forceinline__ void cp_async_16(uint32_t to, const void* from, int valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid)
               : "memory");
}
__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits until at most kPending of this thread's groups are still under way.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// ---- products
// ------------------------------------------------------------------------------------

// c += a b with operands of Element: exact products, sums in fp32.
template <class Element>
__device__ __forceinline__ void mma(Accumulator& c, const uint32_t (&a)[4], uint32_t b0,
                                    uint32_t b1) {
  if constexpr (std::is_same_v<Element, bf16>)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// The first half of such a product: sums over k = 0..7, with a0 a1 of the A operand and b0 of the B
// operand.
template <class Element>
__device__ __forceinline__ void mma_half(Accumulator& c, const uint32_t (&a)[4], uint32_t b0) {
  if constexpr (std::is_same_v<Element, bf16>)
    asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 "
        "{%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(b0));
  else
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
        "{%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(b0));
}
__device__ __forceinline__ void mma_tf32(Accumulator& c, const uint32_t (&a)[4], uint32_t b0,
                                         uint32_t b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// ---- fp32 values as sums of 16-bit terms
// -----------------------------------------------------------

// Two 16-bit values in a word, the first one in the lower half.
template <class Element>
__device__ __forceinline__ uint32_t pack(float x, float y) {
  uint32_t word;
  if constexpr (std::is_same_v<Element, bf16>)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(y), "f"(x));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(y), "f"(x));
  return word;
}
template <class Element>
__device__ __forceinline__ float2 unpack(uint32_t word) {
  if constexpr (std::is_same_v<Element, bf16>) {
    return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
  } else {
    __half2_raw raw;
    raw.x = static_cast<unsigned short>(word);
    raw.y = static_cast<unsigned short>(word >> 16);
    return __half22float2(__half2(raw));
  }
}

// (x, y) as kTerms packed pairs: term 0 is the rounded value, each next one what is left.
template <class Element, int kTerms>
__device__ __forceinline__ void split(float x, float y, uint32_t (&term)[kTerms]) {
#pragma unroll
  for (int i = 0; i < kTerms; ++i) {
    term[i] = pack<Element>(x, y);
    const float2 taken = unpack<Element>(term[i]);
    x -= taken.x;
    y -= taken.y;
  }
}
// The same by other roundings: a lone term is rounded half away from zero, a first one of several
// truncated (one bit less). The point is to be different. Where a value is split twice far apart,
// ptxas would recognize the second split and keep the first one's terms in registers between (64 of
// them for the state; asm volatile does not help).
template <class Element, int kTerms>
__device__ __forceinline__ void split_otherwise(float x, float y, uint32_t (&term)[kTerms]) {
  constexpr uint32_t kKept = std::is_same_v<Element, bf16> ? 0xffff0000u : 0xffffe000u;
  constexpr uint32_t kHalf = kTerms == 1 ? (~kKept + 1) / 2 : 0;
  const uint32_t kept_x = (__float_as_uint(x) + kHalf) & kKept;
  const uint32_t kept_y = (__float_as_uint(y) + kHalf) & kKept;
  const float2 first = make_float2(__uint_as_float(kept_x), __uint_as_float(kept_y));
  if constexpr (std::is_same_v<Element, bf16>)
    term[0] = __byte_perm(kept_x, kept_y, 0x7632);
  else
    term[0] = pack<Element>(first.x, first.y);
  if constexpr (kTerms > 1) {
    const float2 taken = std::is_same_v<Element, bf16> ? first : unpack<Element>(term[0]);
    uint32_t rest[kTerms - 1];
    split<Element, kTerms - 1>(x - taken.x, y - taken.y, rest);
#pragma unroll
    for (int i = 1; i < kTerms; ++i) term[i] = rest[i - 1];
  }
}
// Accumulators of two neighbouring n-tiles to an A operand in kTerms terms.
template <class Element, int kTerms, bool kOtherwise = false>
__device__ __forceinline__ void to_operand(const Accumulator& left, const Accumulator& right,
                                           uint32_t (&a)[kTerms][4]) {
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const float* c = (r & 2) ? right : left;
    const float x = c[(r & 1) * 2], y = c[(r & 1) * 2 + 1];
    uint32_t term[kTerms];
    if constexpr (kOtherwise)
      split_otherwise<Element, kTerms>(x, y, term);
    else
      split<Element, kTerms>(x, y, term);
#pragma unroll
    for (int i = 0; i < kTerms; ++i) a[i][r] = term[i];
  }
}

// ---- shared-memory layouts
// -------------------------------------------------------------------------

// Row-major tile of 16-bit values whose 16-byte pieces are XOR-permuted inside each row, so that 8
// consecutive rows of one column of pieces fall on all 32 banks: ldmatrix, plain and .trans, then
// takes its minimum of one pass per 8x8 matrix.
template <int kRowBytes>
struct SwizzledTile {
  static constexpr int kPieces = kRowBytes / 16;
  static_assert(kPieces >= 2 && (kPieces & (kPieces - 1)) == 0);

  static __device__ __forceinline__ int offset(int row, int piece) {
    const int x = kPieces >= 8 ? row & 7 : (row / (8 / kPieces)) & (kPieces - 1);
    return row * kRowBytes + ((piece ^ x) << 4);
  }
  // From the address of (row < 16, piece < 2) to the same place `rows16` times 16 rows down and
  // `pieces2` pairs of pieces right. The permutation depends on row % 8 only and is an XOR, so one
  // lane address per tile serves every fragment. Kernels that keep more of them spill. The tile
  // must start at a multiple of kRowBytes.
  static __device__ __forceinline__ uint32_t step(uint32_t lane_address, int rows16, int pieces2) {
    return (lane_address ^ uint32_t(pieces2 << 5)) + rows16 * 16 * kRowBytes;
  }
};

// Lower triangular matrix of kSize rows, as its 16x16 blocks on and below the diagonal, 512 bytes
// each, ready for ldmatrix. It lies like this in global memory too, so that a linear copy will do.
template <int kSize>
struct LowerBlocks {
  static_assert(kSize == 32 || kSize == 64);
  static constexpr int kSide = kSize / 16, kCount = kSide * (kSide + 1) / 2;
  static constexpr __host__ __device__ int index(int row, int column) {
    return row * (row + 1) / 2 + column;
  }
  static constexpr __host__ __device__ int row_of(int block) {
    return (block >= 1) + (block >= 3) + (block >= 6);
  }
  static __device__ __forceinline__ int offset(int block, int row, int piece) {
    return block * 512 + SwizzledTile<32>::offset(row, piece);
  }
};

// Which row and piece each lane points ldmatrix.x4 at, so that its results are an A or a B operand.
struct LaneMap {
  int row, piece;
};
__device__ __forceinline__ LaneMap lanes_for_a(int lane) {
  return {(lane & 7) + ((lane >> 3) & 1) * 8, lane >> 4};
}
__device__ __forceinline__ LaneMap lanes_for_b(int lane) {
  return {(lane & 7) + (lane >> 4) * 8, (lane >> 3) & 1};
}

}  // namespace deltanet::cuda
