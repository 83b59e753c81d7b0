// SPDX-License-Identifier: Apache-2.0
//
// The vector type of one lane: plain C++, for CPUs without a faster kernel and for fp64.
// Included inside an ISA namespace; see isa_scalar.cpp.

template <class RealType>
struct Scalar {
  using Real = RealType;
  using V = Real;
  static constexpr int kLanes = 1;

  // Register tiles (chunk_forward.inl.h). A row of a tile is many neighboring values, so that the
  // compiler may use whatever vectors the baseline has (SSE2, NEON).
  static constexpr int kChunk = 16;
  static constexpr int kTileWidths[] = {32 / int(sizeof(Real)), 1};
  static constexpr int rows_for(int) { return 2; }
  static constexpr int update_rows_for(int) { return 2; }
  static constexpr int kDotRows = 2;
  static constexpr int kStateRows = 4;  // rows of the state at a time in the recurrent kernel
  static constexpr int kRowVectors = 0;

  static DELTANET_INLINE V zero() { return 0; }
  static DELTANET_INLINE V set1(Real x) { return x; }
  static DELTANET_INLINE V load(const Real* p) { return *p; }
  static DELTANET_INLINE V load_partial(const Real* p, int) { return *p; }
  static DELTANET_INLINE void store(Real* p, V x) { *p = x; }
  static DELTANET_INLINE void store_partial(Real* p, V x, int) { *p = x; }
  static DELTANET_INLINE void stream(Real* p, V x) { *p = x; }
  static DELTANET_INLINE void finish_streams() {}
  static DELTANET_INLINE V add(V a, V b) { return a + b; }
  static DELTANET_INLINE V sub(V a, V b) { return a - b; }
  static DELTANET_INLINE V mul(V a, V b) { return a * b; }
  static DELTANET_INLINE V div(V a, V b) { return a / b; }
  static DELTANET_INLINE V fma(V a, V b, V c) { return a * b + c; }
  static DELTANET_INLINE V fnma(V a, V b, V c) { return c - a * b; }
  static DELTANET_INLINE Real sum(V a) { return a; }
  static DELTANET_INLINE V exp_of_sum(V hi, V lo) {
    using Wider = typename WiderThan<Real>::type;
    return Real(std::exp(Wider(hi) + Wider(lo)));
  }

  static constexpr Real kLeastSilu = sizeof(Real) == 8 ? -700 : -87;  // exp of it is still finite
  static DELTANET_INLINE V at_least(V x, Real bound) { return x < bound ? bound : x; }
  template <int kCount>
  static DELTANET_INLINE void one_plus_exp(V (&x)[kCount]) {
    for (V& e : x) e = 1 + std::exp(-e);
  }

  static DELTANET_INLINE V load_bf16(const uint16_t* p) { return Real(bf16_to_float(*p)); }
  static DELTANET_INLINE V load_f16(const uint16_t* p) { return Real(f16_to_float(*p)); }
  static DELTANET_INLINE void store_bf16(uint16_t* p, V x) { *p = float_to_bf16(float(x)); }
  static DELTANET_INLINE void store_f16(uint16_t* p, V x) { *p = float_to_f16(float(x)); }

  // Two bf16 per float: even in the low half, odd in the high one. Rounded to nearest, ties to
  // even.
  static DELTANET_INLINE V bf16_pair(V even, V odd) {
    return bits_to_float(uint32_t(float_to_bf16(even)) | uint32_t(float_to_bf16(odd)) << 16);
  }
  // c + a.even b.even + a.odd b.odd
  static DELTANET_INLINE V dot2(V a, V b, V c) {
    const uint32_t x = float_to_bits(a), y = float_to_bits(b);
    c = fma(bits_to_float(x << 16), bits_to_float(y << 16), c);
    return fma(bits_to_float(x & 0xffff0000u), bits_to_float(y & 0xffff0000u), c);
  }

  // out[i * ld + j] = sum of the lanes of c[4 i + j], for kDotRows rows of 4
  static DELTANET_INLINE void store_sums(Real* out, int ld, const V (&c)[4 * kDotRows]) {
    for (int i = 0; i < kDotRows; ++i)
      for (int j = 0; j < 4; ++j) out[i * ld + j] = c[4 * i + j];
  }
};
