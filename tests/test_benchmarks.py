# SPDX-License-Identifier: Apache-2.0
"""The benchmark tools on made-up results: what they count, when they complain, what they write."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
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


def test_layer_cases_run_and_both_contestants_agree(tools):
    pytest.importorskip("transformers", minversion="5.15")
    import layer_cases

    try:
        for case in layer_cases.LAYER_CASES:
            small = layer_cases.LayerCase(case.name, min(case.tokens, 8), case.function)
            results = []
            with torch.inference_mode():
                for function in small.contestants():
                    results.append(function(**small.inputs(torch.float32)))
            torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
            assert case.state_floats > 0
    finally:
        del sys.modules["layer_cases"]


# ---- what runs on a machine with a GPU, rehearsed without one -----------------------------------


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.delitem(sys.modules, "gpu", raising=False)
    import gpu

    yield gpu
    del sys.modules["gpu"]


def test_gpu_shapes_count_what_they_say(gpu):
    (long,) = [s for s in gpu.SHAPES if s.name == "16/32, 1 x 8192"]
    assert long.tokens == 8192
    # bf16; two value heads share what a key head reads
    assert long.bytes / (8192 * 32) == 2 * 2 * 128 / 2 + 2 * 2 * 128 + 6
    assert long.flop == pytest.approx(8192 * 32 * (6 * 128 * 128 + 128 * (64 + 128)))
    (decode,) = [s for s in gpu.SHAPES if s.name == "decode 32"]
    assert decode.bytes > 2 * 4 * 128 * 128 * 32 * 32
    for shape in gpu.SHAPES:
        small = gpu.tiny(shape)
        args = gpu.inputs(small, "cpu", 0)
        assert args["query"].shape == (small.batch, sum(small.lengths), 1, 128)
        assert ("cu_seqlens" in args) == (len(shape.lengths) > 1)


def test_gpu_measures_and_judges(gpu):
    row = gpu.measure_shape(gpu.tiny(gpu.SHAPES[0]), "cpu", "exact", 0)
    assert row["error_against_recurrence"] < 1e-3
    assert row["ms_median"] > 0
    result = {"device": "cuda", "rows": [row]}
    assert "| 2/8, 1 x 2048 | exact |" in gpu.table(result)
    assert "0.061 | 0.109 | 0.081" in gpu.table(result)
    assert "nothing" in gpu.table({**result, "device": "cpu"})
    wrong = torch.zeros(1, 70, 2, 128)
    with pytest.raises(AssertionError, match="chunks and recurrence differ"):
        gpu.difference_from_recurrence(
            gpu.tiny(gpu.SHAPES[0]), gpu.inputs(gpu.tiny(gpu.SHAPES[0]), "cpu", 0), wrong,
            torch.zeros(1, 2, 128, 128),
        )  # fmt: skip
    assert gpu.slug("NVIDIA H200") == "nvidia-h200"


def test_gpu_comparison_finds_a_difference(gpu, tmp_path, capsys, monkeypatch):
    results = {"chunks, bfloat16, chunk: output": torch.ones(4), "transition: M": torch.ones(4)}
    monkeypatch.setattr(gpu, "exact_results", dict)
    torch.save(results, tmp_path / "a.pt")
    torch.save({**results, "transition: M": torch.full((4,), 1.001)}, tmp_path / "b.pt")
    files = argparse.Namespace(files=[tmp_path / "a.pt", tmp_path / "a.pt"])
    assert gpu.compare(files)["failed"] == []
    files.files[1] = tmp_path / "b.pt"
    assert gpu.compare(files)["failed"] == ["transition: M"]
    assert "DIFFERS: transition: M" in capsys.readouterr().out


@pytest.mark.slow
def test_on_gpu_says_what_is_wrong():
    script = BENCHMARKS / "on_gpu.sh"

    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            ["bash", script, *arguments],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
        )

    assert "--fast is not known; supported: --dry-run" in run("--fast").stderr
    assert "no no-such-python found" in run(PYTHON="no-such-python").stderr
    if not torch.cuda.is_available():
        ran = run(PYTHON=sys.executable)
        assert ran.returncode == 1
        assert "torch finds no GPU (--dry-run rehearses without one)" in ran.stderr
