# SPDX-License-Identifier: Apache-2.0
"""Training, end to end: a Gated DeltaNet model with and without this package.

    python -m deltanet_ext demo --train

Trains a Qwen3.5 text model of transformers (seeded weights, true head dims, few and narrow layers)
in fp32 for 20 steps of AdamW on the text that comes with the package, once as transformers runs
and once through `enabled()`. Each runs in a process of its own, so that the peak of its memory is
its own; their steps alternate, so that a disturbance meets both.

What is checked, and what makes the exit code 1:

* The losses of all steps agree to 1e-3.
* Every call of the rule arrived at our operators, and the losses depend on the rule: with its
  output set to zero they are far off. Otherwise agreement would mean nothing.

Exit code 2: something that the demo needs is not installed, or the library is not built.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deltanet_ext.demo import models
from deltanet_ext.demo.judgement import RULE_MATTERS
from deltanet_ext.demo.machine import choose_threads, environment, missing
from deltanet_ext.demo.runs import CHUNK, clocked, counted_operators, replaced, without_output
from deltanet_ext.integrations import transformers as switch

MODEL = "qwen3_5"
THEIRS, OURS, NO_RULE = WAYS = ("transformers", "deltanet_ext", "without the rule")
AGREEMENT = 1e-3  # between losses
RATE = 1e-3
STRIDE = 97  # bytes from the text of one step to that of the next


@dataclass(frozen=True)
class Options:
    """The size of the demo. The defaults are the main job; tests use smaller ones."""

    tokens: int = 512
    steps: int = 20
    hidden: int = 256
    key_heads: int = 4  # and twice as many value heads
    threads: int | None = None
    seed: int = 0


@dataclass
class Training:
    """What one way of training did."""

    losses: list[float] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)  # of each step
    calls: int = 0  # of the rule, by the model
    served: int = 0  # of them by our operators
    peak: int = 0  # bytes of the process, while it trained
    before: int = 0  # bytes of the process before the first step: libraries, weights

    @property
    def step_seconds(self) -> float:
        """The median; the first step also warms up."""
        return statistics.median(self.seconds[1:] or self.seconds)


# -- in the child: one way of training -----------------------------------------------------------


def memory(what: str) -> int:
    """Bytes of this process: "VmRSS" now, "VmHWM" at most."""
    with contextlib.suppress(OSError):
        found = re.search(rf"^{what}:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.M)
        if found:
            return int(found[1]) * 1024
    # Elsewhere the peak alone is known, and where a process begins as a copy of its parent it may
    # be that of the parent.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def forget_peak() -> None:
    """What building the model took at most is not what training takes."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def build(options: Options) -> torch.nn.Module:
    """The model of the demo with matrices about as large as transformers initializes them. With
    those of the demo, which keep logits apart, Adam would magnify rounding within a few steps."""
    sizes = dataclasses.asdict(options)
    model = models.build_model(MODEL, models.Options(**sizes)).train()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.mul_(0.16)
    return model


def train(way: str, options: Options) -> Iterator[Training]:
    """One step each time that the next value is asked for; the values are all the same object."""
    module = models.modeling_file(MODEL)
    model, done = build(options), Training()
    text = models.prompt(options.tokens + STRIDE * options.steps)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    with contextlib.ExitStack() as stack:
        served: list[str] = []
        if way == OURS:
            stack.enter_context(switch.enabled())
            served = stack.enter_context(counted_operators())
        elif way == NO_RULE:
            without = {CHUNK: without_output(module)}
            stack.enter_context(replaced(module, **without))
        calls = stack.enter_context(clocked(module))
        forget_peak()
        done.before = memory("VmRSS")
        for step in range(options.steps):
            start = time.perf_counter()
            ids = text[:, step * STRIDE : step * STRIDE + options.tokens]
            loss = model(ids, labels=ids, use_cache=False).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            done.losses.append(loss.item())
            done.seconds.append(time.perf_counter() - start)
            done.peak, done.calls, done.served = memory("VmHWM"), len(calls), len(served)
            yield done


def child(text: str) -> None:
    """For each line from the parent a step, and a line with all that is known so far."""
    told = json.loads(text)
    options = Options(**told["options"])
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    steps = train(told["way"], options)
    for _ in sys.stdin:
        print(json.dumps(dataclasses.asdict(next(steps))), flush=True)


# -- in the parent -------------------------------------------------------------------------------


class Child:
    """A process that trains one way, step by step."""

    def __init__(self, way: str, options: Options) -> None:
        told = json.dumps({"way": way, "options": dataclasses.asdict(options)})
        command = [sys.executable, "-W", "ignore", "-m", "deltanet_ext.demo.training", told]
        self.way = way
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.__exit__(None, None, None)  # closes its input, which ends it

    def step(self) -> Training:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            print(file=self.process.stdin, flush=True)
        if answer := self.process.stdout.readline():
            return Training(**json.loads(answer))
        code = self.process.wait()
        raise RuntimeError(f"training with {self.way} ended with exit code {code}")


