# SPDX-License-Identifier: Apache-2.0
"""Times the operators next to the functions of transformers that they stand in for.

    python benchmarks/run.py              about ten minutes
    python benchmarks/run.py --quick      the main shapes, fewer rounds
    python benchmarks/run.py --shapes     every kind of shape, our operators alone
    python benchmarks/run.py --peers      other engines as well (peers.py)

All contestants run in one process on the same pinned cores, one call each per round, so that a
disturbance meets all of them. The machine's peak is measured in every round as well. With one
thread the clock is the time that the process had a core, so that other processes do not count
(what they do to the caches still does); with more it is the wall clock. Written to
benchmarks/results/<machine>/<date>.json; report.py makes tables of it, compare.py compares two.

transformers' functions allocate tens of temporaries per call, and how fast that is depends on
malloc: by default glibc gives large blocks back to the system at once, and every call pays for the
page faults. Everything is therefore timed twice, once as it is and once (`--malloc tuned`, in a
process of its own; the columns with a star) with a malloc that keeps its memory.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import machine

TUNED = {"MALLOC_MMAP_THRESHOLD_": "1073741824", "MALLOC_TRIM_THRESHOLD_": "4294967296"}
OURS, THEIRS = "deltanet_ext", "transformers"


def contestants(case: Any) -> dict[str, Callable]:
    """What is timed."""
    if hasattr(case, "contestants"):
        return dict(zip((OURS, THEIRS), case.contestants(), strict=True))
    both = functions(case)
    if case.backward:
        return {n: backward_of(f) for n, f in both.items()}
    return {n: trained(f) for n, f in both.items()} if case.train else both


def functions(case: Any) -> dict[str, Callable]:
    """Ours and theirs."""
    from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

    import deltanet_ext

    def plain(function: Callable) -> Callable:
        while hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        return function

    if case.decode:
        return {
            OURS: updated() if case.in_place else deltanet_ext.recurrent_gated_delta_rule,
            THEIRS: plain(modeling.torch_recurrent_gated_delta_rule),
        }
    ours = deltanet_ext.chunk_gated_delta_rule
    return {
        OURS: fast(ours) if case.fast else ours,
        THEIRS: plain(modeling.torch_chunk_gated_delta_rule),
    }


def fast(function: Callable) -> Callable:
    """With products of bf16 pairs."""
    import deltanet_ext

    def run(**inputs: Any) -> Any:
        with deltanet_ext.cpu_precision("fast"):
            return function(**inputs)

    return run


def updated() -> Callable:
    """A decode step in place, on a copy of the first call's states; returns output and states."""
    import deltanet_ext

    kept: list[Any] = []

    def update(initial_state: Any, output_final_state: bool, **inputs: Any) -> tuple[Any, Any]:
        if not kept:
            kept.append(initial_state.clone())
        return deltanet_ext.gated_delta_rule_update(**inputs, state=kept[0]), kept[0]

    return update


def forward_of(function: Callable, inputs: dict[str, Any]) -> tuple[Any, list[Any]]:
    """The output, and the inputs that it has gradients for."""
    differentiable = ("query", "key", "value", "g", "beta")
    leaves = [inputs[name].detach().requires_grad_() for name in differentiable]
    out, _ = function(**inputs | dict(zip(differentiable, leaves, strict=True)))
    return out, leaves


def trained(function: Callable) -> Callable:
    """A forward and a backward pass; returns the gradients."""

    def forward_and_backward(**inputs: Any) -> list[Any]:
        import torch

        out, leaves = forward_of(function, inputs)
        return list(torch.autograd.grad(out, leaves, torch.ones_like(out)))

    return forward_and_backward


def backward_of(function: Callable) -> Callable:
    """A backward pass after the forward pass of the first call."""
    graph: list[Any] = []

    def backward(**inputs: Any) -> list[Any]:
        import torch

        if not graph:
            out, leaves = forward_of(function, inputs)
            graph.extend((out, leaves, torch.ones_like(out)))
        return list(torch.autograd.grad(*graph, retain_graph=True))

    return backward


