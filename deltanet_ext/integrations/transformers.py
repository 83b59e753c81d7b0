# SPDX-License-Identifier: Apache-2.0
"""Make the Gated DeltaNet models of Hugging Face transformers run on this package.

    from deltanet_ext.integrations.transformers import disable, enable, enabled

    enable()              # from here on, every such model in the process
    disable()             # what was there before, exactly
    with enabled(): ...   # only inside the block

How it works. A modeling file of transformers calls two functions of its own by name,
`torch_chunk_gated_delta_rule` and `torch_recurrent_gated_delta_rule`. `enable()` puts a wrapper in
their place, in every modeling file that is imported already and, through an import hook, in each
one that is imported later. It imports nothing of transformers itself. Models that were built before
the call are switched as well: they look the function up at every call. Up to transformers 5.14 each
layer keeps the functions as attributes of its own; there, a property of the layer's class goes
before them. The short convolution and the gated norm of the layer are switched along (_layer.py).

A call that the operators cannot serve goes to the function that was there before, and the log says
why, once per reason: a tensor is on a device without kernels, an unsupported dtype or head dim.

Models also pass arguments that are none of the rule's business (`use_cache`,
`output_router_logits`, ...). The wrapper drops them, as transformers does. `cu_seqlens` is used:
the sequences of a packed batch stay apart, in the rule and in the short convolution before it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.metadata
import re
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from deltanet_ext import _load, ops
from deltanet_ext.integrations import _layer, _registry
from deltanet_ext.integrations._registry import log_once, marked, named_like

__all__ = ["Report", "disable", "enable", "enabled", "report"]

OLDEST = (4, 57)

# The functions of a modeling file, ours for them, and their parameters in transformers' order.
_INPUTS = ("query", "key", "value", "g", "beta")
_OPTIONS = ("initial_state", "output_final_state", "use_qk_l2norm_in_kernel")
_RULES = {
    "torch_chunk_gated_delta_rule": (
        "chunk_gated_delta_rule",
        (*_INPUTS, "chunk_size", *_OPTIONS),
    ),
    "torch_recurrent_gated_delta_rule": (
        "recurrent_gated_delta_rule",
        (*_INPUTS, *_OPTIONS),
    ),
}
# Up to 5.14: attributes of a layer, the functions that they stand for, and the names in the
# modeling file of what transformers itself may have put there.
_ATTRIBUTES = {
    "chunk_gated_delta_rule": ("torch_chunk_gated_delta_rule", "chunk_gated_delta_rule"),
    "recurrent_gated_delta_rule": (
        "torch_recurrent_gated_delta_rule",
        "fused_recurrent_gated_delta_rule",
    ),
}

_MODELING_FILE = re.compile(r"(^|\.)modeling_\w+$")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_LARGEST_HEAD_DIM = 256

_lock = threading.RLock()

# Read by every wrapper: a wrapper that somebody copied while it was in place calls the original
# again after disable(). True while enable() holds or a block of enabled() runs, in any thread.
_active = False
_whole_layer = True  # the convolution and the norm too
_enabled_explicitly = False
_blocks: set[object] = set()


@dataclass(frozen=True)
class Report:
    """What is switched at this moment, where it would run, and what was left as it was.

    Attributes:
        enabled: whether anything is switched.
        transformers: its version, None if it is not installed.
        functions: dotted names of the functions and layer attributes that are ours now.
        backends: device type -> what serves calls with tensors there.
        left: dotted name -> why it was left to transformers.
    """

    enabled: bool
    transformers: str | None
    functions: tuple[str, ...]
    backends: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    @property
    def modules(self) -> tuple[str, ...]:
        """The modeling files that were switched, without duplicates, in order."""
        files = (re.sub(r"(\.modeling_\w+)\..*", r"\1", name) for name in self.functions)
        return tuple(dict.fromkeys(files))

    def __str__(self) -> str:
        if not self.enabled:
            return "deltanet_ext: transformers is not switched"
        lines = [f"deltanet_ext: transformers {self.transformers} is switched"]
        for module in self.modules:
            names = (n.removeprefix(f"{module}.") for n in self.functions if n.startswith(module))
            lines.append(f"  {module}: {', '.join(names)}")
        if not self.modules:
            lines.append("  no modeling file imported yet; each will be switched when it is")
        lines += [f"  on {device}: {backend}" for device, backend in self.backends.items()]
        lines += [f"  left: {name} ({why})" for name, why in self.left.items()]
        return "\n".join(lines)


# -- which calls are ours ------------------------------------------------------------------------


def _reason_to_decline(call: dict[str, Any]) -> str | None:
    """Why this call must go to the original function, or None when it is ours."""
    tensors: list[Any] = [call.get(name) for name in _INPUTS]
    query, key, value, g, beta = tensors
    initial_state, cu_seqlens = call.get("initial_state"), call.get("cu_seqlens")
    if initial_state is not None:
        tensors.append(initial_state)

    # Asked for every layer of every generated token: one plain loop.
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            return "query, key, value, g and beta are not all tensors"
        if tensor.is_cpu:
            continue
        if (why := _registry.why_no_kernels(tensor.device, query)) is not None:
            return why

    dtype = query.dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    if dtype not in _DTYPES or key.dtype != dtype or value.dtype != dtype:
        return f"query, key, value are {dtype}, {key.dtype}, {value.dtype}"
    if g.dtype not in (wide, dtype) or beta.dtype not in (wide, dtype):
        return f"g and beta are {g.dtype} and {beta.dtype} with a query in {dtype}"
    if (why := _too_large(key.shape[-1], value.shape[-1])) is not None:
        return why

    if cu_seqlens is None and call.get("seq_idx") is not None:
        return "the batch is packed by seq_idx without cu_seq_lens_q"
    # With a cache, transformers' attention layers do not keep packed sequences apart, and the cache
    # holds one sequence. Its own function refuses the call, and that refusal must be heard.
    packed = cu_seqlens is not None and len(cu_seqlens) > 2
    if packed and (initial_state is not None or call.get("output_final_state")):
        return "a packed batch with a cache (use_cache=False keeps the sequences apart)"
    return None


def _too_large(dim_k: int, dim_v: int) -> str | None:
    """Why these head dims are not ours."""
    if max(dim_k, dim_v) <= _LARGEST_HEAD_DIM:
        return None
    return f"head dims are {dim_k} and {dim_v}, above {_LARGEST_HEAD_DIM}"


# -- the wrappers --------------------------------------------------------------------------------


def _wrap_rule(name: str, theirs: Callable) -> Callable:
    our_name, parameters = _RULES[name]
    used = (*parameters, "cu_seqlens")

    @named_like(theirs)
    def gated_delta_rule(*args: Any, **kwargs: Any) -> Any:
        if _active and len(args) <= len(parameters):
            call = dict(zip(parameters, args, strict=False)) | kwargs
            reason = _reason_to_decline(call)
            if reason is None:
                # Looked up at every call, so that a replaced operator is seen.
                return getattr(ops, our_name)(**{n: call[n] for n in used if n in call})
            log_once("gated delta rule", reason)
        return theirs(*args, **kwargs)

    return marked(gated_delta_rule, theirs)


# -- switching -----------------------------------------------------------------------------------


def _is_model(name: str, module: ModuleType) -> bool:
    """Is this a modeling file of the kind we switch? Asks what it holds and imports nothing."""
    held = getattr(module, "__dict__", {})
    return _MODELING_FILE.search(name) is not None and all(rule in held for rule in _RULES)


def _layers_with_attributes(module: ModuleType) -> list[type]:
    """The layers of a modeling file that keep the functions as attributes: up to 5.14."""

    def keeps_them(layer: type) -> bool:
        code = getattr(layer.__dict__.get("__init__"), "__code__", None)
        return code is not None and set(_ATTRIBUTES) <= set(code.co_names)

    found = [held for held in list(vars(module).values()) if isinstance(held, type)]
    return [layer for layer in found if layer.__module__ == module.__name__ and keeps_them(layer)]


def _attributes(module: ModuleType) -> dict[str, list[tuple[Any, Callable]]]:
    """For each attribute of such a layer, what transformers may have put there, and ours for it."""
    found = {}
    for name, (rule, fast) in _ATTRIBUTES.items():
        theirs = [module.__dict__[rule], module.__dict__.get(fast)]
        found[name] = [(held, _wrap_rule(rule, held)) for held in theirs if held]
    return found


def _attribute(
    name: str, wrappers: list[tuple[Any, Callable]], is_active: Callable[[], bool], _: Any
) -> property:
    """Shows what transformers puts into this attribute of a layer through a wrapper, and anything
    else, such as a function of the user's, as it is. (Last argument: the class has no such name.)
    """

    def get(layer: Any) -> Any:
        if name not in layer.__dict__:
            raise AttributeError(name)
        found = layer.__dict__[name]
        for held, wrapper in wrappers if is_active() else ():
            if found is held:
                return wrapper
        return found

    def put(layer: Any, value: Any) -> None:
        layer.__dict__[name] = value

    def delete(layer: Any) -> None:
        del layer.__dict__[name]

    return property(get, put, delete)


def _is_active() -> bool:
    return _active


def _is_layer_active() -> bool:
    return _active and _whole_layer


def _switch(module: ModuleType) -> None:
    layers = _layers_with_attributes(module)
    _layer.switch(module, _is_layer_active, functions=not layers)
    for name in () if layers else _RULES:
        if module.__dict__.get(name) is not None:
            _registry.replace(module, module, name, functools.partial(_wrap_rule, name))
    for layer in layers:
        for attributes, is_active in (
            (_attributes(module), _is_active),
            (_layer.attributes(module, _is_layer_active), _is_layer_active),
        ):
            for name, wrappers in attributes.items():
                if name in layer.__init__.__code__.co_names:  # type: ignore[misc]
                    make = functools.partial(_attribute, name, wrappers, is_active)
                    _registry.replace(module, layer, name, make)


class _ImportHook(importlib.abc.MetaPathFinder):
    """Switches a modeling file right after it was executed."""

    def find_spec(
        self, name: str, path: Any = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not _MODELING_FILE.search(name):
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    self._follow(spec.loader)
                return spec
        return None

    @staticmethod
    def _follow(loader: Any) -> None:
        """Shadow `exec_module` on this one loader for one use, so that no trace stays behind."""

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            loader.exec_module(module)
            with _lock:
                if _active and _is_model(module.__name__, module):
                    _switch(module)

        with contextlib.suppress(AttributeError):  # a loader with slots cannot be followed
            loader.exec_module = exec_module


_hook = _ImportHook()


def _installed_version() -> str | None:
    """The version of transformers, without importing it."""
    loaded = getattr(sys.modules.get("transformers"), "__version__", None)
    if loaded is not None:
        return loaded
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("transformers")
    return None


def _check_version() -> None:
    version, wanted = _installed_version(), ".".join(map(str, OLDEST))
    if version is None:
        raise ImportError(f"enable: transformers is not installed; supported: {wanted} and newer")
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or tuple(map(int, numbers.groups())) < OLDEST:
        raise ImportError(f"enable: transformers is {version}; supported: {wanted} and newer")


def _backends() -> dict[str, str]:
    why = _load.why_no_cuda()
    cuda = f"transformers' own functions: {why}" if why else "CUDA kernels"
    return {"cpu": f"{ops.cpu_isa()} kernels", "cuda": cuda}


def _left() -> dict[str, str]:
    """What looks like ours in the modeling files of this process, and is not."""
    left = {}
    for name, module in list(sys.modules.items()):
        if not _MODELING_FILE.search(name) or not name.startswith("transformers."):
            continue
        for held in list(vars(module).values()):
            if getattr(held, "__module__", None) != name or not isinstance(held, type):
                continue
            if held.__name__.endswith("DeltaAttention") and not _is_model(name, module):
                left[f"{name}.{held.__name__}"] = "Kimi Delta Attention, which is another rule"
            if _is_model(name, module) and _layer.is_another_norm(held, module):
                left[f"{name}.{held.__name__}"] = (
                    "it does not compute weight * norm(x) * silu(gate)"
                )
    return left


def report() -> Report:
    """What is switched now. Grows when a modeling file is imported while switched."""
    with _lock:
        functions = _registry.names()
        if not _active:
            return Report(False, _installed_version(), functions)
        left = _left()
        if not _whole_layer:  # its wrappers are there, and call the originals
            of_rule = {*_RULES, *_ATTRIBUTES}
            rest = [name for name in functions if name.rpartition(".")[2] not in of_rule]
            functions = tuple(name for name in functions if name not in rest)
            left |= dict.fromkeys(rest, "layer=False")
        return Report(True, _installed_version(), functions, _backends(), left)


def _switch_on(layer: bool) -> Report:
    global _active, _whole_layer
    ops.build_info()  # says how to build when the compiled library is missing
    _check_version()
    _active, _whole_layer = True, layer
    if _hook not in sys.meta_path:
        sys.meta_path.insert(0, _hook)
    for name, module in list(sys.modules.items()):
        if module is not None and _is_model(name, module):
            _switch(module)
    return report()


def _switch_off() -> None:
    global _active
    _active = False
    with contextlib.suppress(ValueError):
        sys.meta_path.remove(_hook)
    _registry.undo()


def enable(*, quiet: bool = False, layer: bool = True) -> Report:
    """Switch every Gated DeltaNet model of transformers in this process to this package.

    Models built before and after the call are switched, and those of modeling files that are
    imported later. Calling it again does no harm. Processes that are spawned call it themselves.

    Args:
        quiet: do not print the report.
        layer: switch the short convolution and the gated norm too, which round once where those of
            transformers round several times in bf16 and fp16. The last call decides.

    Returns:
        What is switched, what serves it on which device, and what was left. `report()` asks again.

    Raises:
        ImportError: the compiled library or a transformers from 4.57 on is missing.
    """
    global _enabled_explicitly
    with _lock:
        switched = _switch_on(layer)
        _enabled_explicitly = True
    if not quiet:
        print(switched)
    return switched


def disable() -> None:
    """Put back what was replaced, also inside a block of `enabled()`. What somebody else replaced
    since then stays theirs."""
    global _enabled_explicitly
    with _lock:
        _enabled_explicitly = False
        _blocks.clear()
        _switch_off()


@contextlib.contextmanager
def enabled(*, layer: bool = True) -> Iterator[Report]:
    """`enable()` for the length of a block. Blocks may nest and overlap, in several threads too:
    the last one to end switches back, unless `enable()` was called."""
    block = object()
    with _lock:
        switched = _switch_on(layer)
        _blocks.add(block)
    try:
        yield switched
    finally:
        with _lock:
            _blocks.discard(block)
            if _active and not _blocks and not _enabled_explicitly:
                _switch_off()
