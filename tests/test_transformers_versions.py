# SPDX-License-Identifier: Apache-2.0
"""The switch on the installed transformers, whichever it is, from 4.57 on.

`make test-transformers` runs this file in environments with several versions; `make test` runs it
with the newest. What only newer versions have is tested in test_integration_transformers.py.
"""

from __future__ import annotations

import inspect
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator

import pytest
import torch

import deltanet_ext
from deltanet_ext.integrations import _registry
from deltanet_ext.integrations import transformers as switch

transformers = pytest.importorskip("transformers", minversion="4.57")

from tiny_models import IDS, KINDS, LAYERS, PAST, build, count_calls, greedy, modeling  # noqa: E402

VERSION = tuple(map(int, transformers.__version__.split(".")[:2]))
LINEAR = LAYERS.count("linear_attention")


def has(kind: str) -> bool:
    if kind == "qwen4_exp" and VERSION < (5, 22):
        return False  # its config was another one
    try:
        modeling(kind)
    except ModuleNotFoundError:
        return False
    return True


HERE = [kind for kind in KINDS if has(kind)]


@pytest.fixture(autouse=True)
def _switched_off() -> Iterator[None]:
    yield
    switch.disable()


@pytest.fixture
def calls(monkeypatch) -> Counter:
    return count_calls(monkeypatch)


@pytest.fixture(params=HERE)
def model(request) -> torch.nn.Module:
    return build(request.param)


def linear_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [m for m in model.modules() if type(m).__name__.endswith("GatedDeltaNet")]


def test_the_oldest_model_is_there():
    assert "qwen3_next" in HERE


@pytest.mark.slow
@pytest.mark.parametrize("kind", HERE)
def test_same_tokens_for_models_built_before_and_after(kind, calls):
    before = build(kind)
    want = greedy(before)
    assert not calls
    deltanet_ext.enable(quiet=True)
    for model in (before, build(kind)):
        calls.clear()
        assert torch.equal(greedy(model), want)
        # one prefill, then seven tokens
        assert calls == {
            "chunk_gated_delta_rule": LINEAR,
            "recurrent_gated_delta_rule": 7 * LINEAR,
        }
    deltanet_ext.disable()
    calls.clear()
    assert torch.equal(greedy(before), want)
    assert not calls


# -- ways to call a model -------------------------------------------------------------------------

# The oldest, and the most used.
common = pytest.mark.parametrize("kind", [k for k in ("qwen3_next", "qwen3_5") if k in HERE])


def without_us(model: torch.nn.Module, **options) -> torch.Tensor:
    """The tokens to match. Not every version can do everything."""
    try:
        return greedy(model, **options)
    except (AttributeError, KeyError, NotImplementedError, TypeError, ValueError) as error:
        pytest.skip(f"transformers {transformers.__version__}: {type(error).__name__}: {error}")


@pytest.mark.slow
@common
@pytest.mark.parametrize(
    "options",
    [
        {"cache_implementation": "static", "disable_compile": True},
        {"num_beams": 3},
        {"num_beams": 2, "num_return_sequences": 2},
        {"prefill_chunk_size": 24},
        {"use_cache": False},
    ],
    ids=str,
)
def test_generate_options(kind, options, calls):
    model = build(kind)
    want = without_us(model, **options)
    with deltanet_ext.enabled():
        assert torch.equal(greedy(model, **options), want)
    assert sum(calls.values()) > 0


@common
def test_left_padded_batch(kind, calls):
    model = build(kind)
    mask = torch.ones_like(IDS)
    mask[0, :13] = 0
    want = greedy(model, attention_mask=mask)
    with deltanet_ext.enabled():
        assert torch.equal(greedy(model, attention_mask=mask), want)
        with torch.no_grad():
            padded = model(IDS, attention_mask=mask).logits[0, 13:]
            alone = model(IDS[:1, 13:]).logits[0]
    # a row of padding is an exact no-op on the state
    torch.testing.assert_close(padded, alone, rtol=1e-3, atol=1e-3)
    assert sum(calls.values()) > 0


@pytest.mark.slow
@common
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_several_turns_continue_from_the_cache(kind, cache, calls):
    model = build(kind)
    # transformers 5.24 renamed the argument
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else PAST

    def talk(generate=greedy) -> tuple[torch.Tensor, torch.Tensor]:
        options = {}
        if cache == "static":
            options[name] = transformers.StaticCache(config=model.config, max_cache_len=100)
        first = generate(model, ids=IDS[:, :40], return_dict_in_generate=True, **options)
        ids = torch.cat([first.sequences, IDS[:, 40:]], dim=1)
        second = generate(model, ids=ids, **{name: first.past_key_values})
        return second, greedy(model, ids)

    want, want_afresh = talk(without_us)
    with deltanet_ext.enabled():
        got, afresh = talk()
    assert torch.equal(got, want)
    assert torch.equal(afresh, want_afresh)
    if VERSION[0] > 4:  # 4.57 forgets the rule's state where a turn has several tokens
        assert torch.equal(got, afresh)
    assert sum(calls.values()) > 0


