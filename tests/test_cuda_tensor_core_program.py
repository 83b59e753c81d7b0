# SPDX-License-Identifier: Apache-2.0
"""The tensor-core forward called from C++: schedules, counts, and bugs that must be seen."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "ptx_emulator"))
import build

if reason := build.why_not():
    pytest.skip(f"PTX emulator: {reason}", allow_module_level=True)

pytestmark = pytest.mark.slow  # each program compiles for half a minute

SCHEDULES = ({}, {"SEED": "1"}, {"SEED": "2"}, {"SEED": "3", "ASYNC": "early"})


def run(program: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    settings = {f"PTX_EMULATOR_{name}": value for name, value in settings.items()}
    return subprocess.run(
        [program], env={**os.environ, **settings}, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("settings", SCHEDULES, ids=str)
def test_program(settings):
    done = run(build.program("tensor_core"), **settings)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_chunk_pass_has_no_bank_conflicts(tmp_path):
    program = build.program("tensor_core", count=True)
    done = run(program, COUNT=str(tmp_path / "counts.jsonl"))
    assert done.returncode == 0, done.stdout + done.stderr
    launches = [json.loads(line) for line in (tmp_path / "counts.jsonl").read_text().splitlines()]
    passes = [x for x in launches if "scan_output" in x["kernel"]]
    assert len(passes) >= 4
    for launch in passes:
        shared = launch["shared"]
        assert sum(kind["requests"] for kind in shared.values()) > 0
        assert {name: kind["conflicts"] for name, kind in shared.items() if kind["conflicts"]} == {}


# Name -> (file of csrc/cuda, what stands there, what stands there instead).
SCAN, PREPARE = "tensor_core/scan_output.cuh", "tensor_core/prepare.cuh"
BUGS = {
    "v_T_P_refilled_too_early": (
        SCAN,
        "__syncthreads();  // q, v, T, P are free",
        "",
    ),
    "waits_for_one_group_too_few": (
        SCAN,
        "cp_async_wait<1>();\n      __syncthreads();  // v, T, P are here",
        "cp_async_wait<2>();\n      __syncthreads();",
    ),
    "k_read_before_it_is_here": (
        SCAN,
        "cp_async_wait<1>();\n      __syncthreads();  // k, q, gates are here",
        "cp_async_wait<1>();  // k, q, gates are here",
    ),
    "o_staged_over_v_too_early": (
        SCAN,
        "__syncwarp();  // every lane has read its part of v",
        "",
    ),
    "tail_not_cut": (SCAN, "if (left < end) end = left;", ""),
    "rows_behind_the_end_copied": (SCAN, "r < left && bytes > 0", "bytes > 0"),
    "window_of_one_token_too_many": (SCAN, "static_cast<long long>(later)) : C", "later) + 1 : C"),
    "windows_not_masked": (SCAN, "if (windows) mask_tokens(x, first, last);", ""),
    "two_terms_of_T": (SCAN, "term + plane < kKept", "term + plane < kKept - 1"),
    "state_decays_twice": (SCAN, "keeps[2] = {keep, keep}", "keeps[2] = {keep, keep * keep}"),
    "matrix_over_q_too_early": (
        PREPARE,
        "__syncthreads();  // norms are here; q and k are used up",
        "",
    ),
    "L_read_too_early": (PREPARE, "__syncthreads();  // L is complete", ""),
    "next_head_too_early": (PREPARE, "__syncthreads();  // gates and matrix are used up", ""),
    "G_read_too_early": (
        PREPARE,
        "__syncthreads();  // G is complete, and the scan's storage is free",
        "",
    ),
    "never_cut": ("tensor_core/layout.cuh", "kMostRise = 1.f", "kMostRise = 1e9f"),
    "decay_of_later_tokens": (PREPARE, "j + e <= i && j + e >= window", "j + e >= window"),
    "segment_map_read_too_early": (
        "tensor_core/segments.cu",
        "__syncthreads();  // S is complete, and the last slab is used up",
        "",
    ),
    "segment_starts_from_its_neighbour": (
        "tensor_core/segments.cu",
        "maps + (s - 1) * keys * K * K",
        "maps + (s > 1 ? s - 2 : 0) * keys * K * K",
    ),
}


def seeded(folder: Path, bug: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The program with one bug, or as it is."""
    name, old, new = BUGS[bug]
    shutil.copytree(build.ROOT / "csrc", folder / "csrc")
    source = folder / "csrc" / "cuda" / name
    text = source.read_text()
    assert text.count(old) == 1, f"{name} has {text.count(old)} times: {old}"
    source.write_text(text.replace(old, new))
    lib, toolchain = build.library(), build.toolchain()
    monkeypatch.setattr(build, "ROOT", folder)
    object_file = build.compile_cuda(build.PROGRAMS / "tensor_core.cu", folder / "tensor_core.o")
    cache = folder / "translated"
    for text in build.ptx_of(object_file):
        ptx = folder / "module.ptx"
        ptx.write_bytes(text)
        build.translate_file(
            ptx, cache / f"{build.fnv(text, toolchain.encode(), b''):016x}.so", False
        )
    assert lib.exists()
    return build.link(folder / "tensor_core", [object_file])


@pytest.mark.mutants
@pytest.mark.parametrize("bug", BUGS)
def test_seeded_bug_is_seen(bug, tmp_path, monkeypatch):
    program = seeded(tmp_path, bug, monkeypatch)
    for settings in SCHEDULES:
        done = run(program, CACHE=str(tmp_path / "translated"), **settings)
        if done.returncode != 0:
            return
    pytest.fail(f"nothing noticed {bug}:\n{done.stdout}")


def test_the_default_chunk_pass_spills_nothing_and_the_table_says_so():
    root = Path(__file__).resolve().parents[1]
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in (root / "docs" / "cuda_resources.md").read_text().splitlines()
        if line.startswith("| scan_output_bf16_128_exact ")
    ]
    assert {row[2]: row[4] for row in rows} == {"sm_80": "0", "sm_90": "0"}
    script = root / "scripts" / "cuda_resources.py"
    done = subprocess.run(
        [sys.executable, script, "--check", "tensor_core/scan_output_bf16_128_exact"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
