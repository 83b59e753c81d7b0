# SPDX-License-Identifier: Apache-2.0
"""The short convolution: results against fp64 and transformers, views, states, bits."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import deltanet_ext
from cases import DTYPES, dtypes, name_of
from closeness import assert_no_worse, assert_same_bits
from deltanet_ext import causal_conv1d_fn, causal_conv1d_update, reference

# RMSE ratio against fp64 that needs no excuse, where no baseline has one: a rounding or two.
FLOORS = {torch.float32: 2e-7, torch.bfloat16: 2e-3, torch.float16: 3e-4, torch.float64: 1e-15}
NAN = float("nan")


@dataclass(frozen=True)
class Conv:
    """Sizes of a call; the name that they make is the seed."""

    B: int = 2
    D: int = 24
    T: int = 40
    W: int = 4
    bias: bool = True
    state: bool = True
    activation: str | None = "silu"
    channels_first: bool = False
    cu: tuple[int, ...] | None = None

    def __str__(self) -> str:
        names = {"channels_first": "channels-first", "bias": "bias", "state": "state"}
        flags = [text for name, text in names.items() if getattr(self, name)]
        packed = [str(list(self.cu)).replace(" ", "")] if self.cu is not None else []
        sizes = [f"{n}={getattr(self, n)}" for n in "BDTW"]
        return " ".join([*sizes, *flags, str(self.activation), *packed])

    def inputs(self, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
        gen = torch.Generator().manual_seed(zlib.crc32(str(self).encode()))

        def randn(*sizes: int) -> Tensor:
            return torch.randn(*sizes, generator=gen, dtype=torch.float64).to(dtype)

        x = randn(self.B, self.D, self.T)
        if not self.channels_first:
            x = x.transpose(1, 2).contiguous().transpose(1, 2)
        sequences = self.B if self.cu is None else len(self.cu) - 1
        return {
            "x": x,
            "weight": randn(self.D, self.W),
            "bias": randn(self.D) if self.bias else None,
            "initial_states": randn(sequences, self.D, self.W - 1) if self.state else None,
            "activation": self.activation,
            "cu_seqlens": None if self.cu is None else torch.tensor(self.cu),
        }


CASES = [
    *(Conv(T=T) for T in (0, 1, 2, 3, 4, 5, 31, 32, 33, 64, 67, 100)),
    *(Conv(T=T, channels_first=True) for T in (0, 1, 3, 8, 31, 33, 70, 1030)),
    *(Conv(W=W, T=T, channels_first=W % 2 == 0) for W in range(1, 9) for T in (2, 37)),
    *(Conv(D=D, T=9) for D in (1, 2, 7, 8, 9, 15, 17, 127, 128, 129, 200, 300)),
    *(Conv(B=B, T=5) for B in (0, 1, 5)),
    Conv(bias=False, state=False),
    Conv(bias=False, state=False, activation=None),
    Conv(activation=None),
    Conv(activation="swish"),
    Conv(D=0, T=3),
    *(
        Conv(B=1, T=T, W=W, cu=cu, channels_first=T == 64)
        for W in (2, 4)
        for T, cu in (
            (64, (0, 0, 64)),
            (100, (0, 64, 64, 100)),
            (50, (0, 1, 2, 4, 7, 40)),
            (30, (0,)),
            (0, (0, 0)),
            (20, (0, 0, 0)),
        )
    ),
]  # fmt: skip


def forward(args: dict[str, Any]) -> tuple[Tensor, Tensor]:
    out, states = causal_conv1d_fn(**args, return_final_states=True)
    return out, states


def exact(args: dict[str, Any]) -> tuple[Tensor, Tensor]:
    names = ("x", "weight", "bias", "initial_states", "activation", "cu_seqlens")
    return reference.causal_conv1d(**{name: args[name] for name in names})


def silu_in(z: Tensor, activation: str | None) -> Tensor:
    return z if activation is None else torch.nn.functional.silu(z)


def by_torch(args: dict[str, Any]) -> Tensor:
    """The same by torch's own operators in x's dtype, sequence by sequence."""
    x, weight, bias = args["x"], args["weight"], args["bias"]
    cu, states = args["cu_seqlens"], args["initial_states"]
    width = weight.shape[1]
    out = torch.zeros_like(x)
    rows = slice(0, x.shape[0])
    edges = [0, x.shape[2]] if cu is None else cu.tolist()
    for i, (start, stop) in enumerate(pairwise(edges)):
        n = rows if cu is None else slice(i, i + 1)
        piece = x[rows, :, start:stop]
        past = piece.new_zeros(*piece.shape[:2], width - 1) if states is None else states[n]
        seen = torch.cat([past, piece], -1)
        if piece.numel() > 0:
            z = torch.nn.functional.conv1d(seen, weight[:, None], bias, groups=x.shape[1])
            out[rows, :, start:stop] = silu_in(z, args["activation"])
    return out


def assert_layout(out: Tensor, x: Tensor) -> None:
    assert out.shape == x.shape
    assert out.dtype == x.dtype
    assert out.transpose(1, 2).is_contiguous()


# ---- results -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", dtypes(torch.float32, torch.bfloat16))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_is_as_exact_as_torch(case: Conv, dtype: torch.dtype, isa: str, poison: None) -> None:
    args = case.inputs(dtype)
    out, states = forward(args)
    want, want_states = exact(args)
    assert_layout(out, args["x"])
    floor = FLOORS[dtype]
    assert_no_worse(out, want, by_torch(args), floor=floor, factor=1.5, what="output")
    assert states.is_contiguous()
    assert_same_bits(states, want_states.to(dtype), "final states")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=name_of)
@pytest.mark.parametrize("case", [Conv(), Conv(W=8, D=130, activation=None)], ids=str)
def test_sixteen_bits_are_rounded_once(case: Conv, dtype: torch.dtype, isa: str) -> None:
    """Half a unit in the last place, and what fp32 adds to it: nothing is rounded on the way."""
    args = case.inputs(dtype)
    out, _ = forward(args)
    want, _ = exact(args)
    eps = torch.finfo(dtype).eps
    assert ((out.double() - want).abs() <= 0.51 * eps * want.abs() + 1e-6).all()


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5"])
@pytest.mark.parametrize("dtype", dtypes(torch.float32, torch.bfloat16))
def test_parity_with_transformers(kind: str, dtype: torch.dtype) -> None:
    """Errors against fp64 are at most those of the functions that it stands in for."""
    modeling = pytest.importorskip(f"transformers.models.{kind}.modeling_{kind}")

    def plain(function: Callable) -> Callable:
        while hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        return function

    fn, update = plain(modeling.causal_conv1d_fn), plain(modeling.causal_conv1d_update)
    case = Conv(D=96, T=50, state=False)
    args = case.inputs(dtype)
    x, weight, bias = args["x"], args["weight"], args["bias"]
    want, _ = exact(args)
    theirs = fn(x, weight, bias, activation="silu")
    ours = causal_conv1d_fn(x, weight, bias, activation="silu")
    assert_no_worse(ours, want, theirs, floor=1e-7, factor=1.1, what="causal_conv1d_fn")

    for T in (1, 3):
        token = x[..., :T]
        state = Conv(D=96, T=4).inputs(dtype)["x"].contiguous()
        ours_state, their_state = state.clone(), state.clone()
        theirs = update(token, their_state, weight, bias, "silu")
        ours = causal_conv1d_update(token, ours_state, weight, bias, "silu")
        assert_same_bits(ours_state, their_state, "state")
        seen = {**args, "x": token, "initial_states": state[..., 1:]}
        want, _ = exact(seen)
        assert_no_worse(ours, want, theirs, floor=1e-7, factor=1.1, what="causal_conv1d_update")


def test_weights_of_another_dtype() -> None:
    """fp32 weights with 16-bit inputs are used as they are."""
    args = Conv().inputs(torch.bfloat16)
    args["weight"] = torch.randn(24, 4)
    args["bias"] = torch.randn(24)
    out, _ = forward(args)
    want, _ = exact(args)
    eps = torch.finfo(torch.bfloat16).eps
    assert ((out.double() - want).abs() <= 0.51 * eps * want.abs() + 1e-6).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_special_values(dtype: torch.dtype, isa: str) -> None:
    """What is not finite stays where its taps reach, and large sums neither overflow in silu nor
    lose their sign."""
    big = {torch.float16: 6e4}.get(dtype, 1e30)
    x = torch.zeros(1, 9, 20, dtype=dtype)
    x[0, 0, 5], x[0, 1, 5], x[0, 2, 5] = NAN, float("inf"), -big
    x[0, 3, 5], x[0, 4, 5], x[0, 5, 5], x[0, 6, 5] = big, -100.0, 100.0, -88.5
    weight = torch.tensor([[0.0, 1.0]], dtype=dtype).expand(9, 2)
    out = causal_conv1d_fn(x, weight, activation="silu")[0]
    assert out[0, 5].isnan()
    assert out[1, 5].isposinf()
    assert out[2, 5].abs() <= 1e-30
    assert out[3, 5] == big
    assert out[4, 5].abs() <= 1e-30
    assert out[5, 5] == 100
    assert out[6, 5].abs() <= 1e-30
    out[:7, 5:7] = 0  # token 6 is 0 x_5 + x_6, and 0 NaN is NaN
    assert (out == 0).all()


# ---- states, sequences -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", dtypes(torch.float32, torch.bfloat16))
@pytest.mark.parametrize("width", [1, 2, 4, 7])
@pytest.mark.parametrize("split", [0, 1, 2, 30, 32, 64, 69, 70])
def test_prefill_and_continuation_equal_the_whole(
    split: int, width: int, dtype: torch.dtype, isa: str
) -> None:
    args = Conv(D=130, T=70, W=width).inputs(dtype)
    whole, whole_end = forward(args)
    first, middle = forward({**args, "x": args["x"][..., :split]})
    second, end = forward({**args, "x": args["x"][..., split:], "initial_states": middle})
    assert_same_bits(torch.cat([first, second], -1), whole, "output")
    assert_same_bits(end, whole_end, "final states")


@pytest.mark.parametrize("dtype", dtypes(torch.float32, torch.bfloat16))
@pytest.mark.parametrize(
    ("width", "kept"), [(4, 3), (4, 4), (4, 9), (2, 1), (1, 0), (1, 2), (3, 3)]
)
@pytest.mark.parametrize("step", [1, 2, 5, 40])
def test_prefill_and_updates_equal_the_whole(
    step: int, width: int, kept: int, dtype: torch.dtype, isa: str, poison: None
) -> None:
    args = Conv(D=37, T=80, W=width, state=False).inputs(dtype)
    whole, _ = forward(args)
    x = args["x"]
    start = 40
    state = x[..., start - kept : start].contiguous()
    pieces = []
    for t in range(start, 80, step):
        token = x[..., t : t + step]
        got = causal_conv1d_update(token, state, args["weight"], args["bias"], "silu")
        assert_layout(got, token)
        pieces.append(got)
        assert_same_bits(state, x[..., t + step - kept : t + step].contiguous(), "state")
    assert_same_bits(torch.cat(pieces, -1), whole[..., start:], "output")


def test_an_update_with_two_axes() -> None:
    args = Conv(T=1).inputs()
    state = torch.randn(2, 24, 3)
    other = state.clone()
    one = causal_conv1d_update(args["x"][..., 0], state, args["weight"], args["bias"], "silu")
    two = causal_conv1d_update(args["x"], other, args["weight"], args["bias"], "silu")
    assert_same_bits(one, two[..., 0])
    assert_same_bits(state, other)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_an_update_of_a_pool_of_states(index: torch.dtype, poison: None) -> None:
    args = Conv(B=4, T=2).inputs()
    pool = torch.randn(6, 24, 5)
    before = pool.clone()
    slots = torch.tensor([5, -1, 0, 3], dtype=index)
    out = causal_conv1d_update(
        args["x"], pool, args["weight"], args["bias"], "silu", conv_state_indices=slots
    )
    for b, slot in enumerate(slots.tolist()):
        if slot < 0:
            assert (out[b] == 0).all()
            continue
        state = before[slot : slot + 1].clone()
        alone = causal_conv1d_update(
            args["x"][b : b + 1], state, args["weight"], args["bias"], "silu"
        )
        assert_same_bits(out[b : b + 1], alone)
        assert_same_bits(pool[slot : slot + 1], state)
    for slot in (1, 2, 4):
        assert_same_bits(pool[slot], before[slot], "a slot of nobody")


@pytest.mark.parametrize("dtype", dtypes(torch.float32, torch.bfloat16))
def test_no_state_is_a_state_of_zeros(dtype: torch.dtype, isa: str) -> None:
    args = Conv(state=False).inputs(dtype)
    zeros = torch.zeros(2, 24, 3, dtype=dtype)
    assert_same_bits(forward({**args, "initial_states": zeros})[0], forward(args)[0])


@pytest.mark.parametrize("dtype", dtypes(torch.float32, torch.bfloat16))
@pytest.mark.parametrize("cu", [(0, 17, 50, 64), (0, 0, 33, 33, 34, 90), (0, 1, 2, 3, 70)], ids=str)
def test_packed_equals_separate(cu: tuple[int, ...], dtype: torch.dtype, isa: str) -> None:
    args = Conv(B=1, D=130, T=cu[-1] + 5, cu=cu).inputs(dtype)
    out, ends = forward(args)
    for n, (start, stop) in enumerate(pairwise(cu)):
        one = {**args, "cu_seqlens": None, "x": args["x"][..., start:stop]}
        one["initial_states"] = args["initial_states"][n : n + 1]
        alone, end = forward(one)
        assert_same_bits(out[..., start:stop], alone, f"sequence {n}")
        assert_same_bits(ends[n : n + 1], end, f"state {n}")
    assert (out[..., cu[-1] :] == 0).all()


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_seq_idx_equals_separate(index: torch.dtype, poison: None) -> None:
    args = Conv(T=12, state=False).inputs()
    numbers = [[0, 0, 0, 1, 1, 7, 7, 7, 7, -1, -1, 3], [-1] * 3 + [5] * 9]
    out = causal_conv1d_fn(
        args["x"], args["weight"], args["bias"], torch.tensor(numbers, dtype=index),
        activation="silu",
    )  # fmt: skip
    for b, row in enumerate(numbers):
        edges = [0, *(t for t in range(1, 12) if row[t] != row[t - 1]), 12]
        for start, stop in pairwise(edges):
            piece = args["x"][b : b + 1, :, start:stop]
            alone = causal_conv1d_fn(piece, args["weight"], args["bias"], activation="silu")
            want = alone if row[start] >= 0 else torch.zeros_like(alone)
            assert_same_bits(out[b : b + 1, :, start:stop], want, f"row {b} from {start}")


def test_final_states_out() -> None:
    args = Conv().inputs()
    _, want = forward(args)
    buffer = torch.full((2, 24, 3), NAN)
    _, got = causal_conv1d_fn(**args, return_final_states=True, final_states_out=buffer)
    assert got is buffer
    assert_same_bits(buffer, want)


def test_final_states_are_no_views_and_arguments_stay(poison: None) -> None:
    args = Conv(T=2).inputs()
    before = {n: x.clone() for n, x in args.items() if isinstance(x, Tensor)}
    out, states = forward(args)
    out.fill_(NAN)
    states.fill_(NAN)
    for name, x in before.items():
        assert_same_bits(args[name], x, name)


def test_an_update_is_seen_by_autograd() -> None:
    """Somebody who saved the state for a backward pass gets an error, not wrong gradients."""
    args = Conv(T=1).inputs()
    state = torch.randn(2, 24, 3)
    w = torch.ones(2, 24, 3, requires_grad=True)
    product = (w * state).sum()
    with torch.no_grad():
        causal_conv1d_update(args["x"], state, args["weight"])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    with torch.inference_mode():
        causal_conv1d_update(args["x"], torch.randn(2, 24, 3), args["weight"])


# ---- views, bits -------------------------------------------------------------------------------


def every_second(x: Tensor, axis: int) -> Tensor:
    shape = list(x.shape)
    shape[axis] = 2 * shape[axis] + 1
    wide = torch.full(shape, NAN, dtype=x.dtype)
    view = wide.narrow(axis, 1, 2 * x.shape[axis]).unfold(axis, 1, 2)[..., 0]
    return view.copy_(x)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("axis", [0, 1, 2, "first", "slice"])
def test_views(axis: int | str, dtype: torch.dtype, isa: str, poison: None) -> None:
    args = Conv(D=130, T=45).inputs(dtype)
    want, want_states = forward(args)
    changed = dict(args)
    if axis == "first":
        changed["x"] = args["x"].contiguous()
        changed["weight"] = args["weight"].mT.contiguous().mT
        changed["initial_states"] = args["initial_states"].mT.contiguous().mT
    elif axis == "slice":  # the channels of q, k, v in a wider projection, an odd way in
        wide = torch.full((2, 45, 261), NAN, dtype=dtype)
        wide[..., 3:133] = args["x"].transpose(1, 2)
        changed["x"] = wide[..., 3:133].transpose(1, 2)
    else:
        assert isinstance(axis, int)
        changed["x"] = every_second(args["x"], axis)
        changed["initial_states"] = every_second(args["initial_states"], axis)
        if axis < 2:
            changed["weight"] = every_second(args["weight"], axis)
        if axis == 0:
            changed["bias"] = every_second(args["bias"], 0)
    got, states = forward(changed)
    assert_same_bits(got, want, "output")
    assert_same_bits(states, want_states, "states")

    state, other = args["initial_states"].clone(), changed["initial_states"].clone()
    x, weight, bias = args["x"][..., :2], args["weight"], args["bias"]
    want = causal_conv1d_update(x, state, weight, bias, "silu")
    if isinstance(axis, int):
        other = every_second(other, axis)
    x = changed["x"][..., :2]
    got = causal_conv1d_update(x, other, changed["weight"], changed["bias"], "silu")
    assert_same_bits(got, want, "update")
    assert_same_bits(other, state, "state after the update")


def test_an_expanded_input() -> None:
    args = Conv(B=3).inputs()
    row = args["x"][:1]
    want, _ = forward({**args, "x": row.repeat(3, 1, 1)})
    assert_same_bits(forward({**args, "x": row.expand(3, -1, -1)})[0], want)


@pytest.mark.parametrize("dtype", dtypes(torch.float32, torch.bfloat16))
@pytest.mark.parametrize("channels_first", [False, True])
def test_two_runs_and_any_number_of_threads(
    channels_first: bool, dtype: torch.dtype, threads: Callable[[int], None], isa: str
) -> None:
    args = Conv(D=300, T=1200, channels_first=channels_first).inputs(dtype)
    token = Conv(B=7, D=300, T=1, channels_first=channels_first).inputs(dtype)
    threads(1)
    want = forward(args)
    state = token["initial_states"].clone()
    update = causal_conv1d_update(token["x"], state, token["weight"], token["bias"])
    for n in (1, 2, 3):
        threads(n)
        for got, expected in zip(forward(args), want, strict=True):
            assert_same_bits(got, expected, f"with {n} threads")
        again = token["initial_states"].clone()
        got = causal_conv1d_update(token["x"], again, token["weight"], token["bias"])
        assert_same_bits(got, update)
        assert_same_bits(again, state)


@pytest.mark.parametrize("dtype", dtypes(torch.float32, torch.bfloat16))
def test_layout_and_company_do_not_matter(dtype: torch.dtype, isa: str) -> None:
    """A row alone, in a batch, channels-first or last, some channels alone: the same bits."""
    args = Conv(B=3, D=200, T=70).inputs(dtype)
    out, _ = forward(args)
    first, _ = forward({**args, "x": args["x"].contiguous()})
    assert_same_bits(first, out, "channels-first")
    for b in range(3):
        row = {**args, "x": args["x"][b : b + 1]}
        row["initial_states"] = args["initial_states"][b : b + 1]
        assert_same_bits(forward(row)[0], out[b : b + 1], f"row {b}")
    some = slice(3, 22)
    part = {**args, "x": args["x"][:, some], "weight": args["weight"][some]}
    part |= {"bias": args["bias"][some], "initial_states": args["initial_states"][:, some]}
    assert_same_bits(forward(part)[0], out[:, some], "some channels")


def test_causality(isa: str) -> None:
    args = Conv(B=1, T=70).inputs()
    out, _ = forward(args)
    for t in (0, 1, 31, 32, 33, 69):
        changed = args["x"].clone()
        changed[..., t] = 1e30
        got, _ = forward({**args, "x": changed})
        assert_same_bits(got[..., :t], out[..., :t], f"before token {t}")
        assert_same_bits(got[..., t + 4 :], out[..., t + 4 :], f"out of reach of token {t}")
        assert not torch.equal(got[..., t : t + 4], out[..., t : t + 4])


# ---- tracing -----------------------------------------------------------------------------------

OPS = torch.ops.deltanet_ext
TRACED = [
    Conv(T=9),
    Conv(T=9, bias=False, state=False, activation=None),
    Conv(B=1, T=9, cu=(0, 0, 4, 8)),
    Conv(T=0),
]  # fmt: skip


def positional(args: dict[str, Any], return_final_states: bool) -> tuple[Any, ...]:
    names = ("x", "weight", "bias", "initial_states", "seq_idx", "cu_seqlens")
    silu = args["activation"] is not None
    return (*(args.get(name) for name in names), silu, return_final_states)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", dtypes(torch.float32))
@pytest.mark.parametrize("case", TRACED, ids=str)
def test_opcheck(case: Conv, dtype: torch.dtype) -> None:
    for final in (True, False):
        args = positional(case.inputs(dtype), final)
        torch.library.opcheck(OPS.causal_conv1d_forward.default, args)
    args = case.inputs(dtype)
    x, weight, bias = args["x"], args["weight"], args["bias"]
    state = torch.randn(*x.shape[:2], 5).to(dtype)
    torch.library.opcheck(OPS.causal_conv1d_update.default, (x, state, weight, bias, None, True))
    slots = torch.arange(x.shape[0])
    torch.library.opcheck(OPS.causal_conv1d_update.default, (x, state, weight, bias, slots, False))


def test_compiled(threads: Callable[[int], None]) -> None:
    """Both functions in one graph, the state written in place."""
    threads(1)
    torch._dynamo.reset()

    def step(x: Tensor, token: Tensor, weight: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        y, _ = causal_conv1d_fn(x, weight, activation="silu", return_final_states=True)
        return y, causal_conv1d_update(token, state, weight, None, "silu")

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    for T in (9, 17, 33):
        args = Conv(T=T).inputs()
        token, state = torch.randn(2, 24, 1), torch.randn(2, 24, 4)
        other = state.clone()
        with torch.no_grad():
            want = step(args["x"], token, args["weight"], state)
            got = compiled(args["x"], token, args["weight"], other)
        for a, b in zip(got, want, strict=True):
            assert_same_bits(a, b)
            assert a.stride() == b.stride()
        assert_same_bits(other, state)
    torch._dynamo.reset()


def test_meta_tensors() -> None:
    args = Conv().inputs()
    meta = {n: x.to("meta") if isinstance(x, Tensor) else x for n, x in args.items()}
    for got, want in zip(forward(meta), forward(args), strict=True):
        assert (got.shape, got.dtype, got.stride()) == (want.shape, want.dtype, want.stride())


# ---- errors ------------------------------------------------------------------------------------


def good(**changes: Any) -> dict[str, Any]:
    return {**Conv().inputs(), **changes}


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


ERRORS: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "x is None": (TypeError, "x is None; supported: torch.Tensor", good(x=None)),
    "x is int": (TypeError, "x is int32; supported: float32", good(x=zeros(2, 24, 4).int())),
    "x has two axes": (
        ValueError, r"x has shape [2, 24]; supported: [B, D, T]", good(x=zeros(2, 24))),
    "x is sparse": (
        TypeError, "x has layout sparse_coo; supported: strided",
        good(x=zeros(2, 24, 4).to_sparse())),
    "weight is a list": (TypeError, "weight is a list; supported: torch.Tensor", good(weight=[1])),
    "weight has three axes": (
        ValueError, "weight has shape [24, 1, 4]; supported: [D, W] with D = 24",
        good(weight=zeros(24, 1, 4))),
    "weight has other channels": (
        ValueError, "weight has shape [23, 4]; supported: [D, W] with D = 24",
        good(weight=zeros(23, 4))),
    "width 9": (
        ValueError, "weight has width 9; supported: 1 to 8",
        good(weight=zeros(24, 9), initial_states=None)),
    "width 0": (
        ValueError, "weight has width 0; supported: 1 to 8",
        good(weight=zeros(24, 0), initial_states=None)),
    "weight is fp64": (
        TypeError, "weight is float64; supported: float32",
        good(weight=zeros(24, 4, dtype=torch.float64))),
    "bias is a float": (TypeError, "bias is 0.5 (float); supported: torch.Tensor or None",
                        good(bias=0.5)),
    "bias has other channels": (
        ValueError, "bias has shape [1]; supported: [D] = [24]", good(bias=zeros(1))),
    "bias is bf16": (
        TypeError, "bias is bfloat16; supported: float32",
        good(bias=zeros(24, dtype=torch.bfloat16))),
    "state is a list": (
        TypeError, "initial_states is a list; supported: torch.Tensor or None",
        good(initial_states=[])),
    "state is too long": (
        ValueError, "initial_states has shape [2, 24, 4]; supported: [N, D, W - 1] = [2, 24, 3]",
        good(initial_states=zeros(2, 24, 4))),
    "state is bf16": (
        TypeError, "initial_states is bfloat16 and x is float32; supported: one dtype",
        good(initial_states=zeros(2, 24, 3, dtype=torch.bfloat16))),
    "return_final_states is None": (
        TypeError, "return_final_states is None; supported: bool", good(return_final_states=None)),
    "final_states_out alone": (
        ValueError, "final_states_out is given and return_final_states is False",
        good(final_states_out=zeros(2, 24, 3))),
    "final_states_out is too short": (
        ValueError, "final_states_out has shape [2, 24, 2]; supported: [N, D, W - 1] = [2, 24, 3]",
        good(final_states_out=zeros(2, 24, 2), return_final_states=True)),
    "gelu": (
        ValueError, "activation is 'gelu'; supported: None, 'silu', 'swish'",
        good(activation="gelu")),
    "activation is True": (
        ValueError, "activation is True (bool); supported: None, 'silu', 'swish'",
        good(activation=True)),
    "cu_seqlens with a batch": (
        ValueError, "cu_seqlens is given and the batch size is 2",
        good(cu_seqlens=torch.tensor([0, 40]))),
    "cu_seqlens is a list": (
        TypeError, "cu_seqlens is a list; supported: torch.Tensor or None",
        good(cu_seqlens=[0, 40])),
    "seq_idx is float": (
        TypeError, "seq_idx is float32; supported: int64, int32", good(seq_idx=zeros(2, 40))),
    "seq_idx is short": (
        ValueError, "seq_idx has shape [2, 39]; supported: [B, T] = [2, 40]",
        good(seq_idx=zeros(2, 39, dtype=torch.int32))),
    "seq_idx with states": (
        ValueError, "seq_idx is given with initial or final states; supported: cu_seqlens",
        good(seq_idx=zeros(2, 40, dtype=torch.int32))),
    "seq_idx and cu_seqlens": (
        ValueError, "seq_idx and cu_seqlens are given; supported: one of them",
        {**Conv(B=1, cu=(0, 40)).inputs(), "seq_idx": zeros(1, 40, dtype=torch.int32)}),
}  # fmt: skip


@pytest.mark.parametrize("wrong", ERRORS)
def test_errors(wrong: str) -> None:
    kind, text, args = ERRORS[wrong]
    with pytest.raises(kind) as raised:
        causal_conv1d_fn(**args)
    assert str(raised.value).startswith("causal_conv1d_fn: "), raised.value
    assert text in str(raised.value)


def updating(**changes: Any) -> dict[str, Any]:
    args = {"x": zeros(2, 24), "conv_state": zeros(2, 24, 4), "weight": zeros(24, 4)}
    return {**args, **changes}


UPDATE_ERRORS: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "x has one axis": (
        ValueError, "x has shape [24]; supported: [B, D] or [B, D, T]", updating(x=zeros(24))),
    "state is None": (
        TypeError, "conv_state is None; supported: torch.Tensor", updating(conv_state=None)),
    "state is too short": (
        ValueError, "conv_state has shape [2, 24, 2]; supported: [N, D, S] with S from W - 1 = 3",
        updating(conv_state=zeros(2, 24, 2))),
    "state of another batch": (
        ValueError, "conv_state has shape [3, 24, 4]; supported: [N, D, S] = [2, 24, 4]",
        updating(conv_state=zeros(3, 24, 4))),
    "state is bf16": (
        TypeError, "conv_state is bfloat16 and x is float32; supported: one dtype",
        updating(conv_state=zeros(2, 24, 4, dtype=torch.bfloat16))),
    "indices are float": (
        TypeError, "conv_state_indices is float32; supported: int64, int32",
        updating(conv_state_indices=zeros(2))),
    "indices of another batch": (
        ValueError, "conv_state_indices has shape [3]; supported: [B] = [2]",
        updating(conv_state_indices=zeros(3, dtype=torch.int64))),
    "an index too large": (
        ValueError, "conv_state_indices has 2 at position 1; supported: below the 2 states",
        updating(conv_state_indices=torch.tensor([0, 2]))),
    "an index twice": (
        ValueError, "conv_state_indices has 1 twice; two rows would write one state",
        updating(conv_state_indices=torch.tensor([1, 1]))),
    "state is expanded": (
        ValueError, "conv_state overlaps itself (shape [2, 24, 4], strides (0, 4, 1))",
        updating(conv_state=zeros(1, 24, 4).expand(2, 24, 4))),
    "states overlap": (
        ValueError, "conv_state overlaps itself (shape [2, 24, 4], strides (72, 3, 1))",
        updating(conv_state=zeros(200).as_strided((2, 24, 4), (72, 3, 1)))),
    "gelu": (
        ValueError, "activation is 'gelu'; supported: None, 'silu', 'swish'",
        updating(activation="gelu")),
    "a gradient": (
        NotImplementedError, "weight requires grad, and conv_state is overwritten",
        updating(weight=torch.zeros(24, 4, requires_grad=True))),
}  # fmt: skip


@pytest.mark.parametrize("wrong", UPDATE_ERRORS)
def test_errors_of_the_update(wrong: str) -> None:
    kind, text, args = UPDATE_ERRORS[wrong]
    with pytest.raises(kind) as raised:
        causal_conv1d_update(**args)
    assert str(raised.value).startswith("causal_conv1d_update: "), raised.value
    assert text in str(raised.value)


def test_operators_check_again() -> None:
    """For those who call them directly, and for contents that a trace does not see."""
    x, weight, state = zeros(2, 8, 6), zeros(8, 4), zeros(2, 8, 3)
    forward_op, update_op = OPS.causal_conv1d_forward, OPS.causal_conv1d_update
    for text, call in {
        "x has shape [8, 6]; expected [B, D, T]": lambda: forward_op(
            x[0], weight, None, None, None, None, True, False),
        "weight has width 9": lambda: forward_op(
            x, zeros(8, 9), None, None, None, None, True, False),
        "weight has shape [7, 4]": lambda: forward_op(
            x, zeros(7, 4), None, None, None, None, True, False),
        "initial_states has shape [2, 8, 2]": lambda: forward_op(
            x, weight, None, state[..., 1:], None, None, True, False),
        "cu_seqlens ends at 7": lambda: forward_op(
            x[:1], weight, None, None, None, torch.tensor([0, 7]), True, False),
        "seq_idx is float32": lambda: forward_op(
            x, weight, None, None, zeros(2, 6), None, True, False),
        "conv_state keeps 2 tokens": lambda: update_op(x, state[..., 1:], weight, None, None, True),
        "conv_state_indices has 2 at position 1": lambda: update_op(
            x, state, weight, None, torch.tensor([0, 2]), True),
        "conv_state_indices has 1 twice": lambda: update_op(
            x, state, weight, None, torch.tensor([1, 1]), True),
    }.items():  # fmt: skip
        with pytest.raises(RuntimeError) as raised:
            call()
        assert text in str(raised.value)


def test_forcing_an_instruction_set_has_an_effect() -> None:
    names = deltanet_ext.available_cpu_isas()
    if len(names) == 1:
        pytest.skip("this machine has one instruction set")
    args = Conv(D=256).inputs()
    results = []
    for name in (names[0], "scalar"):
        deltanet_ext.force_cpu_isa(name)
        results.append(forward(args)[0])
    deltanet_ext.force_cpu_isa(None)
    assert not torch.equal(*results)  # another exp: other last bits


# ---- gradients ---------------------------------------------------------------------------------

DIFFERENTIABLE = ("x", "weight", "bias", "initial_states")
TRAINED = [
    *(Conv(T=T) for T in (0, 1, 2, 3, 31, 32, 33, 64, 70)),
    *(Conv(W=W, T=T, channels_first=True) for W in range(1, 9) for T in (2, 37)),
    Conv(D=130, T=35, bias=False, state=False, activation=None),
    Conv(B=0, T=4),
    Conv(B=1, T=60, cu=(0, 0, 2, 35, 35, 52)),
    Conv(B=1, T=20, cu=(0, 0)),
]  # fmt: skip


def leaves_of(args: dict[str, Any], dtype: torch.dtype | None = None) -> dict[str, Any]:
    return {
        n: x.detach().to(dtype or x.dtype).requires_grad_() if n in DIFFERENTIABLE else x
        for n, x in args.items()
        if isinstance(x, Tensor) or n == "activation"
    }


def gradients(
    function: Callable[..., tuple[Tensor, Tensor]],
    leaves: dict[str, Any],
    grads: tuple[Tensor, Tensor],
) -> dict[str, Tensor]:
    names = [n for n in DIFFERENTIABLE if n in leaves]
    results = torch.autograd.grad(
        function(leaves), [leaves[n] for n in names], grads, materialize_grads=True
    )
    return dict(zip(names, results, strict=True))


def ours(leaves: dict[str, Any]) -> tuple[Tensor, Tensor]:
    return causal_conv1d_fn(**leaves, return_final_states=True)


def in_dtype(dtype: torch.dtype) -> Callable[..., tuple[Tensor, Tensor]]:
    return lambda leaves: reference.causal_conv1d(**leaves, dtype=dtype)


def grads_of(args: dict[str, Any]) -> tuple[Tensor, Tensor]:
    gen = torch.Generator().manual_seed(3)
    return tuple(
        torch.randn(x.shape, generator=gen, dtype=torch.float64).to(args["x"].dtype)
        for x in exact(args)
    )


@pytest.mark.parametrize("dtype", dtypes(torch.float32, torch.bfloat16))
@pytest.mark.parametrize("case", TRAINED, ids=str)
def test_gradients(case: Conv, dtype: torch.dtype, isa: str, poison: None) -> None:
    """At most twice the error of the plain formula in fp32, whose results are rounded as ours."""
    args = case.inputs(dtype)
    grads = grads_of(args)
    want = gradients(
        in_dtype(torch.float64), leaves_of(args, torch.float64), tuple(g.double() for g in grads)
    )
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    plain = gradients(in_dtype(wide), leaves_of(args, wide), tuple(g.to(wide) for g in grads))
    got = gradients(ours, leaves_of(args), grads)
    floor = {torch.float32: 3e-7, torch.float64: 1e-15}.get(dtype, 1e-6)
    for name, expected in want.items():
        assert got[name].dtype == args[name].dtype
        baseline = plain[name].to(dtype)
        assert_no_worse(got[name], expected, baseline, floor=floor, factor=2, what=name)
    assert_layout(got["x"], args["x"])


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("cu", [None, (0, 2, 2, 8)], ids=str)
def test_gradcheck(cu: tuple[int, ...] | None, activation: str | None) -> None:
    case = Conv(B=1 if cu else 2, D=3, T=9, W=3, cu=cu, activation=activation)
    leaves = leaves_of(case.inputs(torch.float64))
    names = [n for n in DIFFERENTIABLE if n in leaves]

    def call(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return ours({**leaves, **dict(zip(names, tensors, strict=True))})

    assert torch.autograd.gradcheck(call, [leaves[n] for n in names])


def test_gradcheck_of_seq_idx() -> None:
    numbers = torch.tensor([[0, 0, 1, 1, 1, -1, 2], [4, 4, 4, 4, 4, 4, 4]])
    leaves = leaves_of(Conv(D=2, T=7, W=3, state=False).inputs(torch.float64))

    def call(x: Tensor, weight: Tensor) -> Tensor:
        return causal_conv1d_fn(x, weight, None, numbers, activation="silu")

    assert torch.autograd.gradcheck(call, [leaves["x"], leaves["weight"]])


@pytest.mark.parametrize("wanted", DIFFERENTIABLE)
def test_each_gradient_alone(wanted: str, poison: None) -> None:
    args = Conv(D=130, T=40).inputs()
    grads = grads_of(args)
    every = gradients(ours, leaves_of(args), grads)
    leaves = {n: x.detach() if isinstance(x, Tensor) else x for n, x in leaves_of(args).items()}
    leaves[wanted] = leaves[wanted].requires_grad_()
    (alone,) = torch.autograd.grad(ours(leaves), [leaves[wanted]], grads)
    assert_same_bits(alone, every[wanted], wanted)


@pytest.mark.parametrize("kept", [0, 1])
def test_gradients_of_one_result(kept: int) -> None:
    """Through the output alone, or the final states alone: as with zeros for the other."""
    args = Conv(D=20, T=40).inputs()
    grads = list(grads_of(args))
    leaves = leaves_of(args)
    names = list(DIFFERENTIABLE)
    got = torch.autograd.grad(
        ours(leaves)[kept], [leaves[n] for n in names], grads[kept], allow_unused=True
    )
    grads[1 - kept] = torch.zeros_like(grads[1 - kept])
    want = gradients(ours, leaves_of(args), (grads[0], grads[1]))
    for name, x in zip(names, got, strict=True):
        assert_same_bits(x, want[name], name)


def test_gradients_for_any_number_of_threads(threads: Callable[[int], None], isa: str) -> None:
    args = Conv(D=300, T=400).inputs()
    grads = grads_of(args)
    threads(1)
    want = gradients(ours, leaves_of(args), grads)
    for n in (1, 2, 3):
        threads(n)
        for name, x in gradients(ours, leaves_of(args), grads).items():
            assert_same_bits(x, want[name], f"{name} with {n} threads")


def test_gradients_of_packed_sequences_equal_separate_ones(isa: str) -> None:
    cu = (0, 1, 30, 30, 62)
    args = Conv(B=1, D=20, T=64, cu=cu, state=True).inputs()
    grads = grads_of(args)
    packed = gradients(ours, leaves_of(args), grads)
    for n, (start, stop) in enumerate(pairwise(cu)):
        one = {**args, "x": args["x"][..., start:stop], "cu_seqlens": None}
        one["initial_states"] = args["initial_states"][n : n + 1]
        alone = gradients(ours, leaves_of(one), (grads[0][..., start:stop], grads[1][n : n + 1]))
        assert_same_bits(alone["x"], packed["x"][..., start:stop], f"x of sequence {n}")
        got = packed["initial_states"][n : n + 1]
        assert_same_bits(alone["initial_states"], got, f"state of sequence {n}")
    assert (packed["x"][..., 62:] == 0).all()


def test_what_is_not_built_is_refused() -> None:
    leaves = leaves_of(Conv(D=3, T=5).inputs())
    out, _ = ours(leaves)
    (first,) = torch.autograd.grad(out.sum(), leaves["x"], create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives are not built"):
        first.sum().backward()
    x, weight = leaves["x"].detach(), leaves["weight"].detach()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(NotImplementedError, match="forward-mode"):
            causal_conv1d_fn(dual, weight)


def test_opcheck_with_gradients() -> None:
    leaves = leaves_of(Conv(T=9).inputs())
    args = positional({"seq_idx": None, "cu_seqlens": None, **leaves}, True)
    torch.library.opcheck(OPS.causal_conv1d_forward.default, args)
    tensors = [None if x is None else x.detach() for x in args[:6]]
    grads = grads_of(Conv(T=9).inputs())
    for wanted in (15, 2, 0):
        torch.library.opcheck(OPS.causal_conv1d_backward.default, (*grads, *tensors, True, wanted))


def test_a_compiled_training_step() -> None:
    torch._dynamo.reset()

    def loss(x: Tensor, weight: Tensor) -> Tensor:
        return causal_conv1d_fn(x, weight, activation="silu").square().sum()

    args = Conv(T=40).inputs()
    results = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        leaves = leaves_of(args)
        function(leaves["x"], leaves["weight"]).backward()
        results.append((leaves["x"].grad, leaves["weight"].grad))
    for a, b in zip(*results, strict=True):
        assert_same_bits(a, b)
    torch._dynamo.reset()
