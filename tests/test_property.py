# SPDX-License-Identifier: Apache-2.0
"""Shapes and options that nobody thought of: drawn by hypothesis, the same ones every time."""

from typing import Any

import pytest
import torch

import deltanet_ext
from cases import (
    DTYPES,
    Case,
    assert_as_exact_as_the_recurrence,
    expected,
    name_of,
)
from closeness import assert_close, assert_same_bits
from deltanet_ext import reference

hypothesis = pytest.importorskip("hypothesis", reason="hypothesis is not installed")
given, settings, st = hypothesis.given, hypothesis.settings, hypothesis.strategies

ORDINARY_GATES = ["model", "weak", "none", "zero", "strong", "drop", "positive", "some -inf"]
ORDINARY_BETAS = ["sigmoid", "none", "0", "1", "0 to 2"]


@st.composite
def packings(draw: st.DrawFn) -> tuple[int, tuple[int, ...] | None]:
    """T and cu_seqlens: empty sequences and tails included."""
    if draw(st.booleans()):
        return draw(st.integers(0, 80)), None
    lengths = draw(st.lists(st.integers(0, 25), max_size=5))
    bounds = [0]
    for length in lengths:
        bounds.append(bounds[-1] + length)
    return bounds[-1] + draw(st.integers(0, 20)), tuple(bounds)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Case, torch.dtype]:
    T, cu = draw(packings())
    key_heads, group = draw(st.integers(1, 3)), draw(st.sampled_from([1, 1, 2, 3, 4]))
    raw_beta = draw(st.booleans())
    fields: dict[str, Any] = {
        "B": 1 if cu is not None else draw(st.integers(0, 3)),
        "T": T,
        "HK": key_heads,
        "HV": key_heads * group,
        "K": draw(st.integers(1, 70)),
        "V": draw(st.integers(1, 70)),
        "g": draw(st.sampled_from(ORDINARY_GATES)),
        "beta": draw(st.sampled_from(ORDINARY_BETAS)),
        "state": draw(st.sampled_from([None, *DTYPES])),
        "cu": cu,
        "narrow_gates": draw(st.booleans()),
        "scale": draw(st.sampled_from([None, None, 1.0, -0.3])),
        "state_v_first": draw(st.booleans()),
        "raw_gate": draw(st.booleans()),
        "raw_beta": raw_beta,
        "neg_eigval": raw_beta and draw(st.booleans()),
    }
    dtype = draw(st.sampled_from(DTYPES))
    name = f"{name_of(dtype)} " + " ".join(f"{k}={v}" for k, v in fields.items())
    return Case(name, **fields), dtype


@given(cases())
@settings(max_examples=150)
def test_rule(drawn: tuple[Case, torch.dtype]) -> None:
    case, dtype = drawn
    args, want = case.inputs(dtype), expected(case, dtype)
    for function in (deltanet_ext.chunk_gated_delta_rule, deltanet_ext.recurrent_gated_delta_rule):
        assert_as_exact_as_the_recurrence(function(**args), want, dtype)


@given(cases(), st.data())
def test_cut_anywhere(drawn: tuple[Case, torch.dtype], data: st.DataObject) -> None:
    case, dtype = drawn
    if case.cu is not None:
        return
    args, want = case.inputs(dtype), expected(case, dtype)
    cut = data.draw(st.integers(0, case.T))
    functions = [deltanet_ext.chunk_gated_delta_rule, deltanet_ext.recurrent_gated_delta_rule]
    first, second = (data.draw(st.sampled_from(functions)) for _ in range(2))
    per_token = ("query", "key", "value", "g", "beta")
    head = {n: x if n not in per_token or x is None else x[:, :cut] for n, x in args.items()}
    tail = {n: x if n not in per_token or x is None else x[:, cut:] for n, x in args.items()}
    out, state = first(**head)
    more, last = second(**{**tail, "initial_state": state})
    assert_as_exact_as_the_recurrence((torch.cat([out, more], 1), last), want, dtype)


@given(cases())
def test_strides_change_nothing(drawn: tuple[Case, torch.dtype]) -> None:
    case, dtype = drawn
    args = case.inputs(dtype)
    views = dict(args)
    for n, x in args.items():
        if isinstance(x, torch.Tensor) and x.dim() > 1:
            axes = tuple(reversed(range(x.dim())))
            views[n] = x.permute(axes).contiguous().permute(axes)
    for function in (deltanet_ext.chunk_gated_delta_rule, deltanet_ext.recurrent_gated_delta_rule):
        got, want = function(**views), function(**args)
        assert_same_bits(got[0], want[0])
        assert_same_bits(got[1], want[1])


@given(
    C=st.integers(1, 128),
    batch=st.lists(st.integers(0, 4), max_size=3),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1000),
)
def test_inverse(C: int, batch: list[int], dtype: torch.dtype, seed: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    L = (torch.randn(*batch, C, C, generator=gen) / C).to(dtype)
    bound = {torch.float32: 1e-6, torch.bfloat16: 3e-3, torch.float16: 4e-4, torch.float64: 1e-14}
    got = deltanet_ext.unit_lower_triangular_inverse(L)
    assert_close(got, reference.inverse(L), bound[dtype])
