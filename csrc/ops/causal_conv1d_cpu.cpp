// SPDX-License-Identifier: Apache-2.0
//
// The causal convolution and its update of a state on the CPU: checks, allocation, call.
#include "cpu/causal_conv1d.h"

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

using OptionalTensor = std::optional<Tensor>;

// Integers of a [N] or [B, T] tensor.
int64_t index_at(const Tensor& x, int64_t offset) {
  return x.scalar_type() == ScalarType::Int
             ? static_cast<const int32_t*>(x.const_data_ptr())[offset]
             : static_cast<const int64_t*>(x.const_data_ptr())[offset];
}
void check_index(const char* op, const char* name, const Tensor& x) {
  check_on_cpu(op, name, x);
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::Int || x.scalar_type() == ScalarType::Long, op,
                  ": ", name, " is ", name_of(x.scalar_type()), "; supported: int32, int64");
}

// Sizes and checks of x, weight and bias.
CausalConv1dParams check_convolution(const char* op, const Tensor& x, const Tensor& weight,
                                     const OptionalTensor& bias) {
  check_rank(op, "x", x, 3, "[B, D, T]");
  check_float(op, "x", x, check_on_cpu);
  check_rank(op, "weight", weight, 2, "[D, W]");
  CausalConv1dParams p;
  p.batch = x.sizes()[0];
  p.channels = x.sizes()[1];
  p.tokens = x.sizes()[2];
  const int64_t width = weight.sizes()[1];
  STD_TORCH_CHECK(width >= 1 && width <= kMaxConvWidth, op, ": weight has width ", width,
                  "; supported: 1 to ", kMaxConvWidth);
  check_shape(op, "weight", weight, {p.channels, width}, "[D, W]");
  check_float(op, "weight", weight, check_on_cpu);
  check_gate_dtype(op, "weight", weight, x.scalar_type());
  if (bias) {
    check_shape(op, "bias", *bias, {p.channels}, "[D]");
    check_float(op, "bias", *bias, check_on_cpu);
    check_gate_dtype(op, "bias", *bias, x.scalar_type());
  }
  p.width = int(width);
  p.state_tokens = width - 1;
  p.x = view<3>(x);
  p.weight = view<2>(weight);
  p.bias = view<1>(bias);
  return p;
}

void check_states(const char* op, const char* name, const Tensor& states, const Tensor& x,
                  const CausalConv1dParams& p, int64_t sequences) {
  check_shape(op, name, states, {sequences, p.channels, p.state_tokens}, "[N, D, W - 1]");
  check_float(op, name, states, check_on_cpu);
  STD_TORCH_CHECK(states.scalar_type() == x.scalar_type(), op, ": ", name, " is ",
                  name_of(states.scalar_type()), " and x is ", name_of(x.scalar_type()),
                  "; they must have one dtype");
}

// Which tokens belong together: batch rows, packed sequences, or equal neighbors in seq_idx.
struct Runs {
  std::vector<TokenRun> list;
  int64_t sequences;  // that have a state

  Runs(const char* op, const CausalConv1dParams& p, const OptionalTensor& seq_idx,
       const OptionalTensor& cu_seqlens)
      : sequences(p.batch) {
    STD_TORCH_CHECK(!seq_idx || !cu_seqlens, op, ": seq_idx and cu_seqlens are given; one of them");
    if (cu_seqlens)
      pack(read_cu_seqlens(op, *cu_seqlens, p.batch, p.tokens), p.tokens);
    else if (seq_idx)
      find_equal(op, *seq_idx, p);
    else
      for (int64_t b = 0; b < p.batch; ++b) list.push_back({b, 0, p.tokens, b});
  }

 private:
  void pack(const std::vector<int64_t>& starts, int64_t tokens) {
    sequences = int64_t(starts.size()) - 1;
    for (int64_t n = 0; n < sequences; ++n)
      list.push_back({0, starts[size_t(n)], starts[size_t(n) + 1], n});
    list.push_back({0, starts.back(), tokens, -1});
  }
  void find_equal(const char* op, const Tensor& x, const CausalConv1dParams& p) {
    check_shape(op, "seq_idx", x, {p.batch, p.tokens}, "[B, T]");
    check_index(op, "seq_idx", x);
    for (int64_t b = 0; b < p.batch; ++b)
      for (int64_t begin = 0, end; begin < p.tokens; begin = end) {
        const auto at = [&](int64_t t) {
          return index_at(x, b * x.strides()[0] + t * x.strides()[1]);
        };
        const int64_t number = at(begin);
        for (end = begin + 1; end < p.tokens && at(end) == number;) ++end;
        list.push_back({b, begin, end, number < 0 ? -1 : 0});
      }
  }
};

