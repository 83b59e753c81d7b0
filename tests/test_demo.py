# SPDX-License-Identifier: Apache-2.0
"""The demo, made small: what it prints, its exit codes, and that a broken kernel makes it fail."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable

import pytest
import torch

from deltanet_ext import __main__ as command
from deltanet_ext import ops
from deltanet_ext.demo import inference, models, runs
from deltanet_ext.integrations import transformers as switch

pytest.importorskip("transformers", minversion="5.15")
pytest.importorskip("rich")

SMALL = [
    *("--tokens", "192", "--steps", "16", "--hidden", "64", "--key-heads", "2"),
    *("--repeats", "1", "--threads", "1"),
]


@pytest.fixture(autouse=True)
def _same_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def run(*more: str) -> int:
    return command.main(["demo", *SMALL, *more])


def test_agrees_and_prints_progress_and_a_table(capsys, tmp_path):
    path = tmp_path / "demo.json"
    assert run("--json", str(path)) == 0
    text = capsys.readouterr().out
    for expected in (
        "[ 1/32] Qwen3.5 fp32: build the model",
        "[32/32] Qwen3-Next bf16: yardstick, the same weights in fp32",
        "same tokens",
        "largest difference",
        "prefill",
        "decode",
        "ratio",
        "verdict",
    ):
        assert expected in text
    assert "FAILED" not in text
    outcomes = json.loads(path.read_text())["outcomes"]
    assert [(o["title"], o["dtype"]) for o in outcomes] == [
        ("Qwen3.5", "fp32"),
        ("Qwen3.5", "bf16"),
        ("Qwen3-Next", "fp32"),
        ("Qwen3-Next", "bf16"),
    ]
    for outcome in outcomes:
        assert outcome["faults"] == []
        assert all(seconds > 0 for what in ("prefill", "decode") for seconds in outcome[what])
        if outcome["dtype"] == "fp32":
            assert outcome["same_tokens"] == outcome["steps"]
    assert not switch.report().enabled


def spoil(name: str, change: Callable) -> Callable:
    """An operator that works and then does something wrong to what it returns."""
    operator = getattr(ops, name)

    def broken(*args, **kwargs):
        return change(*operator(*args, **kwargs))

    return broken


CHUNK, RECURRENT = "chunk_gated_delta_rule", "recurrent_gated_delta_rule"
FAULTS = {
    "output 1% too large": (CHUNK, lambda o, s: (o.float().mul(1.01).to(o.dtype), s)),
    "state 1% too large": (CHUNK, lambda o, s: (o, s * 1.01)),
    "state from the last token only": (RECURRENT, lambda o, s: (o, s * 0)),
    "one token is NaN": (CHUNK, lambda o, s: (o.index_fill(1, torch.tensor([7]), torch.nan), s)),
    "heads swapped": (CHUNK, lambda o, s: (o.flip(2), s)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_kernel_fails_in_fp32(fault, capsys, monkeypatch):
    name, change = FAULTS[fault]
    monkeypatch.setattr(ops, name, spoil(name, change))
    assert run("--model", "qwen3_5", "--dtype", "fp32") == 1
    assert "FAILED" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["output 1% too large", "one token is NaN", "heads swapped"])
def test_a_broken_kernel_fails_in_bf16(fault, capsys, monkeypatch):
    name, change = FAULTS[fault]
    monkeypatch.setattr(ops, name, spoil(name, change))
    assert run("--model", "qwen3_5", "--dtype", "bf16") == 1
    assert "FAILED" in capsys.readouterr().out


def test_calls_that_never_arrive_fail(capsys, monkeypatch):
    monkeypatch.setattr(switch, "_reason_to_decline", lambda call: "a test says so")
    assert run("--model", "qwen3_5", "--dtype", "fp32") == 1
    assert "0 of 64 calls reached deltanet_ext" in capsys.readouterr().out


def test_a_model_that_does_not_use_the_rule_fails(capsys, monkeypatch):
    monkeypatch.setattr(
        inference, "without_output", lambda module: runs.plain(getattr(module, runs.CHUNK))
    )
    assert run("--model", "qwen3_5", "--dtype", "fp32") == 1
    assert "hardly depend on the rule" in capsys.readouterr().out


def test_two_runs_choose_the_same_tokens():
    options = models.Options(tokens=96, hidden=64, key_heads=1)
    module = models.modeling_file("qwen3_next")
    with switch.enabled():
        first, second = (
            runs.generate(
                models.build_model("qwen3_next", options), module, models.prompt(options.tokens), 12
            )
            for _ in range(2)
        )
    assert first.tokens == second.tokens
    assert torch.equal(first.logits, second.logits)
    assert len(set(first.tokens)) > 4, "the weights make a degenerate text"


def test_the_text_is_long_enough_and_ascii():
    text = models.prompt(2048)
    assert text.shape == (1, 2048)
    assert int(text.max()) < 128
    assert models.prompt(5000).shape == (1, 5000)


@pytest.mark.parametrize("package", ["transformers", "rich"])
def test_a_missing_package_is_exit_code_2(package, capsys, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == package else find(name, *a)
    )
    assert run() == 2
    assert f"demo: {package} not installed; install with: pip" in capsys.readouterr().err


def test_a_missing_library_is_exit_code_2(capsys, monkeypatch):
    def missing():
        raise ImportError("the compiled library deltanet_ext._C is missing; build it")

    monkeypatch.setattr(ops, "build_info", missing)
    assert run() == 2
    assert "build it" in capsys.readouterr().err


def test_info(capsys):
    assert command.main(["info"]) == 0
    text = capsys.readouterr().out
    for expected in ("torch", "transformers", "cpu kernels", ops.cpu_isa(), "threads"):
        assert expected in text


def test_a_width_that_no_experts_can_have_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as exit:
        command.main(["demo", "--hidden", "63"])
    assert exit.value.code == 2
    assert "--hidden 63 is not a multiple of 8" in capsys.readouterr().err
