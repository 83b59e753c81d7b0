# SPDX-License-Identifier: Apache-2.0
"""Objects that exist are taken as they are, whatever they were made from.

A module to import before the emulator's build, or a plugin of pytest (-p). mutants.py removes the
one object that is to be made anew: a header of which a bug is part would else have every kernel
compiled that includes it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import build

_make, _compile_cuda = build.make, build.compile_cuda


def _make_missing(target: Path, command: Callable[[Path], None], *, stamp: str) -> Path:
    if target.suffix in (".o", ".gch") and target.exists():
        return target
    return _make(target, command, stamp=stamp)


def _compile_missing(source: Path, target: Path, **options: Any) -> Path:
    return target if target.exists() else _compile_cuda(source, target, **options)


build.make, build.compile_cuda = _make_missing, _compile_missing
