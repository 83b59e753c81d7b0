// SPDX-License-Identifier: Apache-2.0
//
// Memory of CUDA operators, from torch's allocator.
#pragma once
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "ops/tensor_view.h"

namespace deltanet::ops {

inline Tensor new_cuda_tensor(const Tensor& like, torch::headeronly::IntHeaderOnlyArrayRef sizes,
                              ScalarType dtype) {
  return torch::stable::new_empty(like, sizes, dtype);
}

// Scratch memory of one call. It goes back to the allocator when the launches are queued: whoever
// gets it next runs behind them on the same stream.
inline Tensor new_workspace(const Tensor& like, size_t bytes) {
  const int64_t sizes[] = {int64_t(bytes)};
  return torch::stable::new_empty(like, {sizes, 1}, ScalarType::Byte);
}

}  // namespace deltanet::ops
