# SPDX-License-Identifier: Apache-2.0
"""The switch for transformers, on tiny models of every kind that has the gated delta rule."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import shutil
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from deltanet_ext import ops
from deltanet_ext.integrations import _registry
from deltanet_ext.integrations import transformers as switch

transformers = pytest.importorskip("transformers", minversion="5.22")

from tiny_models import IDS, KINDS, RULES, build, count_calls, greedy, modeling  # noqa: E402


@pytest.fixture(autouse=True)
def _switched_off() -> Iterator[None]:
    yield
    switch.disable()


@pytest.fixture
def calls(monkeypatch) -> Counter:
    return count_calls(monkeypatch)


# -- every model ---------------------------------------------------------------------------------


def test_every_model_with_the_rule_is_in_the_table():
    models = Path(transformers.__file__).parent / "models"
    found = {
        path.parent.name
        for path in models.glob("*/modeling_*.py")
        if "def torch_chunk_gated_delta_rule" in path.read_text(encoding="utf-8")
    }
    missing = found - KINDS.keys()
    if missing and not transformers.__version__.startswith("5.24."):
        pytest.skip(f"transformers {transformers.__version__} has new models: {sorted(missing)}")
    assert not missing


@pytest.mark.parametrize("kind", KINDS)
def test_same_greedy_tokens_for_models_built_before_and_after(kind, calls):
    before = build(kind)
    want = greedy(before)
    assert not calls
    report = switch.enable()
    assert f"transformers.models.{kind}.modeling_{kind}" in report.modules
    after = build(kind)
    for model in (before, after):
        calls.clear()
        assert torch.equal(greedy(model), want)
        # three layers: one prefill, then seven tokens
        assert calls == {"chunk_gated_delta_rule": 3, "recurrent_gated_delta_rule": 21}
    switch.disable()
    calls.clear()
    assert torch.equal(greedy(before), want)
    assert not calls


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_logits_of_16_bits_are_as_near_to_fp64(dtype, calls):
    """The error of a bf16 model is several percent, with us as without: other roundings, of the
    same size (fewer, in the convolution and the norm)."""
    model = build("qwen3_5", dtype)
    with torch.no_grad():
        theirs = model(IDS).logits.double()
        with switch.enabled():
            ours = model(IDS).logits.double()
        exact = model.double()(IDS).logits
    assert calls["chunk_gated_delta_rule"] == 3
    assert (ours - exact).norm() <= 1.3 * (theirs - exact).norm()


def test_logits_of_fp64(calls):
    model = build("qwen3_5", torch.float64)
    with torch.no_grad():
        want = model(IDS).logits
        with switch.enabled():
            got = model(IDS).logits
    assert calls["chunk_gated_delta_rule"] == 3
    # transformers computes the rule and the norm in fp32
    assert (got - want).norm() <= 1e-5 * want.norm()


# -- ways to call a model ------------------------------------------------------------------------


def test_the_cached_state_is_not_written(calls):
    model = build("qwen3_5")
    with torch.no_grad(), switch.enabled():
        cache = model(IDS, use_cache=True).past_key_values
        state = cache.layers[0].recurrent_states[0]
        before = state.clone()
        query = torch.randn(2, 1, 2, 16)
        gate = -torch.rand(2, 1, 4)
        modeling("qwen3_5").torch_recurrent_gated_delta_rule(
            query,
            query,
            torch.randn(2, 1, 4, 16),
            g=gate,
            beta=-gate,
            initial_state=state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
    assert calls["recurrent_gated_delta_rule"] == 1
    assert torch.equal(state, before)


@pytest.mark.slow
def test_compiled_model(calls):
    model = build("qwen3_5")
    ids = IDS[:1]
    with torch.no_grad():
        want = model(ids, use_cache=False).logits
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        with switch.enabled():
            got = compiled(ids, use_cache=False).logits
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
        # dynamo guards on the global: after disable() the graph of before is not used
        calls.clear()
        assert torch.equal(compiled(ids, use_cache=False).logits, want)
        assert not calls


class Logits(torch.nn.Module):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(ids, use_cache=False).logits


LENGTHS = (70, 33, 51, 20)
OPERATORS = {"chunk_gated_delta_rule_forward", "causal_conv1d_forward", "gated_rms_norm_forward"}


def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.fixture
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.usefixtures("_fresh_dynamo")
def test_compiled_model_takes_any_length():
    model = build("qwen3_5")
    compiled = torch.compile(Logits(model), fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.no_grad(), switch.enabled():
        for length in LENGTHS:
            ids = IDS[:1, :length]
            want = model(ids, use_cache=False).logits
            torch.testing.assert_close(compiled(ids), want, rtol=1e-4, atol=1e-4)
            if length == LENGTHS[1]:
                traced = graphs()
    assert graphs() == traced  # none for the lengths after the second


@pytest.mark.slow
@pytest.mark.usefixtures("_fresh_dynamo")
def test_compiled_training_takes_any_length():
    model = build("qwen3_5").train()

    def loss(ids: torch.Tensor) -> torch.Tensor:
        return model(ids, labels=ids, use_cache=False).loss

    def gradients(function: Callable, ids: torch.Tensor) -> list[torch.Tensor]:
        model.zero_grad()
        function(ids).backward()
        return [weight.grad.clone() for weight in model.parameters()]

    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager")
    with switch.enabled():
        for length in LENGTHS:
            ids = IDS[:1, :length]
            got, want = gradients(compiled, ids), gradients(loss, ids)
            for ours, theirs in zip(got, want, strict=True):
                assert (ours - theirs).norm() <= 1e-4 * theirs.norm()
            if length == LENGTHS[1]:
                traced = graphs()
    assert graphs() == traced


def export(model):
    """The model for any length, and its logits for some lengths."""
    length = torch.export.Dim("length", min=2, max=512)
    exported = torch.export.export(
        Logits(model), (IDS[:1],), dynamic_shapes=({1: length},), strict=False
    )
    return exported, [model(IDS[:1, :n], use_cache=False).logits for n in LENGTHS]


@pytest.mark.slow
def test_exported_model_keeps_the_operators():
    model = build("qwen3_5")
    with torch.no_grad(), switch.enabled():
        exported, wants = export(model)
    targets = [str(node.target) for node in exported.graph.nodes]
    assert {
        target.split(".")[1] for target in targets if target.startswith("deltanet_ext.")
    } == OPERATORS
    run = exported.module()  # switched off by now: the graph holds the operators themselves
    for n, want in zip(LENGTHS, wants, strict=True):
        torch.testing.assert_close(run(IDS[:1, :n]), want, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def package(tmp_path_factory) -> Path:
    """A folder with an exported model as AOTInductor compiles it, and its logits for some lengths:
    C++ that calls the operators, without this package's Python."""
    if not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("package")
    with torch.no_grad(), switch.enabled():
        exported, wants = export(build("qwen3_5"))
        torch._inductor.aoti_compile_and_package(exported, package_path=str(folder / "model.pt2"))
    torch.save([(IDS[:1, :n], want) for n, want in zip(LENGTHS, wants, strict=True)], folder / "io")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "load",
    [
        "import deltanet_ext",
        "torch.ops.load_library(sys.argv[2]); assert 'deltanet_ext' not in sys.modules",
    ],
    ids=["import", "library"],
)
def test_a_package_of_an_exported_model_runs_in_a_fresh_process(load, package):
    """The operators come with this package, or with its compiled library alone. Without either the
    model cannot be loaded, or this test would say nothing."""
    code = f"""
        import sys
        import torch

        try:
            torch._inductor.aoti_load_package(sys.argv[1] + "/model.pt2")
            raise SystemExit("the package does not call the operators")
        except RuntimeError as error:
            assert "schema for deltanet_ext::" in str(error), error
        {load}
        run = torch._inductor.aoti_load_package(sys.argv[1] + "/model.pt2")
        for ids, want in torch.load(sys.argv[1] + "/io"):
            torch.testing.assert_close(run(ids), want, rtol=1e-4, atol=1e-4)
        assert "transformers" not in sys.modules
        print("fine")
    """
    library = importlib.import_module("deltanet_ext._C").__file__
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code), str(package), library],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.stdout.strip() == "fine", result.stderr


