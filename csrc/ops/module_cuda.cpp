// SPDX-License-Identifier: Apache-2.0
//
// deltanet_ext._C_cuda: importing it registers the operators' CUDA implementations with torch. What
// is not a tensor operator: how it was built, and the two switches that CUDA kernels know.
#include <pybind11/pybind11.h>

#include <string>

#include "ops/cuda_settings.h"

#ifndef DELTANET_VERSION
#error "DELTANET_VERSION is set by setup.py"
#endif

namespace py = pybind11;

namespace {

py::dict build_info() {
  py::dict info;
  info["version"] = DELTANET_VERSION;
  info["built_with_torch"] = DELTANET_TORCH_VERSION;
  info["nvcc"] = DELTANET_NVCC_VERSION;
  info["architectures"] = DELTANET_CUDA_ARCHITECTURES;
  return info;
}

}  // namespace

PYBIND11_MODULE(_C_cuda, m) {
  m.doc() =
      "CUDA implementations of the operators in torch.ops.deltanet_ext, registered by the import.";
  m.def("build_info", &build_info);
  m.def(
      "set_batch_invariant", [](bool on) { deltanet::ops::cuda_settings.batch_invariant = on; },
      py::arg("on"), "Choose kernels by the sizes of one sequence alone.");
  m.def(
      "set_fast", [](bool on) { deltanet::ops::cuda_settings.fast = on; }, py::arg("on"),
      "Fewer products of split operands: docs/numerics.md.");
}
