# SPDX-License-Identifier: Apache-2.0
"""Makes the tables in docs/performance.md and README.md from result files of run.py.

python benchmarks/report.py benchmarks/results/<machine>/<date>-1t.json
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OURS, THEIRS = "deltanet_ext", "transformers"
BEGIN, END = "<!-- begin: {} (benchmarks/{}) -->", "<!-- end: {} -->"


def milliseconds(ms: float) -> str:
    return f"{ms:.3f}" if ms < 1 else f"{ms:.2f}" if ms < 100 else f"{ms:.0f}"


def pick(result: dict[str, Any], **wanted: str) -> dict[str, Any] | None:
    matching = (r for r in result["rows"] if all(r[k] == v for k, v in wanted.items()))
    return next(matching, None)


def keys(result: dict[str, Any]) -> list[tuple[str, str]]:
    return list(dict.fromkeys((row["case"], row["dtype"]) for row in result["rows"]))


def pair(
    result: dict[str, Any], case: str, dtype: str, malloc: str
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Ours and theirs under one malloc."""
    ours = pick(result, case=case, dtype=dtype, contestant=OURS, malloc=malloc)
    return ours, pick(result, case=case, dtype=dtype, contestant=THEIRS, malloc=malloc)


def table_rows(result: dict[str, Any]) -> list[list[str]]:
    """Header and rows: what run.py prints and what goes into the documents."""
    half = ["ms", "median", "of peak", "transf.", "ratio"]
    rows = [["case", "dtype", *half, *(f"{name}*" for name in half)]]
    for case, dtype in keys(result):
        row = [case, dtype]
        for malloc in ("default", "tuned"):
            ours, theirs = pair(result, case, dtype, malloc)
            if ours is None or theirs is None:
                row += [""] * len(half)
                continue
            row += [
                milliseconds(ours["ms_min"]),
                milliseconds(ours["ms_median"]),
                f"{ours['share']:.0%}",
                milliseconds(theirs["ms_min"]),
                f"{theirs['ms_min'] / ours['ms_min']:.1f} x",
            ]
        rows.append(row)
    return rows


def shape_rows(result: dict[str, Any]) -> list[list[str]]:
    """Header and rows of a run with --shapes."""
    rows = [["case", "sizes", "dtype", "ms", "median", "of peak", "bounded by"]]
    for row in result["rows"]:
        times = [milliseconds(row["ms_min"]), milliseconds(row["ms_median"])]
        bound = "arithmetic" if row["unit"] == "GFLOP/s" else "the states' bytes"
        share = f"{row['share']:.0%}"
        rows.append([row["case"], row["shape"], row["dtype"], *times, share, bound])
    return rows


def peer_rows(result: dict[str, Any]) -> list[list[str]]:
    """Header and rows of a run with --peers: every contestant beside ours."""
    rows = [["case", "dtype", "beside", "ms", "ours", "ratio", "ms*", "ours*", "ratio*"]]
    others = dict.fromkeys((r["case"], r["dtype"], r["contestant"]) for r in result["rows"])
    for case, dtype, name in others:
        if name == OURS:
            continue
        row = [case, dtype, name]
        for malloc in ("default", "tuned"):
            wanted = {"case": case, "dtype": dtype, "malloc": malloc}
            theirs = pick(result, contestant=name, **wanted)
            ours = pick(result, contestant=OURS, **wanted)
            if ours is None or theirs is None:
                row += [""] * 3
                continue
            times = [theirs["ms_min"], ours["ms_min"]]
            row += [*map(milliseconds, times), f"{times[0] / times[1]:.1f} x"]
        rows.append(row)
    return rows


def markdown(rows: list[list[str]], names: int = 2) -> str:
    """A table whose first `names` columns are names, and the others numbers."""
    header, *body = rows
    lines = [header, ["---"] * names + ["--:"] * (len(header) - names), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def describe(result: dict[str, Any]) -> str:
    cpu = result["machine"]
    before, after = result["load_before_and_after"]
    peaks = [row["limit"] for row in result["rows"] if row["unit"] == "GFLOP/s"]
    peak = f"fp32 peak up to {max(peaks):.0f} GFLOP/s during the run, " if peaks else ""
    busy = max(before, after - result["threads"]) > 0.5
    return (
        f"{cpu['cpu']} (family {cpu['family']}, model {cpu['model']}), {cpu['cores']} cores; "
        f"kernels {result['isa']}, {result['threads']} thread{'s'[: result['threads'] > 1]}; {peak}"
        f"torch {result['torch']}, transformers {result['transformers']}, {result['date'][:10]}. "
        + (f"The machine was shared: load {before} before, {after} after." if busy else "")
    ).strip()


def detailed(results: list[dict[str, Any]]) -> str:
    return "\n\n".join(f"{describe(r)}\n\n{markdown(table_rows(r))}" for r in results)


def short(result: dict[str, Any]) -> str:
    """The table of the README: with glibc's malloc, and with one that keeps its memory."""
    rows = [["", "dtype", OURS, "transformers", "ratio", "both, malloc keeps memory", "ratio"]]
    for case, dtype in keys(result):
        if "strided" in case or "dims" in case:
            continue
        row: list[str] = []
        for malloc in ("default", "tuned"):
            ours, theirs = pair(result, case, dtype, malloc)
            assert ours is not None
            assert theirs is not None
            times = [milliseconds(ours["ms_min"]), milliseconds(theirs["ms_min"])]
            row += times if malloc == "default" else [" and ".join(times)]
            row.append(f"{theirs['ms_min'] / ours['ms_min']:.1f} x")
        rows.append([f"{case} ({ours['shape']})", dtype, *row])
    return f"{markdown(rows)}\n\nMilliseconds. {describe(result)}"


def put(path: Path, name: str, text: str, source: str = "report.py") -> None:
    """Replaces what stands between the markers of that name."""
    begin, end = BEGIN.format(name, source), END.format(name)
    old = path.read_text()
    if begin not in old or end not in old:
        raise SystemExit(f"report: {path} has no markers {begin} and {end}")
    head, rest = old.split(begin, 1)
    path.write_text(f"{head}{begin}\n{text}\n{end}{rest.split(end, 1)[1]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("results", nargs="+", help="the first one also goes into the README")
    parser.add_argument("--print", action="store_true", help="only print, change no file")
    options = parser.parse_args()
    read = [json.loads(Path(name).read_text()) for name in options.results]
    results = [r for r in read if not r.get("shapes") and not r.get("peers")]
    peers = [f"{describe(r)}\n\n{markdown(peer_rows(r), 3)}" for r in read if r.get("peers")]
    shapes = [f"{describe(r)}\n\n{markdown(shape_rows(r), 3)}" for r in read if r.get("shapes")]
    if options.print:
        print("\n\n".join([detailed(results), *shapes, *peers]))
        return 0
    if shapes:
        put(ROOT / "docs" / "performance.md", "shapes", "\n\n".join(shapes))
    if peers:
        put(ROOT / "docs" / "performance.md", "peers", "\n\n".join(peers))
    if results:
        put(ROOT / "docs" / "performance.md", "tables", detailed(results))
        put(ROOT / "README.md", "table", short(results[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
