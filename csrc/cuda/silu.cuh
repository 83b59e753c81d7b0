// SPDX-License-Identifier: Apache-2.0
//
// silu(x) = x sigmoid(x) and its derivative, in fp32.
#pragma once
#include <cuda_runtime.h>

namespace deltanet::cuda {

// Below this x counts as it: what is left of silu there is below any rounding, and 1 + exp(-x)
// stays where the fast division holds (up to 2^126). A NaN stays one.
constexpr float kLeastSilu = -87.f;

__device__ __forceinline__ float bounded_for_silu(float x) {
  return x < kLeastSilu ? kLeastSilu : x;
}

__device__ __forceinline__ float silu(float x) {
  const float bounded = bounded_for_silu(x);
  return __fdividef(bounded, 1.f + expf(-bounded));
}

// value = x s and slope = s (1 + x (1 - s)) with s = sigmoid(x)
__device__ __forceinline__ void silu_and_slope(float x, float& value, float& slope) {
  const float bounded = bounded_for_silu(x), s = __fdividef(1.f, 1.f + expf(-bounded));
  value = bounded * s;
  slope = s * fmaf(bounded, 1.f - s, 1.f);
}

}  // namespace deltanet::cuda
