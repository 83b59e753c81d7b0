// SPDX-License-Identifier: Apache-2.0
//
// silu(x) = x sigmoid(x) = x / (1 + exp(-x)), and its derivative. Included inside an ISA namespace,
// after a vector type X.

// x below kLeastSilu are taken as that: what is left of silu there is below any rounding.
template <class X>
DELTANET_INLINE typename X::V silu(typename X::V x) {
  const auto bounded = X::at_least(x, X::kLeastSilu);
  return X::div(bounded, X::one_plus_exp(bounded));
}

// value = x s and slope = s (1 + x (1 - s)) with s = sigmoid(x)
template <class X>
DELTANET_INLINE void silu_and_slope(typename X::V x, typename X::V* value, typename X::V* slope) {
  const auto one = X::set1(1), bounded = X::at_least(x, X::kLeastSilu);
  const auto s = X::div(one, X::one_plus_exp(bounded));
  *value = X::mul(bounded, s);
  *slope = X::mul(s, X::fma(bounded, X::sub(one, s), one));
}
