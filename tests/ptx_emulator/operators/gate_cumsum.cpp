// SPDX-License-Identifier: Apache-2.0
//
// The in-chunk cumulative gate as an operator: schema, checks, allocation, launch. It is written as
// the CUDA operators of csrc/ops are, and stays here as the smallest one that the emulator runs.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <tuple>

#include "gate_cumsum.cuh"
#include "ops/checks.h"
#include "ops/cuda_context.h"
#include "ops/tensor_view.h"

namespace deltanet::ops {
namespace {

std::tuple<Tensor, Tensor> gate_cumsum(Tensor g, int64_t chunk_size) {
  const char* op = "gate_cumsum";
  check_rank(op, "g", g, 3, "[B, T, H]");
  check_device(op, "g", g);
  cuda::GateCumsumParams p;
  p.batch = g.sizes()[0];
  p.tokens = g.sizes()[1];
  p.heads = g.sizes()[2];
  const std::vector<int64_t> sizes{p.batch, p.heads, p.tokens};
  const Tensor high = torch::stable::new_empty(g, sizes, ScalarType::Float);
  const Tensor low = torch::stable::new_empty(g, sizes, ScalarType::Float);
  p.g = view<3>(g);
  p.high = static_cast<float*>(high.mutable_data_ptr());
  p.low = static_cast<float*>(low.mutable_data_ptr());
  const CudaContext context({g}, {high, low});
  cuda::gate_cumsum(p, int(chunk_size), context.stream());
  return {high, low};
}

}  // namespace
}  // namespace deltanet::ops

STABLE_TORCH_LIBRARY_FRAGMENT(deltanet_ext, m) {
  m.def("gate_cumsum(Tensor g, int chunk_size) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(deltanet_ext, DELTANET_CUDA_KEY, m) {
  m.impl("gate_cumsum", TORCH_BOX(&deltanet::ops::gate_cumsum));
}
