# SPDX-License-Identifier: Apache-2.0
"""The gated norm: results and gradients against fp64 and transformers, views, bits, errors."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cases import DTYPES, dtypes, name_of
from closeness import assert_no_worse, assert_same_bits
from deltanet_ext import gated_rms_norm, reference

# RMSE ratio against fp64 that needs no excuse: the rounding of the result and a few in fp32. With
# fp64 inputs the reference rounds as often.
FLOORS = {torch.float32: 2e-7, torch.bfloat16: 2e-3, torch.float16: 3e-4, torch.float64: 2e-15}
SHAPES = [
    *((5, C) for C in (1, 2, 3, 7, 8, 9, 15, 16, 17, 24, 31, 64, 100, 127, 128, 129, 256, 2049)),
    *((R, 128) for R in (0, 1, 15, 16, 17, 33, 700)),
    (128,),
    (2, 3, 4, 40),
    (2, 0, 8),
    (3, 5000),
]
NAN = float("nan")


def inputs(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """x, gate, weight; the shape is the seed."""
    gen = torch.Generator().manual_seed(zlib.crc32(str(shape).encode()))

    def randn(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=gen, dtype=torch.float64)

    return randn(*shape).to(dtype), (2 * randn(*shape)).to(dtype), randn(shape[-1]).to(dtype)


def plain(x: Tensor, gate: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """In x's arithmetic, rounded once: the baseline."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return reference.gated_rms_norm(x, gate, weight, eps, dtype=wide).to(x.dtype)


# ---- results -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", dtypes(torch.float32, torch.bfloat16))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_is_as_exact_as_plain_fp32(
    shape: tuple[int, ...], dtype: torch.dtype, isa: str, poison: None
) -> None:
    args = inputs(*shape, dtype=dtype)
    out = gated_rms_norm(*args)
    assert out.dtype == dtype
    assert out.is_contiguous()
    want = reference.gated_rms_norm(*args)
    assert_no_worse(out, want, plain(*args), floor=FLOORS[dtype], factor=1.5, what="output")


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5", "lara_mini"])
@pytest.mark.parametrize("dtype", dtypes(torch.float32, torch.bfloat16, torch.float16))
def test_parity_with_transformers(kind: str, dtype: torch.dtype) -> None:
    """The error against fp64 is at most that of the class that it stands in for."""
    modeling = pytest.importorskip(f"transformers.models.{kind}.modeling_{kind}")
    (name,) = [n for n in vars(modeling) if n.endswith("RMSNormGated")]
    x, gate, weight = inputs(300, 128, dtype=dtype)
    module = getattr(modeling, name)(128, eps=1e-6)
    module.weight = torch.nn.Parameter(weight)
    with torch.no_grad():
        theirs = module(x, gate)
    want = reference.gated_rms_norm(x, gate, weight)
    ours = gated_rms_norm(x, gate, weight)
    assert_no_worse(ours, want, theirs, floor=1e-7, factor=1.05, what="output")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=name_of)
def test_sixteen_bits_are_rounded_once(dtype: torch.dtype, isa: str) -> None:
    args = inputs(100, 128, dtype=dtype)
    want = reference.gated_rms_norm(*args)
    eps = torch.finfo(dtype).eps
    # The smallest step of fp16 beside half a unit in the last place.
    tiny = 3.1e-8 if dtype == torch.float16 else 1e-30
    assert ((gated_rms_norm(*args).double() - want).abs() <= 0.51 * eps * want.abs() + tiny).all()


def test_gates_and_weights_of_fp32_with_16_bits() -> None:
    x, _, _ = inputs(20, 64, dtype=torch.bfloat16)
    _, gate, weight = inputs(20, 64)
    want = reference.gated_rms_norm(x, gate, weight)
    eps = torch.finfo(torch.bfloat16).eps
    assert (
        (gated_rms_norm(x, gate, weight).double() - want).abs() <= 0.51 * eps * want.abs()
    ).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_special_values(dtype: torch.dtype, isa: str) -> None:
    ones = torch.ones(1, 16, dtype=dtype)
    weight = torch.ones(16, dtype=dtype)
    gate = ones.clone()
    gate[0, 0], gate[0, 1], gate[0, 2], gate[0, 3] = NAN, -6e4, 100, -float("inf")
    out = gated_rms_norm(ones, gate, weight, eps=0.0)[0]
    assert out[0].isnan()
    assert out[1].abs() <= 1e-30
    assert out[2] == 100
    assert out[3].abs() <= 1e-30
    assert (gated_rms_norm(0 * ones, ones, weight) == 0).all()
    assert gated_rms_norm(NAN * ones, ones, weight).isnan().all()


