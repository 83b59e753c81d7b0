// SPDX-License-Identifier: Apache-2.0
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "ops/cuda_context.h"

namespace deltanet::cuda {
void reads_too_far(const float* x, float* y, int64_t n, cudaStream_t stream);
}

namespace deltanet::ops {
namespace {

Tensor reads_too_far(Tensor x) {
  const Tensor y = torch::stable::new_empty(x, x.sizes(), ScalarType::Float);
  const CudaContext context({x}, {y});
  cuda::reads_too_far(static_cast<const float*>(x.const_data_ptr()),
                      static_cast<float*>(y.mutable_data_ptr()), x.numel(), context.stream());
  STD_TORCH_CHECK(cudaGetLastError() == cudaSuccess, "reads_too_far: the launch failed");
  return y;
}

}  // namespace
}  // namespace deltanet::ops

STABLE_TORCH_LIBRARY_FRAGMENT(deltanet_ext, m) { m.def("reads_too_far(Tensor x) -> Tensor"); }

STABLE_TORCH_LIBRARY_IMPL(deltanet_ext, DELTANET_CUDA_KEY, m) {
  m.impl("reads_too_far", TORCH_BOX(&deltanet::ops::reads_too_far));
}
