# SPDX-License-Identifier: Apache-2.0
"""The tensor-core forward called from C++: schedules, and bugs that must be seen."""

from __future__ import annotations

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

pytestmark = pytest.mark.slow  # the kernels compile for a minute, a seeded bug for half of one

FOUND = 86  # the exit status of a program in which a check of the emulator found something

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


# Name -> (file of csrc/cuda, what stands there, what stands there instead, what must notice).
SCAN, PREPARE = "tensor_core/scan_output.cuh", "tensor_core/prepare.cuh"
ROLES = "tensor_core/scan_roles.cuh"
INVERSE = "block_triangular_inverse.cuh"
# How the emulator's reports and the program's own comparison begin. What is read too early can be
# what nothing wrote yet: that check comes before the one for races.
RACE, OUTSIDE = "ptx_emulator: data race", "ptx_emulator: access outside memory"
UNWRITTEN, WRONG = "ptx_emulator: read of uninitialised memory", "FAIL "
BUGS = {
    "v_T_P_refilled_too_early": (SCAN, "__syncthreads();  // q, v, T, P are free", "", RACE),
    "waits_for_one_group_too_few": (
        SCAN,
        "cp_async_wait<1>();\n      __syncthreads();  // v, T, P are here",
        "cp_async_wait<2>();\n      __syncthreads();",
        RACE,
    ),
    "k_read_before_it_is_here": (
        SCAN,
        "cp_async_wait<1>();\n      __syncthreads();  // k, q, gates are here",
        "cp_async_wait<1>();  // k, q, gates are here",
        UNWRITTEN,
    ),
    "work_read_before_it_is_known": (
        SCAN,
        "__syncthreads();  // the block's work is known",
        "",
        RACE,
    ),
    "halves_of_whole_blocks": (SCAN, "            if (i == j)\n", "            if (true)\n", WRONG),
    "o_staged_over_v_too_early": (
        SCAN,
        "__syncwarp();  // every lane has read its part of what lies there",
        "",
        RACE,
    ),
    "tail_not_cut": (SCAN, "if (left < end) end = left;", "", OUTSIDE),
    "rows_behind_the_end_copied": (SCAN, "r < left && bytes > 0", "bytes > 0", OUTSIDE),
    "window_of_one_token_too_many": (
        SCAN,
        "static_cast<long long>(later)) : C",
        "later) + 1 : C",
        WRONG,
    ),
    "windows_not_masked": (
        SCAN,
        "if (gates.tokens.windows) mask_tokens(",
        "if (false) mask_tokens(",
        WRONG,
    ),
    "two_terms_of_T": (SCAN, "term + plane < kKept", "term + plane < kKept - 1", WRONG),
    "state_decays_twice": (
        SCAN,
        "keeps[2] = {keep, keep}",
        "keeps[2] = {keep, keep * keep}",
        WRONG,
    ),
    "roles_wait_for_no_copy": (
        ROLES,
        "cp_async_wait<0>();\n      meet();  // A\n",
        "meet();\n",
        RACE,
    ),
    "roles_refill_P_too_early": (
        ROLES,
        "if (new_chunk) load_tiles(chunk + 1);",
        "if (new_chunk) load_tiles(chunk + 1), this->load_P(chunk);",
        RACE,
    ),
    "roles_refill_gates_too_early": (
        ROLES,
        "if (new_chunk) load_tiles(chunk + 1);",
        "if (new_chunk) load_tiles(chunk + 1), load_gates(chunk + 1);",
        RACE,
    ),
    "roles_read_the_next_v": (ROLES, "s.columns[0].v[stage]", "s.columns[0].v[stage ^ 1]", RACE),
    "roles_finish_another_window": (
        ROLES,
        "if (chunk > begin || first > 0) finish_output(o, before, first_before);",
        "if (chunk > begin || first > 0) finish_output(o, before, first);",
        WRONG,
    ),
    "roles_forget_the_last_output": (
        ROLES,
        "if (begin < s.work.behind) finish_output",
        "if (begin > s.work.behind) finish_output",
        WRONG,
    ),
    "matrix_over_q_too_early": (
        PREPARE,
        "__syncthreads();  // squares are here; q and k are used up",
        "",
        UNWRITTEN,
    ),
    "L_read_too_early": (PREPARE, "__syncthreads();  // L is complete", "", RACE),
    "next_head_too_early": (PREPARE, "__syncthreads();  // gates and matrix are used up", "", RACE),
    "G_read_too_early": (
        PREPARE,
        "__syncthreads();  // G is complete, and the scan's storage is free",
        "",
        UNWRITTEN,
    ),
    "never_cut": ("tensor_core/layout.cuh", "kMostRise = 1.f", "kMostRise = 1e9f", WRONG),
    "decay_of_later_tokens": (PREPARE, "j + e <= i && j + e >= window", "j + e >= window", WRONG),
    "segment_map_read_too_early": (
        "tensor_core/segments.cu",
        "__syncthreads();  // S is complete, and the last slab is used up",
        "",
        RACE,
    ),
    "segment_starts_from_its_neighbour": (
        "tensor_core/segments.cu",
        "maps + (s - 1) * keys * K * K",
        "maps + (s > 1 ? s - 2 : 0) * keys * K * K",
        WRONG,
    ),
    "inverse_products_read_too_early": (
        INVERSE,
        "__syncthreads();  // the products are complete",
        "",
        UNWRITTEN,
    ),
    "inverse_overwrites_L_too_early": (
        INVERSE,
        "__syncthreads();  // every thread has read L before any",
        "//",
        RACE,
    ),
    "inverse_reads_rows_too_early": (
        INVERSE,
        "__syncthreads();  // the next rows, or the caller",
        "//",
        RACE,
    ),
    "inverse_without_syncwarp": (INVERSE, "      __syncwarp();", "", RACE),
    "inverse_merge_without_barrier": (
        INVERSE,
        "__syncthreads();  // C A^-1 is complete, C may be overwritten",
        "",
        RACE,
    ),
    "inverse_later_row_reaches_earlier_one": (INVERSE, "r = kDiagonal ? k : 0", "r = 0", WRONG),
    "inverse_sign": (INVERSE, "? -temp_.product[", "? temp_.product[", WRONG),
}


