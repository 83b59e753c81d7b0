// SPDX-License-Identifier: Apache-2.0
//
// Which path a chunked call takes: tensor cores where they serve it, fp32 multiply-adds else.
#include "cuda/forward.h"

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

}  // namespace

size_t chunk_forward_workspace(const RuleParams& p) {
  check_supported("chunk_gated_delta_rule", p);
  return tensor_core::supports(p) ? tensor_core::workspace_bytes(p, options_of(p))
                                  : simt::workspace_bytes(p);
}

void chunk_forward(const RuleParams& p, void* workspace, cudaStream_t stream) {
  check_supported("chunk_gated_delta_rule", p);
  if (tensor_core::supports(p)) return tensor_core::forward(p, workspace, stream, options_of(p));
  simt::forward(p, workspace, stream);
}

}  // namespace deltanet::cuda
