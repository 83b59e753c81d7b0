// SPDX-License-Identifier: Apache-2.0
//
// The gated delta rule on CUDA, forward: what operators and C++ programs call. Raw device pointers,
// a stream, no torch.
//
// Shapes, strides and options are those of GatedDeltaRuleParams (core/params.h); query, key and
// value are all float32, bfloat16 or float16, g, beta and initial_state of any float dtype. Nothing
// waits for the device, and launches depend on shapes alone, so every call can be captured in a
// graph. All functions throw std::invalid_argument for what is not supported (float64 inputs) and
// std::runtime_error for CUDA errors.
#pragma once
#include <cuda_runtime.h>

#include <cstddef>

#include "cuda/rule_params.cuh"

namespace deltanet::cuda {

// Bytes of device memory that chunk_forward needs for this call, a multiple of 256. 0 is possible.
size_t chunk_forward_workspace(const RuleParams& p);

// Equations (2) to (7). workspace: 256-byte aligned, contents undefined before and after. Where
// saved_states are wanted they are contiguous.
void chunk_forward(const RuleParams& p, void* workspace, cudaStream_t stream);

// Equation (1), token by token: for decode and short runs. One launch, no workspace.
void recurrent_forward(const RuleParams& p, cudaStream_t stream);

}  // namespace deltanet::cuda
