// SPDX-License-Identifier: Apache-2.0
//
// What a CUDA operator asks of its surroundings, for the emulator. csrc/ops/cuda_context.h has the
// same names for a GPU; this folder comes first in the include path of the emulated build, and the
// operator files need no #ifdef.
//
// Tensors are CPU tensors. A kernel may touch exactly the elements of the tensors that the context
// was given: anything else is an access outside memory, even inside the same storage's allocation.
#pragma once
#include <cuda_runtime.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <utility>
#include <vector>

#include "ops/checks.h"
#include "ops/tensor_view.h"

extern "C" {
void ptx_emulator_expose(const void* pointer, size_t bytes, int written);
void ptx_emulator_conceal(const void* pointer);
void* ptx_emulator_stream();
int ptx_emulator_capturing();
void ptx_emulator_keep(const void* pointer);
}

// The dispatch key that the operators are registered for.
#define DELTANET_CUDA_KEY CPU

namespace deltanet::ops {

inline void check_device(const char* op, const char* name, const Tensor& x) {
  STD_TORCH_CHECK(x.is_cpu(), op, ": ", name, " is not on the CPU, where the emulator runs");
}

// The emulator has one device.
struct CudaDevice {
  explicit CudaDevice(const Tensor&) {}
};

class CudaContext {
 public:
  // Makes the device of the first tensor current. Inputs hold values; outputs hold none yet.
  CudaContext(std::initializer_list<std::optional<Tensor>> inputs,
              std::initializer_list<std::optional<Tensor>> outputs) {
    // Inputs may be views of one storage (q, k and v of one projection): ranges that meet are one.
    std::vector<Range> ranges;
    for (const auto& x : inputs)
      if (x && x->numel()) ranges.push_back(range_of(*x));
    std::sort(ranges.begin(), ranges.end());
    std::vector<Range> merged;
    for (const Range& r : ranges) {
      if (merged.empty() || r.first > merged.back().second) merged.push_back(r);
      merged.back().second = std::max(merged.back().second, r.second);
    }
    for (const Range& r : merged) expose(r, 1);
    for (const auto& x : outputs) {
      if (!x || !x->numel()) continue;
      expose(range_of(*x), 0);
      // Scratch memory is gone when the operator returns. A graph's pool would hold on to it.
      if (ptx_emulator_capturing()) captured().push_back(*x);
    }
  }
  ~CudaContext() {
    // A replay comes back to the memory of what was captured.
    const auto leave = ptx_emulator_capturing() ? ptx_emulator_keep : ptx_emulator_conceal;
    for (const char* p : exposed_) leave(p);
  }
  CudaContext(const CudaContext&) = delete;

  cudaStream_t stream() const { return static_cast<cudaStream_t>(ptx_emulator_stream()); }

 private:
  using Range = std::pair<const char*, const char*>;

  static Range range_of(const Tensor& x) {
    int64_t low = 0, high = 0;
    for (int64_t i = 0; i < x.dim(); ++i) {
      const int64_t reach = (x.sizes()[i] - 1) * x.strides()[i];
      (reach < 0 ? low : high) += reach;
    }
    const auto* data = static_cast<const char*>(x.const_data_ptr());
    const auto size = int64_t(x.element_size());
    return {data + low * size, data + (high + 1) * size};
  }
  void expose(const Range& r, int written) {
    ptx_emulator_expose(r.first, size_t(r.second - r.first), written);
    exposed_.push_back(r.first);
  }
  static std::vector<Tensor>& captured() {
    static std::vector<Tensor> tensors;
    return tensors;
  }
  std::vector<const char*> exposed_;
};

}  // namespace deltanet::ops