@common
def test_training(kind, calls):
    model = build(kind).train()

    def gradients() -> dict[str, torch.Tensor]:
        model.zero_grad()
        model(IDS, labels=IDS).loss.backward()
        # `clone` and not a view: the second pass may write the same memory
        return {n: w.grad.clone() for n, w in model.named_parameters() if w.grad is not None}

    want = gradients()
    with deltanet_ext.enabled():
        got = gradients()
    assert calls["chunk_gated_delta_rule"] == LINEAR
    assert got.keys() == want.keys()  # no weight has lost its gradient
    for name, theirs in want.items():
        assert theirs.any(), name
        assert (got[name] - theirs).norm() <= 2e-3 * theirs.norm(), name


@common
def test_the_rest_of_the_layer(kind, monkeypatch):
    """The convolution and the norm, on every version; `layer=False` leaves them."""
    counter: Counter = Counter()

    def counting(name: str):
        function = getattr(deltanet_ext.layer, name)

        def call(*args, **kwargs):
            counter[name] += 1
            return function(*args, **kwargs)

        return call

    for name in ("causal_conv1d_fn", "causal_conv1d_update", "gated_rms_norm"):
        monkeypatch.setattr(deltanet_ext.layer, name, counting(name))
    model = build(kind)
    want = greedy(model)
    for whole, wanted in (
        (True, {"causal_conv1d_fn": 1, "causal_conv1d_update": 7, "gated_rms_norm": 8}),
        (False, {}),
    ):
        counter.clear()
        with deltanet_ext.enabled(layer=whole):
            assert torch.equal(greedy(model), want)
        assert counter == {name: LINEAR * n for name, n in wanted.items()}


def test_a_convolution_that_we_cannot_serve(caplog):
    """It goes to what was there before, up to 5.14 a branch of the layer."""
    layers = [linear_layers(build("qwen3_next"))[0] for _ in range(2)]
    x = torch.randn(2, 30, 64, generator=torch.Generator().manual_seed(1))
    for one in layers:
        wide = torch.nn.Conv1d(128, 128, 9, groups=128, bias=False, padding=8)
        one.conv1d = wide.requires_grad_(False)
        one.conv1d.weight.copy_(torch.linspace(-1, 1, 128 * 9).view(128, 1, 9))
        one.conv_kernel_size = 9
    with torch.no_grad():
        want = layers[0](x)
        with deltanet_ext.enabled():
            torch.testing.assert_close(layers[1](x), want)
    assert "the convolution has 9 taps, above 8" in caplog.text


# -- exactness, switching back, reports ------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_a_layer_in_half_precision_is_no_worse_than_without_us(dtype, calls):
    """Against the same weights in fp32. Up to 5.16 transformers rounds normalized keys to the
    model's dtype, we never do: the two need not agree bit by bit, but ours must not be the worse.
    One layer, because experts that change places hide everything in a whole model, and over
    several seeds, because roundings outside of the rule are most of either error."""
    theirs, ours = [], []
    for seed in range(5):
        layer = linear_layers(build("qwen3_next", dtype, seed))[0]
        exact = linear_layers(build("qwen3_next", dtype, seed).float())[0]
        x = torch.randn(2, 70, 64, generator=torch.Generator().manual_seed(seed)).to(dtype)
        with torch.no_grad():
            want = exact(x.float())
            theirs.append(layer(x) - want)
            with deltanet_ext.enabled():
                ours.append(layer(x) - want)
    assert calls["chunk_gated_delta_rule"] == 5
    assert torch.stack(ours).norm() <= 1.05 * torch.stack(theirs).norm()


@pytest.mark.parametrize("kind", HERE)
def test_disable_restores_exactly_what_was_there(kind):
    module = modeling(kind)
    model = build(kind)
    classes = [c for c in vars(module).values() if isinstance(c, type)]
    layers = linear_layers(model)

    def state() -> list[dict]:
        return [dict(vars(held)) for held in (module, *classes, *layers)]

    before, hooks = state(), list(sys.meta_path)
    switch.enable(quiet=True)
    switch.enable(quiet=True)  # a second time does no harm
    assert state() != before
    switch.disable()
    assert state() == before
    assert sys.meta_path == hooks


