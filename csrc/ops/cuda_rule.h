// SPDX-License-Identifier: Apache-2.0
//
// What the CUDA operators of the rule share: checks of tokens, new tensors.
#pragma once
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "cuda/rule_params.cuh"
#include "ops/cuda_context.h"
#include "ops/cuda_settings.h"
#include "ops/cuda_tensors.h"
#include "ops/rule_arguments.h"

namespace deltanet::ops {

// float64 runs on the CPU alone: Python says so first, in the same words.
inline cuda::RuleParams check_tokens(const char* op, const Tensor& key, const Tensor& value,
                                     const OptionalTensor& g, const OptionalTensor& beta,
                                     const OptionalTensor& cu_seqlens) {
  cuda::RuleParams p;
  static_cast<GatedDeltaRuleParams&>(p) =
      check_keys_and_values(op, check_device, key, value, g, beta);
  STD_TORCH_CHECK(key.scalar_type() != ScalarType::Double, op,
                  ": the inputs are float64; supported on CUDA: float32, bfloat16, float16 "
                  "(float64 runs on the CPU)");
  p.batch_invariant = cuda_settings.batch_invariant;
  p.fast = cuda_settings.fast;
  if (!cu_seqlens) return p;
  check_cu_seqlens(op, *cu_seqlens, p.batch, check_device);
  p.sequences = cu_seqlens->sizes()[0] - 1;
  p.device_cu_seqlens = cu_seqlens->const_data_ptr();
  p.cu_seqlens_is_int64 = cu_seqlens->scalar_type() == ScalarType::Long;
  p.cu_seqlens_stride = cu_seqlens->strides()[0];
  return p;
}

inline Tensor new_state(const Tensor& like, int64_t sequences, int64_t heads, int64_t rows,
                        int64_t columns) {
  const int64_t sizes[] = {sequences, heads, rows, columns};
  return torch::stable::new_empty(like, {sizes, 4}, ScalarType::Float);
}

}  // namespace deltanet::ops
