// SPDX-License-Identifier: Apache-2.0
//
// unit_lower_triangular_inverse on CUDA: checks, allocation, call.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "cuda/triangular_inverse.h"
#include "ops/checks.h"
#include "ops/cuda_context.h"
#include "ops/tensor_view.h"

namespace deltanet::ops {
namespace {

Tensor unit_lower_triangular_inverse(Tensor L) {
  const char* op = "unit_lower_triangular_inverse";
  const int64_t size = check_inverse(op, check_device, L);
  STD_TORCH_CHECK(L.scalar_type() != ScalarType::Double, op,
                  ": L is float64; supported on CUDA: float32, bfloat16, float16 (float64 runs on "
                  "the CPU)");
  const Tensor lower = torch::stable::contiguous(L);
  const Tensor inverse = torch::stable::new_empty(L, L.sizes(), L.scalar_type());
  TriangularInverseParams p;
  p.count = L.numel() / (size * size);
  p.size = int(size);
  p.dtype = to_dtype(L.scalar_type());
  p.lower = lower.const_data_ptr();
  p.inverse = inverse.mutable_data_ptr();
  const CudaContext context({lower}, {inverse});
  cuda::triangular_inverse(p, context.stream());
  return inverse;
}

}  // namespace
}  // namespace deltanet::ops

STABLE_TORCH_LIBRARY_IMPL(deltanet_ext, DELTANET_CUDA_KEY, m) {
  m.impl("unit_lower_triangular_inverse", TORCH_BOX(&deltanet::ops::unit_lower_triangular_inverse));
}
