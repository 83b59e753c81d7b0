# SPDX-License-Identifier: Apache-2.0
"""Autograd of the operators: what is kept for a backward, and which operator computes it.

The rule keeps its inputs, and of the forward pass one state per 1056 tokens; all else is computed
again. Only the gradients that somebody needs are asked for. There is no second derivative.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

# Where in a rule operator's arguments the tensors are that have gradients, in the order of
# the results of chunk_gated_delta_rule_backward and of the bits of its `wanted`.
_DIFFERENTIABLE = (0, 1, 2, 3, 4, 5, 7, 8)
_TENSORS = 9  # the arguments before the options
_QUERY, _KEY, _VALUE, _G, _BETA = range(5)

SEGMENT_TOKENS = 1056  # as in csrc/core/params.h

NO_SECOND_DERIVATIVE = (
    "deltanet_ext: second derivatives are not built; "
    "the gradients of this package can be used, but not differentiated again"
)


def _operators() -> Any:
    return torch.ops.deltanet_ext


# ---- the rule --------------------------------------------------------------------------


def _keep_rule(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    saved_states = output[2] if len(output) == 3 else None
    ctx.save_for_backward(*inputs[:_TENSORS], saved_states)
    ctx.options = inputs[_TENSORS:]
    if saved_states is not None:
        ctx.mark_non_differentiable(saved_states)
    ctx.set_materialize_grads(False)  # a missing gradient is less work than one of zeros


def _rule_backward(
    ctx: Any, grad_out: Tensor | None, grad_final_state: Tensor | None, *_: None
) -> tuple[Tensor | None, ...]:
    *inputs, saved_states = ctx.saved_tensors
    scale, output_final_state, *flags = ctx.options
    gradients: list[Tensor | None] = [None] * (_TENSORS + len(ctx.options))
    if not output_final_state:
        grad_final_state = None  # belongs to an empty tensor
    wanted = [i for i in _DIFFERENTIABLE if ctx.needs_input_grad[i]]
    if not wanted or (grad_out is None and grad_final_state is None):
        return tuple(gradients)
    if saved_states is None:
        saved_states = _states_of(inputs, ctx.options)
    results = _operators().chunk_gated_delta_rule_backward(
        grad_out, grad_final_state, *inputs, saved_states, scale, *flags,
        sum(1 << _DIFFERENTIABLE.index(i) for i in wanted),
    )  # fmt: skip
    for i in wanted:
        gradients[i] = results[_DIFFERENTIABLE.index(i)].to(inputs[i].dtype)
    return tuple(gradients)


def _states_of(inputs: list[Any], options: tuple[Any, ...]) -> Tensor | None:
    """What a forward pass did not save, by running it again; nothing where nothing is needed."""
    if inputs[_KEY].shape[1] <= SEGMENT_TOKENS:
        return None
    states: Tensor = _operators().chunk_gated_delta_rule_forward_saving(*inputs, *options)[2]
    return states


# ---- its transition --------------------------------------------------------------------


def _keep_transition(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.use_qk_l2norm = inputs[5]
    ctx.set_materialize_grads(False)


def _transition_backward(
    ctx: Any, grad_M: Tensor | None, grad_U: Tensor | None
) -> tuple[Tensor | None, ...]:
    """U is the final state of the rule from a zero state, M that from I with values of zero."""
    key, value, g, beta, cu_seqlens = ctx.saved_tensors
    totals: list[Tensor | None] = [None] * 6
    batch, tokens, heads = value.shape[:3]
    dim_k = key.shape[-1]
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    no_values = value.new_zeros(()).expand(batch, tokens, heads, dim_k)
    dtype = torch.float64 if key.dtype == torch.float64 else torch.float32
    identity = torch.eye(dim_k, dtype=dtype, device=key.device)
    identity = identity.expand(sequences, heads, dim_k, dim_k)
    options = (1.0, False, ctx.use_qk_l2norm, False, False, False, False)
    scale, _, *flags = options
    for grad, values, state in ((grad_M, no_values, identity), (grad_U, value, None)):
        # In the order of this operator's arguments: key, value, g, beta.
        wanted = [
            i for i in range(4) if ctx.needs_input_grad[i] and not (i == 1 and state is not None)
        ]
        if grad is None or not wanted:
            continue
        inputs = [key, key, values, g, beta, state, cu_seqlens, None, None]
        results = _operators().chunk_gated_delta_rule_backward(
            None, grad, *inputs, _states_of(inputs, options), scale, *flags,
            sum(1 << (_KEY + i) for i in wanted),
        )  # fmt: skip
        for i in wanted:
            result, total = results[_KEY + i], totals[i]
            totals[i] = result if total is None else total + result
    return tuple(totals)


# ---- the inverse -----------------------------------------------------------------------


def _keep_inverse(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(output)


def _inverse_backward(ctx: Any, grad: Tensor) -> Tensor:
    """T = (I + L)^-1 has dT = -T dL T."""
    (T,) = ctx.saved_tensors
    wide = T.dtype if T.dtype in (torch.float32, torch.float64) else torch.float32
    t = T.to(wide).mT
    return -(t @ grad.to(wide) @ t).tril(-1).to(T.dtype)


# ---- registration ----------------------------------------------------------------------


def _refuse(ctx: Any, *grads: Any) -> NoReturn:
    raise NotImplementedError(NO_SECOND_DERIVATIVE)


def register(namespace: str = "deltanet_ext") -> None:
    def one(name: str, backward: Any, keep: Any = None) -> None:
        torch.library.register_autograd(f"{namespace}::{name}", backward, setup_context=keep)

    for form in ("chunk", "recurrent"):
        one(f"{form}_gated_delta_rule_forward", _rule_backward, _keep_rule)
        one(f"{form}_gated_delta_rule_forward_saving", _rule_backward, _keep_rule)
    one("chunk_gated_delta_rule_backward", _refuse)
    one("chunk_transition", _transition_backward, _keep_transition)
    one("unit_lower_triangular_inverse", _inverse_backward, _keep_inverse)
