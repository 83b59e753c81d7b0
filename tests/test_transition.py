# SPDX-License-Identifier: Apache-2.0
"""chunk_transition: what a sequence does to any state, and how such maps compose."""

from typing import Any

import pytest
import torch
from torch import Tensor

import deltanet_ext
from cases import (
    CASES,
    DTYPES,
    FLOORS,
    Case,
    arithmetic,
    case_named,
    dtypes,
    name_of,
    one_thread,
)
from closeness import (
    assert_close,
    assert_no_worse,
    assert_same_bits,
    assert_same_special_values,
)
from deltanet_ext import reference

transition = deltanet_ext.chunk_transition
RULE = ("key", "value", "g", "beta", "use_qk_l2norm_in_kernel", "cu_seqlens")


def rule(args: dict[str, Any]) -> dict[str, Any]:
    return {name: args[name] for name in RULE if name in args}


def _without_options(case: Case) -> bool:
    return not (case.raw_gate or case.raw_beta or case.state_v_first) and case.scale is None


def _slow_if_large(case: Case) -> Any:
    """M has K columns, each as much work for the reference as one of V."""
    large = case.B * case.HV * case.T * case.K * case.K > 10_000_000
    return pytest.param(case, marks=pytest.mark.slow if large else ())


GROUPS = [*(CASES[name][::2] for name in ("tokens", "heads", "head dims"))]
GROUPS += [CASES[name] for name in ("batches", "gates", "plain", "packed", "stress")]
MAPS = [case for group in GROUPS for case in group if _without_options(case)]


@pytest.mark.parametrize("dtype", dtypes(torch.float32))
@pytest.mark.parametrize("case", [_slow_if_large(case) for case in MAPS], ids=str)
def test_is_as_exact_as_the_recurrence(case: Case, dtype: torch.dtype, poison: None) -> None:
    args = rule(case.inputs(dtype))
    M, U = transition(**args)
    with one_thread():
        want_M, want_U = reference.transition(**args)
        base_M, base_U = reference.transition(**args, dtype=arithmetic(dtype))
        decay, _ = reference.transition(**{**args, "beta": torch.zeros_like(args["value"][..., 0])})
    assert M.dtype == U.dtype == arithmetic(dtype)
    assert M.is_contiguous()
    assert U.is_contiguous()
    floor = FLOORS[dtype]
    # (8) subtracts what the tokens overwrite from what decay leaves: that is the size of its
    # errors, also where next to nothing is left. Below 1e-30 fp32 runs out of digits.
    scale = decay + 1e-30 * torch.eye(case.K, dtype=torch.float64)
    assert_same_special_values(M, want_M, "M")
    assert_no_worse(M + scale, want_M + scale, base_M + scale, floor=floor, what="M + decay I")
    assert_no_worse(U, want_U, base_U, floor=floor, what="U")


@pytest.mark.parametrize("g", ["weak", "zero", "model", "positive", "strong"])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_maps_a_state_as_the_rule_does(dtype: torch.dtype, g: str, isa: str) -> None:
    """Also, above all, from a state that is not zero: the classic mistake counts it twice."""
    case = Case(f"map {g}", B=2, T=75, HK=1, HV=3, K=33, V=40, g=g, state=torch.float32)
    args = case.inputs(dtype)
    M, U = transition(**rule(args))
    _, state = deltanet_ext.chunk_gated_delta_rule(**args)
    mapped = M.double() @ args["initial_state"].double() + U.double()
    assert_close(state, mapped, 1e-12 if dtype == torch.float64 else 2e-6)


@pytest.mark.parametrize("g", ["weak", "zero", "model"])
@pytest.mark.parametrize("cut", [0, 1, 16, 40, 74, 75])
def test_pieces_compose(cut: int, g: str) -> None:
    """(M2, U2) after (M1, U1) = (M2 M1, M2 U1 + U2)."""
    args = rule(Case(f"pieces {g}", T=75, HK=1, HV=2, K=33, V=40, g=g).inputs())
    want_M, want_U = reference.transition(**args)

    def piece(start: int, stop: int) -> tuple[Tensor, Tensor]:
        tokens = {n: x[:, start:stop] if isinstance(x, Tensor) else x for n, x in args.items()}
        M, U = transition(**tokens)
        return M.double(), U.double()

    (M1, U1), (M2, U2) = piece(0, cut), piece(cut, 75)
    assert_close(M2 @ M1, want_M, 2e-6, "M")
    assert_close(M2 @ U1 + U2, want_U, 2e-6, "U")


def test_segments_give_every_start_state() -> None:
    """A scan over segments: each one starts where the map of those before it leads."""
    case = Case("segments", T=96, HK=1, HV=2, K=32, V=24, g="weak", state=torch.float32)
    args = case.inputs()
    cu = torch.arange(0, 97, 24)
    M, U = transition(**rule(args), cu_seqlens=cu)
    starts = [args["initial_state"][0].double()]
    for n in range(4):
        starts.append(M[n].double() @ starts[-1] + U[n].double())
    states = torch.stack(starts[:-1]).float()
    packed = {**args, "cu_seqlens": cu, "initial_state": states}
    out, finals = deltanet_ext.chunk_gated_delta_rule(**packed)
    want_out, want_state = reference.recurrent(**args)
    assert want_state is not None
    assert_close(out, want_out, 2e-6)
    assert_close(finals[3:], want_state, 2e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_no_tokens_are_the_identity(dtype: torch.dtype, poison: None) -> None:
    args = rule(Case("identity", B=3, T=0, HK=1, HV=2, K=5, V=7).inputs(dtype))
    M, U = transition(**args)
    assert_same_bits(M, torch.eye(5, dtype=M.dtype).expand(3, 2, 5, 5))
    assert_same_bits(U, torch.zeros_like(U))
    args = rule(Case("identity", T=9, HK=1, HV=2, K=5, V=7, cu=(0, 0, 9, 9)).inputs(dtype))
    M, U = transition(**args)
    for n in (0, 2):
        assert_same_bits(M[n], torch.eye(5, dtype=M.dtype).expand(2, 5, 5))
        assert (U[n] == 0).all()


def test_beta_zero_is_pure_decay() -> None:
    args = rule(case_named("beta 0").inputs())
    M, U = transition(**args)
    decay = args["g"].double().sum(1).exp()
    assert_close(M, decay[..., None, None] * torch.eye(32, dtype=torch.float64), 1e-5)
    assert (U == 0).all()


def test_arguments_are_not_written() -> None:
    args = rule(case_named("packed64[0,17,50,64]").inputs())
    before = {n: x.clone() for n, x in args.items() if isinstance(x, Tensor)}
    transition(**args)
    for name, x in before.items():
        assert torch.equal(args[name], x), name
