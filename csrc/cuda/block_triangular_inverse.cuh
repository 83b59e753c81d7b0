// SPDX-License-Identifier: Apache-2.0
//
// Block-wide inverse of a unit lower triangular matrix, T = (I + L)^-1: docs/algorithm.md, equation
// (4).
//
// Work split:  16-row diagonal blocks by forward substitution, one thread per column (the raking);
//              then Schur merges 16 -> 32 -> 64 -> 128. Or substitution throughout.
// Numerics:    fp32 in a fixed order, so two runs agree bit for bit. No powers of L are formed: see
//              the class comment.
// Memory:      shared memory only, in place; TempStorage holds one half-size product.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

namespace deltanet::cuda {

/// How the off-diagonal blocks are found. The diagonal blocks are always solved by fp32 forward
/// substitution.
enum BlockTriangularInverseAlgorithm {
  /// \par Overview
  /// fp32 forward substitution for whole rows of T, 16 at a time: products with the rows above,
  /// then substitution in the diagonal block, one thread per column. No inverse of a diagonal block
  /// is ever a factor, so the error is that of substitution row by row, at every size. A NaN in row
  /// i of L stays out of the rows of T above i. Needs a thread per row.
  ///
  /// \par Performance
  /// Three barriers and a serial walk per 16 rows. Wins where accuracy counts, and at 128 rows.
  BLOCK_TRIANGULAR_INVERSE_SUBSTITUTION,

  /// \par Overview
  /// fp32 fused multiply-adds on 4 x 4 register tiles. A NaN in row i of L stays out of the rows of
  /// T above i.
  ///
  /// \par Performance
  /// Runs on sm_75, too. Wins where the inverse is a small part of the kernel.
  BLOCK_TRIANGULAR_INVERSE_RAKING,

  /// \par Overview
  /// Tensor-core products of operands split into two tf32 parts, both rounded: hi hi + hi lo + lo
  /// hi,
  /// 2^-21 per product. Three times the error of BLOCK_TRIANGULAR_INVERSE_RAKING at worst, still
  /// below 2e-6. A NaN reaches rows of its own 16-row block.
  ///
  /// \par Performance
  /// A fifth of the issue slots and of the shared-memory traffic. Wins on sm_80 and newer wherever
  /// the kernel around it is bound by throughput.
  BLOCK_TRIANGULAR_INVERSE_RAKING_TF32X3,
};

/// \brief Collective inverse of `I + L`, for a strictly lower triangular `L` of 16, 32, 64 or 128
/// rows held in shared memory.
///
/// \par Overview
/// Like the raking of `cub::BlockScan`, the collective cuts the problem into segments (here 16
/// rows), walks each of them serially with few threads, and then combines segments in log steps.
/// Unlike a scan it must not combine by *powers* of L: where keys repeat, the entries of L^2, L^4,
/// ... reach 1e18 and cancel, while every entry of T and of each Schur complement stays bounded.
///
/// \par
///   1. Raking: thread j of a segment solves column j of its 16 x 16 block,
///      x_i = [i == j] - sum_{m < i} L_im x_m.
///   2. Merging, for halves of 16, 32, 64 rows:
///      [A 0; C D]^-1 = [A^-1 0; -D^-1 C A^-1  D^-1].
///
/// \par Accuracy
/// Relative error of T with fp32 merges, 64 rows: 3e-8 for random keys, 6e-7 for identical keys
/// with b = 1.999 (substitution row by row: 2e-8 and 3e-7). Where entries of T alternate in sign,
/// each merge adds to it: 3e-6 to 1e-5 at 128 rows, where substitution has up to 2e-6.
///
/// \tparam kSize          rows: 16, 32, 64 or 128. Smaller systems are padded with zero rows of L.
/// \tparam kBlockThreads  threads of the one-dimensional block; a multiple of 32, at least 64
/// \tparam kAlgorithm     how merges are computed
///
/// \par Example
/// Threads of a block invert a system of 64 rows: `example` in
/// tests/ptx_emulator/programs/block_triangular_inverse.cu, which is compiled and run.
/// \code
/// using Inverse = BlockTriangularInverse<64, 128>;
/// __shared__ alignas(16) float matrix[Inverse::kMatrixSize];
/// __shared__ typename Inverse::TempStorage temp_storage;
/// for (int e = threadIdx.x; e < 64 * 64; e += 128)
///   matrix[Inverse::Offset(e / 64, e % 64)] = L[e];
/// __syncthreads();                             // L is complete
/// Inverse(temp_storage).Invert(matrix);
/// for (int e = threadIdx.x; e < 64 * 64; e += 128)
///   T[e] = e % 64 <= e / 64 ? matrix[Inverse::Offset(e / 64, e % 64)] : 0.f;
/// \endcode
/// Were `L` the lower triangle of ones, `T` would hold 1 on the diagonal, -1 next to it, and 0.
///
/// \par Barriers
/// The caller synchronizes between writing L and the call. After the call every thread may read T.
/// Reuse of TempStorage for something else needs no further barrier; to reuse the matrix, readers
/// of T synchronize first.
template <int kSize, int kBlockThreads,
          BlockTriangularInverseAlgorithm kAlgorithm = BLOCK_TRIANGULAR_INVERSE_RAKING>
class BlockTriangularInverse {
  static_assert(kSize == 16 || kSize == 32 || kSize == 64 || kSize == 128,
                "built for 16, 32, 64 and 128 rows");
  static_assert(kBlockThreads % 32 == 0 && kBlockThreads >= 64, "whole warps");

