// SPDX-License-Identifier: Apache-2.0
//
// What a CUDA operator asks of its surroundings: its dispatch key, where its tensors must lie, the
// current device and stream. tests/ptx_emulator/operators/ops/cuda_context.h has the same names for
// the emulator, so that operator files need no #ifdef.
//
// Everything goes through the C functions of torch's stable ABI. Those for CUDA are declared only
// with USE_CUDA, and lie in libtorch_cuda.
#pragma once
#ifndef USE_CUDA
#error "USE_CUDA is set by setup.py for the files of _C_cuda"
#endif
#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/shim_utils.h>

#include <cstdint>
#include <initializer_list>
#include <optional>

#include "ops/checks.h"
#include "ops/tensor_view.h"

// The dispatch key that the operators are registered for.
#define DELTANET_CUDA_KEY CUDA

namespace deltanet::ops {

inline void check_device(const char* op, const char* name, const Tensor& x) {
  STD_TORCH_CHECK(x.is_cuda(), op, ": ", name,
                  " is not on a CUDA device, as the other arguments are");
}

// While it lives, the device of this tensor is the current one. For what is asked before there is
// a context, because its answer is among the outputs: how large a workspace must be.
class CudaDevice {
 public:
  explicit CudaDevice(const Tensor& x) : guard_(index_of(x)) {}
  CudaDevice(const CudaDevice&) = delete;

  static int32_t index_of(const Tensor& x) {
    int32_t index = 0;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(x.get(), &index));
    return index;
  }

 private:
  torch::stable::accelerator::DeviceGuard guard_;
};

// For the time of one call: the device of its tensors is the current one, and stream() is the
// stream that torch uses there, which is the capturing one inside torch.cuda.graph.
class CudaContext {
 public:
  // Throws where the tensors are on more than one device.
  CudaContext(std::initializer_list<std::optional<Tensor>> inputs,
              std::initializer_list<std::optional<Tensor>> outputs)
      : device_(one_device(inputs, outputs)), guard_(device_) {
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_, &stream));
    stream_ = static_cast<cudaStream_t>(stream);
  }
  CudaContext(const CudaContext&) = delete;

  cudaStream_t stream() const { return stream_; }

 private:
  static int32_t one_device(std::initializer_list<std::optional<Tensor>> inputs,
                            std::initializer_list<std::optional<Tensor>> outputs) {
    int32_t found = -1;
    for (const auto& tensors : {inputs, outputs})
      for (const auto& x : tensors) {
        if (!x) continue;
        const int32_t device = CudaDevice::index_of(*x);
        STD_TORCH_CHECK(found < 0 || device == found, "deltanet_ext: tensors on cuda:", found,
                        " and on cuda:", device, " in one call; supported: one device");
        found = device;
      }
    return found;
  }

  int32_t device_;
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_ = nullptr;
};

}  // namespace deltanet::ops
