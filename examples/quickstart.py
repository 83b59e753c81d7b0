# SPDX-License-Identifier: Apache-2.0
"""The operators by themselves: a prefill in one call, then token by token from its state."""

import torch

import deltanet_ext

# One sequence of 100 tokens; 2 key heads serve 4 value heads; head dims 128.
q, k = torch.randn(2, 1, 100, 2, 128).unbind()
v = torch.randn(1, 100, 4, 128)
g = -torch.rand(1, 100, 4)  # log of the decay per token
beta = torch.rand(1, 100, 4)  # write strength

# The prompt, all tokens but the last, in one call.
prompt = [x[:, :99] for x in (q, k, v, g, beta)]
out, state = deltanet_ext.chunk_gated_delta_rule(
    *prompt, output_final_state=True, use_qk_l2norm_in_kernel=True
)
# The next token, from the state that the prompt left behind.
token = [x[:, 99:] for x in (q, k, v, g, beta)]
last, state = deltanet_ext.recurrent_gated_delta_rule(
    *token, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
)
print(out.shape, last.shape, state.shape)

# Both together are what one call over all tokens gives, up to rounding.
whole, _ = deltanet_ext.chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)
torch.testing.assert_close(torch.cat([out, last], dim=1), whole)
