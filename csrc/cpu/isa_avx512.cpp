// SPDX-License-Identifier: Apache-2.0
//
// The kernels for AVX-512 (F, BW, DQ, VL).
#include "cpu/isa_prelude.h"

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(                                                    \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC diagnostic push
// GCC warns of its own intrinsics (bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,prefer-vector-width=512")
#endif

namespace deltanet::cpu::avx512 {
#include "cpu/rule_inputs.inl.h"
#include "cpu/vec_math.inl.h"
#include "cpu/vec_avx512.inl.h"
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

const Kernels kernels_f32 = make_kernels<Avx512>();
const Bf16Kernels kernels_bf16 = make_bf16_kernels<Avx512>();

}  // namespace deltanet::cpu::avx512

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC diagnostic pop
#pragma GCC pop_options
#endif
#endif  // x86-64
