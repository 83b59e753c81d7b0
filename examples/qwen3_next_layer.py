# SPDX-License-Identifier: Apache-2.0
"""A small Qwen3-Next model of transformers, without and with this package.

pip install "deltanet_ext[demo]"
python examples/qwen3_next_layer.py
"""

import time

import torch
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

from deltanet_ext import enabled

config = Qwen3NextConfig(
    vocab_size=256,
    hidden_size=256,
    num_hidden_layers=4,
    layer_types=["linear_attention"] * 3 + ["full_attention"],
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    linear_num_key_heads=4,
    linear_num_value_heads=8,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=128,
    shared_expert_intermediate_size=128,
)
torch.manual_seed(0)
model = Qwen3NextForCausalLM(config).eval()
prompt = torch.randint(0, 256, (1, 512))


def generate() -> torch.Tensor:
    start = time.perf_counter()
    tokens = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=16,
        do_sample=False,
        pad_token_id=0,
    )
    print(f"  {time.perf_counter() - start:.2f} s")
    return tokens[0, prompt.shape[1] :]


print("transformers:")
theirs = generate()
print("with deltanet_ext:")
with enabled() as report:  # for the length of the block; enable() and disable() without one
    ours = generate()
print(report)
print("same tokens:", torch.equal(theirs, ours))
