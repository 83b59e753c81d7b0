# SPDX-License-Identifier: Apache-2.0
"""The benchmark tools on made-up results: what they count, when they complain, what they write."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import deltanet_ext

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture
def tools(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import compare
    import report

    import cases

    yield cases, compare, report
    for name in ("cases", "compare", "report"):  # tests have a module `cases` of their own
        del sys.modules[name]


@pytest.fixture(autouse=True)
def _own_modules():
    """Gives back the modules of these names that other tests imported."""
    names = ("cases", "compare", "report")
    before = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    yield
    sys.modules.update(before)


def result(ours_ms: float, theirs_ms: float = 100.0, peak: float = 100.0) -> dict[str, Any]:
    rows = [
        {
            "case": "prefill 4096",
            "shape": "B=1 T=4096",
            "dtype": "fp32",
            "contestant": name,
            "malloc": malloc,
            "ms_min": ms,
            "ms_median": ms * 1.02,
            "unit": "GFLOP/s",
            "speed": 1000 / ms,
            "limit": peak,
            "share": 1000 / ms / peak,
        }
        for name, ms in (("deltanet_ext", ours_ms), ("transformers", theirs_ms))
        for malloc in ("default", "tuned")
    ]
    return {
        "date": "2026-01-02T03:04:05+00:00",
        "machine": {"cpu": "a CPU", "family": "1", "model": "2", "cores": "2"},
        "isa": "avx2",
        "threads": 1,
        "torch": "2.13.0",
        "transformers": "5.24.0",
        "load_before_and_after": [0.0, 1.0],
        "rows": rows,
    }


def test_compare_complains_about_slower_kernels_only(tools, tmp_path, monkeypatch, capsys):
    _, compare, _ = tools
    assert compare.compare(result(10), result(10.3), 0.05)[1] == []
    slower = compare.compare(result(10), result(11), 0.05)[1]
    assert {key[2] for key in slower} == {"deltanet_ext"}
    assert len(slower) == 2
    # transformers being slower is not our fault, and a slower machine is nobody's
    assert compare.compare(result(10), result(10, theirs_ms=200), 0.05)[1] == []
    assert compare.compare(result(10), result(12, peak=100 / 1.2), 0.05)[1] == []

    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, ms in zip(paths, (10, 11), strict=True):
        path.write_text(json.dumps(result(ms)))
    monkeypatch.setattr(sys, "argv", ["compare.py", *map(str, paths)])
    assert compare.main() == 1
    assert "SLOWER" in capsys.readouterr().out


def test_report_writes_between_its_markers(tools, tmp_path):
    _, _, report = tools
    path = tmp_path / "page.md"
    begin, end = report.BEGIN.format("tables", "report.py"), report.END.format("tables")
    path.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    report.put(path, "tables", report.detailed([result(10)]))
    text = path.read_text()
    assert text.startswith(f"before\n{begin}\n")
    assert text.endswith(f"\n{end}\nafter\n")
    assert "old" not in text
    assert "| prefill 4096 | fp32 | 10.00 | 10.20 | 100% | 100 | 10.0 x |" in text
    assert "shared" not in text
    assert "10.0 x" in report.short(result(10))


def test_the_documents_have_the_markers(tools):
    _, _, report = tools
    for page, name, source in (
        ("README.md", "table", "report.py"),
        ("docs/performance.md", "tables", "report.py"),
        ("docs/numerics.md", "accuracy", "accuracy.py"),
    ):
        text = (BENCHMARKS.parent / page).read_text()
        assert report.BEGIN.format(name, source) in text
        assert report.END.format(name) in text


def test_cases_count_what_they_say_and_run(tools):
    cases, _, _ = tools
    largest = cases.CASES[0]
    assert largest.flop == pytest.approx(4096 * 32 * (6 * 128 * 128 + 32 * (64 + 128)))
    for case in cases.CASES:
        x = case.inputs(torch.bfloat16)
        assert x["query"].shape == (case.batch, case.tokens, case.key_heads, case.key_dim)
        assert (x["query"].stride(-1) == 1) != case.strided
    small = cases.Case("small", 1, 5, 1, 2, key_dim=8, value_dim=8)
    output, _ = deltanet_ext.chunk_gated_delta_rule(**small.inputs(torch.float32))
    assert output.shape == (1, 5, 2, 8)
