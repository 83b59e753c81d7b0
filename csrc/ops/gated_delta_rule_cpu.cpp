// SPDX-License-Identifier: Apache-2.0
//
// The gated delta rule, its gradients and its transition on the CPU: checks, allocation, call.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <tuple>
#include <vector>

#include "cpu/forward.h"
#include "ops/allocate.h"
#include "ops/checks.h"
#include "ops/parallel_torch.h"
#include "ops/rule_arguments.h"
#include "ops/rule_gradients.h"
#include "ops/tensor_view.h"

namespace deltanet::ops {
namespace {

std::vector<int64_t> host_cu_seqlens(const char* op, const OptionalTensor& cu_seqlens,
                                     const Tensor& key) {
  if (!cu_seqlens) return {};
  check_rank(op, "key", key, 4, "[B, T, HK, K]");
  return read_cu_seqlens(op, *cu_seqlens, key.sizes()[0], key.sizes()[1]);
}

void set_sequences(GatedDeltaRuleParams& p, const OptionalTensor& cu_seqlens,
                   const std::vector<int64_t>& starts) {
  if (!cu_seqlens) return;
  p.sequences = int64_t(starts.size()) - 1;
  p.cu_seqlens = starts.data();
}

Tensor new_state(const Tensor& like, int64_t sequences, int64_t heads, int64_t rows,
                 int64_t columns) {
  const int64_t sizes[] = {sequences, heads, rows, columns};
  return allocate(like, {sizes, 4}, state_dtype(like));
}

Tensor nothing_of(const Tensor& like, ScalarType dtype) {
  const int64_t none[] = {0};
  return allocate(like, {none, 1}, dtype);
}

using Forward = void(const GatedDeltaRuleParams&, const Parallel&);

// With `saved_states`, also what the backward pass starts from.
std::tuple<Tensor, Tensor> gated_delta_rule(const char* op, Forward& forward,
                                            const RuleArguments& x,
                                            Tensor* saved_states = nullptr) {
  const std::vector<int64_t> starts = host_cu_seqlens(op, x.cu_seqlens, x.key);
  GatedDeltaRuleParams p = check_keys_and_values(op, check_on_cpu, x.key, x.value, x.g, x.beta);
  set_sequences(p, x.cu_seqlens, starts);
  check_rule(op, check_on_cpu, x, p);

  const int64_t out_sizes[] = {p.batch, p.tokens, p.value_heads, int64_t(p.dim_v)};
  const Tensor out = allocate(x.query, {out_sizes, 4}, x.query.scalar_type());
  const Tensor final_state = x.output_final_state ? new_state(x.key, p.sequences, p.value_heads,
                                                              x.state_rows(), x.state_columns())
                                                  : nothing_of(x.key, state_dtype(x.key));
  set_results(out, final_state, x, p);
  if (saved_states) {
    const int64_t sizes[] = {p.batch, p.tokens / kSegmentTokens, p.value_heads, p.dim_k, p.dim_v};
    *saved_states = allocate(x.key, {sizes, 5}, state_dtype(x.key));
    p.saved_states = states_of(mutable_view<5>(*saved_states));
  }
  forward(p, TorchParallel());
  return {out, final_state};
}

std::tuple<Tensor, Tensor, Tensor> gated_delta_rule_saving(const char* op, Forward& forward,
                                                           const RuleArguments& x) {
  Tensor saved_states;
  const auto [out, final_state] = gated_delta_rule(op, forward, x, &saved_states);
  return {out, final_state, saved_states};
}

std::tuple<Tensor, Tensor> chunk_gated_delta_rule_forward(
    Tensor query, Tensor key, Tensor value, OptionalTensor g, OptionalTensor beta,
    OptionalTensor initial_state, OptionalTensor cu_seqlens, OptionalTensor A_log,
    OptionalTensor dt_bias, double scale, bool output_final_state, bool use_qk_l2norm,
    bool use_gate, bool use_beta_sigmoid, bool allow_neg_eigval, bool state_v_first) {
  return gated_delta_rule("chunk_gated_delta_rule", cpu::chunk_forward,
                          {query, key, value, g, beta, initial_state, cu_seqlens, A_log, dt_bias,
                           scale, output_final_state, use_qk_l2norm, use_gate, use_beta_sigmoid,
                           allow_neg_eigval, state_v_first});
}

std::tuple<Tensor, Tensor, Tensor> chunk_gated_delta_rule_forward_saving(
    Tensor query, Tensor key, Tensor value, OptionalTensor g, OptionalTensor beta,
    OptionalTensor initial_state, OptionalTensor cu_seqlens, OptionalTensor A_log,
    OptionalTensor dt_bias, double scale, bool output_final_state, bool use_qk_l2norm,
    bool use_gate, bool use_beta_sigmoid, bool allow_neg_eigval, bool state_v_first) {
  return gated_delta_rule_saving("chunk_gated_delta_rule", cpu::chunk_forward,
                                 {query, key, value, g, beta, initial_state, cu_seqlens, A_log,
                                  dt_bias, scale, output_final_state, use_qk_l2norm, use_gate,
                                  use_beta_sigmoid, allow_neg_eigval, state_v_first});
}

std::tuple<Tensor, Tensor> recurrent_gated_delta_rule_forward(
    Tensor query, Tensor key, Tensor value, OptionalTensor g, OptionalTensor beta,
    OptionalTensor initial_state, OptionalTensor cu_seqlens, OptionalTensor A_log,
    OptionalTensor dt_bias, double scale, bool output_final_state, bool use_qk_l2norm,
    bool use_gate, bool use_beta_sigmoid, bool allow_neg_eigval, bool state_v_first) {
  return gated_delta_rule("recurrent_gated_delta_rule", cpu::recurrent_forward,
                          {query, key, value, g, beta, initial_state, cu_seqlens, A_log, dt_bias,
                           scale, output_final_state, use_qk_l2norm, use_gate, use_beta_sigmoid,
                           allow_neg_eigval, state_v_first});
}

std::tuple<Tensor, Tensor, Tensor> recurrent_gated_delta_rule_forward_saving(
    Tensor query, Tensor key, Tensor value, OptionalTensor g, OptionalTensor beta,
    OptionalTensor initial_state, OptionalTensor cu_seqlens, OptionalTensor A_log,
    OptionalTensor dt_bias, double scale, bool output_final_state, bool use_qk_l2norm,
    bool use_gate, bool use_beta_sigmoid, bool allow_neg_eigval, bool state_v_first) {
  return gated_delta_rule_saving("recurrent_gated_delta_rule", cpu::recurrent_forward,
                                 {query, key, value, g, beta, initial_state, cu_seqlens, A_log,
                                  dt_bias, scale, output_final_state, use_qk_l2norm, use_gate,
                                  use_beta_sigmoid, allow_neg_eigval, state_v_first});
}

// Writes state.
Tensor gated_delta_rule_update(Tensor query, Tensor key, Tensor value, OptionalTensor g,
                               OptionalTensor beta, Tensor state, OptionalTensor state_indices,
                               OptionalTensor A_log, OptionalTensor dt_bias, double scale,
                               bool use_qk_l2norm, bool use_gate, bool use_beta_sigmoid,
                               bool allow_neg_eigval, bool state_v_first) {
  const char* op = "gated_delta_rule_update";
  const OptionalTensor none;
  const RuleArguments x{query,
                        key,
                        value,
                        g,
                        beta,
                        none,
                        none,
                        A_log,
                        dt_bias,
                        scale,
                        false,
                        use_qk_l2norm,
                        use_gate,
                        use_beta_sigmoid,
                        allow_neg_eigval,
                        state_v_first};
  GatedDeltaRuleParams p = check_keys_and_values(op, check_on_cpu, key, value, g, beta);
  check_rule(op, check_on_cpu, x, p);
  check_rank(op, "state", state, 4, state_v_first ? "[N, HV, V, K]" : "[N, HV, K, V]");
  const int64_t slots = state_indices ? state.sizes()[0] : p.batch;
  check_shape(op, "state", state, {slots, p.value_heads, x.state_rows(), x.state_columns()},
              state_v_first ? "[N, HV, V, K]" : "[N, HV, K, V]");
  check_on_cpu(op, "state", state);
  STD_TORCH_CHECK(state.scalar_type() == state_dtype(key), op, ": state is ",
                  name_of(state.scalar_type()), "; supported: ", name_of(state_dtype(key)),
                  ", which the arithmetic is in");
  check_own_memory(op, "state", state);
  std::vector<int64_t> rows;
  if (state_indices) {
    check_shape(op, "state_indices", *state_indices, {p.batch}, "[B]");
    check_index(op, check_on_cpu, "state_indices", *state_indices);
    rows = read_slots(op, "state_indices", *state_indices, slots);
    p.state_slots = rows.data();
  }
  const int64_t out_sizes[] = {p.batch, p.tokens, p.value_heads, int64_t(p.dim_v)};
  const Tensor out = allocate(query, {out_sizes, 4}, query.scalar_type());
  p.output = mutable_view<4>(out);
  p.initial_state = view<4>(state);
  p.final_state = mutable_view<4>(state);
  if (state_v_first) {
    p.initial_state = v_first(p.initial_state);
    p.final_state = v_first(p.final_state);
  }
  cpu::recurrent_forward(p, TorchParallel());
  return out;
}

Gradients run_backward(const char* op, const RuleArguments& x, const OptionalTensor& grad_out,
                       const OptionalTensor& grad_final_state, const OptionalTensor& saved_states,
                       int64_t wanted) {
  const std::vector<int64_t> starts = host_cu_seqlens(op, x.cu_seqlens, x.key);
  GatedDeltaRuleBackwardParams p;
  static_cast<GatedDeltaRuleParams&>(p) =
      check_keys_and_values(op, check_on_cpu, x.key, x.value, x.g, x.beta);
  set_sequences(p, x.cu_seqlens, starts);
  check_rule(op, check_on_cpu, x, p);

  bool needs_states = false;
  for (int64_t n = 0; n < p.sequences; ++n)
    needs_states = needs_states || p.sequence_end(n) - p.sequence_begin(n) > kSegmentTokens;
  const auto states = check_upstream(op, check_on_cpu, x, p, grad_out, grad_final_state,
                                     saved_states, needs_states, p);
  const auto new_result = [&](const std::vector<int64_t>& sizes, ScalarType dtype) {
    return allocate(x.key, {sizes.data(), sizes.size()}, dtype);
  };
  const Gradients d = make_gradients(op, x, p, wanted, new_result, p);
  std::vector<double> sums;
  if (wants(wanted, kALog) || wants(wanted, kDtBias)) {
    sums.resize(size_t(2 * p.sequences * p.value_heads));
    p.d_gate_sums = sums.data();
  }
  cpu::backward(p, TorchParallel());

  for (const auto& [which, index, tensor] :
       {std::tuple(kALog, 0, &std::get<kALog>(d)), std::tuple(kDtBias, 1, &std::get<kDtBias>(d))}) {
    if (!wants(wanted, which)) continue;
    for (int64_t h = 0; h < p.value_heads; ++h) {
      double sum = 0;
      for (int64_t n = 0; n < p.sequences; ++n)
        sum += sums[size_t(2 * (n * p.value_heads + h) + index)];
      store_element(tensor->mutable_data_ptr(), to_dtype(state_dtype(x.key)), h, sum);
    }
  }
  return d;
}

// Equation (8) by running the rule twice: from the zero state it gives U, from I and with v = 0 it
// gives M.
std::tuple<Tensor, Tensor> chunk_transition(Tensor key, Tensor value, OptionalTensor g,
                                            OptionalTensor beta, OptionalTensor cu_seqlens,
                                            bool use_qk_l2norm) {
  const char* op = "chunk_transition";
  const std::vector<int64_t> starts = host_cu_seqlens(op, cu_seqlens, key);
  GatedDeltaRuleParams p = check_keys_and_values(op, check_on_cpu, key, value, g, beta);
  set_sequences(p, cu_seqlens, starts);
  const Tensor M = new_state(key, p.sequences, p.value_heads, p.dim_k, p.dim_k);
  const Tensor U = new_state(key, p.sequences, p.value_heads, p.dim_k, p.dim_v);
  p.l2norm = use_qk_l2norm;

  p.final_state = mutable_view<4>(U);
  cpu::chunk_forward(p, TorchParallel());

  p.value = {};
  p.dim_v = p.dim_k;
  p.initial_state_is_identity = true;
  p.final_state = mutable_view<4>(M);
  cpu::chunk_forward(p, TorchParallel());
  return {M, U};
}

}  // namespace
}  // namespace deltanet::ops

STABLE_TORCH_LIBRARY_IMPL(deltanet_ext, CPU, m) {
  m.impl("chunk_gated_delta_rule_forward",
         TORCH_BOX(&deltanet::ops::chunk_gated_delta_rule_forward));
  m.impl("recurrent_gated_delta_rule_forward",
         TORCH_BOX(&deltanet::ops::recurrent_gated_delta_rule_forward));
  m.impl("gated_delta_rule_update", TORCH_BOX(&deltanet::ops::gated_delta_rule_update));
  m.impl("chunk_gated_delta_rule_forward_saving",
         TORCH_BOX(&deltanet::ops::chunk_gated_delta_rule_forward_saving));
  m.impl("recurrent_gated_delta_rule_forward_saving",
         TORCH_BOX(&deltanet::ops::recurrent_gated_delta_rule_forward_saving));
  m.impl("chunk_gated_delta_rule_backward",
         TORCH_BOX(&deltanet::ops::chunk_gated_delta_rule_backward<deltanet::ops::run_backward>));
  m.impl("chunk_transition", TORCH_BOX(&deltanet::ops::chunk_transition));
}
