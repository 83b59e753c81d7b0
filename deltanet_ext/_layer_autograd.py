# SPDX-License-Identifier: Apache-2.0
"""Autograd of the operators behind layer.py. They keep their inputs and compute the rest again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deltanet_ext import _autograd

# ---- the convolution: x, weight, bias, initial_states, seq_idx, cu_seqlens, then options --------

_CONV_TENSORS, _CONV_DIFFERENTIABLE = 6, 4


def _keep_convolution(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:_CONV_TENSORS])
    ctx.silu, ctx.return_final_states = inputs[_CONV_TENSORS:]
    ctx.set_materialize_grads(False)  # a missing gradient is less work than one of zeros


def _convolution_backward(
    ctx: Any, grad_out: Tensor | None, grad_final_states: Tensor | None
) -> tuple[Tensor | None, ...]:
    gradients: list[Tensor | None] = [None] * (_CONV_TENSORS + 2)
    if not ctx.return_final_states:
        grad_final_states = None  # belongs to an empty tensor
    wanted = [i for i in range(_CONV_DIFFERENTIABLE) if ctx.needs_input_grad[i]]
    if wanted and (grad_out is not None or grad_final_states is not None):
        results = _autograd._operators().causal_conv1d_backward(
            grad_out, grad_final_states, *ctx.saved_tensors, ctx.silu, _bits(wanted)
        )
        for i in wanted:
            gradients[i] = results[i]
    return tuple(gradients)


# ---- the norm: x, gate, weight, eps ------------------------------------------------------------


def _keep_norm(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.eps = inputs
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def _norm_backward(ctx: Any, grad_out: Tensor | None) -> tuple[Tensor | None, ...]:
    gradients: list[Tensor | None] = [None] * 4
    wanted = [i for i in range(3) if ctx.needs_input_grad[i]]
    if wanted and grad_out is not None:
        results = _autograd._operators().gated_rms_norm_backward(
            grad_out, *ctx.saved_tensors, ctx.eps, _bits(wanted)
        )
        for i in wanted:
            gradients[i] = results[i]
    return tuple(gradients)


# ---- registration ------------------------------------------------------------------------------


def _bits(wanted: list[int]) -> int:
    return sum(1 << i for i in wanted)


def register(namespace: str = "deltanet_ext") -> None:
    for name, backward, keep in (
        ("causal_conv1d", _convolution_backward, _keep_convolution),
        ("gated_rms_norm", _norm_backward, _keep_norm),
    ):
        torch.library.register_autograd(
            f"{namespace}::{name}_forward", backward, setup_context=keep
        )
        torch.library.register_autograd(f"{namespace}::{name}_backward", _autograd._refuse)
