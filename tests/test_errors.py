# SPDX-License-Identifier: Apache-2.0
"""Errors are part of the interface: what is wrong, what it got, what is supported."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import deltanet_ext
from cases import Case
from deltanet_ext import _checks

CHUNK = deltanet_ext.chunk_gated_delta_rule
RECURRENT = deltanet_ext.recurrent_gated_delta_rule
OPS = torch.ops.deltanet_ext


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


@pytest.mark.parametrize("function", [CHUNK, RECURRENT])
@pytest.mark.parametrize("name", RULE)
def test_rule(name: str, function: Callable[..., Any]) -> None:
    error, text, args = RULE[name]
    assert_raises(function, args, error, f"{function.__name__}: {text}")


@pytest.mark.parametrize(
    ("chunk_size", "error", "text"),
    [
        (0, ValueError, "chunk_size is 0; supported: 1 or more"),
        (-64, ValueError, "chunk_size is -64; supported: 1 or more"),
        (64.0, TypeError, "chunk_size is 64.0 (float); supported: int, 1 or more"),
        (True, TypeError, "chunk_size is True (bool); supported: int, 1 or more"),
        (None, TypeError, "chunk_size is None; supported: int, 1 or more"),
        ("64", TypeError, "chunk_size is a str; supported: int, 1 or more"),
        (torch.zeros(2), TypeError, "chunk_size is a Tensor; supported: int, 1 or more"),
    ],
)
def test_chunk_size(chunk_size: Any, error: type[Exception], text: str) -> None:
    args = good(chunk_size=chunk_size)
    assert_raises(CHUNK, args, error, f"chunk_gated_delta_rule: {text}")


@pytest.mark.parametrize("function", [CHUNK, RECURRENT])
@pytest.mark.parametrize("name", ["head_first", "cu_seq_lens_q", "q", "gk", "use_cp"])
def test_unknown_keywords(name: str, function: Callable[..., Any]) -> None:
    """transformers drops what a signature does not name: nothing may vanish here."""
    text = f"{function.__name__}() got an unexpected keyword argument '{name}'"
    assert_raises(function, good(**{name: None}), TypeError, text)


@pytest.mark.parametrize("function", [CHUNK, RECURRENT])
def test_missing_arguments(function: Callable[..., Any]) -> None:
    args = good()
    args.pop("beta")
    text = f"{function.__name__}() missing 1 required positional argument: 'beta'"
    assert_raises(function, args, TypeError, text)


def test_the_recurrent_form_has_no_chunk_size() -> None:
    text = "recurrent_gated_delta_rule() got an unexpected keyword argument 'chunk_size'"
    assert_raises(RECURRENT, good(chunk_size=64), TypeError, text)


def test_options_are_keywords_only() -> None:
    args = good()
    q, k, v, g, beta, s = (args[n] for n in ("query", "key", "value", "g", "beta", "initial_state"))
    with pytest.raises(TypeError, match="positional arguments but 10 were given"):
        CHUNK(q, k, v, g, beta, 64, s, True, True, 0.1)  # type: ignore[misc]


class OnCuda(torch.Tensor):
    """Looks as if it were on a GPU: enough for the checks, which is as far as it gets."""

    device = property(lambda self: torch.device("cuda", 0))  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]

    def tolist(self) -> list:
        raise AssertionError("a check waited for the GPU")


TENSORS = ("query", "key", "value", "g", "beta", "initial_state", "cu_seqlens", "A_log", "dt_bias")


def on_cuda(args: dict[str, Any]) -> dict[str, Any]:
    """Arguments whose tensors look as if they were on a GPU, those on meta excepted."""
    return {
        n: x.as_subclass(OnCuda) if n in TENSORS and isinstance(x, torch.Tensor) and x.is_cpu else x
        for n, x in args.items()
    }


@pytest.fixture
def cuda_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the CUDA kernels were there."""
    monkeypatch.setattr(_checks, "_CUDA", True)


needs_no_cuda_kernels = pytest.mark.skipif(
    deltanet_ext._load.cuda_library() is not None, reason="the CUDA kernels are here"
)


