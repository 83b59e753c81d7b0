# SPDX-License-Identifier: Apache-2.0
"""Bit for bit: two runs, any number of threads, a sequence alone, in a batch or packed."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

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

SHAPES = {
    "few heads": Case("few heads", T=100, HK=1, HV=2, K=128, V=128, state=torch.float32),
    "many heads": Case("many heads", B=3, T=50, HK=4, HV=12, K=40, V=72, state=torch.float32),
    "decode": Case("decode", B=9, T=1, HK=2, HV=4, K=128, V=128, state=torch.float32),
    "wide": Case("wide", T=40, HK=1, HV=1, K=256, V=256, state=torch.float32),
}


def result(function: Callable[..., Any], args: dict[str, Any]) -> tuple[Tensor, Tensor]:
    out, state = function(**args)
    return out, state


def assert_same_results(
    got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor], what: str = ""
) -> None:
    assert_same_bits(got[0], want[0], f"output {what}")
    assert_same_bits(got[1], want[1], f"state {what}")


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", dtypes(torch.float32, torch.bfloat16))
@pytest.mark.parametrize("shape", SHAPES)
def test_two_runs_and_any_number_of_threads(
    shape: str,
    dtype: torch.dtype,
    function: Callable[..., Any],
    threads: Callable[[int], None],
    isa: str,
) -> None:
    args = SHAPES[shape].inputs(dtype)
    threads(1)
    want = result(function, args)
    for n in (1, 2, 3, 7, 2):
        threads(n)
        assert_same_results(result(function, args), want, f"with {n} threads")


@pytest.mark.parametrize("dtype", dtypes(torch.float32, torch.bfloat16, torch.float16))
def test_outputs_that_no_cache_holds_have_the_same_bits(dtype: torch.dtype, isa: str) -> None:
    """Over 8 MB they are written past the caches; V = 88 leaves half a vector of 16-bit numbers."""
    sequences = (8 << 20) // (27 * 8 * 88 * dtype.itemsize) + 2
    args = Case("large", B=sequences, T=27, HK=4, HV=8, K=4, V=88).inputs(dtype)
    out, state = result(deltanet_ext.chunk_gated_delta_rule, args)
    assert out.numel() * out.element_size() > 8 << 20
    for n in (0, sequences // 2, sequences - 1):
        alone = {k: v[n : n + 1] if k in PER_TOKEN else v for k, v in args.items()}
        want = result(deltanet_ext.chunk_gated_delta_rule, alone)
        assert_same_results((out[n : n + 1], state[n : n + 1]), want, f"of sequence {n}")


@pytest.mark.parametrize("dtype", dtypes(torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("channels", [64, 192, 200])
def test_so_do_those_of_the_layer(channels: int, dtype: torch.dtype, isa: str) -> None:
    rows = (8 << 20) // (channels * dtype.itemsize) + 70
    x = torch.randn(rows, channels, dtype=dtype)
    weight = torch.randn(channels, 4, dtype=dtype)
    conv, norm = deltanet_ext.causal_conv1d_fn, deltanet_ext.gated_rms_norm
    convolved = conv(x.T[None], weight, activation="silu")[0].T
    normed = norm(x, x.flip(0), weight[:, 0])
    assert convolved.numel() * dtype.itemsize > 8 << 20
    for first in (3, rows // 2, rows - 40):
        piece = slice(first, first + 40)
        alone = conv(x[first - 3 : first + 40].T[None], weight, activation="silu")[0, :, 3:].T
        assert_same_bits(convolved[piece], alone, f"convolution from row {first}")
        alone = norm(x[piece].clone(), x.flip(0)[piece].clone(), weight[:, 0])
        assert_same_bits(normed[piece], alone, f"norm from row {first}")


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", dtypes(torch.float32, torch.bfloat16))
@pytest.mark.parametrize(
    "case",
    [
        Case("alone", B=5, T=70, HK=2, HV=4, K=128, V=128, state=torch.float32),
        Case("alone, odd", B=13, T=19, HK=1, HV=3, K=33, V=100, state=torch.float32),
        Case("alone, decode", B=40, T=1, HK=2, HV=4, K=64, V=64, state=torch.float32),
    ],
    ids=str,
)
def test_alone_in_a_batch_and_packed(
    case: Case, dtype: torch.dtype, function: Callable[..., Any], isa: str
) -> None:
    """One sequence per row, together; packed along T; and each on its own."""
    args = case.inputs(dtype)
    batch = result(function, args)
    packed = dict(args)
    for name in PER_TOKEN:
        packed[name] = args[name].flatten(0, 1)[None]
    packed["cu_seqlens"] = torch.arange(0, case.B * case.T + 1, case.T)
    out, states = result(function, packed)
    assert_same_results((out.view_as(batch[0]), states), batch, "packed")
    for b in range(case.B):
        one = dict(args)
        for name in (*PER_TOKEN, "initial_state"):
            one[name] = args[name][b : b + 1]
        alone = result(function, one)
        assert_same_results(alone, (batch[0][b : b + 1], batch[1][b : b + 1]), f"of row {b}")


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    "cu",
    [(0, 17, 50, 64), (0, 0, 64), (0, 64, 64, 100), (0, 1, 2, 3, 20, 36, 70), (0, 3, 90)],
    ids=str,
)
def test_packed_sequences_of_different_lengths(
    cu: tuple[int, ...], index: torch.dtype, function: Callable[..., Any]
) -> None:
    case = Case("lengths", T=cu[-1] + 9, HK=2, HV=6, K=48, V=40, cu=cu, state=torch.float32)
    args = case.inputs()
    args["cu_seqlens"] = args["cu_seqlens"].to(index)
    out, states = result(function, args)
    for n, (start, stop) in enumerate(pairwise(cu)):
        one = {name: x for name, x in args.items() if name != "cu_seqlens"}
        for name in PER_TOKEN:
            one[name] = args[name][:, start:stop]
        one["initial_state"] = args["initial_state"][n : n + 1]
        alone = result(function, one)
        assert_same_results(alone, (out[:, start:stop], states[n : n + 1]), f"of sequence {n}")
    assert_same_bits(out[:, cu[-1] :], torch.zeros(1, 9, 6, 40), "tail")


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("T", [0, 1, 5, 70])
def test_no_state_is_a_zero_state(
    T: int, dtype: torch.dtype, function: Callable[..., Any], isa: str
) -> None:
    args = Case(f"no state {T}", B=2, T=T, HK=1, HV=3, K=33, V=20).inputs(dtype)
    want = result(function, args)
    for state_dtype in DTYPES:
        zeros = torch.zeros(2, 3, 33, 20, dtype=state_dtype)
        assert_same_results(result(function, {**args, "initial_state": zeros}), want)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_v_first_is_the_transpose(dtype: torch.dtype, function: Callable[..., Any]) -> None:
    args = Case("v first", B=2, T=50, HK=1, HV=3, K=33, V=20, state=torch.float32).inputs(dtype)
    out, state = result(function, args)
    swapped = args["initial_state"].mT.contiguous()
    v_first = result(function, {**args, "initial_state": swapped, "state_v_first": True})
    assert_same_results(v_first, (out, state.mT.contiguous()))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_no_gate_is_a_zero_gate_and_no_beta_is_one(function: Callable[..., Any]) -> None:
    args = Case("none", T=70, HK=1, HV=3, state=torch.float32).inputs()
    zeros, ones = torch.zeros_like(args["g"]), torch.ones_like(args["g"])
    want = result(function, {**args, "g": zeros, "beta": ones})
    assert_same_results(result(function, {**args, "g": None, "beta": None}), want)
    assert_same_results(result(function, {**args, "g": -zeros, "beta": ones}), want)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_transition_and_inverse(
    dtype: torch.dtype, threads: Callable[[int], None], isa: str
) -> None:
    case = Case("maps", B=3, T=50, HK=2, HV=4, K=33, V=40)
    args = case.inputs(dtype)
    rule = {name: args[name] for name in ("key", "value", "g", "beta", "use_qk_l2norm_in_kernel")}
    L = torch.randn(5, 3, 40, 40, dtype=torch.float64).mul(0.1).to(dtype)
    threads(1)
    want = deltanet_ext.chunk_transition(**rule)
    inverse = deltanet_ext.unit_lower_triangular_inverse(L)
    for n in (1, 2, 5):
        threads(n)
        assert_same_results(deltanet_ext.chunk_transition(**rule), want, f"with {n} threads")
        assert_same_bits(deltanet_ext.unit_lower_triangular_inverse(L), inverse)
    for b in range(3):
        one = {n: x[b : b + 1] if isinstance(x, Tensor) else x for n, x in rule.items()}
        M, U = deltanet_ext.chunk_transition(**one)
        assert_same_results((M, U), (want[0][b : b + 1], want[1][b : b + 1]), f"of row {b}")
    assert_same_bits(deltanet_ext.unit_lower_triangular_inverse(L[2, 1]), inverse[2, 1])
