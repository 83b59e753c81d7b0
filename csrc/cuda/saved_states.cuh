// SPDX-License-Identifier: Apache-2.0
//
// What the forward pass saves for a backward pass to come.
#pragma once
#include <cuda_runtime.h>

#include "cuda/launch.cuh"
#include "cuda/rule_params.cuh"

namespace deltanet::cuda {

// Places of saved states that no sequence has a state for hold zeros, not leftovers. Which ones
// those are only the device knows, where sequences are packed.
inline void clear_saved_states(const RuleParams& p, cudaStream_t stream) {
  const int64_t places = p.batch * (p.tokens / kSegmentTokens);
  if (!p.saved_states || places == 0 || (!p.packed() && p.tokens % kSegmentTokens != 0)) return;
  check(cudaMemsetAsync(p.saved_states.data, 0,
                        size_t(places * p.saved_states.stride[0]) * sizeof(float), stream),
        "saved_states");
}

}  // namespace deltanet::cuda
