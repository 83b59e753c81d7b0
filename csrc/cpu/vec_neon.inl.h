// SPDX-License-Identifier: Apache-2.0
//
// The vector type of arm64's Advanced SIMD (NEON): 4 floats, 32 registers.
// Included inside an ISA namespace; see isa_neon.cpp.

struct Neon {
  using Real = float;
  using V = float32x4_t;
  static constexpr int kLanes = 4;

  // Register tiles, rows x vectors (chunk_forward.inl.h): sixteen accumulators, which is what four
  // units with a latency of four cycles need. Not timed on real hardware yet.
  static constexpr int kChunk = 16;
  static constexpr int kTileWidths[] = {4, 2, 1};
  static constexpr int rows_for(int width) { return 16 / width; }
  static constexpr int update_rows_for(int width) { return 16 / width; }
  static constexpr int kDotRows = 4;    // 4 x 4 dot products at a time
  static constexpr int kStateRows = 8;  // rows of the state at a time in the recurrent kernel
  static constexpr int kRowVectors = 0;

  static DELTANET_INLINE V zero() { return vdupq_n_f32(0); }
  static DELTANET_INLINE V set1(float x) { return vdupq_n_f32(x); }
  static DELTANET_INLINE V load(const float* p) { return vld1q_f32(p); }
  static DELTANET_INLINE void store(float* p, V x) { vst1q_f32(p, x); }
  // NEON has no masks: the first n < 4 lanes one or two at a time.
  static DELTANET_INLINE V load_partial(const float* p, int n) {
    V x = zero();
    if (n & 2) x = vcombine_f32(vld1_f32(p), vdup_n_f32(0));
    if (n == 1) x = vld1q_lane_f32(p, x, 0);
    if (n == 3) x = vld1q_lane_f32(p + 2, x, 2);
    return x;
  }
  static DELTANET_INLINE void store_partial(float* p, V x, int n) {
    if (n & 2) vst1_f32(p, vget_low_f32(x));
    if (n == 1) vst1q_lane_f32(p, x, 0);
    if (n == 3) vst1q_lane_f32(p + 2, x, 2);
  }
  // Stores past the caches exist for pairs only, and without an intrinsic; CPUs recognize streams.
  static DELTANET_INLINE void stream(float* p, V x) { store(p, x); }
  static DELTANET_INLINE void finish_streams() {}
  static DELTANET_INLINE V add(V a, V b) { return vaddq_f32(a, b); }
  static DELTANET_INLINE V sub(V a, V b) { return vsubq_f32(a, b); }
  static DELTANET_INLINE V mul(V a, V b) { return vmulq_f32(a, b); }
  static DELTANET_INLINE V fma(V a, V b, V c) { return vfmaq_f32(c, a, b); }
  static DELTANET_INLINE V fnma(V a, V b, V c) { return vfmsq_f32(c, a, b); }
  static DELTANET_INLINE float sum(V a) { return vaddvq_f32(a); }

  // Pieces of exp (vec_math.inl.h). max and min keep a NaN in x.
  static DELTANET_INLINE V at_least(V x, float bound) { return vmaxq_f32(x, set1(bound)); }
  static DELTANET_INLINE V at_most(V x, float bound) { return vminq_f32(x, set1(bound)); }
  static DELTANET_INLINE V round(V x) { return vrndnq_f32(x); }
  static DELTANET_INLINE V zero_where_less(V result, V x, float bound) {
    return vreinterpretq_f32_u32(
        vbicq_u32(vreinterpretq_u32_f32(result), vcltq_f32(x, set1(bound))));
  }
  // x * 2^n for |n| <= 252, in two steps because 2^n alone may not be a float
  static DELTANET_INLINE V scale_by_power_of_two(V x, V n) {
    const int32x4_t whole = vcvtnq_s32_f32(n), half = vshrq_n_s32(whole, 1);
    const int32x4_t bias = vdupq_n_s32(127);
    const int32x4_t a = vshlq_n_s32(vaddq_s32(half, bias), 23);
    const int32x4_t b = vshlq_n_s32(vaddq_s32(vsubq_s32(whole, half), bias), 23);
    return mul(mul(x, vreinterpretq_f32_s32(a)), vreinterpretq_f32_s32(b));
  }
  static DELTANET_INLINE V exp_of_sum(V hi, V lo) { return exp_of_sum_by_polynomial<Neon>(hi, lo); }

