#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the CUDA forward moves and multiplies, counted on the PTX emulator: no GPU needed.

    cuda_counts.py           count, and write the section of docs/performance.md
    cuda_counts.py --check   compare with it; exit 1 if it lies

Counts are per chunk and head, so a short sequence gives those of a long one: T = 512 is run as
T = 8192 would be on a device with 132 multiprocessors (the same tiles, as many segments).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "performance.md"
BEGIN, END = "<!-- begin: counts (scripts/cuda_counts.py) -->", "<!-- end: counts -->"
sys.path.insert(0, str(ROOT / "tests" / "ptx_emulator"))
import build  # noqa: E402

CHUNK, K, V = 64, 128, 128
LONG, SHORT = 8192, 512  # tokens: of the call in question, and of the one that is counted
PROCESSORS = 132  # of an H100 or H200
HEADS = {8: 2, 16: 4, 32: 16, 64: 16}  # HV -> HK, as in the published figures
MAIN = 32  # HV of the tables

# Bars, and where they come from: issue 4 of the project.
MOST_BYTES, MOST_MMA = 1.55, {"exact": 2.3, "fast": 1.6}
MOST_LAUNCHES, LEAST_BUSY = 5, 0.95

# The machine of the estimate. mma.sync reaches 62% of Hopper's peak of 4.0 cycles per m16n8k16 and
# tensor core in published microbenchmarks; 4.3 TB/s is a device copy on an H200. What L2 gives is
# an assumption, and no generous one.
CLOCK, MMA_CYCLES, BARRIER_CYCLES, DRAM, L2 = 1.755e9, 6.4, 120, 4.3e12, 5.5e12
BARRIERS_PER_CHUNK = {"scan_output": 3, "scan_roles": 2}
RESIDENT = {"prepare": 4, "scan_output": 2, "scan_roles": 1, "scan_segments": 2}
PASSES = ("scan_output", "scan_roles")  # over the chunks
EXPECTED_SHARE = 0.7  # of the bound: stalls are not counted
# Published, B = 1, T = 8192, bf16, d = 128, H200, microseconds: FlashQLA's own benchmark, which has
# fla beside it.
PUBLISHED = {8: (119, 234), 16: (175, 316), 32: (280, 472), 64: (397, 814)}


@dataclass(frozen=True)
class Launch:
    """One launch of a call, counted."""

    name: str
    blocks: int
    threads: int
    read: int  # distinct bytes, in sectors
    written: int
    asked: int  # of L2: what every block asks for
    mma: float  # as so many m16n8k16
    tensor: float  # the same in time: tf32 has half the rate
    wavefronts: int
    conflicts: int
    instructions: float  # of warps: PTX, without moves, which ptxas mostly removes
    sites: list[dict[str, Any]]

    @property
    def bytes(self) -> int:
        return self.read + self.written


@dataclass(frozen=True)
class Grid:
    name: str
    blocks: int


@dataclass(frozen=True)
class Plan:
    """How a call of LONG tokens runs."""

    grids: list[Grid]
    warps: int
    segment_chunks: int
    segments: int
    roles: bool