# -- packed sequences ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_next"])
def test_packed_sequences_stay_apart(kind, calls):
    model = build(kind)
    lengths = [17, 1, 33, 19]
    edges = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    ids = IDS[:1, : edges[-1]]
    packed = {
        "position_ids": torch.cat([torch.arange(n) for n in lengths])[None],
        "cu_seq_lens_q": edges,
        "cu_seq_lens_k": edges,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }
    with torch.no_grad():
        with pytest.raises(ValueError, match="packed"):  # transformers by itself refuses
            model(ids, use_cache=False, **packed)
        alone = [model(piece, use_cache=False).logits for piece in ids.split(lengths, dim=1)]
        with switch.enabled():
            got = model(ids, use_cache=False, **packed).logits
            # Its attention layers would let one sequence see the next: its refusal must be heard.
            with pytest.raises(ValueError, match="packed"):
                model(ids, use_cache=True, **packed)
            seq_idx = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))[None]
            again = model(ids, use_cache=False, seq_idx=seq_idx, **packed).logits
    assert calls["chunk_gated_delta_rule"] == 6
    torch.testing.assert_close(got, torch.cat(alone, dim=1), rtol=1e-3, atol=1e-3)
    assert torch.equal(got, again)


def test_packing_that_we_cannot_follow_still_raises():
    model = build("qwen3_5")
    seq_idx = torch.zeros_like(IDS[:1])
    with torch.no_grad(), switch.enabled(), pytest.raises(ValueError, match="packed"):
        model(IDS[:1], use_cache=False, seq_idx=seq_idx)


