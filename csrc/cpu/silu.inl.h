// SPDX-License-Identifier: Apache-2.0
//
// silu(x) = x sigmoid(x) = x / (1 + exp(-x)), and its derivative. Included inside an ISA namespace,
// after a vector type X.

// Vectors that are computed side by side, operation by operation. One alone is a chain of a dozen
// operations, and a core looks ahead over few of these: Zen 3 takes 12.5 cycles for a vector by
// itself, 11.3 with two, 9.7 with four.
constexpr int kSiluTogether = 4;

// x <- silu(x). x below kLeastSilu are taken as that: what is left of silu there is below any
// rounding.
template <class X, int kCount>
DELTANET_INLINE void silu(typename X::V (&x)[kCount]) {
  typename X::V divisor[kCount];
#pragma GCC unroll 8
  for (int i = 0; i < kCount; ++i) divisor[i] = x[i] = X::at_least(x[i], X::kLeastSilu);
  X::one_plus_exp(divisor);
#pragma GCC unroll 8
  for (int i = 0; i < kCount; ++i) x[i] = X::div(x[i], divisor[i]);
}

// visit(c, x) for vectors of [0, padded), kSiluTogether at a time where there are as many: x are
// those of silu of `from`.
template <class X, class Visit>
DELTANET_INLINE void for_each_silu(const typename X::Real* from, int padded, const Visit& visit) {
  constexpr int W = X::kLanes;
  int c = 0;
  for (; c + kSiluTogether * W <= padded; c += kSiluTogether * W) {
    typename X::V x[kSiluTogether];
#pragma GCC unroll 8
    for (int i = 0; i < kSiluTogether; ++i) x[i] = X::load(from + c + i * W);
    silu<X>(x);
#pragma GCC unroll 8
    for (int i = 0; i < kSiluTogether; ++i) visit(c + i * W, x[i]);
  }
  for (; c < padded; c += W) {
    typename X::V x[1] = {X::load(from + c)};
    silu<X>(x);
    visit(c, x[0]);
  }
}

// value = x s and slope = s (1 + x (1 - s)) with s = sigmoid(x)
template <class X>
DELTANET_INLINE void silu_and_slope(typename X::V x, typename X::V* value, typename X::V* slope) {
  const auto one = X::set1(1), bounded = X::at_least(x, X::kLeastSilu);
  typename X::V divisor[1] = {bounded};
  X::one_plus_exp(divisor);
  const auto s = X::div(one, divisor[0]);
  *value = X::mul(bounded, s);
  *slope = X::mul(s, X::fma(bounded, X::sub(one, s), one));
}
