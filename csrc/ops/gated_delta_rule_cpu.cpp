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
#include "ops/tensor_view.h"

namespace deltanet::ops {
namespace {

using OptionalTensor = std::optional<Tensor>;

// Sizes and checks that every form of the rule shares.
GatedDeltaRuleParams check_keys_and_values(const char* op, const Tensor& key, const Tensor& value,
                                           const OptionalTensor& g, const OptionalTensor& beta,
                                           const std::vector<int64_t>& cu_seqlens, bool packed) {
  check_rank(op, "key", key, 4, "[B, T, HK, K]");
  check_rank(op, "value", value, 4, "[B, T, HV, V]");
  GatedDeltaRuleParams p;
  p.batch = key.sizes()[0];
  p.tokens = key.sizes()[1];
  p.key_heads = key.sizes()[2];
  p.value_heads = value.sizes()[2];
  check_shape(op, "value", value, {p.batch, p.tokens, p.value_heads, value.sizes()[3]},
              "[B, T, HV, V]");
  STD_TORCH_CHECK(p.key_heads >= 1 && p.value_heads >= 1 && p.value_heads % p.key_heads == 0, op,
                  ": value has ", p.value_heads, " heads and key ", p.key_heads,
                  "; supported: a multiple of the key heads, at least 1");
  for (const auto& [name, x] : {std::pair("key", &key), std::pair("value", &value)}) {
    const int64_t dim = x->sizes()[3];
    STD_TORCH_CHECK(dim >= 1 && dim <= kMaxHeadDim, op, ": ", name, " has head dim ", dim,
                    "; supported: 1 to ", kMaxHeadDim);
    check_cpu_float(op, name, *x);
    STD_TORCH_CHECK(x->scalar_type() == key.scalar_type(), op, ": ", name, " is ",
                    name_of(x->scalar_type()), " and key is ", name_of(key.scalar_type()),
                    "; query, key and value must have one dtype");
  }
  p.dim_k = int(key.sizes()[3]);
  p.dim_v = int(value.sizes()[3]);
  for (const auto& [name, x] : {std::pair("g", &g), std::pair("beta", &beta)}) {
    if (!*x) continue;
    check_shape(op, name, **x, {p.batch, p.tokens, p.value_heads}, "[B, T, HV]");
    check_cpu_float(op, name, **x);
    check_gate_dtype(op, name, **x, key.scalar_type());
  }
  p.sequences = packed ? int64_t(cu_seqlens.size()) - 1 : p.batch;
  p.cu_seqlens = packed ? cu_seqlens.data() : nullptr;
  p.key = view<4>(key);
  p.value = view<4>(value);
  p.g = view<3>(g);
  p.beta = view<3>(beta);
  return p;
}

std::vector<int64_t> host_cu_seqlens(const char* op, const OptionalTensor& cu_seqlens,
                                     const Tensor& key) {
  if (!cu_seqlens) return {};
  check_rank(op, "key", key, 4, "[B, T, HK, K]");
  return read_cu_seqlens(op, *cu_seqlens, key.sizes()[0], key.sizes()[1]);
}

ScalarType state_dtype(const Tensor& key) {
  return key.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

Tensor new_state(const Tensor& like, int64_t sequences, int64_t heads, int64_t rows,
                 int64_t columns) {
  const int64_t sizes[] = {sequences, heads, rows, columns};
  return allocate(like, {sizes, 4}, state_dtype(like));
}

template <class AnyView>
AnyView v_first(AnyView state) {
  std::swap(state.stride[2], state.stride[3]);
  return state;
}

void check_vector(const char* op, const char* name, const Tensor& x, int64_t heads) {
  check_shape(op, name, x, {heads}, "[HV]");
  check_cpu_float(op, name, x);
}

using Forward = void(const GatedDeltaRuleParams&, const Parallel&);

std::tuple<Tensor, Tensor> gated_delta_rule(
    const char* op, Forward& forward, const Tensor& query, const Tensor& key, const Tensor& value,
    const OptionalTensor& g, const OptionalTensor& beta, const OptionalTensor& initial_state,
    const OptionalTensor& cu_seqlens, const OptionalTensor& A_log, const OptionalTensor& dt_bias,
    double scale, bool output_final_state, bool use_qk_l2norm, bool use_gate, bool use_beta_sigmoid,
    bool allow_neg_eigval, bool state_v_first) {
  const std::vector<int64_t> starts = host_cu_seqlens(op, cu_seqlens, key);
  GatedDeltaRuleParams p = check_keys_and_values(op, key, value, g, beta, starts, bool(cu_seqlens));
  check_shape(op, "query", query, {p.batch, p.tokens, p.key_heads, p.dim_k}, "[B, T, HK, K]");
  check_cpu_float(op, "query", query);
  STD_TORCH_CHECK(query.scalar_type() == key.scalar_type(), op, ": query is ",
                  name_of(query.scalar_type()), " and key is ", name_of(key.scalar_type()),
                  "; query, key and value must have one dtype");
  const int64_t rows = state_v_first ? p.dim_v : p.dim_k,
                columns = state_v_first ? p.dim_k : p.dim_v;
  if (initial_state) {
    check_shape(op, "initial_state", *initial_state, {p.sequences, p.value_heads, rows, columns},
                state_v_first ? "[N, HV, V, K]" : "[N, HV, K, V]");
    check_cpu_float(op, "initial_state", *initial_state);
  }
  STD_TORCH_CHECK(use_gate == bool(A_log), op, ": use_gate is ", use_gate, " and A_log is ",
                  A_log ? "given" : "missing", "; they belong together");
  STD_TORCH_CHECK(!use_gate || g, op, ": use_gate needs g, the raw gate");
  STD_TORCH_CHECK(!dt_bias || use_gate, op, ": dt_bias is given without use_gate");
  if (A_log) check_vector(op, "A_log", *A_log, p.value_heads);
  if (dt_bias) check_vector(op, "dt_bias", *dt_bias, p.value_heads);
  STD_TORCH_CHECK(!use_beta_sigmoid || beta, op, ": use_beta_sigmoid needs beta");
  STD_TORCH_CHECK(!allow_neg_eigval || use_beta_sigmoid, op,
                  ": allow_neg_eigval needs use_beta_sigmoid");

  const int64_t out_sizes[] = {p.batch, p.tokens, p.value_heads, int64_t(p.dim_v)};
  const Tensor out = allocate(query, {out_sizes, 4}, query.scalar_type());
  const int64_t none[] = {0};
  const Tensor final_state = output_final_state
                                 ? new_state(key, p.sequences, p.value_heads, rows, columns)
                                 : allocate(key, {none, 1}, state_dtype(key));

  p.query = view<4>(query);
  p.output = mutable_view<4>(out);
  p.initial_state = view<4>(initial_state);
  if (output_final_state) p.final_state = mutable_view<4>(final_state);
  if (state_v_first) {
    p.initial_state = v_first(p.initial_state);
    p.final_state = v_first(p.final_state);
  }
  p.A_log = view<1>(A_log);
  p.dt_bias = view<1>(dt_bias);
  p.scale = scale;
  p.l2norm = use_qk_l2norm;
  p.gate_in_kernel = use_gate;
  p.beta_sigmoid = use_beta_sigmoid;
  p.beta_doubled = allow_neg_eigval;
  forward(p, TorchParallel());
  return {out, final_state};
}

std::tuple<Tensor, Tensor> chunk_gated_delta_rule_forward(
    Tensor query, Tensor key, Tensor value, OptionalTensor g, OptionalTensor beta,
    OptionalTensor initial_state, OptionalTensor cu_seqlens, OptionalTensor A_log,
    OptionalTensor dt_bias, double scale, bool output_final_state, bool use_qk_l2norm,
    bool use_gate, bool use_beta_sigmoid, bool allow_neg_eigval, bool state_v_first) {
  return gated_delta_rule("chunk_gated_delta_rule", cpu::chunk_forward, query, key, value, g, beta,
                          initial_state, cu_seqlens, A_log, dt_bias, scale, output_final_state,
                          use_qk_l2norm, use_gate, use_beta_sigmoid, allow_neg_eigval,
                          state_v_first);
}

std::tuple<Tensor, Tensor> recurrent_gated_delta_rule_forward(
    Tensor query, Tensor key, Tensor value, OptionalTensor g, OptionalTensor beta,
    OptionalTensor initial_state, OptionalTensor cu_seqlens, OptionalTensor A_log,
    OptionalTensor dt_bias, double scale, bool output_final_state, bool use_qk_l2norm,
    bool use_gate, bool use_beta_sigmoid, bool allow_neg_eigval, bool state_v_first) {
  return gated_delta_rule("recurrent_gated_delta_rule", cpu::recurrent_forward, query, key, value,
                          g, beta, initial_state, cu_seqlens, A_log, dt_bias, scale,
                          output_final_state, use_qk_l2norm, use_gate, use_beta_sigmoid,
                          allow_neg_eigval, state_v_first);
}

// Equation (8) by running the rule twice: from the zero state it gives U, from I and with v = 0 it
// gives M.
std::tuple<Tensor, Tensor> chunk_transition(Tensor key, Tensor value, OptionalTensor g,
                                            OptionalTensor beta, OptionalTensor cu_seqlens,
                                            bool use_qk_l2norm) {
  const char* op = "chunk_transition";
  const std::vector<int64_t> starts = host_cu_seqlens(op, cu_seqlens, key);
  GatedDeltaRuleParams p = check_keys_and_values(op, key, value, g, beta, starts, bool(cu_seqlens));
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
