# SPDX-License-Identifier: Apache-2.0
"""The operators themselves: whoever calls them past Python gets an error, never a crash."""

import pytest
import torch
from error_cases import bf16, f64, good, i32, i64, packed, zeros

OPS = torch.ops.deltanet_ext

BELOW = {
    "rank": good(key=zeros(10, 2, 8)),
    "value's rank": good(value=zeros(10, 4, 8)),
    "query's shape": good(query=zeros(2, 11, 2, 8)),
    "value's tokens": good(value=zeros(2, 9, 4, 12)),
    "heads": good(value=zeros(2, 10, 3, 12)),
    "no key heads": good(query=zeros(2, 10, 0, 8), key=zeros(2, 10, 0, 8)),
    "head dim": good(query=zeros(2, 10, 2, 300), key=zeros(2, 10, 2, 300)),
    "head dim 0": good(query=zeros(2, 10, 2, 0), key=zeros(2, 10, 2, 0)),
    "value's head dim": good(value=zeros(2, 10, 4, 257)),
    "integers": good(query=zeros(2, 10, 2, 8, dtype=i64), key=zeros(2, 10, 2, 8, dtype=i64)),
    "mixed dtypes": good(key=zeros(2, 10, 2, 8, dtype=bf16)),
    "g's dtype": good(g=zeros(2, 10, 4, dtype=f64)),
    "g's shape": good(g=zeros(2, 10, 2)),
    "beta's dtype": good(beta=zeros(2, 10, 4, dtype=i64)),
    "beta's shape": good(beta=zeros(2, 10)),
    "state's shape": good(initial_state=zeros(2, 4, 12, 8)),
    "state's dtype": good(initial_state=zeros(2, 4, 8, 12, dtype=i32)),
    "number of states": packed(initial_state=zeros(2, 4, 8, 12)),
    "cu_seqlens' dtype": packed(cu_seqlens=zeros(4)),
    "cu_seqlens' rank": packed(cu_seqlens=zeros(2, 2, dtype=i64)),
    "cu_seqlens empty": packed(cu_seqlens=zeros(0, dtype=i64), initial_state=None),
    "cu_seqlens and a batch": good(cu_seqlens=torch.tensor([0, 5, 10])),
    "cu_seqlens' start": packed(cu_seqlens=torch.tensor([1, 3, 3, 9])),
    "cu_seqlens' order": packed(cu_seqlens=torch.tensor([0, 5, 3, 9])),
    "cu_seqlens below zero": packed(cu_seqlens=torch.tensor([0, -5, 3, 9])),
    "cu_seqlens' end": packed(cu_seqlens=torch.tensor([0, 5, 8, 11])),
    "A_log missing": good(use_gate_in_kernel=True),
    "A_log's shape": good(use_gate_in_kernel=True, A_log=zeros(2)),
    "A_log's dtype": good(use_gate_in_kernel=True, A_log=zeros(4, dtype=i64)),
    "dt_bias' shape": good(use_gate_in_kernel=True, A_log=zeros(4), dt_bias=zeros(5)),
    "dt_bias without gate": good(dt_bias=zeros(4)),
    "gate without g": good(g=None, use_gate_in_kernel=True, A_log=zeros(4)),
    "sigmoid without beta": good(beta=None, use_beta_sigmoid_in_kernel=True),
    "neg_eigval without sigmoid": good(allow_neg_eigval=True),
}


@pytest.mark.parametrize("operator", ["chunk", "recurrent"])
@pytest.mark.parametrize("name", BELOW)
def test_operators_check_again(name: str, operator: str) -> None:
    args = BELOW[name]
    tensors = "query key value g beta initial_state cu_seqlens A_log dt_bias"
    flags = "use_gate_in_kernel use_beta_sigmoid_in_kernel allow_neg_eigval state_v_first"
    forward = getattr(OPS, f"{operator}_gated_delta_rule_forward")
    with pytest.raises(RuntimeError, match=f"{operator}_gated_delta_rule: "):
        forward(
            *(args.get(name) for name in tensors.split()), 1.0, True, True,
            *(args.get(name, False) for name in flags.split()),
        )  # fmt: skip


@pytest.mark.parametrize(
    "name",
    ["rank", "value's rank", "heads", "head dim", "integers", "g's dtype", "beta's shape",
     "cu_seqlens' end", "cu_seqlens' order"],
)  # fmt: skip
def test_transition_operator_checks_again(name: str) -> None:
    args = BELOW[name]
    with pytest.raises(RuntimeError, match="chunk_transition: "):
        OPS.chunk_transition(
            *(args.get(n) for n in ("key", "value", "g", "beta", "cu_seqlens")), True
        )


@pytest.mark.parametrize(
    "L", [zeros(4), zeros(4, 5), zeros(0, 0), zeros(129, 129), zeros(4, 4, dtype=i64)]
)
def test_inverse_operator_checks_again(L: torch.Tensor) -> None:
    with pytest.raises(RuntimeError, match="unit_lower_triangular_inverse: "):
        OPS.unit_lower_triangular_inverse(L)
