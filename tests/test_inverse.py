# SPDX-License-Identifier: Apache-2.0
"""unit_lower_triangular_inverse: the accuracy of forward substitution, and what it reads."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

import deltanet_ext
from cases import DTYPES, arithmetic, name_of
from closeness import assert_close, assert_same_bits, rmse_ratio
from deltanet_ext import reference

inverse = deltanet_ext.unit_lower_triangular_inverse
SIZES = [1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 100, 127, 128]


def system(keys: Tensor, beta: Tensor) -> Tensor:
    """L of equation (3) without decay, in fp32: b_i (k_i . k_j) below the diagonal."""
    return (beta[..., None] * (keys @ keys.mT)).tril(-1).float()


def draw(kind: str, batch: int = 32, C: int = 64, K: int = 128) -> Tensor:
    """The rows of the table in docs/algorithm.md; fp64 up to the rounding of L."""
    gen = torch.Generator().manual_seed(7)
    keys = torch.randn(batch, C, K, generator=gen, dtype=torch.float64)
    beta = torch.ones(batch, C, dtype=torch.float64)
    if kind == "random keys, sigmoid beta":
        beta = torch.randn(batch, C, generator=gen, dtype=torch.float64).sigmoid()
    else:
        keys = keys[:, :1].expand(batch, C, K)
    keys = torch.nn.functional.normalize(keys, dim=-1)
    if kind == "identical keys, beta 1.999":
        beta = 1.999 * beta
    if kind == "identical keys, norm 2, beta 1":
        keys = 2 * keys
    return system(keys, beta)


def substitution_in_numpy(L: Tensor) -> Tensor:
    """Forward substitution in fp32, one operation at a time, no fused multiply-add."""
    rows = L.numpy()
    T = np.broadcast_to(np.eye(rows.shape[-1], dtype=np.float32), rows.shape).copy()
    for i in range(1, rows.shape[-1]):
        for j in range(i):
            T[..., i, :] -= rows[..., i, j, None] * T[..., j, :]
    return torch.from_numpy(T)


TABLE = {
    "random keys, sigmoid beta": 2e-8,
    "identical keys, beta 1": 2e-8,
    "identical keys, beta 1.999": 3e-7,
    "identical keys, norm 2, beta 1": 2e-6,
}


@pytest.mark.parametrize("kind", TABLE)
def test_accuracy_of_forward_substitution(kind: str, isa: str) -> None:
    """Twice the published figures at most, and no worse than substitution done by hand."""
    L = draw(kind)
    want = reference.inverse(L)
    got = inverse(L)
    by_hand = rmse_ratio(substitution_in_numpy(L), want)
    assert_close(got, want, 2 * TABLE[kind], kind)
    assert rmse_ratio(got, want) <= max(1.2 * by_hand, 1e-8)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("C", SIZES)
def test_every_size(C: int, dtype: torch.dtype, isa: str, poison: None) -> None:
    gen = torch.Generator().manual_seed(C)
    L = (torch.randn(3, 2, C, C, generator=gen) / C**0.5).to(dtype)
    got, want = inverse(L), reference.inverse(L)
    assert got.dtype == dtype
    assert got.is_contiguous()
    exact_in = arithmetic(dtype)
    rounding = {
        torch.float32: 2e-6,
        torch.bfloat16: 3e-3,
        torch.float16: 4e-4,
        torch.float64: 1e-14,
    }
    assert_close(got, want, rounding[dtype])
    assert_same_bits(got.triu(1), torch.zeros_like(got))
    assert (got.diagonal(dim1=-2, dim2=-1) == 1).all()
    if dtype != exact_in:  # computed in fp32 and rounded once
        assert_same_bits(got, inverse(L.to(exact_in)).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("garbage", [7.0, 1e30, float("inf"), float("nan")])
def test_reads_only_below_the_diagonal(garbage: float, dtype: torch.dtype, isa: str) -> None:
    L = (0.1 * torch.randn(4, 33, 33)).to(dtype)
    above = torch.ones(33, 33, dtype=torch.bool).triu()
    want = inverse(L.masked_fill(above, 0.0))
    got = inverse(torch.where(above, garbage, L).to(dtype))
    assert_same_bits(got, want)
    assert got.isfinite().all()


@pytest.mark.parametrize(
    "shape", [(5, 5), (1, 5, 5), (2, 3, 4, 5, 5), (0, 5, 5), (2, 0, 3, 5, 5), (0, 1, 1)], ids=str
)
def test_batch_shapes(shape: tuple[int, ...]) -> None:
    L = torch.randn(shape)
    got = inverse(L)
    assert got.shape == shape
    assert_close(got, reference.inverse(L), 1e-5)


def test_each_matrix_is_on_its_own() -> None:
    L = 0.2 * torch.randn(6, 20, 20)
    want = inverse(L)
    L[3] = float("nan")
    got = inverse(L)
    for n in (0, 1, 2, 4, 5):
        assert_same_bits(got[n], want[n])


def test_a_row_never_reaches_an_earlier_one() -> None:
    L = 0.2 * torch.randn(40, 40)
    want = inverse(L)
    for row in (1, 15, 16, 17, 39):
        spoiled = L.clone()
        spoiled[row] = float("nan")
        assert_same_bits(inverse(spoiled)[:row], want[:row])


@pytest.mark.parametrize("size", [3e4, 1e30])
def test_huge_entries_stay_where_they_belong(size: float) -> None:
    """T of one nonzero entry is exact, whatever its size."""
    L = torch.zeros(20, 20)
    L[13, 4] = size
    want = torch.eye(20)
    want[13, 4] = -size
    assert_same_bits(inverse(L), want)


def test_many_matrices(threads: Callable[[int], None]) -> None:
    L = 0.2 * torch.randn(1000, 16, 16)
    threads(1)
    want = inverse(L)
    threads(2)
    assert_same_bits(inverse(L), want)
    assert_close(want, reference.inverse(L), 1e-6)


def test_the_input_is_not_written() -> None:
    L = torch.randn(3, 20, 20)
    before = L.clone()
    got = inverse(L)
    assert_same_bits(L, before)
    assert got.data_ptr() != L.data_ptr()