  static constexpr bool kSubstitution = kAlgorithm == BLOCK_TRIANGULAR_INVERSE_SUBSTITUTION;
  static_assert(!kSubstitution || kBlockThreads >= kSize, "a thread per column");
  static constexpr bool kTensorCores = kAlgorithm == BLOCK_TRIANGULAR_INVERSE_RAKING_TF32X3;
  static constexpr int kSegment = 16;
  static constexpr int kSegments = kSize / kSegment;
  static constexpr int kWarps = kBlockThreads / 32;
  static constexpr int kHalf = kSize > kSegment ? kSize / 2 : kSegment;

  // Free of bank conflicts: rows of 16 bytes are 4 words apart, modulo 32 banks. Tensor cores also
  // read 8 rows x 4 columns as an A fragment, 4 rows x 8 columns as a B fragment, and write the
  // latter as an accumulator. So rows are 8 words apart, and each 4 rows 4 more.
  static constexpr int kPitch = kSize + (kTensorCores ? 8 : 4);
  static constexpr int kSkew = kTensorCores ? 1 : 0;  // per row, for 4 rows at a time

  static constexpr int kProductRows = kSubstitution ? kSegment : kHalf;
  static constexpr int kProductPitch = (kSubstitution ? kSize : kHalf) + (kTensorCores ? 8 : 4);

  struct _TempStorage {
    float product[kSize > kSegment ? kProductRows * kProductPitch : 4];
  };

 public:
  /// Floats of the matrix.
  static constexpr int kMatrixSize = kSize * (kPitch + kSkew);

  /// Where an element of the matrix lies in it. Elements of a row lie side by side, and each row
  /// is 16-byte aligned. Offset(i, j) + Offset(m, n) is Offset(i + m, j + n) for i a multiple of 4:
  /// where only m and n depend on the lane, their part is worth adding once.
  static constexpr __host__ __device__ int Offset(int row, int column) {
    return row * kPitch + kSkew * (row & ~3) + column;
  }

  /// Shared memory that the collective needs besides the matrix.
  struct alignas(16) TempStorage {
    _TempStorage storage;
  };

