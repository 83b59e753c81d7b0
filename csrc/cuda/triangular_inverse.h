// SPDX-License-Identifier: Apache-2.0
//
// A batch of (I + L)^-1 on CUDA: equation (4).
#pragma once
#include <cuda_runtime.h>

#include "core/params.h"

namespace deltanet::cuda {

// lower and inverse are device pointers to [count, C, C], contiguous, float32, bfloat16 or float16
// (computed in fp32 and rounded once). Throws std::invalid_argument for float64 and for C outside 1
// to kMaxInverseSize, std::runtime_error for CUDA errors.
void triangular_inverse(const TriangularInverseParams& p, cudaStream_t stream);

}  // namespace deltanet::cuda
