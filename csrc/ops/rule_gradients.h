// SPDX-License-Identifier: Apache-2.0
//
// The arguments and results of chunk_gated_delta_rule_backward, which both backends share: checks,
// and core's parameters from torch's tensors.
#pragma once
#include <torch/csrc/stable/ops.h>

#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "ops/rule_arguments.h"

namespace deltanet::ops {

// Which gradients are wanted: bit i of the operator's `wanted`, and the i-th of its results.
enum Gradient { kQuery, kKey, kValue, kG, kBeta, kInitialState, kALog, kDtBias };

using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

inline bool wants(int64_t wanted, Gradient which) { return wanted >> which & 1; }

// [B, S, HV, K, V] as [B * S, HV, K, V]: the saved states are contiguous.
template <class AnyView5>
auto states_of(const AnyView5& x) {
  std::conditional_t<std::is_same_v<AnyView5, View<5>>, View<4>, MutableView<4>> states;
  states.data = x.data;
  states.dtype = x.dtype;
  for (int i = 0; i < 4; ++i) states.stride[i] = x.stride[i + 1];
  return states;
}

// Checks what arrives for the backward pass, and makes views of it. `needs_states`: some sequence
// is, or may be, longer than a segment. Returns the tensor that holds the memory of d.states.
inline std::optional<Tensor> check_upstream(const char* op, CheckDevice& device,
                                            const RuleArguments& x, const GatedDeltaRuleParams& p,
                                            const OptionalTensor& grad_out,
                                            const OptionalTensor& grad_final_state,
                                            const OptionalTensor& saved_states, bool needs_states,
                                            RuleGradients& d) {
  if (grad_out) {
    check_shape(op, "grad_out", *grad_out, {p.batch, p.tokens, p.value_heads, p.dim_v},
                "[B, T, HV, V]");
    check_float(op, "grad_out", *grad_out, device);
    STD_TORCH_CHECK(grad_out->scalar_type() == x.query.scalar_type(), op, ": grad_out is ",
                    name_of(grad_out->scalar_type()), " and query is ",
                    name_of(x.query.scalar_type()), "; they must have one dtype");
    d.grad_output = view<4>(*grad_out);
  }
  if (grad_final_state) {
    check_shape(op, "grad_final_state", *grad_final_state,
                {p.sequences, p.value_heads, x.state_rows(), x.state_columns()},
                x.state_v_first ? "[N, HV, V, K]" : "[N, HV, K, V]");
    check_float(op, "grad_final_state", *grad_final_state, device);
    d.grad_final_state = view<4>(*grad_final_state);
    if (x.state_v_first) d.grad_final_state = v_first(d.grad_final_state);
  }
  STD_TORCH_CHECK(saved_states || !needs_states, op, ": saved_states is missing; sequences of ",
                  "more than ", kSegmentTokens, " tokens need it");
  if (!saved_states) return std::nullopt;
  check_shape(op, "saved_states", *saved_states,
              {p.batch, p.tokens / kSegmentTokens, p.value_heads, p.dim_k, p.dim_v},
              "[B, T / 1056, HV, K, V]");
  check_float(op, "saved_states", *saved_states, device);
  const Tensor states = torch::stable::contiguous(*saved_states);
  d.states = states_of(view<5>(states));
  return states;
}

// The results that are wanted, and empty tensors for the others, made by allocate(sizes, dtype);
// makes views of the first six.
template <class Allocate>
Gradients make_gradients(const char* op, const RuleArguments& x, const GatedDeltaRuleParams& p,
                         int64_t wanted, const Allocate& allocate, RuleGradients& d) {
  const ScalarType arithmetic = state_dtype(x.key), dtype = x.key.scalar_type();
  const auto result = [&](Gradient which, bool possible, const std::vector<int64_t>& sizes,
                          ScalarType of) {
    const bool asked = wants(wanted, which);
    STD_TORCH_CHECK(possible || !asked, op, ": wanted asks for the gradient of a missing argument");
    return allocate(asked ? sizes : std::vector<int64_t>{0}, of);
  };
  const std::vector<int64_t> keys{p.batch, p.tokens, p.key_heads, p.dim_k},
      values{p.batch, p.tokens, p.value_heads, p.dim_v},
      per_token{p.batch, p.tokens, p.value_heads}, per_head{p.value_heads},
      per_sequence{p.sequences, p.value_heads, x.state_rows(), x.state_columns()};
  Gradients made{result(kQuery, true, keys, dtype),
                 result(kKey, true, keys, dtype),
                 result(kValue, true, values, dtype),
                 result(kG, bool(x.g), per_token, x.g ? x.g->scalar_type() : dtype),
                 result(kBeta, bool(x.beta), per_token, x.beta ? x.beta->scalar_type() : dtype),
                 result(kInitialState, bool(x.initial_state), per_sequence, arithmetic),
                 result(kALog, bool(x.A_log), per_head, arithmetic),
                 result(kDtBias, bool(x.dt_bias), per_head, arithmetic)};
  if (wants(wanted, kQuery)) d.d_query = mutable_view<4>(std::get<kQuery>(made));
  if (wants(wanted, kKey)) d.d_key = mutable_view<4>(std::get<kKey>(made));
  if (wants(wanted, kValue)) d.d_value = mutable_view<4>(std::get<kValue>(made));
  if (wants(wanted, kG)) d.d_g = mutable_view<3>(std::get<kG>(made));
  if (wants(wanted, kBeta)) d.d_beta = mutable_view<3>(std::get<kBeta>(made));
  if (wants(wanted, kInitialState)) {
    d.d_initial_state = mutable_view<4>(std::get<kInitialState>(made));
    if (x.state_v_first) d.d_initial_state = v_first(d.d_initial_state);
  }
  return made;
}

// What a backend does for chunk_gated_delta_rule_backward.
using RunBackward = Gradients(const char* op, const RuleArguments& x,
                              const OptionalTensor& grad_out,
                              const OptionalTensor& grad_final_state,
                              const OptionalTensor& saved_states, int64_t wanted);

// The operator with the arguments of its schema.
template <RunBackward* run>
Gradients chunk_gated_delta_rule_backward(OptionalTensor grad_out, OptionalTensor grad_final_state,
                                          Tensor query, Tensor key, Tensor value, OptionalTensor g,
                                          OptionalTensor beta, OptionalTensor initial_state,
                                          OptionalTensor cu_seqlens, OptionalTensor A_log,
                                          OptionalTensor dt_bias, OptionalTensor saved_states,
                                          double scale, bool use_qk_l2norm, bool use_gate,
                                          bool use_beta_sigmoid, bool allow_neg_eigval,
                                          bool state_v_first, int64_t wanted) {
  constexpr bool kOutputFinalState = true;  // its gradient may be what arrives
  return run("chunk_gated_delta_rule_backward",
             {query, key, value, g, beta, initial_state, cu_seqlens, A_log, dt_bias, scale,
              kOutputFinalState, use_qk_l2norm, use_gate, use_beta_sigmoid, allow_neg_eigval,
              state_v_first},
             grad_out, grad_final_state, saved_states, wanted);
}

}  // namespace deltanet::ops
