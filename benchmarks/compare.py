# SPDX-License-Identifier: Apache-2.0
"""Compares two results of run.py and exits 1 when ours became slower by more than the noise.

    python benchmarks/compare.py before.json after.json

A shared machine is faster on some days. Each time is therefore set against the peak of its own run
(the column `ratio`); the plain ratio of the times is printed next to it. The noise of a row is how
far its median lies above its best time, in either run, and at least `--noise`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

OURS = "deltanet_ext"


def key(row: dict[str, Any]) -> tuple[str, ...]:
    return row["case"], row["dtype"], row["contestant"], row["malloc"]


def spread(row: dict[str, Any]) -> float:
    return row["ms_median"] / row["ms_min"] - 1


def compare(before: dict[str, Any], after: dict[str, Any], least: float) -> tuple[list, list]:
    """Lines of the table, and the keys of those of ours that became slower."""
    old = {key(row): row for row in before["rows"]}
    lines, slower = [], []
    for row in after["rows"]:
        other = old.get(key(row))
        if other is None:
            continue
        plain = row["ms_min"] / other["ms_min"]
        ratio = other["share"] / row["share"]
        noise = max(least, spread(row), spread(other))
        worse = row["contestant"] == OURS and ratio > 1 + noise
        if worse:
            slower.append(key(row))
        verdict = "SLOWER" if worse else "faster" if ratio < 1 - noise else ""
        lines.append((key(row), other["ms_min"], row["ms_min"], plain, ratio, noise, verdict))
    return lines, slower


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--noise", type=float, default=0.05, help="least noise assumed (0.05)")
    options = parser.parse_args()
    before, after = (json.loads(p.read_text()) for p in (options.before, options.after))
    for name in ("machine", "threads", "isa"):
        if before[name] != after[name]:
            print(f"note: {name} differs: {before[name]} and {after[name]}")
    lines, slower = compare(before, after, options.noise)
    if not lines:
        print("compare: the two results have no row in common")
        return 2
    print(f"{'':58} {'before':>9} {'after':>9} {'time':>6} {'ratio':>6} {'noise':>6}")
    for name, old, new, plain, ratio, noise, verdict in lines:
        label = ", ".join(name)
        print(f"{label:58} {old:9.3f} {new:9.3f} {plain:6.2f} {ratio:6.2f} {noise:6.2f} {verdict}")
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
