# SPDX-License-Identifier: Apache-2.0
"""What is benchmarked of a layer beside the rule: the convolution and the gated norm, in the sizes
of Qwen3-Next (16 key heads and 32 value heads of 128), on the views that the models pass."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

KEY_CHANNELS, VALUE_HEADS, HEAD_DIM, WIDTH = 2048, 32, 128, 4
HIDDEN = 2048
CHANNELS = 2 * KEY_CHANNELS + VALUE_HEADS * HEAD_DIM


@dataclass(frozen=True)
class LayerCase:
    """One call of one function; `function` is its name in transformers, "norm", or "block" for the
    whole layer."""

    name: str
    tokens: int
    function: str
    quick: bool = True
    train = backward = False

    def __str__(self) -> str:
        if self.function == "block":
            return f"{self.name}: B=1 T={self.tokens} hidden={HIDDEN} HK=16 HV=32"
        if self.function == "norm":
            return f"{self.name}: rows={self.tokens * VALUE_HEADS} C={HEAD_DIM}"
        return f"{self.name}: B=1 D={CHANNELS} T={self.tokens} W={WIDTH}"

    @property
    def bounds(self) -> tuple[str, ...]:
        """The floor of a block are its projections; of the others, one pass over memory."""
        return ("GFLOP/s",) if self.function == "block" else ("GB/s",)

    @property
    def padded(self) -> LayerCase:
        return self

    @property
    def flop(self) -> float:
        values = VALUE_HEADS * HEAD_DIM
        return 2 * self.tokens * HIDDEN * (CHANNELS + 2 * VALUE_HEADS + 2 * values)

    @property
    def state_floats(self) -> int:
        """A copy of as many fp32 numbers moves what a call in bf16 reads and writes; one in fp32
        moves twice that, so its share of the peak is twice what is shown."""
        if self.function == "norm":
            return self.tokens * VALUE_HEADS * HEAD_DIM * 3 // 4
        return (self.tokens + WIDTH) * CHANNELS // 2

    def runs_here(self, dtype: str) -> bool:
        return True

    def inputs(self, dtype: torch.dtype) -> dict[str, Any]:
        rng = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=rng).to(dtype)

        if self.function == "block":
            return {"hidden_states": normal(1, self.tokens, HIDDEN)}
        if self.function == "norm":
            rows = self.tokens * VALUE_HEADS
            x, gate = normal(rows, HEAD_DIM), normal(rows, HEAD_DIM)
            return {"x": x, "gate": gate, "weight": normal(HEAD_DIM)}
        inputs = {
            "x": normal(1, self.tokens, CHANNELS).transpose(1, 2),
            "weight": normal(CHANNELS, WIDTH),
            "bias": None,
            "activation": "silu",
        }
        if self.function == "causal_conv1d_update":
            inputs["conv_state"] = normal(1, CHANNELS, WIDTH)
        return inputs

    def contestants(self) -> tuple[Callable, Callable]:
        """Ours, and that of transformers."""
        from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

        import deltanet_ext

        if self.function == "block":
            return block(), block(switched=False)
        if self.function == "norm":
            norm = modeling.Qwen3_5RMSNormGated(HEAD_DIM)

            def their_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor) -> Any:
                norm.weight.data = weight
                return norm(x, gate)

            return deltanet_ext.gated_rms_norm, their_norm

        theirs = getattr(modeling, self.function)
        while hasattr(theirs, "__wrapped__"):
            theirs = theirs.__wrapped__

        def their_convolution(x: torch.Tensor, **inputs: Any) -> Any:
            return theirs(hidden_states=x, **inputs)

        return getattr(deltanet_ext, self.function), their_convolution


def block(switched: bool = True) -> Callable:
    """A Gated DeltaNet layer of Qwen3.5, in the dtype of what it is called with."""
    from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

    import deltanet_ext

    config = Qwen3_5TextConfig(
        hidden_size=HIDDEN,
        linear_num_key_heads=KEY_CHANNELS // HEAD_DIM,
        linear_num_value_heads=VALUE_HEADS,
        linear_key_head_dim=HEAD_DIM,
        linear_value_head_dim=HEAD_DIM,
    )
    torch.manual_seed(0)
    layer = modeling.Qwen3_5GatedDeltaNet(config, 0).eval().requires_grad_(False)

    def run(hidden_states: torch.Tensor) -> torch.Tensor:
        layer.to(hidden_states.dtype)
        with deltanet_ext.enabled() if switched else contextlib.nullcontext():
            return layer(hidden_states)

    return run


LAYER_CASES = (
    LayerCase("block 2048", 2048, "block", quick=False),
    LayerCase("conv 2048", 2048, "causal_conv1d_fn"),
    LayerCase("norm 2048", 2048, "norm"),
    LayerCase("conv update", 1, "causal_conv1d_update"),
)
