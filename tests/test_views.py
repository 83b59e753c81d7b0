# SPDX-License-Identifier: Apache-2.0
"""Inputs that are not contiguous give the bits of contiguous ones; none is written or aliased."""

from collections.abc import Callable
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
CASE = Case("views", B=2, T=37, HK=2, HV=4, K=24, V=40, state=torch.float32)

NAN = float("nan")


def _in_nan(shape: tuple[int, ...], like: Tensor) -> Tensor:
    return torch.full(shape, NAN, dtype=like.dtype)


def swapped(x: Tensor, a: int, b: int) -> Tensor:
    """The same values, stored with two axes exchanged."""
    return x.transpose(a, b).contiguous().transpose(a, b)


def channels_first(x: Tensor) -> Tensor:
    """As a transposed convolution gives it: [B, H * D, T] in memory, the last stride is T."""
    flat = x.flatten(2).transpose(1, 2).contiguous()
    return flat.transpose(1, 2).unflatten(2, x.shape[2:])


def every_second(x: Tensor, axis: int) -> Tensor:
    """Every second entry of a tensor of NaN, from the second on: a storage offset and a step."""
    shape = list(x.shape)
    shape[axis] = 2 * shape[axis] + 3
    wide = _in_nan(tuple(shape), x)
    view = wide.narrow(axis, 3, 2 * x.shape[axis]).unfold(axis, 1, 2)[..., 0]
    return view.copy_(x)


def inside(x: Tensor) -> Tensor:
    """A block in the middle of a larger tensor of NaN, along every axis."""
    wide = _in_nan(tuple(n + 5 for n in x.shape), x)
    view = wide[tuple(slice(2, 2 + n) for n in x.shape)]
    return view.copy_(x)


def odd_offset(x: Tensor) -> Tensor:
    """Contiguous, but at an address that no vector load likes."""
    flat = _in_nan((x.numel() + 3,), x)
    return flat[3:].view(x.shape).copy_(x)


def row_major_reversed(x: Tensor) -> Tensor:
    """All axes stored in the opposite order."""
    axes = tuple(reversed(range(x.dim())))
    return x.permute(axes).contiguous().permute(axes)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "heads before tokens": lambda x: swapped(x, 1, 2),
    "tokens before batch": lambda x: swapped(x, 0, 1),
    "last axis swapped": lambda x: swapped(x, -1, -2),
    "reversed axes": row_major_reversed,
    "every second of the first axis": lambda x: every_second(x, 0),
    "every second of axis 1": lambda x: every_second(x, 1),
    "every second of axis 2": lambda x: every_second(x, 2),
    "every second of the last axis": lambda x: every_second(x, -1),
    "inside": inside,
    "odd offset": odd_offset,
}


def check_same_bits(
    function: Callable[..., Any], args: dict[str, Any], views: dict[str, Tensor]
) -> None:
    """`views` hold the values of `args`: the same result, and no byte of their memory moves."""
    for name, view in views.items():
        assert_same_bits(view, args[name], f"the test's own view of {name}")
    memory = {name: _whole_storage(view).clone() for name, view in views.items()}
    out, state = function(**{**args, **views})
    plain_out, plain_state = function(**args)
    assert_same_bits(out, plain_out, "output")
    assert_same_bits(state, plain_state, "state")
    for name, view in views.items():
        assert_same_bits(_whole_storage(view), memory[name], f"memory of {name}")
        for result in (out, state):
            same = result.untyped_storage().data_ptr() == view.untyped_storage().data_ptr()
            assert not same or view.numel() == 0, f"a result aliases {name}"


def _whole_storage(x: Tensor) -> Tensor:
    size = x.untyped_storage().nbytes() // x.element_size()
    return x.as_strided((size,), (1,), 0)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", dtypes(torch.float32, torch.bfloat16))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout(layout: str, dtype: torch.dtype, function: Callable[..., Any]) -> None:
    args = CASE.inputs(dtype)
    tensors = ("query", "key", "value", "g", "beta", "initial_state")
    make = LAYOUTS[layout]
    for name in tensors:
        check_same_bits(function, args, {name: make(args[name])})
    check_same_bits(function, args, {name: make(args[name]) for name in tensors})


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("T", [1, 16, 37])
def test_channels_first_views(T: int, dtype: torch.dtype, function: Callable[..., Any]) -> None:
    case = Case("channels first", B=2, T=T, HK=2, HV=4, K=24, V=40, state=torch.float32)
    args = case.inputs(dtype)
    views = {name: channels_first(args[name]) for name in ("query", "key", "value")}
    if T > 1:
        assert all(view.stride()[-1] == T and view.stride(1) == 1 for view in views.values())
    check_same_bits(function, args, views)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