  __device__ __forceinline__ explicit BlockTriangularInverse(TempStorage& temp_storage)
      : temp_(temp_storage.storage), thread_(int(threadIdx.x)) {}

  /// \brief Replaces L by T.
  ///
  /// \param matrix  kMatrixSize floats of shared memory, 16-byte aligned, addressed by Offset.
  ///                What lies on or above the diagonal counts for nothing; loads of 16 bytes may
  ///                fetch it inside the 16 x 16 diagonal blocks. Written: what lies on or below the
  ///                diagonal, and zeros above it inside those blocks. Other blocks above the
  ///                diagonal are not touched.
  __device__ __forceinline__ void Invert(float* matrix) {
    if constexpr (kSubstitution) {
      for (int first = 0; first < kSize; first += kSegment) SolveRows(matrix, first);
      return;
    }
    RakeDiagonalBlocks(matrix);
    if constexpr (kSize >= 32) Merge<16>(matrix);
    if constexpr (kSize >= 64) Merge<32>(matrix);
    if constexpr (kSize >= 128) Merge<64>(matrix);
  }

 private:
  __device__ __forceinline__ void RakeDiagonalBlocks(float* matrix) {
    const int warp = thread_ / 32, column = thread_ % 32;
    // One segment per warp: all schedulers work, half of each warp idles.
    for (int s = warp; s < kSegments; s += kWarps) {
      float* block = matrix + Offset(s * kSegment, s * kSegment);
      float x[kSegment];
      if (column < kSegment) {
#pragma unroll
        for (int i = 0; i < kSegment; ++i) x[i] = i == column ? 1.f : 0.f;
        Substitute(block, x);
      }
      __syncwarp();  // every lane has read L before any lane overwrites it
      if (column < kSegment) {
#pragma unroll
        for (int i = 0; i < kSegment; ++i) block[Offset(i, column)] = x[i];
      }
    }
    __syncthreads();  // the merges read all blocks
  }

  // x <- (I + L)^-1 x for the L of one diagonal block. All lanes read the same row of it:
  // broadcasts.
  static __device__ __forceinline__ void Substitute(const float* block, float (&x)[kSegment]) {
#pragma unroll
    for (int i = 0; i < kSegment; ++i) {
      float sum = x[i];
#pragma unroll
      for (int m = 0; m + 4 <= i; m += 4) {
        const float4 l = *reinterpret_cast<const float4*>(block + Offset(i, m));
        sum = fmaf(-l.x, x[m], sum);
        sum = fmaf(-l.y, x[m + 1], sum);
        sum = fmaf(-l.z, x[m + 2], sum);
        sum = fmaf(-l.w, x[m + 3], sum);
      }
#pragma unroll
      for (int m = i / 4 * 4; m < i; ++m) sum = fmaf(-block[Offset(i, m)], x[m], sum);
      x[i] = sum;
    }
  }

  // Rows first .. first + 15 of T, where the rows above are T already:
  // T_i = (I + L_ii)^-1 (E_i - sum over rows m above of L_im T_m).
  __device__ __forceinline__ void SolveRows(float* matrix, int first) {
    float* const rows = matrix + Offset(first, 0);
    const int row_tiles = kSegment / 4, tiles = row_tiles * (first / 4);
    for (int tile = thread_; tile < tiles; tile += kBlockThreads) {
      const int i = tile % row_tiles * 4, j = tile / row_tiles * 4;
      // Above row j, column j of T is zero.
      Tile<false>(rows, kPitch, matrix, kPitch, temp_.product, kProductPitch, i, j, j, first);
    }
    __syncthreads();  // the products are complete
    const int column = thread_;
    float x[kSegment];
    if (column < first + kSegment) {
#pragma unroll
      for (int i = 0; i < kSegment; ++i)
        x[i] = column < first        ? -temp_.product[i * kProductPitch + column]
               : first + i == column ? 1.f
                                     : 0.f;
      Substitute(rows + first, x);
    }
    __syncthreads();  // every thread has read L before any thread overwrites it
    if (column < first + kSegment) {
#pragma unroll
      for (int i = 0; i < kSegment; ++i) rows[Offset(i, column)] = x[i];
    }
    __syncthreads();  // the next rows, or the caller, read these; the product is free
  }

