#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Read what count mode wrote (one JSON object per launch) and print it as tables.

PTX_EMULATOR_COUNT=counts.jsonl ./program && python counts.py counts.jsonl [--sites]
"""

import argparse
import json
import pathlib

COLUMNS = (
    "kernel",
    "blocks",
    "read B",
    "written B",
    "sectors/request",
    "conflicts",
    "mma",
    "barriers",
    "instructions",
)


def load(path) -> list[dict]:
    return [
        json.loads(line) for line in pathlib.Path(path).read_text().splitlines() if line.strip()
    ]


def short(kernel: str) -> str:
    """The kernel's name without the return type and the parameter list."""
    name, depth = kernel.removeprefix("void "), 0
    for at, char in enumerate(name):
        depth += (char == "<") - (char == ">")
        if char == "(" and depth == 0 and at:
            return name[:at]
    return name


def blocks(launch: dict) -> int:
    x, y, z = launch["grid"]
    return x * y * z


def row(launch: dict) -> tuple:
    traffic = [t for t in launch["global"].values() if isinstance(t, dict)]
    requests, sectors = sum(t["requests"] for t in traffic), sum(t["sectors"] for t in traffic)
    return (
        short(launch["kernel"]),
        blocks(launch),
        launch["global"]["distinct_bytes_read"],
        launch["global"]["distinct_bytes_written"],
        f"{sectors / requests:.2f}" if requests else "-",
        sum(t["conflicts"] for t in launch["shared"].values()),
        " ".join(f"{n}x {name}" for name, n in launch["mma"].items()) or "-",
        launch["barriers"]["block"],
        launch["thread_instructions"],
    )


def table(rows: list[tuple], header: tuple) -> str:
    cells = [[str(c) for c in r] for r in [header, *rows]]
    widths = [max(len(r[i]) for r in cells) for i in range(len(header))]
    align = [str.ljust] + [str.rjust] * (len(header) - 1)
    lines = [
        "  ".join(a(c, w) for a, c, w in zip(align, r, widths, strict=True)).rstrip() for r in cells
    ]
    return "\n".join([lines[0], "  ".join("-" * w for w in widths), *lines[1:]])


def sites(launch: dict) -> str:
    header = ("source", "kind", "requests", "bytes", "passes", "least")
    rows = []
    for s in launch["sites"]:
        where = s["source"].split(" < ")[-1] or f"PTX line {s['ptx_line']}"
        passes = s.get("wavefronts", s.get("sectors"))
        rows.append((where, s["kind"], s["requests"], s["bytes"], passes, s["least"]))
    return table(rows, header)


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("file")
    arguments.add_argument(
        "--sites", action="store_true", help="also every access site of every launch"
    )
    options = arguments.parse_args()
    launches = load(options.file)
    print(table([row(launch) for launch in launches], COLUMNS))
    if options.sites:
        for launch in launches:
            print(f"\n{launch['kernel']}\n{sites(launch)}")


if __name__ == "__main__":
    main()