def test_one_convolution_output_split_into_three(
    dtype: torch.dtype, function: Callable[..., Any]
) -> None:
    """What the models do: conv over [B, 2 HK K + HV V, T], transpose, split, reshape."""
    args = CASE.inputs(dtype)
    parts = [args[name].flatten(2) for name in ("query", "key", "value")]
    mixed = torch.cat(parts, 2).transpose(1, 2).contiguous().transpose(1, 2)
    pieces = mixed.split([part.shape[2] for part in parts], dim=2)
    names = ("query", "key", "value")
    views = {
        n: piece.unflatten(2, args[n].shape[2:]) for n, piece in zip(names, pieces, strict=True)
    }
    assert all(
        view.data_ptr() != mixed.data_ptr() for name, view in views.items() if name != "query"
    )
    check_same_bits(function, args, views)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("axis", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
def test_expanded(axis: int, dtype: torch.dtype, function: Callable[..., Any]) -> None:
    """Stride 0 along one axis, for every tensor that has it."""
    args = CASE.inputs(dtype)
    for name in ("query", "key", "value", "g", "beta", "initial_state"):
        x = args[name]
        if axis >= x.dim():
            continue
        view = x.narrow(axis, 0, 1).expand(x.shape)
        assert view.stride(axis) == 0
        check_same_bits(function, {**args, name: view.contiguous()}, {name: view})


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_single_number_expanded(function: Callable[..., Any]) -> None:
    args = CASE.inputs()
    for name in ("query", "key", "value", "g", "beta", "initial_state"):
        view = args[name].flatten()[:1].reshape([1] * args[name].dim()).expand(args[name].shape)
        check_same_bits(function, {**args, name: view.contiguous()}, {name: view})


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("state_dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("v_first", [False, True], ids=["K-first", "V-first"])
def test_state_layouts(
    v_first: bool, state_dtype: torch.dtype, function: Callable[..., Any]
) -> None:
    """Slots of a larger pool, transposed states: honoured, whatever the dtype."""
    case = Case(
        "state views", B=2, HK=1, HV=3, K=24, V=40, state=state_dtype, state_v_first=v_first
    )
    args = case.inputs()
    for layout in ("inside", "last axis swapped", "odd offset", "every second of the first axis"):
        view = LAYOUTS[layout](args["initial_state"])
        check_same_bits(function, args, {"initial_state": view})


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_strided_cu_seqlens(index: torch.dtype, function: Callable[..., Any]) -> None:
    args = Case("strided cu", T=70, K=16, V=16, cu=(0, 5, 5, 61)).inputs()
    wide = torch.full((9,), -7, dtype=index)
    view = wide[1::2]
    view.copy_(args["cu_seqlens"])
    out, state = function(**{**args, "cu_seqlens": view})
    plain_out, plain_state = function(**args)
    assert_same_bits(out, plain_out)
    assert_same_bits(state, plain_state)
    assert (wide[::2] == -7).all()


@pytest.mark.parametrize("function", FUNCTIONS)
def test_strided_gate_parameters(function: Callable[..., Any]) -> None:
    args = Case("strided A_log", HV=3, HK=1, raw_gate=True, state=torch.float32).inputs()
    views = {name: every_second(args[name], 0) for name in ("A_log", "dt_bias")}
    check_same_bits(function, args, views)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_the_same_tensor_twice(name: str, function: Callable[..., Any]) -> None:
    """query is key is value: nothing may be scribbled over on the way."""
    case = Case("shared", B=1, T=33, HK=2, HV=2, K=32, V=32, state=torch.float32)
    args = case.inputs()
    shared = args[name]
    before = shared.clone()
    out, state = function(**{**args, "query": shared, "key": shared, "value": shared})
    apart = {"query": before.clone(), "key": before.clone(), "value": before.clone()}
    want_out, want_state = function(**{**args, **apart})
    assert_same_bits(out, want_out)
    assert_same_bits(state, want_state)
    assert_same_bits(shared, before)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("T", [0, 1, 40])
def test_the_final_state_is_never_the_initial_one(T: int, function: Callable[..., Any]) -> None:
    """Also where it has the same values: at T = 0."""
    args = Case(f"alias T={T}", T=T, state=torch.float32).inputs()
    before = args["initial_state"].clone()
    _, state = function(**args)
    assert state.data_ptr() != args["initial_state"].data_ptr()
    state.fill_(NAN)
    assert_same_bits(args["initial_state"], before)


def test_chunk_transition_takes_any_layout() -> None:
    args = CASE.inputs()
    names = ("key", "value", "g", "beta")
    plain = deltanet_ext.chunk_transition(*(args[name] for name in names))
    for layout, make in LAYOUTS.items():
        got = deltanet_ext.chunk_transition(*(make(args[name]) for name in names))
        assert_same_bits(got[0], plain[0], f"M, {layout}")
        assert_same_bits(got[1], plain[1], f"U, {layout}")


def test_inverse_takes_any_layout() -> None:
    L = torch.randn(3, 2, 20, 20)
    plain = deltanet_ext.unit_lower_triangular_inverse(L)
    for layout, make in LAYOUTS.items():
        got = deltanet_ext.unit_lower_triangular_inverse(make(L))
        assert_same_bits(got, plain, layout)
        assert got.is_contiguous()
    expanded = L[:1, :1].expand(3, 2, 20, 20)
    got = deltanet_ext.unit_lower_triangular_inverse(expanded)
    assert_same_bits(got, plain[:1, :1].expand_as(L))
