// SPDX-License-Identifier: Apache-2.0
//
// What the CUDA kernels of the rule do not take, in words. Sizes and shapes are the caller's to
// check.
#pragma once
#include <stdexcept>
#include <string>

#include "cuda/rule_params.cuh"

namespace deltanet::cuda {

inline void check_supported(const char* op, const RuleParams& p) {
  if (p.is_double())
    throw std::invalid_argument(std::string(op) +
                                ": the inputs are float64; supported on CUDA: float32, bfloat16, "
                                "float16 (float64 runs on the CPU)");
  if (p.dim_k < 1 || p.dim_k > kMaxHeadDim || p.dim_v < 1 || p.dim_v > kMaxHeadDim)
    throw std::invalid_argument(std::string(op) + ": head dims " + std::to_string(p.dim_k) +
                                " and " + std::to_string(p.dim_v) + "; supported: 1 to " +
                                std::to_string(kMaxHeadDim));
}

}  // namespace deltanet::cuda
