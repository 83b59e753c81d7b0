# SPDX-License-Identifier: Apache-2.0
"""batch_invariant and cuda_precision on the emulated kernels: what each promises; that it acts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import deltanet_ext
import emulated
from cases import Case, name_of, recurrence
from closeness import assert_close, assert_same_bits, rmse_ratio
from deltanet_ext import _settings

if reason := emulated.why_not():
    pytest.skip(f"emulated CUDA operators: {reason}", allow_module_level=True)

pytestmark = pytest.mark.slow  # the first run compiles for minutes

FUNCTIONS = (deltanet_ext.chunk_gated_delta_rule, deltanet_ext.recurrent_gated_delta_rule)
CHUNK = FUNCTIONS[0]
PER_TOKEN = ("query", "key", "value", "g", "beta")


@pytest.fixture(autouse=True)
def on_the_emulator() -> Iterator[None]:
    with emulated.path():
        yield


# Long enough for segments where few blocks run; the second with widths that tensor cores decline.
LONG = Case("long", B=2, T=1100, HK=1, HV=1, K=16, V=16, state=torch.float32, g="weak")
ODD = Case("odd", B=3, T=70, HK=1, HV=2, K=12, V=20, state=torch.float32)
ONE_TOKEN = Case("one token", B=3, T=1, HK=1, HV=1, K=12, V=12, state=torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=name_of)
@pytest.mark.parametrize("case", [LONG, ODD, ONE_TOKEN], ids=str)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_batch_invariance(function: Callable, case: Case, dtype: torch.dtype) -> None:
    """A sequence has the same bits alone, in a batch, and packed."""
    args = case.inputs(dtype)
    with deltanet_ext.batch_invariant(True):
        out, states = function(**args)
        packed = {n: args[n].flatten(0, 1)[None] if n in PER_TOKEN else args[n] for n in args}
        packed["cu_seqlens"] = torch.arange(0, case.B * case.T + 1, case.T)
        packed_out, packed_states = function(**packed)
        assert_same_bits(packed_out.view_as(out), out, "output, packed")
        assert_same_bits(packed_states, states, "states, packed")
        one = {n: x[1:2] if isinstance(x, Tensor) else x for n, x in args.items()}
        alone, state = function(**one)
        assert_same_bits(alone, out[1:2], "output of row 1")
        assert_same_bits(state, states[1:2], "state of row 1")


def test_without_it_the_company_decides() -> None:
    """The switch acts: else the test above would show nothing."""
    args = LONG.inputs(torch.bfloat16)
    _, states = CHUNK(**args)
    with deltanet_ext.batch_invariant(True):
        _, invariant = CHUNK(**args)
    assert not torch.equal(states, invariant), "nothing is cut into segments here"
    _, want = recurrence(args)
    assert_close(states, want, 2e-5, "state by segments")
    assert_close(invariant, want, 2e-5, "state in one piece")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=name_of)
def test_fast_and_exact_keep_their_bounds(dtype: torch.dtype) -> None:
    case = Case("precision", T=130, HK=1, HV=2, K=128, V=64, state=torch.float32)
    args = case.inputs(dtype)
    out, state = recurrence(args)
    exact_out, exact_state = CHUNK(**args)
    with deltanet_ext.cuda_precision("fast"):
        fast_out, fast_state = CHUNK(**args)
    rounding = rmse_ratio(out.to(dtype), out)
    assert rmse_ratio(exact_out, out) <= 1.15 * rounding + 2e-5
    assert_close(exact_state, state, 1e-5, "exact state")
    assert_close(fast_out, out, 2.5e-3, "fast output")
    assert_close(fast_state, state, 2e-3, "fast state")
    assert not torch.equal(fast_state, exact_state), "the switch does nothing"


def test_the_kernels_follow_torch() -> None:
    case = Case("precision", T=40, HK=1, HV=1, K=64, V=64, state=torch.float32)
    args = case.inputs(torch.bfloat16)
    exact_out, exact_state = CHUNK(**args)
    with deltanet_ext.cuda_precision("fast"):
        fast_out, fast_state = CHUNK(**args)
    try:
        torch.set_float32_matmul_precision("medium")
        _settings.follow_torch(SimpleNamespace(dtype=torch.bfloat16, is_cuda=True))
        out, state = CHUNK(**args)
    finally:
        torch.set_float32_matmul_precision("highest")
        _settings.follow_torch(SimpleNamespace(dtype=torch.bfloat16, is_cuda=True))
    assert not torch.equal(fast_state, exact_state)
    assert_same_bits(out, fast_out, "output")
    assert_same_bits(state, fast_state, "state")
    assert_same_bits(CHUNK(**args)[0], exact_out, "output of the default")


def test_float32_is_exact_either_way() -> None:
    args = Case("precision", T=70, HK=1, HV=2, K=32, V=32, state=torch.float32).inputs()
    want = CHUNK(**args)
    with deltanet_ext.cuda_precision("fast"):
        got = CHUNK(**args)
    assert_same_bits(got[0], want[0], "output")
    assert_same_bits(got[1], want[1], "state")


def test_a_map_is_exact_either_way() -> None:
    args = Case("map", T=70, HK=1, HV=1, K=32, V=32).inputs(torch.bfloat16)
    rule = {n: args[n] for n in ("key", "value", "g", "beta", "use_qk_l2norm_in_kernel")}
    want = deltanet_ext.chunk_transition(**rule)
    with deltanet_ext.cuda_precision("fast"):
        got = deltanet_ext.chunk_transition(**rule)
    assert_same_bits(got[0], want[0], "M")
    assert_same_bits(got[1], want[1], "U")
