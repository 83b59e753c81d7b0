// SPDX-License-Identifier: Apache-2.0
//
// The scan by key over segment maps: where each segment of a sequence starts.
//
//   S_0 = the initial state,   S_s = M_{s-1} S_{s-1} + U_{s-1}        (8); key = (sequence, head)
//
// This is a raking scan. Inside a segment the state is carried serially, chunk by chunk, by
// scan_output: first from zero (U) and from I with v = 0 (M), to give the segment's map; after this
// exclusive scan over the few maps of a key, once more from the right state (the downsweep).
// Segments are anchored at the sequence's start, and nothing of an old state is dropped.
//
// Work split:  a block = 16 columns of V of one key, serially over its segments, or 8 where there
//              are few keys; a thread = 4 rows x 2 columns. Maps are applied to a state, not to
//              each other: that is K V instead of K (K + V) multiply-adds, and fewer roundings.
// Numerics:    fp32 fused multiply-adds in a fixed order. tf32 maps would cost up to 4e-3.
// Memory:      reads each M once per block and each U once; writes S_s over U_{s-1}.
#pragma once
#include "cuda/tensor_core/layout.cuh"

namespace deltanet::cuda::tensor_core {

// Fills p.starts for the segments of all sequences, from the maps and the initial state of p.rule.
void scan_segments(const Params& p, cudaStream_t stream);

}  // namespace deltanet::cuda::tensor_core
