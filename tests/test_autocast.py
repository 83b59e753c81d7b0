# SPDX-License-Identifier: Apache-2.0
"""Under torch.autocast q, k, v are taken as they come; g, beta and the state are not narrowed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import deltanet_ext
from cases import DTYPES, case_named, name_of
from closeness import assert_same_bits

FUNCTIONS = (deltanet_ext.chunk_gated_delta_rule, deltanet_ext.recurrent_gated_delta_rule)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16], ids=name_of)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_autocast_changes_nothing(
    dtype: torch.dtype, cast: torch.dtype, function: Callable[..., Any]
) -> None:
    args = case_named("T=65").inputs(dtype)
    want_out, want_state = function(**args)
    with torch.autocast("cpu", dtype=cast):
        out, state = function(**args)
    assert out.dtype == dtype
    assert_same_bits(out, want_out)
    assert_same_bits(state, want_state)


def test_other_operators_under_autocast() -> None:
    args = case_named("T=65").inputs()
    rule = {name: args[name] for name in ("key", "value", "g", "beta")}
    L = torch.randn(20, 20).tril(-1)
    want_M, want_U = deltanet_ext.chunk_transition(**rule)
    want = deltanet_ext.unit_lower_triangular_inverse(L)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        M, U = deltanet_ext.chunk_transition(**rule)
        assert_same_bits(M, want_M)
        assert_same_bits(U, want_U)
        assert_same_bits(deltanet_ext.unit_lower_triangular_inverse(L), want)


def test_autocast_on_cuda_narrows_nothing() -> None:
    """Both passes, with tensors that are dispatched as on a card and hold nothing."""
    ops = torch.ops.deltanet_ext
    was = torch.is_autocast_enabled("cuda")
    with FakeTensorMode():
        rows = [torch.empty(1, 8, 2, 16, device="cuda") for _ in range(3)]
        gates = [torch.empty(1, 8, 2, device="cuda") for _ in range(2)]
        matrix = torch.empty(4, 4, device="cuda")
        inputs, flags = [*rows, *gates, *[None] * 4], [True, False, False, False, False]
        torch.set_autocast_enabled("cuda", True)
        try:
            assert torch.mm(matrix, matrix).dtype != torch.float32  # autocast is at work
            out, state = ops.chunk_gated_delta_rule_forward(*inputs, 0.25, True, *flags)
            grads = ops.chunk_gated_delta_rule_backward(
                out, state, *inputs, None, 0.25, *flags, 0b11111
            )
        finally:
            torch.set_autocast_enabled("cuda", was)
    assert {x.dtype for x in (out, state, *grads)} == {torch.float32}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_inference_mode(function: Callable[..., Any]) -> None:
    args = case_named("T=65").inputs()
    want_out, want_state = function(**args)
    with torch.inference_mode():
        out, state = function(**args)
        step = case_named("T=1").inputs()
        next_out, next_state = function(**{**step, "initial_state": state})
    assert_same_bits(out, want_out)
    assert_same_bits(state, want_state)
    want_out, want_state = function(**{**step, "initial_state": want_state})
    assert_same_bits(next_out, want_out)
    assert_same_bits(next_state, want_state)
