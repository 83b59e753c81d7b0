# SPDX-License-Identifier: Apache-2.0
"""`demo --train`, made small: what it prints, its exit codes, that wrong gradients make it fail."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from deltanet_ext import __main__ as command
from deltanet_ext import ops
from deltanet_ext.demo import training

pytest.importorskip("transformers", minversion="5.15")
pytest.importorskip("rich")

SMALL = [
    *("--train", "--tokens", "96", "--steps", "5", "--hidden", "64", "--key-heads", "1"),
    *("--threads", "1"),
]


@pytest.fixture(autouse=True)
def _same_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def run(*more: str) -> int:
    return command.main(["demo", *SMALL, *more])


@pytest.mark.slow  # starts three processes that import transformers
def test_agrees_and_prints_a_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "train.json"
    assert run("--json", str(path)) == 0
    text = capsys.readouterr().out
    for expected in ("seconds per step", "peak memory", "of it training", "allowed", "verdict"):
        assert expected in text
    assert "FAILED" not in text
    ways = json.loads(path.read_text())["ways"]
    assert list(ways) == list(training.WAYS)
    for way in ways.values():
        assert len(way["losses"]) == len(way["seconds"]) == 5
        assert way["peak"] > way["before"] > 50e6
        assert way["calls"] == 5 * 4  # layers with the rule
    assert [ways[name]["served"] for name in training.WAYS] == [0, 20, 0]


def here(options: training.Options, step_done: Callable[[str, float], None]) -> Any:
    """Instead of in children, where a test cannot spoil an operator."""
    return {way: run_to_the_end(way, options) for way in training.WAYS}


def run_to_the_end(way: str, options: training.Options) -> training.Training:
    *_, done = training.train(way, options)
    return done


@pytest.mark.slow
@pytest.mark.parametrize("argument", ["query", "key", "value"])
def test_a_missing_gradient_fails(
    argument: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    operator = ops.chunk_gated_delta_rule

    def chunk_gated_delta_rule(**call: Any) -> Any:
        return operator(**call | {argument: call[argument].detach()})

    monkeypatch.setattr(ops, "chunk_gated_delta_rule", chunk_gated_delta_rule)
    monkeypatch.setattr(training, "in_children", here)
    assert run() == 1
    assert "losses differ by" in capsys.readouterr().out


def test_what_is_judged() -> None:
    good = training.Training(losses=[2.0, 1.0], seconds=[1.0, 1.0], calls=4, served=4)
    other = dataclasses.replace(good, losses=[2.0, 1.5])
    ways = {training.THEIRS: good, training.OURS: good, training.NO_RULE: other}
    assert training.judge(ways) == []
    for name, changes, fault in (
        (training.OURS, {"losses": [2.0, 1.0011]}, "losses differ by 1.1e-03, allowed 1e-03"),
        (training.OURS, {"losses": [2.0, float("nan")]}, "losses differ by nan"),
        (training.OURS, {"served": 3}, "3 of 4 calls reached deltanet_ext"),
        (training.NO_RULE, {"losses": [2.0, 1.01]}, "hardly depend on the rule"),
        (training.THEIRS, {"losses": [1.0, 1.0]}, "the loss did not fall"),
    ):
        spoiled = ways | {name: dataclasses.replace(ways[name], **changes)}
        assert any(fault in text for text in training.judge(spoiled))


@pytest.mark.slow
def test_a_child_that_ends_early_is_an_error() -> None:
    options = training.Options(tokens=0, steps=1, hidden=64, key_heads=1)
    with pytest.raises(RuntimeError, match="transformers ended with exit code 1"):
        training.in_children(options, lambda way, loss: None)


@pytest.mark.parametrize(
    "option", [("--dtype", "bf16"), ("--model", "qwen3_5"), ("--repeats", "1")]
)
def test_options_of_the_other_demo_are_refused(
    option: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        run(*option)
    assert stopped.value.code == 2
    assert f"{option[0]} does not go with --train" in capsys.readouterr().err
