# SPDX-License-Identifier: Apache-2.0
"""Make the Gated DeltaNet models of Hugging Face transformers run on this package.

    from deltanet_ext.integrations.transformers import disable, enable, enabled

    enable()              # from here on, every such model in the process
    disable()             # what was there before, exactly
    with enabled(): ...   # only inside the block

How it works. A modeling file of transformers (5.15 and newer) calls two functions of its own by
name, `torch_chunk_gated_delta_rule` and `torch_recurrent_gated_delta_rule`. `enable()` puts a
wrapper in their place, in every modeling file that is imported already and, through an import
hook, in each one that is imported later. It imports nothing of transformers itself. Models that
were built before the call are switched as well: they look the function up at every call.

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
import itertools
import logging
import re
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from deltanet_ext import _load, ops

__all__ = ["Report", "disable", "enable", "enabled", "report"]

OLDEST = (5, 15)

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
_CONVOLUTION = "causal_conv1d_fn"

_MODELING_FILE = re.compile(r"(^|\.)modeling_\w+$")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_LARGEST_HEAD_DIM = 256

_log = logging.getLogger("deltanet_ext")
_lock = threading.RLock()
_reasons_logged: set[str] = set()

# Read by every wrapper: a wrapper that somebody copied while it was in place calls the original
# again after disable(). True while enable() holds or a block of enabled() runs, in any thread.
_active = False
_enabled_explicitly = False
_blocks: set[object] = set()
# (modeling file, function name) -> (the module, our wrapper, what was there before)
_replaced: dict[tuple[str, str], tuple[ModuleType, Callable, Callable]] = {}


@dataclass(frozen=True)
class Report:
    """Which functions of which transformers are switched at this moment."""

    enabled: bool
    transformers: str | None
    functions: tuple[str, ...]

    @property
    def modules(self) -> tuple[str, ...]:
        """The modeling files that were switched, without duplicates, in order."""
        return tuple(dict.fromkeys(name.rpartition(".")[0] for name in self.functions))

    def __str__(self) -> str:
        if not self.enabled:
            return "deltanet_ext: transformers is not switched"
        names = ", ".join(self.modules) or "no modeling file imported yet"
        return f"deltanet_ext: transformers {self.transformers} is switched ({names})"


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
        if (why := _no_kernels_for(tensor.device, query)) is not None:
            return why

    dtype = query.dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    if dtype not in _DTYPES or key.dtype != dtype or value.dtype != dtype:
        return f"query, key, value are {dtype}, {key.dtype}, {value.dtype}"
    if g.dtype not in (wide, dtype) or beta.dtype not in (wide, dtype):
        return f"g and beta are {g.dtype} and {beta.dtype} with a query in {dtype}"
    if key.shape[-1] > _LARGEST_HEAD_DIM or value.shape[-1] > _LARGEST_HEAD_DIM:
        return f"head dims are {key.shape[-1]} and {value.shape[-1]}, above {_LARGEST_HEAD_DIM}"

    if cu_seqlens is None and call.get("seq_idx") is not None:
        return "the batch is packed by seq_idx without cu_seq_lens_q"
    # With a cache, transformers' attention layers do not keep packed sequences apart, and the cache
    # holds one sequence. Its own function refuses the call, and that refusal must be heard.
    packed = cu_seqlens is not None and len(cu_seqlens) > 2
    if packed and (initial_state is not None or call.get("output_final_state")):
        return "a packed batch with a cache (use_cache=False keeps the sequences apart)"
    return None


def _is_ours(device: torch.device) -> bool:
    return device.type == "cpu" or (device.type == "cuda" and _load.why_no_cuda() is None)


def _no_kernels_for(device: torch.device, query: torch.Tensor) -> str | None:
    """Why a call with a tensor on this device, which is not the CPU, is not ours."""
    if device.type != "cuda":
        return f"a tensor is on {device.type} and there are no kernels for it"
    if (why := _load.why_no_cuda()) is not None:
        return f"a tensor is on {device.type} and {why}"
    if device != query.device:
        return f"tensors are on {device} and {query.device}"
    return "query is float64 on cuda" if query.dtype == torch.float64 else None


def _log_once(reason: str) -> None:
    """Log why calls go to the original function, the first time for each reason."""
    if torch.compiler.is_compiling() or reason in _reasons_logged:
        return
    _reasons_logged.add(reason)
    _log.warning("gated delta rule: %s; such calls go to transformers' own function", reason)


# -- the wrappers --------------------------------------------------------------------------------


def _named_like(original: Callable) -> Callable[[Callable], Callable]:
    """functools.wraps. With the `kernels` package the original is a module with a forward."""
    return functools.wraps(getattr(original, "forward", original))


def _wrap_rule(name: str, original: Callable) -> Callable:
    our_name, parameters = _RULES[name]
    used = (*parameters, "cu_seqlens")

    @_named_like(original)
    def gated_delta_rule(*args: Any, **kwargs: Any) -> Any:
        if _active and len(args) <= len(parameters):
            call = dict(zip(parameters, args, strict=False)) | kwargs
            reason = _reason_to_decline(call)
            if reason is None:
                # Looked up at every call, so that a replaced operator is seen.
                return getattr(ops, our_name)(**{n: call[n] for n in used if n in call})
            _log_once(reason)
        return original(*args, **kwargs)

    return gated_delta_rule


def _wrap_convolution(name: str, original: Callable) -> Callable:
    """The short convolution lets the last tokens of one packed sequence into the next one. That
    stays hidden as long as the original rule refuses packed batches. Ours takes them, so the
    sequences are cut apart here too."""

    @_named_like(original)
    def causal_conv1d_fn(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        cu_seqlens = kwargs.get("cu_seq_lens_q") if _active else None
        if cu_seqlens is None or len(cu_seqlens) <= 2 or not _is_ours(hidden_states.device):
            return original(hidden_states, *args, **kwargs)
        kwargs.pop("seq_idx", None)  # says the same as cu_seq_lens_q, and the original refuses it
        edges = [*cu_seqlens.tolist(), hidden_states.shape[-1]]
        pieces = [
            original(hidden_states[..., start:end], *args, **kwargs)
            for start, end in itertools.pairwise(edges)
            if start < end
        ]
        return torch.cat(pieces, dim=-1)

    return causal_conv1d_fn


# -- switching -----------------------------------------------------------------------------------


def _is_model(name: str, module: ModuleType) -> bool:
    """Is this a modeling file of the kind we switch? Asks what it holds and imports nothing."""
    held = getattr(module, "__dict__", {})
    return _MODELING_FILE.search(name) is not None and all(rule in held for rule in _RULES)


def _switch(module: ModuleType) -> None:
    for name in (*_RULES, _CONVOLUTION):
        found = module.__dict__.get(name)
        known = _replaced.get((module.__name__, name))
        # A file that was loaded again has functions of its own, under the same name.
        if found is None or (known is not None and known[0] is module and known[1] is found):
            continue
        # A file that takes the functions of another one may hold a wrapper already. The mark names
        # its owner, because functools.wraps copies marks.
        owner, original = getattr(found, "_deltanet_ext", (None, None))
        theirs: Any = original if owner is found else found
        ours: Any = (_wrap_convolution if name == _CONVOLUTION else _wrap_rule)(name, theirs)
        ours._deltanet_ext = ours, theirs
        setattr(module, name, ours)
        _replaced[module.__name__, name] = module, ours, theirs


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


def report() -> Report:
    """What is switched now. Grows when a modeling file is imported while switched."""
    with _lock:
        functions = tuple(f"{module}.{name}" for module, name in _replaced)
        return Report(_active, _installed_version(), functions)


def _switch_on() -> Report:
    global _active
    ops.build_info()  # says how to build when the compiled library is missing
    _check_version()
    _active = True
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
    for (_, name), (module, ours, theirs) in _replaced.items():
        if module.__dict__.get(name) is ours:
            setattr(module, name, theirs)
    _replaced.clear()


def enable() -> Report:
    """Switch every Gated DeltaNet model of transformers in this process to this package.

    Models built before and after the call are switched. Calling it again does no harm.
    Raises ImportError when the compiled library or a transformers from 5.15 on is missing.
    """
    global _enabled_explicitly
    with _lock:
        switched = _switch_on()
        _enabled_explicitly = True
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
def enabled() -> Iterator[Report]:
    """`enable()` for the length of a block. Blocks may nest and overlap, in several threads too:
    the last one to end switches back, unless `enable()` was called."""
    block = object()
    with _lock:
        switched = _switch_on()
        _blocks.add(block)
    try:
        yield switched
    finally:
        with _lock:
            _blocks.discard(block)
            if _active and not _blocks and not _enabled_explicitly:
                _switch_off()