@pytest.mark.parametrize("eps", [0.0, 1e-6, 1.0, 0])
def test_eps(eps: float) -> None:
    args = inputs(5, 33)
    want = reference.gated_rms_norm(*args, eps)
    assert_no_worse(gated_rms_norm(*args, eps), want, plain(*args, eps), floor=2e-7)


# ---- views, bits -------------------------------------------------------------------------------


def views(x: Tensor) -> dict[str, Tensor]:
    """The same numbers, elsewhere."""
    wide = torch.full([n + 3 for n in x.shape], NAN, dtype=x.dtype)
    inside = wide[tuple(slice(2, 2 + n) for n in x.shape)]
    steps = torch.full([*x.shape[:-1], 2 * x.shape[-1] + 1], NAN, dtype=x.dtype)[..., 1::2]
    return {
        "columns first": x.mT.contiguous().mT,
        "rows swapped": x.transpose(0, 1).contiguous().transpose(0, 1),
        "inside": inside.copy_(x),
        "steps": steps.copy_(x),
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_views(dtype: torch.dtype, isa: str, poison: None) -> None:
    x, gate, weight = inputs(4, 6, 72, dtype=dtype)
    want = gated_rms_norm(x, gate, weight)
    gates = views(gate)
    for name, view in views(x).items():
        assert_same_bits(gated_rms_norm(view, gate, weight), want, f"x {name}")
        assert_same_bits(gated_rms_norm(x, gates[name], weight), want, f"gate {name}")
    step = torch.full((144,), NAN, dtype=dtype)[::2].copy_(weight)
    assert_same_bits(gated_rms_norm(x, gate, step), want, "weight in steps")
    row = x[:1, :1].expand(4, 6, 72)
    assert_same_bits(
        gated_rms_norm(row, gate, weight),
        gated_rms_norm(row.contiguous(), gate, weight),
        "expanded",
    )


@pytest.mark.parametrize("dtype", dtypes(torch.float32, torch.bfloat16))
def test_two_runs_any_threads_and_any_company(
    dtype: torch.dtype, threads: Callable[[int], None], isa: str
) -> None:
    x, gate, weight = inputs(1000, 96, dtype=dtype)
    threads(1)
    want = gated_rms_norm(x, gate, weight)
    for n in (1, 2, 3):
        threads(n)
        assert_same_bits(gated_rms_norm(x, gate, weight), want, f"with {n} threads")
    for i in (0, 1, 21, 999):
        assert_same_bits(gated_rms_norm(x[i], gate[i], weight), want[i], f"row {i}")


# ---- gradients ---------------------------------------------------------------------------------


def gradients(
    function: Callable[..., Tensor], tensors: tuple[Tensor, ...], grad: Tensor
) -> tuple[Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in tensors]
    return torch.autograd.grad(function(*leaves), leaves, grad)


def grad_of(x: Tensor) -> Tensor:
    gen = torch.Generator().manual_seed(5)
    return torch.randn(x.shape, generator=gen, dtype=torch.float64).to(x.dtype)


@pytest.mark.parametrize("dtype", dtypes(torch.float32, torch.bfloat16))
@pytest.mark.parametrize(
    "shape", [s for s in SHAPES if s not in ((5, 1), (0, 128))] + [(3000, 16)], ids=str
)
def test_gradients(shape: tuple[int, ...], dtype: torch.dtype, isa: str, poison: None) -> None:
    """At most twice the error of the plain formula in fp32, whose results are rounded as ours."""
    args = inputs(*shape, dtype=dtype)
    grad = grad_of(args[0])
    double = tuple(x.double() for x in args)
    want = gradients(reference.gated_rms_norm, double, grad.double())
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    baseline = gradients(plain, tuple(x.to(wide) for x in args), grad.to(wide))
    got = gradients(gated_rms_norm, args, grad)
    floor = {torch.float32: 3e-7, torch.float64: 1e-15}.get(dtype, 1e-6)
    for name, x, expected, plain_x in zip(
        ("x", "gate", "weight"), got, want, baseline, strict=True
    ):
        assert x.dtype == dtype
        assert x.is_contiguous()
        assert_no_worse(x, expected, plain_x.to(dtype), floor=floor, factor=2, what=name)


def test_gradcheck() -> None:
    leaves = [x.requires_grad_() for x in inputs(3, 2, 5, dtype=torch.float64)]
    assert torch.autograd.gradcheck(gated_rms_norm, leaves)


@pytest.mark.parametrize("wanted", [0, 1, 2])
def test_each_gradient_alone(wanted: int, poison: None) -> None:
    args = inputs(70, 40)
    every = gradients(gated_rms_norm, args, grad_of(args[0]))
    leaves = [x.detach() for x in args]
    leaves[wanted].requires_grad_()
    (alone,) = torch.autograd.grad(gated_rms_norm(*leaves), [leaves[wanted]], grad_of(args[0]))
    assert_same_bits(alone, every[wanted])


def test_gradients_for_any_number_of_threads(threads: Callable[[int], None], isa: str) -> None:
    args = inputs(3000, 64)
    threads(1)
    want = gradients(gated_rms_norm, args, grad_of(args[0]))
    for n in (1, 2, 3):
        threads(n)
        for x, expected in zip(
            gradients(gated_rms_norm, args, grad_of(args[0])), want, strict=True
        ):
            assert_same_bits(x, expected, f"with {n} threads")


def test_what_is_not_built_is_refused() -> None:
    x, gate, weight = inputs(3, 8)
    x.requires_grad_()
    (first,) = torch.autograd.grad(gated_rms_norm(x, gate, weight).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives are not built"):
        first.sum().backward()


# ---- tracing, errors ---------------------------------------------------------------------------

OPS = torch.ops.deltanet_ext


@pytest.mark.slow
@pytest.mark.parametrize("dtype", dtypes(torch.float32))
@pytest.mark.parametrize("shape", [(3, 8), (2, 3, 5), (7,), (0, 4)], ids=str)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck(shape: tuple[int, ...], dtype: torch.dtype, requires_grad: bool) -> None:
    args = [x.requires_grad_(requires_grad) for x in inputs(*shape, dtype=dtype)]
    torch.library.opcheck(OPS.gated_rms_norm_forward.default, (*args, 1e-6))
    args = [x.detach() for x in args]
    for wanted in (7, 2):
        torch.library.opcheck(
            OPS.gated_rms_norm_backward.default, (grad_of(args[0]), *args, 1e-6, wanted)
        )


def test_compiled() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(gated_rms_norm, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (4, 9):
        args = inputs(rows, 24)
        assert_same_bits(compiled(*args), gated_rms_norm(*args))
        want = gradients(gated_rms_norm, args, grad_of(args[0]))
        for x, expected in zip(gradients(compiled, args, grad_of(args[0])), want, strict=True):
            assert_same_bits(x, expected)
    torch._dynamo.reset()


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def good(**changes: Any) -> dict[str, Any]:
    return {"x": zeros(3, 8), "gate": zeros(3, 8), "weight": zeros(8), **changes}


ERRORS: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "x is a list": (TypeError, "x is a list; supported: torch.Tensor", good(x=[1.0])),
    "x is int": (TypeError, "x is int64; supported: float32", good(x=zeros(3, 8).long())),
    "x is a number": (ValueError, "x has shape []; supported: [..., C]", good(x=zeros())),
    "no columns": (
        ValueError, "x has shape [3, 0]; supported: [..., C] with C from 1", good(x=zeros(3, 0))),
    "gate is None": (TypeError, "gate is None; supported: torch.Tensor", good(gate=None)),
    "gate of another shape": (
        ValueError, "gate has shape [8]; supported: [..., C] = [3, 8]", good(gate=zeros(8))),
    "gate is fp64": (
        TypeError, "gate is float64; supported: float32", good(gate=zeros(3, 8).double())),
    "weight of another shape": (
        ValueError, "weight has shape [3, 8]; supported: [C] = [8]", good(weight=zeros(3, 8))),
    "weight is bf16": (
        TypeError, "weight is bfloat16; supported: float32", good(weight=zeros(8).bfloat16())),
    "eps is None": (TypeError, "eps is None; supported: float, 0 or more", good(eps=None)),
    "eps is negative": (ValueError, "eps is -1.0; supported: 0 or more", good(eps=-1.0)),
    "eps is NaN": (ValueError, "eps is nan; supported: 0 or more", good(eps=NAN)),
}  # fmt: skip


@pytest.mark.parametrize("wrong", ERRORS)
def test_errors(wrong: str) -> None:
    kind, text, args = ERRORS[wrong]
    with pytest.raises(kind) as raised:
        gated_rms_norm(**args)
    assert str(raised.value).startswith("gated_rms_norm: "), raised.value
    assert text in str(raised.value)


def test_operators_check_again() -> None:
    x, weight = zeros(3, 8), zeros(8)
    for text, args in {
        "gate has shape [8]": (x, weight, weight),
        "weight has shape [3, 8]": (x, x, x),
        "x has 0 columns": (zeros(3, 0), zeros(3, 0), zeros(0)),
        "weight is float64": (x, x, weight.double()),
    }.items():
        with pytest.raises(RuntimeError) as raised:
            OPS.gated_rms_norm_forward(*args, 1e-6)
        assert text in str(raised.value)