def nvcc_release() -> str:
    """Which nvcc made the code that is counted: another may make other code of it."""
    command = [str(build.find_nvcc()), "--version"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return text.split("release ")[1].split(",")[0]


def program() -> Path:
    return build.program("forward_counts", count=True)


def call(*arguments: object, count: Path | None = None) -> str:
    environment = {n: v for n, v in os.environ.items() if not n.startswith("PTX_EMULATOR_")}
    environment |= {"PTX_EMULATOR_ARCH": "90", "PTX_EMULATOR_CHECKS": "none"}
    if count:
        environment["PTX_EMULATOR_COUNT"] = str(count)
    command = [str(program()), *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def plan(heads: int, packed: bool = False) -> Plan:
    # Nothing runs, but in count mode the kernels need not be translated a second time.
    options = (LONG, HEADS[heads], heads, PROCESSORS, int(packed))
    lines = call("launches", *options, count=Path(os.devnull)).splitlines()
    *rows, last = (line.split() for line in lines)
    _, warps, segment_chunks, segments, roles = last
    return Plan(
        [Grid(name, int(blocks)) for name, blocks, *_ in rows],
        int(warps),
        int(segment_chunks),
        int(segments),
        roles == "1",
    )


def short_name(kernel: str) -> str:
    names = ("prepare", "scan_output", "scan_roles", "scan_segments", "chunk_table")
    return next(name for name in names if f"{name}_kernel" in kernel)


def launch_of(counted: dict[str, Any]) -> Launch:
    mma = tensor = 0.0
    for kind, number in counted["mma"].items():
        half = 0.5 if "m16n8k8" in kind else 1.0
        mma += number * half
        tensor += number * (1.0 if "tf32" in kind else half)
    shared = counted["shared"].values()
    return Launch(
        short_name(counted["kernel"]),
        math.prod(counted["grid"]),
        math.prod(counted["block"]),
        counted["global"]["distinct_bytes_read"],
        counted["global"]["distinct_bytes_written"],
        32 * sum(kind["sectors"] for kind in counted["global"].values() if isinstance(kind, dict)),
        mma,
        tensor,
        sum(kind["wavefronts"] for kind in shared),
        sum(kind["conflicts"] for kind in shared),
        sum(n for kind, n in counted["instructions"].items() if kind not in ("move", "parameter"))
        / 32,
        counted["sites"],
    )


def count(heads: int, plan: Plan, fast: bool = False) -> list[Launch]:
    """The launches of a short call, run as the plan says."""
    shrink = LONG // SHORT
    segment_chunks = plan.segment_chunks // shrink if plan.segments > 1 else -1
    # So that prepare shares keys among heads as in the long call. The scan by key looks at all
    # processors.
    narrow = any(grid.name == "scan_segments<8>" for grid in plan.grids)
    processors = PROCESSORS if narrow else math.ceil(PROCESSORS / shrink)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "counts.jsonl"
        options = (processors, int(fast), plan.warps, segment_chunks, int(plan.roles))
        call("run", SHORT, HEADS[heads], heads, *options, count=file)
        found = [launch_of(json.loads(line)) for line in file.read_text().splitlines()]
    for launch, grid in zip(found, plan.grids, strict=True):
        blocks = launch.blocks * (shrink if launch.name == "prepare" else 1)
        if grid.name.split("<")[0] != launch.name or grid.blocks != blocks:
            raise SystemExit(f"cuda_counts.py: counted {launch.name}, {blocks} blocks; {grid}")
    return found


def floor_bytes(heads: int, tokens: int) -> int:
    """q, k, v, g, beta read once, o written once: bf16, and fp32 for g and beta."""
    return tokens * (2 * HEADS[heads] * K * 2 + 2 * heads * V * 2 + 2 * heads * 4)


def least_mma(heads: int, tokens: int, halves: bool = False) -> float:
    """The products of a call, with operands that are rounded once, as so many m16n8k16.

    Triangular factors count as their 16x16 blocks on and below the diagonal; with `halves` T and P
    without the zero quarter of blocks on the diagonal. The inverse is by substitution, and counts
    as nothing.
    """
    side = CHUNK // 16
    lower = 16 * 16 * side * (side + 1) // 2  # entries of T, P, K K^T, Q K^T
    factors = lower - 8 * 8 * side * halves
    per_head = 3 * CHUNK * K * V + 2 * factors * V  # K S, Q S, the update; T X, P V'
    per_key_head = 2 * lower * K
    operations = per_head * heads + per_key_head * HEADS[heads]
    return tokens / CHUNK * operations / (16 * 8 * 16)


def with_work(blocks: int) -> float:
    """The share of multiprocessors that have a block."""
    return min(1.0, blocks / PROCESSORS)


def evenness(blocks: int) -> float:
    """What the mean multiprocessor has to do, beside the one with the most."""
    return blocks / (PROCESSORS * math.ceil(blocks / PROCESSORS))


def state_mma(results: Results) -> float:
    """What a warp multiplies per chunk to carry its state on: a map's launch does nothing else."""
    heads, plan = next((n, x) for n, x in results.plans.items() if x.segments > 1)
    maps = next(x for x in results.exact[heads] if x.name == "scan_output")
    return maps.tensor / (maps.blocks * plan.warps * (SHORT / CHUNK / plan.segments))


def bound(launch: Launch, grid: Grid, chunks_in_a_row: float, state: float) -> tuple[float, str]:
    """Least seconds of one launch of the long call, and what sets them.

    `state`: mma per chunk of a warp that carries a state.
    """
    # The scan by key goes over segments, of which there are as many.
    longer = 1 if launch.name == "scan_segments" else LONG / SHORT
    per_block = longer / grid.blocks
    most = math.ceil(grid.blocks / PROCESSORS)  # blocks of the busiest multiprocessor
    at_once = min(most, RESIDENT[launch.name])
    cores = min(4, at_once * launch.threads // 32)
    cycles = {
        "tensor cores": launch.tensor * per_block * most * MMA_CYCLES / cores,
        "shared memory": launch.wavefronts * per_block * most,
        "instructions": launch.instructions * per_block * most / cores,
    }
    if launch.name in PASSES:
        per_warp = launch.tensor * per_block / (launch.threads // 32)
        if launch.name == "scan_roles":
            per_warp = chunks_in_a_row * state
        waits = chunks_in_a_row * BARRIERS_PER_CHUNK[launch.name] * BARRIER_CYCLES
        cycles["one chain"] = (per_warp * MMA_CYCLES + waits) * math.ceil(most / at_once)
    seconds = {what: n / CLOCK for what, n in cycles.items()}
    seconds["memory"] = launch.bytes * longer / DRAM
    seconds["L2"] = launch.asked * longer / L2
    what = max(seconds, key=lambda name: seconds[name])
    return seconds[what], what


@dataclass(frozen=True)
class Results:
    plans: dict[int, Plan]
    packed: dict[int, Plan]
    exact: dict[int, list[Launch]]
    fast: list[Launch]  # MAIN heads
    fast_wide: list[Launch]  # the most heads: 64 columns of V

    def passes(self) -> list[Launch]:
        """Of any tile: 16, 32 and 64 columns of V, maps of segments, exact and fast."""
        launches = (*self.exact.values(), self.fast, self.fast_wide)
        return [x for y in launches for x in y if x.name in PASSES]


def measure() -> Results:
    plans = {heads: plan(heads) for heads in HEADS}
    return Results(
        plans,
        {heads: plan(heads, packed=True) for heads in HEADS},
        {heads: count(heads, plans[heads]) for heads in HEADS},
        count(MAIN, plans[MAIN], fast=True),
        count(max(HEADS), plans[max(HEADS)], fast=True),
    )


def mma_ratio(launches: list[Launch], heads: int = MAIN) -> float:
    return sum(x.mma for x in launches) / least_mma(heads, SHORT)


def conflicts_by_site(launches: list[Launch]) -> list[tuple[str, str, int, int]]:
    """(source line, kind, requests, wavefronts beyond the least), the worst first."""
    requests: Counter[tuple[str, str]] = Counter()
    extra: Counter[tuple[str, str]] = Counter()
    for site in (site for launch in launches for site in launch.sites):
        if site.get("wavefronts", 0) > site["least"]:
            file, line, *_ = site["source"].split(" < ")[0].split(":")
            text = Path(file).read_text().splitlines()[int(line) - 1].strip()
            where = (f"{Path(file).name}: `{text}`", site["kind"].replace("_", " "))
            requests[where] += site["requests"]
            extra[where] += site["wavefronts"] - site["least"]
    return [(*where, requests[where], n) for where, n in extra.most_common()]


def table(header: str, rows: list[list[object]]) -> str:
    """Markdown; what the header marks with > is aligned right."""
    names = [name.strip() for name in header.split("|")]
    rule = ["--:" if name.startswith(">") else "---" for name in names]
    lines = [[name.lstrip("> ") for name in names], rule, *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def verdict(met: bool) -> str:
    return "met" if met else "**missed**"


def bars(results: Results) -> list[tuple[str, str, str, bool]]:
    """(what, bar, measured, met)"""
    exact, fast, floor = results.exact[MAIN], results.fast, floor_bytes(MAIN, SHORT)
    found = []
    for precision, launches in (("exact", exact), ("fast", fast)):
        most = max(x.bytes for x in launches) / floor
        found.append(
            (
                f"unique bytes of a launch beside the floor, {precision}",
                f"{MOST_BYTES} x",
                f"{most:.2f} x",
                most <= MOST_BYTES,
            )
        )
    for precision, launches in (("exact", exact), ("fast", fast)):
        ratio = mma_ratio(launches)
        found.append(
            (
                f"products beside single operands, {precision}",
                f"{MOST_MMA[precision]} x",
                f"{ratio:.2f} x",
                ratio <= MOST_MMA[precision],
            )
        )
    conflicts = sum(x.conflicts for x in results.passes())
    found.append(("bank conflicts in the chunk loop", "0", str(conflicts), conflicts == 0))
    plans = [*results.plans.values(), *results.packed.values()]
    most_launches = max(len(x.grids) for x in plans)
    found.append(
        ("launches", f"{MOST_LAUNCHES}", str(most_launches), most_launches <= MOST_LAUNCHES)
    )
    least = min(with_work(g.blocks) for x in results.plans.values() for g in x.grids)
    found.append(
        (
            f"multiprocessors with work, of {PROCESSORS}, any launch, HV = 8 to 64",
            f"{LEAST_BUSY:.0%}",
            f"{least:.0%}",
            least >= LEAST_BUSY,
        )
    )
    return found


def section(results: Results) -> str:
    floor = floor_bytes(MAIN, SHORT)
    rows: list[list[object]] = []
    for precision, launches in (("exact", results.exact[MAIN]), ("fast", results.fast)):
        for x in launches:
            rows.append(
                [
                    precision,
                    x.name,
                    f"{x.read / SHORT:,.0f}",
                    f"{x.written / SHORT:,.0f}",
                    f"{x.bytes / floor:.2f} x",
                    f"{x.mma / (SHORT / CHUNK * MAIN):,.0f}",
                    f"{x.wavefronts / (SHORT / CHUNK * MAIN):,.0f}",
                    f"{x.conflicts / (SHORT / CHUNK * MAIN):,.0f}",
                ]
            )
        total = sum(x.bytes for x in launches)
        rows.append(
            [
                precision,
                "all",
                f"{sum(x.read for x in launches) / SHORT:,.0f}",
                f"{sum(x.written for x in launches) / SHORT:,.0f}",
                f"{total / floor:.2f} x",
                f"{sum(x.mma for x in launches) / (SHORT / CHUNK * MAIN):,.0f}",
                "",
                "",
            ]
        )
    counts = table(
        "products|launch|> B read per token|> B written|> beside the floor|> mma|> wavefronts"
        "|> conflicts",
        rows,
    )
    scans = [x for y in results.exact.values() for x in y if x.name == "scan_segments"]
    sites = table(
        "where|access|> requests|> more wavefronts",
        [list(site) for site in conflicts_by_site(results.exact[MAIN] + scans)],
    )
    passes = sum(x.wavefronts for x in results.exact[MAIN] if x.name == "prepare")
    beyond = sum(x.conflicts for x in results.exact[MAIN] if x.name == "prepare")
    busy = table(
        "HV|segments|columns of V|launch|> blocks|> with work|> mean beside most",
        [
            [
                heads,
                x.segments,
                x.warps * 16,
                grid.name,
                grid.blocks,
                f"{with_work(grid.blocks):.0%}",
                f"{evenness(grid.blocks):.0%}",
            ]
            for heads, x in results.plans.items()
            for grid in x.grids
        ],
    )
    estimates: list[list[object]] = []
    for heads, x in results.plans.items():
        in_a_row = min(x.segment_chunks, LONG // CHUNK)
        bounds = [
            bound(launch, grid, in_a_row, state_mma(results))
            for launch, grid in zip(results.exact[heads], x.grids, strict=True)
        ]
        total = sum(seconds for seconds, _ in bounds) * 1e6
        parts = ", ".join(
            f"{grid.name} {seconds * 1e6:.0f} ({what})"
            for grid, (seconds, what) in zip(x.grids, bounds, strict=True)
        )
        ours = f"{total:.0f} to {total / EXPECTED_SHARE:.0f}"
        estimates.append([f"{HEADS[heads]}/{heads}", ours, *PUBLISHED[heads], parts])
    estimate = table("HK/HV|> estimate|> FlashQLA|> fla|bounds of the launches", estimates)
    met = table(
        "what|> bar|> counted|",
        [[what, bar, got, verdict(ok)] for what, bar, got, ok in bars(results)],
    )
    least = least_mma(MAIN, SHORT) / (SHORT / CHUNK * MAIN)
    halved = [
        sum(x.mma for x in launches) / least_mma(MAIN, SHORT, halves=True)
        for launches in (results.exact[MAIN], results.fast)
    ]
    return f"""{BEGIN}
bf16, HK = {HEADS[MAIN]}, HV = {MAIN}, K = V = {K}, B = 1, l2norm in the kernel, no initial state,
as at T = {LONG} on {PROCESSORS} multiprocessors; nvcc {nvcc_release()}.

{met}

Per token (bytes: distinct 32-byte sectors of each launch), and per chunk of {CHUNK} tokens and
value head (the rest). The floor is q, k, v, g, beta read once and o written once:
{floor / SHORT:,.0f} B per token. mma in units of m16n8k16, a m16n8k8 as half of one; the same
products with operands that are rounded once take {least:,.0f} (triangular factors as their 16x16
blocks, the inverse without tensor cores). Beside a minimum that leaves out the zero quarters of
blocks on the diagonal, as the kernels do, it is {halved[0]:.2f} x (exact) and {halved[1]:.2f} x
(fast).

{counts}

The bar for bytes is one per launch: all launches together move what `prepare` hands on twice, and
q and k twice. Both stages read from L2 what other blocks have read; what blocks ask for is more.

Bank conflicts, per access: in `prepare` ({beyond / passes:.0%} of its wavefronts) and, once per
call, in the scan by key (at HV = 8).

{sites}

Blocks of each launch at T = {LONG}, B = 1, from the launches that the host code makes:

{busy}

"With work" is min(1, blocks / {PROCESSORS}). Where an SM has several blocks at once, it is busy
until the last is done; where products or shared memory are the limit, the SM with the most blocks
sets the time, and the last column is what remains. Packed sequences add the chunk table's launch.

**An estimate, not a result**, for an H200 at {CLOCK / 1e9} GHz, in microseconds, exact products:
the least that counts allow (mma at {MMA_CYCLES} cycles, one shared-memory wavefront a cycle, one
PTX instruction other than a move a cycle and scheduler, {DRAM / 1e12} TB/s of memory, {L2 / 1e12}
TB/s of L2, which is an assumption, each chain of chunks one after the other), to the same at
{EXPECTED_SHARE:.0%} of it. No GPU has run these kernels. The other columns are published
measurements of others.

{estimate}
{END}"""


def page_with(text: str) -> str:
    page = PAGE.read_text()
    before, rest = page.split(BEGIN)
    return before + text + rest.split(END)[1]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    if reason := build.why_not():
        raise SystemExit(f"cuda_counts.py: {reason}")
    results = measure()
    for what, bar, got, met in bars(results):
        print(f"{'met   ' if met else 'MISSED'}  {what}: {got}, bar {bar}")
    page = page_with(section(results))
    if options.check:
        if PAGE.read_text() != page:
            print("docs/performance.md says otherwise: run scripts/cuda_counts.py")
            return 1
        return 0
    PAGE.write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
