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


def theirs_best(result: dict[str, Any], case: str, dtype: str) -> tuple[float, float]:
    """transformers as it is, and at its best: the faster of both mallocs. Best times, ms."""
    rows = [
        pick(result, case=case, dtype=dtype, contestant=THEIRS, malloc=m)
        for m in ("default", "tuned")
    ]
    times = [row["ms_min"] for row in rows if row is not None]
    return times[0], min(times)


def table_rows(result: dict[str, Any]) -> list[list[str]]:
    """Header and rows: what run.py prints and what goes into the documents."""
    table = [
        [
            "case",
            "dtype",
            "ms, best",
            "median",
            "done",
            "of peak",
            "transf. ms",
            "at its best",
            "ratio",
        ]
    ]
    for case, dtype in keys(result):
        ours = pick(result, case=case, dtype=dtype, contestant=OURS)
        assert ours is not None
        as_is, best = theirs_best(result, case, dtype)
        work = f"{ours['gflops']:.0f} GFLOP/s" if "gflops" in ours else f"{ours['gbs']:.0f} GB/s"
        table.append(
            [
                case,
                dtype,
                milliseconds(ours["ms_min"]),
                milliseconds(ours["ms_median"]),
                work,
                f"{ours['share']:.0%}",
                milliseconds(as_is),
                milliseconds(best),
                f"{best / ours['ms_min']:.1f} x",
            ]
        )
    return table


def markdown(rows: list[list[str]], names: int = 2) -> str:
    """A table whose first `names` columns are names, and the others numbers."""
    header, *body = rows
    lines = [header, ["---"] * names + ["--:"] * (len(header) - names), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def describe(result: dict[str, Any]) -> str:
    cpu = result["machine"]
    before, after = result["load_before_and_after"]
    peaks = [row["peak_gflops"] for row in result["rows"] if "peak_gflops" in row]
    peak = f"fp32 peak {max(peaks):.0f} GFLOP/s as measured in the same run, " if peaks else ""
    busy = after > result["threads"] + 0.5
    return (
        f"{cpu['cpu']} (family {cpu['family']}, model {cpu['model']}), {cpu['cores']} cores; "
        f"kernels {result['isa']}, {result['threads']} thread{'s'[: result['threads'] > 1]}; {peak}"
        f"torch {result['torch']}, transformers {result['transformers']}, {result['date'][:10]}. "
        + (f"The machine was shared: load {before} before, {after} after." if busy else "")
    ).strip()


def detailed(results: list[dict[str, Any]]) -> str:
    return "\n\n".join(f"{describe(r)}\n\n{markdown(table_rows(r))}" for r in results)


def short(result: dict[str, Any]) -> str:
    """The table of the README: one line per case, the ratio to transformers at its best."""
    rows = [["", "dtype", OURS, "transformers", "ratio"]]
    for case, dtype in keys(result):
        row = pick(result, case=case, dtype=dtype, contestant=OURS)
        assert row is not None
        if "strided" in case or "dims" in case:
            continue
        best = theirs_best(result, case, dtype)[1]
        ours = row["ms_min"]
        times = [f"{milliseconds(ours)} ms", f"{milliseconds(best)} ms", f"{best / ours:.1f} x"]
        rows.append([f"{case} ({row['shape']})", dtype, *times])
    return f"{markdown(rows)}\n\n{describe(result)}"


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
    results = [json.loads(Path(name).read_text()) for name in options.results]
    if options.print:
        print(detailed(results))
        return 0
    put(ROOT / "docs" / "performance.md", "tables", detailed(results))
    put(ROOT / "README.md", "table", short(results[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
