# SPDX-License-Identifier: Apache-2.0
"""Fake kernels: shapes, dtypes and strides of results, for torch.compile, export and meta tensors.

Every size may be symbolic, so nothing here compares one. All outputs are contiguous, but those of
the convolution, whose channels are neighbors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deltanet_ext._autograd import SEGMENT_TOKENS
from deltanet_ext._checks import state_dtype


def rule_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    scale: float,
    output_final_state: bool,
    use_qk_l2norm: bool,
    use_gate: bool,
    use_beta_sigmoid: bool,
    allow_neg_eigval: bool,
    state_v_first: bool,
) -> tuple[Tensor, Tensor]:
    batch, tokens, heads, dim_v = value.shape
    dim_k = query.shape[-1]
    out = query.new_empty((batch, tokens, heads, dim_v))
    if not output_final_state:
        return out, query.new_empty((0,), dtype=state_dtype(query))
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    matrix = (dim_v, dim_k) if state_v_first else (dim_k, dim_v)
    return out, query.new_empty((sequences, heads, *matrix), dtype=state_dtype(query))


def rule_forward_saving(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Both results of rule_forward, and a state per segment."""
    query, value = args[0], args[2]
    batch, tokens, heads, dim_v = value.shape
    sizes = (batch, tokens // SEGMENT_TOKENS, heads, query.shape[-1], dim_v)
    return *rule_forward(*args), query.new_empty(sizes, dtype=state_dtype(query))


def rule_backward(
    grad_out: Tensor | None,
    grad_final_state: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    saved_states: Tensor | None,
    scale: float,
    use_qk_l2norm: bool,
    use_gate: bool,
    use_beta_sigmoid: bool,
    allow_neg_eigval: bool,
    state_v_first: bool,
    wanted: int,
) -> tuple[Tensor, ...]:
    def gradient(i: int, x: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
        dtype = dtype or (query if x is None else x).dtype
        shape = (0,) if x is None or not wanted >> i & 1 else x.shape
        return query.new_empty(shape, dtype=dtype)

    arithmetic = state_dtype(query)
    plain = [gradient(i, x) for i, x in enumerate((query, key, value, g, beta))]
    wide = enumerate((initial_state, A_log, dt_bias), len(plain))
    return *plain, *(gradient(i, x, arithmetic) for i, x in wide)


def gated_delta_rule_update(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
    return query.new_empty(value.shape)


def chunk_transition(
    key: Tensor,
    value: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    cu_seqlens: Tensor | None,
    use_qk_l2norm: bool,
) -> tuple[Tensor, Tensor]:
    batch, _, heads, dim_v = value.shape
    dim_k = key.shape[-1]
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    M = key.new_empty((sequences, heads, dim_k, dim_k), dtype=state_dtype(key))
    U = key.new_empty((sequences, heads, dim_k, dim_v), dtype=state_dtype(key))
    return M, U


def unit_lower_triangular_inverse(L: Tensor) -> Tensor:
    return L.new_empty(L.shape)


def causal_conv1d_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_states: Tensor | None,
    seq_idx: Tensor | None,
    cu_seqlens: Tensor | None,
    silu: bool,
    return_final_states: bool,
) -> tuple[Tensor, Tensor]:
    batch, channels, _ = x.shape
    sequences: Any = 0
    if return_final_states:
        sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return _channels_last(x), x.new_empty((sequences, channels, weight.shape[1] - 1))


def causal_conv1d_backward(
    grad_out: Tensor | None,
    grad_final_states: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_states: Tensor | None,
    seq_idx: Tensor | None,
    cu_seqlens: Tensor | None,
    silu: bool,
    wanted: int,
) -> tuple[Tensor, ...]:
    d_x = _channels_last(x) if wanted & 1 else x.new_empty((0,))
    others = enumerate((weight, bias, initial_states), 1)
    return d_x, *(_gradient(x, given, wanted >> i & 1) for i, given in others)


def _gradient(x: Tensor, given: Tensor | None, wanted: int) -> Tensor:
    """Of the shape and dtype of what it belongs to; what is not wanted is empty."""
    if given is None:
        return x.new_empty((0,))
    return x.new_empty(given.shape if wanted else (0,), dtype=given.dtype)


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state_indices: Tensor | None,
    silu: bool,
) -> Tensor:
    return _channels_last(x)


def gated_rms_norm_forward(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x.new_empty(x.shape)


def gated_rms_norm_backward(
    grad_out: Tensor, x: Tensor, gate: Tensor, weight: Tensor, eps: float, wanted: int
) -> tuple[Tensor, ...]:
    return tuple(_gradient(x, given, wanted >> i & 1) for i, given in enumerate((x, gate, weight)))


def _channels_last(x: Tensor) -> Tensor:
    batch, channels, tokens = x.shape
    return x.new_empty((batch, tokens, channels)).transpose(1, 2)


def register() -> None:
    for form in ("chunk", "recurrent"):
        name = f"deltanet_ext::{form}_gated_delta_rule_forward"
        torch.library.register_fake(name, rule_forward)
        torch.library.register_fake(f"{name}_saving", rule_forward_saving)
    torch.library.register_fake("deltanet_ext::chunk_gated_delta_rule_backward", rule_backward)
    torch.library.register_fake("deltanet_ext::gated_delta_rule_update", gated_delta_rule_update)
    torch.library.register_fake("deltanet_ext::chunk_transition", chunk_transition)
    torch.library.register_fake(
        "deltanet_ext::unit_lower_triangular_inverse", unit_lower_triangular_inverse
    )
    for layer_kernel in (
        causal_conv1d_forward,
        causal_conv1d_backward,
        causal_conv1d_update,
        gated_rms_norm_forward,
        gated_rms_norm_backward,
    ):
        torch.library.register_fake(f"deltanet_ext::{layer_kernel.__name__}", layer_kernel)
