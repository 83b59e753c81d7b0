// SPDX-License-Identifier: Apache-2.0
//
// Which path a chunked call takes: tensor cores where they serve it, fp32 multiply-adds else.
#include "cuda/forward.h"

#include <algorithm>

#include "cuda/saved_states.cuh"
#include "cuda/simt_forward.h"
#include "cuda/supported.h"
#include "cuda/tensor_core.h"

namespace deltanet::cuda {

namespace {

// Whole sequences have the same bits in any company: how many segments pay depends on the company.
tensor_core::Options options_of(const RuleParams& p) {
  tensor_core::Options options;
  options.precision = p.fast ? tensor_core::Precision::kFast : tensor_core::Precision::kExact;
  if (p.batch_invariant) options.segment_chunks = -1;
  return options;
}

// The tensor-core path saves no states on its way: the fp32 stages make them, without outputs.
RuleParams only_saved_states(const RuleParams& p) {
  RuleParams states = p;
  states.query = {};
  states.output = {};
  states.final_state = {};
  return states;
}

bool saves_states(const RuleParams& p) { return p.saved_states && p.tokens > kSegmentTokens; }

}  // namespace

size_t chunk_forward_workspace(const RuleParams& p) {
  check_supported("chunk_gated_delta_rule", p);
  if (!tensor_core::supports(p)) return simt::workspace_bytes(p);
  const size_t bytes = tensor_core::workspace_bytes(p, options_of(p));
  return saves_states(p) ? std::max(bytes, simt::workspace_bytes(p)) : bytes;
}

void chunk_forward(const RuleParams& p, void* workspace, cudaStream_t stream) {
  check_supported("chunk_gated_delta_rule", p);
  clear_saved_states(p, stream);
  if (!tensor_core::supports(p)) return simt::forward(p, workspace, stream);
  tensor_core::forward(p, workspace, stream, options_of(p));
  if (saves_states(p)) simt::forward(only_saved_states(p), workspace, stream);
}

}  // namespace deltanet::cuda
