# SPDX-License-Identifier: Apache-2.0
"""Loads the compiled library `deltanet_ext._C`, and remembers why when it cannot.

Loading it registers the `deltanet_ext::` operators with torch. `import deltanet_ext` works without
it (the reference is plain PyTorch); the first call that needs a kernel then says what to do.
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType

import torch  # noqa: F401  first: the library's undefined symbols live in libtorch

ISA_VARIABLE = "DELTANET_CPU_ISA"

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
    _check_isa_variable()


def _check_isa_variable() -> None:
    """A wrong DELTANET_CPU_ISA is an error here, not at some later call."""
    wanted = os.environ.get(ISA_VARIABLE, "")
    supported = library().available_cpu_isas()
    if wanted and wanted not in supported:
        raise ValueError(
            f"{ISA_VARIABLE} is {wanted!r}; supported on this machine: {', '.join(supported)}"
        )


_load()
