# SPDX-License-Identifier: Apache-2.0
"""The comparisons themselves: each must fail on a wrong result, and say why."""

import pytest
import torch
from torch import Tensor

import deltanet_ext
from cases import assert_as_exact_as_the_recurrence, case_named, expected
from closeness import (
    assert_close,
    assert_no_worse,
    assert_same_bits,
    assert_same_special_values,
    rmse_ratio,
)


def right_and_wrong() -> tuple[Tensor, Tensor]:
    want = torch.linspace(-1, 1, 60, dtype=torch.float64).reshape(3, 4, 5)
    return want, want.float()


def test_rmse_ratio() -> None:
    assert rmse_ratio(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.0])) == 0
    assert rmse_ratio(torch.tensor([3.0, 5.0]), torch.tensor([3.0, 4.0])) == pytest.approx(0.2)
    assert rmse_ratio(torch.zeros(2), torch.zeros(2)) == 0
    assert rmse_ratio(torch.tensor([0.0, 1e-30]), torch.zeros(2)) == float("inf")
    assert rmse_ratio(torch.zeros(0), torch.zeros(0)) == 0


def test_passes_within_the_floor_or_the_baseline() -> None:
    want, got = right_and_wrong()
    assert_close(got, want, 1e-6)
    assert_no_worse(got + 1e-3, want, got.double() + 1e-3, floor=1e-6)


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda x: x + 1e-3, r"RMSE ratio .* is above .*worst at \[\d, \d, \d\]"),
        (lambda x: -x, "RMSE ratio 2.00e"),
        (lambda x: x.where(x != x[1, 2, 3], float("nan")), r"NaN at 1 places, expected at 0"),
        (lambda x: x.where(x != x[1, 2, 3], float("inf")), r"inf at 1 .* \[1, 2, 3\]: inf"),
        (lambda x: x[..., :4], "shape"),
        (lambda x: torch.zeros_like(x), "RMSE ratio 1.00e"),
    ],
)
def test_fails_and_says_why(spoil, text: str) -> None:  # type: ignore[no-untyped-def]
    want, got = right_and_wrong()
    with pytest.raises(AssertionError, match=text):
        assert_close(spoil(got), want, 1e-6)


def test_a_small_head_cannot_hide() -> None:
    want = torch.ones(1, 7, 2, 3, dtype=torch.float64)
    want[:, :, 1] *= 1e-6
    got = want.clone()
    got[:, :, 1] *= 2
    assert_no_worse(got, want, None, floor=1e-5)
    with pytest.raises(AssertionError, match=r"RMSE ratio 1.00e\+00 at \{0: 0, 2: 1\}"):
        assert_no_worse(got, want, None, floor=1e-5, head_axes=(0, 2))


def test_nan_where_it_is_expected() -> None:
    want = torch.tensor([1.0, float("nan")], dtype=torch.float64)
    assert_same_special_values(want.float(), want)
    with pytest.raises(AssertionError, match="NaN at 0 places, expected at 1"):
        assert_same_special_values(torch.ones(2), want)


def test_overflow_of_a_narrow_dtype_is_expected() -> None:
    want = torch.tensor([1.0, 1e5], dtype=torch.float64)
    assert_close(want.half(), want, 1e-3)
    with pytest.raises(AssertionError, match="inf at 0 places, expected at 1"):
        assert_close(torch.tensor([1.0, 65504.0]).half(), want, 1.0)


def test_bits() -> None:
    x = torch.tensor([1.0, float("nan"), 0.0])
    assert_same_bits(x.clone(), x)
    with pytest.raises(AssertionError, match=r"1 of 3 values differ .* \[2\]: -0.0, expected 0.0"):
        assert_same_bits(torch.tensor([1.0, float("nan"), -0.0]), x)
    with pytest.raises(AssertionError, match="float64"):
        assert_same_bits(x.double(), x)


def _scale_head(x: Tensor, head: int, factor: float) -> Tensor:
    factors = torch.ones(x.shape[2])
    factors[head] = factor
    return x * factors[:, None]


MUTATIONS = {
    "one head one bf16 step off": lambda out, S: (_scale_head(out, 1, 1 + 2**-7), S),
    "last token missing": lambda out, S: (torch.cat([out[:, :-1], 0 * out[:, -1:]], 1), S),
    "heads swapped": lambda out, S: (out.flip(2).contiguous(), S),
    "one NaN": lambda out, S: (out.where(out != out[0, 3, 1, 5], float("nan")), S),
    "state transposed": lambda out, S: (out, S.mT.contiguous()),
    "state decayed once too often": lambda out, S: (out, S * 0.9999),
    "state not contiguous": lambda out, S: (out, S.mT.contiguous().mT),
    "state in bf16": lambda out, S: (out, S.bfloat16()),
    "state went through bf16": lambda out, S: (out, S.bfloat16().float()),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_accuracy_check_sees(name: str) -> None:
    case = case_named("T=130")
    got = deltanet_ext.chunk_gated_delta_rule(**case.inputs())
    want = expected(case, torch.float32)
    assert_as_exact_as_the_recurrence(got, want, torch.float32)
    with pytest.raises(AssertionError):
        assert_as_exact_as_the_recurrence(MUTATIONS[name](*got), want, torch.float32)
