// SPDX-License-Identifier: Apache-2.0
//
// The gradients of the gated delta rule on CUDA: checks, allocation, call. Nothing here waits for
// the device.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <tuple>
#include <vector>

#include "cuda/backward.h"
#include "ops/cuda_context.h"
#include "ops/cuda_rule.h"
#include "ops/cuda_settings.h"
#include "ops/rule_arguments.h"
#include "ops/rule_gradients.h"

namespace deltanet::ops {
namespace {

Gradients run_backward(const char* op, const RuleArguments& x, const OptionalTensor& grad_out,
                       const OptionalTensor& grad_final_state, const OptionalTensor& saved_states,
                       int64_t wanted) {
  cuda::RuleBackwardParams p;
  static_cast<cuda::RuleParams&>(p) = check_tokens(op, x.key, x.value, x.g, x.beta, x.cu_seqlens);
  check_rule(op, check_device, x, p);
  // How long packed sequences are only the device knows.
  const auto states = check_upstream(op, check_device, x, p, grad_out, grad_final_state,
                                     saved_states, p.tokens > kSegmentTokens, p);
  const auto new_result = [&](const std::vector<int64_t>& sizes, ScalarType dtype) {
    return torch::stable::new_empty(x.key, {sizes.data(), sizes.size()}, dtype);
  };
  const Gradients d = make_gradients(op, x, p, wanted, new_result, p);
  if (wants(wanted, kALog)) p.d_A_log = mutable_view<1>(std::get<kALog>(d));
  if (wants(wanted, kDtBias)) p.d_dt_bias = mutable_view<1>(std::get<kDtBias>(d));

  cuda::BackwardOptions options;
  options.mode = cuda::BackwardMode(cuda_settings.backward_mode.load());
  options.segment_strips = cuda_settings.backward_segment_strips;
  const CudaDevice device(x.key);
  const Tensor workspace = new_workspace(x.key, cuda::chunk_backward_workspace(p, options));
  const CudaContext context({x.query, x.key, x.value, x.g, x.beta, x.initial_state, x.cu_seqlens,
                             x.A_log, x.dt_bias, grad_out, grad_final_state, states},
                            {std::get<kQuery>(d), std::get<kKey>(d), std::get<kValue>(d),
                             std::get<kG>(d), std::get<kBeta>(d), std::get<kInitialState>(d),
                             std::get<kALog>(d), std::get<kDtBias>(d), workspace});
  cuda::chunk_backward(p, workspace.mutable_data_ptr(), context.stream(), options);
  return d;
}

}  // namespace
}  // namespace deltanet::ops

STABLE_TORCH_LIBRARY_IMPL(deltanet_ext, DELTANET_CUDA_KEY, m) {
  m.impl("chunk_gated_delta_rule_backward",
         TORCH_BOX(&deltanet::ops::chunk_gated_delta_rule_backward<deltanet::ops::run_backward>));
}
