# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule as a backend of flash-linear-attention (fla 0.6 and newer).

    from deltanet_ext.integrations.fla import register

    register()   # fla's chunk_gated_delta_rule now runs here, on CPUs and GPUs

fla asks its backends for each call of `chunk_gated_delta_rule` and takes its own Triton kernels if
none accepts. `FLA_DELTANET_EXT=0` in the environment turns this one off. fla's other functions do
not ask, `fused_recurrent_gated_delta_rule` among them, which its layer takes for short runs without
gradients: call `deltanet_ext.recurrent_gated_delta_rule` for those.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from deltanet_ext import ops
from deltanet_ext.integrations import _registry
from deltanet_ext.integrations import transformers as switch

__all__ = ["register"]

_OURS = inspect.signature(ops.chunk_gated_delta_rule).parameters
# fla's names of the first three.
_RENAMED = {"q": "query", "k": "key", "v": "value"}
# Hints that only say the same again.
_IGNORED = ("cu_seqlens_cpu", "chunk_indices")
_registered = False


def _translate(signature: inspect.Signature, args: Any, kwargs: Any) -> dict[str, Any]:
    """A call with fla's arguments as one of ours. What we have no use for keeps its name."""
    bound = signature.bind(*args, **kwargs)
    call = dict(bound.arguments)
    call |= call.pop("kwargs", {})
    call = {_RENAMED.get(name, name): value for name, value in call.items()}
    for name in _IGNORED:
        call.pop(name, None)
    return {n: x for n, x in call.items() if n in _OURS or (x is not None and x is not False)}


def _why_not(call: dict[str, Any]) -> str | None:
    if unknown := sorted(set(call) - set(_OURS)):
        return f"arguments without a counterpart: {', '.join(unknown)}"
    tensors = {n: x for n, x in call.items() if isinstance(x, torch.Tensor)}
    query = tensors["query"]
    for x in tensors.values():
        if not x.is_cpu and (why := _registry.why_no_kernels(x.device, query)) is not None:
            return why
    return switch._too_large(query.shape[-1], tensors["value"].shape[-1])


def register() -> None:
    """Make this package a backend of fla's `chunk_gated_delta_rule`, before fla's own ones.

    Calling it again does no harm.

    Raises:
        ImportError: fla is not installed, or is older than its registry of backends (0.6).
    """
    global _registered
    if _registered:
        return
    try:
        from fla.backends import BaseBackend
        from fla.backends import register as register_backend
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule as theirs
    except ImportError as error:
        raise ImportError(
            "deltanet_ext.integrations.fla.register: flash-linear-attention 0.6 or newer, with "
            f"Triton, cannot be imported ({error})"
        ) from error

    signature = inspect.signature(inspect.unwrap(theirs))

    class DeltanetExt(BaseBackend):
        backend_type = "deltanet_ext"
        package_name = None
        env_var = "FLA_DELTANET_EXT"
        default_enable = True
        priority = 1  # FlashQLA has 3; the lower one is asked first

        def chunk_gated_delta_rule_verifier(
            self, *args: Any, **kwargs: Any
        ) -> tuple[bool, str | None]:
            why = _why_not(_translate(signature, args, kwargs))
            return why is None, why

        def chunk_gated_delta_rule(self, *args: Any, **kwargs: Any) -> Any:
            return ops.chunk_gated_delta_rule(**_translate(signature, args, kwargs))

    register_backend("gated_delta_rule")(DeltanetExt)
    _registered = True