void set_runs(CausalConv1dParams& p, const std::vector<TokenRun>& runs) {
  p.runs = runs.data();
  p.run_count = int64_t(runs.size());
}

// [B, D, T] whose channels are neighbors in memory: what splits into q, k, v of contiguous rows.
Tensor new_channels_last(const Tensor& like, int64_t batch, int64_t channels, int64_t tokens) {
  const int64_t sizes[] = {batch, tokens, channels};
  return torch::stable::transpose(allocate(like, {sizes, 3}, like.scalar_type()), 1, 2);
}

Tensor nothing_of(const Tensor& like) {
  const int64_t none[] = {0};
  return allocate(like, {none, 1}, like.scalar_type());
}

std::tuple<Tensor, Tensor> causal_conv1d_forward(Tensor x, Tensor weight, OptionalTensor bias,
                                                 OptionalTensor initial_states,
                                                 OptionalTensor seq_idx, OptionalTensor cu_seqlens,
                                                 bool silu, bool return_final_states) {
  const char* op = "causal_conv1d_fn";
  CausalConv1dParams p = check_convolution(op, x, weight, bias);
  const Runs runs(op, p, seq_idx, cu_seqlens);
  set_runs(p, runs.list);
  STD_TORCH_CHECK(!seq_idx || (!initial_states && !return_final_states), op,
                  ": seq_idx does not go with initial or final states; cu_seqlens does");
  if (initial_states) check_states(op, "initial_states", *initial_states, x, p, runs.sequences);
  p.initial_states = view<3>(initial_states);
  p.silu = silu;

  const Tensor out = new_channels_last(x, p.batch, p.channels, p.tokens);
  const int64_t state_sizes[] = {return_final_states ? runs.sequences : 0, p.channels,
                                 p.state_tokens};
  const Tensor final_states = allocate(x, {state_sizes, 3}, x.scalar_type());
  p.output = mutable_view<3>(out);
  if (return_final_states) p.final_states = mutable_view<3>(final_states);
  cpu::causal_conv1d(p, TorchParallel());
  return {out, final_states};
}

// Which gradients are wanted: bit i of `wanted`, and the i-th of the results.
enum Gradient { kX, kWeight, kBias, kInitialStates };

std::tuple<Tensor, Tensor, Tensor, Tensor> causal_conv1d_backward(
    OptionalTensor grad_out, OptionalTensor grad_final_states, Tensor x, Tensor weight,
    OptionalTensor bias, OptionalTensor initial_states, OptionalTensor seq_idx,
    OptionalTensor cu_seqlens, bool silu, int64_t wanted) {
  const char* op = "causal_conv1d_backward";
  CausalConv1dBackwardParams p;
  static_cast<CausalConv1dParams&>(p) = check_convolution(op, x, weight, bias);
  const Runs runs(op, p, seq_idx, cu_seqlens);
  set_runs(p, runs.list);
  STD_TORCH_CHECK(!seq_idx || (!initial_states && !grad_final_states), op,
                  ": seq_idx does not go with initial or final states; cu_seqlens does");
  if (initial_states) check_states(op, "initial_states", *initial_states, x, p, runs.sequences);
  if (grad_final_states)
    check_states(op, "grad_final_states", *grad_final_states, x, p, runs.sequences);
  if (grad_out) {
    check_shape(op, "grad_out", *grad_out, {p.batch, p.channels, p.tokens}, "[B, D, T]");
    check_float(op, "grad_out", *grad_out, check_on_cpu);
    STD_TORCH_CHECK(grad_out->scalar_type() == x.scalar_type(), op, ": grad_out is ",
                    name_of(grad_out->scalar_type()), " and x is ", name_of(x.scalar_type()),
                    "; they must have one dtype");
  }
  p.initial_states = view<3>(initial_states);
  p.grad_output = view<3>(grad_out);
  p.grad_final_states = view<3>(grad_final_states);
  p.silu = silu;

  const auto asked = [&](Gradient which) { return bool(wanted >> which & 1); };
  const auto result = [&](Gradient which, const OptionalTensor& like) {
    STD_TORCH_CHECK(like || !asked(which), op,
                    ": wanted asks for the gradient of a missing argument");
    return asked(which) ? allocate(x, like->sizes(), like->scalar_type()) : nothing_of(x);
  };
  const Tensor d_x =
      asked(kX) ? new_channels_last(x, p.batch, p.channels, p.tokens) : nothing_of(x);
  const Tensor d_weight = result(kWeight, weight), d_bias = result(kBias, bias);
  const Tensor d_initial_states = result(kInitialStates, initial_states);
  if (asked(kX)) p.d_x = mutable_view<3>(d_x);
  if (asked(kWeight)) p.d_weight = mutable_view<2>(d_weight);
  if (asked(kBias)) p.d_bias = mutable_view<1>(d_bias);
  if (asked(kInitialStates)) p.d_initial_states = mutable_view<3>(d_initial_states);
  cpu::causal_conv1d_backward(p, TorchParallel());
  return {d_x, d_weight, d_bias, d_initial_states};
}

