// SPDX-License-Identifier: Apache-2.0
//
// What the operators of the rule share on every device: checks of their arguments, and the way from
// tensors to parameters. How results are allocated, and who may read cu_seqlens, differs.
#pragma once
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <utility>
#include <vector>

#include "ops/checks.h"
#include "ops/tensor_view.h"

namespace deltanet::ops {

using OptionalTensor = std::optional<Tensor>;

// Sizes and checks that every form of the rule shares. Of cu_seqlens nothing: sequences = B.
inline GatedDeltaRuleParams check_keys_and_values(const char* op, CheckDevice& device,
                                                  const Tensor& key, const Tensor& value,
                                                  const OptionalTensor& g,
                                                  const OptionalTensor& beta) {
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
    check_float(op, name, *x, device);
    STD_TORCH_CHECK(x->scalar_type() == key.scalar_type(), op, ": ", name, " is ",
                    name_of(x->scalar_type()), " and key is ", name_of(key.scalar_type()),
                    "; query, key and value must have one dtype");
  }
  p.dim_k = int(key.sizes()[3]);
  p.dim_v = int(value.sizes()[3]);
  for (const auto& [name, x] : {std::pair("g", &g), std::pair("beta", &beta)}) {
    if (!*x) continue;
    check_shape(op, name, **x, {p.batch, p.tokens, p.value_heads}, "[B, T, HV]");
    check_float(op, name, **x, device);
    check_gate_dtype(op, name, **x, key.scalar_type());
  }
  p.sequences = p.batch;
  p.key = view<4>(key);
  p.value = view<4>(value);
  p.g = view<3>(g);
  p.beta = view<3>(beta);
  return p;
}

inline ScalarType state_dtype(const Tensor& key) {
  return key.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

template <class AnyView>
AnyView v_first(AnyView state) {
  std::swap(state.stride[2], state.stride[3]);
  return state;
}

// The arguments of chunk_gated_delta_rule_forward and its recurrent sibling, in their order.
struct RuleArguments {
  const Tensor &query, &key, &value;
  const OptionalTensor &g, &beta, &initial_state, &cu_seqlens, &A_log, &dt_bias;
  double scale;
  bool output_final_state, use_qk_l2norm, use_gate, use_beta_sigmoid, allow_neg_eigval,
      state_v_first;

  // The last two sizes of a state.
  int64_t state_rows() const { return state_v_first ? value.sizes()[3] : key.sizes()[3]; }
  int64_t state_columns() const { return state_v_first ? key.sizes()[3] : value.sizes()[3]; }
};

// Checks what check_keys_and_values has not, and fills in p: all but the results. p.sequences is
// right already.
inline void check_rule(const char* op, CheckDevice& device, const RuleArguments& x,
                       GatedDeltaRuleParams& p) {
  check_shape(op, "query", x.query, {p.batch, p.tokens, p.key_heads, p.dim_k}, "[B, T, HK, K]");
  check_float(op, "query", x.query, device);
  STD_TORCH_CHECK(x.query.scalar_type() == x.key.scalar_type(), op, ": query is ",
                  name_of(x.query.scalar_type()), " and key is ", name_of(x.key.scalar_type()),
                  "; query, key and value must have one dtype");
  if (x.initial_state) {
    check_shape(op, "initial_state", *x.initial_state,
                {p.sequences, p.value_heads, x.state_rows(), x.state_columns()},
                x.state_v_first ? "[N, HV, V, K]" : "[N, HV, K, V]");
    check_float(op, "initial_state", *x.initial_state, device);
  }
  STD_TORCH_CHECK(x.use_gate == bool(x.A_log), op, ": use_gate is ", x.use_gate, " and A_log is ",
                  x.A_log ? "given" : "missing", "; they belong together");
  STD_TORCH_CHECK(!x.use_gate || x.g, op, ": use_gate needs g, the raw gate");
  STD_TORCH_CHECK(!x.dt_bias || x.use_gate, op, ": dt_bias is given without use_gate");
  for (const auto& [name, vector] :
       {std::pair("A_log", &x.A_log), std::pair("dt_bias", &x.dt_bias)}) {
    if (!*vector) continue;
    check_shape(op, name, **vector, {p.value_heads}, "[HV]");
    check_float(op, name, **vector, device);
  }
  STD_TORCH_CHECK(!x.use_beta_sigmoid || x.beta, op, ": use_beta_sigmoid needs beta");
  STD_TORCH_CHECK(!x.allow_neg_eigval || x.use_beta_sigmoid, op,
                  ": allow_neg_eigval needs use_beta_sigmoid");

  p.query = view<4>(x.query);
  p.initial_state = view<4>(x.initial_state);
  if (x.state_v_first) p.initial_state = v_first(p.initial_state);
  p.A_log = view<1>(x.A_log);
  p.dt_bias = view<1>(x.dt_bias);
  p.scale = x.scale;
  p.l2norm = x.use_qk_l2norm;
  p.gate_in_kernel = x.use_gate;
  p.beta_sigmoid = x.use_beta_sigmoid;
  p.beta_doubled = x.allow_neg_eigval;
}

// Where the results go. An empty final state is not wanted.
inline void set_results(const Tensor& out, const Tensor& final_state, const RuleArguments& x,
                        GatedDeltaRuleParams& p) {
  p.output = mutable_view<4>(out);
  if (!x.output_final_state) return;
  p.final_state = mutable_view<4>(final_state);
  if (x.state_v_first) p.final_state = v_first(p.final_state);
}

}  // namespace deltanet::ops
