# SPDX-License-Identifier: Apache-2.0
"""The CUDA operators on the emulator, for CPU tensors.

`load()` builds them (cached) and registers them as `torch.ops.deltanet_ext_emulated`; `path()`
makes the public functions of deltanet_ext call those instead of the CPU kernels, so that one table
of tests serves `cpu`, `cuda-emulated` and, with a card, `cuda`. What a check of the emulator finds
is the RuntimeError of the call, report and all.

    with emulated.path():
        out, state = deltanet_ext.chunk_gated_delta_rule(...)
    with emulated.schedule(seed=3):
        ...                      # threads of a block in a random order, copies at random times
    with emulated.capture() as graph:
        y = emulated.call("gate_cumsum", g, 64)   # recorded, not run
    g.copy_(other)
    graph.replay()               # y now holds the result for the new contents of g
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

EMULATOR = Path(__file__).resolve().parent / "ptx_emulator"
sys.path.insert(0, str(EMULATOR))
import build  # noqa: E402

NAMESPACE = build.EMULATED_NAMESPACE


def why_not() -> str | None:
    """Why the emulated operators cannot be built here; None where they can."""
    return build.why_not()


@functools.cache
def runtime() -> ctypes.CDLL:
    """The emulator's own functions."""
    lib = ctypes.CDLL(str(build.library()))
    lib.ptx_emulator_last_report.restype = ctypes.c_char_p
    lib.ptx_emulator_set_seed.argtypes = [ctypes.c_uint64]
    lib.ptx_emulator_capture_end.argtypes = [ctypes.POINTER(ctypes.c_void_p)]
    lib.ptx_emulator_replay.argtypes = [ctypes.c_void_p]
    lib.ptx_emulator_forget_graph.argtypes = [ctypes.c_void_p]
    lib.ptx_emulator_return_errors(1)  # a finding is an exception here, not the end of the process
    return lib


@functools.cache
def library() -> ctypes.CDLL:
    """The operators' library, built."""
    runtime()
    return ctypes.CDLL(str(build.operators()))


@functools.cache
def load() -> Any:
    """The operators, as `torch.ops.deltanet_ext_emulated`. They follow deltanet_ext's switches."""
    from deltanet_ext import _autograd, _layer_autograd, _settings

    torch.ops.load_library(library()._name)
    _settings._listeners.append(library().ptx_emulated_operators_set)
    _settings._tell()
    _autograd.register(NAMESPACE)
    _layer_autograd.register(NAMESPACE)
    return getattr(torch.ops, NAMESPACE)


def report() -> str:
    """What the emulator found last."""
    return runtime().ptx_emulator_last_report().decode()


def call(name: str, *args: Any) -> Any:
    """One operator. A finding becomes part of the exception's text."""
    operator = getattr(load(), name).default
    runtime().ptx_emulator_clear_report()
    try:
        return operator(*args)
    except RuntimeError as error:
        runtime().cudaGetLastError()  # the next call starts clean
        if found := report():
            raise RuntimeError(f"{error}\n{found}") from error
        raise


class _Operators:
    """What a backward pass calls inside of `path()`."""

    def __getattr__(self, name: str) -> Any:
        return functools.partial(call, name)


@contextmanager
def path() -> Iterator[None]:
    """Inside, the public functions of deltanet_ext, and backward passes, call the emulated
    operators."""
    from deltanet_ext import _autograd, layer, ops

    load()
    kept = _autograd._operators
    _autograd._operators = _Operators
    overloads = torch._ops.OpOverload
    found = [
        (module, name, held)
        for module in (ops, layer)
        for name, held in vars(module).items()
        if isinstance(held, overloads) and held.namespace == "deltanet_ext"
    ]
    for module, name, operator in found:
        setattr(module, name, functools.partial(call, operator._opname))
    try:
        yield
    finally:
        _autograd._operators = kept
        for module, name, operator in found:
            setattr(module, name, operator)


@contextmanager
def schedule(seed: int) -> Iterator[None]:
    """0: threads in order, copies as late as allowed; 1: in reverse; others: random by seed."""
    runtime().ptx_emulator_set_seed(seed)
    try:
        yield
    finally:
        runtime().ptx_emulator_set_seed(0)


@contextmanager
def segment_strips(strips: int) -> Iterator[None]:
    """Inside, the reverse scan of backward passes cuts sequences every `strips` strips."""
    set_strips = library().ptx_emulated_operators_set_segment_strips
    set_strips.argtypes = [ctypes.c_longlong]
    set_strips(strips)
    try:
        yield
    finally:
        set_strips(0)


BACKWARD_MODES = ("chosen", "parallel", "walk")


@contextmanager
def backward_mode(mode: str) -> Iterator[None]:
    """Inside, backward passes run as BackwardMode of csrc/cuda/backward.h says."""
    set_mode = library().ptx_emulated_operators_set_backward_mode
    set_mode(BACKWARD_MODES.index(mode))
    try:
        yield
    finally:
        set_mode(0)


def backward_workspace(
    sequences: int, tokens: int, key_heads: int, value_heads: int, dim: int, packed: bool = False
) -> int:
    """Bytes of scratch memory of a backward pass that makes every gradient."""
    bytes_of = library().ptx_emulated_operators_backward_workspace
    bytes_of.restype = ctypes.c_longlong
    bytes_of.argtypes = [ctypes.c_longlong] * 4 + [ctypes.c_int] * 3
    return bytes_of(sequences, tokens, key_heads, value_heads, dim, dim, packed)


class Graph:
    """A recorded sequence of launches."""

    def __init__(self) -> None:
        self._graph = ctypes.c_void_p()

    def __del__(self) -> None:
        if self._graph:
            runtime().ptx_emulator_forget_graph(self._graph)

    def replay(self) -> None:
        if error := runtime().ptx_emulator_replay(self._graph):
            raise RuntimeError(f"replay: CUDA error {error}\n{report()}")


@contextmanager
def capture() -> Iterator[Graph]:
    """As torch.cuda.graph: calls inside are recorded. What a CUDA graph cannot hold is refused."""
    lib, graph = runtime(), Graph()
    lib.ptx_emulator_capture_begin()
    try:
        yield graph
    finally:
        error = lib.ptx_emulator_capture_end(ctypes.byref(graph._graph))
        lib.cudaGetLastError()  # as after any failed call: the next one starts clean
    if error:
        raise RuntimeError(f"the capture was broken: CUDA error {error}\n{report()}")