def test_a_function_of_the_users_own_stays(calls):
    model = build("qwen3_next")
    module = modeling("qwen3_next")
    theirs: list = []

    def own(*args, **kwargs):
        theirs.append(1)
        return original(*args, **kwargs)

    layers = linear_layers(model)
    with deltanet_ext.enabled():
        if hasattr(layers[0], "chunk_gated_delta_rule"):
            original = module.torch_chunk_gated_delta_rule
            for layer in layers:
                layer.chunk_gated_delta_rule = own
            model(IDS)
            assert len(theirs) == LINEAR
        else:
            original = module.torch_chunk_gated_delta_rule
            module.torch_chunk_gated_delta_rule = own
            try:
                model(IDS)
                deltanet_ext.disable()
                assert module.torch_chunk_gated_delta_rule is own
            finally:
                module.torch_chunk_gated_delta_rule = _registry.original(original)
            assert len(theirs) == LINEAR


def test_explain(model):
    before = deltanet_ext.explain(model)
    assert len(before.layers) == LINEAR
    assert not before.ours
    assert "torch_chunk_gated_delta_rule" in before.layers[0].serves
    assert "enable() has not been called" in str(before)
    with deltanet_ext.enabled():
        during = deltanet_ext.explain(model)
    assert during.ours
    assert {layer.name for layer in during.layers} == {
        name
        for name, layer in model.named_modules()
        if type(layer).__name__.endswith("GatedDeltaNet")
    }
    assert f"{LINEAR} x {during.layers[0].type}, float32 on cpu" in str(during)
    assert f"deltanet_ext, {deltanet_ext.cpu_isa()} kernels" in str(during)


def test_explain_says_what_cannot_be_served(model):
    layer = linear_layers(model)[0]
    with deltanet_ext.enabled():
        layer.head_k_dim = 300
        found = deltanet_ext.explain(model)
        assert not found.ours
        assert "head dims are 300 and 16, above 256" in str(found)
        found = deltanet_ext.explain(model.to("meta"))
    assert not any(layer.ours for layer in found.layers)
    assert "a tensor is on meta" in str(found)


def test_explain_of_other_things():
    assert "no layer" in str(deltanet_ext.explain(torch.nn.Linear(2, 2)))
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got str"):
        deltanet_ext.explain("qwen3_next")


def test_enable_prints_a_report(capsys):
    modeling("qwen3_next")
    report = deltanet_ext.enable()
    printed = capsys.readouterr().out
    assert printed.rstrip() == str(report)
    assert f"transformers {transformers.__version__} is switched" in printed
    assert "transformers.models.qwen3_next.modeling_qwen3_next" in report.modules
    assert report.backends["cpu"] == f"{deltanet_ext.cpu_isa()} kernels"
    assert "cuda" in report.backends
    deltanet_ext.enable(quiet=True)
    assert capsys.readouterr().out == ""


def test_report_names_what_was_left():
    pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    left = deltanet_ext.enable(quiet=True).left
    assert (
        "another rule"
        in left["transformers.models.kimi_linear.modeling_kimi_linear.KimiLinearDeltaAttention"]
    )


@pytest.mark.slow
def test_models_imported_later_and_nothing_is_imported_by_us():
    code = """
        import sys, torch, deltanet_ext
        report = deltanet_ext.enable(quiet=True)
        assert "transformers" not in sys.modules, "enable() imported transformers"
        assert report.functions == (), report
        from transformers.models.qwen3_next import modeling_qwen3_next as first
        from deltanet_ext.integrations import transformers as switch
        assert switch.report().modules == (first.__name__,), switch.report()
        deltanet_ext.disable()
        print("fine")
    """
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.stdout.strip() == "fine", result.stderr


def test_rescues_a_cpu_host_with_fla(calls, monkeypatch):
    """transformers takes fla's functions where fla can be imported, and those need a GPU."""
    pytest.importorskip("fla")
    monkeypatch.setenv("FLA_DELTANET_EXT", "0")  # another test may have registered our backend
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    model = build("qwen3_next")
    function = deltanet_ext.explain(model).layers[0].serves
    if not function.startswith("fla."):
        pytest.skip(f"transformers {transformers.__version__} does not take fla on this machine")
    with torch.no_grad():
        with pytest.raises(RuntimeError, match="active drivers"):
            model(IDS)
        with deltanet_ext.enabled():
            logits = model(IDS).logits
    assert calls["chunk_gated_delta_rule"] == LINEAR
    assert logits.isfinite().all()
