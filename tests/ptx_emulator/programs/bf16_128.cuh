// SPDX-License-Identifier: Apache-2.0
// The tensor-core forward for bf16 with K = 128 alone, compiled into the program: the other
// instances are never called. With DELTANET_FAST the fast products too.
#pragma once
#include <cstdlib>

#include "cuda/tensor_core/layout.cuh"

namespace deltanet::cuda::tensor_core {
#define UNUSED_PREPARE(Element, kK)                        \
  template <>                                              \
  void prepare<Element, kK>(const Params&, cudaStream_t) { \
    std::abort();                                          \
  }
#define UNUSED_SCAN(Element, kK, kPrecision)                                          \
  template <>                                                                         \
  void scan_output<Element, kK, Precision::kPrecision>(const Params&, cudaStream_t) { \
    std::abort();                                                                     \
  }                                                                                   \
  template <>                                                                         \
  int64_t scan_output_shared_bytes<Element, kK, Precision::kPrecision>(int) {         \
    std::abort();                                                                     \
  }
#define UNUSED_ROLES(Element, kPrecision)                                             \
  template <>                                                                         \
  void scan_roles<Element, 128, Precision::kPrecision>(const Params&, cudaStream_t) { \
    std::abort();                                                                     \
  }                                                                                   \
  template <>                                                                         \
  int64_t scan_roles_shared_bytes<Element, 128, Precision::kPrecision>() {            \
    std::abort();                                                                     \
  }
UNUSED_PREPARE(bf16, 64)
UNUSED_PREPARE(fp16, 64)
UNUSED_PREPARE(fp16, 128)
UNUSED_SCAN(bf16, 64, kExact)
UNUSED_SCAN(bf16, 64, kFast)
#ifndef DELTANET_FAST
UNUSED_SCAN(bf16, 128, kFast)
UNUSED_ROLES(bf16, kFast)
#endif
UNUSED_ROLES(fp16, kExact)
UNUSED_ROLES(fp16, kFast)
UNUSED_SCAN(fp16, 64, kExact)
UNUSED_SCAN(fp16, 64, kFast)
UNUSED_SCAN(fp16, 128, kExact)
UNUSED_SCAN(fp16, 128, kFast)
}  // namespace deltanet::cuda::tensor_core

#include "cuda/chunk_table.cu"
#include "cuda/tensor_core.cu"
#include "cuda/tensor_core/prepare.cuh"
#include "cuda/tensor_core/scan_output.cuh"
#include "cuda/tensor_core/scan_roles.cuh"
#include "cuda/tensor_core/segments.cu"
