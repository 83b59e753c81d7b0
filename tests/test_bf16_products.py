# SPDX-License-Identifier: Apache-2.0
"""The chunked forward with products of bf16 pairs, which `cpu_precision("fast")` allows.

Instruction sets without such a product do it in two fp32 ones: slower, and the same arithmetic up
to the order of sums. So the kernel is tested on every CPU, forced by a switch that is not public.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

import deltanet_ext
from cases import ALL_CASES, Case, case_named, expected
from closeness import assert_close, assert_same_bits, assert_same_special_values
from deltanet_ext import _load

chunk = deltanet_ext.chunk_gated_delta_rule
HEADS = Case("heads", B=3, T=100, HK=2, HV=6, K=33, V=130, state=torch.float32)

# Of the output: rounding it to bf16 costs 1.7e-3, a rounded state as much again.
OUT_BOUND = 3.5e-3
# Of the state: where one key is written over and over, what a chunk of up to 32 tokens adds is a
# sum of rounded new values, each twice as large as what is left in the end.
STATE_BOUND = 64**0.5 * 2**-9
# Where tokens amplify what was there before (beta |k|^2 near or above 2, gates that grow): no bound
# of a rounding error but the one by which the documentation warns.
AMPLIFIED_BOUND = 0.1


def amplifies(case: Case) -> bool:
    return case.amplifies or case.beta == "1.999"


@pytest.fixture
def pairs() -> Iterator[None]:
    _load.library().set_bf16_products("always")
    yield
    _load.library().set_bf16_products("never")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, id=str(c), marks=pytest.mark.slow if i % 16 else ())
        for i, c in enumerate(ALL_CASES)
    ],
)
def test_errors_are_those_of_rounding(case: Case, isa: str, pairs: None, poison: None) -> None:
    want = expected(case, torch.bfloat16)
    out, state = chunk(**case.inputs(torch.bfloat16))
    assert state is not None
    assert out.dtype == torch.bfloat16
    assert state.dtype == torch.float32
    for got, exact, bound, what in (
        (out, want.out, OUT_BOUND, "output"),
        (state, want.state, STATE_BOUND, "state"),
    ):
        assert_same_special_values(got, exact, what)
        finite = exact.isfinite()
        bound = AMPLIFIED_BOUND if amplifies(case) else bound
        assert_close(got[finite], exact[finite], bound, what)


def test_it_is_another_kernel(isa: str, pairs: None) -> None:
    args = HEADS.inputs(torch.bfloat16)
    rounded = chunk(**args)[1]
    _load.library().set_bf16_products("never")
    assert not torch.equal(rounded, chunk(**args)[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
def test_other_inputs_are_multiplied_as_ever(dtype: torch.dtype, isa: str, pairs: None) -> None:
    args = HEADS.inputs(dtype)
    got = chunk(**args)
    _load.library().set_bf16_products("never")
    for a, b in zip(got, chunk(**args), strict=True):
        assert_same_bits(a, b)


def test_training_is_exact(isa: str, pairs: None) -> None:
    args = HEADS.inputs(torch.bfloat16)
    args["query"].requires_grad_()
    got = chunk(**args)
    _load.library().set_bf16_products("never")
    for a, b in zip(got, chunk(**args), strict=True):
        assert_same_bits(a.detach(), b.detach())


def test_fast_is_exact_without_such_an_instruction(isa: str) -> None:
    args = HEADS.inputs(torch.bfloat16)
    want = chunk(**args)
    with deltanet_ext.cpu_precision("fast"):
        got = chunk(**args)
    same = all(map(torch.equal, got, want))
    assert same == (isa != "avx512_bf16")


def test_same_bits_with_any_number_of_threads(
    isa: str, pairs: None, poison: None, threads: Callable[[int], None]
) -> None:
    args = HEADS.inputs(torch.bfloat16)
    threads(1)
    want = chunk(**args)
    for count in (1, 2, 3, 7):
        threads(count)
        for a, b in zip(chunk(**args), want, strict=True):
            assert_same_bits(a, b, f"{count} threads")


def test_same_bits_alone_in_a_batch_and_packed(isa: str, pairs: None) -> None:
    args = HEADS.inputs(torch.bfloat16)
    out, state = chunk(**args)
    names = ("query", "key", "value", "g", "beta")
    states = args["initial_state"]
    for b in range(HEADS.B):
        row = {**args, **{n: args[n][b : b + 1] for n in names}, "initial_state": states[b : b + 1]}
        alone = chunk(**row)
        assert_same_bits(alone[0][0], out[b])
        assert_same_bits(alone[1][0], state[b])
    packed = {n: args[n].flatten(0, 1).unsqueeze(0) for n in names}
    cu = torch.arange(HEADS.B + 1) * HEADS.T
    got = chunk(**{**args, **packed}, cu_seqlens=cu)
    assert_same_bits(got[0].view_as(out), out)
    assert_same_bits(got[1], state)


def test_no_state_is_the_zero_state(isa: str, pairs: None) -> None:
    args = HEADS.inputs(torch.bfloat16)
    zeros = chunk(**{**args, "initial_state": torch.zeros_like(args["initial_state"])})
    for a, b in zip(chunk(**{**args, "initial_state": None}), zeros, strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("token", [0, 1, 30, 99])
def test_a_token_changes_nothing_before_it(token: int, isa: str, pairs: None) -> None:
    args = HEADS.inputs(torch.bfloat16)
    before = chunk(**args)[0]
    for name in ("query", "key", "value", "g", "beta"):
        args[name][:, token] = -0.25
    after = chunk(**args)[0]
    assert_same_bits(after[:, :token], before[:, :token])
    assert not torch.equal(after[:, token], before[:, token])


def test_views_as_a_convolution_leaves_them(isa: str, pairs: None, poison: None) -> None:
    args = case_named("K=100 V=60").inputs(torch.bfloat16)
    want = chunk(**args)
    for name in ("query", "key", "value"):
        args[name] = args[name].permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    for a, b in zip(chunk(**args), want, strict=True):
        assert_same_bits(a, b)
