// SPDX-License-Identifier: Apache-2.0
//
// The gated delta rule and its transition on CUDA: checks, allocation, call. Nothing here waits for
// the device: the contents of cu_seqlens are the kernels' business.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <tuple>

#include "cuda/forward.h"
#include "ops/cuda_context.h"
#include "ops/cuda_rule.h"
#include "ops/rule_arguments.h"
#include "ops/rule_gradients.h"

namespace deltanet::ops {
namespace {

using torch::stable::new_empty;

// With `saved_states`, also what the backward pass starts from.
std::tuple<Tensor, Tensor> gated_delta_rule(const char* op, bool chunked, const RuleArguments& x,
                                            Tensor* saved_states = nullptr) {
  cuda::RuleParams p = check_tokens(op, x.key, x.value, x.g, x.beta, x.cu_seqlens);
  check_rule(op, check_device, x, p);

  const int64_t out_sizes[] = {p.batch, p.tokens, p.value_heads, int64_t(p.dim_v)};
  const Tensor out = new_empty(x.query, {out_sizes, 4}, x.query.scalar_type());
  const int64_t none[] = {0};
  const Tensor final_state = x.output_final_state ? new_state(x.key, p.sequences, p.value_heads,
                                                              x.state_rows(), x.state_columns())
                                                  : new_empty(x.key, {none, 1}, ScalarType::Float);
  set_results(out, final_state, x, p);
  OptionalTensor saved;
  if (saved_states) {
    const int64_t sizes[] = {p.batch, p.tokens / kSegmentTokens, p.value_heads, p.dim_k, p.dim_v};
    saved = *saved_states = new_empty(x.key, {sizes, 5}, ScalarType::Float);
    p.saved_states = states_of(mutable_view<5>(*saved));
  }
  const CudaDevice device(x.key);  // on which the size of the workspace depends
  const Tensor workspace = new_workspace(x.key, chunked ? cuda::chunk_forward_workspace(p) : 0);

  const CudaContext context(
      {x.query, x.key, x.value, x.g, x.beta, x.initial_state, x.cu_seqlens, x.A_log, x.dt_bias},
      {out, final_state, workspace, saved});
  if (chunked)
    cuda::chunk_forward(p, workspace.mutable_data_ptr(), context.stream());
  else
    cuda::recurrent_forward(p, context.stream());
  return {out, final_state};
}

std::tuple<Tensor, Tensor, Tensor> gated_delta_rule_saving(const char* op, bool chunked,
                                                           const RuleArguments& x) {
  Tensor saved_states;
  const auto [out, final_state] = gated_delta_rule(op, chunked, x, &saved_states);
  return {out, final_state, saved_states};
}

std::tuple<Tensor, Tensor> chunk_gated_delta_rule_forward(
    Tensor query, Tensor key, Tensor value, OptionalTensor g, OptionalTensor beta,
    OptionalTensor initial_state, OptionalTensor cu_seqlens, OptionalTensor A_log,
    OptionalTensor dt_bias, double scale, bool output_final_state, bool use_qk_l2norm,
    bool use_gate, bool use_beta_sigmoid, bool allow_neg_eigval, bool state_v_first) {
  return gated_delta_rule("chunk_gated_delta_rule", true,
                          {query, key, value, g, beta, initial_state, cu_seqlens, A_log, dt_bias,
                           scale, output_final_state, use_qk_l2norm, use_gate, use_beta_sigmoid,
                           allow_neg_eigval, state_v_first});
}

std::tuple<Tensor, Tensor, Tensor> chunk_gated_delta_rule_forward_saving(
    Tensor query, Tensor key, Tensor value, OptionalTensor g, OptionalTensor beta,
    OptionalTensor initial_state, OptionalTensor cu_seqlens, OptionalTensor A_log,
    OptionalTensor dt_bias, double scale, bool output_final_state, bool use_qk_l2norm,
    bool use_gate, bool use_beta_sigmoid, bool allow_neg_eigval, bool state_v_first) {
  return gated_delta_rule_saving("chunk_gated_delta_rule", true,
                                 {query, key, value, g, beta, initial_state, cu_seqlens, A_log,
                                  dt_bias, scale, output_final_state, use_qk_l2norm, use_gate,
                                  use_beta_sigmoid, allow_neg_eigval, state_v_first});
}

std::tuple<Tensor, Tensor> recurrent_gated_delta_rule_forward(
    Tensor query, Tensor key, Tensor value, OptionalTensor g, OptionalTensor beta,
    OptionalTensor initial_state, OptionalTensor cu_seqlens, OptionalTensor A_log,
    OptionalTensor dt_bias, double scale, bool output_final_state, bool use_qk_l2norm,
    bool use_gate, bool use_beta_sigmoid, bool allow_neg_eigval, bool state_v_first) {
  return gated_delta_rule("recurrent_gated_delta_rule", false,
                          {query, key, value, g, beta, initial_state, cu_seqlens, A_log, dt_bias,
                           scale, output_final_state, use_qk_l2norm, use_gate, use_beta_sigmoid,
                           allow_neg_eigval, state_v_first});
}

std::tuple<Tensor, Tensor, Tensor> recurrent_gated_delta_rule_forward_saving(
    Tensor query, Tensor key, Tensor value, OptionalTensor g, OptionalTensor beta,
    OptionalTensor initial_state, OptionalTensor cu_seqlens, OptionalTensor A_log,
    OptionalTensor dt_bias, double scale, bool output_final_state, bool use_qk_l2norm,
    bool use_gate, bool use_beta_sigmoid, bool allow_neg_eigval, bool state_v_first) {
  return gated_delta_rule_saving("recurrent_gated_delta_rule", false,
                                 {query, key, value, g, beta, initial_state, cu_seqlens, A_log,
                                  dt_bias, scale, output_final_state, use_qk_l2norm, use_gate,
                                  use_beta_sigmoid, allow_neg_eigval, state_v_first});
}

// Equation (8) by running the rule twice: from the zero state it gives U, from I and with v = 0 it
// gives M.
std::tuple<Tensor, Tensor> chunk_transition(Tensor key, Tensor value, OptionalTensor g,
                                            OptionalTensor beta, OptionalTensor cu_seqlens,
                                            bool use_qk_l2norm) {
  cuda::RuleParams p = check_tokens("chunk_transition", key, value, g, beta, cu_seqlens);
  p.l2norm = use_qk_l2norm;
  p.fast = false;  // a map is applied many times, and M cancels
  const Tensor M = new_state(key, p.sequences, p.value_heads, p.dim_k, p.dim_k);
  const Tensor U = new_state(key, p.sequences, p.value_heads, p.dim_k, p.dim_v);
  p.final_state = mutable_view<4>(U);
  cuda::RuleParams identity = p;
  identity.value = {};
  identity.dim_v = p.dim_k;
  identity.initial_state_is_identity = true;
  identity.final_state = mutable_view<4>(M);

  const CudaDevice device(key);  // on which the sizes of the workspaces depend
  const Tensor workspace = new_workspace(key, cuda::chunk_forward_workspace(p));
  const Tensor second = new_workspace(key, cuda::chunk_forward_workspace(identity));
  const CudaContext context({key, value, g, beta, cu_seqlens}, {M, U, workspace, second});
  cuda::chunk_forward(p, workspace.mutable_data_ptr(), context.stream());
  cuda::chunk_forward(identity, second.mutable_data_ptr(), context.stream());
  return {M, U};
}

}  // namespace
}  // namespace deltanet::ops

STABLE_TORCH_LIBRARY_IMPL(deltanet_ext, DELTANET_CUDA_KEY, m) {
  m.impl("chunk_gated_delta_rule_forward",
         TORCH_BOX(&deltanet::ops::chunk_gated_delta_rule_forward));
  m.impl("chunk_gated_delta_rule_forward_saving",
         TORCH_BOX(&deltanet::ops::chunk_gated_delta_rule_forward_saving));
  m.impl("recurrent_gated_delta_rule_forward",
         TORCH_BOX(&deltanet::ops::recurrent_gated_delta_rule_forward));
  m.impl("recurrent_gated_delta_rule_forward_saving",
         TORCH_BOX(&deltanet::ops::recurrent_gated_delta_rule_forward_saving));
  m.impl("chunk_transition", TORCH_BOX(&deltanet::ops::chunk_transition));
}
