// SPDX-License-Identifier: Apache-2.0
//
// The operators on the CPU, without torch: splits a call into tasks, gives each worker its scratch
// memory and runs the active instruction set's kernels. Arguments are taken as checked.
#pragma once
#include "core/parallel.h"
#include "core/params.h"

namespace deltanet::cpu {

// Equations (2) to (7), chunk by chunk. Sequences of few tokens are run token by token.
void chunk_forward(const GatedDeltaRuleParams&, const Parallel&);

// Equation (1), token by token. Needs a query.
void recurrent_forward(const GatedDeltaRuleParams&, const Parallel&);

// The gradients of both, equations (9) to (28).
void backward(const GatedDeltaRuleBackwardParams&, const Parallel&);

// Equation (4).
void triangular_inverse(const TriangularInverseParams&, const Parallel&);

// All throw std::bad_alloc when scratch memory cannot be had; nothing has been written then.

}  // namespace deltanet::cpu
