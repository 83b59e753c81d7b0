# SPDX-License-Identifier: Apache-2.0
"""Loads the compiled library `deltanet_ext._C`, and remembers why when it cannot.

Loading it registers the `deltanet_ext::` operators with torch. `import deltanet_ext` works without
it (the reference is plain PyTorch); the first call that needs a kernel then says what to do.
"""

from __future__ import annotations

import importlib
from types import ModuleType

import torch  # noqa: F401  first: the library's undefined symbols live in libtorch

_library: ModuleType | None = None
_why_missing: ImportError | None = None


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


def _load() -> None:
    global _library, _why_missing
    try:
        _library = importlib.import_module("deltanet_ext._C")
    except ImportError as error:
        _why_missing = error
        return
    _library.cpu_isa()  # a wrong DELTANET_CPU_ISA is a ValueError here, not at some later call


_load()
