# SPDX-License-Identifier: Apache-2.0
"""The switch for transformers, beyond the rule: the convolution and the gated norm of a layer. That
models give the same tokens is tested with everything switched, in test_integration_transformers."""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from closeness import assert_same_bits
from deltanet_ext import layer
from deltanet_ext.integrations import _registry
from deltanet_ext.integrations import transformers as switch

transformers = pytest.importorskip("transformers", minversion="5.15")

from tiny_models import IDS, KINDS, PAST, build, greedy, modeling  # noqa: E402

FUNCTIONS = ("causal_conv1d_fn", "causal_conv1d_update")


@pytest.fixture(autouse=True)
def _switched_off() -> Iterator[None]:
    _registry._reasons_logged.clear()
    yield
    switch.disable()


@pytest.fixture
def calls(monkeypatch) -> Counter:
    """Counts the calls that arrive at the operators."""
    counter: Counter = Counter()

    def counting(name: str) -> Callable:
        function = getattr(layer, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            counter[name] += 1
            return function(*args, **kwargs)

        return call

    for name in (*FUNCTIONS, "gated_rms_norm"):
        monkeypatch.setattr(layer, name, counting(name))
    return counter


def ours(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What we logged. transformers logs about the same functions, once per process."""
    return [r.getMessage() for r in caplog.records if r.name == "deltanet_ext"]


def norm_of(module: ModuleType) -> Any:
    (norm,) = [held for name, held in vars(module).items() if name.endswith("RMSNormGated")]
    return norm


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_model_uses_them_and_gets_its_own_back(kind: str, calls: Counter) -> None:
    module = modeling(kind)
    before = [*(getattr(module, name) for name in FUNCTIONS), norm_of(module).forward]
    model = build(kind)
    want = greedy(model)
    assert not calls
    report = switch.enable()
    norm = norm_of(module).__name__
    for name in (*FUNCTIONS, f"{norm}.forward"):
        assert f"{module.__name__}.{name}" in report.functions
    assert report.modules.count(module.__name__) == 1
    assert torch.equal(greedy(model), want)
    # Three layers, one prefill, then seven tokens. OLMo-Hybrid has three convolutions in a layer.
    convolutions = calls["causal_conv1d_fn"]
    assert convolutions in (3, 9)
    assert calls["causal_conv1d_update"] == 7 * convolutions
    assert calls["gated_rms_norm"] == 3 * 8
    switch.disable()
    assert [*(getattr(module, name) for name in FUNCTIONS), norm_of(module).forward] == before
    calls.clear()
    assert torch.equal(greedy(model), want)
    assert not calls


def test_the_rule_gets_contiguous_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a channels-last convolution is for: no copy and no transpose before the rule."""
    from deltanet_ext import ops

    strides = []
    rule = ops.chunk_gated_delta_rule

    def spy(*args: Any, **kwargs: Any) -> Any:
        strides.extend(kwargs[name].stride()[-2:] for name in ("query", "key", "value"))
        return rule(*args, **kwargs)

    monkeypatch.setattr(ops, "chunk_gated_delta_rule", spy)
    model = build("qwen3_5")
    with torch.no_grad(), switch.enabled():
        model(IDS, use_cache=True)
    assert set(strides) == {(16, 1)}


def test_training_uses_them_and_an_update_with_a_gradient_is_theirs(
    calls: Counter, caplog: pytest.LogCaptureFixture
) -> None:
    model = build("qwen3_5").train()
    with switch.enabled(), caplog.at_level(logging.WARNING, "deltanet_ext"):
        cache = model(IDS, labels=IDS, use_cache=True).past_key_values
        assert calls == {"causal_conv1d_fn": 3, "gated_rms_norm": 3}
        name = "cache" if "cache" in inspect.signature(model.forward).parameters else PAST
        with torch.no_grad():
            model(IDS[:, :1], **{name: cache})
        assert calls["causal_conv1d_update"] == 3
        assert not ours(caplog)
        state, x = torch.randn(2, 8, 4), torch.randn(2, 8, 1, requires_grad=True)
        update = modeling("qwen3_5").causal_conv1d_update
        for _ in range(2):
            update(x, state, torch.randn(8, 4), None, "silu").sum().backward()
        assert calls["causal_conv1d_update"] == 3
    (message,) = [m for m in ours(caplog) if "causal_conv1d_update" in m]
    assert "a gradient is needed, and conv_state is overwritten" in message


def conv_inputs(**changes: Any) -> dict[str, Any]:
    args = {"hidden_states": torch.randn(1, 8, 6), "weight": torch.randn(8, 4), "bias": None}
    return args | changes


@pytest.mark.parametrize(
    ("reason", "args"),
    [
        ("weight is torch.bfloat16 with an input in torch.float32",
         conv_inputs(weight=torch.randn(8, 4).bfloat16())),
        ("the convolution has 9 taps, above 8", conv_inputs(weight=torch.randn(8, 9))),
        ("the activation is 'gelu'", conv_inputs(activation="gelu")),
    ],
)  # fmt: skip
def test_calls_that_are_not_ours_go_to_the_original(
    reason: str, args: dict[str, Any], calls: Counter, caplog: pytest.LogCaptureFixture
) -> None:
    module = modeling("qwen3_5")
    want = module.causal_conv1d_fn(**args)
    with switch.enabled(), caplog.at_level(logging.WARNING, "deltanet_ext"):
        for _ in range(2):
            assert torch.equal(module.causal_conv1d_fn(**args), want)
    assert not calls
    (message,) = [m for m in ours(caplog) if "causal_conv1d_fn" in m]
    assert reason in message


def test_tensors_without_kernels_go_to_the_original(
    calls: Counter, caplog: pytest.LogCaptureFixture
) -> None:
    """A meta tensor stands for any device that is not ours."""
    module = modeling("qwen3_5")
    norm = norm_of(module)(16).to("meta")
    x = torch.empty(4, 16, device="meta")
    with switch.enabled(), caplog.at_level(logging.WARNING, "deltanet_ext"):
        assert norm(x, x).shape == x.shape
        moved = {n: t if t is None else t.to("meta") for n, t in conv_inputs().items()}
        assert module.causal_conv1d_fn(**moved).shape == (1, 8, 6)
        state = torch.empty(1, 8, 4, device="meta")
        module.causal_conv1d_update(
            moved["hidden_states"][..., :1], state, moved["weight"], None, "silu"
        )
    assert not calls
    messages = ours(caplog)
    assert len(messages) == 3
    assert all("a tensor is on meta" in message for message in messages)


def test_other_gated_norms_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name alone is not enough: here the gate comes before the norm."""
    module = modeling("qwen3_5")

    class OtherRMSNormGated(torch.nn.Module):
        def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(hidden_size))
            self.variance_epsilon = eps

        def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
            x = x * torch.nn.functional.silu(gate)
            r = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)
            return self.weight * (x * r)

    class StrangeRMSNormGated(OtherRMSNormGated):
        def __init__(self) -> None:
            super().__init__(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    for held in (OtherRMSNormGated, StrangeRMSNormGated):
        held.__module__ = module.__name__
        monkeypatch.setattr(module, held.__name__, held, raising=False)
    before = OtherRMSNormGated.forward, StrangeRMSNormGated.forward
    report = switch.enable()
    assert (OtherRMSNormGated.forward, StrangeRMSNormGated.forward) == before
    assert not [name for name in report.functions if "Other" in name or "Strange" in name]
    for held in (OtherRMSNormGated, StrangeRMSNormGated):
        assert "does not compute" in report.left[f"{module.__name__}.{held.__name__}"]


def test_the_report_without_the_rest_of_the_layer() -> None:
    module = modeling("qwen3_5")
    whole = switch.enable(quiet=True)
    rule = switch.enable(quiet=True, layer=False)
    rest = {f"{module.__name__}.{name}" for name in (*FUNCTIONS, "Qwen3_5RMSNormGated.forward")}
    assert rest <= set(whole.functions)
    assert not rest & {*rule.functions, *whole.left}
    assert {rule.left[name] for name in rest} == {"layer=False"}
    assert set(whole.functions) == {*rule.functions} | {
        name for name, why in rule.left.items() if why == "layer=False"
    }


def test_what_somebody_else_put_there_stays() -> None:
    norm = norm_of(modeling("qwen3_5"))
    original = norm.forward
    switch.enable()
    ours = norm.forward

    def theirs(self: Any, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return ours(self, x, gate)

    norm.forward = theirs
    try:
        switch.disable()
        assert norm.forward is theirs
        module = norm(16)
        x, gate = torch.randn(2, 3, 16)
        assert_same_bits(module(x, gate), original(module, x, gate))  # the wrapper is inactive
    finally:
        norm.forward = original


@pytest.mark.slow
def test_a_compiled_layer_with_a_cache() -> None:
    """Convolution, update and norm in one graph, the state of the cache written in place."""
    torch._dynamo.reset()
    model = build("qwen3_5")
    want = greedy(model, cache_implementation="static", disable_compile=True)
    compiled = torch.compile(model.forward, fullgraph=True, backend="aot_eager", dynamic=True)
    with torch.no_grad(), switch.enabled():
        eager = model(IDS, use_cache=False).logits
        torch.testing.assert_close(compiled(IDS, use_cache=False).logits, eager)
        assert torch.equal(greedy(model, cache_implementation="static", disable_compile=True), want)
    torch._dynamo.reset()
