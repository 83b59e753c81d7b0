// SPDX-License-Identifier: Apache-2.0
//
// The gated norm and its gradients on the CPU: checks, allocation, call.
#include "cpu/gated_rms_norm.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <tuple>
#include <vector>

#include "ops/allocate.h"
#include "ops/checks.h"
#include "ops/parallel_torch.h"
#include "ops/tensor_view.h"

namespace deltanet::ops {
namespace {

// The axes before the last one as one, [R, C]. Where no stride does that the tensor is copied.
class Rows {
 public:
  explicit Rows(const Tensor& x) : tensor_(is_one_axis(x) ? x : torch::stable::contiguous(x)) {}
  View<2> view() const {
    View<2> v;
    v.data = tensor_.const_data_ptr();
    if (!v.data) v.data = &nothing;
    v.dtype = to_dtype(tensor_.scalar_type());
    v.stride[0] = row_stride(tensor_);
    v.stride[1] = tensor_.strides()[tensor_.dim() - 1];
    return v;
  }

 private:
  // Of the last axis that has more than one entry; 0: none has.
  static int64_t row_stride(const Tensor& x) {
    for (int64_t i = x.dim() - 1; i-- > 0;)
      if (x.sizes()[i] != 1) return x.strides()[i];
    return 0;
  }
  static bool is_one_axis(const Tensor& x) {
    int64_t stride = row_stride(x);
    for (int64_t i = x.dim() - 1; i-- > 0;) {
      if (x.sizes()[i] == 1) continue;
      if (x.strides()[i] != stride) return false;
      stride *= x.sizes()[i];
    }
    return true;
  }
  const Tensor tensor_;
};

MutableView<2> rows_of_result(const Tensor& x, int64_t columns) {
  MutableView<2> v;
  v.data = x.mutable_data_ptr();
  if (!v.data) v.data = &nothing;
  v.dtype = to_dtype(x.scalar_type());
  v.stride[0] = columns;
  v.stride[1] = 1;
  return v;
}

// Sizes and checks; x and gate are left to the caller.
GatedRmsNormParams check_norm(const char* op, const Tensor& x, const Tensor& gate,
                              const Tensor& weight, double eps) {
  STD_TORCH_CHECK(x.dim() >= 1, op, ": x has shape []; expected [..., C]");
  GatedRmsNormParams p;
  p.columns = x.sizes()[x.dim() - 1];
  STD_TORCH_CHECK(p.columns >= 1, op, ": x has ", p.columns, " columns; supported: 1 or more");
  p.rows = x.numel() / p.columns;
  p.eps = eps;
  check_float(op, "x", x, check_on_cpu);
  check_float(op, "gate", gate, check_on_cpu);
  check_float(op, "weight", weight, check_on_cpu);
  const auto sizes = x.sizes();
  check_shape(op, "gate", gate, std::vector<int64_t>(sizes.begin(), sizes.end()), "[..., C]");
  check_shape(op, "weight", weight, {p.columns}, "[C]");
  check_gate_dtype(op, "gate", gate, x.scalar_type());
  check_gate_dtype(op, "weight", weight, x.scalar_type());
  p.weight = view<1>(weight);
  return p;
}

Tensor gated_rms_norm_forward(Tensor x, Tensor gate, Tensor weight, double eps) {
  GatedRmsNormParams p = check_norm("gated_rms_norm", x, gate, weight, eps);
  const Rows x_rows(x), gate_rows(gate);
  p.x = x_rows.view();
  p.gate = gate_rows.view();
  const Tensor out = allocate(x, x.sizes(), x.scalar_type());
  p.output = rows_of_result(out, p.columns);
  cpu::gated_rms_norm(p, TorchParallel());
  return out;
}

std::tuple<Tensor, Tensor, Tensor> gated_rms_norm_backward(Tensor grad_out, Tensor x, Tensor gate,
                                                           Tensor weight, double eps,
                                                           int64_t wanted) {
  const char* op = "gated_rms_norm_backward";
  GatedRmsNormBackwardParams p;
  static_cast<GatedRmsNormParams&>(p) = check_norm(op, x, gate, weight, eps);
  const auto sizes = x.sizes();
  check_shape(op, "grad_out", grad_out, std::vector<int64_t>(sizes.begin(), sizes.end()),
              "[..., C]");
  check_float(op, "grad_out", grad_out, check_on_cpu);
  STD_TORCH_CHECK(grad_out.scalar_type() == x.scalar_type(), op, ": grad_out is ",
                  name_of(grad_out.scalar_type()), " and x is ", name_of(x.scalar_type()),
                  "; they must have one dtype");
  const Rows x_rows(x), gate_rows(gate), grad_rows(grad_out);
  p.x = x_rows.view();
  p.gate = gate_rows.view();
  p.grad_output = grad_rows.view();

  const auto result = [&](int bit, const Tensor& like) {
    const int64_t none[] = {0};
    return wanted >> bit & 1 ? allocate(x, like.sizes(), like.scalar_type())
                             : allocate(x, {none, 1}, like.scalar_type());
  };
  const Tensor d_x = result(0, x), d_gate = result(1, gate), d_weight = result(2, weight);
  if (wanted & 1) p.d_x = rows_of_result(d_x, p.columns);
  if (wanted >> 1 & 1) p.d_gate = rows_of_result(d_gate, p.columns);
  if (wanted >> 2 & 1) p.d_weight = mutable_view<1>(d_weight);
  cpu::gated_rms_norm_backward(p, TorchParallel());
  return {d_x, d_gate, d_weight};
}

}  // namespace
}  // namespace deltanet::ops

STABLE_TORCH_LIBRARY_IMPL(deltanet_ext, CPU, m) {
  m.impl("gated_rms_norm_forward", TORCH_BOX(&deltanet::ops::gated_rms_norm_forward));
  m.impl("gated_rms_norm_backward", TORCH_BOX(&deltanet::ops::gated_rms_norm_backward));
}
