# SPDX-License-Identifier: Apache-2.0
"""The tensor-core forward on the emulator, all checks on, against the fp64 recurrence."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import emulated
from closeness import assert_same_bits, rmse_ratio
from deltanet_ext import reference

if reason := emulated.why_not():
    pytest.skip(f"emulated CUDA operators: {reason}", allow_module_level=True)

pytestmark = pytest.mark.slow  # the first run compiles for minutes

BF16, FP16 = torch.bfloat16, torch.float16
AUTO, NEVER, ALWAYS = 0, 1, 2  # warps with roles


@dataclass(frozen=True)
class Case:
    """Sizes, and how the numbers are drawn. The name is the seed."""

    name: str
    B: int = 1
    T: int = 200
    HK: int = 1
    HV: int = 2
    K: int = 128
    V: int = 128
    keys: str = "random"
    g: str | None = "model"
    beta: float | None = None
    state: torch.dtype | None = torch.float32
    cu: tuple[int, ...] | None = None
    l2norm: bool = True
    state_v_first: bool = False
    gates: torch.dtype = torch.float32
    raw: bool = False  # gate and beta made in the kernel
    dtype: torch.dtype = BF16
    state_error: float = 1e-5

    def __str__(self) -> str:
        return self.name

    @property
    def sequences(self) -> int:
        return self.B if self.cu is None else len(self.cu) - 1

    def inputs(self) -> dict[str, Any]:
        """The keyword arguments of reference.recurrent, in the dtypes that the kernel gets."""
        gen = torch.Generator().manual_seed(zlib.crc32(self.name.encode()))

        def randn(*sizes: int) -> Tensor:
            return torch.randn(*sizes, generator=gen, dtype=torch.float64)

        keys, values = (self.B, self.T, self.HK, self.K), (self.B, self.T, self.HV, self.V)
        small = 1.0 if self.l2norm else self.K**-0.5
        query, key = randn(*keys) * small, randn(*keys) * small
        if self.keys == "identical":
            key = randn(self.HK, self.K).expand(keys)
        elif self.keys == "axis":
            key = torch.eye(self.K)[0].expand(keys)
        elif self.keys == "correlated":
            key = 2 * randn(self.HK, self.K) + key
        shape = values[:3]
        uniform = torch.rand(shape, generator=gen, dtype=torch.float64)
        g = {
            None: lambda: None,
            "model": lambda: -0.5 * torch.nn.functional.softplus(randn(*shape) - 2),
            "zero": lambda: torch.zeros(shape),
            "strong": lambda: -20 * torch.rand(shape, generator=gen),
            "growing": lambda: torch.full(shape, 0.5),
            "both": lambda: 5 * randn(*shape),
            "wandering": lambda: 0.3 * randn(*shape),
            "jump": lambda: torch.where(torch.arange(self.T)[:, None] == 77, 3.0, -0.1).expand(
                shape
            ),
        }[self.g]()
        beta = uniform if self.beta is None else torch.full(shape, self.beta)
        x: dict[str, Any] = {
            "query": query.to(self.dtype),
            "key": key.to(self.dtype),
            "value": randn(*values).to(self.dtype),
            "g": None if g is None else g.to(self.gates).contiguous(),
            "beta": beta.to(self.gates),
            "use_qk_l2norm_in_kernel": self.l2norm,
            "state_v_first": self.state_v_first,
        }
        if self.raw:
            x["g"], x["beta"] = randn(*shape).to(self.gates), randn(*shape).to(self.gates)
            x["A_log"], x["dt_bias"] = randn(self.HV).float(), randn(self.HV).float()
            x["use_gate_in_kernel"] = x["use_beta_sigmoid_in_kernel"] = True
            x["allow_neg_eigval"] = True
        if self.state is not None:
            sizes = (self.V, self.K) if self.state_v_first else (self.K, self.V)
            x["initial_state"] = 0.3 * randn(self.sequences, self.HV, *sizes)
            x["initial_state"] = x["initial_state"].to(self.state)
        if self.cu is not None:
            x["cu_seqlens"] = torch.tensor(self.cu, dtype=torch.int32)
        return x


def run(x: dict[str, Any], **options: Any) -> tuple[Tensor, Tensor]:
    """The kernels, for the arguments of reference.recurrent."""
    value = x.get("value")
    heads, dim = (value if value is not None else x["key"]).shape[2:]
    return emulated.call(
        "tensor_core_forward",
        x["query"],
        x["key"],
        value,
        *(x.get(n) for n in ("g", "beta", "initial_state", "cu_seqlens", "A_log", "dt_bias")),
        options.pop("heads", heads),
        options.pop("dim_v", dim),
        x.get("scale") or x["key"].shape[-1] ** -0.5,
        x["use_qk_l2norm_in_kernel"],
        x.get("use_beta_sigmoid_in_kernel", False),
        x.get("allow_neg_eigval", False),
        x.get("state_v_first", False),
        options.pop("state_only", False),
        options.pop("fast", False),
        options.pop("warps", 0),
        options.pop("segment_chunks", 0),
        options.pop("roles", AUTO),
    )


def expected(x: dict[str, Any]) -> tuple[Tensor, Tensor]:
    wide = {
        n: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v
        for n, v in x.items()
    }
    return reference.recurrent(**wide, output_final_state=True)


def assert_right(got: tuple[Tensor, Tensor], x: dict[str, Any], state_error: float) -> None:
    """The output is as good as its rounding alone, give or take 15%; the state nearly fp32."""
    out, state = got
    want, want_state = expected(x)
    # What the dtype cannot hold is infinite in both, and left out of the comparison.
    rounded = want.to(out.dtype)
    held = rounded.isfinite()
    assert torch.equal(out.isfinite(), held)
    want = want.where(held, 0)
    error, rounding = rmse_ratio(out.where(held, 0), want), rmse_ratio(rounded.where(held, 0), want)
    assert error <= 1.15 * rounding, f"output: {error:.3e}, rounding alone {rounding:.3e}"
    error = rmse_ratio(state, want_state)
    assert error <= state_error, f"state: {error:.3e}, allowed {state_error:.0e}"


CASES = [
    Case("random"),
    Case("no-gate", g="zero"),
    Case("absent-gate", g=None, T=70),
    Case("strong-gates", g="strong"),
    Case("identical-beta-2", keys="identical", g="zero", beta=1.999, state_error=3e-4),
    Case("correlated", keys="correlated", g="zero", beta=0.95),
    Case("without-l2norm", l2norm=False),
    Case("no-initial-state", state=None),
    Case("gva-batch", B=2, T=77, HK=2, HV=6),
    Case("one-token", T=1),
    Case("whole-chunks", T=128),
    Case("v-first", T=77, state_v_first=True),
    Case("narrow", T=77, gates=BF16, state=BF16),
    Case("raw-gates", T=77, raw=True),
    # Packed: sequences start anywhere, some are empty, and tokens may be left over.
    Case("packed", T=300, cu=(0, 17, 50, 50, 64, 300), HK=2, HV=2),
    Case("packed-tail", T=200, cu=(0, 0, 65, 130, 130)),
    Case("packed-empty", T=70, cu=(0, 0, 0)),
    Case("packed-nothing", T=70, cu=(0,)),
    # Gates that grow: chunks are cut into windows.
    Case("growing", T=64, g="growing", HV=1),
    Case("wandering", g="wandering"),
    Case("jump", g="jump", HV=1),
    Case("packed-wandering", T=150, g="wandering", cu=(0, 30, 150)),
    # One key along an axis, and no state that outgrows it all: the recurrence is exact to rounding,
    # a chunk that is not cut loses every digit. Inside a window errors may grow by e.
    Case("growing-axis", T=64, g="growing", keys="axis", beta=1.0, state=None),
    Case("wandering-axis", g="wandering", keys="axis", beta=0.9, state=None, state_error=3e-5),
    # Head dims: buckets of 64 and 128, masked tails, several blocks of columns.
    Case("k64-v64", T=77, K=64, V=64),
    Case("k16-v8", T=77, K=16, V=8),
    Case("k96-v256", T=70, K=96, V=256, HV=1),
    Case("k40-v72", T=70, K=40, V=72, HV=1),
    # fp16: terms of states and new values are taken of scaled rows.
    Case("fp16", dtype=FP16),
    Case("fp16-k64", T=77, dtype=FP16, K=64, V=64),
    Case("fp16-narrow", T=77, dtype=FP16, gates=FP16, state=FP16),
    Case("fp16-strong-gates", T=77, dtype=FP16, g="strong"),
    Case("fp16-both-signs", T=77, dtype=FP16, g="both"),
    Case("fp16-wandering", T=100, dtype=FP16, g="wandering", HV=1),
    Case(
        "fp16-identical", dtype=FP16, keys="identical", g="zero", beta=1.999, state_error=3e-4, HV=1
    ),
    Case("fp16-without-l2norm", T=77, dtype=FP16, l2norm=False),
]


def assert_roles_change_nothing(x: dict[str, Any], **options: Any) -> None:
    """Warps with roles give the same bits as warps that do all of it."""
    results = [run(x, roles=roles, **{"warps": 2, **options}) for roles in (ALWAYS, NEVER)]
    for name, a, b in zip(("output", "state"), *results, strict=True):
        assert_same_bits(a, b, f"{name}, {options}")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_recurrence(case):
    x = case.inputs()
    assert_right(run(x, roles=NEVER), x, case.state_error)
    if case.K > 64:  # elsewhere there are no roles
        assert_roles_change_nothing(x)


@pytest.mark.parametrize("g", ["model", "wandering"])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_roles_in_a_block_of_16_columns(g, dtype):
    assert_roles_change_nothing(
        Case("narrow-roles", T=130, HV=1, g=g, dtype=dtype).inputs(), warps=1
    )


@pytest.mark.parametrize("roles", [NEVER, ALWAYS])
def test_schedules_change_nothing(roles):
    x = Case("schedules", T=150, g="wandering").inputs()
    want = run(x, warps=2, roles=roles)
    for seed in (1, 2, 3, 4):
        with emulated.schedule(seed):
            got = run(x, warps=2, roles=roles)
            for name, a, b in zip(("output", "state"), got, want, strict=True):
                assert_same_bits(a, b, f"{name}, schedule {seed}")


FAST = [
    Case("fast", g="zero"),
    Case("fast-k64", T=77, K=64, V=64),
    Case("fast-correlated", keys="correlated", g="zero", beta=0.95),
    Case("fast-fp16", T=77, dtype=FP16),
    Case("fast-fp16-k64", T=77, dtype=FP16, K=64, V=64),
]


@pytest.mark.parametrize("case", FAST, ids=str)
def test_fast_is_nearly_as_good_as_rounding(case):
    x = case.inputs()
    out, state = run(x, fast=True)
    want, want_state = expected(x)
    assert rmse_ratio(out, want) <= 2.5e-3
    assert rmse_ratio(state, want_state) <= 2e-3
    if case.K > 64:
        assert_roles_change_nothing(x, fast=True)


@pytest.mark.parametrize("size", [1e4, 1e-6])
def test_fp16_states_far_outside_the_range_of_fp16(size):
    x = Case("far", T=100, dtype=FP16, HV=1).inputs()
    x["initial_state"] = x["initial_state"].double() * size
    x["initial_state"] = x["initial_state"].float()
    x["scale"] = 0.1 / max(size, 1.0)
    assert_right(run(x), x, 1e-5)


def test_rows_with_gaps_and_unaligned_dims():
    """Views of one projection; K = 100 and V = 20 in rows of 104 and 24."""
    gen = torch.Generator().manual_seed(5)
    T, HK, HV, K, V = 70, 1, 2, 100, 20
    rows = torch.randn(1, T, 2 * HK * 104 + HV * 24, generator=gen).bfloat16()
    query, key, value = rows.split([HK * 104, HK * 104, HV * 24], dim=-1)
    x = Case("gaps", T=T, HK=HK, HV=HV, K=K, V=V, state_v_first=True).inputs()
    x["query"] = query.unflatten(-1, (HK, 104))[..., :K]
    x["key"] = key.unflatten(-1, (HK, 104))[..., :K]
    x["value"] = value.unflatten(-1, (HV, 24))[..., :V]
    x["g"] = x["g"].mT.contiguous().mT  # heads first
    x["beta"] = x["beta"][:, :, :1].expand(-1, -1, HV)
    assert_right(run(x), x, 1e-5)


SEGMENTED = [
    *(Case(f"segments-{g}", T=460, HV=1, g=g) for g in ("zero", "model")),
    Case("segments-batch", B=2, T=200, HV=2),
    Case("segments-packed", T=420, HV=1, cu=(0, 30, 30, 330, 400)),
    Case("segments-k40-v72", T=300, HV=1, K=40, V=72, state=None),
    # Few keys: the scan by key takes 8 columns of V per block, not 16.
    Case("segments-few", T=300, HV=1, V=24),
    Case("segments-fp16", T=300, HV=1, dtype=FP16),
    Case("segments-wandering", T=200, HV=1, g="wandering"),
]


@pytest.mark.parametrize("length", [1, 2])
@pytest.mark.parametrize("case", SEGMENTED, ids=str)
def test_segments(case, length):
    x = case.inputs()
    assert_right(run(x, segment_chunks=length), x, 1e-5)
    if case.K > 64:
        assert_roles_change_nothing(x, segment_chunks=length)


def test_segments_with_a_weak_gate_count_the_initial_state_once():
    x = Case("weak", T=300, HV=1, g="zero").inputs()
    x["g"] = x["g"] - 1e-3
    x["initial_state"] = 100 * x["initial_state"]
    assert_right(run(x, segment_chunks=1), x, 1e-5)


@pytest.mark.parametrize("segment_chunks", [0, 2])
def test_transition(segment_chunks):
    """Equation (8): U from the zero state, M from I without values, states only."""
    case = Case("transition", T=300, HV=2, V=72, state=None)
    x = case.inputs()
    want_M, want_U = reference.transition(
        *(x[n].double() for n in ("key", "value", "g", "beta")), use_qk_l2norm_in_kernel=True
    )
    options = {"state_only": True, "segment_chunks": segment_chunks}
    _, U = run(x, **options)
    _, M = run({**x, "value": None}, heads=case.HV, dim_v=case.K, **options)
    assert rmse_ratio(U, want_U) <= 2e-5
    assert rmse_ratio(M, want_M) <= 2e-5


def test_schedules_change_no_segment():
    x = Case("segment-schedules", T=200, HV=1).inputs()
    want = run(x, segment_chunks=1)
    for seed in (1, 2, 3):
        with emulated.schedule(seed):
            for a, b in zip(run(x, segment_chunks=1), want, strict=True):
                assert_same_bits(a, b, f"schedule {seed}")


@pytest.mark.parametrize("g", ["model", "wandering"])
@pytest.mark.parametrize("at", [70, 100, 127])
def test_a_token_changes_nothing_before_it(at, g):
    x = Case("causal", T=140, g=g, HV=1).inputs()
    want, _ = run(x)
    gen = torch.Generator().manual_seed(at)
    for name in ("query", "key", "value", "g", "beta"):
        x[name] = x[name].clone()
        x[name][:, at] = torch.randn(x[name][:, at].shape, generator=gen) * 100
    assert_same_bits(run(x)[0][:, :at], want[:, :at])


@pytest.mark.parametrize("warps", [1, 2, 8])
def test_any_number_of_columns_per_block(warps):
    x = Case("columns", T=70).inputs()
    for a, b in zip(run(x, warps=warps), run(x), strict=True):
        assert_same_bits(a, b)
