// SPDX-License-Identifier: Apache-2.0
//
// The vector type of AVX-512 (F, BW, DQ, VL): 16 floats, 32 registers.
// Included inside an ISA namespace; see isa_avx512.cpp.

struct Avx512 {
  using Real = float;
  using V = __m512;
  static constexpr int kLanes = 16;

  // Register tiles, rows x vectors (chunk_forward.inl.h): sixteen accumulators each. In the state
  // update 16 are better than 24: with only kChunk steps per tile the next tile must start before
  // this one has drained, and both must fit the reorder buffer (259 against 230 GFLOP/s on Zen 5).
  static constexpr int kChunk = 16;
  static constexpr int kTileWidths[] = {4, 2, 1};
  static constexpr int rows_for(int width) { return 16 / width; }
  static constexpr int update_rows_for(int width) { return 16 / width; }
  static constexpr int kDotRows = 4;     // 4 x 4 dot products at a time
  static constexpr int kStateRows = 8;   // rows of the state at a time in the recurrent kernel
  static constexpr int kRowVectors = 8;  // of a state's row, whose sums registers hold there

  static DELTANET_INLINE V zero() { return _mm512_setzero_ps(); }
  static DELTANET_INLINE V set1(float x) { return _mm512_set1_ps(x); }
  static DELTANET_INLINE V load(const float* p) { return _mm512_loadu_ps(p); }
  static DELTANET_INLINE void store(float* p, V x) { _mm512_storeu_ps(p, x); }
  static DELTANET_INLINE __mmask16 first_lanes(int n) { return __mmask16((1u << n) - 1u); }
  static DELTANET_INLINE V load_partial(const float* p, int n) {
    return _mm512_maskz_loadu_ps(first_lanes(n), p);
  }
  static DELTANET_INLINE void store_partial(float* p, V x, int n) {
    _mm512_mask_storeu_ps(p, first_lanes(n), x);
  }
  // Stores past the caches, to an address aligned to the vector; others see them after
  // finish_streams.
  static DELTANET_INLINE void stream(float* p, V x) { _mm512_stream_ps(p, x); }
  static DELTANET_INLINE void finish_streams() { _mm_sfence(); }
  static DELTANET_INLINE V add(V a, V b) { return _mm512_add_ps(a, b); }
  static DELTANET_INLINE V sub(V a, V b) { return _mm512_sub_ps(a, b); }
  static DELTANET_INLINE V mul(V a, V b) { return _mm512_mul_ps(a, b); }
  static DELTANET_INLINE V div(V a, V b) { return _mm512_div_ps(a, b); }
  static DELTANET_INLINE V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
  static DELTANET_INLINE V fnma(V a, V b, V c) { return _mm512_fnmadd_ps(a, b, c); }
  static DELTANET_INLINE float sum(V a) { return _mm512_reduce_add_ps(a); }

