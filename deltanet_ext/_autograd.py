# SPDX-License-Identifier: Apache-2.0
"""Autograd of the operators. Gradients are not built yet: a backward says so."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

NOT_BUILT = (
    "gradients are not built yet; "
    "run it under torch.no_grad() or torch.inference_mode(), "
    "or pass tensors that do not require grad"
)

_OPERATORS = (
    "chunk_gated_delta_rule_forward",
    "recurrent_gated_delta_rule_forward",
    "chunk_transition",
    "unit_lower_triangular_inverse",
)


def register() -> None:
    for name in _OPERATORS:
        _register_missing_backward(name)


def _register_missing_backward(name: str) -> None:
    def backward(ctx: Any, *grads: Any) -> NoReturn:
        raise NotImplementedError(f"deltanet_ext::{name}: {NOT_BUILT}")

    torch.library.register_autograd(f"deltanet_ext::{name}", backward)