  // C <- -D^-1 (C A^-1) for every pair of neighboring inverted blocks of kN rows. The order of the
  // brackets matters little for accuracy (both are products of bounded factors); this one lets both
  // steps skip the zero triangle of their triangular factor.
  template <int kN>
  __device__ __forceinline__ void Merge(float* matrix) {
    constexpr int kPairs = kSize / (2 * kN);
    constexpr int kRows = kTensorCores ? 16 : 4, kColumns = kTensorCores ? 8 : 4;
    constexpr int kRowTiles = kN / kRows, kColumnTiles = kN / kColumns;
    constexpr int kTiles = kPairs * kRowTiles * kColumnTiles;
    constexpr int kWorkers = kTensorCores ? kWarps : kBlockThreads;
    const int worker = kTensorCores ? thread_ / 32 : thread_;
    for (int tile = worker; tile < kTiles; tile += kWorkers) {
      const Pair pair = PairOf<kN>(matrix, tile / (kRowTiles * kColumnTiles));
      const int i = tile % kRowTiles * kRows, j = tile / kRowTiles % kColumnTiles * kColumns;
      // Above row j, column j of A^-1 is zero.
      if constexpr (kTensorCores)
        TensorTile<false>(pair.c, pair.a, pair.product, i, j, j, kN);
      else
        Tile<false>(pair.c, kPitch, pair.a, kPitch, pair.product, kProductPitch, i, j, j, kN);
    }
    __syncthreads();  // C A^-1 is complete, C may be overwritten
    for (int tile = worker; tile < kTiles; tile += kWorkers) {
      const Pair pair = PairOf<kN>(matrix, tile / (kRowTiles * kColumnTiles));
      const int i = tile % kRowTiles * kRows, j = tile / kRowTiles % kColumnTiles * kColumns;
      // Right of column i, row i of D^-1 is zero.
      if constexpr (kTensorCores)
        TensorTile<true>(pair.d, pair.product, pair.c, i, j, 0, i + kRows);
      else
        Tile<true>(pair.d, kPitch, pair.product, kProductPitch, pair.c, kPitch, i, j, 0, i + kRows);
    }
    __syncthreads();  // the next merge, or the caller, reads the matrix and reuses the product
  }

  struct Pair {
    float *a, *c, *d, *product;  // A^-1 above, C and D^-1 below it; room for C A^-1
  };
  template <int kN>
  __device__ __forceinline__ Pair PairOf(float* matrix, int pair) const {
    float* a = matrix + Offset(pair * 2 * kN, pair * 2 * kN);
    return {a, a + Offset(kN, 0), a + Offset(kN, kN), temp_.product + pair * kN * kProductPitch};
  }

