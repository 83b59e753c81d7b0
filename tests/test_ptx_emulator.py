# SPDX-License-Identifier: Apache-2.0
"""The emulator itself: instructions against plain formulas, CUB, and each check with bugs to see.

The programs of tests/ptx_emulator/programs are built once (and cached) and run under several
schedules. Where the emulator cannot run (no nvcc, not x86-64), all of this is skipped, and says
why.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "ptx_emulator"))
import build
import counts

if reason := build.why_not():
    pytest.skip(f"PTX emulator: {reason}", allow_module_level=True)

pytestmark = pytest.mark.slow  # the first run compiles for minutes

FOUND = 86  # the exit status of a program in which a check found something

# Programs that check themselves, and the schedules that may make a difference to them.
ONCE, OFTEN = (
    ({},),
    (
        {},
        {"SEED": 1},
        {"SEED": 2},
        {"SEED": 3},
        {"SEED": 4, "ASYNC": "early"},
        {"SEED": 5, "ASYNC": "late"},
    ),
)
PROGRAMS = {
    "ops_numbers": ONCE,
    "ops_memory": OFTEN,
    "ops_warp": OFTEN,
    "ops_tensor": OFTEN,
    "ops_async": (*OFTEN, {"ASYNC": "early"}),
    "block_triangular_inverse": OFTEN,
    "cub": OFTEN,
    "tile_product": (*OFTEN, {"ASYNC": "early"}),
    "launches": ({}, {"ARCH": 86}, {"ARCH": 90}),
    "capture": ONCE,
}

# Name of a bug in findings.cu -> (title of the report, the check that alone must find it, a part of
# the message).
OUTSIDE, MISALIGNED, RACE = "access outside memory", "misaligned access", "data race"
UNWRITTEN, BARRIER, STUCK = "read of uninitialised memory", "divergent barrier", "deadlock"
BUGS = {
    "store_past_the_end": (
        OUTSIDE,
        "bounds",
        "write of 4 bytes at offset 4004 of an allocation of 4004 bytes",
    ),
    "store_before_the_start": (OUTSIDE, "bounds", "write of 4 bytes at offset -4 of an allocation"),
    "load_far_away": (OUTSIDE, "bounds", "in no allocation"),
    "load_of_host_memory": (OUTSIDE, "bounds", "in no allocation"),
    "load_after_free": (OUTSIDE, "bounds", "in no allocation"),
    "shared_past_the_end": (OUTSIDE, "none", "the block has 256 bytes"),
    "shared_pointer_past_the_end": (OUTSIDE, "bounds", "the block has 128 bytes"),
    "local_past_the_end": (OUTSIDE, "none", "4 bytes at offset 32 of the function's local arrays"),
    "local_before_the_start": (OUTSIDE, "none", "4 bytes at offset -4 of the function's"),
    "local_far_away": (OUTSIDE, "none", "4 bytes at offset 4000000 of the function's"),
    "constant_written": (OUTSIDE, "bounds", "which is __constant__"),
    "load4_misaligned": (MISALIGNED, "none", "must be aligned to 16"),
    "shared8_misaligned": (MISALIGNED, "none", "must be aligned to 8"),
    "neighbour_without_barrier": (RACE, "races", "of shared memory at offset"),
    "reuse_without_barrier": (RACE, "races", "of shared memory at offset"),
    "two_writers_of_one_word": (RACE, "races", "after a write by thread"),
    "warp_without_syncwarp": (RACE, "races", "of shared memory at offset"),
    "half_warps_across": (RACE, "races", "of shared memory at offset"),
    "named_barrier_across": (RACE, "races", "of shared memory at offset"),
    "producer_too_early": (None, "races", ""),  # a race, or the missing meeting as a deadlock
    "copy_waits_too_little": (RACE, "races", "has not been waited for"),
    "copy_of_others_without_barrier": (RACE, "races", "of shared memory at offset"),
    "storage_reused_without_barrier": (RACE, "races", "of shared memory at offset"),
    "bytes_that_overlap": (RACE, "races", "of shared memory at offset"),
    "shared_counter_plain": (RACE, "races", "of shared memory at offset 0x0"),
    "blocks_write_one_place": (RACE, "races", "by a thread of another block"),
    "block_reads_another": (RACE, "races", "by a thread of another block"),
    "counter_set_without_barrier": (RACE, "races", "of shared memory at offset 0x0"),
    "counter_set_by_a_block": (RACE, "races", "by a thread of another block"),
    "counter_set_too_early": (RACE, "races", "of shared memory at offset 0x0"),
    "counter_plain": (RACE, "races", "by a thread of another block"),
    "last_block_without_fence": (RACE, "races", "by a thread of another block"),
    "flag_without_fence": (RACE, "races", "by a thread of another block"),
    "write_under_a_reader": (RACE, "races", "by a thread of another block"),
    "flag_that_nobody_sets": (STUCK, "none", "of waiting in a loop"),
    "global_in_a_block_without_barrier": (RACE, "races", "of global memory at offset"),
    "shared_never_written": (UNWRITTEN, "initialised", "of shared memory"),
    "shared_partly_written": (UNWRITTEN, "initialised", "of shared memory at offset 0xfc"),
    "half_a_word_written": (UNWRITTEN, "initialised", "4 bytes of shared memory at offset 0x0"),
    "global_never_written": (UNWRITTEN, "initialised", "of global memory"),
    "global_copied_unwritten": (UNWRITTEN, "initialised", "of global memory"),
    "global_partly_set": (UNWRITTEN, "initialised", "of global memory at offset 0xfc"),
    "lanes_at_different_barriers": (
        BARRIER,
        "barriers",
        "lanes of one warp meet at different barrier instructions",
    ),
    "warps_at_different_barriers": (
        BARRIER,
        "barriers",
        "warps of one block meet at different __syncthreads",
    ),
    "threads_leave_before_a_barrier": (BARRIER, "barriers", "100 of 128 threads wait"),
    "warps_leave_before_a_barrier": (BARRIER, "barriers", "64 of 128 threads wait"),
    "barrier_of_48_threads": (BARRIER, "none", "multiple of 32"),
    "barrier_counts_differ": (BARRIER, "barriers", "barrier 1 is waited for with"),
    "barrier_that_never_fills": (STUCK, "none", "32 of 64 threads never finish"),
    "shuffles_of_a_split_warp": (STUCK, "none", "32 of 32 threads never finish"),
    "lane_not_in_the_mask": (BARRIER, "none", "not in the member mask"),
    "unknown_instruction": ("unsupported instruction", "none", "vadd.s32.s32.s32"),
    "assertion": ("assertion failed", "none", "out[threadIdx.x] != 7"),
    "trapped": ("trap", "none", "stopped itself"),
}
NEAR_MISSES = [
    "store_to_the_end",
    "load_of_the_end",
    "shared_to_the_end",
    "local_to_the_end",
    "variable_written",
    "load4_aligned",
    "shared8_aligned",
    "neighbour_with_barrier",
    "reuse_with_barrier",
    "two_writers_apart",
    "warp_with_syncwarp",
    "half_warps_inside",
    "named_barrier_inside",
    "producer_in_time",
    "copy_waits_enough",
    "copy_of_others_with_barrier",
    "storage_reused_with_barrier",
    "bytes_of_a_word",
    "shared_counter_atomic",
    "blocks_write_apart",
    "blocks_in_two_launches",
    "halves_of_a_word",
    "counter_atomic",
    "counter_set_with_barrier",
    "counter_set_in_time",
    "last_block_with_fence",
    "flag_with_fence",
    "global_in_a_block_with_barrier",
    "shared_all_written",
    "global_set",
    "global_written_by_a_kernel",
    "roles_at_one_named_barrier",
    "nobody_leaves",
    "threads_leave_at_the_end",
    "barriers_in_an_unrolled_loop",
    "shuffles_of_two_halves",
    "assertion_that_holds",
]
# The mistakes that tile_product can make, by number: what is reported.
TILE_BUGS = {1: RACE, 2: RACE, 3: RACE, 4: MISALIGNED, 5: OUTSIDE, 6: OUTSIDE}


@pytest.fixture(scope="session")
def programs():
    """Every program, built side by side; traffic for count mode too."""
    names = build.program_names()
    built = dict(zip(names, build.in_parallel(build.program, names), strict=True))
    build.program("traffic", count=True)
    built["stmatrix"] = build.program(
        "ops_tensor", defines=("TEST_STMATRIX",), variant="stmatrix", arch="90"
    )
    return built


def without_settings() -> dict:
    return {k: v for k, v in os.environ.items() if not k.startswith("PTX_EMULATOR_")}


def execute(program, *arguments, **settings) -> subprocess.CompletedProcess:
    environment = without_settings()
    environment |= {f"PTX_EMULATOR_{name}": str(value) for name, value in settings.items()}
    command = [str(program), *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=environment, check=False
    )


def ids(settings: dict) -> str:
    return "-".join(f"{k.lower()}{v}" for k, v in settings.items()) or "in_order"


@pytest.mark.parametrize(
    ("name", "settings"),
    [pytest.param(n, s, id=f"{n}-{ids(s)}") for n, several in PROGRAMS.items() for s in several],
)
def test_program_agrees_with_its_formulas(programs, name, settings):
    done = execute(programs[name], **settings)
    wrong = [line for line in done.stdout.splitlines() if line.startswith("FAIL")]
    assert done.returncode == 0
    assert not wrong, "\n".join(wrong) + done.stderr


def test_ptx_of_a_newer_architecture(programs):
    done = execute(programs["stmatrix"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ok stmatrix x4.trans" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("threads", [1, 2])
def test_look_back_over_many_blocks(programs, threads):
    done = execute(programs["cub"], 150_000, THREADS=threads)
    assert done.returncode == 0, done.stdout + done.stderr


def test_printf_arrives(programs):
    assert "thread 3 of 64: 4.00 text 1099511627776 %" in execute(programs["ops_memory"]).stdout


def program_of(finding: str) -> str:
    """The mistakes with CUB's storage are with the other tests of CUB."""
    return "cub" if finding.startswith("storage_reused_") else "findings"


