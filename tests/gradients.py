# SPDX-License-Identifier: Apache-2.0
"""Gradients for tests: how they are made, and how they are judged, whatever computes them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

import deltanet_ext
from cases import Case, arithmetic, one_thread
from closeness import assert_same_bits, rmse_ratio
from deltanet_ext import reference

CHUNK = deltanet_ext.chunk_gated_delta_rule
NAMES = ("query", "key", "value", "g", "beta", "initial_state", "A_log", "dt_bias")

# RMSE ratio that needs no excuse: fp32, and half of what flash-linear-attention allows itself in 16
# bits, for dg and dbeta and for the rest.
FP32_FLOOR = 2e-5
NARROW, NARROW_GATES = 4e-3, 1e-2
# Below this an error is nothing, whatever it is a part of: gates underflow.
ABSOLUTE_FLOOR = 1e-30

Gradients = dict[str, Tensor]


def upstream(case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The gradients that arrive for the output and for the final state."""
    gen = torch.Generator().manual_seed(17)
    matrix = (case.V, case.K) if case.state_v_first else (case.K, case.V)
    out = torch.randn(case.B, case.T, case.HV, case.V, generator=gen).to(dtype)
    state = torch.randn(case.sequences, case.HV, *matrix, generator=gen).to(arithmetic(dtype))
    return out, state


def leaves(args: Mapping[str, Any], dtype: torch.dtype | None = None) -> dict[str, Any]:
    """The same arguments, with tensors of their own that require grad."""
    fresh = dict(args)
    for name in NAMES:
        if fresh.get(name) is not None:
            x = fresh[name].detach()
            fresh[name] = x.to(dtype or x.dtype, copy=True).requires_grad_()
    return fresh


def backward(
    function: Callable[..., Any], args: dict[str, Any], d_out: Tensor | None, d_state: Tensor | None
) -> Gradients:
    """Gradients of what requires grad in `args`, for the gradients of the results."""
    out, state = function(**args)
    pairs = [(x, d) for x, d in ((out, d_out), (state, d_state)) if d is not None]
    pairs = [(x, d) for x, d in pairs if x.requires_grad]  # not so in the reference without tokens
    torch.autograd.backward([x for x, _ in pairs], [d.to(x.dtype) for x, d in pairs])
    return {n: args[n].grad for n in NAMES if isinstance(args.get(n), Tensor)}


def by_recurrence(
    case: Case, dtype: torch.dtype, computed: torch.dtype, uses: str = "output, state"
) -> Gradients:
    def function(**args: Any) -> Any:
        return reference.recurrent(**args, dtype=computed)

    d_out, d_state = chosen(case, dtype, uses)
    with one_thread():
        return backward(function, leaves(case.inputs(dtype), computed), d_out, d_state)


def yardstick(case: Case, want: Gradients, uses: str = "output, state") -> Gradients:
    """fp32 autograd through the recurrence.

    Where keys overwrite each other exactly, terms of the size of other gradients cancel to nearly
    nothing in dg, and what is left is rounding: the same recurrence with K and V in another order
    is off by up to three times as much (docs/numerics.md). There dg is the worst of six orders. In
    the cases that amplify one rounding, the chunk rule by three tokens counts as well: that is
    where kernels end a chunk for the gates of these cases, and the sums over it are not to blame.
    """
    base = by_recurrence(case, torch.float32, torch.float32, uses)
    if want.get("g") is None:
        return base
    orders: list[Gradients] = []
    with one_thread():
        if rmse_ratio(base["g"], want["g"]) > 1:
            orders = [in_another_order(case, seed, uses) for seed in range(5)]
        elif case.amplifies:
            chunks = functools.partial(reference.chunked, chunk_size=3, dtype=torch.float32)
            arguments = leaves(case.inputs(), torch.float32)
            orders = [backward(chunks, arguments, *chosen(case, torch.float32, uses))]
    base["g"] = max((base["g"], *(x["g"] for x in orders)), key=lambda g: rmse_ratio(g, want["g"]))
    return base


def in_another_order(case: Case, seed: int, uses: str) -> Gradients:
    """fp32 autograd through the recurrence, with the rows and columns of states permuted."""
    gen = torch.Generator().manual_seed(seed)
    rows, columns = torch.randperm(case.K, generator=gen), torch.randperm(case.V, generator=gen)
    args, (d_out, d_state) = case.inputs(), chosen(case, torch.float32, uses)
    for name, order in (("query", rows), ("key", rows), ("value", columns)):
        args[name] = args[name][..., order]
    matrix = (columns, rows) if case.state_v_first else (rows, columns)

    def permuted(state: Tensor | None) -> Tensor | None:
        return None if state is None else state[..., matrix[0], :][..., matrix[1]]

    args["initial_state"] = permuted(args.get("initial_state"))
    function = functools.partial(reference.recurrent, dtype=torch.float32)
    d_out = None if d_out is None else d_out[..., columns]
    return backward(function, leaves(args, torch.float32), d_out, permuted(d_state))


