#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How fast the emulator runs: PTX thread-instructions per second of processor time.

Processor time, so that other work on the machine disturbs it little; the gain of a second core is
on the clock. The instructions are counted in a run of their own.
"""

import json
import os
import subprocess
import sys
import tempfile

import build
import counts

CASES = {
    "tile product 1024^3 (mma, ldmatrix, cp.async)": ("tile_product", "1024", "1024", "1024"),
    "CUB device scans, 1,000,000 elements": ("cub", "1000000"),
}


def execute(command: list, **settings) -> str:
    environment = os.environ | {f"PTX_EMULATOR_{k}": str(v) for k, v in settings.items()}
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, env=environment, check=True
    )
    return done.stderr


def measure(command: list, **settings) -> tuple[float, float]:
    """The least of three runs, all launches together: processor seconds, seconds on the clock."""
    runs = []
    for _ in range(3):
        launches = [
            json.loads(line)
            for line in execute(command, TIMES=1, **settings).splitlines()
            if line.startswith("{")
        ]
        runs.append(
            [sum(launch[key] for launch in launches) for key in ("processor_seconds", "seconds")]
        )
    return tuple(min(run[i] for run in runs) for i in (0, 1))


def main() -> None:
    if reason := build.why_not():
        sys.exit(f"ptx_emulator: {reason}")
    names = ("unchecked", "two cores", "checked", "two cores")
    print(f"{'':48} {'instructions':>14}", *(f"{name:>12}" for name in names))
    for title, (name, *arguments) in CASES.items():
        build.program(name, count=True)
        command = [build.program(name), *arguments]
        with tempfile.NamedTemporaryFile() as file:
            execute(command, COUNT=file.name, CHECKS="none")
            executed = sum(launch["thread_instructions"] for launch in counts.load(file.name))
        columns = []
        for checks in ("none", "all"):
            processor, alone = measure(command, CHECKS=checks, THREADS=1)
            _, both = measure(command, CHECKS=checks, THREADS=2)
            columns += [f"{executed / processor / 1e6:8.0f} M/s", f"{alone / both:9.2f}x"]
        print(f"{title:48} {executed:14,}", *(f"{column:>12}" for column in columns))


if __name__ == "__main__":
    main()