@pytest.mark.parametrize("seed", [0, 1, 2, 7])
@pytest.mark.parametrize("name", BUGS)
def test_bug_is_found_under_every_schedule(programs, name, seed):
    title, check, detail = BUGS[name]
    for checks in ("all", check):
        done = execute(programs[program_of(name)], name, SEED=seed, CHECKS=checks, PATIENCE=1)
        assert done.returncode == FOUND, (
            f"not found with checks {checks}\n{done.stdout}{done.stderr}"
        )
    # Alone, the check gives its own name to the bug; with all checks another one may come first.
    if title:
        assert done.stderr.startswith(f"ptx_emulator: {title}\n"), done.stderr
    assert detail in done.stderr


@pytest.mark.parametrize("seed", [0, 1, 2, 7, 11])
@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_miss_is_not_reported(programs, name, seed):
    done = execute(programs[program_of(name)], name, SEED=seed)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{name}: finished" in done.stdout, done.stdout + done.stderr


def test_every_kernel_of_findings_is_listed(programs):
    listed = {name for name in (*BUGS, *NEAR_MISSES) if program_of(name) == "findings"}
    assert set(execute(programs["findings"]).stdout.split()) == listed


@pytest.mark.parametrize("seed", [0, 1, 2, 7])
@pytest.mark.parametrize("bug", TILE_BUGS)
def test_bug_in_a_real_kernel(programs, bug, seed):
    check = {RACE: "races", OUTSIDE: "bounds"}.get(TILE_BUGS[bug], "none")
    done = execute(programs["tile_product"], 64, 128, 128, bug, SEED=seed, CHECKS=check)
    assert done.returncode == FOUND
    assert done.stderr.startswith(f"ptx_emulator: {TILE_BUGS[bug]}\n"), done.stderr
    assert execute(programs["tile_product"], 64, 128, 128, bug, SEED=seed).returncode == FOUND


