// SPDX-License-Identifier: Apache-2.0
//
// The causal convolution and its update of a state on the CPU: checks, allocation, call.
#include "cpu/causal_conv1d.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <tuple>
#include <vector>

#include "ops/allocate.h"
#include "ops/causal_conv1d_arguments.h"
#include "ops/parallel_torch.h"

namespace deltanet::ops {
namespace {

// Which tokens belong together: batch rows, packed sequences, or equal neighbors in seq_idx.
struct Runs {
  std::vector<TokenRun> list;
  int64_t sequences;  // that have a state

  Runs(const char* op, const CausalConv1dParams& p, const OptionalTensor& seq_idx,
       const OptionalTensor& cu_seqlens)
      : sequences(p.batch) {
    if (cu_seqlens)
      pack(read_cu_seqlens(op, *cu_seqlens, p.batch, p.tokens), p.tokens);
    else if (seq_idx)
      find_equal(*seq_idx, p);
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
  void find_equal(const Tensor& x, const CausalConv1dParams& p) {
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

std::tuple<Tensor, Tensor> causal_conv1d_forward(Tensor x, Tensor weight, OptionalTensor bias,
                                                 OptionalTensor initial_states,
                                                 OptionalTensor seq_idx, OptionalTensor cu_seqlens,
                                                 bool silu, bool return_final_states) {
  const char* op = "causal_conv1d_fn";
  CausalConv1dParams p = check_convolution(op, check_on_cpu, x, weight, bias);
  check_cuts(op, check_on_cpu, p, seq_idx, cu_seqlens, initial_states || return_final_states);
  const Runs runs(op, p, seq_idx, cu_seqlens);
  set_runs(p, runs.list);
  if (initial_states)
    check_states(op, check_on_cpu, "initial_states", *initial_states, x, p, runs.sequences);
  p.initial_states = view<3>(initial_states);
  p.silu = silu;

  const Tensor out = new_channels_last(allocate, x, p);
  const Tensor final_states =
      new_final_states(allocate, x, p, return_final_states ? runs.sequences : 0);
  p.output = mutable_view<3>(out);
  if (return_final_states) p.final_states = mutable_view<3>(final_states);
  cpu::causal_conv1d(p, TorchParallel());
  return {out, final_states};
}

ConvGradients causal_conv1d_backward(OptionalTensor grad_out, OptionalTensor grad_final_states,
                                     Tensor x, Tensor weight, OptionalTensor bias,
                                     OptionalTensor initial_states, OptionalTensor seq_idx,
                                     OptionalTensor cu_seqlens, bool silu, int64_t wanted) {
  const char* op = "causal_conv1d_backward";
  CausalConv1dBackwardParams p;
  static_cast<CausalConv1dParams&>(p) = check_convolution(op, check_on_cpu, x, weight, bias);
  check_cuts(op, check_on_cpu, p, seq_idx, cu_seqlens, initial_states || grad_final_states);
  const Runs runs(op, p, seq_idx, cu_seqlens);
  set_runs(p, runs.list);
  if (initial_states)
    check_states(op, check_on_cpu, "initial_states", *initial_states, x, p, runs.sequences);
  check_upstream(op, check_on_cpu, grad_out, grad_final_states, x, runs.sequences, p);
  p.initial_states = view<3>(initial_states);
  p.silu = silu;
  const ConvGradients results =
      make_gradients(op, allocate, x, weight, bias, initial_states, wanted, p);
  cpu::causal_conv1d_backward(p, TorchParallel());
  return results;
}

// Writes conv_state.
Tensor causal_conv1d_update(Tensor x, Tensor conv_state, Tensor weight, OptionalTensor bias,
                            OptionalTensor conv_state_indices, bool silu) {
  const char* op = "causal_conv1d_update";
  CausalConv1dParams p = check_convolution(op, check_on_cpu, x, weight, bias);
  const int64_t slots = check_pool(op, check_on_cpu, conv_state, conv_state_indices, x, p);
  std::vector<int64_t> rows;
  if (conv_state_indices) rows = read_slots(op, "conv_state_indices", *conv_state_indices, slots);
  std::vector<TokenRun> runs;
  for (int64_t b = 0; b < p.batch; ++b)
    runs.push_back({b, 0, p.tokens, conv_state_indices ? rows[size_t(b)] : b});
  set_runs(p, runs);
  p.silu = silu;

  const Tensor out = new_channels_last(allocate, x, p);
  p.output = mutable_view<3>(out);
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
