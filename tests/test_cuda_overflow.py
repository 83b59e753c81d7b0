# SPDX-License-Identifier: Apache-2.0
"""Rows whose norm overflows under l2norm, on the emulated kernels: rows of zeros, never NaN."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

import deltanet_ext
import emulated
from cases import Case
from closeness import assert_close

if reason := emulated.why_not():
    pytest.skip(f"emulated CUDA operators: {reason}", allow_module_level=True)

pytestmark = pytest.mark.slow  # the first run compiles for minutes

FUNCTIONS = (deltanet_ext.chunk_gated_delta_rule, deltanet_ext.recurrent_gated_delta_rule)
# The second is cut into windows, the third into segments and run by warps with roles.
CASES = (
    Case("plain", T=70, HK=1, HV=2, K=64, V=64, l2norm=True, state=torch.float32),
    Case("windows", T=70, HK=1, HV=1, K=64, V=64, l2norm=True, state=torch.float32),
    Case("segments", T=520, HK=1, HV=1, K=128, V=64, l2norm=True, state=torch.float32),
)


def rows_of(sizes: tuple[float, float], case: Case) -> Iterator[dict[str, torch.Tensor]]:
    """Inputs in bf16 with two such rows in one chunk, of keys and queries."""
    for places in (("key", "key"), ("key", "query"), ("query", "query")):
        args = case.inputs(torch.bfloat16)
        for name, token, size in zip(places, (3, 17), sizes, strict=True):
            args[name][0, token] = size
        if case.name == "windows":
            args["g"][:, 10] = 1.5
        yield args


@pytest.mark.parametrize("sizes", [(1e20, 1e20), (1e30, 1e10), (3e38, 3e38)], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_it_is_a_row_of_zeros(function: Callable, case: Case, sizes: tuple[float, float]) -> None:
    """As on the CPU, also where its product with the state is infinite."""
    for args in rows_of(sizes, case):
        args["initial_state"] = 10 * args["initial_state"]
        want = deltanet_ext.recurrent_gated_delta_rule(**args)
        with emulated.path():
            out, state = function(**args)
        assert want[0].isfinite().all()
        assert_close(out, want[0].double(), 5e-3, "output")  # two roundings to bf16
        assert_close(state, want[1].double(), 2e-5, "state")


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("name", ["key", "query"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_an_infinity_is_not_hidden(function: Callable, name: str, bad: float) -> None:
    args = CASES[0].inputs(torch.bfloat16)
    args[name][0, 17, 0, 5] = bad
    want = deltanet_ext.recurrent_gated_delta_rule(**args)
    with emulated.path():
        out, state = function(**args)
    block = slice(16, 32)  # a chunk of the tensor cores may carry it to its own 16 tokens
    other = torch.ones(out.shape[1], dtype=torch.bool)
    other[block] = False
    assert out[0, 17].isnan().all()
    assert torch.equal(out.isnan()[:, other], want[0].isnan()[:, other])
    assert torch.equal(state.isnan(), want[1].isnan())
