# SPDX-License-Identifier: Apache-2.0
"""The switches of the CUDA kernels: from a call on, or inside a block."""

from __future__ import annotations

import pytest

import deltanet_ext
from deltanet_ext import _settings


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
    assert deltanet_ext.get_cuda_precision() == "exact"
    with deltanet_ext.cuda_precision("fast"):
        assert deltanet_ext.get_cuda_precision() == "fast"
    assert deltanet_ext.get_cuda_precision() == "exact"
    assert told == [(False, True), (False, False)]


def test_a_call_alone_holds_until_the_next(told):
    deltanet_ext.batch_invariant(True)
    deltanet_ext.cuda_precision("fast")
    assert told[-1] == (True, True)
    deltanet_ext.cuda_precision("exact")
    deltanet_ext.batch_invariant(False)
    assert told[-1] == (False, False)


def test_a_block_that_fails_restores_too(told):
    with pytest.raises(KeyError), deltanet_ext.batch_invariant(True):
        raise KeyError
    with pytest.raises(KeyError), deltanet_ext.cuda_precision("fast"):
        raise KeyError
    assert not deltanet_ext.is_batch_invariant()
    assert deltanet_ext.get_cuda_precision() == "exact"


@pytest.mark.parametrize("enabled", [1, None, "on"])
def test_batch_invariance_is_a_bool(enabled, told):
    with pytest.raises(TypeError, match=r"batch_invariant: enabled is .*; supported: bool"):
        deltanet_ext.batch_invariant(enabled)
    assert told == []


@pytest.mark.parametrize("precision", ["high", "", None, True])
def test_precision_has_two_names(precision, told):
    with pytest.raises(
        ValueError, match=r"cuda_precision: .* is not known; supported: exact, fast"
    ):
        deltanet_ext.cuda_precision(precision)
    assert told == []
