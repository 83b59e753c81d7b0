// SPDX-License-Identifier: Apache-2.0
//
// The only place that launches kernels: grid limits, opt-in shared memory, launch errors.
// No torch here, so that C++ programs and the emulator link the launchers as they are.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

namespace deltanet::cuda {

inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess)
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

inline int device_attribute(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&value, attribute, device), "cudaDeviceGetAttribute");
  return value;
}
// Of the current device: what a block may have at most, in bytes; how many multiprocessors.
inline int64_t shared_memory() { return device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin); }
inline int64_t processors() { return device_attribute(cudaDevAttrMultiProcessorCount); }

// One block per unit of work, all of them in grid.x: y and z end at 65,535.
template <class... Parameters, class... Arguments>
void launch(const char* name, void (*kernel)(Parameters...), int64_t blocks, int threads,
            int64_t dynamic_shared, cudaStream_t stream, Arguments&&... arguments) {
  if (blocks == 0) return;  // an empty grid is a launch error
  if (blocks > 0x7fffffff)
    throw std::runtime_error(std::string(name) + ": " + std::to_string(blocks) +
                             " blocks; a grid has at most 2147483647");
  if (dynamic_shared > (48 << 10))
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               int(dynamic_shared)),
          name);
  kernel<<<dim3(unsigned(blocks)), dim3(unsigned(threads)), size_t(dynamic_shared), stream>>>(
      std::forward<Arguments>(arguments)...);
  check(cudaGetLastError(), name);
}

}  // namespace deltanet::cuda
