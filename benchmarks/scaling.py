# SPDX-License-Identifier: Apache-2.0
"""How the CPU kernels scale: with a second thread, and with the length of a sequence.

    python benchmarks/scaling.py threads     one and two threads in turn, beside a loop of
                                             multiply-adds and a pass over the states
    python benchmarks/scaling.py lengths     time per token from T = 512 to 65536

Wall clock. Everything of a round follows within milliseconds, and medians of ratios are reported.
Workers that have just finished a task wait for the next one on their cores for a while: before
something else is timed, they are given time to fall asleep.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import machine

ASLEEP = 0.03  # seconds

SECONDS = {"threads": 20, "lengths": 60}


def seconds_of(function: Callable, calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - start) / calls


def threads(seconds: float) -> list[list[str]]:
    import torch
    from run import OURS, functions

    from cases import Case

    cases = (
        Case("prefill, HV = 32", 1, 2048, 16, 32),
        Case("prefill, HV = 4", 1, 4096, 2, 4),
        Case("prefill, one head", 1, 16384, 1, 1),
        Case("decode, B = 4", 4, 1, 16, 32, decode=True),
        Case("decode, B = 32", 32, 1, 16, 32, decode=True),
    )
    peaks = {n: machine.Peak(n) for n in (1, 2)}
    rows = [["case", "1 thread, ms", "2 threads, ms", "ratio", "multiply-adds", "pass", "rounds"]]
    for case in cases:
        inputs, function = case.inputs(torch.float32), functions(case)[OURS]

        def call(function: Callable = function, inputs: dict = inputs) -> None:
            function(**inputs)

        calls = max(1, int(10e-3 / seconds_of(call, 3)))
        times: dict[int, list[float]] = {1: [], 2: []}
        ratios, loops, passes = [], [], []
        start = time.perf_counter()
        while time.perf_counter() - start < seconds:
            loop, states = {}, {}
            for n in (1, 2):
                torch.set_num_threads(n)
                call()
                times[n].append(seconds_of(call, calls))
                time.sleep(ASLEEP)
                loop[n] = peaks[n].gflops()
                states[n] = peaks[n].gbs(case.state_floats) if case.decode else float("nan")
            ratios.append(times[1][-1] / times[2][-1])
            loops.append(loop[2] / loop[1])
            passes.append(states[2] / states[1])
        median = statistics.median
        row = [f"{median(times[n]) * 1e3:.2f}" for n in (1, 2)]
        row += [f"{median(x):.2f} x" for x in (ratios, loops)]
        row.append(f"{median(passes):.2f} x" if case.decode else "")
        rows.append([case.name, *row, str(len(ratios))])
    return rows


def lengths(seconds: float) -> list[list[str]]:
    import torch
    from run import OURS, functions

    from cases import Case

    torch.set_num_threads(1)
    cases = [Case("", 1, tokens, 2, 4) for tokens in (512, 2048, 8192, 32768, 65536)]
    inputs = [case.inputs(torch.float32) for case in cases]
    calls = [max(1, 8192 // case.tokens) for case in cases]
    times: list[list[float]] = [[] for _ in cases]
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        for case, given, n, found in zip(cases, inputs, calls, times, strict=True):
            function = functions(case)[OURS]
            begin = time.process_time()
            for _ in range(n):
                function(**given)
            found.append((time.process_time() - begin) / n / case.tokens)
    rows = [["T", "us per token, median", "best", "median beside the one of T = 512"]]
    for case, found in zip(cases, times, strict=True):
        ratio = statistics.median(x / y for x, y in zip(found, times[0], strict=True))
        us = [statistics.median(found) * 1e6, min(found) * 1e6]
        rows.append([str(case.tokens), *(f"{x:.2f}" for x in us), f"{ratio:.2f}"])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=SECONDS)
    parser.add_argument("--seconds", type=float, help="in all, or for each case")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    cores = machine.pin(2 if options.what == "threads" else 1)
    if options.what == "threads" and len(cores) < 2:
        raise SystemExit("scaling: two cores are needed")
    import torch
    from report import markdown

    measured = threads if options.what == "threads" else lengths
    with torch.inference_mode():
        rows = measured(options.seconds or SECONDS[options.what])
    print(markdown(rows, 1))
    print(f"\nload {os.getloadavg()[0]:.2f}")


if __name__ == "__main__":
    main()
