// SPDX-License-Identifier: Apache-2.0
//
// The kernels in plain C++: any CPU in fp32, and fp64 everywhere.
#include "cpu/isa_prelude.h"

namespace deltanet::cpu::scalar {
#include "cpu/rule_inputs.inl.h"
#include "cpu/vec_scalar.inl.h"
#include "cpu/chunk_forward.inl.h"
#include "cpu/chunk_recompute.inl.h"
#include "cpu/chunk_backward.inl.h"
#include "cpu/recurrent_forward.inl.h"
#include "cpu/triangular_inverse.inl.h"
#include "cpu/silu.inl.h"
#include "cpu/causal_conv1d.inl.h"
#include "cpu/causal_conv1d_backward.inl.h"
#include "cpu/gated_rms_norm.inl.h"
#include "cpu/kernel_table.inl.h"

const Kernels kernels_f32 = make_kernels<Scalar<float>>();
const Bf16Kernels kernels_bf16 = make_bf16_kernels<Scalar<float>>();
const Kernels kernels_f64 = make_kernels<Scalar<double>>();

}  // namespace deltanet::cpu::scalar
