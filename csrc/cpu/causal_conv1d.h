// SPDX-License-Identifier: Apache-2.0
//
// The causal convolution on the CPU, without torch. As forward.h: arguments are taken as checked,
// and std::bad_alloc is thrown before anything is written.
#pragma once
#include "core/layer_params.h"
#include "core/parallel.h"

namespace deltanet::cpu {

// Equation (29).
void causal_conv1d(const CausalConv1dParams&, const Parallel&);

// Equations (31) to (33).
void causal_conv1d_backward(const CausalConv1dBackwardParams&, const Parallel&);

}  // namespace deltanet::cpu