# -- the wrapper by itself -----------------------------------------------------------------------


def rule_inputs(dtype=torch.float32, dim=16):
    rng = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, 20, 2, dim, generator=rng).to(dtype) for _ in range(3))
    g, beta = -torch.rand(1, 20, 2, generator=rng), torch.rand(1, 20, 2, generator=rng)
    return {"query": q, "key": k, "value": v, "g": g, "beta": beta.to(dtype)}


@pytest.mark.parametrize("name", RULES)
def test_positional_arguments_and_strays(name, calls):
    x = rule_inputs()
    with switch.enabled():
        rule = getattr(modeling("qwen3_5"), name)
        strays = {"use_cache": True, "output_router_logits": False, "max_length_q": 7, "scale": 3}
        want = rule(**x, output_final_state=True, cu_seqlens=None, **strays)
        size = (64,) if "chunk" in name else ()
        got = rule(*x.values(), *size, None, True, False, cu_seqlens=None, **strays)
    assert sum(calls.values()) == 2
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda x: x.update(key=x["key"].double()), "query, key, value are"),
        (lambda x: x.update(g=x["g"].half()), "g and beta"),
        (lambda x: x.update(rule_inputs(dim=300)), "head dims"),
        (lambda x: x.update({n: t.to("meta") for n, t in x.items()}), "on meta"),
    ],
    ids=["dtypes", "gate", "dims", "device"],
)
@pytest.mark.parametrize("name", RULES)
def test_what_we_cannot_serve_goes_to_the_original(name, change, reason, calls, caplog):
    x = rule_inputs()
    change(x)
    _registry._reasons_logged.clear()
    with switch.enabled():
        output, _ = getattr(modeling("qwen3_5"), name)(**x)
    assert output.shape == x["value"].shape
    assert not calls
    assert reason in caplog.text


def test_missing_arguments_get_the_error_of_the_original():
    with switch.enabled(), pytest.raises(TypeError, match="torch_chunk_gated_delta_rule"):
        modeling("qwen3_5").torch_chunk_gated_delta_rule(torch.zeros(1, 1, 1, 1))


# -- switching -----------------------------------------------------------------------------------


def test_disable_restores_exactly_what_was_there():
    names = (*RULES, "causal_conv1d_fn")
    modules = [modeling(kind) for kind in KINDS]
    before = [getattr(module, name) for module in modules for name in names]
    hooks = list(sys.meta_path)
    switch.enable()
    switch.enable()  # a second time does no harm
    during = [getattr(module, name) for module in modules for name in names]
    assert not any(a is b for a, b in zip(before, during, strict=True))
    assert [f.__name__ for f in during] == [f.__name__ for f in before]
    switch.disable()
    after = [getattr(module, name) for module in modules for name in names]
    assert all(a is b for a, b in zip(before, after, strict=True))
    assert sys.meta_path == hooks
    switch.disable()


def test_enabled_leaves_an_enabled_process_enabled():
    assert not switch.report().enabled
    with switch.enabled():
        with switch.enabled():
            pass
        assert switch.report().enabled
    assert not switch.report().enabled
    switch.enable()
    with pytest.raises(KeyError), switch.enabled():
        raise KeyError
    assert switch.report().enabled


