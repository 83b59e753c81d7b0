// SPDX-License-Identifier: Apache-2.0
//
// silu(x) = x sigmoid(x) = x / (1 + exp(-x)), and its derivative. Included inside an ISA namespace,
// after a vector type X.

// Smaller x are taken as this one: what is left of silu is below any rounding.
template <class X>
DELTANET_INLINE typename X::V silu(typename X::V x) {
  const auto bounded = X::at_least(x, X::kLeastSilu);
  return X::div(bounded, X::one_plus_exp(bounded));
}
