# SPDX-License-Identifier: Apache-2.0
"""Cutting a run in two and carrying the state: equal to rounding, at every cut."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import deltanet_ext
from cases import DTYPES, Case, assert_as_exact_as_the_recurrence, expected, name_of
from closeness import assert_same_bits

FUNCTIONS = (deltanet_ext.chunk_gated_delta_rule, deltanet_ext.recurrent_gated_delta_rule)
PER_TOKEN = ("query", "key", "value", "g", "beta")
Rule = Callable[..., Any]

CASE = Case("split", B=2, T=70, HK=1, HV=2, K=40, V=24, g="weak", state=torch.float32)


def in_pieces(args: dict[str, Any], cuts: list[tuple[int, int, Rule]]) -> tuple[Tensor, Tensor]:
    """Runs tokens start..stop of each piece with its function, and hands the state on."""
    outs, state = [], args["initial_state"]
    for start, stop, function in cuts:
        piece = {**args, "initial_state": state}
        for name in PER_TOKEN:
            piece[name] = args[name][:, start:stop]
        out, state = function(**piece)
        outs.append(out)
    return torch.cat(outs, 1), state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=name_of)
@pytest.mark.parametrize("first", FUNCTIONS)
@pytest.mark.parametrize("second", FUNCTIONS)
def test_every_cut(first: Rule, second: Rule, dtype: torch.dtype) -> None:
    args, want = CASE.inputs(dtype), expected(CASE, dtype)
    for cut in range(CASE.T + 1):
        got = in_pieces(args, [(0, cut, first), (cut, CASE.T, second)])
        assert_as_exact_as_the_recurrence(got, want, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_prefill_then_decode(dtype: torch.dtype, isa: str) -> None:
    """Thirty tokens in chunks, forty one by one."""
    cuts: list[tuple[int, int, Rule]] = [(0, 30, deltanet_ext.chunk_gated_delta_rule)]
    cuts += [(t, t + 1, deltanet_ext.recurrent_gated_delta_rule) for t in range(30, CASE.T)]
    got = in_pieces(CASE.inputs(dtype), cuts)
    assert_as_exact_as_the_recurrence(got, expected(CASE, dtype), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
def test_token_by_token_is_one_run_bit_for_bit(dtype: torch.dtype, isa: str) -> None:
    """The recurrence does the same arithmetic for each token, wherever a call ends."""
    args = CASE.inputs(dtype)
    whole = deltanet_ext.recurrent_gated_delta_rule(**args)
    step = deltanet_ext.recurrent_gated_delta_rule
    out, state = in_pieces(args, [(t, t + 1, step) for t in range(CASE.T)])
    assert_same_bits(out, whole[0])
    assert_same_bits(state, whole[1])


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("state_dtype", DTYPES, ids=name_of)
def test_a_narrow_state_is_its_values(
    state_dtype: torch.dtype, dtype: torch.dtype, function: Rule
) -> None:
    """A state of another float dtype is read as it is; what comes back is as arithmetic is."""
    case = Case("state dtypes", B=2, T=20, HK=1, HV=2, K=33, V=20, state=state_dtype)
    args = case.inputs(dtype)
    wide = args["initial_state"].to(torch.float64 if dtype == torch.float64 else torch.float32)
    out, state = function(**args)
    want_out, want_state = function(**{**args, "initial_state": wide})
    assert_same_bits(out, want_out)
    assert_same_bits(state, want_state)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("B", [0, 1, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_no_tokens_keep_the_state(dtype: torch.dtype, B: int, function: Rule) -> None:
    args = Case(f"no tokens, B={B}", B=B, T=0, HK=1, HV=2, state=torch.float32).inputs(dtype)
    out, state = function(**args)
    assert out.shape == (B, 0, 2, 32)
    assert_same_bits(state, args["initial_state"].to(state.dtype))
    _, zeros = function(**{**args, "initial_state": None})
    assert_same_bits(zeros, torch.zeros_like(state))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_empty_packed_sequences_keep_their_states(function: Rule, poison: None) -> None:
    args = Case("empty", T=64, HK=1, HV=2, cu=(0, 0, 64, 64, 64), state=torch.float32).inputs()
    _, state = function(**args)
    for n in (0, 2, 3):
        assert_same_bits(state[n], args["initial_state"][n])
    _, state = function(**{**args, "initial_state": None})
    for n in (0, 2, 3):
        assert (state[n] == 0).all()


@pytest.mark.parametrize("positive_gates", [False, True])
@pytest.mark.parametrize("bad", [None, float("nan"), float("inf"), -3e38])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_no_initial_state_is_a_state_of_zeros(
    dtype: torch.dtype, bad: float | None, positive_gates: bool, isa: str
) -> None:
    """Products with it are left out, but not what they make of a NaN or an infinity."""
    case = Case("from zero", T=30, HK=1, HV=2, K=40, V=24, l2norm=False)
    for token in (0, 9, 29):
        args = case.inputs(dtype)
        if bad is not None:
            for name in ("query", "key"):
                args[name][0, token, 0, 7] = bad
        if positive_gates:
            args["g"] = args["g"].abs() + 0.5
        zeros = torch.zeros(1, 2, 40, 24, dtype=torch.float32)
        out, state = deltanet_ext.chunk_gated_delta_rule(**{**args, "initial_state": None})
        want = deltanet_ext.chunk_gated_delta_rule(**{**args, "initial_state": zeros})
        assert_same_bits(out, want[0], f"output, {bad} at token {token}")
        assert_same_bits(state, want[1], f"state, {bad} at token {token}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
@pytest.mark.parametrize("sizes", [(1e20, 1e20), (1e30, 1e10), (1e25, 1e14), (3e19, 3e38)])
def test_a_norm_that_overflows_makes_its_row_zero(
    sizes: tuple[float, float], dtype: torch.dtype, isa: str
) -> None:
    """x * rsqrt(inf) is 0, as token by token, in every product of the row."""
    case = Case("overflow", T=30, HK=1, HV=2, K=40, V=24, l2norm=True, state=torch.float32)
    for places in (("key", "key"), ("key", "query"), ("query", "query")):
        args = case.inputs(dtype)
        for name, token, size in zip(places, (3, 17), sizes, strict=True):
            args[name][0, token] = size
        out, state = deltanet_ext.chunk_gated_delta_rule(**args)
        want = deltanet_ext.recurrent_gated_delta_rule(**args)
        assert want[0].isfinite().all()
        torch.testing.assert_close(out, want[0], rtol=2e-2, atol=1e-2)
        torch.testing.assert_close(state, want[1], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_beta_zero_only_decays(function: Rule) -> None:
    args = Case("beta 0", T=33, HK=1, HV=2, beta="0", g="zero", state=torch.float32).inputs()
    _, state = function(**args)
    assert_same_bits(state, args["initial_state"])


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_gate_of_minus_infinity_forgets_exactly(function: Rule) -> None:
    """Whatever came before, finite, leaves no trace: not even a rounding error."""
    case = Case("forget", T=60, HK=1, HV=2, g="weak", state=torch.float32)
    args = case.inputs()
    args["g"][:, 20] = -float("inf")
    out, state = function(**args)
    other = {**args, "initial_state": 1e3 * args["initial_state"]}
    for name in ("key", "value"):
        other[name] = args[name].clone()
        other[name][:, :20] = args[name][:, 20:40]
    other_out, other_state = function(**other)
    assert_same_bits(other_out[:, 20:], out[:, 20:])
    assert_same_bits(other_state, state)
