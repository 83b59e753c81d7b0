// SPDX-License-Identifier: Apache-2.0
//
// The tensor-core forward by itself, for tests: the options that chunk_gated_delta_rule_forward
// leaves to the device are arguments here, and a call that it would send to the SIMT path is an
// error. With state_only the state alone is computed, as for a segment's map; without value it is
// the rule with v = 0, and without initial_state then the one that starts from I: equation (8)'s M.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <cmath>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "cuda/tensor_core.h"
#include "ops/checks.h"
#include "ops/cuda_context.h"
#include "ops/tensor_view.h"

namespace deltanet::ops {
namespace {

using OptionalTensor = std::optional<Tensor>;

template <class AnyView>
AnyView turned(AnyView state, bool v_first) {
  if (v_first) std::swap(state.stride[2], state.stride[3]);
  return state;
}

std::tuple<Tensor, Tensor> tensor_core_forward(
    Tensor query, Tensor key, OptionalTensor value, OptionalTensor g, OptionalTensor beta,
    OptionalTensor initial_state, OptionalTensor cu_seqlens, OptionalTensor A_log,
    OptionalTensor dt_bias, int64_t value_heads, int64_t dim_v, double scale, bool l2norm,
    bool beta_sigmoid, bool beta_doubled, bool state_v_first, bool state_only, bool fast,
    int64_t warps, int64_t segment_chunks, int64_t roles) {
  cuda::RuleParams p;
  p.batch = key.sizes()[0];
  p.tokens = key.sizes()[1];
  p.key_heads = key.sizes()[2];
  p.dim_k = int(key.sizes()[3]);
  p.value_heads = value_heads;
  p.dim_v = int(dim_v);
  p.sequences = p.batch;
  if (cu_seqlens) {
    p.sequences = cu_seqlens->sizes()[0] - 1;
    p.device_cu_seqlens = cu_seqlens->const_data_ptr();
    p.cu_seqlens_is_int64 = cu_seqlens->scalar_type() == ScalarType::Long;
    p.cu_seqlens_stride = cu_seqlens->strides()[0];
  }
  p.key = view<4>(key);
  p.value = view<4>(value);
  p.g = view<3>(g);
  p.beta = view<3>(beta);
  p.A_log = view<1>(A_log);
  p.dt_bias = view<1>(dt_bias);
  p.initial_state = turned(view<4>(initial_state), state_v_first);
  p.initial_state_is_identity = !value && !initial_state;
  p.scale = scale;
  p.l2norm = l2norm;
  p.gate_in_kernel = bool(A_log);
  p.beta_sigmoid = beta_sigmoid;
  p.beta_doubled = beta_doubled;

  const std::vector<int64_t> out_sizes{p.batch, p.tokens, value_heads, dim_v};
  Tensor out = torch::stable::new_empty(key, out_sizes);
  const std::vector<int64_t> state_sizes{p.sequences, value_heads, state_v_first ? dim_v : p.dim_k,
                                         state_v_first ? p.dim_k : dim_v};
  Tensor state = torch::stable::new_empty(key, state_sizes, ScalarType::Float);
  for (Tensor* x : {&out, &state}) torch::stable::fill_(*x, NAN);  // what is not written shows
  if (!state_only) {
    p.query = view<4>(query);
    p.output = mutable_view<4>(out);
  }
  p.final_state = turned(mutable_view<4>(state), state_v_first);

  STD_TORCH_CHECK(cuda::tensor_core::supports(p), "tensor_core_forward: not supported");
  cuda::tensor_core::Options options;
  options.precision =
      fast ? cuda::tensor_core::Precision::kFast : cuda::tensor_core::Precision::kExact;
  options.warps = int(warps);
  options.segment_chunks = segment_chunks;
  options.roles = cuda::tensor_core::Roles(roles);
  const std::vector<int64_t> bytes{int64_t(cuda::tensor_core::workspace_bytes(p, options)) + 256};
  const Tensor workspace = torch::stable::new_empty(key, bytes, ScalarType::Byte);
  const CudaContext context({query, key, value, g, beta, initial_state, cu_seqlens, A_log, dt_bias},
                            {out, state, workspace});
  const auto address = reinterpret_cast<uintptr_t>(workspace.mutable_data_ptr());
  cuda::tensor_core::forward(p, reinterpret_cast<void*>((address + 255) / 256 * 256),
                             context.stream(), options);
  return {out, state};
}

}  // namespace
}  // namespace deltanet::ops

STABLE_TORCH_LIBRARY_FRAGMENT(deltanet_ext, m) {
  m.def(
      "tensor_core_forward(Tensor query, Tensor key, Tensor? value, Tensor? g, Tensor? beta, "
      "Tensor? initial_state, Tensor? cu_seqlens, Tensor? A_log, Tensor? dt_bias, "
      "int value_heads, int dim_v, float scale, bool l2norm, bool beta_sigmoid, "
      "bool beta_doubled, bool state_v_first, bool state_only, bool fast, int warps, "
      "int segment_chunks, int roles) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(deltanet_ext, DELTANET_CUDA_KEY, m) {
  m.impl("tensor_core_forward", TORCH_BOX(&deltanet::ops::tensor_core_forward));
}
