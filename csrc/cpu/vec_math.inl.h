// SPDX-License-Identifier: Apache-2.0
//
// Functions of float vectors, once for every vector type. Included inside an ISA namespace.

// exp(hi + lo) for |lo| far below |hi| or below 1, relative error about 1e-7. Full range: overflow
// gives infinity, a NaN stays a NaN, and results that would not be normal floats are 0 (denormals
// in the state would only slow it down).
template <class X>
DELTANET_INLINE typename X::V exp_of_sum_by_polynomial(typename X::V hi, typename X::V lo) {
  constexpr float kSmallestNormal = -87.33654f;                             // log(2^-126)
  const auto bounded = X::at_most(X::at_least(hi, kSmallestNormal), 89.f);  // exp(89) is infinite
  const auto n = X::round(X::mul(bounded, X::set1(1.44269504f)));
  // ln 2 in two parts: n * 0.693145752 is exact.
  auto r = X::fnma(n, X::set1(0.693145752f), bounded);
  r = X::add(X::fnma(n, X::set1(1.42860677e-6f), r), lo);
  auto p = X::set1(1.f / 5040);
  p = X::fma(p, r, X::set1(1.f / 720));
  p = X::fma(p, r, X::set1(1.f / 120));
  p = X::fma(p, r, X::set1(1.f / 24));
  p = X::fma(p, r, X::set1(1.f / 6));
  p = X::fma(p, r, X::set1(0.5f));
  p = X::fma(p, r, X::set1(1.f));
  p = X::fma(p, r, X::set1(1.f));
  return X::zero_where_less(X::scale_by_power_of_two(p, n), hi, kSmallestNormal);
}

// x <- 1 + exp(-x) for x >= X::kLeastSilu, relative error about 1e-7.
template <class X, int kCount>
DELTANET_INLINE void one_plus_exp_by_polynomial(typename X::V (&x)[kCount]) {
  using V = typename X::V;
  // Adding it rounds to an integer, which then stands in the low bits.
  constexpr float kRounds = 12582912.f;  // 1.5 * 2^23
  const V log2_e = X::set1(1.44269504f), rounds = X::set1(kRounds);
  V shifted[kCount], n[kCount], r[kCount];
#pragma GCC unroll 8
  for (V& e : x) e = X::at_most(e, -X::kLeastSilu);  // exp(-87) is nothing beside 1
#pragma GCC unroll 8
  for (int i = 0; i < kCount; ++i) shifted[i] = X::fnma(x[i], log2_e, rounds);
#pragma GCC unroll 8
  for (int i = 0; i < kCount; ++i) n[i] = X::sub(shifted[i], rounds);
  // -r of exp(-x) = 2^n exp(r)
#pragma GCC unroll 8
  for (int i = 0; i < kCount; ++i) r[i] = X::fma(n[i], X::set1(0.693145752f), x[i]);
#pragma GCC unroll 8
  for (int i = 0; i < kCount; ++i) r[i] = X::fma(n[i], X::set1(1.42860677e-6f), r[i]);
  // exp(-r) to 4e-9 for |r| <= ln 2 / 2: the best polynomial of this degree that begins with 1 - r.
  constexpr float kPolynomial[] = {
      1.38145395e-3f, -8.36874545e-3f, 4.16683890e-2f, -1.66665211e-1f, 0.49999994f, -1.f, 1.f};
#pragma GCC unroll 8
  for (V& e : x) e = X::set1(kPolynomial[0]);
#pragma GCC unroll 8
  for (int term = 1; term < 7; ++term)
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) x[i] = X::fma(x[i], r[i], X::set1(kPolynomial[term]));
#pragma GCC unroll 8
  for (int i = 0; i < kCount; ++i)
    x[i] = X::add(X::set1(1.f), X::add_to_exponent(x[i], shifted[i]));
}
