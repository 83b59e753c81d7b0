# SPDX-License-Identifier: Apache-2.0
"""Shapes and draws of flash-linear-attention's own tests, at a tenth of its tolerances, in fp32.

Its error ratio is RMS(error) / RMS(reference); it allows 0.002 (recurrent) and 0.005 (chunk, fp16)
for output and state. The reference here is the fp64 recurrence.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

import deltanet_ext
from cases import recurrence
from closeness import assert_close
from deltanet_ext import reference

RECURRENT, CHUNK = 0.002 / 10, 0.005 / 10


def draw(
    B: int, T: int, H: int, HV: int, D: int, normalizer: float, mask_p: float = 0.0, N: int = 0
) -> dict[str, Any]:
    gen = torch.Generator().manual_seed(42)

    def rand(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=gen)

    g = logsigmoid(rand(B, T, HV)) / normalizer
    return {
        "query": rand(B, T, H, D),
        "key": rand(B, T, H, D),
        "value": rand(B, T, HV, D),
        "g": g * (rand(B, T, HV) > mask_p),
        "beta": rand(B, T, HV).sigmoid(),
        "initial_state": torch.randn(N or B, HV, D, D, generator=gen),
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
    }


def check(function: Any, args: dict[str, Any], bound: float) -> None:
    out, state = function(**args)
    want_out, want_state = recurrence(args)
    assert_close(out, want_out, bound, "output")
    assert_close(state, want_state, bound, "state")


# B, T, H, HV, D, scale, gate normalizer
@pytest.mark.parametrize(
    "shape",
    [
        (1, 63, 1, 1, 64, 1.0, 1.0),
        (2, 500, 4, 4, 60, 1.0, 1.0),
        pytest.param((2, 1000, 2, 8, 128, 1.0, 0.1), marks=pytest.mark.slow),
        pytest.param((3, 1024, 2, 2, 128, 0.1, 1.0), marks=pytest.mark.slow),
        pytest.param((4, 1024, 3, 3, 128, 1.0, 10.0), marks=pytest.mark.slow),
        pytest.param((4, 2048, 4, 4, 64, 0.1, 1.0), marks=pytest.mark.slow),
        pytest.param((2, 1024, 4, 8, 128, 1.0, 10.0), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_fused_recurrent(shape: tuple[Any, ...]) -> None:
    *sizes, scale, normalizer = shape
    args = draw(*sizes, normalizer)
    check(deltanet_ext.recurrent_gated_delta_rule, {**args, "scale": scale}, RECURRENT)


# B, T, H, HV, D, scale, gate normalizer, mask_p, l2norm in the kernel
@pytest.mark.parametrize(
    "shape",
    [
        (2, 75, 4, 4, 64, 1.0, 0.01, 0.0, False),
        (2, 500, 3, 3, 60, 1.0, 1.0, 0.0, False),
        (2, 256, 2, 8, 64, 1.0, 1.0, 0.0, True),
        pytest.param((2, 1000, 3, 6, 64, 0.1, 1.0, 0.5, False), marks=pytest.mark.slow),
        pytest.param((3, 1024, 4, 4, 100, 1.0, 0.1, 0.0, False), marks=pytest.mark.slow),
        pytest.param((4, 1024, 4, 4, 128, 0.1, 1.0, 0.0, False), marks=pytest.mark.slow),
        pytest.param((4, 1024, 4, 4, 128, 0.1, 1.0, 0.0, True), marks=pytest.mark.slow),
        pytest.param((2, 1500, 4, 4, 128, 0.1, 10.0, 0.0, False), marks=pytest.mark.slow),
        pytest.param((4, 2048, 8, 8, 64, 0.1, 1.0, 1.0, False), marks=pytest.mark.slow),
        (2, 512, 2, 4, 64, 1.0, 10.0, 1.0, True),
    ],
    ids=str,
)
def test_chunk(shape: tuple[Any, ...]) -> None:
    *sizes, scale, normalizer, mask_p, in_kernel = shape
    args = {**draw(*sizes, normalizer, mask_p), "scale": scale}
    args["initial_state"] = torch.zeros_like(args["initial_state"])
    if not in_kernel:
        args["key"] = normalize(args["key"], dim=-1)
        args["query"] = normalize(args["query"], dim=-1)
        args["use_qk_l2norm_in_kernel"] = False
    check(deltanet_ext.chunk_gated_delta_rule, args, CHUNK)


@pytest.mark.parametrize("chunk_size", [16, 32, 64])
def test_chunk_with_chunk_size(chunk_size: int) -> None:
    args = {**draw(1, 64, 2, 4, 32, 1.0), "chunk_size": chunk_size}
    out, state = deltanet_ext.chunk_gated_delta_rule(**args)
    args.pop("chunk_size")
    want_out, want_state = recurrence(args)
    assert_close(out, want_out, CHUNK)
    assert_close(state, want_state, CHUNK)


# H, HV, D, mask_p, cu_seqlens
@pytest.mark.parametrize(
    "shape",
    [
        (2, 2, 60, 0.0, (0, 15)),
        (2, 8, 64, 0.5, (0, 256, 500, 1000)),
        pytest.param((4, 4, 64, 0.5, (0, 256, 500, 1000)), marks=pytest.mark.slow),
        pytest.param((4, 8, 100, 0.0, (0, 15, 100, 300, 1200, 2000)), marks=pytest.mark.slow),
        pytest.param((2, 2, 128, 0.5, (0, 8192)), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_chunk_varlen(shape: tuple[Any, ...]) -> None:
    H, HV, D, mask_p, cu = shape
    args = draw(1, cu[-1], H, HV, D, 1.0, mask_p, N=len(cu) - 1)
    args["initial_state"] = args["initial_state"].half()
    check(deltanet_ext.chunk_gated_delta_rule, {**args, "cu_seqlens": torch.tensor(cu)}, CHUNK)


@pytest.mark.parametrize("cu", [None, (0, 15, 100, 300)], ids=str)
def test_gate_in_kernel(cu: tuple[int, ...] | None) -> None:
    args = draw(1, 300, 2, 4, 60, 1.0, N=3 if cu else 1)
    gen = torch.Generator().manual_seed(1)
    args["g"] = torch.randn(1, 300, 4, generator=gen)
    args["A_log"] = torch.log(torch.empty(4).uniform_(1, 16, generator=gen))
    args["dt_bias"] = torch.randn(4, generator=gen)
    args["use_gate_in_kernel"] = True
    if cu:
        args["cu_seqlens"] = torch.tensor(cu)
    for function in (deltanet_ext.chunk_gated_delta_rule, deltanet_ext.recurrent_gated_delta_rule):
        check(function, args, RECURRENT)


@pytest.mark.parametrize("neg_eigval", [False, True])
def test_beta_sigmoid(neg_eigval: bool) -> None:
    args = draw(2, 256, 2, 4, 64, 1.0)
    args["beta"] = torch.randn(2, 256, 4, generator=torch.Generator().manual_seed(1))
    args |= {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": neg_eigval}
    check(deltanet_ext.chunk_gated_delta_rule, args, CHUNK)


@pytest.mark.parametrize("size", [16, 32, 64])
def test_solve_tril(size: int) -> None:
    """Its tolerance is 1e-4."""
    gen = torch.Generator().manual_seed(0)
    keys = normalize(torch.randn(4, 8, size, 64, generator=gen), dim=-1)
    beta = torch.rand(4, 8, size, 1, generator=gen)
    L = (beta * (keys @ keys.mT)).tril(-1)
    got = deltanet_ext.unit_lower_triangular_inverse(L)
    assert_close(got, reference.inverse(L), 1e-5)
    assert math.isfinite(float(got.sum()))
