// SPDX-License-Identifier: Apache-2.0
//
// The gated norm on CUDA: what operators and C++ programs call. Raw device pointers, a stream, no
// torch.
//
// Shapes, strides and options are those of core/layer_params.h, of float32, bfloat16 or float16 and
// with at most kMaxNormColumns columns (else std::invalid_argument). Nothing waits for the device,
// and launches depend on shapes alone. CUDA errors are std::runtime_error.
#pragma once
#include <cuda_runtime.h>

#include <cstddef>

#include "core/layer_params.h"

namespace deltanet::cuda {

constexpr int64_t kMaxNormColumns = 8192;

// Equation (30).
void gated_rms_norm(const GatedRmsNormParams& p, cudaStream_t stream);

// Equations (34) to (36), with bytes of device memory for sums (256-byte aligned, contents
// undefined before and after).
size_t gated_rms_norm_backward_workspace(const GatedRmsNormBackwardParams& p);
void gated_rms_norm_backward(const GatedRmsNormBackwardParams& p, void* workspace,
                             cudaStream_t stream);

}  // namespace deltanet::cuda