def test_a_file_that_is_loaded_again_is_switched_again():
    module = modeling("qwen3_5")
    before = module.torch_chunk_gated_delta_rule
    with switch.enabled():
        again = importlib.reload(module)
        switched = again.torch_chunk_gated_delta_rule
        assert switched is not before
        assert switched._deltanet_ext[0] is switched
    assert again.torch_chunk_gated_delta_rule is switched._deltanet_ext[1]


def test_blocks_that_overlap_last_until_the_last_one_ends():
    """As they do in two threads."""
    first, second = switch.enabled(), switch.enabled()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert switch.report().enabled
    second.__exit__(None, None, None)
    assert not switch.report().enabled


def test_an_explicit_call_inside_a_block_outlasts_it():
    with switch.enabled():
        switch.enable()
    assert switch.report().enabled
    with switch.enabled():
        switch.disable()
        assert not switch.report().enabled
    assert not switch.report().enabled


def test_what_somebody_else_put_there_stays(calls):
    module = modeling("qwen3_5")
    original = module.torch_chunk_gated_delta_rule
    switch.enable()
    ours = module.torch_chunk_gated_delta_rule

    def theirs(*args, **kwargs):
        return ours(*args, **kwargs)

    # functools.wraps copies everything that we may have marked our wrapper with
    theirs.__dict__.update(ours.__dict__)
    module.torch_chunk_gated_delta_rule = theirs
    try:
        switch.disable()
        assert module.torch_chunk_gated_delta_rule is theirs
        theirs(**rule_inputs())
        assert not calls  # a wrapper that outlives the switch calls the original
        switch.enable()
        module.torch_chunk_gated_delta_rule(**rule_inputs())
        assert calls["chunk_gated_delta_rule"] == 1
        switch.disable()
        assert module.torch_chunk_gated_delta_rule is theirs
    finally:
        module.torch_chunk_gated_delta_rule = original


def test_report():
    modeling("qwen3_5")
    assert "not switched" in str(switch.report())
    report = switch.enable()
    assert report.transformers == transformers.__version__
    name = "transformers.models.qwen3_5.modeling_qwen3_5"
    assert {f"{name}.{rule}" for rule in RULES} <= set(report.functions)
    assert name in str(report)


@pytest.mark.parametrize(
    ("version", "message"),
    [
        ("4.56.2", "transformers is 4.56.2; supported: 4.57 and newer"),
        (None, "transformers is not installed; supported: 4.57 and newer"),
    ],
)
def test_versions_that_are_too_old(version, message, monkeypatch):
    monkeypatch.setattr(switch, "_installed_version", lambda: version)
    with pytest.raises(ImportError, match=re.escape(message)):
        switch.enable()
    assert not switch.report().enabled


@pytest.mark.parametrize("version", ["4.57.0", "5.15.0", "5.24.0", "5.30.0.dev0", "6.0.0"])
def test_versions_that_are_new_enough(version, monkeypatch):
    monkeypatch.setattr(switch, "_installed_version", lambda: version)
    assert switch.enable().transformers == version


def test_without_the_library_it_says_how_to_build(monkeypatch):
    def missing():
        raise ImportError("deltanet_ext._C is missing; build it")

    monkeypatch.setattr(ops, "build_info", missing)
    with pytest.raises(ImportError, match="build it"):
        switch.enable()
    assert not switch.report().enabled


@pytest.mark.slow
def test_models_imported_later_are_switched_and_nothing_is_imported_by_us():
    code = """
        import sys, torch
        from deltanet_ext.integrations import transformers as switch
        report = switch.enable(quiet=True)
        assert "transformers" not in sys.modules, "enable() imported transformers"
        assert report.functions == (), report
        from transformers.models.qwen3_5 import modeling_qwen3_5 as first
        from transformers.models.qwen3_next import modeling_qwen3_next as second
        found = switch.report()
        assert found.modules == (first.__name__, second.__name__), found
        assert "exec_module" not in vars(first.__spec__.loader)
        x = torch.randn(1, 5, 2, 8)
        gate = -torch.rand(1, 5, 2)
        first.torch_chunk_gated_delta_rule(x, x, x, g=gate, beta=-gate)
        switch.disable()
        from transformers.models.olmo_hybrid import modeling_olmo_hybrid as third
        for module in (first, second, third):
            for name in ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"):
                assert not hasattr(getattr(module, name), "_deltanet_ext"), (module, name)
        print("fine")
    """
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.stdout.strip() == "fine", result.stderr