def measure(
    case: Any,
    dtype: str,
    seconds: float,
    peak: machine.Peak,
    ours_only: bool = False,
    with_peers: bool = False,
) -> list[dict[str, Any]]:
    """Rounds of one sample per contestant, until `seconds` have passed; at least five."""
    import torch

    from cases import DTYPES

    clock = time.process_time if peak.threads == 1 else time.perf_counter
    inputs = case.inputs(DTYPES[dtype])
    # A sample is one call or, for short calls, enough of them to take a few milliseconds. What a
    # call returned is kept until the next one returns, as in a model.
    # The first call after another contestant also waits for what that one left in the caches to be
    # written, as the first of a pass's three rounds does.
    at_least = 3 if "GB/s" in case.bounds else 1
    calls, samples = {}, {}
    timed = contestants(case)
    if ours_only:
        timed = {OURS: timed[OURS]}
    if with_peers:
        from peers import peers

        with torch.inference_mode():
            timed |= peers(case, dtype, inputs, timed[OURS])
    for name, function in timed.items():
        function(**inputs)
        start = clock()
        function(**inputs)
        calls[name] = max(at_least, int(5e-3 / max(1e-6, clock() - start)))
        samples[name] = []

    # What the machine can do moves (its clock, neighbors), so it is measured next to every sample.
    floors: dict[str, tuple[float, Callable[[], float]]] = {}
    if "GB/s" in case.bounds:
        gbs = functools.partial(peak.gbs, case.state_floats)
        floors["GB/s"] = case.state_floats * 8 / 1e9, gbs
    if "GFLOP/s" in case.bounds:
        floors["GFLOP/s"] = case.padded.flop / 1e9, peak.gflops

    def limits_now() -> dict[str, float]:
        return {unit: limit() for unit, (_, limit) in floors.items()}

    limits: dict[str, list[dict[str, float]]] = {name: [] for name in timed}
    start = time.perf_counter()
    with torch.inference_mode(not (case.train or case.backward)):
        before = limits_now()
        while time.perf_counter() - start < seconds or len(samples[OURS]) < 5:
            for name, function in timed.items():
                begin = clock()
                for _ in range(calls[name]):
                    result = function(**inputs)
                samples[name].append((clock() - begin) / calls[name])
                after = limits_now()
                limits[name].append({unit: (before[unit] + after[unit]) / 2 for unit in floors})
                before = after
    del result

    rows = []
    for name, times in samples.items():
        # The floor that takes longest is the one that counts.
        floor_times = {
            u: statistics.median(w / at[u] for at in limits[name]) for u, (w, _) in floors.items()
        }
        unit = max(floor_times, key=floor_times.__getitem__)
        work = floors[unit][0]
        at_unit = [at[unit] for at in limits[name]]
        shares = (work / t / at for t, at in zip(times, at_unit, strict=True))
        rows.append(
            {
                "case": case.name,
                "shape": str(case).partition(": ")[2],
                "dtype": dtype,
                "contestant": name,
                "ms_min": min(times) * 1e3,
                "ms_median": statistics.median(times) * 1e3,
                "rounds": len(times),
                "unit": unit,
                "speed": work / min(times),
                "limit": max(at_unit),
                "share": statistics.median(shares),
            }
        )
    return rows


def run_all(options: argparse.Namespace) -> list[dict[str, Any]]:
    import torch
    from layer_cases import LAYER_CASES

    from cases import CASES, SHAPES

    torch.set_num_threads(options.threads)
    peak = machine.Peak(options.threads)
    rows = []
    cases = SHAPES if options.shapes else CASES if options.peers else (*CASES, *LAYER_CASES)
    for case in cases:
        if options.quick and not case.quick:
            continue
        if options.only and not any(part in case.name for part in options.only):
            continue
        for dtype in options.dtype:
            if not case.runs_here(dtype):
                continue
            print(f"  {case} {dtype}", file=sys.stderr, flush=True)
            for row in measure(case, dtype, options.seconds, peak, options.shapes, options.peers):
                rows.append(row | {"malloc": options.malloc})
                best, share = row["ms_min"], row["share"]
                note = f"    {row['contestant']}: {best:.3g} ms, {share:.0%} of peak"
                print(note, file=sys.stderr, flush=True)
    return rows