def chosen(case: Case, dtype: torch.dtype, uses: str) -> tuple[Tensor | None, Tensor | None]:
    d_out, d_state = upstream(case, dtype)
    return d_out if "output" in uses else None, d_state if "state" in uses else None


def ours(
    case: Case,
    dtype: torch.dtype = torch.float32,
    function: Callable[..., Any] = CHUNK,
    uses: str = "output, state",
) -> Gradients:
    """By the public function, on whatever it runs on."""
    return backward(function, leaves(case.inputs(dtype)), *chosen(case, dtype, uses))


def judge(
    got: Gradients,
    want: Gradients,
    base: Gradients | None,
    bounds: Mapping[str, float],
) -> None:
    """Every gradient within its bound, or twice as far off as the plain recurrence."""
    failures = []
    for name, exact in want.items():
        grad = got[name]
        if exact is None:  # the reference has no path to it
            assert grad is None or not grad.any(), name
            continue
        assert grad is not None, name
        assert grad.shape == exact.shape, name
        assert torch.isfinite(grad).all(), name
        error = rmse_ratio(grad, exact)
        bound = bounds.get(name, bounds["else"])
        if grad.dtype in (torch.bfloat16, torch.float16):
            bound = max(bound, bounds.get("narrow", NARROW))
        if base is not None:
            bound = max(bound, 2 * rmse_ratio(base[name], exact))
        size = float((grad.double() - exact).square().mean().sqrt()) if grad.numel() else 0.0
        if error > bound and size > ABSOLUTE_FLOOR:
            failures.append(f"d{name}: RMSE ratio {error:.2e} is above {bound:.2e}")
    assert not failures, "; ".join(failures)


def judge_fp32(
    case: Case, function: Callable[..., Any] = CHUNK, uses: str = "output, state"
) -> None:
    want = by_recurrence(case, torch.float32, torch.float64, uses)
    got = ours(case, torch.float32, function, uses)
    judge(got, want, yardstick(case, want, uses), {"else": FP32_FLOOR})


def judge_packed(case: Case) -> None:
    """Packed sequences get the bits that each of them gets alone. The second one is empty, and
    what stands behind the last one gets zeros."""
    args, (d_out, d_state) = case.inputs(), upstream(case, torch.float32)
    got = backward(CHUNK, leaves(args), d_out, d_state)
    assert case.cu is not None
    for n, (begin, end) in enumerate(zip(case.cu, case.cu[1:], strict=False)):
        tokens = slice(begin, end)
        alone = {k: x[:, tokens] if k in NAMES[:5] else x for k, x in args.items()}
        alone["initial_state"] = args["initial_state"][n : n + 1]
        del alone["cu_seqlens"]
        want = backward(CHUNK, leaves(alone), d_out[:, tokens], d_state[n : n + 1])
        for k, x in want.items():
            part = got[k][n : n + 1] if k == "initial_state" else got[k][:, tokens]
            assert_same_bits(part, x, k)
    for k in NAMES[:5]:
        assert not got[k][:, case.cu[-1] :].any()
    assert_same_bits(got["initial_state"][1:2], d_state[1:2])  # the empty sequence


def position(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1])[:, None]


GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "0": torch.zeros_like,
    "-1e-8": lambda x: torch.full_like(x, -1e-8),
    "-5": lambda x: -5 * (1 + 0.1 * x),
    "-16": lambda x: -16 * (1 + 0.1 * x),
    "-20": lambda x: -20 * (1 + 0.1 * x),
    "1 in 4 -20": lambda x: torch.where(position(x) % 4 == 0, -20.0, -0.01 + 0 * x),
    "half -20, half -0.01": lambda x: torch.where(position(x) < 32, -20.0, -0.01 + 0 * x),
}


def judge_gates(gate: str, beta: str) -> None:
    """dg keeps its relative accuracy, token by token, however strong the gates."""
    case = Case(f"gates {gate}", T=75, HV=2, K=24, V=24, beta=beta, state=torch.float32)
    args = case.inputs()
    noise = torch.randn(args["g"].shape, generator=torch.Generator().manual_seed(3))
    args["g"] = GATES[gate](noise).float()
    d_out, d_state = upstream(case, torch.float32)

    def by(dtype: torch.dtype) -> Gradients:
        def function(**x: Any) -> Any:
            return reference.recurrent(**x, dtype=dtype)

        with one_thread():
            return backward(function, leaves(args, dtype), d_out, d_state)

    want, base = by(torch.float64), by(torch.float32)
    got = backward(CHUNK, leaves(args), d_out, d_state)
    judge(got, want, base, {"else": FP32_FLOOR})
    strong = args["g"] < -4
    if strong.any():
        pick = {"g": want["g"][strong]}
        judge({"g": got["g"][strong]}, pick, {"g": base["g"][strong]}, {"else": FP32_FLOOR})
