# SPDX-License-Identifier: Apache-2.0
"""The tensor-core forward on the emulator, all checks on, against the fp64 recurrence."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
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
        *options,
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
    error, rounding = rmse_ratio(out, want), rmse_ratio(want.to(out.dtype), want)
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
    # Gates that grow: chunks are cut into windows.
    Case("growing", T=64, g="growing", HV=1),
    Case("growing-identical", T=64, g="growing", keys="identical", HV=1),
    Case("wandering", g="wandering"),
    Case("wandering-identical", T=100, g="wandering", keys="identical", HV=1),
    Case("jump", g="jump", HV=1),
    Case("packed-wandering", T=150, g="wandering", cu=(0, 30, 150)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_recurrence(case):
    x = case.inputs()
    assert_right(run(x), x, case.state_error)


def test_schedules_change_nothing():
    x = Case("schedules", T=150).inputs()
    want = run(x)
    for seed in (1, 2, 3, 4):
        with emulated.schedule(seed):
            for name, a, b in zip(("output", "state"), run(x), want, strict=True):
                assert_same_bits(a, b, f"{name}, schedule {seed}")


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
