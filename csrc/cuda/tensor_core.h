// SPDX-License-Identifier: Apache-2.0
//
// The chunked forward on tensor cores. Not built yet: supports() declines every call, and the SIMT
// path serves it.
#pragma once
#include <cuda_runtime.h>

#include <cstddef>

#include "cuda/rule_params.cuh"

namespace deltanet::cuda::tensor_core {

inline bool supports(const RuleParams&) { return false; }
inline size_t workspace_bytes(const RuleParams&) { return 0; }
inline void forward(const RuleParams&, void*, cudaStream_t) {}

}  // namespace deltanet::cuda::tensor_core
