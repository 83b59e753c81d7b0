// SPDX-License-Identifier: Apache-2.0
//
// Every operator of the library, in one place. Fake kernels and autograd formulas are registered
// from Python (deltanet_ext/_fake.py, _autograd.py). Functional, with two exceptions that their
// schemas name: no argument is written, no result aliases an argument.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(deltanet_ext, m) {
  // query, key [B, T, HK, K]; value [B, T, HV, V]; g, beta [B, T, HV]; initial_state [N, HV, K, V],
  // or [N, HV, V, K] with state_v_first; cu_seqlens [N+1]; A_log, dt_bias [HV]. Returns the output
  // [B, T, HV, V] and the final state; the latter is empty ([0]) when it is not asked for.
  m.def(
      "chunk_gated_delta_rule_forward(Tensor query, Tensor key, Tensor value, Tensor? g, "
      "Tensor? beta, Tensor? initial_state, Tensor? cu_seqlens, Tensor? A_log, Tensor? dt_bias, "
      "float scale, bool output_final_state, bool use_qk_l2norm, bool use_gate, "
      "bool use_beta_sigmoid, bool allow_neg_eigval, bool state_v_first) -> (Tensor, Tensor)");
  // The same, token by token.
  m.def(
      "recurrent_gated_delta_rule_forward(Tensor query, Tensor key, Tensor value, Tensor? g, "
      "Tensor? beta, Tensor? initial_state, Tensor? cu_seqlens, Tensor? A_log, Tensor? dt_bias, "
      "float scale, bool output_final_state, bool use_qk_l2norm, bool use_gate, "
      "bool use_beta_sigmoid, bool allow_neg_eigval, bool state_v_first) -> (Tensor, Tensor)");
  // Both again, for a backward pass that is to come: also return the states that it starts from,
  // [B, T / 1056, HV, K, V] (core/params.h, kSegmentTokens).
  m.def(
      "chunk_gated_delta_rule_forward_saving(Tensor query, Tensor key, Tensor value, Tensor? g, "
      "Tensor? beta, Tensor? initial_state, Tensor? cu_seqlens, Tensor? A_log, Tensor? dt_bias, "
      "float scale, bool output_final_state, bool use_qk_l2norm, bool use_gate, "
      "bool use_beta_sigmoid, bool allow_neg_eigval, bool state_v_first) "
      "-> (Tensor, Tensor, Tensor)");
  m.def(
      "recurrent_gated_delta_rule_forward_saving(Tensor query, Tensor key, Tensor value, "
      "Tensor? g, Tensor? beta, Tensor? initial_state, Tensor? cu_seqlens, Tensor? A_log, "
      "Tensor? dt_bias, float scale, bool output_final_state, bool use_qk_l2norm, bool use_gate, "
      "bool use_beta_sigmoid, bool allow_neg_eigval, bool state_v_first) "
      "-> (Tensor, Tensor, Tensor)");
  // The gradients of either. grad_out [B, T, HV, V] and grad_final_state (as initial_state) may be
  // missing: zero. saved_states is needed where a sequence has more than 1056 tokens. Bit i of
  // `wanted` asks for the i-th result: the gradients of query, key, value, g, beta (shape and dtype
  // of these), initial_state, A_log, dt_bias (their shape; fp32, or fp64 for fp64 inputs). What is
  // not asked for is empty ([0]).
  m.def(
      "chunk_gated_delta_rule_backward(Tensor? grad_out, Tensor? grad_final_state, Tensor query, "
      "Tensor key, Tensor value, Tensor? g, Tensor? beta, Tensor? initial_state, "
      "Tensor? cu_seqlens, Tensor? A_log, Tensor? dt_bias, Tensor? saved_states, float scale, "
      "bool use_qk_l2norm, bool use_gate, bool use_beta_sigmoid, bool allow_neg_eigval, "
      "bool state_v_first, int wanted) "
      "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  // The same for the next tokens of running sequences, whose state [N, HV, K, V] is overwritten;
  // state_indices [B].
  m.def(
      "gated_delta_rule_update(Tensor query, Tensor key, Tensor value, Tensor? g, Tensor? beta, "
      "Tensor(a!) state, Tensor? state_indices, Tensor? A_log, Tensor? dt_bias, float scale, "
      "bool use_qk_l2norm, bool use_gate, bool use_beta_sigmoid, bool allow_neg_eigval, "
      "bool state_v_first) -> Tensor");
  // Returns M [N, HV, K, K] and U [N, HV, K, V]: a whole sequence acts on the state as S -> M S +
  // U.
  m.def(
      "chunk_transition(Tensor key, Tensor value, Tensor? g, Tensor? beta, Tensor? cu_seqlens, "
      "bool use_qk_l2norm) -> (Tensor, Tensor)");
  // L [..., C, C] -> (I + tril(L, -1))^-1
  m.def("unit_lower_triangular_inverse(Tensor L) -> Tensor");

  // The short convolution before the rule. x [B, D, T], weight [D, W], bias [D], initial_states
  // [N, D, W-1], seq_idx [B, T], cu_seqlens [N+1]. Returns the output [B, D, T], a transposed
  // [B, T, D], and the last W-1 inputs of each sequence [N, D, W-1], or none of them ([0, D, W-1]).
  m.def(
      "causal_conv1d_forward(Tensor x, Tensor weight, Tensor? bias, Tensor? initial_states, "
      "Tensor? seq_idx, Tensor? cu_seqlens, bool silu, bool return_final_states) "
      "-> (Tensor, Tensor)");
  // Its gradients. grad_out and grad_final_states may be missing: zero. Bit i of `wanted` asks for
  // the i-th result: the gradients of x (stored as the output), weight, bias, initial_states, each
  // of the dtype of what it belongs to. What is not asked for is empty ([0]).
  m.def(
      "causal_conv1d_backward(Tensor? grad_out, Tensor? grad_final_states, Tensor x, "
      "Tensor weight, Tensor? bias, Tensor? initial_states, Tensor? seq_idx, Tensor? cu_seqlens, "
      "bool silu, int wanted) -> (Tensor, Tensor, Tensor, Tensor)");
  // The same for the next tokens x [B, D, T] of running sequences, whose last inputs conv_state
  // [N, D, S] are read and written; conv_state_indices [B].
  m.def(
      "causal_conv1d_update(Tensor x, Tensor(a!) conv_state, Tensor weight, Tensor? bias, "
      "Tensor? conv_state_indices, bool silu) -> Tensor");

  // The norm behind the rule. x, gate [..., C], weight [C]. Returns [..., C], contiguous.
  m.def("gated_rms_norm_forward(Tensor x, Tensor gate, Tensor weight, float eps) -> Tensor");
  // Its gradients: bits of `wanted`, and results, for x, gate, weight.
  m.def(
      "gated_rms_norm_backward(Tensor grad_out, Tensor x, Tensor gate, Tensor weight, float eps, "
      "int wanted) -> (Tensor, Tensor, Tensor)");
}
