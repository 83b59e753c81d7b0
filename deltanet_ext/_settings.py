# SPDX-License-Identifier: Apache-2.0
"""Two switches of the CUDA kernels, for the whole process: bits and precision.

CPU kernels know neither: there a sequence gets the same bits in any company, and all arithmetic is
fp32. Both switches are read when an operator runs, also inside of a graph that torch.compile or
torch.export made; a captured CUDA graph keeps what was set while it was captured.
"""

from __future__ import annotations

from collections.abc import Callable

from deltanet_ext import _load

__all__ = ["batch_invariant", "cuda_precision", "get_cuda_precision", "is_batch_invariant"]

_PRECISIONS = ("exact", "fast")

_batch_invariant = False
_precision = "exact"


def _tell_the_library(batch_invariant: bool, fast: bool) -> None:
    library = _load.cuda_library()
    if library is not None:
        library.set_batch_invariant(batch_invariant)
        library.set_fast(fast)


# Who is told of a change: (batch invariant, fast).
_listeners: list[Callable[[bool, bool], None]] = [_tell_the_library]


def _tell() -> None:
    for listener in _listeners:
        listener(_batch_invariant, _precision == "fast")


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
    """How CUDA kernels round what the tensor cores multiply: "exact" (default) or "fast".

    Tensor cores take bf16 or fp16. "exact" splits every operand in two or three of these, so that
    products are as good as in fp32: the output's error is that of rounding it to its dtype. "fast"
    splits only what cancels: relative errors of the output reach 2.5e-3 instead of 1.7e-3 for bf16,
    those of the state 2e-3 instead of 1e-5. Inputs in float32 are always computed exactly.

    This is a switch of its own: `torch.set_float32_matmul_precision` and `allow_tf32` are about
    matrix products of float32 tensors, and programs set them without thinking of a recurrent state
    (docs/decisions/0014-cuda-library.md).

    Works as `torch.set_grad_enabled`: from the call on, or inside a `with` block.

    >>> with cuda_precision("fast"):
    ...     get_cuda_precision()
    'fast'
    >>> get_cuda_precision()
    'exact'
    """

    def __init__(self, precision: str) -> None:
        global _precision
        if precision not in _PRECISIONS:
            raise ValueError(f"cuda_precision: {precision!r} is not known; supported: exact, fast")
        self._before = _precision
        _precision = precision
        _tell()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exception: object) -> None:
        global _precision
        _precision = self._before
        _tell()


def is_batch_invariant() -> bool:
    """Whether `batch_invariant` is switched on.

    >>> is_batch_invariant()
    False
    """
    return _batch_invariant


def get_cuda_precision() -> str:
    """What `cuda_precision` is set to.

    >>> get_cuda_precision()
    'exact'
    """
    return _precision
