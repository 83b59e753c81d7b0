# SPDX-License-Identifier: Apache-2.0
"""Switches for the whole process: bits and precision of the CUDA kernels, precision of the CPU's.

They are read when an operator runs, also inside of a graph that torch.compile or torch.export made;
a captured CUDA graph keeps what was set while it was captured. On the CPU a sequence gets the same
bits in any company, whatever is set.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from deltanet_ext import _load

__all__ = [
    "batch_invariant",
    "cpu_precision",
    "cuda_precision",
    "get_cpu_precision",
    "get_cuda_precision",
    "is_batch_invariant",
]

_PRECISIONS = ("torch", "exact", "fast")

_batch_invariant = False
_precision = "torch"
_told_fast = False  # what the listeners were told last
_cpu_precision = "torch"
_cpu_told = "never"  # what the library was told last: when it may multiply pairs of bf16


def _tell_the_library(batch_invariant: bool, fast: bool) -> None:
    library = _load.cuda_library()
    if library is not None:
        library.set_batch_invariant(batch_invariant)
        library.set_fast(fast)


# Who is told of a change: (batch invariant, fast).
_listeners: list[Callable[[bool, bool], None]] = [_tell_the_library]


def _torch_is_fast_on_cuda() -> bool:
    """Whether torch may round operands of fp32 products to bf16, whichever of its two ways said so.
    (Its setting of the CUDA backend alone knows fp32 and TF32.)"""
    backends: str = torch.backends.fp32_precision  # type: ignore[attr-defined]
    if backends == "bf16":
        return True
    try:
        return torch.get_float32_matmul_precision() == "medium"
    except RuntimeError:  # set backend by backend, none of which can say so for CUDA
        return False


def _is_fast() -> bool:
    return _precision == "fast" or (_precision == "torch" and _torch_is_fast_on_cuda())


def _tell() -> None:
    global _told_fast
    _told_fast = _is_fast()
    for listener in _listeners:
        listener(_batch_invariant, _told_fast)


class batch_invariant:
    """Give a sequence the same bits in any company on CUDA. Off by default.

    By default the kernels are chosen from the number of sequences, their length, the heads and the
    device, so that few long sequences fill the GPU too: whether a sequence comes alone, in a batch
    or packed may then change its last bits. Switched on, the choice depends on the heads and the
    device alone. Two runs of the same call always agree bit for bit, on or off.

    Works as `torch.set_grad_enabled`: from the call on, or inside a `with` block.

    >>> _ = batch_invariant(True)
    >>> with batch_invariant(False):
    ...     is_batch_invariant()
    False
    >>> is_batch_invariant()
    True
    >>> _ = batch_invariant(False)
    """

    def __init__(self, enabled: bool) -> None:
        global _batch_invariant
        if not isinstance(enabled, bool):
            raise TypeError(f"batch_invariant: enabled is {enabled!r}; supported: bool")
        self._before = _batch_invariant
        _batch_invariant = enabled
        _tell()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exception: object) -> None:
        global _batch_invariant
        _batch_invariant = self._before
        _tell()


class cuda_precision:
    """How CUDA kernels round what tensor cores multiply: "torch" (default), "exact" or "fast".

    Tensor cores take bf16 or fp16. "exact" splits every operand in two or three of these, so that
    products are as good as in fp32: the output's error is that of rounding it to its dtype. "fast"
    splits only what cancels: relative errors of the output reach 2.5e-3 instead of 1.7e-3 for bf16,
    those of the state 2e-3 instead of 1e-5. Inputs in float32 are always computed exactly.

    "torch" follows torch's own setting for matrix products: it is "fast" while that is to round
    operands to bf16, `torch.set_float32_matmul_precision("medium")` or
    `torch.backends.fp32_precision = "bf16"`, and "exact" otherwise: by default ("highest"), and for
    "high", which means TF32 or two bf16 per number as "exact" has them. The setting is read at
    each call of `chunk_gated_delta_rule`; a graph of torch.compile or torch.export uses what the
    last call outside of it, or the last call of `cuda_precision`, found
    (docs/decisions/0014-cuda-library.md).

    Works as `torch.set_grad_enabled`: from the call on, or inside a `with` block.

    >>> with cuda_precision("fast"):
    ...     get_cuda_precision()
    'fast'
    >>> get_cuda_precision()
    'torch'
    """

    def __init__(self, precision: str) -> None:
        global _precision
        if precision not in _PRECISIONS:
            raise ValueError(
                f"cuda_precision: {precision!r} is not known; supported: torch, exact, fast"
            )
        self._before = _precision
        _precision = precision
        _tell()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exception: object) -> None:
        global _precision
        _precision = self._before
        _tell()


class cpu_precision:
    """How the CPU's chunked forward multiplies bf16 inputs: "torch" (default), "exact" or "fast".

    "exact" does all arithmetic in fp32. "fast" rounds a copy of the state, and the new values in
    the state's update, to bf16 where the CPU multiplies pairs of bf16 in one instruction (AVX-512
    with BF16: `cpu_isa()` is "avx512_bf16"), which halves the number of its products. Everything
    else stays fp32, the state that is kept too. Relative errors of the output reach 3.3e-3 instead
    of 1.7e-3, those of the state 1e-2 instead of 1e-6, where tokens do not amplify what was there
    before: for beta up to 1 and keys that are normalized. Beta near 2 with keys that repeat (4e-2),
    longer keys, and gates that grow where beta is 1 amplify them (docs/numerics.md). Elsewhere, for
    other dtypes, for runs of up to four tokens and where gradients are needed, "fast" is "exact".

    "torch" follows torch's own setting for matrix products on the CPU: it is "fast" while
    `torch.backends.mkldnn.matmul.fp32_precision` is "bf16", which
    `torch.set_float32_matmul_precision("medium")` makes it, and "exact" otherwise. The setting is
    read at each call of `chunk_gated_delta_rule`; a graph of torch.compile or torch.export uses
    what the last call outside of it, or the last call of `cpu_precision`, found.

    Works as `torch.set_grad_enabled`: from the call on, or inside a `with` block.

    >>> with cpu_precision("fast"):
    ...     get_cpu_precision()
    'fast'
    >>> get_cpu_precision()
    'torch'
    """

    def __init__(self, precision: str) -> None:
        global _cpu_precision
        if precision not in _PRECISIONS:
            raise ValueError(
                f"cpu_precision: {precision!r} is not known; supported: torch, exact, fast"
            )
        self._before = _cpu_precision
        _cpu_precision = precision
        _tell_the_cpu()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exception: object) -> None:
        global _cpu_precision
        _cpu_precision = self._before
        _tell_the_cpu()


def _torch_is_fast() -> bool:
    precision: str = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
    return precision == "bf16"


def _tell_the_cpu() -> None:
    global _cpu_told
    fast = _cpu_precision == "fast" or (_cpu_precision == "torch" and _torch_is_fast())
    told = "where faster" if fast else "never"
    if told != _cpu_told and _load.is_loaded():
        _load.library().set_bf16_products(told)
        _cpu_told = told


def follow_torch(query: object) -> None:
    """Before a call of the chunked rule outside of a trace: torch's setting may have changed."""
    dtype = getattr(query, "dtype", None)
    if getattr(query, "is_cuda", False):
        follows = _precision == "torch" and dtype in (torch.bfloat16, torch.float16)
        if follows and _is_fast() != _told_fast:
            _tell()
    elif _cpu_precision == "torch" and dtype is torch.bfloat16:
        _tell_the_cpu()


def get_cpu_precision() -> str:
    """What `cpu_precision` is set to.

    >>> get_cpu_precision()
    'torch'
    """
    return _cpu_precision


def is_batch_invariant() -> bool:
    """Whether `batch_invariant` is switched on.

    >>> is_batch_invariant()
    False
    """
    return _batch_invariant


def get_cuda_precision() -> str:
    """What `cuda_precision` is set to.

    >>> get_cuda_precision()
    'torch'
    """
    return _precision
