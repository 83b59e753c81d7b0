// SPDX-License-Identifier: Apache-2.0
//
// The kernels for arm64. Every arm64 CPU has NEON, so there is no target region to open.
#include "cpu/isa_prelude.h"

#if defined(__aarch64__)
namespace deltanet::cpu::neon {
#include "cpu/rule_inputs.inl.h"
#include "cpu/vec_math.inl.h"
#include "cpu/vec_neon.inl.h"
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

const Kernels kernels_f32 = make_kernels<Neon>();
const Bf16Kernels kernels_bf16 = make_bf16_kernels<Neon>();

}  // namespace deltanet::cpu::neon
#endif  // arm64