  // out[i .. i+3][j .. j+3] = (+ or -) sum over m in [begin, end) of left[i ..][m] right[m][j ..].
  // begin and end are multiples of 4. kLower: `left` is lower triangular and ends at the tile's
  // diagonal; its zeros are skipped, so that no later row reaches an earlier one, not even a NaN.
  template <bool kLower>
  static __device__ __forceinline__ void Tile(const float* left, int left_pitch, const float* right,
                                              int right_pitch, float* out, int out_pitch, int i,
                                              int j, int begin, int end) {
    float4 sum[4] = {};
    const int whole = kLower ? end - 4 : end;
    for (int m = begin; m < whole; m += 4)
      AddTile<false>(left, left_pitch, right, right_pitch, i, j, m, sum);
    if constexpr (kLower) AddTile<true>(left, left_pitch, right, right_pitch, i, j, whole, sum);
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      if (kLower) sum[r] = make_float4(-sum[r].x, -sum[r].y, -sum[r].z, -sum[r].w);
      *reinterpret_cast<float4*>(out + (i + r) * out_pitch + j) = sum[r];
    }
  }
  template <bool kDiagonal>
  static __device__ __forceinline__ void AddTile(const float* left, int left_pitch,
                                                 const float* right, int right_pitch, int i, int j,
                                                 int m, float4 (&sum)[4]) {
    float l[4][4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const float4 x = *reinterpret_cast<const float4*>(left + (i + r) * left_pitch + m);
      l[r][0] = x.x, l[r][1] = x.y, l[r][2] = x.z, l[r][3] = x.w;
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float4 b = *reinterpret_cast<const float4*>(right + (m + k) * right_pitch + j);
#pragma unroll
      for (int r = kDiagonal ? k : 0; r < 4; ++r) {
        sum[r].x = fmaf(l[r][k], b.x, sum[r].x);
        sum[r].y = fmaf(l[r][k], b.y, sum[r].y);
        sum[r].z = fmaf(l[r][k], b.z, sum[r].z);
        sum[r].w = fmaf(l[r][k], b.w, sum[r].w);
      }
    }
  }

  // Both parts are rounded: cut ones (for free, the tensor core drops the low bits) would be
  // biased, which costs 10x on identical keys.
  static __device__ __forceinline__ void SplitTf32(float x, uint32_t& high, uint32_t& low) {
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(high) : "f"(x));
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(low) : "f"(x - __uint_as_float(high)));
  }
  static __device__ __forceinline__ void Multiply(float (&c)[4], const uint32_t (&a)[4],
                                                  const uint32_t (&b)[2]) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
  // As Tile, for rows i .. i+15 and columns j .. j+7, by one warp; begin and end multiples of 8.
  // The first product of a merge goes to the room for products, the second, negated, from there to
  // the matrix.
  template <bool kSecond>
  static __device__ __forceinline__ void TensorTile(const float* left, const float* right,
                                                    float* out, int i, int j, int begin, int end) {
    const auto of_right = [](int row, int column) {
      return kSecond ? row * kProductPitch + column : Offset(row, column);
    };
    const auto of_out = [](int row, int column) {
      return kSecond ? Offset(row, column) : row * kProductPitch + column;
    };
    const int group = int(threadIdx.x) % 32 / 4, t = int(threadIdx.x) % 4;
    // The lane's part of each address is added once: the rest is a constant or the tile's.
    const float* const a = left + Offset(i, begin) + Offset(group, t);
    const float* const b = right + of_right(begin, j) + of_right(t, group);
    // The corrections have their own accumulator: they would be lost beside hi hi.
    float sum[4] = {}, small[4] = {};
    for (int m = 0; m < end - begin; m += 8) {
      uint32_t a_high[4], a_low[4], b_high[2], b_low[2];
#pragma unroll
      for (int r = 0; r < 4; ++r)
        SplitTf32(a[m + Offset((r & 1) * 8, (r >> 1) * 4)], a_high[r], a_low[r]);
#pragma unroll
      for (int r = 0; r < 2; ++r)
        SplitTf32(b[of_right(m, 0) + of_right(r * 4, 0)], b_high[r], b_low[r]);
      Multiply(sum, a_high, b_high);
      Multiply(small, a_high, b_low);
      Multiply(small, a_low, b_high);
    }
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      sum[r] += small[r];
      if (kSecond) sum[r] = -sum[r];
    }
    float* const at = out + of_out(i, j) + of_out(group, 2 * t);
    *reinterpret_cast<float2*>(at) = make_float2(sum[0], sum[1]);
    *reinterpret_cast<float2*>(at + of_out(8, 0)) = make_float2(sum[2], sum[3]);
  }

  _TempStorage& temp_;
  int thread_;
};

}  // namespace deltanet::cuda
