// SPDX-License-Identifier: Apache-2.0
//
// The gradients of the gated delta rule on CUDA: what operators and C++ programs call. Raw device
// pointers, a stream, no torch. What forward.h says of dtypes, waiting and errors holds here.
#pragma once
#include <cuda_runtime.h>

#include <cstddef>

#include "cuda/rule_params.cuh"

namespace deltanet::cuda {

// kWalk: one block walks over each sequence of a key head, and scratch memory does not grow with T;
// it wins where there are sequences and key heads enough to fill the device. kParallel: strips of
// all sequences side by side. Where only dV and the gradient of the initial state are wanted, it is
// always the latter. The same bits, but for d_A_log and d_dt_bias, whose sums in fp64 are rounded
// once, and for segments.
enum class BackwardMode { kChosen, kParallel, kWalk };

struct BackwardOptions {
  BackwardMode mode = BackwardMode::kChosen;  // from N, HK and the device
  // Strips (strips.cuh) in a segment of the reverse scan; 0: chosen from N, HV, V, T and the
  // device. Results differ in rounding only. Of kParallel alone.
  int64_t segment_strips = 0;
};

// Bytes of device memory that chunk_backward needs for this call, a multiple of 256. It depends on
// shapes and on which gradients are wanted.
size_t chunk_backward_workspace(const RuleBackwardParams& p, const BackwardOptions& options = {});

// Equations (9) to (28). workspace: 256-byte aligned, contents undefined before and after. At most
// eight launches.
void chunk_backward(const RuleBackwardParams& p, void* workspace, cudaStream_t stream,
                    const BackwardOptions& options = {});

}  // namespace deltanet::cuda
