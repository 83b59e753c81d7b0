# SPDX-License-Identifier: Apache-2.0
"""Tiny models of every kind in transformers that has the gated delta rule."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable

import torch

from deltanet_ext import ops

LAYERS = ["linear_attention"] * 3 + ["full_attention"]
SHARED = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "max_position_embeddings": 512,
    "layer_types": LAYERS,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
# modeling file: config class, model class, settings on top of SHARED
KINDS = {
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", {}),
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", EXPERTS),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", EXPERTS),
    "olmo_hybrid": ("OlmoHybridConfig", "OlmoHybridForCausalLM", {"linear_num_key_heads": 4}),
    "lara_mini": ("LaraMiniConfig", "LaraMiniForCausalLM", EXPERTS),
    "qwen4_exp": (
        "Qwen4ExpTextConfig",
        "Qwen4ExpForCausalLM",
        EXPERTS
        | {
            "layer_types": ["linear_attention"] * 3 + ["indexed_attention"],
            "hc_lowrank": 16,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
            },
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 16,
            "indexer_budget": 256,
            "indexer_compress_ratio": 4,
        },
    ),
}
PAST = "past_key_values"
RULES = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")


def modeling(kind: str):
    return importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")


def build(kind: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.nn.Module:
    config_name, model_name, settings = KINDS[kind]
    folder = f"transformers.models.{kind}"
    config_class = getattr(importlib.import_module(f"{folder}.configuration_{kind}"), config_name)
    torch.manual_seed(seed)
    model = getattr(modeling(kind), model_name)(config_class(**(SHARED | settings))).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.2)
    return model.to(dtype)


IDS = torch.randint(3, 128, (2, 70), generator=torch.Generator().manual_seed(1))


def greedy(model, ids=IDS, **options) -> torch.Tensor:
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8} | options
    return model.generate(ids, do_sample=False, eos_token_id=None, pad_token_id=0, **options)


def count_calls(monkeypatch) -> Counter:
    """Counts the calls that arrive at the operators from now on."""
    counter: Counter = Counter()

    def counting(name: str) -> Callable:
        operator = getattr(ops, name)

        def call(*args, **kwargs):
            counter[name] += 1
            return operator(*args, **kwargs)

        return call

    for name in ("chunk_gated_delta_rule", "recurrent_gated_delta_rule"):
        monkeypatch.setattr(ops, name, counting(name))
    return counter