@needs_no_cuda_kernels
@pytest.mark.parametrize("function", [CHUNK, RECURRENT])
def test_a_device_without_kernels(function: Callable[..., Any]) -> None:
    """It says which argument, where it is, and why that does not work here."""
    text = (
        f"{function.__name__}: query is on cuda:0; supported: cpu (the CUDA kernels are not built: "
    )
    reason = deltanet_ext.build_info()["cuda_reason"]
    assert reason in f"(the CUDA kernels are not built: {reason}"
    assert_raises(function, on_cuda(good()), ValueError, text)
    one = good(beta=good()["beta"].as_subclass(OnCuda))
    assert_raises(function, one, ValueError, f"{function.__name__}: beta is on cuda:0; supported")


@needs_no_cuda_kernels
def test_other_functions_on_a_device_without_kernels() -> None:
    args = on_cuda(good())
    with pytest.raises(ValueError, match="chunk_transition: key is on cuda:0; supported: cpu"):
        deltanet_ext.chunk_transition(*(args[n] for n in ("key", "value", "g", "beta")))
    with pytest.raises(ValueError, match="inverse: L is on cuda:0; supported: cpu"):
        deltanet_ext.unit_lower_triangular_inverse(zeros(4, 4).as_subclass(OnCuda))


CONTENTS = ("cu_seqlens starts", "cu_seqlens decreases", "cu_seqlens goes", "cu_seqlens is huge")
ON_CUDA = [
    name
    for name in RULE
    if not name.startswith(CONTENTS) and "sparse" not in name and "nested" not in name
]


@pytest.mark.parametrize("function", [CHUNK, RECURRENT])
@pytest.mark.parametrize("name", ON_CUDA)
def test_the_same_messages_on_cuda(
    name: str, function: Callable[..., Any], cuda_kernels: None
) -> None:
    error, text, args = RULE[name]
    text = text.replace("arguments are on cpu", "arguments are on cuda:0")
    assert_raises(function, on_cuda(args), error, f"{function.__name__}: {text}")


@pytest.mark.parametrize("function", [CHUNK, RECURRENT])
def test_one_device(function: Callable[..., Any], cuda_kernels: None) -> None:
    tensors = ("query", "key", "value", "g", "beta", "initial_state")
    for name in tensors:
        args = on_cuda(good())
        args[name] = good()[name]
        moved, stays = ("key", "cuda:0") if name == "query" else (name, "cpu")
        others = "cpu" if name == "query" else "cuda:0"
        text = f"{moved} is on {stays} and other arguments are on {others}; supported: one device"
        assert_raises(function, args, ValueError, f"{function.__name__}: {text}")
    args = on_cuda(packed())
    args["cu_seqlens"] = packed()["cu_seqlens"]
    text = "cu_seqlens is on cpu and other arguments are on cuda:0; supported: one device"
    assert_raises(function, args, ValueError, f"{function.__name__}: {text}")


@pytest.mark.parametrize("function", [CHUNK, RECURRENT])
def test_float64_stays_on_the_cpu(function: Callable[..., Any], cuda_kernels: None) -> None:
    case = Case("good", B=2, T=10, HK=2, HV=4, K=8, V=12, state=torch.float32)
    text = (
        "query is float64 on cuda:0; "
        "supported there: float32, bfloat16, float16 (float64 on cpu only)"
    )
    args = on_cuda(case.inputs(f64))
    assert_raises(function, args, TypeError, f"{function.__name__}: {text}")
    L = zeros(4, 4, dtype=f64).as_subclass(OnCuda)
    with pytest.raises(TypeError, match="inverse: L is float64 on cuda:0; supported there"):
        deltanet_ext.unit_lower_triangular_inverse(L)


def test_a_device_that_nobody_has_kernels_for(cuda_kernels: None) -> None:
    class OnXpu(OnCuda):
        device = property(lambda self: torch.device("xpu", 1))  # type: ignore[assignment]

    args = good()
    args["query"] = args["query"].as_subclass(OnXpu)
    text = "query is on xpu:1; supported: cpu, cuda (there are no kernels for other devices)"
    assert_raises(CHUNK, args, ValueError, f"chunk_gated_delta_rule: {text}")