def test_report_says_where_and_how_to_see_it_again(programs):
    done = execute(programs["findings"], "named_barrier_across", SEED=5)
    report = done.stderr
    source = (build.PROGRAMS / "findings.cu").read_text().splitlines()
    line = max(n for n, text in enumerate(source, 1) if "box[threadIdx.x ^ kReach]" in text)
    assert re.search(r"^  kernel   .*pairs_of_warps<64>\(float\*\)$", report, re.M)
    assert re.search(
        r"^  thread   \(\d+,0,0\) of \(128,1,1\), block \(0,0,0\) of \(1,1,1\)$", report, re.M
    )
    assert re.search(r"^  at       PTX line \d+: ld\.shared\.f32 ", report, re.M)
    assert re.search(r"^  other    PTX line \d+: st\.shared\.f32 ", report, re.M)
    assert f"findings.cu:{line}:" in report
    command = re.search(r"^  again    (.*)$", report, re.M).group(1)
    assert "PTX_EMULATOR_SEED=5" in command
    again = subprocess.run(
        command, shell=True, capture_output=True, text=True, env=without_settings(), check=False
    )
    assert again.stderr == report


def test_report_of_an_endless_loop_says_where(programs):
    report = execute(programs["findings"], "flag_that_nobody_sets", PATIENCE=1).stderr
    source = (build.PROGRAMS / "findings.cu").read_text().splitlines()
    start = next(n for n, text in enumerate(source, 1) if "waits_for_nobody(" in text)
    line = int(re.search(r"findings\.cu:(\d+):", report).group(1))
    assert re.search(r"^  at       PTX line \d+: ld\.volatile\.", report, re.M), report
    assert start < line < start + 5, report


def test_a_finding_can_fail_the_launch_alone(programs):
    done = execute(programs["findings"], "store_past_the_end", ON_ERROR="return")
    assert done.returncode == 1
    assert "cudaErrorIllegalAddress" in done.stdout
    assert "write of 4 bytes" in done.stderr


