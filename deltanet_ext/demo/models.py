# SPDX-License-Identifier: Apache-2.0
"""The models of the demo, with seeded weights, and the text that they read."""

from __future__ import annotations

import importlib
import importlib.resources
import math
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
VOCABULARY = 256  # a token is a byte
LAYERS = ["linear_attention"] * 3 + ["full_attention", "linear_attention"]

_MODELS = {
    # name: title, modeling file, config class, model class
    "qwen3_5": ("Qwen3.5", "qwen3_5", "Qwen3_5TextConfig", "Qwen3_5ForCausalLM"),
    "qwen3_next": ("Qwen3-Next", "qwen3_next", "Qwen3NextConfig", "Qwen3NextForCausalLM"),
}
MODELS = tuple(_MODELS)


@dataclass(frozen=True)
class Options:
    """The size of the demo. The defaults are the main job; tests use smaller ones."""

    models: tuple[str, ...] = MODELS
    dtypes: tuple[str, ...] = ("fp32", "bf16")
    tokens: int = 2048
    steps: int = 64
    hidden: int = 256
    key_heads: int = 4  # and twice as many value heads
    repeats: int = 2  # timed runs of each way in fp32; the faster one counts
    threads: int | None = None
    seed: int = 0


def title(model: str) -> str:
    return _MODELS[model][0]


def modeling_file(model: str) -> ModuleType:
    folder = _MODELS[model][1]
    return importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")


def build_model(model: str, options: Options) -> torch.nn.Module:
    """A model of transformers with seeded weights: head dims 128, convolution width 4, two value
    heads per key head, a full attention layer between; Qwen3-Next with its mixture of experts."""
    import transformers

    _, _, config_class, model_class = _MODELS[model]
    hidden = options.hidden
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": len(LAYERS),
        "layer_types": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_num_key_heads": options.key_heads,
        "linear_num_value_heads": 2 * options.key_heads,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": options.tokens + options.steps,
    }
    if model == "qwen3_next":
        settings |= {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": hidden // 2,
            "shared_expert_intermediate_size": hidden // 2,
        }
    config = getattr(transformers, config_class)(**settings)
    torch.manual_seed(options.seed)
    built = getattr(transformers, model_class)(config).eval()
    set_weights(built, options.seed)
    return built


@torch.no_grad()
def set_weights(model: torch.nn.Module, seed: int) -> None:
    """Weights under which the text decides what is generated. The gates span memories from one
    token to a thousand, and the scale of the matrices keeps the logits apart, so that a choice is
    rarely close, and the tokens varied."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if name.endswith("A_log"):
            weight.copy_(torch.empty_like(weight).uniform_(1, 16, generator=generator).log())
        elif name.endswith("dt_bias"):
            low, high = math.log(1e-3), math.log(1e-1)
            dt = torch.empty_like(weight).uniform_(low, high, generator=generator).exp()
            weight.copy_(dt + torch.log(-torch.expm1(-dt)))  # softplus of it is dt
        elif "embed_tokens" in name:
            weight.normal_(std=1.0, generator=generator)
        elif "conv1d" in name:
            weight.uniform_(-0.5, 0.5, generator=generator)
        elif weight.dim() > 1:
            weight.normal_(std=2.0 / math.sqrt(weight.shape[-1]), generator=generator)


def prompt(tokens: int) -> torch.Tensor:
    """The first bytes of the text that comes with the package, one token each. `[1, tokens]`"""
    text = importlib.resources.files("deltanet_ext").joinpath("data/delta_rule.txt").read_bytes()
    if tokens > len(text):
        text *= math.ceil(tokens / len(text))
    return torch.tensor([list(text[:tokens])])
