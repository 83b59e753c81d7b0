// SPDX-License-Identifier: Apache-2.0
//
// The causal convolution on CUDA: what operators and C++ programs call. Raw device pointers, a
// stream, no torch.
//
// Shapes, strides and options are those of core/layer_params.h, all of float32, bfloat16 or float16
// (float64: std::invalid_argument). Its `runs` are not used: which tokens belong together the host
// does not know. Nothing waits for the device, and launches depend on shapes alone, so that every
// call can be captured in a graph. CUDA errors are std::runtime_error.
#pragma once
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "core/layer_params.h"

namespace deltanet::cuda {

// int32 or int64 in device memory.
template <int kRank>
struct IndexView {
  const void* data = nullptr;  // null: the tensor is absent
  bool is_int64 = false;
  int64_t stride[kRank] = {};
};

// Which tokens belong together, and whose state is theirs. At most one of the three is given;
// without any, each batch row is a sequence. Whatever they hold, kernels stay inside the tensors.
struct ConvSequences {
  int64_t states = 0;       // N
  IndexView<1> cu_seqlens;  // [N + 1]  sequences packed into batch row 0
  IndexView<2> seq_idx;     // [B, T]   equal neighbors are one sequence, negative ones are none
  IndexView<1> slots;       // [B]      row b has state slots[b]; outside of [0, N): none, zeros
};

struct ConvParams : CausalConv1dParams, ConvSequences {};
struct ConvBackwardParams : CausalConv1dBackwardParams, ConvSequences {};

// Equation (29). `slots` is not used. final_states must not be the memory of initial_states.
void causal_conv1d(const ConvParams& p, cudaStream_t stream);

// Equation (29) for a few tokens: initial_states are the last ones of each row, and are overwritten
// (final_states is the same view). cu_seqlens and seq_idx are not used. No slot may occur twice.
void causal_conv1d_update(const ConvParams& p, cudaStream_t stream);

// Equations (31) to (33), with bytes of device memory for sums (256-byte aligned, contents
// undefined before and after). `slots` is not used.
size_t causal_conv1d_backward_workspace(const ConvBackwardParams& p);
void causal_conv1d_backward(const ConvBackwardParams& p, void* workspace, cudaStream_t stream);

}  // namespace deltanet::cuda
