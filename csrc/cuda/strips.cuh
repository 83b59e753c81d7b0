// SPDX-License-Identifier: Apache-2.0
//
// How the backward pass cuts a sequence: the forward pass saved a state every kSegmentTokens
// tokens; between them, states and adjoint states are kept before and after every strip.
#pragma once
#include "core/params.h"
#include "cuda/simt_chunk.cuh"

namespace deltanet::cuda::simt {

constexpr int kStripChunks = 11;
constexpr int kStrip = kStripChunks * kChunk;  // tokens
constexpr int kSegmentStrips = int(kSegmentTokens / kStrip);
static_assert(kSegmentTokens % kStrip == 0, "segments are whole strips");

}  // namespace deltanet::cuda::simt
