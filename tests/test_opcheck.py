# SPDX-License-Identifier: Apache-2.0
"""torch.library's own checks of every operator: schema, autograd registration, fake kernel, AOT."""

from typing import Any

import pytest
import torch

import deltanet_ext  # noqa: F401  registers the operators
from cases import (
    Case,
    dtypes,
)

OPS = torch.ops.deltanet_ext

CASES = [
    Case("opcheck", B=2, T=20, HK=2, HV=4, K=8, V=12, state=torch.float32),
    Case("opcheck packed", T=20, HK=1, HV=3, K=5, V=7, cu=(0, 0, 9, 17), state=torch.float16),
    Case("opcheck V first", B=2, T=5, HK=1, HV=1, K=5, V=7, state_v_first=True),
    Case("opcheck nothing", B=2, T=5, g="none", beta="none", K=5, V=7),
    Case("opcheck raw", B=2, T=5, K=5, V=7, raw_gate=True, raw_beta=True, neg_eigval=True),
    Case("opcheck no tokens", B=2, T=0, K=5, V=7),
    Case("opcheck no rows", B=0, T=3, K=5, V=7),
]


def positional(args: dict[str, Any], output_final_state: bool = True) -> tuple[Any, ...]:
    """The operator's arguments, in the order of its schema."""
    tensors = "query key value g beta initial_state cu_seqlens A_log dt_bias"
    return (
        *(args.get(name) for name in tensors.split()),
        args.get("scale", args["key"].shape[-1] ** -0.5),
        output_final_state,
        args["use_qk_l2norm_in_kernel"],
        args.get("use_gate_in_kernel", False),
        args.get("use_beta_sigmoid_in_kernel", False),
        args.get("allow_neg_eigval", False),
        args.get("state_v_first", False),
    )


@pytest.mark.parametrize("operator", ["chunk", pytest.param("recurrent", marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", dtypes(torch.float32))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rule(case: Case, dtype: torch.dtype, operator: str) -> None:
    forward = getattr(OPS, f"{operator}_gated_delta_rule_forward").default
    for output_final_state in (True, False):
        torch.library.opcheck(forward, positional(case.inputs(dtype), output_final_state))


@pytest.mark.parametrize("dtype", dtypes(torch.float32))
@pytest.mark.parametrize("case", CASES[:2] + CASES[5:], ids=str)
def test_transition(case: Case, dtype: torch.dtype) -> None:
    args = case.inputs(dtype)
    names = ("key", "value", "g", "beta", "cu_seqlens")
    torch.library.opcheck(OPS.chunk_transition.default, (*(args.get(n) for n in names), True))


@pytest.mark.parametrize("dtype", dtypes(torch.float32))
@pytest.mark.parametrize("shape", [(3, 8, 8), (5, 5), (0, 4, 4), (2, 3, 1, 1)])
def test_inverse(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.library.opcheck(
        OPS.unit_lower_triangular_inverse.default, (torch.randn(shape).to(dtype),)
    )


def test_views() -> None:
    """Strides of outputs do not follow those of inputs."""
    args = CASES[0].inputs()
    for name in ("query", "key", "value", "g", "beta"):
        args[name] = args[name].transpose(1, 2).contiguous().transpose(1, 2)
    args["initial_state"] = args["initial_state"].mT.contiguous().mT
    torch.library.opcheck(OPS.chunk_gated_delta_rule_forward.default, positional(args))
    L = torch.randn(3, 6, 6).mT
    torch.library.opcheck(OPS.unit_lower_triangular_inverse.default, (L,))


@pytest.mark.parametrize("operator", ["chunk", "recurrent"])
def test_inputs_that_require_grad(operator: str) -> None:
    """Then the ahead-of-time check traces the backward too."""
    forward = getattr(OPS, f"{operator}_gated_delta_rule_forward").default
    args = CASES[0].inputs()
    for x in args.values():
        if isinstance(x, torch.Tensor):
            x.requires_grad_()
    torch.library.opcheck(forward, positional(args))


def test_other_inputs_that_require_grad() -> None:
    k = torch.randn(1, 9, 1, 4, requires_grad=True)
    v = torch.randn(1, 9, 2, 5, requires_grad=True)
    torch.library.opcheck(OPS.chunk_transition.default, (k, v, None, None, None, True))
    L = torch.randn(4, 4, requires_grad=True)
    torch.library.opcheck(OPS.unit_lower_triangular_inverse.default, (L,))
