// SPDX-License-Identifier: Apache-2.0
//
// The causal convolution and its update of a state on CUDA: checks, allocation, call. Nothing here
// waits for the device: the contents of cu_seqlens, seq_idx and conv_state_indices are the kernels'
// business.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <tuple>

#include "cuda/causal_conv1d.h"
#include "ops/causal_conv1d_arguments.h"
#include "ops/cuda_context.h"
#include "ops/cuda_tensors.h"

namespace deltanet::ops {
namespace {

template <int kRank>
cuda::IndexView<kRank> index_view(const OptionalTensor& x) {
  cuda::IndexView<kRank> v;
  if (!x) return v;
  v.data = x->const_data_ptr();
  if (!v.data) v.data = &nothing;
  v.is_int64 = x->scalar_type() == ScalarType::Long;
  for (int i = 0; i < kRank; ++i) v.stride[i] = x->strides()[i];
  return v;
}

// Params: ConvParams or ConvBackwardParams.
template <class Params>
Params check_call(const char* op, const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                  bool silu) {
  Params p;
  static_cast<CausalConv1dParams&>(p) = check_convolution(op, check_device, x, weight, bias);
  STD_TORCH_CHECK(x.scalar_type() != ScalarType::Double, op,
                  ": x is float64; supported on CUDA: float32, bfloat16, float16 (float64 runs on "
                  "the CPU)");
  p.states = p.batch;
  p.silu = silu;
  return p;
}

template <class Params>
void check_sequences(const char* op, const Tensor& x, const OptionalTensor& initial_states,
                     const OptionalTensor& seq_idx, const OptionalTensor& cu_seqlens, bool states,
                     Params& p) {
  check_cuts(op, check_device, p, seq_idx, cu_seqlens, initial_states || states);
  if (cu_seqlens) p.states = cu_seqlens->sizes()[0] - 1;
  p.cu_seqlens = index_view<1>(cu_seqlens);
  p.seq_idx = index_view<2>(seq_idx);
  if (initial_states)
    check_states(op, check_device, "initial_states", *initial_states, x, p, p.states);
  p.initial_states = view<3>(initial_states);
}

std::tuple<Tensor, Tensor> causal_conv1d_forward(Tensor x, Tensor weight, OptionalTensor bias,
                                                 OptionalTensor initial_states,
                                                 OptionalTensor seq_idx, OptionalTensor cu_seqlens,
                                                 bool silu, bool return_final_states) {
  const char* op = "causal_conv1d_fn";
  auto p = check_call<cuda::ConvParams>(op, x, weight, bias, silu);
  check_sequences(op, x, initial_states, seq_idx, cu_seqlens, return_final_states, p);

  const Tensor out = new_channels_last(new_cuda_tensor, x, p);
  const Tensor final_states =
      new_final_states(new_cuda_tensor, x, p, return_final_states ? p.states : 0);
  p.output = mutable_view<3>(out);
  if (return_final_states) p.final_states = mutable_view<3>(final_states);
  const CudaContext context({x, weight, bias, initial_states, seq_idx, cu_seqlens},
                            {out, final_states});
  cuda::causal_conv1d(p, context.stream());
  return {out, final_states};
}

ConvGradients causal_conv1d_backward(OptionalTensor grad_out, OptionalTensor grad_final_states,
                                     Tensor x, Tensor weight, OptionalTensor bias,
                                     OptionalTensor initial_states, OptionalTensor seq_idx,
                                     OptionalTensor cu_seqlens, bool silu, int64_t wanted) {
  const char* op = "causal_conv1d_backward";
  auto p = check_call<cuda::ConvBackwardParams>(op, x, weight, bias, silu);
  check_sequences(op, x, initial_states, seq_idx, cu_seqlens, grad_final_states.has_value(), p);
  check_upstream(op, check_device, grad_out, grad_final_states, x, p.states, p);
  const ConvGradients results =
      make_gradients(op, new_cuda_tensor, x, weight, bias, initial_states, wanted, p);
  const auto& [d_x, d_weight, d_bias, d_initial_states] = results;
  const Tensor workspace = new_workspace(x, cuda::causal_conv1d_backward_workspace(p));
  const CudaContext context(
      {grad_out, grad_final_states, x, weight, bias, initial_states, seq_idx, cu_seqlens},
      {d_x, d_weight, d_bias, d_initial_states, workspace});
  cuda::causal_conv1d_backward(p, workspace.mutable_data_ptr(), context.stream());
  return results;
}

// Writes conv_state.
Tensor causal_conv1d_update(Tensor x, Tensor conv_state, Tensor weight, OptionalTensor bias,
                            OptionalTensor conv_state_indices, bool silu) {
  const char* op = "causal_conv1d_update";
  auto p = check_call<cuda::ConvParams>(op, x, weight, bias, silu);
  p.states = check_pool(op, check_device, conv_state, conv_state_indices, x, p);
  p.slots = index_view<1>(conv_state_indices);

  const Tensor out = new_channels_last(new_cuda_tensor, x, p);
  p.output = mutable_view<3>(out);
  const CudaContext context({x, conv_state, weight, bias, conv_state_indices}, {out});
  cuda::causal_conv1d_update(p, context.stream());
  return out;
}

}  // namespace
}  // namespace deltanet::ops

STABLE_TORCH_LIBRARY_IMPL(deltanet_ext, DELTANET_CUDA_KEY, m) {
  m.impl("causal_conv1d_forward", TORCH_BOX(&deltanet::ops::causal_conv1d_forward));
  m.impl("causal_conv1d_backward", TORCH_BOX(&deltanet::ops::causal_conv1d_backward));
  m.impl("causal_conv1d_update", TORCH_BOX(&deltanet::ops::causal_conv1d_update));
}
