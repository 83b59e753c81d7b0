// SPDX-License-Identifier: Apache-2.0
//
// The chunked forward in fp32 fused multiply-adds: every dtype, every shape, every architecture.
#pragma once
#include <cuda_runtime.h>

#include <cstddef>

#include "cuda/rule_params.cuh"

namespace deltanet::cuda {
struct ChunkTable;
}

namespace deltanet::cuda::simt {

struct Prepared;
struct PreparedGradient;

// As chunk_forward_workspace and chunk_forward of forward.h, which choose between paths. Two
// launches; three for packed sequences.
size_t workspace_bytes(const RuleParams& p);
void forward(const RuleParams& p, void* workspace, cudaStream_t stream);

// Stages that the backward pass runs too, one launch each. The table's entries are strips
// (strips.cuh), prepared: [strips * kStripChunks, HV].
void prepare_strips(const RuleParams& p, const ChunkTable& strips, Prepared* prepared,
                    PreparedGradient* gradient, cudaStream_t stream);
// The state before every strip, [strips, HV] of state_floats (simt_state.cuh), from what the
// forward pass saved.
void scan_segments(const RuleParams& p, const ChunkTable& strips, const Prepared* prepared,
                   const View<4>& saved_states, float* strip_states, cudaStream_t stream);

}  // namespace deltanet::cuda::simt
