# SPDX-License-Identifier: Apache-2.0
"""The switches: from a call on, or inside a block."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

import deltanet_ext
from deltanet_ext import _load, _settings


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, bool]]:
    """What a library would be told: (batch invariant, fast)."""
    changes: list[tuple[bool, bool]] = []
    monkeypatch.setattr(_settings, "_listeners", [lambda *change: changes.append(change)])
    return changes


def test_batch_invariance_is_off_until_asked_for(told):
    assert not deltanet_ext.is_batch_invariant()
    with deltanet_ext.batch_invariant(True):
        assert deltanet_ext.is_batch_invariant()
        with deltanet_ext.batch_invariant(False):
            assert not deltanet_ext.is_batch_invariant()
        assert deltanet_ext.is_batch_invariant()
    assert not deltanet_ext.is_batch_invariant()
    assert told == [(True, False), (False, False), (True, False), (False, False)]


def test_precision_is_exact_until_asked_for(told):
    assert deltanet_ext.get_cuda_precision() == "torch"
    with deltanet_ext.cuda_precision("fast"):
        assert deltanet_ext.get_cuda_precision() == "fast"
    assert deltanet_ext.get_cuda_precision() == "torch"
    assert told == [(False, True), (False, False)]


@pytest.fixture
def torch_precision() -> Iterator[None]:
    yield
    torch.backends.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")


def on_cuda(dtype: torch.dtype) -> SimpleNamespace:
    return SimpleNamespace(dtype=dtype, is_cuda=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_precision_on_cuda_follows_torch(told, torch_precision, dtype):
    for level, fast in (("high", False), ("medium", True), ("medium", True), ("highest", False)):
        torch.set_float32_matmul_precision(level)
        _settings.follow_torch(on_cuda(dtype))
        assert _settings._told_fast is fast, level
    assert told == [(False, True), (False, False)]  # changes alone

    torch.backends.fp32_precision = "bf16"
    _settings.follow_torch(on_cuda(dtype))
    assert told[-1] == (False, True)
    torch.backends.fp32_precision = "tf32"  # torch's older switch cannot be read now
    _settings.follow_torch(on_cuda(dtype))
    assert told[-1] == (False, False)


def test_what_torch_says_does_not_concern_other_calls(told, torch_precision):
    torch.set_float32_matmul_precision("medium")
    _settings.follow_torch(on_cuda(torch.float32))
    _settings.follow_torch(torch.zeros(1, dtype=torch.float16))
    assert told == []
    with deltanet_ext.cuda_precision("exact"):
        _settings.follow_torch(on_cuda(torch.bfloat16))
        assert told == [(False, False)]
    assert told == [(False, False), (False, True)]  # torch's again


def test_a_call_alone_holds_until_the_next(told):
    deltanet_ext.batch_invariant(True)
    deltanet_ext.cuda_precision("fast")
    assert told[-1] == (True, True)
    deltanet_ext.cuda_precision("torch")
    deltanet_ext.batch_invariant(False)
    assert told[-1] == (False, False)


def test_a_block_that_fails_restores_too(told):
    with pytest.raises(KeyError), deltanet_ext.batch_invariant(True):
        raise KeyError
    with pytest.raises(KeyError), deltanet_ext.cuda_precision("fast"):
        raise KeyError
    assert not deltanet_ext.is_batch_invariant()
    assert deltanet_ext.get_cuda_precision() == "torch"


@pytest.mark.parametrize("enabled", [1, None, "on"])
def test_batch_invariance_is_a_bool(enabled, told):
    with pytest.raises(TypeError, match=r"batch_invariant: enabled is .*; supported: bool"):
        deltanet_ext.batch_invariant(enabled)
    assert told == []


@pytest.mark.parametrize("precision", ["high", "", None, True])
def test_precision_has_three_names(precision, told):
    with pytest.raises(
        ValueError, match=r"cuda_precision: .* is not known; supported: torch, exact, fast"
    ):
        deltanet_ext.cuda_precision(precision)
    assert told == []


@pytest.fixture
def told_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What the CPU's library is told."""
    changes: list[str] = []
    library = _load.library()
    monkeypatch.setattr(_load, "_library", SimpleNamespace(set_bf16_products=changes.append))
    before = torch.backends.mkldnn.matmul.fp32_precision
    yield changes
    torch.backends.mkldnn.matmul.fp32_precision = before
    monkeypatch.setattr(_load, "_library", library)
    monkeypatch.setattr(_settings, "_cpu_told", "never")


def chunk(dtype: torch.dtype) -> None:
    x = torch.zeros(1, 5, 1, 8, dtype=dtype)
    deltanet_ext.chunk_gated_delta_rule(x, x, x, None, None)


def test_cpu_precision_inside_blocks(told_cpu):
    with deltanet_ext.cpu_precision("fast"):
        assert deltanet_ext.get_cpu_precision() == "fast"
        chunk(torch.bfloat16)
        with deltanet_ext.cpu_precision("exact"):
            chunk(torch.bfloat16)
        assert deltanet_ext.get_cpu_precision() == "fast"
    assert deltanet_ext.get_cpu_precision() == "torch"
    assert told_cpu == ["where faster", "never", "where faster", "never"]


def test_cpu_precision_follows_torch(told_cpu):
    chunk(torch.bfloat16)
    assert told_cpu == []
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    chunk(torch.float32)  # has products in fp32 whatever is set
    assert told_cpu == []
    chunk(torch.bfloat16)
    assert told_cpu == ["where faster"]
    for other in ("tf32", "ieee"):
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"
        chunk(torch.bfloat16)
        torch.backends.mkldnn.matmul.fp32_precision = other
        chunk(torch.bfloat16)
    assert told_cpu == ["where faster", "never"] * 2
    with deltanet_ext.cpu_precision("exact"):
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"
        chunk(torch.bfloat16)
        assert told_cpu[-1] == "never"
    assert told_cpu[-1] == "where faster"


def test_medium_of_torch_is_bf16():
    """What the documentation of cpu_precision says of torch."""
    before = torch.backends.mkldnn.matmul.fp32_precision
    try:
        torch.set_float32_matmul_precision("medium")
        assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"
        torch.set_float32_matmul_precision("highest")
        assert torch.backends.mkldnn.matmul.fp32_precision != "bf16"
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before


@pytest.mark.parametrize("precision", ["medium", "", None, True])
def test_cpu_precision_has_three_names(precision, told_cpu):
    with pytest.raises(
        ValueError, match=r"cpu_precision: .* is not known; supported: torch, exact, fast"
    ):
        deltanet_ext.cpu_precision(precision)
    assert told_cpu == []
