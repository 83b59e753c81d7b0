# SPDX-License-Identifier: Apache-2.0
"""Gates and betas computed inside the kernel, at their extremes."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import deltanet_ext
from cases import DTYPES, Case, name_of, recurrence
from closeness import assert_close, assert_same_bits
from deltanet_ext import reference

FUNCTIONS = (deltanet_ext.chunk_gated_delta_rule, deltanet_ext.recurrent_gated_delta_rule)

GATE = Case("extreme gates", T=60, HK=1, HV=4, K=24, V=40, state=torch.float32, raw_gate=True)
INF = math.inf


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_gate_in_kernel_is_the_gate_given(
    dtype: torch.dtype, function: Callable[..., Any], isa: str
) -> None:
    """-exp(A_log) softplus(g + dt_bias), computed here in fp64 and handed over."""
    args = GATE.inputs(dtype)
    out, state = function(**args)
    A_log, dt_bias = args.pop("A_log"), args.pop("dt_bias")
    args.pop("use_gate_in_kernel")
    gate = reference.gate(args["g"].double(), A_log.double(), dt_bias.double())
    want_out, want_state = recurrence({**args, "g": gate})
    rounding = {torch.bfloat16: 2e-3, torch.float16: 3e-4}.get(dtype, 1e-6)
    assert_close(out, want_out, rounding, "output")
    assert_close(state, want_state, 1e-6, "state")


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    ("A_log", "g", "dt_bias"),
    [
        (0.0, 100.0, 0.0),  # softplus(100) = 100: exp(100) would overflow in fp32
        (0.0, 1e4, 0.0),
        (-10.0, 1e4, 0.0),  # -0.45 per token, through exp(1e4) if done naively
        (0.0, -100.0, 0.0),  # softplus is 4e-44: no decay, and no log(0)
        (0.0, -1e4, 0.0),
        (90.0, -100.0, 0.0),  # exp(90) * 4e-44 = 4.5e-5: inf * 0 in fp32
        (100.0, -90.0, 0.0),  # 2e4: forgets everything
        (88.0, -88.0, 0.0),  # inf * tiny in fp32, and the product is 1
        (-100.0, 5.0, 5.0),  # no decay
        (100.0, 5.0, 5.0),
        (-INF, 5.0, 5.0),
        (0.0, 5.0, -1e4),
        (0.0, -5.0, 1e4),
        (3.0, 20.0, 0.0),
        (0.0, 19.9, 0.2),  # around the threshold where torch's softplus switches to x
        (0.0, -20.0, 0.0),  # softplus is 2e-9: log(1 + 2e-9) would be 0 in fp32
        (18.0, -20.0, 0.0),  # and matters when A is large: -0.135 per token
    ],
)
def test_extremes(A_log: float, g: float, dt_bias: float, function: Callable[..., Any]) -> None:
    args = GATE.inputs()
    args["g"] = torch.full_like(args["g"], g)
    args["A_log"] = torch.full_like(args["A_log"], A_log)
    args["dt_bias"] = torch.full_like(args["dt_bias"], dt_bias)
    out, state = function(**args)
    want_out, want_state = recurrence(args)
    assert_close(out, want_out, 2e-6, "output")
    assert_close(state, want_state, 2e-6, "state")


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_gate_parameters_in_any_float_dtype(
    dtype: torch.dtype, function: Callable[..., Any]
) -> None:
    args = GATE.inputs()
    narrow = {name: args[name].to(dtype) for name in ("A_log", "dt_bias")}
    out, state = function(**{**args, **narrow})
    wide = {name: x.double() for name, x in narrow.items()}
    want_out, want_state = function(**{**args, **wide})
    assert_same_bits(out, want_out)
    assert_same_bits(state, want_state)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_without_dt_bias(function: Callable[..., Any]) -> None:
    args = GATE.inputs()
    args["dt_bias"] = torch.zeros_like(args["dt_bias"])
    out, state = function(**args)
    none_out, none_state = function(**{**args, "dt_bias": None})
    assert_same_bits(none_out, out)
    assert_same_bits(none_state, state)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("neg_eigval", [False, True])
@pytest.mark.parametrize("raw", [-INF, -1e4, -100.0, -20.0, 0.0, 20.0, 100.0, 1e4, INF])
def test_sigmoid_extremes(raw: float, neg_eigval: bool, function: Callable[..., Any]) -> None:
    case = Case("sigmoid", T=40, HV=3, state=torch.float32, raw_beta=True, neg_eigval=neg_eigval)
    args = case.inputs()
    args["beta"] = torch.full_like(args["beta"], raw)
    out, state = function(**args)
    want_out, want_state = recurrence(args)
    assert_close(out, want_out, 5e-6, "output")
    assert_close(state, want_state, 5e-6, "state")


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_narrow_beta_is_not_rounded_again(dtype: torch.dtype, function: Callable[..., Any]) -> None:
    """sigmoid of a bf16 beta is taken in fp32: the state error of peers that do not is 3e-3."""
    case = Case("raw beta", T=40, HV=3, state=torch.float32, raw_beta=True, narrow_gates=True)
    args = case.inputs(dtype)
    _, state = function(**args)
    _, want = recurrence(args)
    assert_close(state, want, 1e-6)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("g", [1e-3, 0.5, 2.0])
def test_a_positive_gate_grows(g: float, function: Callable[..., Any]) -> None:
    """Nothing clamps it: beta = 0 leaves S_T = e^{gT} S_0."""
    args = Case("grow", T=30, HV=2, beta="0", state=torch.float32).inputs()
    args["g"] = torch.full_like(args["g"], g)
    _, state = function(**args)
    assert_close(
        state, math.exp(30 * torch.tensor(g).item()) * args["initial_state"].double(), 2e-5
    )


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("g", [-20.0, -119.0, -121.0, -1e5, -3e38])
def test_strong_decay_is_zero_and_not_nan(g: float, function: Callable[..., Any]) -> None:
    args = Case("decay", T=100, HV=2, state=torch.float32).inputs()
    args["g"] = torch.full_like(args["g"], g)
    out, state = function(**args)
    want_out, want_state = recurrence(args)
    assert_close(out, want_out, 1e-6)
    assert_close(state, want_state, 1e-6)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_strong_gate_does_not_spoil_later_differences(function: Callable[..., Any]) -> None:
    """A prefix sum of -1000 has steps of 6e-5: later decays of -1e-3 must not see them."""
    args = Case("prefix", T=64, HV=2, K=48, V=48, keys="correlated").inputs()
    args["g"] = torch.full_like(args["g"], -1e-3)
    args["g"][:, :8] = -119.7
    out, state = function(**args)
    want_out, want_state = recurrence(args)
    assert_close(out, want_out, 1e-6)
    assert_close(state, want_state, 1e-6)
