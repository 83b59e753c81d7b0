// SPDX-License-Identifier: Apache-2.0
//
// In-chunk running sum of the log gate.
//
//   G[b,h,t] = sum of g[b,s,h] over s <= t in the same chunk as t       equation (2)
//
// Work split:  one block = one (chunk, head, batch); one thread = one token.
// Numerics:    g is clamped to >= -120 (exp(-120) is 0 in fp32, and -inf would make NaN), summed in
//              fp64 in a fixed order, and kept as a pair of fp32: high = the rounded sum, low =
//              what rounding took. A chunk's sum reaches -1280, where one fp32 step is 1.2e-4.
// Memory:      reads g once with its own strides, writes the pair once, coalesced.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "core/params.h"

namespace deltanet::cuda {

struct GateCumsumParams {
  View<3> g;              // [B, T, H], any strides; fp32, bf16 or fp16
  float* high = nullptr;  // [B, H, T], contiguous
  float* low = nullptr;   // [B, H, T], contiguous
  int64_t batch = 0, tokens = 0, heads = 0;
};

// chunk: 16, 32, 64 or 128 tokens. Throws std::invalid_argument for others and for other dtypes.
void gate_cumsum(const GateCumsumParams& p, int chunk, cudaStream_t stream);

}  // namespace deltanet::cuda
