# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a call of the rule, and the error that says so."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import deltanet_ext
from cases import Case

CHUNK = deltanet_ext.chunk_gated_delta_rule
RECURRENT = deltanet_ext.recurrent_gated_delta_rule


def good(**changes: Any) -> dict[str, Any]:
    """B=2, T=10, HK=2, HV=4, K=8, V=12, everything given."""
    case = Case("good", B=2, T=10, HK=2, HV=4, K=8, V=12, state=torch.float32)
    return {**case.inputs(), **changes}


def packed(**changes: Any) -> dict[str, Any]:
    """The same with B=1 and three sequences."""
    case = Case("good", T=10, HK=2, HV=4, K=8, V=12, cu=(0, 3, 3, 9), state=torch.float32)
    return {**case.inputs(), **changes}


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


f64, f16, bf16, i32, i64 = torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64

# What is wrong: (type of error, its text after the function's name, arguments).
RULE: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    # ---- not tensors
    "query is None": (TypeError, "query is None; supported: torch.Tensor", good(query=None)),
    "key is a list": (TypeError, "key is a list; supported: torch.Tensor", good(key=[1.0])),
    "value is a float": (
        TypeError,
        "value is 1.0 (float); supported: torch.Tensor",
        good(value=1.0),
    ),
    "g is a float": (TypeError, "g is -0.1 (float); supported: torch.Tensor or None", good(g=-0.1)),
    "beta is an int": (TypeError, "beta is 1 (int); supported: torch.Tensor or None", good(beta=1)),
    "state is an int": (
        TypeError,
        "initial_state is 64 (int); supported: torch.Tensor or None",
        good(initial_state=64),
    ),
    "cu_seqlens is a list": (
        TypeError,
        "cu_seqlens is a list; supported: torch.Tensor or None",
        packed(cu_seqlens=[0, 10]),
    ),
    "A_log is a float": (
        TypeError,
        "A_log is 0.0 (float); supported: torch.Tensor or None",
        good(use_gate_in_kernel=True, A_log=0.0),
    ),
    # ---- ranks
    "query has no batch": (
        ValueError,
        "query has shape [10, 2, 8]; supported: [B, T, HK, K]",
        good(query=zeros(10, 2, 8)),
    ),
    "key has five axes": (
        ValueError,
        "key has shape [1, 2, 10, 2, 8]; supported: [B, T, HK, K]",
        good(key=zeros(1, 2, 10, 2, 8)),
    ),
    "value is a scalar": (
        ValueError,
        "value has shape []; supported: [B, T, HV, V]",
        good(value=zeros()),
    ),
    "g has a K axis": (
        ValueError,
        "g has shape [2, 10, 4, 8]; supported: [B, T, HV] = [2, 10, 4]",
        good(g=zeros(2, 10, 4, 8)),
    ),
    "beta is per batch": (
        ValueError,
        "beta has shape [2]; supported: [B, T, HV] = [2, 10, 4]",
        good(beta=zeros(2)),
    ),
    # ---- sizes
    "query is longer": (
        ValueError,
        "query has shape [2, 11, 2, 8] and key has shape [2, 10, 2, 8]; "
        "supported: the same shape [B, T, HK, K]",
        good(query=zeros(2, 11, 2, 8)),
    ),
    "query has other heads": (
        ValueError,
        "query has shape [2, 10, 4, 8] and key has shape [2, 10, 2, 8]",
        good(query=zeros(2, 10, 4, 8)),
    ),
    "query has another head dim": (
        ValueError,
        "query has shape [2, 10, 2, 9] and key has shape [2, 10, 2, 8]",
        good(query=zeros(2, 10, 2, 9)),
    ),
    "value has another batch": (
        ValueError,
        "value has shape [3, 10, 4, 12]; supported: [B, T, HV, V] with B = 2 and T = 10 as in key",
        good(value=zeros(3, 10, 4, 12)),
    ),
    "value is shorter": (
        ValueError,
        "value has shape [2, 9, 4, 12]; supported: [B, T, HV, V] with B = 2 and T = 10 as in key",
        good(value=zeros(2, 9, 4, 12)),
    ),
    "heads come before tokens": (
        ValueError,
        "g has shape [2, 4, 10]; supported: [B, T, HV] = [2, 10, 4]",
        good(g=zeros(2, 4, 10)),
    ),
    "g has the key heads": (
        ValueError,
        "g has shape [2, 10, 2]; supported: [B, T, HV] = [2, 10, 4]",
        good(g=zeros(2, 10, 2)),
    ),
    "beta has one head": (
        ValueError,
        "beta has shape [2, 10, 1]; supported: [B, T, HV] = [2, 10, 4]",
        good(beta=zeros(2, 10, 1)),
    ),
    "HV is no multiple of HK": (
        ValueError,
        "value has 3 heads and key has 2; supported: a multiple of the key heads",
        good(value=zeros(2, 10, 3, 12)),
    ),
    "HV is less than HK": (
        ValueError,
        "value has 1 heads and key has 2; supported: a multiple of the key heads",
        good(value=zeros(2, 10, 1, 12)),
    ),
    "no value heads": (
        ValueError,
        "value has 0 heads and key has 2; supported: a multiple of the key heads",
        good(value=zeros(2, 10, 0, 12)),
    ),
    "no key heads": (
        ValueError,
        "key has 0 heads; supported: 1 or more",
        good(query=zeros(2, 10, 0, 8), key=zeros(2, 10, 0, 8)),
    ),
    "K is 0": (
        ValueError,
        "key has head dim 0; supported: 1 to 256",
        good(query=zeros(2, 10, 2, 0), key=zeros(2, 10, 2, 0)),
    ),
    "K is 300": (
        ValueError,
        "key has head dim 300; supported: 1 to 256",
        good(query=zeros(2, 10, 2, 300), key=zeros(2, 10, 2, 300)),
    ),
    "V is 257": (
        ValueError,
        "value has head dim 257; supported: 1 to 256",
        good(value=zeros(2, 10, 4, 257)),
    ),
    "V is 0": (
        ValueError,
        "value has head dim 0; supported: 1 to 256",
        good(value=zeros(2, 10, 4, 0)),
    ),
    # ---- dtypes
    "query is int64": (
        TypeError,
        "query is int64; supported: float32, bfloat16, float16, float64",
        good(query=zeros(2, 10, 2, 8, dtype=i64)),
    ),
    "value is complex": (
        TypeError,
        "value is complex64; supported: float32, bfloat16, float16, float64",
        good(value=zeros(2, 10, 4, 12, dtype=torch.complex64)),
    ),
    "key is bool": (
        TypeError,
        "key is bool; supported: float32, bfloat16, float16, float64",
        good(key=zeros(2, 10, 2, 8, dtype=torch.bool)),
    ),
    "key is bf16 and query fp32": (
        TypeError,
        "key is bfloat16 and query is float32; supported: one dtype for query, key and value",
        good(key=zeros(2, 10, 2, 8, dtype=bf16)),
    ),
    "value is fp64 and query fp32": (
        TypeError,
        "value is float64 and query is float32; supported: one dtype for query, key and value",
        good(value=zeros(2, 10, 4, 12, dtype=f64)),
    ),
    "g is bf16 and query fp32": (
        TypeError,
        "g is bfloat16; supported: float32",
        good(g=zeros(2, 10, 4, dtype=bf16)),
    ),
    "g is fp64 and query fp32": (
        TypeError,
        "g is float64; supported: float32",
        good(g=zeros(2, 10, 4, dtype=f64)),
    ),
    "beta is int32": (
        TypeError,
        "beta is int32; supported: float32",
        good(beta=zeros(2, 10, 4, dtype=i32)),
    ),
    "beta is fp16 and query bf16": (
        TypeError,
        "beta is float16; supported: float32, bfloat16",
        good(
            query=zeros(2, 10, 2, 8, dtype=bf16),
            key=zeros(2, 10, 2, 8, dtype=bf16),
            value=zeros(2, 10, 4, 12, dtype=bf16),
            beta=zeros(2, 10, 4, dtype=f16),
        ),
    ),
    "g is fp32 and query fp64": (
        TypeError,
        "g is float32; supported: float64",
        good(
            query=zeros(2, 10, 2, 8, dtype=f64),
            key=zeros(2, 10, 2, 8, dtype=f64),
            value=zeros(2, 10, 4, 12, dtype=f64),
        ),
    ),
    "state is int32": (
        TypeError,
        "initial_state is int32; supported: float32, bfloat16, float16, float64",
        good(initial_state=zeros(2, 4, 8, 12, dtype=i32)),
    ),
    "cu_seqlens is float": (
        TypeError,
        "cu_seqlens is float32; supported: int64, int32",
        packed(cu_seqlens=zeros(4)),
    ),
    "cu_seqlens is int16": (
        TypeError,
        "cu_seqlens is int16; supported: int64, int32",
        packed(cu_seqlens=zeros(4, dtype=torch.int16)),
    ),
    # ---- layouts and devices
    "query is sparse": (
        TypeError,
        "query has layout sparse_coo; supported: strided",
        good(query=zeros(2, 10, 2, 8).to_sparse()),
    ),
    "state is sparse": (
        TypeError,
        "initial_state has layout sparse_coo; supported: strided",
        good(initial_state=zeros(2, 4, 8, 12).to_sparse()),
    ),
    "g is on another device": (
        ValueError,
        "g is on meta and other arguments are on cpu; supported: one device",
        good(g=zeros(2, 10, 4).to("meta")),
    ),
    "state is on another device": (
        ValueError,
        "initial_state is on meta and other arguments are on cpu; supported: one device",
        good(initial_state=zeros(2, 4, 8, 12).to("meta")),
    ),
    "cu_seqlens is on another device": (
        ValueError,
        "cu_seqlens is on meta and other arguments are on cpu; supported: one device",
        packed(cu_seqlens=zeros(4, dtype=i64).to("meta")),
    ),
    # ---- states
    "state has another batch": (
        ValueError,
        "initial_state has shape [1, 4, 8, 12]; supported: [N, HV, K, V] = [2, 4, 8, 12]",
        good(initial_state=zeros(1, 4, 8, 12)),
    ),
    "state has the key heads": (
        ValueError,
        "initial_state has shape [2, 2, 8, 12]; supported: [N, HV, K, V] = [2, 4, 8, 12]",
        good(initial_state=zeros(2, 2, 8, 12)),
    ),
    "state is V first": (
        ValueError,
        "initial_state has shape [2, 4, 12, 8]; supported: [N, HV, K, V] = [2, 4, 8, 12]",
        good(initial_state=zeros(2, 4, 12, 8)),
    ),
    "state is K first": (
        ValueError,
        "initial_state has shape [2, 4, 8, 12]; "
        "supported: [N, HV, V, K] (state_v_first) = [2, 4, 12, 8]",
        good(state_v_first=True),
    ),
    "one state for three sequences": (
        ValueError,
        "initial_state has shape [1, 4, 8, 12]; supported: [N, HV, K, V] = [3, 4, 8, 12]",
        packed(initial_state=zeros(1, 4, 8, 12)),
    ),
    # ---- cu_seqlens
    "cu_seqlens starts late": (
        ValueError,
        "cu_seqlens starts at 1; supported: 0",
        packed(cu_seqlens=torch.tensor([1, 3, 3, 9])),
    ),
    "cu_seqlens starts below zero": (
        ValueError,
        "cu_seqlens starts at -1; supported: 0",
        packed(cu_seqlens=torch.tensor([-1, 3, 3, 9])),
    ),
    "cu_seqlens decreases": (
        ValueError,
        "cu_seqlens decreases from 5 to 3 at sequence 1; supported: bounds that never decrease",
        packed(cu_seqlens=torch.tensor([0, 5, 3, 9])),
    ),
    "cu_seqlens goes below zero": (
        ValueError,
        "cu_seqlens decreases from 0 to -5 at sequence 0",
        packed(cu_seqlens=torch.tensor([0, -5, 3, 9])),
    ),
    "cu_seqlens goes beyond T": (
        ValueError,
        "cu_seqlens ends at 11; supported: up to T = 10",
        packed(cu_seqlens=torch.tensor([0, 5, 8, 11], dtype=i32)),
    ),
    "cu_seqlens is huge": (
        ValueError,
        f"cu_seqlens ends at {2**62}; supported: up to T = 10",
        packed(cu_seqlens=torch.tensor([0, 5, 8, 2**62])),
    ),
    "cu_seqlens is a matrix": (
        ValueError,
        "cu_seqlens has shape [1, 4]; supported: [N + 1]",
        packed(cu_seqlens=torch.tensor([[0, 3, 3, 9]])),
    ),
    "cu_seqlens is empty": (
        ValueError,
        "cu_seqlens has shape [0]; supported: [N + 1]",
        packed(cu_seqlens=zeros(0, dtype=i64)),
    ),
    "cu_seqlens with a batch": (
        ValueError,
        "cu_seqlens is given and the batch size is 2; "
        "supported: sequences packed along T with batch size 1",
        good(cu_seqlens=torch.tensor([0, 5, 10])),
    ),
    # ---- options
    "scale is a tensor": (
        TypeError,
        "scale is a Tensor; supported: float or None (K ** -0.5)",
        good(scale=torch.tensor(1.0)),
    ),
    "scale is a bool": (
        TypeError,
        "scale is True (bool); supported: float or None",
        good(scale=True),
    ),
    "scale is beyond a float": (
        ValueError,
        "scale is too large for a float; supported: float or None (K ** -0.5)",
        good(scale=10**400),
    ),
    "value is nested": (
        TypeError,
        "value is a nested tensor; supported: torch.Tensor, strided",
        good(value=torch.nested.nested_tensor([torch.zeros(10, 4, 12)] * 2)),
    ),
    "g is nested": (
        TypeError,
        "g is a nested tensor; supported: torch.Tensor or None, strided",
        good(g=torch.nested.nested_tensor([torch.zeros(10, 4)] * 2)),
    ),
    "initial_state is nested": (
        TypeError,
        "initial_state is a nested tensor; supported: torch.Tensor or None, strided",
        good(initial_state=torch.nested.nested_tensor([torch.zeros(4, 8, 12)] * 2)),
    ),
    "use_qk_l2norm_in_kernel is a bool of NumPy": (
        TypeError,
        "use_qk_l2norm_in_kernel is a numpy.bool; supported: bool",
        good(use_qk_l2norm_in_kernel=np.True_),
    ),
    "scale is text": (TypeError, "scale is a str; supported: float or None", good(scale="1")),
    "output_final_state is None": (
        TypeError,
        "output_final_state is None; supported: bool",
        good(output_final_state=None),
    ),
    "output_final_state is a tensor": (
        TypeError,
        "output_final_state is a Tensor; supported: bool",
        good(output_final_state=zeros(1)),
    ),
    "use_qk_l2norm_in_kernel is 1": (
        TypeError,
        "use_qk_l2norm_in_kernel is 1 (int); supported: bool",
        good(use_qk_l2norm_in_kernel=1),
    ),
    "state_v_first is 0": (
        TypeError,
        "state_v_first is 0 (int); supported: bool",
        good(state_v_first=0),
    ),
    "use_gate_in_kernel is a tensor": (
        TypeError,
        "use_gate_in_kernel is a Tensor; supported: bool",
        good(use_gate_in_kernel=zeros(4)),
    ),
    "use_beta_sigmoid_in_kernel is None": (
        TypeError,
        "use_beta_sigmoid_in_kernel is None; supported: bool",
        good(use_beta_sigmoid_in_kernel=None),
    ),
    "allow_neg_eigval is 2": (
        TypeError,
        "allow_neg_eigval is 2 (int); supported: bool",
        good(allow_neg_eigval=2),
    ),
    "gate without A_log": (
        ValueError,
        "A_log is None and use_gate_in_kernel is True; supported: a tensor [HV]",
        good(use_gate_in_kernel=True),
    ),
    "gate without g": (
        ValueError,
        "g is None and use_gate_in_kernel is True; "
        "supported: a tensor [B, T, HV] with the raw gate",
        good(g=None, use_gate_in_kernel=True, A_log=zeros(4)),
    ),
    "A_log without gate": (
        ValueError,
        "A_log is given and use_gate_in_kernel is False; "
        "supported: A_log with use_gate_in_kernel=True only",
        good(A_log=zeros(4)),
    ),
    "dt_bias without gate": (
        ValueError,
        "dt_bias is given and use_gate_in_kernel is False; "
        "supported: dt_bias with use_gate_in_kernel=True only",
        good(dt_bias=zeros(4)),
    ),
    "A_log per key head": (
        ValueError,
        "A_log has shape [2]; supported: [HV] = [4]",
        good(use_gate_in_kernel=True, A_log=zeros(2)),
    ),
    "dt_bias per token": (
        ValueError,
        "dt_bias has shape [2, 10, 4]; supported: [HV] = [4]",
        good(use_gate_in_kernel=True, A_log=zeros(4), dt_bias=zeros(2, 10, 4)),
    ),
    "A_log is int64": (
        TypeError,
        "A_log is int64; supported: float32, bfloat16, float16, float64",
        good(use_gate_in_kernel=True, A_log=zeros(4, dtype=i64)),
    ),
    "dt_bias is on another device": (
        ValueError,
        "dt_bias is on meta and other arguments are on cpu; supported: one device",
        good(use_gate_in_kernel=True, A_log=zeros(4), dt_bias=zeros(4).to("meta")),
    ),
    "neg_eigval without sigmoid": (
        ValueError,
        "allow_neg_eigval is True and use_beta_sigmoid_in_kernel is False; "
        "supported: allow_neg_eigval with use_beta_sigmoid_in_kernel=True only",
        good(allow_neg_eigval=True),
    ),
    "sigmoid without beta": (
        ValueError,
        "beta is None and use_beta_sigmoid_in_kernel is True; "
        "supported: a tensor [B, T, HV] with the raw beta",
        good(beta=None, use_beta_sigmoid_in_kernel=True),
    ),
}


def assert_raises(
    function: Callable[..., Any], args: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=re.escape(text)) as caught:
        function(**args)
    assert type(caught.value) is error
