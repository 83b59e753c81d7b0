// SPDX-License-Identifier: Apache-2.0
#pragma once

// The maps x -> a x + b under composition: associative, not commutative.
struct Affine {
  float a, b;
};
struct Compose {
  __host__ __device__ Affine operator()(const Affine& first, const Affine& then) const {
    return {first.a * then.a, then.a * first.b + then.b};
  }
};
