// SPDX-License-Identifier: Apache-2.0
//
// Stages of the backward pass, in fp32 fused multiply-adds. One launch each.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/rule_params.cuh"

namespace deltanet::cuda::simt {

struct AdjointArguments;
struct GradientArguments;
struct WalkArguments;

// dV, the gradient of the initial state, and dS behind every strip: simt_adjoint.cuh. Three
// launches where sequences are cut into segments.
void adjoint(const RuleBackwardParams& p, AdjointArguments x, cudaStream_t stream);

// Columns of V in a tile of gradients() and walk().
int gradient_columns(const RuleParams& p);
// Blocks of theirs that the device holds at K = 128; fewer, where rows are longer.
int64_t gradient_blocks_at_once();

// How gradients() runs: items, slots (without memory), and how many of them. `query`, `key`: sums
// of dQ and dK are wanted.
GradientArguments plan_gradients(const RuleBackwardParams& p, bool query, bool key);

// What every strip adds to dQ, dK, dg and dbeta: simt_gradients.cuh.
void gradients(const RuleBackwardParams& p, GradientArguments x, cudaStream_t stream);

// How walk() runs, as plan_gradients says of gradients().
WalkArguments plan_walk(const RuleBackwardParams& p, bool query, bool key);

// Every gradient, in one launch, one block for a (sequence, key head): simt_walk.cuh. What it
// leaves are the sums over sequences for A_log and dt_bias.
void walk(const RuleBackwardParams& p, WalkArguments x, cudaStream_t stream);

}  // namespace deltanet::cuda::simt
