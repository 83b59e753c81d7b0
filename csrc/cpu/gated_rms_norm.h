// SPDX-License-Identifier: Apache-2.0
//
// The gated norm on the CPU, without torch. As forward.h: arguments are taken as checked, and
// std::bad_alloc is thrown before anything is written.
#pragma once
#include "core/layer_params.h"
#include "core/parallel.h"

namespace deltanet::cpu {

// Equation (30).
void gated_rms_norm(const GatedRmsNormParams&, const Parallel&);

// Equations (34) to (36).
void gated_rms_norm_backward(const GatedRmsNormBackwardParams&, const Parallel&);

}  // namespace deltanet::cpu
