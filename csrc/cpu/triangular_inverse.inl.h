// SPDX-License-Identifier: Apache-2.0
//
// T = (I + L)^-1 of a unit lower triangular matrix: docs/algorithm.md, equation (4).
//
//   T_i = e_i - sum_{j < i} L_ij T_j        forward substitution, row by row
//
// Never by powers of L: where keys repeat they reach 1e18 and cancel.
//
// Included inside an ISA namespace, after a vector type X.

template <class X>
struct TriangularInverse {
  using Real = typename X::Real;
  using V = typename X::V;
  static constexpr int W = X::kLanes;
  static constexpr int kWidth = X::kTileWidths[0];  // vectors of columns at a time
  static constexpr int kColumns = kWidth * W;

  static size_t scratch_bytes(int size) {
    return (size_t(size) * size + size_t(size) * round_up(size, kColumns) + kScratchAlignment) *
           sizeof(Real);
  }

  static void run(const TriangularInverseParams& p, int64_t index, void* scratch) {
    const int n = p.size, ld = round_up(n, kColumns);
    ScratchCarver carver{static_cast<char*>(scratch)};
    Real* T = carver.take<Real>(size_t(n) * ld);
    Real* L = carver.take<Real>(size_t(n) * n);
    const int64_t offset = index * n * n * size_of(p.dtype);
    const ConstMatrix from{static_cast<const char*>(p.lower) + offset, p.dtype, n, 1};
    pack_rows<X>(from, n, n, L, n, n, n);

    std::memset(T, 0, sizeof(Real) * n * ld);
    for (int i = 0; i < n; ++i) {
      T[i * ld + i] = 1;
      for (int c = 0; c < i; c += kColumns) {
        V row[kWidth];
#pragma GCC unroll 8
        for (int w = 0; w < kWidth; ++w) row[w] = X::load(T + i * ld + c + w * W);
        for (int j = c; j < i; ++j) {  // rows above c are zero in these columns
          const V l = X::set1(L[i * n + j]);
#pragma GCC unroll 8
          for (int w = 0; w < kWidth; ++w)
            row[w] = X::fnma(l, X::load(T + j * ld + c + w * W), row[w]);
        }
#pragma GCC unroll 8
        for (int w = 0; w < kWidth; ++w) X::store(T + i * ld + c + w * W, row[w]);
      }
    }
    store_rows<X>(T, ld, Matrix{static_cast<char*>(p.inverse) + offset, p.dtype, n, 1}, n, n);
  }
};
