# SPDX-License-Identifier: Apache-2.0
"""What the demo shows: a line per finished step, then a table."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from deltanet_ext.demo.judgement import Outcome

if TYPE_CHECKING:
    from rich.console import Console


class Progress:
    """One line per finished step; in a terminal also what is running now, and for how long."""

    def __init__(self, console: Console, steps: int) -> None:
        self.console, self.steps, self.done = console, steps, 0

    @contextlib.contextmanager
    def __call__(self, text: str) -> Iterator[None]:
        start = time.perf_counter()
        with self.console.status(text) if self.console.is_terminal else contextlib.nullcontext():
            yield
        self.done += 1
        seconds = time.perf_counter() - start
        self.console.print(f"[{self.done:2}/{self.steps}] {text}  {seconds:.1f} s", markup=False)


def render(outcomes: list[Outcome], console: Console) -> None:
    from rich.table import Table

    table = Table(title="transformers without and with deltanet_ext")
    table.add_column("")
    for outcome in outcomes:
        table.add_column(f"{outcome.title}\n{outcome.dtype}", justify="right")

    def row(name: str, text: Callable[[Outcome], str], last: bool = False) -> None:
        table.add_row(name, *map(text, outcomes), end_section=last)

    def seconds(name: str, what: str) -> None:
        table.add_row(name)
        row("  transformers", lambda o: f"{getattr(o, what)[0]:.3f} s")
        row("  deltanet_ext", lambda o: f"{getattr(o, what)[1]:.3f} s")
        row("  ratio", lambda o: f"{ratio(getattr(o, what)):.2f} x", last=True)

    def same(outcome: Outcome) -> str:
        if outcome.same_tokens == outcome.steps:
            return "yes" if outcome.dtype == "fp32" else "yes (fed)"
        count = f"{outcome.same_tokens} of {outcome.steps}"
        return f"NO, {count}" if outcome.dtype == "fp32" else f"{count} (fed)"

    row("same tokens", same)
    row("  closest choice", lambda o: f"{o.closest_choice:.1e}", last=True)

    def differences(name: str, what: str) -> None:
        def allowed(outcome: Outcome) -> str:
            limit = getattr(outcome.allowed, what)
            return "not judged" if math.isinf(limit) else f"{limit:.2e}"

        row(name, lambda o: f"{getattr(o.difference, what):.2e}")
        row("  allowed", allowed)

    differences("largest difference", "largest")
    differences("typical, text", "text")
    differences("typical, generated", "generated")

    def errors(what: str) -> None:
        def of(which: int) -> Callable[[Outcome], str]:
            return lambda o: f"{o.error[what][which]:.2e}" if o.error else ""

        row(f"error, {what}", of(1))
        row("  of transformers", of(0))

    if any(o.error for o in outcomes):
        errors("text")
        errors("generated")
    row("text, without rule", lambda o: f"{o.without_rule:.2e}", last=True)
    seconds("prefill", "prefill")
    seconds("decode", "decode")
    seconds("rule in prefill", "rule_prefill")
    seconds("rule in decode", "rule_decode")
    row("verdict", lambda o: "FAILED" if o.faults else "ok")
    console.print(table)


def ratio(seconds: tuple[float, float]) -> float:
    return seconds[0] / seconds[1]
