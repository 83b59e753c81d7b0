# SPDX-License-Identifier: Apache-2.0
"""No kernel needs more instructions for the same work than it did (benchmarks/instructions.py)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "benchmarks"))
import instructions  # noqa: E402

try:
    KEY, PROBLEMS = instructions.problems()
    FIGURES = instructions.committed(KEY)
    KERNELS = [p for part in ("core", "cpu") for p in (ROOT / "csrc" / part).iterdir()]
    NEWEST_SOURCE = max(p.stat().st_mtime for p in KERNELS)
    if instructions.PROGRAM.stat().st_mtime < NEWEST_SOURCE:
        raise instructions.CannotCountError("the C++ tests are older than csrc/cpu (make test-cpp)")
    REASON = ""
except instructions.CannotCountError as reason:
    PROBLEMS, FIGURES, REASON = [], {}, str(reason)


@pytest.mark.skipif(bool(REASON), reason=f"instructions not counted: {REASON}")
def test_every_problem_has_a_figure() -> None:
    assert sorted(FIGURES) == sorted(str(p) for p in PROBLEMS)


@pytest.mark.slow
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_no_kernel_needs_more_instructions_than_committed(problem: instructions.Problem) -> None:
    counted, figure = instructions.count(problem), FIGURES[str(problem)]
    assert not instructions.off(counted, figure), (
        f"{problem}: {counted} instructions, committed are {figure} ({counted / figure - 1:+.1%}). "
        "Fewer, or more for a reason: make instructions ARGS=--write"
    )


def test_a_change_of_three_percent_is_seen() -> None:
    assert instructions.off(1030, 1000)
    assert instructions.off(970, 1000)
    assert not instructions.off(1019, 1000)
