# SPDX-License-Identifier: Apache-2.0
"""Against the functions that this package replaces: same signature, same results, no larger error.

For every case that transformers can express: our error against the fp64 recurrence is at most
max(1e-6, twice that of transformers on the same inputs), for output and state.
"""

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import deltanet_ext
from cases import (
    ALL_CASES,
    Case,
    case_named,
    dtypes,
    expected,
    one_thread,
)
from closeness import assert_no_worse

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

FLOOR = 1e-6


def _modules_with(function: str) -> list[str]:
    """Every modeling file of the installed transformers that defines `function`."""
    root = Path(transformers.__file__).parent / "models"
    files = sorted(root.glob("*/modeling_*.py"))
    return [
        f"transformers.models.{file.parent.name}.{file.stem}"
        for file in files
        if f"def {function}(" in file.read_text(encoding="utf-8")
    ]


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


def _parameters(function: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
    """Name, kind and default of every parameter but `**kwargs`."""
    return [
        (p.name, p.kind, p.default)
        for p in inspect.signature(function).parameters.values()
        if p.kind is not inspect.Parameter.VAR_KEYWORD
    ]


@pytest.mark.parametrize("module", _modules_with("torch_chunk_gated_delta_rule"))
def test_chunk_signature(module: str) -> None:
    theirs = _parameters(importlib.import_module(module).torch_chunk_gated_delta_rule)
    ours = _parameters(deltanet_ext.chunk_gated_delta_rule)
    assert len(theirs) == 9
    assert ours[:9] == theirs
    assert all(kind is inspect.Parameter.KEYWORD_ONLY for _, kind, _ in ours[9:])


@pytest.mark.parametrize("module", _modules_with("torch_recurrent_gated_delta_rule"))
def test_recurrent_signature(module: str) -> None:
    theirs = _parameters(importlib.import_module(module).torch_recurrent_gated_delta_rule)
    ours = _parameters(deltanet_ext.recurrent_gated_delta_rule)
    assert len(theirs) == 8
    assert ours[:8] == theirs
    assert all(kind is inspect.Parameter.KEYWORD_ONLY for _, kind, _ in ours[8:])


def test_the_scan_finds_the_models() -> None:
    """Or the two tests above would pass by having nothing to compare."""
    models = {name.split(".")[2] for name in _modules_with("torch_chunk_gated_delta_rule")}
    assert {"qwen3_next", "qwen3_5"} <= models
    assert models <= {m.name for m in pkgutil.iter_modules(transformers.models.__path__)}


def test_keywords_are_those_of_flash_linear_attention() -> None:
    names = [name for name, kind, _ in _parameters(deltanet_ext.chunk_gated_delta_rule)][9:]
    assert names == [
        "scale", "cu_seqlens", "state_v_first", "use_gate_in_kernel", "A_log", "dt_bias",
        "use_beta_sigmoid_in_kernel", "allow_neg_eigval",
    ]  # fmt: skip
    assert names == [n for n, _, _ in _parameters(deltanet_ext.recurrent_gated_delta_rule)][8:]


def _transformers_can(case: Case) -> bool:
    return (
        case.T > 0
        and case.B > 0
        and case.g != "none"
        and case.beta != "none"
        and case.cu is None
        and case.scale is None
        and not (case.state_v_first or case.raw_gate or case.raw_beta)
    )


CASES = [case for case in ALL_CASES if _transformers_can(case)]


@lru_cache(maxsize=8)
def _theirs(
    function: str, model: str, case: Case, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    with one_thread():
        return getattr(_module(model), function)(**case.inputs(dtype))  # type: ignore[no-any-return]


def _check(
    ours: Callable[..., Any], theirs: str, model: str, case: Case, dtype: torch.dtype
) -> None:
    want = expected(case, dtype)
    out, state = ours(**case.inputs(dtype))
    their_out, their_state = _theirs(theirs, model, case, dtype)
    assert out.shape == their_out.shape
    assert out.dtype == their_out.dtype
    assert state.shape == their_state.shape
    assert their_state.dtype == torch.float32
    if "-inf" in case.g and ours is deltanet_ext.chunk_gated_delta_rule:
        assert not their_out.isfinite().all()  # an infinite error: any finite result is better
        assert out.isfinite().all()
        return
    assert_no_worse(out, want.out, their_out, floor=FLOOR, what="output")
    assert_no_worse(state, want.state, their_state, floor=FLOOR, what="state")


@pytest.mark.parametrize("dtype", dtypes(torch.float32))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_chunk_is_no_worse(case: Case, dtype: torch.dtype) -> None:
    ours = deltanet_ext.chunk_gated_delta_rule
    _check(ours, "torch_chunk_gated_delta_rule", "qwen3_5", case, dtype)


@pytest.mark.parametrize("dtype", dtypes(torch.float32))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_recurrent_is_no_worse(case: Case, dtype: torch.dtype) -> None:
    ours = deltanet_ext.recurrent_gated_delta_rule
    _check(ours, "torch_recurrent_gated_delta_rule", "qwen3_5", case, dtype)


@pytest.mark.parametrize("name", ["T=130", "HK=2 HV=6", "K=128 V=128", "state in bf16", "B=2"])
def test_qwen3_next(name: str) -> None:
    case = case_named(name)
    for dtype in (torch.float32, torch.bfloat16):
        for kind in ("chunk", "recurrent"):
            ours = getattr(deltanet_ext, f"{kind}_gated_delta_rule")
            _check(ours, f"torch_{kind}_gated_delta_rule", "qwen3_next", case, dtype)
