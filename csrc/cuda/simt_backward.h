// SPDX-License-Identifier: Apache-2.0
//
// Stages of the backward pass, in fp32 fused multiply-adds. One launch each.
#pragma once
#include <cuda_runtime.h>

#include "cuda/rule_params.cuh"

namespace deltanet::cuda::simt {

struct AdjointArguments;
struct GradientArguments;

// dV, the gradient of the initial state, and dS behind every strip: simt_adjoint.cuh.
void adjoint(const RuleBackwardParams& p, AdjointArguments x, cudaStream_t stream);

// What every strip adds to dQ, dK, dg and dbeta: simt_gradients.cuh.
void gradients(const RuleBackwardParams& p, GradientArguments x, cudaStream_t stream);

}  // namespace deltanet::cuda::simt
