// SPDX-License-Identifier: Apache-2.0
//
// The gated norm and its gradients on CUDA: checks, allocation, call.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include "cuda/gated_rms_norm.h"
#include "ops/cuda_context.h"
#include "ops/cuda_tensors.h"
#include "ops/gated_rms_norm_arguments.h"

namespace deltanet::ops {
namespace {

GatedRmsNormParams check_call(const char* op, const Tensor& x, const Tensor& gate,
                              const Tensor& weight, double eps) {
  const GatedRmsNormParams p = check_norm(op, check_device, x, gate, weight, eps);
  STD_TORCH_CHECK(x.scalar_type() != ScalarType::Double, op,
                  ": x is float64; supported on CUDA: float32, bfloat16, float16 (float64 runs on "
                  "the CPU)");
  STD_TORCH_CHECK(p.columns <= cuda::kMaxNormColumns, op, ": x has ", p.columns,
                  " columns; supported on CUDA: 1 to ", cuda::kMaxNormColumns);
  return p;
}

Tensor gated_rms_norm_forward(Tensor x, Tensor gate, Tensor weight, double eps) {
  GatedRmsNormParams p = check_call("gated_rms_norm", x, gate, weight, eps);
  const Rows x_rows(x), gate_rows(gate);
  p.x = x_rows.view();
  p.gate = gate_rows.view();
  const Tensor out = new_cuda_tensor(x, x.sizes(), x.scalar_type());
  p.output = rows_of_result(out, p.columns);
  const CudaContext context({x_rows.tensor(), gate_rows.tensor(), weight}, {out});
  cuda::gated_rms_norm(p, context.stream());
  return out;
}

NormGradients gated_rms_norm_backward(Tensor grad_out, Tensor x, Tensor gate, Tensor weight,
                                      double eps, int64_t wanted) {
  const char* op = "gated_rms_norm_backward";
  GatedRmsNormBackwardParams p;
  static_cast<GatedRmsNormParams&>(p) = check_call(op, x, gate, weight, eps);
  check_norm_upstream(op, check_device, grad_out, x);
  const Rows x_rows(x), gate_rows(gate), grad_rows(grad_out);
  p.x = x_rows.view();
  p.gate = gate_rows.view();
  p.grad_output = grad_rows.view();
  const NormGradients results = make_gradients(new_cuda_tensor, x, gate, weight, wanted, p);
  const auto& [d_x, d_gate, d_weight] = results;
  const Tensor workspace = new_workspace(x, cuda::gated_rms_norm_backward_workspace(p));
  const CudaContext context({x_rows.tensor(), gate_rows.tensor(), weight, grad_rows.tensor()},
                            {d_x, d_gate, d_weight, workspace});
  cuda::gated_rms_norm_backward(p, workspace.mutable_data_ptr(), context.stream());
  return results;
}

}  // namespace
}  // namespace deltanet::ops

STABLE_TORCH_LIBRARY_IMPL(deltanet_ext, DELTANET_CUDA_KEY, m) {
  m.impl("gated_rms_norm_forward", TORCH_BOX(&deltanet::ops::gated_rms_norm_forward));
  m.impl("gated_rms_norm_backward", TORCH_BOX(&deltanet::ops::gated_rms_norm_backward));
}
