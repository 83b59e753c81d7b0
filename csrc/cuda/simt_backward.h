// SPDX-License-Identifier: Apache-2.0
//
// Stages of the backward pass, in fp32 fused multiply-adds. One launch each.
#pragma once
#include <cuda_runtime.h>

#include "cuda/rule_params.cuh"

namespace deltanet::cuda::simt {

struct AdjointArguments;
struct GradientArguments;

// dV, the gradient of the initial state, and dS behind every strip: simt_adjoint.cuh. Three
// launches where sequences are cut into segments.
void adjoint(const RuleBackwardParams& p, AdjointArguments x, cudaStream_t stream);

// How gradients() runs: items, slots (without memory), and how many of them. `query`, `key`: sums
// of dQ and dK are wanted.
GradientArguments plan_gradients(const RuleBackwardParams& p, bool query, bool key);

// What every strip adds to dQ, dK, dg and dbeta: simt_gradients.cuh.
void gradients(const RuleBackwardParams& p, GradientArguments x, cudaStream_t stream);

}  // namespace deltanet::cuda::simt