def in_children(options: Options, step_done: Callable[[str, float], None]) -> dict[str, Training]:
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(Child(way, options)) for way in WAYS]
        done: dict[str, Training] = {}
        for _ in range(options.steps):
            for each in children:
                done[each.way] = each.step()
                step_done(each.way, done[each.way].losses[-1])
        return done


def apart(a: Training, b: Training) -> float:
    """The largest difference of two losses; NaN where one is."""
    differences = [abs(x - y) for x, y in zip(a.losses, b.losses, strict=True)]
    return math.nan if any(map(math.isnan, differences)) else max(differences)


def judge(ways: dict[str, Training]) -> list[str]:
    """What is not as it should be."""
    faults = []
    theirs, ours = ways[THEIRS], ways[OURS]
    difference = apart(theirs, ours)
    if not difference <= AGREEMENT:  # a NaN is a fault too
        faults.append(f"losses differ by {difference:.1e}, allowed {AGREEMENT:.0e}")
    if not theirs.losses[-1] < theirs.losses[0]:
        faults.append("the loss did not fall, so agreement means little")
    without = apart(theirs, ways[NO_RULE])
    if not without > RULE_MATTERS * max(difference, AGREEMENT):
        faults.append("the losses hardly depend on the rule, so agreement means little")
    if ours.served != ours.calls or ours.calls == 0:
        faults.append(f"{ours.served} of {ours.calls} calls reached deltanet_ext")
    return faults


def render(ways: dict[str, Training], faults: list[str]) -> Any:
    from rich.table import Table

    theirs, ours = ways[THEIRS], ways[OURS]
    table = Table(title="Qwen3.5, trained without and with deltanet_ext, fp32")
    table.add_column("")
    for name in (THEIRS, OURS, "ratio"):
        table.add_column(name, justify="right")

    def row(name: str, what: Callable[[Training], float], text: str, last: bool = False) -> None:
        a, b = what(theirs), what(ours)
        ratio = f"{a / b:.2f} x" if b else ""
        table.add_row(name, text.format(a), text.format(b), ratio, end_section=last)

    for name, step in (("loss, first step", 0), ("loss, last step", -1)):
        table.add_row(name, f"{theirs.losses[step]:.5f}", f"{ours.losses[step]:.5f}")
    table.add_row("largest difference", "", f"{apart(theirs, ours):.1e}")
    table.add_row("  allowed", "", f"{AGREEMENT:.0e}")
    table.add_row("  without the rule", "", f"{apart(theirs, ways[NO_RULE]):.1e}", end_section=True)
    row("seconds per step", lambda t: t.step_seconds, "{:.3f}", last=True)
    row("peak memory, MB", lambda t: t.peak / 1e6, "{:.0f}")
    row("  of it training", lambda t: (t.peak - t.before) / 1e6, "{:.0f}", last=True)
    table.add_row("verdict", "", "FAILED" if faults else "ok")
    return table


def main(options: Options, json_path: str | None = None) -> int:
    """Runs the demo and returns the exit code: 0 agreed, 1 did not, 2 something is missing."""
    if (problem := missing()) is not None:
        print(problem, file=sys.stderr)
        return 2

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    choose_threads(options.threads)
    options = dataclasses.replace(options, threads=torch.get_num_threads())
    console = Console(highlight=False)
    console.print(environment(), markup=False)
    console.print(
        f"{options.steps} steps of {options.tokens} bytes of text, {2 * options.key_heads} value "
        f"heads on {options.key_heads} key heads of 128"
    )
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        tasks = {way: progress.add_task(way, total=options.steps) for way in WAYS}

        def step_done(way: str, loss: float) -> None:
            progress.update(tasks[way], advance=1, description=f"{way}, loss {loss:.4f}")

        ways = in_children(options, step_done)
    faults = judge(ways)
    console.print(render(ways, faults))
    console.print(
        "`of it training`: the peak over what the process had before the first step. Each way ran "
        "in a process of its own."
    )
    if (load := os.getloadavg()[0]) > (os.cpu_count() or 1) + 0.5:
        console.print(f"The times are disturbed: load {load:.1f} on {os.cpu_count()} cores.")
    if json_path is not None:
        result = {
            "environment": environment(),
            "options": dataclasses.asdict(options),
            "ways": {way: dataclasses.asdict(training) for way, training in ways.items()},
            "faults": faults,
        }
        Path(json_path).write_text(json.dumps(result, indent=1) + "\n")
    for fault in faults:
        console.print(fault, style="bold red")
    return 1 if faults else 0


if __name__ == "__main__":
    child(sys.argv[1])
