// SPDX-License-Identifier: Apache-2.0
//
// What the operators of the gated norm share on every device: checks of their arguments, and the
// way from tensors to parameters.
#pragma once
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <tuple>
#include <vector>

#include "core/layer_params.h"
#include "ops/checks.h"
#include "ops/tensor_view.h"

namespace deltanet::ops {

// The axes before the last one as one, [R, C]. Where no stride does that the tensor is copied.
class Rows {
 public:
  explicit Rows(const Tensor& x) : tensor_(is_one_axis(x) ? x : torch::stable::contiguous(x)) {}
  const Tensor& tensor() const { return tensor_; }
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

inline MutableView<2> rows_of_result(const Tensor& x, int64_t columns) {
  MutableView<2> v;
  v.data = x.mutable_data_ptr();
  if (!v.data) v.data = &nothing;
  v.dtype = to_dtype(x.scalar_type());
  v.stride[0] = columns;
  v.stride[1] = 1;
  return v;
}

// Sizes and checks; where x and gate lie is left to the caller.
inline GatedRmsNormParams check_norm(const char* op, CheckDevice& device, const Tensor& x,
                                     const Tensor& gate, const Tensor& weight, double eps) {
  STD_TORCH_CHECK(x.dim() >= 1, op, ": x has shape []; expected [..., C]");
  GatedRmsNormParams p;
  p.columns = x.sizes()[x.dim() - 1];
  STD_TORCH_CHECK(p.columns >= 1, op, ": x has ", p.columns, " columns; supported: 1 or more");
  p.rows = x.numel() / p.columns;
  p.eps = eps;
  check_float(op, "x", x, device);
  check_float(op, "gate", gate, device);
  check_float(op, "weight", weight, device);
  const auto sizes = x.sizes();
  check_shape(op, "gate", gate, std::vector<int64_t>(sizes.begin(), sizes.end()), "[..., C]");
  check_shape(op, "weight", weight, {p.columns}, "[C]");
  check_gate_dtype(op, "gate", gate, x.scalar_type());
  check_gate_dtype(op, "weight", weight, x.scalar_type());
  p.weight = view<1>(weight);
  return p;
}

inline void check_norm_upstream(const char* op, CheckDevice& device, const Tensor& grad_out,
                                const Tensor& x) {
  const auto sizes = x.sizes();
  check_shape(op, "grad_out", grad_out, std::vector<int64_t>(sizes.begin(), sizes.end()),
              "[..., C]");
  check_float(op, "grad_out", grad_out, device);
  STD_TORCH_CHECK(grad_out.scalar_type() == x.scalar_type(), op, ": grad_out is ",
                  name_of(grad_out.scalar_type()), " and x is ", name_of(x.scalar_type()),
                  "; they must have one dtype");
}

// The gradients of x, gate and weight: bit i of `wanted` asks for the i-th. Those that are not are
// empty.
using NormGradients = std::tuple<Tensor, Tensor, Tensor>;

inline NormGradients make_gradients(NewTensor& make, const Tensor& x, const Tensor& gate,
                                    const Tensor& weight, int64_t wanted,
                                    GatedRmsNormBackwardParams& p) {
  const auto result = [&](int bit, const Tensor& like) {
    const int64_t none[] = {0};
    return wanted >> bit & 1 ? make(x, like.sizes(), like.scalar_type())
                             : make(x, {none, 1}, like.scalar_type());
  };
  const Tensor d_x = result(0, x), d_gate = result(1, gate), d_weight = result(2, weight);
  if (wanted & 1) p.d_x = rows_of_result(d_x, p.columns);
  if (wanted >> 1 & 1) p.d_gate = rows_of_result(d_gate, p.columns);
  if (wanted >> 2 & 1) p.d_weight = mutable_view<1>(d_weight);
  return {d_x, d_gate, d_weight};
}

}  // namespace deltanet::ops
