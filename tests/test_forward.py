# SPDX-License-Identifier: Apache-2.0
"""Both forms of the rule, on every named case and dtype, against the fp64 recurrence."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import deltanet_ext
from cases import (
    ALL_CASES,
    DTYPES,
    Case,
    assert_as_exact_as_the_recurrence,
    case_named,
    dtypes,
    expected,
    name_of,
)
from closeness import assert_same_bits, rmse_ratio

FUNCTIONS = (deltanet_ext.chunk_gated_delta_rule, deltanet_ext.recurrent_gated_delta_rule)


@pytest.mark.parametrize("dtype", dtypes(torch.float32, torch.bfloat16))
@pytest.mark.parametrize("case", ALL_CASES, ids=str)
def test_is_as_exact_as_the_recurrence(case: Case, dtype: torch.dtype, poison: None) -> None:
    want = expected(case, dtype)
    for function in FUNCTIONS:
        got = function(**case.inputs(dtype))
        assert_as_exact_as_the_recurrence(got, want, dtype)
        if dtype in (torch.bfloat16, torch.float16):
            assert_rounded_once(got[0], want.out)


def assert_rounded_once(out: Tensor, exact: Tensor) -> None:
    """A narrow output is the fp32 result, rounded: nothing before that was narrow."""
    finite = torch.isfinite(exact.to(out.dtype))
    out, exact = out.where(finite, 0.0), exact.where(finite, 0.0)
    rounding = rmse_ratio(exact.to(out.dtype), exact)
    assert rmse_ratio(out, exact) <= 1.02 * rounding + 2e-5


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("name", ["T=130", "T=15", "K=33 V=100", "packed130[0,65,65,65,66,120]"])
def test_chunk_size_is_only_a_hint(name: str, dtype: torch.dtype) -> None:
    args = case_named(name).inputs(dtype)
    out, state = deltanet_ext.chunk_gated_delta_rule(**args)
    for chunk_size in (1, 7, 16, 64, 1000):
        other_out, other_state = deltanet_ext.chunk_gated_delta_rule(**args, chunk_size=chunk_size)
        assert_same_bits(other_out, out, f"output, chunk_size {chunk_size}")
        assert_same_bits(other_state, state, f"state, chunk_size {chunk_size}")


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_without_final_state(function: Callable[..., Any], dtype: torch.dtype) -> None:
    args = case_named("T=65").inputs(dtype)
    out, state = function(**args)
    alone, none = function(**{**args, "output_final_state": False})
    assert state is not None
    assert none is None
    assert_same_bits(alone, out)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_scale_of_zero_is_a_scale(function: Callable[..., Any]) -> None:
    args = case_named("T=33").inputs()
    out, state = function(**args, scale=0.0)
    assert (out == 0).all()
    assert_same_bits(state, function(**args)[1], "the state knows no scale")


@pytest.mark.parametrize("function", FUNCTIONS)
def test_an_integer_scale_is_a_scale(function: Callable[..., Any]) -> None:
    args = case_named("T=33").inputs()
    assert_same_bits(function(**args, scale=2)[0], function(**args, scale=2.0)[0])


def test_the_other_name() -> None:
    assert deltanet_ext.fused_recurrent_gated_delta_rule is deltanet_ext.recurrent_gated_delta_rule
