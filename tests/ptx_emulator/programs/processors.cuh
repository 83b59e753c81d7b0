// SPDX-License-Identifier: Apache-2.0
// A device with as many multiprocessors as the program likes: which kernels run, and how much a
// block does, depends on it.
#pragma once
#include <cuda_runtime.h>
#include <dlfcn.h>

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
