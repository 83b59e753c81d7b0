# SPDX-License-Identifier: Apache-2.0
"""Loads the compiled libraries `deltanet_ext._C` and `_C_cuda`, and remembers why when it cannot.

Loading `_C` registers the `deltanet_ext::` operators with torch, loading `_C_cuda` their CUDA
implementations. `import deltanet_ext` works without either (the reference is plain PyTorch); the
first call that needs a kernel then says what to do. No GPU is looked for here.
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType

import torch  # noqa: F401  first: the libraries' undefined symbols live in libtorch

_library: ModuleType | None = None
_why_missing: ImportError | None = None
_cuda_library: ModuleType | None = None
_why_no_cuda = "the compiled library deltanet_ext._C is missing"


def is_loaded() -> bool:
    return _library is not None


def library() -> ModuleType:
    """The module `deltanet_ext._C`, or an ImportError that says how to get it."""
    if _library is None:
        raise ImportError(
            f"deltanet_ext: the compiled library deltanet_ext._C is missing ({_why_missing}); "
            "build it from a checkout with `pip install --no-build-isolation -e .` or `make dev`"
        ) from _why_missing
    return _library


def cuda_library() -> ModuleType | None:
    """The module `deltanet_ext._C_cuda`; None where `why_no_cuda()` has a reason."""
    return _cuda_library


def why_no_cuda() -> str | None:
    """Why tensors on CUDA devices cannot be served, in words; None where they can."""
    return None if _cuda_library is not None else _why_no_cuda


def _load() -> None:
    global _library, _why_missing
    try:
        _library = importlib.import_module("deltanet_ext._C")
    except ImportError as error:
        _why_missing = error
        return
    # Wrong settings are a ValueError here, not at some later call.
    _library.cpu_isa()
    kept = os.environ.get("DELTANET_KEEP_MB", "")
    if kept and not (kept.isascii() and kept.isdigit() and int(kept) < 1 << 30):
        raise ValueError(
            f"DELTANET_KEEP_MB is {kept!r}; supported: a number of megabytes, 0 or more"
        )
    _load_cuda(_library.build_info())


def _load_cuda(built: dict[str, object]) -> None:
    """After `_C`, which has the schemas."""
    global _cuda_library, _why_no_cuda
    name = "deltanet_ext._C_cuda"
    if not built["cuda"]:
        # What an earlier build may have left beside this one does not belong to it.
        _why_no_cuda = f"the CUDA kernels are not built: {built['cuda_reason']}"
        return
    try:
        loaded = importlib.import_module(name)
    except ImportError as error:
        _why_no_cuda = f"the CUDA kernels failed to load: {error}"
        return
    version = loaded.build_info()["version"]
    if version != built["version"]:
        _why_no_cuda = (
            f"the CUDA kernels failed to load: {name} is of version {version} and deltanet_ext._C "
            f"of version {built['version']}"
        )
        return
    _cuda_library = loaded


_load()
