// SPDX-License-Identifier: Apache-2.0
// The tensor-core forward for bf16 with K = 128 alone, compiled into the program: the other
// instances are never called. With DELTANET_FAST the fast products too. And a device with as many
// multiprocessors as the program likes: which kernels run, and how much a block does, depends on
// it.
#pragma once
#include <dlfcn.h>

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
UNUSED_PREPARE(bf16, 64)
UNUSED_PREPARE(fp16, 64)
UNUSED_PREPARE(fp16, 128)
UNUSED_SCAN(bf16, 64, kExact)
UNUSED_SCAN(bf16, 64, kFast)
#ifndef DELTANET_FAST
UNUSED_SCAN(bf16, 128, kFast)
#endif
UNUSED_SCAN(fp16, 64, kExact)
UNUSED_SCAN(fp16, 64, kFast)
UNUSED_SCAN(fp16, 128, kExact)
UNUSED_SCAN(fp16, 128, kFast)
}  // namespace deltanet::cuda::tensor_core

#include "cuda/chunk_table.cu"
#include "cuda/tensor_core.cu"
#include "cuda/tensor_core/prepare.cuh"
#include "cuda/tensor_core/scan_output.cuh"
#include "cuda/tensor_core/segments.cu"

// Multiprocessors of the device.
inline int processors = 4;

// The program's own definitions stand before the emulator's. By label: nvcc defines some of these
// names itself, for device code.
template <class Function>
Function* emulated(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}
cudaError_t own_attribute(int*, cudaDeviceAttr, int) __asm__("cudaDeviceGetAttribute");
cudaError_t own_attribute(int* value, cudaDeviceAttr attribute, int device) {
  if (attribute == cudaDevAttrMultiProcessorCount) return *value = processors, cudaSuccess;
  return emulated<decltype(own_attribute)>("cudaDeviceGetAttribute")(value, attribute, device);
}
