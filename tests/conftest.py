# SPDX-License-Identifier: Apache-2.0
"""Fixtures: instruction sets, threads, poisoned memory; a deterministic hypothesis profile."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

# Before torch loads its OpenMP: threads that wait by spinning turn a busy machine into a slow one.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch

import deltanet_ext
from deltanet_ext import _load

try:
    import hypothesis
except ImportError:
    pass  # test_property.py skips itself, and says why
else:
    hypothesis.settings.register_profile(
        "deterministic",
        derandomize=True,  # the same examples every time: a red build can be repeated
        database=None,
        deadline=None,
        max_examples=60,
        suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
    )
    hypothesis.settings.load_profile("deterministic")


@pytest.fixture(params=deltanet_ext.available_cpu_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every instruction set that this machine has, in turn."""
    deltanet_ext.force_cpu_isa(request.param)
    yield request.param
    deltanet_ext.force_cpu_isa(None)


@pytest.fixture
def poison() -> Iterator[None]:
    """Fresh tensors hold NaN, not whatever was there: what a kernel forgets to write shows."""
    before = torch.are_deterministic_algorithms_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    _load.library().poison_results(True)
    yield
    _load.library().poison_results(False)
    torch.use_deterministic_algorithms(before)
    torch.utils.deterministic.fill_uninitialized_memory = filled


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """`threads(n)` sets the number of threads; it is restored afterwards."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _no_leftovers() -> Iterator[None]:
    """A test that leaves a switch set would change what every later test measures."""
    isa = deltanet_ext.cpu_isa()
    yield
    assert deltanet_ext.cpu_isa() == isa, "the test left another instruction set forced"
    assert not deltanet_ext.is_batch_invariant(), "the test left batch invariance switched on"
    assert deltanet_ext.get_cuda_precision() == "torch", "the test left another precision set"
    assert deltanet_ext.get_cpu_precision() == "torch", "the test left another precision set"