# ---- chunk_transition and the inverse --------------------------------------------------


def rule_only(args: dict[str, Any]) -> dict[str, Any]:
    names = ("key", "value", "g", "beta", "use_qk_l2norm_in_kernel", "cu_seqlens")
    return {name: args[name] for name in names if name in args}


SHARED = [
    name
    for name, (_, text, args) in RULE.items()
    if text.split()[0] in ("key", "value", "g", "beta", "cu_seqlens", "use_qk_l2norm_in_kernel")
    and "query" not in text
    and not args.get("use_gate_in_kernel")
    and not args.get("use_beta_sigmoid_in_kernel")
    and not args.get("allow_neg_eigval")
]


@pytest.mark.parametrize("name", SHARED)
def test_transition(name: str) -> None:
    error, text, args = RULE[name]
    args = rule_only(args)
    assert_raises(deltanet_ext.chunk_transition, args, error, f"chunk_transition: {text}")


def test_transition_of_mixed_dtypes() -> None:
    args = rule_only(good(value=zeros(2, 10, 4, 12, dtype=bf16)))
    text = (
        "chunk_transition: value is bfloat16 and key is float32; "
        "supported: one dtype for query, key and value"
    )
    assert_raises(deltanet_ext.chunk_transition, args, TypeError, text)


@pytest.mark.parametrize("function", [CHUNK, RECURRENT])
def test_forward_mode_gradients_are_refused_and_not_dropped(function: Callable[..., Any]) -> None:
    args = good()
    with torch.autograd.forward_ad.dual_level():
        function(**args)  # no tangent anywhere
        args["value"] = torch.autograd.forward_ad.make_dual(args["value"], args["value"])
        with pytest.raises(NotImplementedError, match="forward-mode gradients are not built yet"):
            function(**args)


@pytest.mark.parametrize(
    ("L", "error", "text"),
    [
        (None, TypeError, "L is None; supported: torch.Tensor"),
        ([[1.0]], TypeError, "L is a list; supported: torch.Tensor"),
        (zeros(4), ValueError, "L has shape [4]; supported: [..., C, C]"),
        (zeros(), ValueError, "L has shape []; supported: [..., C, C]"),
        (zeros(3, 4, 5), ValueError, "L has shape [3, 4, 5]; supported: [..., C, C]"),
        (zeros(2, 0, 0), ValueError, "L has size C = 0; supported: 1 to 128"),
        (zeros(129, 129), ValueError, "L has size C = 129; supported: 1 to 128"),
        (
            zeros(4, 4, dtype=i64),
            TypeError,
            "L is int64; supported: float32, bfloat16, float16, float64",
        ),
        (zeros(4, 4).to_sparse(), TypeError, "L has layout sparse_coo; supported: strided"),
    ],
)
def test_inverse(L: Any, error: type[Exception], text: str) -> None:
    name = "unit_lower_triangular_inverse"
    assert_raises(deltanet_ext.unit_lower_triangular_inverse, {"L": L}, error, f"{name}: {text}")


# ---- the operators themselves: whoever calls them past Python gets an error, never a crash

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


# ---- what looks unusual and is right ---------------------------------------------------


@pytest.mark.parametrize("function", [CHUNK, RECURRENT])
def test_parameters_and_subclasses_are_tensors(function: Callable[..., Any]) -> None:
    args = good()
    want, _ = function(**args)
    with torch.no_grad():
        for name in ("query", "key", "value", "g", "beta", "initial_state"):
            got, _ = function(**{**args, name: torch.nn.Parameter(args[name])})
            assert torch.equal(got, want)


@pytest.mark.parametrize("function", [CHUNK, RECURRENT])
def test_a_negated_view_is_its_values(function: Callable[..., Any]) -> None:
    """The lazy negation of torch's conjugate views is resolved before the kernel reads memory."""
    args = good()
    lazy = torch.complex(torch.zeros_like(args["value"]), args["value"]).conj().imag
    assert lazy.is_neg()
    got, _ = function(**{**args, "value": lazy})
    want, _ = function(**{**args, "value": -args["value"]})
    assert torch.equal(got, want)
