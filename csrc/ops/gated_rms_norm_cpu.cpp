// SPDX-License-Identifier: Apache-2.0
//
// The gated norm and its gradients on the CPU: checks, allocation, call.
#include "cpu/gated_rms_norm.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include "ops/allocate.h"
#include "ops/gated_rms_norm_arguments.h"
#include "ops/parallel_torch.h"

namespace deltanet::ops {
namespace {

Tensor gated_rms_norm_forward(Tensor x, Tensor gate, Tensor weight, double eps) {
  GatedRmsNormParams p = check_norm("gated_rms_norm", check_on_cpu, x, gate, weight, eps);
  const Rows x_rows(x), gate_rows(gate);
  p.x = x_rows.view();
  p.gate = gate_rows.view();
  const Tensor out = allocate(x, x.sizes(), x.scalar_type());
  p.output = rows_of_result(out, p.columns);
  cpu::gated_rms_norm(p, TorchParallel());
  return out;
}

NormGradients gated_rms_norm_backward(Tensor grad_out, Tensor x, Tensor gate, Tensor weight,
                                      double eps, int64_t wanted) {
  const char* op = "gated_rms_norm_backward";
  GatedRmsNormBackwardParams p;
  static_cast<GatedRmsNormParams&>(p) = check_norm(op, check_on_cpu, x, gate, weight, eps);
  check_norm_upstream(op, check_on_cpu, grad_out, x);
  const Rows x_rows(x), gate_rows(gate), grad_rows(grad_out);
  p.x = x_rows.view();
  p.gate = gate_rows.view();
  p.grad_output = grad_rows.view();
  const NormGradients results = make_gradients(allocate, x, gate, weight, wanted, p);
  cpu::gated_rms_norm_backward(p, TorchParallel());
  return results;
}

}  // namespace
}  // namespace deltanet::ops

STABLE_TORCH_LIBRARY_IMPL(deltanet_ext, CPU, m) {
  m.impl("gated_rms_norm_forward", TORCH_BOX(&deltanet::ops::gated_rms_norm_forward));
  m.impl("gated_rms_norm_backward", TORCH_BOX(&deltanet::ops::gated_rms_norm_backward));
}
