# SPDX-License-Identifier: Apache-2.0
"""Which path is a model on? What serves each of its Gated DeltaNet layers now, and why."""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from deltanet_ext.integrations import _registry
from deltanet_ext.integrations import transformers as switch

__all__ = ["Explanation", "Layer", "explain"]


@dataclass(frozen=True)
class Layer:
    """One Gated DeltaNet layer of a model.

    Attributes:
        name: its dotted name in the model.
        type: its class.
        device, dtype: of its projections.
        ours: whether this package serves its gated delta rule.
        serves: who does.
        why: why not this package; empty if it does.
    """

    name: str
    type: str
    device: str
    dtype: str
    ours: bool
    serves: str
    why: str


@dataclass(frozen=True)
class Explanation:
    """The answer of `explain(model)`: its layers, and the same in words."""

    layers: tuple[Layer, ...]

    @property
    def ours(self) -> bool:
        """Does this package serve every Gated DeltaNet layer of the model?"""
        return bool(self.layers) and all(layer.ours for layer in self.layers)

    def __str__(self) -> str:
        if not self.layers:
            return "deltanet_ext: the model has no layer that calls the gated delta rule"
        groups: dict[tuple[str, ...], list[str]] = {}
        for layer in self.layers:
            key = (layer.type, layer.device, layer.dtype, layer.serves, layer.why)
            groups.setdefault(key, []).append(layer.name)
        lines = [f"deltanet_ext: {len(self.layers)} Gated DeltaNet layers"]
        for (kind, device, dtype, serves, why), names in groups.items():
            which = names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}"
            reason = f" ({why})" if why else ""
            lines.append(f"  {len(names)} x {kind}, {dtype} on {device}: {serves}{reason}")
            lines.append(f"    {which}")
        return "\n".join(lines)


def explain(model: torch.nn.Module) -> Explanation:
    """Which path is `model` on: what serves the rule in each of its layers now, and why.

    Looks at the layers' classes, the functions that they would call, and at the weights' device and
    dtype. It runs nothing and changes nothing. Print the result, or read `.layers` and `.ours`.

    Args:
        model: any module; layers of transformers' modeling files in it are found.

    Raises:
        TypeError: model is not a torch.nn.Module.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"explain: model must be a torch.nn.Module, got {type(model).__name__}")
    layers = []
    for name, module in model.named_modules():
        file = sys.modules.get(type(module).__module__)
        if file is not None and switch._is_model(file.__name__, file) and _calls_rule(module):
            layers.append(_explain_layer(name, module, file))
    return Explanation(tuple(layers))


def _calls_rule(layer: torch.nn.Module) -> bool:
    code = getattr(inspect.unwrap(type(layer).forward), "__code__", None)
    names = set(code.co_names) if code is not None else set()
    return set(switch._RULES) <= names or set(switch._ATTRIBUTES) <= names


def _explain_layer(name: str, layer: torch.nn.Module, file: ModuleType) -> Layer:
    # What the layer calls for a prompt. Decode steps go the same way.
    function = getattr(layer, "chunk_gated_delta_rule", None) or file.torch_chunk_gated_delta_rule
    original = _registry.original(function)
    # The largest weight is a projection's. Gates and norms may be kept in another dtype.
    weight = max(layer.parameters(), key=torch.Tensor.numel)
    if original is function:
        why = "deltanet_ext.enable() has not been called"
    else:
        why = _why_not(layer, weight) or ""
    backend = switch._backends().get(weight.device.type)
    return Layer(
        name=name,
        type=type(layer).__name__,
        device=weight.device.type,
        dtype=str(weight.dtype).removeprefix("torch."),
        ours=not why,
        serves=_origin(original) if why else f"deltanet_ext, {backend}",
        why=why,
    )


def _why_not(layer: torch.nn.Module, weight: torch.Tensor) -> str | None:
    """What `enable()` would find in a call of this layer, as far as the layer shows it."""
    if weight.device.type != "cpu":
        why = _registry.why_no_kernels(weight.device, weight)
        if why is not None:
            return why
    dims = [int(getattr(layer, name, 0)) for name in ("head_k_dim", "head_v_dim")]
    return switch._too_large(*dims)


def _origin(function: Any) -> str:
    """Where a function that is not ours comes from.

    transformers wraps what it chose when the file was imported, its own function or that of another
    package, and the `kernels` package wraps that once more.
    """
    while True:
        function = getattr(function, "forward", function)
        names = getattr(getattr(function, "__code__", None), "co_freevars", ())
        held = dict(zip(names, getattr(function, "__closure__", None) or (), strict=False))
        inner = held.get("implementation") or held.get("func")
        if inner is None:
            break
        function = inner.cell_contents
    return f"{function.__module__}.{getattr(function, '__qualname__', type(function).__name__)}"
