// SPDX-License-Identifier: Apache-2.0
//
// Which path a chunked call takes: tensor cores where they serve it, fp32 multiply-adds else.
#include "cuda/forward.h"

#include "cuda/simt_forward.h"
#include "cuda/supported.h"
#include "cuda/tensor_core.h"

namespace deltanet::cuda {

size_t chunk_forward_workspace(const RuleParams& p) {
  check_supported("chunk_gated_delta_rule", p);
  return tensor_core::supports(p) ? tensor_core::workspace_bytes(p) : simt::workspace_bytes(p);
}

void chunk_forward(const RuleParams& p, void* workspace, cudaStream_t stream) {
  check_supported("chunk_gated_delta_rule", p);
  if (tensor_core::supports(p)) return tensor_core::forward(p, workspace, stream);
  simt::forward(p, workspace, stream);
}

}  // namespace deltanet::cuda