  // Pieces of exp (vec_math.inl.h). max and min keep a NaN in x.
  static DELTANET_INLINE V at_least(V x, float bound) {
    return _mm512_max_ps(_mm512_set1_ps(bound), x);
  }
  static DELTANET_INLINE V at_most(V x, float bound) {
    return _mm512_min_ps(_mm512_set1_ps(bound), x);
  }
  static DELTANET_INLINE V round(V x) { return _mm512_roundscale_ps(x, 0); }
  static DELTANET_INLINE V zero_where_less(V result, V x, float bound) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(bound), _CMP_NLT_UQ), result);
  }
  static DELTANET_INLINE V scale_by_power_of_two(V x, V n) { return _mm512_scalef_ps(x, n); }
  static DELTANET_INLINE V exp_of_sum(V hi, V lo) {
    return exp_of_sum_by_polynomial<Avx512>(hi, lo);
  }

  static constexpr float kLeastSilu = -87;  // exp(87) is still finite
  // x * 2^n, where n stands in the low bits of y (vec_math.inl.h)
  static DELTANET_INLINE V add_to_exponent(V x, V y) {
    const __m512i n = _mm512_slli_epi32(_mm512_castps_si512(y), 23);
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(x), n));
  }
  template <int kCount>
  static DELTANET_INLINE void one_plus_exp(V (&x)[kCount]) {
    one_plus_exp_by_polynomial<Avx512>(x);
  }

  static DELTANET_INLINE V load_bf16(const uint16_t* p) {
    const __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
  }
  static DELTANET_INLINE V load_f16(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  // The upper halves are bf16; the lower ones are left over.
  static DELTANET_INLINE __m512i round_to_bf16(V x) {
    const __m512i u = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    const __m512i r = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    return _mm512_mask_or_epi32(r, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), u,
                                _mm512_set1_epi32(0x400000));
  }
  static DELTANET_INLINE void store_bf16(uint16_t* p, V x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_cvtepi32_epi16(_mm512_srli_epi32(round_to_bf16(x), 16)));
  }
  static DELTANET_INLINE void store_f16(uint16_t* p, V x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }

  // Two bf16 per lane: even in the low half, odd in the high one. Rounded to nearest, ties to even.
  static DELTANET_INLINE V bf16_pair(V even, V odd) {
    const __m512i low = _mm512_srli_epi32(round_to_bf16(even), 16);
    return _mm512_castsi512_ps(_mm512_mask_mov_epi16(low, 0xaaaaaaaau, round_to_bf16(odd)));
  }
  // c + a.even b.even + a.odd b.odd
  static DELTANET_INLINE V dot2(V a, V b, V c) {
    c = fma(even_of(a), even_of(b), c);
    return fma(odd_of(a), odd_of(b), c);
  }
  static DELTANET_INLINE V even_of(V pair) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(pair), 16));
  }
  static DELTANET_INLINE V odd_of(V pair) {
    return _mm512_castsi512_ps(
        _mm512_and_si512(_mm512_castps_si512(pair), _mm512_set1_epi32(int(0xffff0000u))));
  }

  // out[i * ld + j] = sum of the lanes of c[4 i + j], for 4 rows of 4: a transpose that adds on the
  // way
  static DELTANET_INLINE void store_sums(float* out, int ld, const V (&c)[16]) {
    V u[4];  // u[i]: in every 128-bit part one partial sum for each of the 4 columns of row i
    for (int i = 0; i < 4; ++i) {
      const V a = add(_mm512_unpacklo_ps(c[4 * i], c[4 * i + 1]),
                      _mm512_unpackhi_ps(c[4 * i], c[4 * i + 1]));
      const V b = add(_mm512_unpacklo_ps(c[4 * i + 2], c[4 * i + 3]),
                      _mm512_unpackhi_ps(c[4 * i + 2], c[4 * i + 3]));
      const __m512d x = _mm512_castps_pd(a), y = _mm512_castps_pd(b);
      u[i] = add(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)),
                 _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
    }
    const V a = add(_mm512_shuffle_f32x4(u[0], u[1], 0x88), _mm512_shuffle_f32x4(u[0], u[1], 0xdd));
    const V b = add(_mm512_shuffle_f32x4(u[2], u[3], 0x88), _mm512_shuffle_f32x4(u[2], u[3], 0xdd));
    const V r = add(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
    _mm_storeu_ps(out, _mm512_castps512_ps128(r));
    _mm_storeu_ps(out + ld, _mm512_extractf32x4_ps(r, 1));
    _mm_storeu_ps(out + 2 * ld, _mm512_extractf32x4_ps(r, 2));
    _mm_storeu_ps(out + 3 * ld, _mm512_extractf32x4_ps(r, 3));
  }

  // c[i] lane j <-> c[j] lane i
  static DELTANET_INLINE void transpose(V (&c)[16]) {
    V a[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i += 4) {  // 4 x 4 blocks in each 128-bit quarter
      const V x = _mm512_unpacklo_ps(c[i], c[i + 1]), y = _mm512_unpackhi_ps(c[i], c[i + 1]);
      const V z = _mm512_unpacklo_ps(c[i + 2], c[i + 3]),
              w = _mm512_unpackhi_ps(c[i + 2], c[i + 3]);
      a[i] = _mm512_shuffle_ps(x, z, 0x44);
      a[i + 1] = _mm512_shuffle_ps(x, z, 0xee);
      a[i + 2] = _mm512_shuffle_ps(y, w, 0x44);
      a[i + 3] = _mm512_shuffle_ps(y, w, 0xee);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4;
         ++i) {  // quarter q of a[i], a[i + 4], a[i + 8], a[i + 12] makes row i + 4 q
      const V x = _mm512_shuffle_f32x4(a[i], a[i + 4], 0x88),
              y = _mm512_shuffle_f32x4(a[i + 8], a[i + 12], 0x88);
      const V z = _mm512_shuffle_f32x4(a[i], a[i + 4], 0xdd),
              w = _mm512_shuffle_f32x4(a[i + 8], a[i + 12], 0xdd);
      c[i] = _mm512_shuffle_f32x4(x, y, 0x88);
      c[i + 8] = _mm512_shuffle_f32x4(x, y, 0xdd);
      c[i + 4] = _mm512_shuffle_f32x4(z, w, 0x88);
      c[i + 12] = _mm512_shuffle_f32x4(z, w, 0xdd);
    }
  }
};