// Writes conv_state.
Tensor causal_conv1d_update(Tensor x, Tensor conv_state, Tensor weight, OptionalTensor bias,
                            OptionalTensor conv_state_indices, bool silu) {
  const char* op = "causal_conv1d_update";
  CausalConv1dParams p = check_convolution(op, x, weight, bias);
  check_rank(op, "conv_state", conv_state, 3, "[N, D, S]");
  const int64_t slots = conv_state.sizes()[0], kept = conv_state.sizes()[2];
  STD_TORCH_CHECK(kept >= p.width - 1, op, ": conv_state keeps ", kept,
                  " tokens; supported: W - 1 = ", p.width - 1, " or more");
  p.state_tokens = kept;
  check_states(op, "conv_state", conv_state, x, p, conv_state_indices ? slots : p.batch);
  std::vector<TokenRun> runs;
  if (conv_state_indices) {
    check_shape(op, "conv_state_indices", *conv_state_indices, {p.batch}, "[B]");
    check_index(op, "conv_state_indices", *conv_state_indices);
    std::vector<bool> taken(static_cast<size_t>(slots));
    for (int64_t b = 0; b < p.batch; ++b) {
      const int64_t slot = index_at(*conv_state_indices, b * conv_state_indices->strides()[0]);
      STD_TORCH_CHECK(slot < slots, op, ": conv_state_indices has ", slot, " at position ", b,
                      "; supported: below the ", slots, " states, or negative for none");
      STD_TORCH_CHECK(slot < 0 || !taken[size_t(slot)], op, ": conv_state_indices has ", slot,
                      " twice; two rows would write one state");
      if (slot >= 0) taken[size_t(slot)] = true;
      runs.push_back({b, 0, p.tokens, slot < 0 ? -1 : slot});
    }
  } else {
    for (int64_t b = 0; b < p.batch; ++b) runs.push_back({b, 0, p.tokens, b});
  }
  set_runs(p, runs);
  p.silu = silu;

  const Tensor out = new_channels_last(x, p.batch, p.channels, p.tokens);
  p.output = mutable_view<3>(out);
  p.initial_states = view<3>(conv_state);
  p.final_states = mutable_view<3>(conv_state);
  cpu::causal_conv1d(p, TorchParallel());
  return out;
}

}  // namespace
}  // namespace deltanet::ops

STABLE_TORCH_LIBRARY_IMPL(deltanet_ext, CPU, m) {
  m.impl("causal_conv1d_forward", TORCH_BOX(&deltanet::ops::causal_conv1d_forward));
  m.impl("causal_conv1d_backward", TORCH_BOX(&deltanet::ops::causal_conv1d_backward));
  m.impl("causal_conv1d_update", TORCH_BOX(&deltanet::ops::causal_conv1d_update));
}