def run_tuned(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The same in a child whose malloc keeps its memory; glibc reads the settings at the start."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        command = [sys.executable, __file__, "--malloc", "tuned", "--rows", str(path)]
        command += ["--threads", str(options.threads), "--dtype", *options.dtype]
        command += ["--only", *options.only, *(["--quick"] if options.quick else [])]
        command += ["--peers"] if options.peers else []
        command += ["--seconds", str(options.seconds)]
        subprocess.run(command, env=os.environ | TUNED, check=True)
        return json.loads(path.read_text())


def facts(options: argparse.Namespace, cores: list[int], load: tuple[float, ...]) -> dict[str, Any]:
    import torch
    import transformers

    import deltanet_ext

    return {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "machine": machine.cpu_facts(),
        "deltanet_ext": deltanet_ext.__version__,
        "isa": deltanet_ext.cpu_isa(),
        "build": {name: str(fact) for name, fact in deltanet_ext.build_info().items()},
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": options.threads,
        "clock": "cpu" if options.threads == 1 else "wall",
        "cores": cores,
        "load_before_and_after": [round(load[0], 2), round(os.getloadavg()[0], 2)],
        "ld_preload": os.environ.get("LD_PRELOAD", ""),
        "quick": options.quick,
    }


def show(result: dict[str, Any]) -> None:
    from report import peer_rows, shape_rows, table_rows
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"best times in ms; {result['isa']}, {result['threads']} thread(s)")
    make_rows = shape_rows if result["shapes"] else peer_rows if result["peers"] else table_rows
    header, *rows = make_rows(result)
    for i, name in enumerate(header):
        table.add_column(name, justify="right" if i > 1 else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console = Console(width=max(140, Console().width))
    console.print(table)
    console.print(f"* with a malloc that keeps its memory; load {result['load_before_and_after']}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="main shapes, fewer rounds")
    parser.add_argument("--shapes", action="store_true", help="every kind of shape, ours alone")
    parser.add_argument("--peers", action="store_true", help="other engines as well (peers.py)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    parser.add_argument("--only", nargs="*", default=[], help="parts of the names of cases")
    parser.add_argument("--malloc", choices=("both", "default", "tuned"), default="both")
    parser.add_argument("--seconds", type=float, help="for each case (default: 20)")
    parser.add_argument("--out", help="file for the result (default: under benchmarks/results)")
    parser.add_argument("--rows", help=argparse.SUPPRESS)  # a child's answer to its parent
    options = parser.parse_args()

    if options.malloc == "tuned" and any(os.environ.get(k) != v for k, v in TUNED.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | TUNED)

    if options.seconds is None:
        options.seconds = 2 if options.shapes else 3 if options.quick else 20

    load = os.getloadavg()
    cores = machine.pin(options.threads)
    if options.shapes:
        options.malloc = "default"
    both = options.malloc == "both"
    if both:
        options.malloc = "default"
    rows = run_all(options)
    if options.rows:
        Path(options.rows).write_text(json.dumps(rows))
        return 0
    if both:
        print("again, with a malloc that keeps its memory:", file=sys.stderr)
        rows += run_tuned(options)

    result = facts(options, cores, load)
    if options.peers:
        from peers import versions

        result["versions"] = versions()
    result |= {"rows": rows, "shapes": options.shapes, "peers": options.peers}
    show(result)
    day = result["date"][:10]
    kinds = [kind for kind in ("shapes", "peers", "quick") if getattr(options, kind)]
    kind = "".join(f"-{kind}" for kind in kinds)
    name = f"{day}-{options.threads}t{kind}.json"
    path = Path(options.out or machine.HERE / "results" / machine.slug() / name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
