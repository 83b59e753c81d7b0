// SPDX-License-Identifier: Apache-2.0
//
// The vector type of AVX2 + FMA + F16C: 8 floats, 16 registers.
// Included inside an ISA namespace; see isa_avx2.cpp.

struct Avx2 {
  using Real = float;
  using V = __m256;
  static constexpr int kLanes = 8;

  // Register tiles, rows x vectors (chunk_forward.inl.h). 6 x 2: twelve accumulators hide the
  // latency of two FMAs per cycle and leave four registers for operands. Chunks of 24 because 6
  // must divide the chunk.
  static constexpr int kChunk = 24;
  static constexpr int kTileWidths[] = {2, 1};
  static constexpr int rows_for(int width) { return width == 2 ? 6 : 12; }
  static constexpr int update_rows_for(int width) { return width == 2 ? 6 : 12; }
  static constexpr int kDotRows = 2;    // 2 x 4 dot products at a time
  static constexpr int kStateRows = 4;  // rows of the state at a time in the recurrent kernel
  static constexpr int kRowVectors = 0;

  static DELTANET_INLINE V zero() { return _mm256_setzero_ps(); }
  static DELTANET_INLINE V set1(float x) { return _mm256_set1_ps(x); }
  static DELTANET_INLINE V load(const float* p) { return _mm256_loadu_ps(p); }
  static DELTANET_INLINE void store(float* p, V x) { _mm256_storeu_ps(p, x); }
  static DELTANET_INLINE __m256i first_lanes(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  static DELTANET_INLINE V load_partial(const float* p, int n) {
    return _mm256_maskload_ps(p, first_lanes(n));
  }
  static DELTANET_INLINE void store_partial(float* p, V x, int n) {
    _mm256_maskstore_ps(p, first_lanes(n), x);
  }
  // Stores past the caches, to an address aligned to the vector; others see them after
  // finish_streams.
  static DELTANET_INLINE void stream(float* p, V x) { _mm256_stream_ps(p, x); }
  static DELTANET_INLINE void finish_streams() { _mm_sfence(); }
  static DELTANET_INLINE V add(V a, V b) { return _mm256_add_ps(a, b); }
  static DELTANET_INLINE V sub(V a, V b) { return _mm256_sub_ps(a, b); }
  static DELTANET_INLINE V mul(V a, V b) { return _mm256_mul_ps(a, b); }
  static DELTANET_INLINE V div(V a, V b) { return _mm256_div_ps(a, b); }
  static DELTANET_INLINE V fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
  static DELTANET_INLINE V fnma(V a, V b, V c) { return _mm256_fnmadd_ps(a, b, c); }
  static DELTANET_INLINE float sum(V a) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps(x, x, 1)));
  }

  // Pieces of exp (vec_math.inl.h). max and min keep a NaN in x.
  static DELTANET_INLINE V at_least(V x, float bound) {
    return _mm256_max_ps(_mm256_set1_ps(bound), x);
  }
  static DELTANET_INLINE V at_most(V x, float bound) {
    return _mm256_min_ps(_mm256_set1_ps(bound), x);
  }
  static DELTANET_INLINE V round(V x) {
    return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  static DELTANET_INLINE V zero_where_less(V result, V x, float bound) {
    return _mm256_and_ps(result, _mm256_cmp_ps(x, _mm256_set1_ps(bound), _CMP_NLT_UQ));
  }
  // x * 2^n for |n| <= 252, in two steps because 2^n alone may not be a float
  static DELTANET_INLINE V scale_by_power_of_two(V x, V n) {
    const __m256i whole = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(whole, 1);
    const __m256i bias = _mm256_set1_epi32(127);
    const __m256i a = _mm256_slli_epi32(_mm256_add_epi32(half, bias), 23);
    const __m256i b = _mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(whole, half), bias), 23);
    return _mm256_mul_ps(_mm256_mul_ps(x, _mm256_castsi256_ps(a)), _mm256_castsi256_ps(b));
  }
  static DELTANET_INLINE V exp_of_sum(V hi, V lo) { return exp_of_sum_by_polynomial<Avx2>(hi, lo); }

  static constexpr float kLeastSilu = -87;  // exp(87) is still finite
  // x * 2^n, where n stands in the low bits of y (vec_math.inl.h)
  static DELTANET_INLINE V add_to_exponent(V x, V y) {
    const __m256i n = _mm256_slli_epi32(_mm256_castps_si256(y), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), n));
  }
  template <int kCount>
  static DELTANET_INLINE void one_plus_exp(V (&x)[kCount]) {
    one_plus_exp_by_polynomial<Avx2>(x);
  }

  static DELTANET_INLINE V load_bf16(const uint16_t* p) {
    const __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
  }
  static DELTANET_INLINE V load_f16(const uint16_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  // The upper halves are bf16; the lower ones are left over.
  static DELTANET_INLINE __m256i round_to_bf16(V x) {
    const __m256i u = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    const __m256i r = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i quiet = _mm256_or_si256(u, _mm256_set1_epi32(0x400000));
    return _mm256_castps_si256(_mm256_blendv_ps(_mm256_castsi256_ps(r), _mm256_castsi256_ps(quiet),
                                                _mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
  }
  static DELTANET_INLINE void store_bf16(uint16_t* p, V x) {
    __m256i r = _mm256_srli_epi32(round_to_bf16(x), 16);
    r = _mm256_permute4x64_epi64(_mm256_packus_epi32(r, r), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(r));
  }
  static DELTANET_INLINE void store_f16(uint16_t* p, V x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                     _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }

  // Two bf16 per lane: even in the low half, odd in the high one. Rounded to nearest, ties to even.
  static DELTANET_INLINE V bf16_pair(V even, V odd) {
    const __m256i high = _mm256_set1_epi32(int(0xffff0000u));
    return _mm256_castsi256_ps(_mm256_or_si256(_mm256_srli_epi32(round_to_bf16(even), 16),
                                               _mm256_and_si256(round_to_bf16(odd), high)));
  }
  // c + a.even b.even + a.odd b.odd
  static DELTANET_INLINE V dot2(V a, V b, V c) {
    const V high = _mm256_castsi256_ps(_mm256_set1_epi32(int(0xffff0000u)));
    c = fma(even_of(a), even_of(b), c);
    return fma(_mm256_and_ps(a, high), _mm256_and_ps(b, high), c);
  }
  static DELTANET_INLINE V even_of(V pair) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(pair), 16));
  }

  // out[i * ld + j] = sum of the lanes of c[4 i + j], for 2 rows of 4
  static DELTANET_INLINE void store_sums(float* out, int ld, const V (&c)[8]) {
    for (int i = 0; i < 2; ++i) {
      const V a = _mm256_hadd_ps(_mm256_hadd_ps(c[4 * i], c[4 * i + 1]),
                                 _mm256_hadd_ps(c[4 * i + 2], c[4 * i + 3]));
      _mm_storeu_ps(out + i * ld,
                    _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1)));
    }
  }

  // c[i] lane j <-> c[j] lane i
  static DELTANET_INLINE void transpose(V (&c)[8]) {
    V a[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i += 4) {  // 4 x 4 blocks in each 128-bit half
      const V x = _mm256_unpacklo_ps(c[i], c[i + 1]), y = _mm256_unpackhi_ps(c[i], c[i + 1]);
      const V z = _mm256_unpacklo_ps(c[i + 2], c[i + 3]),
              w = _mm256_unpackhi_ps(c[i + 2], c[i + 3]);
      a[i] = _mm256_shuffle_ps(x, z, 0x44);
      a[i + 1] = _mm256_shuffle_ps(x, z, 0xee);
      a[i + 2] = _mm256_shuffle_ps(y, w, 0x44);
      a[i + 3] = _mm256_shuffle_ps(y, w, 0xee);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      c[i] = _mm256_permute2f128_ps(a[i], a[i + 4], 0x20);
      c[i + 4] = _mm256_permute2f128_ps(a[i], a[i + 4], 0x31);
    }
  }
};
