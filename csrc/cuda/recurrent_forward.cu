// SPDX-License-Identifier: Apache-2.0
#include "cuda/recurrent_forward.cuh"

#include "cuda/forward.h"
#include "cuda/launch.cuh"
#include "cuda/saved_states.cuh"
#include "cuda/supported.h"

namespace deltanet::cuda {
namespace {

int state_quads(const View<4>& x) { return quads_along(x, 3) ? 1 : quads_along(x, 2) ? 2 : 0; }
int state_quads(const MutableView<4>& x) {
  return quads_along(x, 3) ? 1 : quads_along(x, 2) ? 2 : 0;
}

template <int kDimK>
void run(const RuleParams& p, const RecurrentQuads& quads, cudaStream_t stream) {
  using Traits = RecurrentTraits<kDimK>;
  launch("recurrent_gated_delta_rule", recurrent_forward_kernel<kDimK>,
         rule_blocks(p, Traits::kColumns), Traits::kThreads, /*dynamic_shared=*/0, stream, p,
         quads);
}

}  // namespace

void recurrent_forward(const RuleParams& p, cudaStream_t stream) {
  check_supported("recurrent_gated_delta_rule", p);
  const RecurrentQuads quads = {quads_along(p.query, 3),      quads_along(p.key, 3),
                                quads_along(p.value, 3),      quads_along(p.output, 3),
                                state_quads(p.initial_state), state_quads(p.final_state),
                                state_quads(p.saved_states)};
  clear_saved_states(p, stream);
  // Rows beyond K cost registers and instructions, so the state is cut to size.
  if (p.dim_k <= 64) return run<64>(p, quads, stream);
  if (p.dim_k <= 128) return run<128>(p, quads, stream);
  return run<256>(p, quads, stream);
}

}  // namespace deltanet::cuda
