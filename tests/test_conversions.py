# SPDX-License-Identifier: Apache-2.0
"""Narrow floats on their way in and out: every bit pattern, and the rounding of results."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import deltanet_ext
from cases import name_of
from closeness import assert_same_bits

FUNCTIONS = (deltanet_ext.chunk_gated_delta_rule, deltanet_ext.recurrent_gated_delta_rule)
NARROW = (torch.bfloat16, torch.float16)


def every_pattern(dtype: torch.dtype) -> Tensor:
    """All 65,536 values, as 256 heads of 256 columns: [1, 1, 256, 256]."""
    patterns = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    return patterns.view(dtype).reshape(1, 1, 256, 256)


def passed_through(
    function: Callable[..., Any], v: Tensor, scale: float, tokens: int
) -> tuple[Tensor, Tensor]:
    """Output and state after writing v with the last of some tokens, by k = q = 1 (K = 1)."""
    v = torch.cat([torch.zeros_like(v).expand(-1, tokens - 1, -1, -1), v], 1)
    k = torch.zeros(1, tokens, 1, 1, dtype=v.dtype)
    k[:, -1] = 1
    out, state = function(k, k, v, None, None, output_final_state=True, scale=scale)
    return out[:, -1:], state


def assert_same_values(got: Tensor, want: Tensor) -> None:
    """The same bits; any NaN for a NaN."""
    assert_same_bits(got.isnan().float(), want.isnan().float(), "NaN")
    assert_same_bits(got.nan_to_num(7.0), want.nan_to_num(7.0))


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize("dtype", NARROW, ids=name_of)
def test_every_value_passes_unchanged(
    dtype: torch.dtype, tokens: int, function: Callable[..., Any], isa: str
) -> None:
    """Subnormals, infinities, NaN: in from 16 bits, out to 16 bits; finite ones as fp32 state."""
    v = every_pattern(dtype)
    out, state = passed_through(function, v, 1.0, tokens)
    # A zero keeps its sign or loses it (0 + -0 is 0): both are right.
    assert_same_values(out + 0, v + 0)
    finite = v[:, 0].isfinite()
    assert_same_values(state[:, :, 0].where(finite, 0) + 0, v[:, 0].float().where(finite, 0) + 0)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize("scale", [1 / 3, 1 + 2**-9, 1 + 2**-8 + 2**-20, 3.0, 2.0**-10])
@pytest.mark.parametrize("dtype", NARROW, ids=name_of)
def test_results_are_rounded_to_nearest_even(
    dtype: torch.dtype, scale: float, tokens: int, function: Callable[..., Any], isa: str
) -> None:
    """As torch rounds the fp32 result: ties, overflow to infinity and underflow included."""
    v = every_pattern(dtype)
    out, _ = passed_through(function, v, scale, tokens)
    want = (v.float() * torch.tensor(scale, dtype=torch.float32)).to(dtype)
    assert_same_values(out + 0, want + 0)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", NARROW, ids=name_of)
def test_every_initial_state_is_read(
    dtype: torch.dtype, function: Callable[..., Any], isa: str
) -> None:
    state = every_pattern(dtype).reshape(1, 256, 1, 256)
    for v_first in (False, True):
        initial = state.mT.contiguous() if v_first else state
        nothing = torch.zeros(1, 6, 1, 1)
        _, final = function(
            nothing, nothing, torch.zeros(1, 6, 256, 256), None, None, initial_state=initial,
            output_final_state=True, state_v_first=v_first,
        )  # fmt: skip
        final = final.mT if v_first else final
        finite = state.isfinite()
        assert_same_bits(final.where(finite, 0) + 0, state.float().where(finite, 0) + 0)


@pytest.mark.parametrize("dtype", NARROW, ids=name_of)
def test_every_gate_and_beta_is_read(dtype: torch.dtype, isa: str) -> None:
    """S = exp(g) S_0 with beta 0; S = beta v with k = 1."""
    x = every_pattern(dtype).reshape(1, 1, 2**16)
    x = x[x.isfinite() & (x.abs() < 80)].reshape(1, 1, -1)
    heads = x.shape[2]
    zero, one = torch.zeros(1, 1, 1, 1, dtype=dtype), torch.ones(1, 1, 1, 1, dtype=dtype)
    v = torch.ones(1, 1, heads, 1, dtype=dtype)
    for function in FUNCTIONS:
        _, state = function(
            zero, zero, v, x, torch.zeros_like(x), output_final_state=True,
            initial_state=torch.ones(1, heads, 1, 1),
        )  # fmt: skip
        torch.testing.assert_close(state.flatten(), x.float().exp().flatten(), rtol=1e-6, atol=0)
        _, state = function(one, one, v, None, x, output_final_state=True)
        assert_same_bits(state.flatten() + 0, x.float().flatten() + 0)
