# SPDX-License-Identifier: Apache-2.0
"""Comparisons that say why they fail.

Errors are measured against an fp64 result, and bounded by the error that a plain implementation
makes on the same inputs: such a bound needs no tuning when shapes or dtypes change.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# How much more one head of one sequence may be off than the whole tensor: fewer numbers, more luck.
PER_HEAD_SLACK = 2.0


def rmse_ratio(got: Tensor, want: Tensor) -> float:
    """Root mean square of the error over that of `want`. Exact zeros demand exact zeros."""
    error = (got.double() - want.double()).square().sum()
    return float(_ratios(error, want.double().square().sum()))


def assert_no_worse(
    got: Tensor,
    want: Tensor,
    baseline: Tensor | None,
    *,
    floor: float,
    factor: float = 2.0,
    head_axes: tuple[int, ...] = (),
    what: str = "result",
) -> None:
    """The error of `got` against fp64 `want` is at most max(floor, factor * error of `baseline`).

    With `head_axes` each slice along these axes is held to PER_HEAD_SLACK times its own bound as
    well, so that a small head cannot hide behind a large one.
    """
    assert want.dtype == torch.float64, f"{what}: the reference is {want.dtype}, not float64"
    assert got.shape == want.shape, f"{what}: shape {list(got.shape)}, expected {list(want.shape)}"
    assert_same_special_values(got, want, what)
    if baseline is None:
        baseline = want
    finite = torch.isfinite(want.to(got.dtype))
    x, y, z = (t.double().where(finite, 0.0) for t in (got, want, baseline))
    error, base = rmse_ratio(x, y), rmse_ratio(z, y)
    bound = max(floor, factor * base)
    assert error <= bound, (
        f"{what}: RMSE ratio {error:.2e} is above {bound:.2e} "
        f"(floor {floor:.0e}, {factor:g} x baseline {base:.2e}); {_worst(x, y)}"
    )
    if not head_axes or got.numel() == 0:
        return
    others = [axis for axis in range(got.dim()) if axis not in head_axes]
    size = y.square().sum(others)
    errors = _ratios((x - y).square().sum(others), size)
    bases = _ratios((z - y).square().sum(others), size)
    bounds = PER_HEAD_SLACK * (factor * bases).clamp_min(floor)
    if (errors <= bounds).all():
        return
    at = tuple((~(errors <= bounds)).nonzero()[0].tolist())
    raise AssertionError(
        f"{what}: RMSE ratio {errors[at]:.2e} at {dict(zip(head_axes, at, strict=True))} "
        f"is above {bounds[at]:.2e} (baseline {bases[at]:.2e} there)"
    )


def assert_close(got: Tensor, want: Tensor, bound: float, what: str = "result") -> None:
    """The error of `got` against fp64 `want` is at most `bound` (an RMSE ratio)."""
    assert_no_worse(got, want, None, floor=bound, what=what)


def assert_same_bits(got: Tensor, want: Tensor, what: str = "result") -> None:
    assert got.dtype == want.dtype, f"{what}: {got.dtype}, expected {want.dtype}"
    assert got.shape == want.shape, f"{what}: shape {list(got.shape)}, expected {list(want.shape)}"
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
    same = got.contiguous().view(integer) == want.contiguous().view(integer)
    if same.all():
        return
    where = (~same).nonzero()[0].tolist()
    raise AssertionError(
        f"{what}: {int((~same).sum())} of {same.numel()} values differ in their bits; first at "
        f"{where}: {got[tuple(where)].item()!r}, expected {want[tuple(where)].item()!r}"
    )


def assert_same_special_values(got: Tensor, want: Tensor, what: str = "result") -> None:
    """NaN and infinities are where `want`, rounded to the dtype of `got`, has them."""
    rounded = want.to(got.dtype)
    for name, test in (("NaN", torch.isnan), ("inf", torch.isposinf), ("-inf", torch.isneginf)):
        differs = test(got) != test(rounded)
        if differs.any():
            where = differs.nonzero()[0].tolist()
            raise AssertionError(
                f"{what}: {name} at {int(test(got).sum())} places, expected at "
                f"{int(test(rounded).sum())}; first difference at {where}: "
                f"{got[tuple(where)].item()!r}, expected {want[tuple(where)].item()!r}"
            )


def _ratios(error: Tensor, size: Tensor) -> Tensor:
    """Root of error / size; where size is 0: 0 without an error, else infinity."""
    exact = torch.where(error == 0, 0.0, math.inf).double()
    return torch.where(size == 0, exact, (error / size).sqrt())


def _worst(got: Tensor, want: Tensor) -> str:
    if got.numel() == 0:
        return "empty"
    where = torch.unravel_index((got - want).abs().argmax(), got.shape)
    at = tuple(int(i) for i in where)
    return f"worst at {list(at)}: {got[at].item()!r}, expected {want[at].item()!r}"
