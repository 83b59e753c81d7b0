# SPDX-License-Identifier: Apache-2.0
"""The named cases, in one place: what goes in, and what the fp64 recurrence makes of it."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from closeness import assert_no_worse
from deltanet_ext import reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

# Largest RMSE ratio against the fp64 recurrence that needs no excuse. fp64 inputs: rounding is 2^29
# times finer, and the floor follows, with room for the two references not to be exact themselves.
FLOORS = {torch.float32: 1e-5, torch.bfloat16: 1e-5, torch.float16: 1e-5, torch.float64: 1e-12}


def dtypes(*quick: torch.dtype) -> list[Any]:
    """Every dtype as test parameters; those that are not `quick` are left to the full run."""
    slow = pytest.mark.slow
    return [pytest.param(d, id=name_of(d), marks=() if d in quick else slow) for d in DTYPES]


def arithmetic(dtype: torch.dtype) -> torch.dtype:
    """What the rule computes in, and the dtype of states, for inputs of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def name_of(dtype: torch.dtype) -> str:
    names = {"float32": "fp32", "float64": "fp64", "float16": "fp16", "bfloat16": "bf16"}
    return names[str(dtype).removeprefix("torch.")]


@dataclass(frozen=True)
class Case:
    """Sizes, and how the numbers are drawn. The name is the seed."""

    name: str
    B: int = 1
    T: int = 40
    HK: int = 1
    HV: int = 2
    K: int = 32
    V: int = 32
    keys: str = "random"
    g: str = "model"
    beta: str = "sigmoid"
    state: torch.dtype | None = None
    cu: tuple[int, ...] | None = None
    narrow_gates: bool = False  # g and beta in the dtype of q, k, v
    l2norm: bool = True
    scale: float | None = None
    state_v_first: bool = False
    raw_gate: bool = False  # use_gate_in_kernel, with A_log and dt_bias
    raw_beta: bool = False  # use_beta_sigmoid_in_kernel
    neg_eigval: bool = False
    amplifies: bool = False  # see _stress: errors are judged over all rows together

    def __str__(self) -> str:
        return self.name

    def inputs(self, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
        """The keyword arguments of one call, final state included."""
        gen = torch.Generator().manual_seed(zlib.crc32(self.name.encode()))
        shape = (self.B, self.T)
        gates = dtype if self.narrow_gates else arithmetic(dtype)

        def randn(*sizes: int) -> Tensor:
            return torch.randn(*sizes, generator=gen, dtype=torch.float64)

        g = _GATES[self.g](randn(*shape, self.HV))
        beta = _BETAS[self.beta](randn(*shape, self.HV))
        if self.raw_gate:
            g = randn(*shape, self.HV)
        if self.raw_beta:
            beta = 3 * randn(*shape, self.HV)
        args: dict[str, Any] = {
            "query": randn(*shape, self.HK, self.K).to(dtype),
            "key": _KEYS[self.keys](randn(*shape, self.HK, self.K)).to(dtype),
            "value": randn(*shape, self.HV, self.V).to(dtype),
            "g": None if g is None else g.to(gates),
            "beta": None if beta is None else beta.to(gates),
            "output_final_state": True,
            "use_qk_l2norm_in_kernel": self.l2norm,
        }
        if self.state is not None:
            matrix = (self.V, self.K) if self.state_v_first else (self.K, self.V)
            args["initial_state"] = randn(self.sequences, self.HV, *matrix).to(self.state)
        if self.cu is not None:
            args["cu_seqlens"] = torch.tensor(self.cu)
        if self.scale is not None:
            args["scale"] = self.scale
        if self.state_v_first:
            args["state_v_first"] = True
        if self.raw_gate:
            args["use_gate_in_kernel"] = True
            args["A_log"] = torch.linspace(-4, math.log(16), self.HV, dtype=torch.float32)
            args["dt_bias"] = randn(self.HV).float()
        if self.raw_beta:
            args["use_beta_sigmoid_in_kernel"] = True
        if self.neg_eigval:
            args["allow_neg_eigval"] = True
        return args

    @property
    def sequences(self) -> int:
        return self.B if self.cu is None else len(self.cu) - 1


def _decay_rates(heads: int) -> Tensor:
    """From heads that remember a thousand tokens to heads that forget at once."""
    return torch.logspace(-3, math.log10(16), heads, dtype=torch.float64)


def _drop_once(x: Tensor) -> Tensor:
    g = torch.zeros_like(x)
    g[:, : x.shape[1] // 2 + 1][:, -1:] = -90.0
    return g


_GATES: dict[str, Callable[[Tensor], Tensor | None]] = {
    "model": lambda x: -_decay_rates(x.shape[-1]) * torch.nn.functional.softplus(x),
    "weak": lambda x: torch.where(x > 0, 0.0, -1e-3),
    "none": lambda x: None,
    "zero": torch.zeros_like,
    "strong": lambda x: torch.full_like(x, -20.0),
    "drop": _drop_once,
    "drop-first": lambda x: torch.where(torch.arange(x.shape[1])[:, None] == 0, -90.0, 0 * x),
    "positive": lambda x: 0.1 * x,
    "all positive": lambda x: 0.05 * x.abs(),
    "strong growth": lambda x: 0.7 * x.abs(),
    "large, both signs": lambda x: 3 * x,
    "0.25": lambda x: torch.full_like(x, 0.25),
    "0.5": lambda x: torch.full_like(x, 0.5),
    "-inf": lambda x: torch.full_like(x, -math.inf),
    "some -inf": lambda x: torch.where(x > 1, -math.inf, -0.1 * x.abs()),
    "huge negative": lambda x: torch.full_like(x, -1e30),
}

_BETAS: dict[str, Callable[[Tensor], Tensor | None]] = {
    "sigmoid": torch.sigmoid,
    "none": lambda x: None,
    "0": torch.zeros_like,
    "1": torch.ones_like,
    "1.999": lambda x: torch.full_like(x, 1.999),
    "0 to 2": lambda x: 2 * torch.sigmoid(3 * x),
}


def _identical(x: Tensor) -> Tensor:
    return x[:, :1].expand_as(x)


def _of_norm(x: Tensor, norm: float) -> Tensor:
    return norm * torch.nn.functional.normalize(x, dim=-1)


_KEYS: dict[str, Callable[[Tensor], Tensor]] = {
    "random": lambda x: x,
    "identical": _identical,
    "identical unit": lambda x: _of_norm(_identical(x), 1.0),
    "alternating": lambda x: _identical(x) * (-1.0) ** torch.arange(x.shape[1])[:, None, None],
    "correlated": lambda x: _of_norm(x, 0.6) + _of_norm(_identical(x), 0.8),
    "norm 2": lambda x: _of_norm(x, 2.0),
    "identical norm 2": lambda x: _of_norm(_identical(x), 2.0),
    "zero": torch.zeros_like,
    "some zero": lambda x: torch.where(x[..., :1] > 0, x, 0.0),
    "tiny": lambda x: 1e-4 * x,
    "unit": lambda x: _of_norm(x, 1.0),
}


def _tokens() -> list[Case]:
    lengths = [0, 1, 2, 3, 4, 5, 8, 15, 16, 17, 23, 24, 25, 31, 32, 33, 63, 64, 65, 127, 130, 200]
    return [Case(f"T={T}", T=T, HK=2, HV=4, state=torch.float32) for T in lengths]


def _heads() -> list[Case]:
    heads = [(1, 1), (1, 2), (1, 3), (1, 4), (1, 8), (2, 2), (2, 4), (2, 6), (3, 3), (4, 4), (4, 8)]
    heads += [(8, 8), (3, 9), (5, 15)]
    return [Case(f"HK={k} HV={v}", T=37, HK=k, HV=v, K=16, V=24) for k, v in heads]


def _head_dims() -> list[Case]:
    dims = [
        (1, 1),
        (1, 256),
        (256, 1),
        (2, 3),
        (3, 5),
        (7, 64),
        (8, 8),
        (9, 15),
        (16, 16),
        (17, 33),
    ]
    dims += [(31, 8), (32, 48), (33, 100), (48, 96), (60, 60), (64, 128), (65, 63), (96, 192)]
    dims += [(100, 60), (127, 129), (128, 128), (128, 256), (160, 40), (192, 96), (255, 13)]
    dims += [(13, 255), (200, 201), (256, 256)]
    return [Case(f"K={k} V={v}", T=41, K=k, V=v, state=torch.float32) for k, v in dims]


def _batches() -> list[Case]:
    return [Case(f"B={B}", B=B, T=35, HK=2, HV=4, state=torch.float32) for B in (0, 1, 2, 5)]


def _gates() -> list[Case]:
    common: dict[str, Any] = {"T": 90, "HK": 1, "HV": 3, "state": torch.float32}
    cases = [Case(f"g {g}", g=g, **common) for g in _GATES]
    cases += [Case(f"g {g}, long", T=300, HV=3, K=24, V=40, g=g) for g in ("zero", "weak", "drop")]
    cases += [Case(f"beta {b}", beta=b, **common) for b in _BETAS]
    cases += [Case("narrow gates", narrow_gates=True, **common)]
    cases += [Case("gate in kernel", raw_gate=True, **common)]
    cases += [Case("gate in kernel, narrow", raw_gate=True, narrow_gates=True, **common)]
    cases += [Case("beta sigmoid in kernel", raw_beta=True, **common)]
    cases += [Case("beta up to 2 in kernel", raw_beta=True, neg_eigval=True, **common)]
    return cases


def _states() -> list[Case]:
    cases = [Case(f"state in {name_of(d)}", B=2, HK=2, HV=4, V=24, state=d) for d in DTYPES]
    cases += [Case("state V first", B=2, HK=2, HV=4, V=24, state=torch.float32, state_v_first=True)]
    cases += [Case("state V first, none", B=2, K=24, V=40, state_v_first=True)]
    cases += [Case("state, g weak", T=150, g="weak", state=torch.float32)]
    return cases


def _scales() -> list[Case]:
    return [Case(f"scale {s}", state=torch.float32, scale=s) for s in (0.0, 1.0, -0.5, 100.0)]


def _plain() -> list[Case]:
    """Without l2norm: keys as they come."""
    return [
        Case("no l2norm, unit keys", T=130, keys="unit", l2norm=False, state=torch.float32),
        Case("no l2norm, small keys", T=130, keys="tiny", l2norm=False, state=torch.float32),
        Case("no l2norm, K=128", T=70, K=128, V=128, keys="unit", l2norm=False),
    ]


def _packed() -> list[Case]:
    cuts: list[tuple[int, tuple[int, ...]]] = [
        (64, (0, 0, 64)), (100, (0, 64, 64, 100)), (0, (0, 0)), (40, (0, 0)), (64, (0, 17, 50, 64)),
        (30, (0,)), (128, (0, 100)), (90, (0, 1, 2, 5, 9, 25, 42, 75)), (70, (0, 0, 0, 0)),
        (130, (0, 65, 65, 65, 66, 120)),
    ]  # fmt: skip
    sizes: dict[str, Any] = {"HK": 1, "HV": 3, "K": 24, "V": 40}
    cases = []
    for T, cu in cuts:
        name = f"packed {T} {list(cu)}".replace(" ", "")
        cases.append(Case(name, T=T, cu=cu, state=torch.float32, **sizes))
    return [*cases, Case("packed, no state", T=100, cu=(0, 64, 64, 100), **sizes)]


def _stress() -> list[Case]:
    """Inputs that break formulas which are right on paper.

    Some amplify the rounding of one number, the squared norm of a key that repeats, by the length
    of the run: whether that rounding is large or small in one draw says nothing about a kernel.
    These have many rows, over which errors are pooled.
    """
    cases = []
    amplifying = {"amplifies": True, "B": 12, "V": 16}

    def add(name: str, **kinds: Any) -> None:
        sizes = {"T": 130, "HK": 1, "HV": 2, "K": 64, "V": 48}
        cases.append(Case(name, **{**sizes, **kinds}))

    for beta in ("1", "1.999"):
        for g in ("zero", "none", "strong", "weak"):
            more = amplifying if beta == "1.999" and g != "strong" else {}
            add(f"identical keys, beta {beta}, g {g}", keys="identical", beta=beta, g=g, **more)
        for keys in ("alternating", "correlated", "some zero", "zero"):
            more = amplifying if beta == "1.999" and keys == "alternating" else {}
            add(f"{keys} keys, beta {beta}, g zero", keys=keys, beta=beta, g="zero", **more)
    for g in ("drop", "drop-first", "positive", "some -inf", "-inf"):
        add(f"identical keys, g {g}", keys="identical", beta="1", g=g)
    for keys in ("random", "identical"):
        add(f"K=8, {keys} keys, beta 1", keys=keys, beta="1", g="zero", K=8, V=8)
    for K, g in ((1, "0.25"), (1, "0.5"), (2, "0.25"), (2, "0.5"), (4, "0.25"), (4, "0.5")):
        # What is overwritten has grown: a chunk subtracts large numbers, a token only small ones.
        add(f"K={K}, beta 1, g {g}", beta="1", g=g, T=60, K=K, **amplifying)
    for g in ("model", "zero"):
        add(f"tiny keys, g {g}", keys="tiny", g=g)
    for keys, beta, T in (
        ("norm 2", "1", 16), ("norm 2", "1", 64), ("norm 2", "sigmoid", 64),
        ("identical norm 2", "1", 16), ("identical norm 2", "1", 64),
    ):  # fmt: skip
        name = f"{keys} keys, beta {beta}, g zero, T={T}"
        add(name, keys=keys, beta=beta, g="zero", T=T, l2norm=False, **amplifying)
    return cases


CASES: Mapping[str, list[Case]] = {
    "tokens": _tokens(),
    "heads": _heads(),
    "head dims": _head_dims(),
    "batches": _batches(),
    "gates": _gates(),
    "states": _states(),
    "scales": _scales(),
    "plain": _plain(),
    "packed": _packed(),
    "stress": _stress(),
}
ALL_CASES = [case for group in CASES.values() for case in group]
STRESS = CASES["stress"]


def case_named(name: str) -> Case:
    return next(case for case in ALL_CASES if case.name == name)


@contextmanager
def one_thread() -> Iterator[None]:
    """For the references: thousands of tiny operations, where a second thread is in the way."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def recurrence(
    args: Mapping[str, Any], dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """Output and final state by the reference."""
    with one_thread():
        out, state = reference.recurrent(**args, dtype=dtype)
    assert state is not None
    return out, state


@dataclass(frozen=True)
class Expected:
    """Output and final state: exact (fp64), and as the plain recurrence gives them."""

    out: Tensor
    state: Tensor
    baseline_out: Tensor
    baseline_state: Tensor
    pooled: bool  # heads and rows are judged together only


@cache  # several test files ask for the same ones
def expected(case: Case, dtype: torch.dtype) -> Expected:
    """From the same rounded inputs. The baseline's output is rounded to `dtype`, as ours is."""
    args = case.inputs(dtype)
    out, state = recurrence(args)
    if dtype == torch.float64:
        # Nothing finer to be compared with: the chunk form is the second opinion. Its chunks are
        # small, because where gates grow it cancels by the growth inside a chunk.
        with one_thread():
            base_out, second = reference.chunked(**args, chunk_size=4)
        assert second is not None
        base_state = second
    else:
        base_out, base_state = recurrence(args, arithmetic(dtype))
    return Expected(out, state, base_out.to(dtype), base_state, case.amplifies)


def assert_as_exact_as_the_recurrence(
    got: tuple[Tensor, Tensor | None], want: Expected, dtype: torch.dtype
) -> None:
    """The bound of every accuracy test: max(floor, twice the error of the plain recurrence)."""
    out, state = got
    assert out.dtype == dtype
    assert out.is_contiguous()
    floor = FLOORS[dtype]
    axes = () if want.pooled else (0, 2)
    assert_no_worse(out, want.out, want.baseline_out, floor=floor, head_axes=axes, what="output")
    assert state is not None
    assert state.dtype == arithmetic(dtype)
    assert state.is_contiguous()
    axes = () if want.pooled else (0, 1)
    assert_no_worse(
        state, want.state, want.baseline_state, floor=floor, head_axes=axes, what="state"
    )