def seeded(folder: Path, bug: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The smallest program that runs the code in question, with one bug."""
    name, old, new, _ = BUGS[bug]
    program = "block_triangular_inverse" if name == INVERSE else "tensor_core"
    shutil.copytree(build.ROOT / "csrc", folder / "csrc")
    source = folder / "csrc" / "cuda" / name
    text = source.read_text()
    assert text.count(old) == 1, f"{name} has {text.count(old)} times: {old}"
    source.write_text(text.replace(old, new))
    lib, toolchain = build.library(), build.toolchain()
    monkeypatch.setattr(build, "ROOT", folder)
    object_file = build.compile_cuda(
        build.PROGRAMS / f"{program}.cu", folder / f"{program}.o", extra=("-DDELTANET_ALONE",)
    )
    cache = folder / "translated"
    for text in build.ptx_of(object_file):
        ptx = folder / "module.ptx"
        ptx.write_bytes(text)
        build.translate_file(
            ptx, cache / f"{build.fnv(text, toolchain.encode(), b''):016x}.so", False
        )
    assert lib.exists()
    return build.link(folder / program, [object_file])


@pytest.mark.mutants
@pytest.mark.parametrize("bug", BUGS)
def test_seeded_bug_is_seen(bug, tmp_path, monkeypatch):
    program = seeded(tmp_path, bug, monkeypatch)
    noticed_by = BUGS[bug][3]
    for settings in SCHEDULES:
        done = run(program, CACHE=str(tmp_path / "translated"), **settings)
        if done.returncode != 0:
            # A crash, or the finding of another check, would be no merit of the tests.
            lines = (done.stdout + done.stderr).splitlines()
            assert done.returncode == (1 if noticed_by == WRONG else FOUND), done.stderr
            assert any(line.startswith(noticed_by) for line in lines), "\n".join(lines[-20:])
            return
    pytest.fail(f"nothing noticed {bug}:\n{done.stdout}")