  static DELTANET_INLINE V div(V a, V b) { return vdivq_f32(a, b); }
  static constexpr float kLeastSilu = -87;  // exp(87) is still finite
  // x * 2^n, where n stands in the low bits of y (vec_math.inl.h)
  static DELTANET_INLINE V add_to_exponent(V x, V y) {
    const int32x4_t n = vshlq_n_s32(vreinterpretq_s32_f32(y), 23);
    return vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(x), n));
  }
  template <int kCount>
  static DELTANET_INLINE void one_plus_exp(V (&x)[kCount]) {
    one_plus_exp_by_polynomial<Neon>(x);
  }

  static DELTANET_INLINE V load_bf16(const uint16_t* p) {
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16));
  }
  static DELTANET_INLINE V load_f16(const uint16_t* p) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
  }
  // The upper halves are bf16; the lower ones are left over.
  static DELTANET_INLINE uint32x4_t round_to_bf16(V x) {
    const uint32x4_t u = vreinterpretq_u32_f32(x);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(u, 16), vdupq_n_u32(1));
    const uint32x4_t rounded = vaddq_u32(u, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    const uint32x4_t quiet = vorrq_u32(u, vdupq_n_u32(0x400000));
    return vbslq_u32(vceqq_f32(x, x), rounded, quiet);
  }
  static DELTANET_INLINE void store_bf16(uint16_t* p, V x) {
    vst1_u16(p, vshrn_n_u32(round_to_bf16(x), 16));
  }
  static DELTANET_INLINE void store_f16(uint16_t* p, V x) {
    vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(x)));
  }

  // Two bf16 per lane: even in the low half, odd in the high one. Rounded to nearest, ties to even.
  static DELTANET_INLINE V bf16_pair(V even, V odd) {
    return vreinterpretq_f32_u32(vsriq_n_u32(round_to_bf16(odd), round_to_bf16(even), 16));
  }
  // c + a.even b.even + a.odd b.odd. (CPUs with BF16 have BFDOT for it, which no CPU here could
  // run.)
  static DELTANET_INLINE V dot2(V a, V b, V c) {
    c = fma(even_of(a), even_of(b), c);
    return fma(odd_of(a), odd_of(b), c);
  }
  static DELTANET_INLINE V even_of(V pair) {
    return vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_f32(pair), 16));
  }
  static DELTANET_INLINE V odd_of(V pair) {
    return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(pair), vdupq_n_u32(0xffff0000u)));
  }

  // out[i * ld + j] = sum of the lanes of c[4 i + j], for 4 rows of 4
  static DELTANET_INLINE void store_sums(float* out, int ld, const V (&c)[16]) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
      store(out + i * ld,
            vpaddq_f32(vpaddq_f32(c[4 * i], c[4 * i + 1]), vpaddq_f32(c[4 * i + 2], c[4 * i + 3])));
  }

  // c[i] lane j <-> c[j] lane i
  static DELTANET_INLINE void transpose(V (&c)[4]) {
    const float64x2_t a = vreinterpretq_f64_f32(vtrn1q_f32(c[0], c[1]));  // lanes 0 and 2
    const float64x2_t b = vreinterpretq_f64_f32(vtrn2q_f32(c[0], c[1]));  // lanes 1 and 3
    const float64x2_t d = vreinterpretq_f64_f32(vtrn1q_f32(c[2], c[3]));
    const float64x2_t e = vreinterpretq_f64_f32(vtrn2q_f32(c[2], c[3]));
    c[0] = vreinterpretq_f32_f64(vtrn1q_f64(a, d));
    c[1] = vreinterpretq_f32_f64(vtrn1q_f64(b, e));
    c[2] = vreinterpretq_f32_f64(vtrn2q_f64(a, d));
    c[3] = vreinterpretq_f32_f64(vtrn2q_f64(b, e));
  }
};
