# SPDX-License-Identifier: Apache-2.0
"""Argument checks of the functions in layer.py, in the two passes that _checks.py describes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deltanet_ext._checks import (
    _FLOATS,
    _INDICES,
    _dtype,
    _explain_cu_seqlens,
    _explain_flags,
    _explain_slots,
    _is_plain,
    _kind,
    _need_cuda_dtype,
    _need_device,
    _need_dtype,
    _need_no_gradient,
    _need_own_memory,
    _need_shape,
    _need_tensor,
    _per_token_dtypes,
    _shape,
)

MAX_CONV_WIDTH = 8
MAX_CUDA_NORM_COLUMNS = 8192
_ACTIVATIONS = ("silu", "swish")
_OPTIONAL = "torch.Tensor or None"


def check_convolution(
    call: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    seq_idx: Tensor | None,
    initial_states: Tensor | None,
    return_final_states: bool,
    final_states_out: Tensor | None,
    activation: str | None,
    cu_seqlens: Tensor | None,
) -> None:
    """The arguments of `causal_conv1d_fn`."""
    if (
        cu_seqlens is None  # packed calls are long: the thorough pass costs them nothing
        and seq_idx is None
        and final_states_out is None
        and type(return_final_states) is bool
        and _plain_activation(activation)
        and _plain_convolution(x, weight, bias)
        and x.dim() == 3
        and (
            initial_states is None
            or _plain_states(initial_states, x, (*x.shape[:2], weight.shape[1] - 1))
        )
    ):
        return
    _explain_convolution(call, x, weight, bias, ranks=(3,))
    _explain_activation(call, activation)
    _explain_flags(call, return_final_states=return_final_states)
    batch, channels, tokens = x.shape
    if cu_seqlens is not None:
        _need_device_of(call, "cu_seqlens", cu_seqlens, x)
        _explain_cu_seqlens(call, cu_seqlens, batch, tokens)
    if seq_idx is not None:
        _need_device_of(call, "seq_idx", seq_idx, x)
        _need_dtype(call, "seq_idx", seq_idx, _INDICES)
        _need_shape(call, "seq_idx", seq_idx, "[B, T]", (batch, tokens))
        if cu_seqlens is not None:
            raise ValueError(f"{call}: seq_idx and cu_seqlens are given; supported: one of them")
        if initial_states is not None or return_final_states:
            raise ValueError(
                f"{call}: seq_idx is given with initial or final states; "
                "supported: cu_seqlens with states"
            )
    if final_states_out is not None and not return_final_states:
        raise ValueError(
            f"{call}: final_states_out is given and return_final_states is False; "
            "supported: final_states_out with return_final_states=True only"
        )
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    wanted = (sequences, channels, weight.shape[1] - 1)
    for name, states in (
        ("initial_states", initial_states),
        ("final_states_out", final_states_out),
    ):
        if states is not None:
            _explain_states(call, name, states, x, "[N, D, W - 1]", wanted)
    if final_states_out is not None:
        _need_own_memory(call, "final_states_out", final_states_out)
        if torch.is_grad_enabled() and final_states_out.is_leaf and final_states_out.requires_grad:
            raise ValueError(
                f"{call}: final_states_out is a leaf that requires grad; supported: one that "
                "can be overwritten"
            )


def check_update(
    call: str,
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    conv_state_indices: Tensor | None,
) -> None:
    """The arguments of `causal_conv1d_update`."""
    if not (
        conv_state_indices is None
        and _plain_activation(activation)
        and _plain_convolution(x, weight, bias)
        and isinstance(conv_state, Tensor)
        and not conv_state.is_nested
        and conv_state.dim() == 3
        and conv_state.shape[2] >= weight.shape[1] - 1
        and _plain_states(conv_state, x, (*x.shape[:2], conv_state.shape[2]))
    ):
        _explain_convolution(call, x, weight, bias, ranks=(2, 3))
        _explain_activation(call, activation)
        _explain_pool(call, x, conv_state, weight, conv_state_indices)
    if not conv_state.is_contiguous():
        _need_own_memory(call, "conv_state", conv_state)
    if torch.is_grad_enabled():
        for name, given in (
            ("x", x),
            ("weight", weight),
            ("bias", bias),
            ("conv_state", conv_state),
        ):
            _need_no_gradient(
                call, name, given, "conv_state", "causal_conv1d_fn with initial_states"
            )


def check_norm(call: str, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> None:
    """The arguments of `gated_rms_norm`."""
    if (
        type(eps) is float
        and eps >= 0
        and isinstance(x, Tensor)
        and isinstance(gate, Tensor)
        and isinstance(weight, Tensor)
        and not (x.is_nested or gate.is_nested or weight.is_nested)
        and x.dtype in _FLOATS
        and x.dim() >= 1
        and x.shape[-1] >= 1
        and gate.shape == x.shape
        and weight.shape == x.shape[-1:]
        and _is_plain(x, None)
        and _plain_weight(gate, x.dtype)
        and _plain_weight(weight, x.dtype)
    ):
        return
    _need_tensor(call, "x", x)
    _need_dtype(call, "x", x, _FLOATS)
    if x.dim() < 1 or x.shape[-1] < 1:
        raise ValueError(f"{call}: x has shape {_shape(x)}; supported: [..., C] with C from 1")
    _need_device(call, "x", x, x.device)
    _need_cuda_dtype(call, "x", x)
    if x.device.type == "cuda" and x.shape[-1] > MAX_CUDA_NORM_COLUMNS:
        raise ValueError(
            f"{call}: x has shape {_shape(x)}; supported on cuda: [..., C] with C up to "
            f"{MAX_CUDA_NORM_COLUMNS}"
        )
    for name, given, text, wanted in (
        ("gate", gate, "[..., C]", x.shape),
        ("weight", weight, "[C]", x.shape[-1:]),
    ):
        _need_tensor(call, name, given)
        _need_shape(call, name, given, text, wanted)
        _explain_weight(call, name, given, x)
    if not isinstance(eps, (int, float)) or isinstance(eps, bool):
        raise TypeError(f"{call}: eps is {_kind(eps)}; supported: float, 0 or more")
    if not eps >= 0:
        raise ValueError(f"{call}: eps is {eps}; supported: 0 or more")


# ---- the cheap pass: True when everything is as the common case has it -----------------


def _plain_activation(activation: Any) -> bool:
    return activation is None or (type(activation) is str and activation in _ACTIVATIONS)


def _plain_convolution(x: Any, weight: Any, bias: Any) -> bool:
    """x may have two axes or three."""
    if not (isinstance(x, Tensor) and isinstance(weight, Tensor)):
        return False
    if x.is_nested or weight.is_nested or x.dim() not in (2, 3) or weight.dim() != 2:
        return False
    dtype, channels = x.dtype, x.shape[1]
    return (
        dtype in _FLOATS
        and weight.shape[0] == channels
        and 1 <= weight.shape[1] <= MAX_CONV_WIDTH
        and _plain_weight(weight, dtype)
        and _is_plain(x, None)
        and (
            bias is None
            or (
                isinstance(bias, Tensor)
                and not bias.is_nested
                and bias.shape == (channels,)
                and _plain_weight(bias, dtype)
            )
        )
    )


def _plain_weight(weight: Tensor, dtype: torch.dtype) -> bool:
    return _is_plain(weight, None) and (
        weight.dtype == dtype or (weight.dtype == torch.float32 and dtype != torch.float64)
    )


def _plain_states(states: Any, x: Tensor, shape: tuple[int, ...]) -> bool:
    return (
        isinstance(states, Tensor)
        and not states.is_nested
        and states.shape == shape
        and states.dtype == x.dtype
        and _is_plain(states, None)
    )


# ---- the thorough pass: raises, or agrees ----------------------------------------------


def _explain_convolution(
    call: str, x: Tensor, weight: Tensor, bias: Tensor | None, ranks: tuple[int, ...]
) -> None:
    _need_tensor(call, "x", x)
    _need_dtype(call, "x", x, _FLOATS)
    if x.dim() not in ranks:
        shapes = "[B, D] or [B, D, T]" if 2 in ranks else "[B, D, T]"
        raise ValueError(f"{call}: x has shape {_shape(x)}; supported: {shapes}")
    _need_device(call, "x", x, x.device)
    _need_cuda_dtype(call, "x", x)
    channels = x.shape[1]
    _need_tensor(call, "weight", weight)
    if weight.dim() != 2 or weight.shape[0] != channels:
        raise ValueError(
            f"{call}: weight has shape {_shape(weight)}; supported: [D, W] with D = {channels} "
            "as in x"
        )
    width = weight.shape[1]
    if not 1 <= width <= MAX_CONV_WIDTH:
        raise ValueError(f"{call}: weight has width {width}; supported: 1 to {MAX_CONV_WIDTH}")
    _explain_weight(call, "weight", weight, x)
    if bias is not None:
        _need_tensor(call, "bias", bias, _OPTIONAL)
        _need_shape(call, "bias", bias, "[D]", (channels,))
        _explain_weight(call, "bias", bias, x)


def _explain_weight(call: str, name: str, weight: Tensor, x: Tensor) -> None:
    _need_dtype(call, name, weight, _per_token_dtypes(x.dtype))
    _need_device(call, name, weight, x.device)


def _explain_activation(call: str, activation: str | None) -> None:
    if not _plain_activation(activation):
        got = repr(activation) if isinstance(activation, str) else _kind(activation)
        raise ValueError(f"{call}: activation is {got}; supported: None, 'silu', 'swish'")


def _explain_states(
    call: str, name: str, states: Tensor, x: Tensor, text: str, wanted: tuple[int, ...]
) -> None:
    _need_device_of(call, name, states, x)
    if states.dtype != x.dtype:
        raise TypeError(
            f"{call}: {name} is {_dtype(states)} and x is {_dtype(x)}; supported: one dtype"
        )
    _need_shape(call, name, states, text, wanted)


def _explain_pool(
    call: str, x: Tensor, conv_state: Tensor, weight: Tensor, indices: Tensor | None
) -> None:
    _need_tensor(call, "conv_state", conv_state)
    least = weight.shape[1] - 1
    if conv_state.dim() != 3 or conv_state.shape[2] < least:
        raise ValueError(
            f"{call}: conv_state has shape {_shape(conv_state)}; supported: [N, D, S] with S from "
            f"W - 1 = {least}"
        )
    batch, channels = x.shape[:2]
    slots, _, kept = conv_state.shape
    if indices is None:
        slots = batch
    else:
        _explain_slots(call, "conv_state_indices", indices, x, batch, slots)
    _explain_states(call, "conv_state", conv_state, x, "[N, D, S]", (slots, channels, kept))


def _need_device_of(call: str, name: str, given: Tensor, x: Tensor) -> None:
    _need_tensor(call, name, given, _OPTIONAL)
    _need_device(call, name, given, x.device)
