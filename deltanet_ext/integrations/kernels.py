# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule as entries for Hugging Face's `kernels`.

    from kernels import register_kernel_mapping
    from deltanet_ext.integrations.kernels import mapping

    register_kernel_mapping(mapping())
    model.set_use_kernels(True)

Needs a transformers (5.14 or newer) and the `kernels` that it accepts. Nothing is downloaded: the
entries hold classes of this package. What `kernels` cannot do, `deltanet_ext.enable()` can: send a
call that we do not serve to transformers' function (here it raises our error), and switch back
(`model.use_kernels = False` leaves the functions of its modeling file as they are).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from deltanet_ext import ops

__all__ = ["ChunkGatedDeltaRule", "RecurrentGatedDeltaRule", "mapping"]

# What `kernels` compares: number, names and kinds of parameters, with those of transformers.


class ChunkGatedDeltaRule(nn.Module):
    """`chunk_gated_delta_rule` in the form that `kernels` wants: a module without state."""

    can_torch_compile = True
    has_backward = True

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        chunk_size: int = 64,
        initial_state: torch.Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return ops.chunk_gated_delta_rule(
            query, key, value, g, beta, chunk_size,
            initial_state, output_final_state, use_qk_l2norm_in_kernel,
            cu_seqlens=kwargs.get("cu_seqlens"),
        )  # fmt: skip


class RecurrentGatedDeltaRule(nn.Module):
    """`recurrent_gated_delta_rule` in the form that `kernels` wants: a module without state."""

    can_torch_compile = True
    has_backward = True

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        initial_state: torch.Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return ops.recurrent_gated_delta_rule(
            query, key, value, g, beta,
            initial_state, output_final_state, use_qk_l2norm_in_kernel,
            cu_seqlens=kwargs.get("cu_seqlens"),
        )  # fmt: skip


class _InProcess:
    """A repository of `kernels` that needs neither a hub nor a disk."""

    def __init__(self, layer: type[nn.Module]) -> None:
        self.layer, self.layer_name = layer, layer.__name__

    def load(self) -> type[nn.Module]:
        return self.layer

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _InProcess) and other.layer is self.layer

    def __hash__(self) -> int:
        return hash(self.layer)

    def __str__(self) -> str:
        return f"deltanet_ext, {self.layer_name}"


# transformers 5.15 has the last name, later ones the one before it.
_LAYERS: dict[str, type[nn.Module]] = {
    "chunk_gated_delta_rule": ChunkGatedDeltaRule,
    "fused_recurrent_gated_delta_rule": RecurrentGatedDeltaRule,
    "recurrent_gated_delta_rule": RecurrentGatedDeltaRule,
}


def mapping() -> dict[str, dict[Any, Any]]:
    """Entries for `kernels.register_kernel_mapping`: cpu and cuda, inference and training.

    Raises:
        ImportError: `kernels` is not installed.
    """
    try:
        from kernels import CUDAProperties, Device, Mode
    except ImportError as error:
        raise ImportError(
            "deltanet_ext.integrations.kernels.mapping: the package `kernels` is not installed, "
            "or is too old (0.15 and newer are known to work)"
        ) from error

    # An entry for plain "cuda" is overwritten by transformers' own, one for an interval is not.
    cuda = Device(type="cuda", properties=CUDAProperties(min_capability=75, max_capability=999))
    return {
        name: {
            device: {Mode.INFERENCE: _InProcess(layer), Mode.TRAINING: _InProcess(layer)}
            for device in ("cpu", cuda)
        }
        for name, layer in _LAYERS.items()
    }
