// SPDX-License-Identifier: Apache-2.0
//
// Everything that an ISA file includes from outside, before it opens its target region. A system
// header included inside the region would compile its inline functions for that ISA, and the linker
// could pick that copy for the whole program: an illegal instruction on older CPUs.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "core/dtype.h"
#include "core/params.h"
#include "cpu/kernels.h"

#define DELTANET_INLINE inline __attribute__((always_inline))
#define DELTANET_NOINLINE __attribute__((noinline))
