// SPDX-License-Identifier: Apache-2.0
//
// The vector type of AVX-512 with BF16: products of bf16 pairs in one instruction.
// Included inside an ISA namespace, after vec_avx512.inl.h; see isa_avx512_bf16.cpp.

// VDPBF16PS takes subnormal inputs as zero and flushes subnormal results, unlike Avx512's own.
struct Avx512Bf16 : Avx512 {
  static DELTANET_INLINE V bf16_pair(V even, V odd) {
    const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh(odd, even);  // even is the lower half
    const __m512i order =
        _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                         21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_castsi512_ps(_mm512_permutexvar_epi16(order, halves));
  }
  static DELTANET_INLINE V dot2(V a, V b, V c) {
    return _mm512_dpbf16_ps(c, (__m512bh)_mm512_castps_si512(a), (__m512bh)_mm512_castps_si512(b));
  }
};
