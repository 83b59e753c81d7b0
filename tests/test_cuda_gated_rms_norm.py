# SPDX-License-Identifier: Apache-2.0
"""The gated norm on CUDA, on the emulator: cases and yardsticks of test_gated_rms_norm.py, and that
no order of threads changes a bit."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import pytest
import test_gated_rms_norm as shared
import torch
from test_gated_rms_norm import SHAPES, grad_of, gradients, inputs
from torch import Tensor

import emulated
from cases import name_of
from closeness import assert_same_bits
from deltanet_ext import gated_rms_norm

if reason := emulated.why_not():
    pytest.skip(f"emulated CUDA operators: {reason}", allow_module_level=True)

pytestmark = pytest.mark.slow  # the first run compiles for minutes

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
dtypes = pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=name_of)

# A warp has a row up to 1024 columns, a block above; up to 64 rows make one sum.
MORE = [(65, 132), (130, 128), (9, 255), (66, 260), (17, 1024), (9, 1025), (17, 2052), (2, 8192)]


@pytest.fixture(autouse=True)
def on_the_emulator(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test with a schedule of its own: in order, in reverse, or one of many random ones."""
    with emulated.path(), emulated.schedule(zlib.crc32(request.node.name.encode()) % 50):
        yield


@dtypes
@pytest.mark.parametrize("shape", [*SHAPES, *MORE], ids=str)
def test_is_as_exact_as_plain_fp32(
    shape: tuple[int, ...], dtype: torch.dtype, poison: None
) -> None:
    shared.test_is_as_exact_as_plain_fp32(shape, dtype, "", None)


@dtypes
@pytest.mark.parametrize(
    "shape", [*(s for s in SHAPES if s not in ((5, 1), (0, 128))), *MORE, (1000, 16)], ids=str
)
def test_gradients(shape: tuple[int, ...], dtype: torch.dtype, poison: None) -> None:
    shared.test_gradients(shape, dtype, "", None)


def test_gradients_without_rows(poison: None) -> None:
    args = inputs(0, 128)
    for got, x in zip(gradients(gated_rms_norm, args, grad_of(args[0])), args, strict=True):
        assert_same_bits(got, torch.zeros_like(x))


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=name_of)
def test_sixteen_bits_are_rounded_once(dtype: torch.dtype) -> None:
    shared.test_sixteen_bits_are_rounded_once(dtype, "")


def test_gates_and_weights_of_fp32_with_16_bits() -> None:
    shared.test_gates_and_weights_of_fp32_with_16_bits()


@dtypes
def test_special_values(dtype: torch.dtype) -> None:
    shared.test_special_values(dtype, "")


@pytest.mark.parametrize("eps", [0.0, 1e-6, 1.0])
def test_eps(eps: float) -> None:
    shared.test_eps(eps)


@dtypes
def test_views(dtype: torch.dtype, poison: None) -> None:
    shared.test_views(dtype, "", None)


@pytest.mark.parametrize("wanted", [0, 1, 2])
def test_each_gradient_alone(wanted: int, poison: None) -> None:
    shared.test_each_gradient_alone(wanted, None)


def test_second_derivatives_are_refused() -> None:
    shared.test_what_is_not_built_is_refused()


@pytest.mark.parametrize("columns", [96, 1028])
def test_a_row_alone_is_the_row_in_a_batch(columns: int) -> None:
    x, gate, weight = inputs(70, columns)
    out = gated_rms_norm(x, gate, weight)
    for i in (0, 8, 63, 69):
        assert_same_bits(gated_rms_norm(x[i], gate[i], weight), out[i], f"row {i}")


@pytest.mark.parametrize("columns", [128, 200, 600, 1100])
def test_no_schedule_changes_a_bit(columns: int) -> None:
    args = inputs(75, columns)
    results = []
    for seed in (0, 1, 2, 77):
        with emulated.schedule(seed):
            results.append([gated_rms_norm(*args), *gradients(gated_rms_norm, args, args[0])])
    for other in results[1:]:
        for got, want in zip(other, results[0], strict=True):
            assert_same_bits(got, want)


def test_a_captured_graph() -> None:
    x, gate, weight = inputs(20, 40)

    def calls() -> list[Tensor]:
        out = emulated.call("gated_rms_norm_forward", x, gate, weight, 1e-6)
        return [out, *emulated.call("gated_rms_norm_backward", x, x, gate, weight, 1e-6, 7)]

    first, second = torch.randn(2, *x.shape, generator=torch.Generator().manual_seed(1))
    x.copy_(first)
    want = [calls()]
    x.copy_(second)
    want.append(calls())
    with emulated.capture() as graph:
        got = calls()
    for contents, expected in zip((first, second), want, strict=True):
        x.copy_(contents)
        graph.replay()
        for a, b in zip(got, expected, strict=True):
            assert_same_bits(a, b)


# ---- errors --------------------------------------------------------------------------------------


def first_line(function: object, *args: object) -> str:
    with pytest.raises(RuntimeError) as found:
        function(*args)  # type: ignore[operator]
    # Before the message stands where it comes from.
    return str(found.value).splitlines()[0].split(", ", 2)[-1]


def test_operators_check_as_those_of_the_cpu_do() -> None:
    x, weight = torch.zeros(3, 8), torch.zeros(8)
    cpu = torch.ops.deltanet_ext
    for name, args in (
        ("forward", (x, weight, weight, 1e-6)),
        ("forward", (x, x, x, 1e-6)),
        ("forward", (torch.zeros(3, 0), torch.zeros(3, 0), torch.zeros(0), 1e-6)),
        ("forward", (x, x, weight.double(), 1e-6)),
        ("backward", (x[1:], x, x, weight, 1e-6, 7)),
        ("backward", (x.bfloat16(), x, x, weight, 1e-6, 7)),
    ):
        operator = f"gated_rms_norm_{name}"
        said = first_line(getattr(cpu, operator), *args)
        assert said == first_line(emulated.call, operator, *args)
        assert "gated_rms_norm" in said


def test_what_only_the_cpu_takes_is_refused() -> None:
    def forward(x: Tensor) -> str:
        weight = torch.zeros(x.shape[-1], dtype=x.dtype)
        return first_line(emulated.call, "gated_rms_norm_forward", x, x, weight, 1e-6)

    assert "x is float64; supported on CUDA: float32" in forward(torch.zeros(3, 8).double())
    assert "x has 8193 columns; supported on CUDA: 1 to 8192" in forward(torch.zeros(1, 8193))
