// SPDX-License-Identifier: Apache-2.0
//
// What AVX-512 does otherwise with BF16 (VDPBF16PS): products of bf16 pairs. All else is AVX-512's.
#include "cpu/isa_prelude.h"

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(                                                               \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c"))), \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC diagnostic push
// GCC warns of its own intrinsics (bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC target( \
    "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c,prefer-vector-width=512")
#endif

namespace deltanet::cpu::avx512_bf16 {
#include "cpu/rule_inputs.inl.h"
#include "cpu/vec_math.inl.h"
#include "cpu/vec_avx512.inl.h"
#include "cpu/vec_avx512_bf16.inl.h"
#include "cpu/chunk_forward.inl.h"

const Bf16Kernels kernels_bf16 = {
    &ChunkForward<Avx512Bf16, true>::scratch_bytes,
    &ChunkForward<Avx512Bf16, true>::run,
};

}  // namespace deltanet::cpu::avx512_bf16

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC diagnostic pop
#pragma GCC pop_options
#endif
#endif  // x86-64
