# SPDX-License-Identifier: Apache-2.0
"""What the switch for transformers has replaced: one registry for the rule (transformers.py) and
for the rest of the layer (_layer.py), so that all of it is put back together."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from deltanet_ext import _load

_log = logging.getLogger("deltanet_ext")
_reasons_logged: set[tuple[str, str]] = set()


@dataclass(frozen=True)
class _Replacement:
    """One name that holds something of ours."""

    owner: ModuleType | type  # a modeling file, or a class in it
    name: str
    ours: Any
    theirs: Any  # what `owner` had under this name; None: nothing

    def undo(self) -> None:
        if self.owner.__dict__.get(self.name) is not self.ours:
            return  # somebody else has replaced it since: it stays theirs
        if self.theirs is None:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.theirs)


# By modeling file and dotted name in it.
_replaced: dict[tuple[str, str], _Replacement] = {}


def replace(
    module: ModuleType, owner: ModuleType | type, name: str, make: Callable[[Any], Any]
) -> None:
    """Puts `make(theirs)` in the place of `owner.name`, unless it is there already. `owner` is the
    modeling file `module` or a class in it; without such a name `theirs` is None."""
    dotted = name if owner is module else f"{owner.__name__}.{name}"
    found = owner.__dict__.get(name)
    known = _replaced.get((module.__name__, dotted))
    # A file that was loaded again has functions of its own, under the same name.
    if known is not None and known.owner is owner and known.ours is found:
        return
    # A file that takes the functions of another one may hold a wrapper already.
    theirs = original(found)
    ours = make(theirs)
    setattr(owner, name, ours)
    _replaced[module.__name__, dotted] = _Replacement(owner, name, ours, theirs)


def undo() -> None:
    """Puts back what was there, but where somebody else has replaced it since."""
    for replacement in _replaced.values():
        replacement.undo()
    _replaced.clear()


def names() -> tuple[str, ...]:
    """Dotted names of what is replaced."""
    return tuple(f"{module}.{name}" for module, name in _replaced)


# -- wrappers ------------------------------------------------------------------------------------


def named_like(theirs: Callable) -> Callable[[Callable], Callable]:
    """functools.wraps. With the `kernels` package the original is a module with a forward."""
    return functools.wraps(getattr(theirs, "forward", theirs))


def marked(ours: Any, theirs: Any) -> Any:
    """A wrapper that says what it wraps. It names itself, because functools.wraps copies marks."""
    ours._deltanet_ext = ours, theirs
    return ours


def original(found: Any) -> Any:
    """What is behind a wrapper of ours; anything else as it is."""
    mark, theirs = getattr(found, "_deltanet_ext", (None, None))
    return theirs if mark is found else found


def log_once(what: str, reason: str) -> None:
    """Log why calls go to the original function, the first time for each reason."""
    if torch.compiler.is_compiling() or (what, reason) in _reasons_logged:
        return
    _reasons_logged.add((what, reason))
    _log.warning("%s: %s; such calls go to transformers' own function", what, reason)


def why_no_kernels(device: torch.device, first: torch.Tensor) -> str | None:
    """Why a call with a tensor on this device, which is not the CPU, is not ours; `first` is the
    call's first tensor."""
    if device.type != "cuda":
        return f"a tensor is on {device.type} and there are no kernels for it"
    if (why := _load.why_no_cuda()) is not None:
        return f"a tensor is on {device.type} and {why}"
    if device != first.device:
        return f"tensors are on {device} and {first.device}"
    return "the input is float64 on cuda" if first.dtype == torch.float64 else None
