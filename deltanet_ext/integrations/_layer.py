# SPDX-License-Identifier: Apache-2.0
"""The part of the switch in transformers.py that is not the rule: the short convolution before it,
and the gated norm behind it.

A modeling file calls `causal_conv1d_fn` and `causal_conv1d_update` by name, so a wrapper takes
their place; up to 5.14 they are attributes of a layer (transformers.py), the first of them None
where the causal-conv1d package is missing. The norm is a class of the file, `...RMSNormGated`; its
`forward` is replaced, for a class that computes what ours does: that is tried out on a few numbers
first.
A call that is not ours goes to what was there before, and the log says why, once per reason.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

from deltanet_ext import _load, layer, reference
from deltanet_ext._layer_checks import MAX_CONV_WIDTH, MAX_CUDA_NORM_COLUMNS
from deltanet_ext.integrations._registry import (
    log_once,
    marked,
    named_like,
    replace,
    why_no_kernels,
)

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_ACTIVATIONS = (None, "silu", "swish")

_log = logging.getLogger("deltanet_ext")


def switch(module: ModuleType, is_active: Callable[[], bool], *, functions: bool) -> None:
    """Puts wrappers into a modeling file; they do nothing while `is_active()` is False.

    `functions`: the convolution's too. Up to 5.14 layers keep these as attributes: `attributes()`.
    """
    for name, wrap in (
        ("causal_conv1d_fn", _wrap_convolution),
        ("causal_conv1d_update", _wrap_update),
    ):
        if functions and callable(module.__dict__.get(name)):
            replace(module, module, name, functools.partial(wrap, is_active=is_active))
    for held in list(vars(module).values()):
        if _is_norm(held, module) and _is_ours(held):
            replace(module, held, "forward", functools.partial(_wrap_norm, is_active=is_active))


def attributes(
    module: ModuleType, is_active: Callable[[], bool]
) -> dict[str, list[tuple[Any, Callable]]]:
    """Up to 5.14: for each attribute of a layer, what transformers may have put there, and ours."""
    function = module.__dict__.get("causal_conv1d_fn")
    updates = (module.__dict__.get(f"{form}causal_conv1d_update") for form in ("torch_", ""))
    ours = _wrap_convolution(function or _without_a_function, is_active, first="x")
    return {
        "causal_conv1d_fn": [(function, ours)],
        "causal_conv1d_update": [(held, _wrap_update(held, is_active)) for held in updates if held],
    }


def _without_a_function(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, **_: Any
) -> torch.Tensor:
    """What layers up to 5.14 compute where their `causal_conv1d_fn` is None."""
    width = weight.shape[-1]
    z = F.conv1d(x, weight.unsqueeze(1), bias, padding=width - 1, groups=x.shape[1])
    return F.silu(z[..., : x.shape[-1]])


def _reason_to_decline(**tensors: Any) -> str | None:
    """What all three need: tensors where there are kernels; the first one in a float dtype, the
    others in that or in fp32."""
    first: Any = None
    for name, x in tensors.items():
        if not isinstance(x, torch.Tensor):
            return f"{name} is not a tensor"
        first = x if first is None else first
        if not x.is_cpu and (why := why_no_kernels(x.device, first)) is not None:
            return why
        if x.is_cpu and not first.is_cpu:
            return f"tensors are on {first.device} and {x.device}"
        dtype = first.dtype
        narrow = x.dtype == torch.float32 and dtype != torch.float64
        if dtype not in _DTYPES or not (x.dtype == dtype or narrow):
            return f"{name} is {x.dtype} with an input in {dtype}"
    return None


# -- the convolution -----------------------------------------------------------------------------


def _reason_convolution(x: Any, weight: Any, bias: Any, activation: Any, **more: Any) -> str | None:
    optional = {} if bias is None else {"bias": bias}
    if (why := _reason_to_decline(x=x, weight=weight, **optional, **more)) is not None:
        return why
    if weight.shape[-1] > MAX_CONV_WIDTH:
        return f"the convolution has {weight.shape[-1]} taps, above {MAX_CONV_WIDTH}"
    if not (activation is None or (isinstance(activation, str) and activation in _ACTIVATIONS)):
        return f"the activation is {activation!r}"
    return None


def _wrap_convolution(
    original: Callable, is_active: Callable[[], bool], first: str = "hidden_states"
) -> Callable:
    parameters = (first, "weight", "bias", "activation")

    @named_like(original)
    def causal_conv1d_fn(*args: Any, **kwargs: Any) -> Any:
        if not is_active():
            return original(*args, **kwargs)
        call = dict(zip(parameters, args, strict=False)) | kwargs
        given: list[Any] = [call.get(name) for name in parameters]
        x, weight, bias, activation = given
        cu_seqlens = call.get("cu_seq_lens_q")
        packed = cu_seqlens is not None and len(cu_seqlens) > 2
        reason = _reason_convolution(x, weight, bias, activation)
        if reason is None and cu_seqlens is None and call.get("seq_idx") is not None:
            reason = "the batch is packed by seq_idx without cu_seq_lens_q"
        if reason is None:
            return layer.causal_conv1d_fn(
                x, weight, bias, activation=activation, cu_seqlens=cu_seqlens if packed else None
            )
        log_once("causal_conv1d_fn", reason)
        # Where the rule has kernels.
        if packed and (x.is_cpu or (x.is_cuda and _load.why_no_cuda() is None)):
            return _sequence_by_sequence(original, args, kwargs)
        return original(*args, **kwargs)

    return marked(causal_conv1d_fn, original)


def _sequence_by_sequence(original: Callable, args: tuple, kwargs: dict[str, Any]) -> torch.Tensor:
    """A packed batch whose rule is ours and whose convolution is not. The original would let the
    last tokens of one sequence into the next one; that stays hidden as long as the original rule
    refuses packed batches, and ours takes them."""
    x, *others = args
    options = {name: given for name, given in kwargs.items() if name != "seq_idx"}
    edges = [*kwargs["cu_seq_lens_q"].tolist(), x.shape[-1]]
    pieces = [
        original(x[..., start:end], *others, **options)
        for start, end in itertools.pairwise(edges)
        if start < end
    ]
    return torch.cat(pieces, dim=-1)


def _wrap_update(original: Callable, is_active: Callable[[], bool]) -> Callable:
    parameters = ("hidden_states", "conv_state", "weight", "bias", "activation")

    @named_like(original)
    def causal_conv1d_update(*args: Any, **kwargs: Any) -> Any:
        if is_active() and len(args) + len(kwargs) <= len(parameters):
            call = dict(zip(parameters, args, strict=False)) | kwargs
            given: list[Any] = [call.get(name) for name in parameters]
            x, state, weight, bias, activation = given
            reason = _reason_convolution(x, weight, bias, activation, conv_state=state)
            if reason is None and state.dtype != x.dtype:
                reason = f"conv_state is {state.dtype} with an input in {x.dtype}"
            if reason is None and _needs_grad(x, weight, bias):
                reason = "a gradient is needed, and conv_state is overwritten"
            if reason is None:
                return layer.causal_conv1d_update(x, state, weight, bias, activation)
            log_once("causal_conv1d_update", reason)
        return original(*args, **kwargs)

    return marked(causal_conv1d_update, original)


def _needs_grad(*tensors: Any) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


# -- the norm ------------------------------------------------------------------------------------


def _wrap_norm(original: Callable, is_active: Callable[[], bool]) -> Callable:
    @named_like(original)
    def forward(self: Any, hidden_states: Any, gate: Any = None) -> Any:
        if is_active():
            reason = _reason_to_decline(x=hidden_states, gate=gate, weight=self.weight)
            if reason is None and gate.shape != hidden_states.shape:
                reason = "the gate is of another shape"
            if reason is None and hidden_states.is_cuda and gate.shape[-1] > MAX_CUDA_NORM_COLUMNS:
                reason = (
                    f"rows on cuda have {gate.shape[-1]} columns, above {MAX_CUDA_NORM_COLUMNS}"
                )
            if reason is None and getattr(self, "activation", "silu") not in _ACTIVATIONS[1:]:
                reason = f"the activation is {self.activation!r}"
            if reason is None:
                return layer.gated_rms_norm(
                    hidden_states, gate, self.weight, float(self.variance_epsilon)
                )
            log_once(type(self).__name__, reason)
        return original(self, hidden_states, gate)

    return marked(forward, original)


def _is_norm(held: Any, module: ModuleType) -> bool:
    """Is this a class of the file's own that is called a gated norm?"""
    return (
        isinstance(held, type)
        and held.__name__.endswith("RMSNormGated")
        and held.__module__ == module.__name__
        and "forward" in held.__dict__
    )


def _is_ours(norm: Any) -> bool:
    return hasattr(norm.forward, "_deltanet_ext") or _computes_ours(norm)


def is_another_norm(held: Any, module: ModuleType) -> bool:
    """Is this a gated norm of the file that is left to transformers?"""
    return _is_norm(held, module) and not _is_ours(held)


@functools.cache
def _computes_ours(norm: Any) -> bool:
    """Tries a class on a few numbers: others have weights around 0, or gate before the norm."""
    try:
        with torch.device("cpu"), torch.no_grad():
            module = norm(8, eps=0.25)
            module.weight.copy_(torch.linspace(-1, 2, 8))
            x, gate = torch.linspace(-3, 2, 16).view(2, 8), torch.linspace(4, -3, 16).view(2, 8)
            want = reference.gated_rms_norm(x, gate, module.weight, 0.25)
            return torch.allclose(module(x, gate).double(), want, rtol=1e-5, atol=1e-6)
    except Exception as error:  # a class that is built in another way
        _log.debug("%s is left to transformers: %s", norm.__name__, error)
        return False
