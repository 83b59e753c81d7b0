// SPDX-License-Identifier: Apache-2.0
//
// The part of deltanet_ext._C that is not a tensor operator: what was built, and the choice of
// instruction set.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/stable/version.h>

#include <stdexcept>

#include "cpu/registry.h"
#include "ops/allocate.h"

#ifndef DELTANET_VERSION
#error "DELTANET_VERSION is set by setup.py"
#endif

namespace py = pybind11;

namespace {

py::dict build_info() {
  py::dict info;
  info["version"] = DELTANET_VERSION;
#if defined(__clang__)
  info["compiler"] = "clang " __clang_version__;
#else
  info["compiler"] = "gcc " __VERSION__;
#endif
  info["built_with_torch"] = DELTANET_TORCH_VERSION;
  // The stable ABI's target: the oldest torch that this library loads into.
  info["torch_target"] = std::to_string(TORCH_FEATURE_VERSION >> 56) + "." +
                         std::to_string(TORCH_FEATURE_VERSION >> 48 & 0xff);
  info["cpu_isas_built"] = deltanet::cpu::built_isas();
  // Whether _C_cuda was built beside this library, and with what, or why not.
  info["cuda"] = bool(DELTANET_CUDA_BUILT);
  info["cuda_reason"] = DELTANET_CUDA_REASON;
  return info;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() =
      "Build facts and instruction-set choice of deltanet_ext; its operators are in "
      "torch.ops.deltanet_ext.";
  m.def("build_info", &build_info);
  m.def("available_cpu_isas", &deltanet::cpu::available_isas,
        "Instruction sets that this CPU can run, best first.");
  m.def("cpu_isa", &deltanet::cpu::active_isa, "The instruction set in use.");
  m.def("force_cpu_isa", &deltanet::cpu::force_isa, py::arg("name"),
        "Use this instruction set in the whole process; '' goes back to the automatic choice.");
  m.def(
      "set_bf16_products",
      [](const std::string& when) {
        using deltanet::cpu::Bf16Products;
        if (when != "never" && when != "where faster" && when != "always")
          throw std::invalid_argument("set_bf16_products: '" + when +
                                      "'; supported: never, where faster, always");
        deltanet::cpu::set_bf16_products(when == "never"    ? Bf16Products::kNever
                                         : when == "always" ? Bf16Products::kAlways
                                                            : Bf16Products::kWhereFaster);
      },
      py::arg("when"), "Whether bf16 inputs may be multiplied in pairs of bf16; 'never' at first.");
  m.def("poison_results", &deltanet::ops::poison_results, py::arg("on"),
        "For tests: memory of results holds NaN until a kernel writes it. Returns for how many it "
        "did.");
}
