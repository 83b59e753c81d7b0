// SPDX-License-Identifier: Apache-2.0
//
// The chunked forward in fp32 fused multiply-adds: every dtype, every shape, every architecture.
#pragma once
#include <cuda_runtime.h>

#include <cstddef>

#include "cuda/rule_params.cuh"

namespace deltanet::cuda::simt {

// As chunk_forward_workspace and chunk_forward of forward.h, which choose between paths. Two
// launches; three for packed sequences.
size_t workspace_bytes(const RuleParams& p);
void forward(const RuleParams& p, void* workspace, cudaStream_t stream);

}  // namespace deltanet::cuda::simt
