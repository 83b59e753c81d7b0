// SPDX-License-Identifier: Apache-2.0
//
// What the operators of the convolution share on every device: checks of their arguments, and the
// way from tensors to parameters. How results are allocated, and who may read the contents of
// cu_seqlens, seq_idx and conv_state_indices, differs.
#pragma once
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <tuple>

#include "core/layer_params.h"
#include "ops/checks.h"
#include "ops/tensor_view.h"

namespace deltanet::ops {

using OptionalTensor = std::optional<Tensor>;

// Sizes and checks of x, weight and bias.
inline CausalConv1dParams check_convolution(const char* op, CheckDevice& device, const Tensor& x,
                                            const Tensor& weight, const OptionalTensor& bias) {
  check_rank(op, "x", x, 3, "[B, D, T]");
  check_float(op, "x", x, device);
  check_rank(op, "weight", weight, 2, "[D, W]");
  CausalConv1dParams p;
  p.batch = x.sizes()[0];
  p.channels = x.sizes()[1];
  p.tokens = x.sizes()[2];
  const int64_t width = weight.sizes()[1];
  STD_TORCH_CHECK(width >= 1 && width <= kMaxConvWidth, op, ": weight has width ", width,
                  "; supported: 1 to ", kMaxConvWidth);
  check_shape(op, "weight", weight, {p.channels, width}, "[D, W]");
  check_float(op, "weight", weight, device);
  check_gate_dtype(op, "weight", weight, x.scalar_type());
  if (bias) {
    check_shape(op, "bias", *bias, {p.channels}, "[D]");
    check_float(op, "bias", *bias, device);
    check_gate_dtype(op, "bias", *bias, x.scalar_type());
  }
  p.width = int(width);
  p.state_tokens = width - 1;
  p.x = view<3>(x);
  p.weight = view<2>(weight);
  p.bias = view<1>(bias);
  return p;
}

// A tensor that must have x's dtype.
inline void check_like_x(const char* op, CheckDevice& device, const char* name, const Tensor& given,
                         const Tensor& x) {
  check_float(op, name, given, device);
  STD_TORCH_CHECK(given.scalar_type() == x.scalar_type(), op, ": ", name, " is ",
                  name_of(given.scalar_type()), " and x is ", name_of(x.scalar_type()),
                  "; they must have one dtype");
}

inline void check_states(const char* op, CheckDevice& device, const char* name,
                         const Tensor& states, const Tensor& x, const CausalConv1dParams& p,
                         int64_t sequences) {
  check_shape(op, name, states, {sequences, p.channels, p.state_tokens}, "[N, D, W - 1]");
  check_like_x(op, device, name, states, x);
}

// How a call is cut into sequences, but for contents. `states`: whether some go in or come out.
inline void check_cuts(const char* op, CheckDevice& device, const CausalConv1dParams& p,
                       const OptionalTensor& seq_idx, const OptionalTensor& cu_seqlens,
                       bool states) {
  STD_TORCH_CHECK(!seq_idx || !cu_seqlens, op, ": seq_idx and cu_seqlens are given; one of them");
  STD_TORCH_CHECK(!seq_idx || !states, op,
                  ": seq_idx does not go with initial or final states; cu_seqlens does");
  if (cu_seqlens) check_cu_seqlens(op, *cu_seqlens, p.batch, device);
  if (!seq_idx) return;
  check_shape(op, "seq_idx", *seq_idx, {p.batch, p.tokens}, "[B, T]");
  check_index(op, device, "seq_idx", *seq_idx);
}

// Checks conv_state and conv_state_indices, but for contents, and sets p's state. Returns N.
inline int64_t check_pool(const char* op, CheckDevice& device, const Tensor& conv_state,
                          const OptionalTensor& indices, const Tensor& x, CausalConv1dParams& p) {
  check_rank(op, "conv_state", conv_state, 3, "[N, D, S]");
  const int64_t slots = conv_state.sizes()[0], kept = conv_state.sizes()[2];
  STD_TORCH_CHECK(kept >= p.width - 1, op, ": conv_state keeps ", kept,
                  " tokens; supported: W - 1 = ", p.width - 1, " or more");
  p.state_tokens = kept;
  check_states(op, device, "conv_state", conv_state, x, p, indices ? slots : p.batch);
  if (indices) {
    check_shape(op, "conv_state_indices", *indices, {p.batch}, "[B]");
    check_index(op, device, "conv_state_indices", *indices);
  }
  p.initial_states = view<3>(conv_state);
  p.final_states = mutable_view<3>(conv_state);
  return slots;
}

// [B, D, T] whose channels are neighbors in memory: what splits into q, k, v of contiguous rows.
inline Tensor new_channels_last(NewTensor& make, const Tensor& like, const CausalConv1dParams& p) {
  const int64_t sizes[] = {p.batch, p.tokens, p.channels};
  return torch::stable::transpose(make(like, {sizes, 3}, like.scalar_type()), 1, 2);
}

inline Tensor new_final_states(NewTensor& make, const Tensor& x, const CausalConv1dParams& p,
                               int64_t sequences) {
  const int64_t sizes[] = {sequences, p.channels, p.state_tokens};
  return make(x, {sizes, 3}, x.scalar_type());
}

// Checks the gradients that come in, and sets p's.
inline void check_upstream(const char* op, CheckDevice& device, const OptionalTensor& grad_out,
                           const OptionalTensor& grad_final_states, const Tensor& x,
                           int64_t sequences, CausalConv1dBackwardParams& p) {
  if (grad_final_states)
    check_states(op, device, "grad_final_states", *grad_final_states, x, p, sequences);
  if (grad_out) {
    check_shape(op, "grad_out", *grad_out, {p.batch, p.channels, p.tokens}, "[B, D, T]");
    check_like_x(op, device, "grad_out", *grad_out, x);
  }
  p.grad_output = view<3>(grad_out);
  p.grad_final_states = view<3>(grad_final_states);
}

// The gradients of x, weight, bias and initial_states: bit i of `wanted` asks for the i-th. Those
// that are not are empty.
using ConvGradients = std::tuple<Tensor, Tensor, Tensor, Tensor>;

inline ConvGradients make_gradients(const char* op, NewTensor& make, const Tensor& x,
                                    const Tensor& weight, const OptionalTensor& bias,
                                    const OptionalTensor& initial_states, int64_t wanted,
                                    CausalConv1dBackwardParams& p) {
  enum { kX, kWeight, kBias, kInitialStates };
  const auto asked = [&](int which) { return bool(wanted >> which & 1); };
  const int64_t zero[] = {0};
  const torch::headeronly::IntHeaderOnlyArrayRef nothing(zero, 1);
  const auto result = [&](int which, const OptionalTensor& like) {
    STD_TORCH_CHECK(like || !asked(which), op,
                    ": wanted asks for the gradient of a missing argument");
    return make(x, asked(which) ? like->sizes() : nothing,
                like ? like->scalar_type() : x.scalar_type());
  };
  const Tensor d_x = asked(kX) ? new_channels_last(make, x, p) : make(x, nothing, x.scalar_type());
  const Tensor d_weight = result(kWeight, weight), d_bias = result(kBias, bias);
  const Tensor d_initial_states = result(kInitialStates, initial_states);
  if (asked(kX)) p.d_x = mutable_view<3>(d_x);
  if (asked(kWeight)) p.d_weight = mutable_view<2>(d_weight);
  if (asked(kBias)) p.d_bias = mutable_view<1>(d_bias);
  if (asked(kInitialStates)) p.d_initial_states = mutable_view<3>(d_initial_states);
  return {d_x, d_weight, d_bias, d_initial_states};
}

}  // namespace deltanet::ops
