// SPDX-License-Identifier: Apache-2.0
//
// The gated delta rule and its transition on the CPU: checks, allocation, call.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <tuple>

#include "cpu/forward.h"
#include "ops/allocate.h"
#include "ops/checks.h"
#include "ops/parallel_torch.h"
#include "ops/rule_arguments.h"
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

using Forward = void(const GatedDeltaRuleParams&, const Parallel&);

std::tuple<Tensor, Tensor> gated_delta_rule(const char* op, Forward& forward,
                                            const RuleArguments& x) {
  const std::vector<int64_t> starts = host_cu_seqlens(op, x.cu_seqlens, x.key);
  GatedDeltaRuleParams p = check_keys_and_values(op, check_on_cpu, x.key, x.value, x.g, x.beta);
  set_sequences(p, x.cu_seqlens, starts);
  check_rule(op, check_on_cpu, x, p);

  const int64_t out_sizes[] = {p.batch, p.tokens, p.value_heads, int64_t(p.dim_v)};
  const Tensor out = allocate(x.query, {out_sizes, 4}, x.query.scalar_type());
  const int64_t none[] = {0};
  const Tensor final_state = x.output_final_state ? new_state(x.key, p.sequences, p.value_heads,
                                                              x.state_rows(), x.state_columns())
                                                  : allocate(x.key, {none, 1}, state_dtype(x.key));
  set_results(out, final_state, x, p);
  forward(p, TorchParallel());
  return {out, final_state};
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
  m.impl("chunk_transition", TORCH_BOX(&deltanet::ops::chunk_transition));
}
