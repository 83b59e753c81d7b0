// SPDX-License-Identifier: Apache-2.0
//
// unit_lower_triangular_inverse on the CPU: checks, allocation, call.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "cpu/forward.h"
#include "ops/allocate.h"
#include "ops/checks.h"
#include "ops/parallel_torch.h"
#include "ops/tensor_view.h"

namespace deltanet::ops {
namespace {

Tensor unit_lower_triangular_inverse(Tensor L) {
  const char* op = "unit_lower_triangular_inverse";
  const int64_t size = check_inverse(op, check_on_cpu, L);
  const Tensor lower = torch::stable::contiguous(L);
  const Tensor inverse = allocate(L, L.sizes(), L.scalar_type());
  TriangularInverseParams p;
  p.count = L.numel() / (size * size);
  p.size = int(size);
  p.dtype = to_dtype(L.scalar_type());
  p.lower = lower.const_data_ptr();
  p.inverse = inverse.mutable_data_ptr();
  cpu::triangular_inverse(p, TorchParallel());
  return inverse;
}

}  // namespace
}  // namespace deltanet::ops

STABLE_TORCH_LIBRARY_IMPL(deltanet_ext, CPU, m) {
  m.impl("unit_lower_triangular_inverse", TORCH_BOX(&deltanet::ops::unit_lower_triangular_inverse));
}
