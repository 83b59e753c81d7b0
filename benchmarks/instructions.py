# SPDX-License-Identifier: Apache-2.0
"""Counts the instructions of small fixed problems and compares them with the committed figures.

    python benchmarks/instructions.py            exit status 1 when a kernel is off by over 2%
    python benchmarks/instructions.py --write    makes what was counted the committed figures

Times on a shared machine move by tens of percent; instructions do not, and a kernel that needs more
of them for the same work has become slower, or has lost its vectors. The compiler decides about
them too: figures are kept for each version of it. Counted by valgrind's callgrind, which knows
everything up to AVX2 and nothing of AVX-512.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FIGURES = Path(__file__).resolve().parent / "instructions.json"
PROGRAM = ROOT / "build" / "cpp-dev" / "tests" / "cpp" / "fixed_problems"
TOLERANCE = 0.02
COUNTABLE = ("avx2", "scalar")


class CannotCountError(Exception):
    """Why nothing can be counted here."""


@dataclass(frozen=True)
class Problem:
    isa: str
    name: str

    def __str__(self) -> str:
        return f"{self.isa}: {self.name}"


def build() -> None:
    for command in (["--preset", "dev"], ["--build", "--preset", "dev"]):
        target = ["--target", "fixed_problems"] if "--build" in command else []
        ran = subprocess.run(["cmake", *command, *target], cwd=ROOT, capture_output=True, text=True)
        if ran.returncode != 0:
            raise SystemExit(ran.stdout + ran.stderr)
    reason = ROOT / "build" / "cpp-dev" / "not-built.txt"
    if reason.exists():
        raise CannotCountError(reason.read_text().strip())


def problems() -> tuple[str, list[Problem]]:
    """What the figures are kept for (architecture and compiler), and what can be counted."""
    if shutil.which("valgrind") is None:
        raise CannotCountError("valgrind is not installed (Debian: apt-get install valgrind)")
    if not PROGRAM.exists():
        raise CannotCountError(f"{PROGRAM.relative_to(ROOT)} is not built")
    compiler, *lines = subprocess.check_output([PROGRAM], text=True).splitlines()
    listed = [Problem(*line.split("\t")) for line in lines]
    return f"{platform.machine()} {compiler}", [p for p in listed if p.isa in COUNTABLE]


def count(problem: Problem) -> int:
    command = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null"]
    command += ["--collect-atstart=no", "--toggle-collect=counted"]
    ran = subprocess.run(
        [*command, str(PROGRAM), problem.isa, problem.name], capture_output=True, text=True
    )
    collected = re.search(r"Collected : (\d+)", ran.stderr)
    if ran.returncode != 0 or collected is None:
        raise RuntimeError(f"{problem}: {ran.stderr}")
    return int(collected[1])


def committed(key: str) -> dict[str, int]:
    """Instructions per problem. Without figures for this compiler there is nothing to compare."""
    known = json.loads(FIGURES.read_text())
    if key not in known:
        raise CannotCountError(
            f"no figures for {key}; there are some for {', '.join(known)} "
            "(make instructions ARGS=--write adds them)"
        )
    return known[key]


def off(counted: int, figure: int) -> bool:
    return abs(counted - figure) > TOLERANCE * figure


def write(key: str, counts: dict[str, int]) -> None:
    known = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
    FIGURES.write_text(json.dumps(known | {key: counts}, indent=2, sort_keys=True) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="commit what is counted")
    options = parser.parse_args()
    try:
        build()
        key, listed = problems()
        figures = {} if options.write else committed(key)
    except CannotCountError as reason:
        print(f"instructions not counted: {reason}")
        return 0
    counts, failed = {}, False
    print(f"{key}, millions of instructions")
    for problem in listed:
        counted = counts[str(problem)] = count(problem)
        line = f"  {problem!s:<34} {counted / 1e6:8.3f}"
        if figure := figures.get(str(problem)):
            line += f"   {counted / figure - 1:+.2%}"
            if off(counted, figure):
                failed = True
                line += f"   off: {figure / 1e6:.3f} is committed"
        print(line, flush=True)
    if options.write:
        write(key, counts)
        print(f"written to {os.path.relpath(FIGURES)}")
    elif failed:
        print("If that is wanted: make instructions ARGS=--write")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
