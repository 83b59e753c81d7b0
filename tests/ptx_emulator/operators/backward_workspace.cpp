// SPDX-License-Identifier: Apache-2.0
//
// How much scratch memory a backward pass takes, for tests/emulated.py: operators allocate it and
// tell nobody.
#include "cuda/backward.h"
#include "ops/cuda_settings.h"

// All gradients of a call of N sequences of T tokens each, or packed.
extern "C" __attribute__((visibility("default"))) long long
ptx_emulated_operators_backward_workspace(long long sequences, long long tokens,
                                          long long key_heads, long long value_heads, int dim_k,
                                          int dim_v, int packed) {
  static float anything;
  deltanet::cuda::RuleBackwardParams p;
  p.batch = packed ? 1 : sequences;
  p.tokens = packed ? sequences * tokens : tokens;
  p.sequences = sequences;
  p.key_heads = key_heads;
  p.value_heads = value_heads;
  p.dim_k = dim_k;
  p.dim_v = dim_v;
  if (packed) p.device_cu_seqlens = &anything;
  p.d_query.data = p.d_key.data = p.d_value.data = p.d_g.data = p.d_beta.data = &anything;
  p.d_initial_state.data = p.d_A_log.data = p.d_dt_bias.data = &anything;
  deltanet::cuda::BackwardOptions options;
  options.mode = deltanet::cuda::BackwardMode(deltanet::ops::cuda_settings.backward_mode.load());
  options.segment_strips = deltanet::ops::cuda_settings.backward_segment_strips;
  return static_cast<long long>(deltanet::cuda::chunk_backward_workspace(p, options));
}
