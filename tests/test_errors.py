# SPDX-License-Identifier: Apache-2.0
"""Errors are part of the interface: what is wrong, what it got, what is supported."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from error_cases import CHUNK, RECURRENT, RULE, assert_raises, bf16, good, i64, zeros

import deltanet_ext


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