def test_a_race_of_one_block_does_not_stop_another_that_uses_the_same_memory(programs):
    done = execute(programs["findings"], "write_under_a_reader", ON_ERROR="return", THREADS=2)
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stderr.startswith(f"ptx_emulator: {RACE}\n"), done.stderr
    assert "write of global memory at offset 0x0 after a read by" in done.stderr


def test_bad_setting_is_refused(programs):
    done = execute(programs["findings"], "global_set", CHECKS="everything")
    assert done.returncode == 2
    assert 'PTX_EMULATOR_CHECKS is "everything"; possible: all, none' in done.stderr


def test_misspelt_setting_is_refused(programs):
    done = execute(programs["findings"], "global_set", CHECK="none")
    assert done.returncode == 2
    assert "PTX_EMULATOR_CHECK is not a setting" in done.stderr
    assert "CHECKS, SEED, ASYNC" in done.stderr


# ---- count mode ----


@pytest.fixture(scope="module")
def traffic(programs, tmp_path_factory):
    path = tmp_path_factory.mktemp("counts") / "counts.jsonl"
    done = execute(programs["traffic"], COUNT=path)
    assert done.returncode == 0, done.stderr
    launches = counts.load(path)
    (path.parent / "table.txt").write_text(
        counts.table([counts.row(launch) for launch in launches], counts.COLUMNS)
    )
    return {counts.short(launch["kernel"]): launch for launch in launches}


def test_counts_of_global_memory(traffic):
    load = {name: launch["global"].get("global_load") for name, launch in traffic.items()}
    assert load["coalesced"] == {
        "requests": 32,
        "bytes": 4096,
        "sectors": 128,
        "least_sectors": 128,
    }
    assert load["strided"] == {"requests": 1, "bytes": 128, "sectors": 32, "least_sectors": 4}
    assert load["misplaced"]["sectors"] == 5
    assert load["broadcast"] == {"requests": 1, "bytes": 128, "sectors": 1, "least_sectors": 1}
    assert load["vectors"] == {"requests": 1, "bytes": 512, "sectors": 16, "least_sectors": 16}
    assert traffic["coalesced"]["global"]["distinct_bytes_written"] == 4096
    assert traffic["broadcast"]["global"]["distinct_bytes_read"] == 32


def test_counts_of_bank_conflicts(traffic):
    conflicts = {
        name: launch["shared"].get("shared_load", {}).get("conflicts")
        for name, launch in traffic.items()
    }
    assert [conflicts[f"banks<{stride}>"] for stride in (1, 2, 32, 33)] == [0, 1, 31, 0]
    assert traffic["quads"]["shared"]["shared_load"] == {
        "requests": 1,
        "bytes": 512,
        "wavefronts": 4,
        "conflicts": 0,
    }
    assert traffic["matrices<64>"]["shared"]["matrix"] == {
        "requests": 1,
        "bytes": 128,
        "wavefronts": 8,
        "conflicts": 7,
    }
    assert traffic["matrices<72>"]["shared"]["matrix"]["conflicts"] == 0


def test_counts_of_mma_barriers_and_instructions(traffic):
    assert traffic["products"]["mma"] == {"m16n8k16_bf16_f32": 5 * 6, "m16n8k8_tf32_f32": 6}
    assert traffic["products"]["instructions"]["mma"] == 6 * 32 * 6
    assert traffic["loops"]["barriers"] == {"block": 14 * 2, "warp": 0}
    assert traffic["loops"]["shared"]["shared_load"]["requests"] == 7 * 2
    assert traffic["loops"]["global"]["global_load"]["sectors"] == 7 * 8
    total = sum(traffic["loops"]["instructions"].values())
    assert traffic["loops"]["thread_instructions"] == total


def test_counts_name_their_access_sites(traffic):
    site = next(s for s in traffic["banks<32>"]["sites"] if s["kind"] == "shared_load")
    assert site["wavefronts"] == 32
    assert site["least"] == 1
    assert "traffic.cu:" in site["source"]
    assert "ld.shared" in site["ptx"]
    assert "banks<32>" in counts.table(
        [counts.row(launch) for launch in traffic.values()], counts.COLUMNS
    )
    assert json.loads(json.dumps(traffic))


# ---- the build ----


def test_nothing_is_built_twice(programs):
    before = {
        p: p.stat().st_mtime_ns
        for p in build.BUILD.rglob("*")
        if p.is_file() and p.suffix in (".o", ".so", "")
    }
    run = subprocess.run(
        [sys.executable, build.HERE / "build.py", "findings"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert str(programs["findings"]) in run.stdout
    assert before == {
        p: p.stat().st_mtime_ns
        for p in build.BUILD.rglob("*")
        if p.is_file() and p.suffix in (".o", ".so", "")
    }
