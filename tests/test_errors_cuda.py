# SPDX-License-Identifier: Apache-2.0
"""Bad input on CUDA gives the messages of the CPU; no GPU is needed to see it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from error_cases import CHUNK, RECURRENT, RULE, assert_raises, f64, good, packed, zeros

import deltanet_ext
from cases import Case
from deltanet_ext import _checks


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
