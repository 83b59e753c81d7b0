# SPDX-License-Identifier: Apache-2.0
"""What must not reach what: later tokens, other heads, other sequences, other columns, the tail.

NaN marks the input that must not be seen; outputs elsewhere keep their bits.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import deltanet_ext
from cases import (
    DTYPES,
    Case,
    dtypes,
    name_of,
)
from closeness import assert_same_bits

FUNCTIONS = (deltanet_ext.chunk_gated_delta_rule, deltanet_ext.recurrent_gated_delta_rule)
PER_TOKEN = ("query", "key", "value", "g", "beta")
NAN = float("nan")

LARGE = {
    torch.float32: (1e3, 1e30, 3e38),
    torch.bfloat16: (1e3, 3e38),
    torch.float16: (60000.0,),
    torch.float64: (1e30, 1e300),
}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", dtypes(torch.float32, torch.bfloat16))
@pytest.mark.parametrize("l2norm", [True, False], ids=["l2norm", "plain"])
def test_causality(
    l2norm: bool, dtype: torch.dtype, function: Callable[..., Any], isa: str
) -> None:
    """Changing a token to anything finite leaves earlier outputs as they were."""
    case = Case("causal", T=52, HK=1, HV=2, K=40, V=24, keys="unit", l2norm=l2norm)
    args = case.inputs(dtype)
    out, _ = function(**args)
    for t in (0, 1, 7, 15, 16, 17, 31, 32, 47, 48, 51):
        for size in LARGE[dtype]:
            changed = dict(args)
            for name in PER_TOKEN:
                changed[name] = args[name].clone()
                changed[name][:, t] = size if name in ("query", "key", "value") else 1e4
            got, _ = function(**changed)
            assert_same_bits(got[:, :t], out[:, :t], f"outputs before token {t} made {size:g}")


@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_token_is_causal(function: Callable[..., Any]) -> None:
    args = Case("causal, all", T=70, HK=1, HV=2, K=24, V=24, state=torch.float32).inputs()
    other = Case("causal, other", T=70, HK=1, HV=2, K=24, V=24).inputs()
    out, _ = function(**args)
    for t in range(70):
        mixed = dict(args)
        for name in PER_TOKEN:
            mixed[name] = torch.cat([args[name][:, :t], other[name][:, t:]], 1)
        got, _ = function(**mixed)
        assert_same_bits(got[:, :t], out[:, :t], f"outputs before token {t}")
        assert not torch.equal(got[:, t:], out[:, t:])


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("T", [1, 3, 40])
def test_a_value_head_is_on_its_own(
    T: int, dtype: torch.dtype, function: Callable[..., Any], isa: str
) -> None:
    case = Case(f"value heads {T}", B=2, T=T, HK=2, HV=6, K=40, V=24, state=torch.float32)
    args = case.inputs(dtype)
    out, state = function(**args)
    for name in ("value", "g", "beta", "initial_state"):
        spoiled = dict(args)
        spoiled[name] = args[name].clone()
        spoiled[name].select(1 if name == "initial_state" else 2, 4).fill_(NAN)
        got, got_state = function(**spoiled)
        for head in (0, 1, 2, 3, 5):
            assert_same_bits(got[:, :, head], out[:, :, head], f"head {head} by {name}")
            assert_same_bits(got_state[:, head], state[:, head], f"state {head} by {name}")
        assert got[:, :, 4].isnan().all()


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("name", ["query", "key"])
def test_a_key_head_reaches_its_group_only(name: str, function: Callable[..., Any]) -> None:
    args = Case("key heads", T=40, HK=3, HV=9, K=40, V=24, state=torch.float32).inputs()
    out, state = function(**args)
    spoiled = {**args, name: args[name].clone()}
    spoiled[name][:, :, 1] = NAN
    got, got_state = function(**spoiled)
    for head in (0, 1, 2, 6, 7, 8):
        assert_same_bits(got[:, :, head], out[:, :, head])
        assert_same_bits(got_state[:, head], state[:, head])
    assert got[:, :, 3:6].isnan().all()


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("T", [1, 40])
def test_a_column_of_v_is_on_its_own(
    T: int, dtype: torch.dtype, function: Callable[..., Any], isa: str
) -> None:
    """Columns of V and of the state never mix: the rule is linear in them, one by one."""
    case = Case(f"columns {T}", T=T, HK=1, HV=2, K=40, V=77, state=torch.float32)
    args = case.inputs(dtype)
    out, state = function(**args)
    for column in (0, 8, 76):
        others = torch.arange(77) != column
        for name in ("value", "initial_state"):
            spoiled = {**args, name: args[name].clone()}
            spoiled[name][..., column] = NAN
            got, got_state = function(**spoiled)
            assert_same_bits(got[..., others], out[..., others], f"by column {column} of {name}")
            assert_same_bits(got_state[..., others], state[..., others])
            assert got[..., column].isnan().all()


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_row_of_the_batch_is_on_its_own(function: Callable[..., Any]) -> None:
    args = Case("rows", B=4, T=40, HK=1, HV=2, state=torch.float32).inputs()
    out, state = function(**args)
    for name in (*PER_TOKEN, "initial_state"):
        spoiled = {**args, name: args[name].clone()}
        spoiled[name][2] = NAN
        got, got_state = function(**spoiled)
        for b in (0, 1, 3):
            assert_same_bits(got[b], out[b])
            assert_same_bits(got_state[b], state[b])


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_a_packed_sequence_is_on_its_own(dtype: torch.dtype, function: Callable[..., Any]) -> None:
    cu = (0, 17, 17, 37, 69)
    case = Case("packed rows", T=80, HK=1, HV=2, cu=cu, state=torch.float32)
    args = case.inputs(dtype)
    out, state = function(**args)
    spoiled = dict(args)
    for name in PER_TOKEN:
        spoiled[name] = args[name].clone()
        spoiled[name][:, 17:37] = NAN
    spoiled["initial_state"] = args["initial_state"].clone()
    spoiled["initial_state"][2] = NAN
    got, got_state = function(**spoiled)
    assert got[:, 17:37].isnan().all()
    for start, stop in ((0, 17), (37, 80)):
        assert_same_bits(got[:, start:stop], out[:, start:stop])
    for n in (0, 1, 3):
        assert_same_bits(got_state[n], state[n])


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("cu", [(0,), (0, 0), (0, 1), (0, 100), (0, 31, 31, 64)], ids=str)
def test_the_tail_is_zero_whatever_it_holds(
    cu: tuple[int, ...], dtype: torch.dtype, function: Callable[..., Any], poison: None
) -> None:
    case = Case("tail", T=128, HK=1, HV=2, cu=cu, state=torch.float32)
    args = case.inputs(dtype)
    _, state = function(**args)
    for name in PER_TOKEN:
        args[name][:, cu[-1] :] = NAN
    out, got_state = function(**args)
    assert_same_bits(out[:, cu[-1] :], torch.zeros_like(out[:, cu[-1] :]))
    assert_same_bits(got_state, state)
    assert out.isfinite().all()


@pytest.mark.parametrize("function", FUNCTIONS)
def test_arguments_are_never_written(function: Callable[..., Any]) -> None:
    case = Case(
        "read only", T=70, HK=1, HV=3, cu=(0, 20, 70), state=torch.float32, raw_gate=True,
        raw_beta=True, neg_eigval=True,
    )  # fmt: skip
    args = case.inputs()
    before = {name: x.clone() for name, x in args.items() if isinstance(x, torch.Tensor)}
    function(**args)
    for name, x in before.items():
        assert torch.equal(args[name], x), name


@pytest.mark.parametrize("function", FUNCTIONS)
def test_nan_is_passed_on(function: Callable[..., Any]) -> None:
    """A NaN gate is not clamped away: it spoils its own head from its token on."""
    args = Case("nan", T=40, HK=1, HV=2, state=torch.float32).inputs()
    out, _ = function(**args)
    args["g"][0, 20, 1] = NAN
    got, state = function(**args)
    assert got[:, 20:, 1].isnan().all()
    assert state[:, 1].isnan().all()
    assert_same_bits(got[:, :, 0], out[:, :, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=name_of)
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize(
    "sizes",
    [(33, 1, 4, 128, 128), (34, 2, 6, 101, 96), (29, 3, 3, 128, 144), (34, 2, 4, 102, 120)],
    ids=str,
)
def test_a_step_of_many_states_has_the_bits_of_each_alone(
    sizes: tuple[int, ...], packed: bool, dtype: torch.dtype, isa: str
) -> None:
    """States that no cache holds are written while the next one is read. Rows of 120 numbers are
    not whole lines, and take the other way."""
    B, HK, HV, K, V = sizes
    case = Case("step", B=B, T=1, HK=HK, HV=HV, K=K, V=V, state=torch.float32)
    args = case.inputs(dtype)
    rule = deltanet_ext.recurrent_gated_delta_rule
    if packed:
        together = {n: x.transpose(0, 1) if n in PER_TOKEN else x for n, x in args.items()}
        out, states = rule(**together, cu_seqlens=torch.arange(B + 1))
        out = out.transpose(0, 1)
    else:
        out, states = rule(**args)
    for n in range(B):
        alone = {m: x[n : n + 1] if isinstance(x, torch.Tensor) else x for m, x in args.items()}
        want, state = rule(**alone)
        assert_same_bits(out[n : n + 1], want, f"output of sequence {n}")
        assert_same_bits(states[n : n + 1], state, f"state of sequence {n}")
