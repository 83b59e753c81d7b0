# SPDX-License-Identifier: Apache-2.0
"""The training example, made small: it learns, resumes on its curve, and notices a wrong rule."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import deltanet_ext

pytest.importorskip("rich")
pytest.importorskip("matplotlib")

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "train_recall.py"
TINY = [
    *("--batch", "4", "--tokens", "12", "--pairs", "2", "--vocabulary", "8", "--width", "16"),
    *("--heads", "1", "--head-dim", "8", "--warmup", "5", "--target", "0"),
]


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_recall", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_recall"] = module
    spec.loader.exec_module(module)
    return module


recall = load()


@pytest.fixture(autouse=True)
def _same_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def checkpoint(folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(folder / "checkpoint.pt", weights_only=True)
    return state


def test_sequences_ask_what_they_told() -> None:
    options = recall.Options(tokens=40, pairs=6, vocabulary=20)
    tokens, labels = recall.sequences(options, 50, seed=1)
    assert tokens.shape == labels.shape == (50, 40)
    assert (labels[:, :12] == recall.UNASKED).all()
    for row, asked in zip(tokens.tolist(), labels.tolist(), strict=True):
        told = dict(zip(row[0:12:2], row[1:12:2], strict=True))
        assert len(told) == 6
        assert max(told) < 10 <= min(told.values())
        answers = {row[t]: asked[t] for t in range(40) if asked[t] != recall.UNASKED}
        assert answers == told
    again, _ = recall.sequences(options, 50, seed=1)
    other, _ = recall.sequences(options, 50, seed=2)
    assert torch.equal(tokens, again)
    assert not torch.equal(tokens, other)


@pytest.mark.slow
def test_it_learns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An easier task than the default one, so that seconds are enough."""
    easy = [
        *("--steps", "250", "--batch", "32", "--tokens", "12", "--pairs", "4"),
        *("--vocabulary", "16", "--warmup", "20"),
        *("--evaluate-every", "125", "--out", str(tmp_path)),
    ]
    assert recall.main(easy) == 0
    assert "wanted 99%" in capsys.readouterr().out
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    state = checkpoint(tmp_path)
    assert len(state["losses"]) == 250
    assert [step for step, _ in state["accuracies"]] == [125, 250]
    assert state["accuracies"][-1][1] >= 0.99


def test_an_accuracy_below_the_target_fails(tmp_path: Path) -> None:
    arguments = [*TINY, "--steps", "2", "--out", str(tmp_path), "--target", "1"]
    assert recall.main(arguments) == 1


@pytest.mark.slow
def test_a_resumed_run_has_the_same_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    arguments = [*TINY, "--steps", "11", "--evaluate-every", "4"]
    assert recall.main([*arguments, "--out", str(whole)]) == 0

    step = recall.Run.train_step

    def interrupted(run: Any) -> float:
        if run.step == 6:
            raise KeyboardInterrupt
        result: float = step(run)
        return result

    with monkeypatch.context() as patch:
        patch.setattr(recall.Run, "train_step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            recall.main([*arguments, "--out", str(parts)])
    assert len(checkpoint(parts)["losses"]) == 4
    assert recall.main([*arguments, "--out", str(parts), "--resume"]) == 0

    want, got = checkpoint(whole), checkpoint(parts)
    assert got["losses"] == want["losses"]
    assert got["accuracies"] == want["accuracies"]
    for name, weight in want["model"].items():
        assert torch.equal(got["model"][name], weight), name


def test_resuming_with_other_options_is_refused(tmp_path: Path) -> None:
    arguments = [*TINY, "--steps", "2", "--out", str(tmp_path)]
    assert recall.main(arguments) == 0
    with pytest.raises(SystemExit, match=r"made with --head-dim 8, and now it is 4"):
        recall.main([*arguments, "--head-dim", "4", "--resume"])


SHORT = ["--compare", "--steps", "30", "--warmup", "10", "--batch", "8"]


def test_it_trains_as_with_transformers(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers", minversion="5.15")
    assert recall.main(SHORT) == 0
    assert "largest difference of all steps" in capsys.readouterr().out


def spoil(change: Callable[..., Any]) -> Callable[..., Any]:
    def rule(q: Any, k: Any, v: Any, g: Any, beta: Any, **options: Any) -> Any:
        return deltanet_ext.chunk_gated_delta_rule(*change(q, k, v, g, beta), **options)

    return rule


FAULTS = {
    "beta 10% too small": lambda q, k, v, g, beta: (q, k, v, g, beta * 0.9),
    "no gradient of the keys": lambda q, k, v, g, beta: (q, k.detach(), v, g, beta),
    "no gradient of the gates": lambda q, k, v, g, beta: (q, k, v, g.detach(), beta),
    "queries one token late": lambda q, k, v, g, beta: (q.roll(1, 1), k, v, g, beta),
    "NaN": lambda q, k, v, g, beta: (q * torch.nan, k, v, g, beta),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_rule_trains_otherwise(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", minversion="5.15")
    wrong = spoil(FAULTS[fault])
    start = recall.Run.start
    right = deltanet_ext.chunk_gated_delta_rule
    monkeypatch.setattr(
        recall.Run, "start", lambda options, rule: start(options, wrong if rule is right else rule)
    )
    assert recall.main(SHORT) == 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--pairs", "30", "--vocabulary", "60"], "--tokens 64: 30 pairs and as many questions"),
        (["--vocabulary", "10"], "--vocabulary 10: 8 different keys need 16"),
        (["--head-dim", "300"], "--head-dim 300: supported are 1 to 256"),
        (["--steps", "0"], "0 is not positive"),
        (["--rate", "nan"], "nan is not a positive number"),
        (["--target", "2"], "2 is not between 0 and 1"),
        (["--resume", "--out", "/nowhere"], "there is no /nowhere/checkpoint.pt"),
        (["--resume", "--compare"], "exclude each other"),
    ],
)
def test_wrong_arguments(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        recall.main(arguments)
    assert stopped.value.code == 2
    assert text in capsys.readouterr().err
