# SPDX-License-Identifier: Apache-2.0
"""The main job, end to end: a Gated DeltaNet model with and without this package.

    python -m deltanet_ext demo

Builds a Qwen3.5 text model and a Qwen3-Next model of transformers from their config classes (seeded
weights, true architecture, few and narrow layers), feeds each 2,048 bytes of text and generates 64
tokens greedily, once as transformers runs and once through `enabled()`. Then it compares.

What is checked, and what makes the exit code 1:

* fp32: both ways choose the same tokens.
* bf16: two right programs part at near-ties, so both are fed the tokens that transformers chose,
  and the logits are compared.
* In both: the logits differ no more than those of transformers' own two implementations do: its
  chunked function, which it uses for the text, and its token-by-token function, which follows the
  definition in fp32. docs/numerics.md says why this is the right yardstick, and how sharp it is.
  Where tokens choose experts, every run is given the choices of the first: at a near-tie either
  is right, and everything after it differs.
* bf16: that bound is the rounding of the rule, so the rule alone is switched for it. With the rest
  of the layer, whose kernels round less often than transformers does, the logits are at most as
  far from those of the same weights in fp32 as the logits of transformers are.
* Every call of the rule arrived at our operators, and the logits depend on the rule: without its
  output they are far off. Otherwise agreement would mean nothing.

Exit code 2: something that the demo needs is not installed, or the library is not built.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

from deltanet_ext.demo.judgement import Outcome, judge, judge_errors
from deltanet_ext.demo.machine import choose_threads, environment, missing
from deltanet_ext.demo.models import (
    DTYPES,
    Options,
    build_model,
    modeling_file,
    prompt,
    title,
)
from deltanet_ext.demo.runs import (
    CHUNK,
    Run,
    counted_operators,
    generate,
    replaced,
    token_by_token,
    without_output,
)
from deltanet_ext.demo.table import Progress, render
from deltanet_ext.integrations import transformers as switch


def compare(model_name: str, dtype: str, options: Options, step: Callable) -> Outcome:
    """Runs one model in one dtype both ways. `step(text)` is a context that shows progress."""
    module = modeling_file(model_name)
    label, text = f"{title(model_name)} {dtype}", prompt(options.tokens)
    outcome = Outcome(title(model_name), dtype, options.steps)

    with step(f"{label}: build the model"):
        model = build_model(model_name, options).to(DTYPES[dtype])
    run = functools.partial(generate, model, module, text, options.steps)

    with step(f"{label}: warm up, both ways"):
        short = text[:, : min(128, options.tokens)]
        generate(model, module, short, 2)
        with switch.enabled():
            generate(model, module, short, 2)

    # bf16 tokens are slow on CPUs without bf16 instructions, whoever serves the rule: generated
    # once, and the text alone read a second time, so that one disturbance does not decide
    repeats = options.repeats if dtype == "fp32" else 1
    theirs: list[Run] = []
    ours: list[Run] = []
    for _ in range(repeats):
        with step(f"{label}: transformers"):
            theirs.append(run())
        like = theirs[0] if dtype == "bf16" else None
        with step(f"{label}: deltanet_ext"), switch.enabled(), counted_operators() as served:
            ours.append(run(like))
    readings = list(theirs), list(ours)
    if dtype == "bf16":
        with step(f"{label}: transformers, the text again"):
            readings[0].append(generate(model, module, text, 1))
        with step(f"{label}: deltanet_ext, the text again"), switch.enabled():
            readings[1].append(generate(model, module, text, 1))
    agreeing = theirs[0].choices().argmax(-1) == ours[0].choices().argmax(-1)
    outcome.same_tokens = int(agreeing.sum())
    with (
        step(f"{label}: yardstick, transformers token by token"),
        replaced(module, **{CHUNK: token_by_token(module)}),
    ):
        yardstick = run(theirs[0])
    with step(f"{label}: without the rule"), replaced(module, **{CHUNK: without_output(module)}):
        no_rule = generate(model, module, text[:, :256], 1)  # what comes later changes nothing here

    compared, experts = ours[0], dtype == "fp32" and bool(theirs[0].routes)
    if dtype == "bf16":
        with step(f"{label}: deltanet_ext, the rule alone"), switch.enabled(layer=False):
            compared = run(theirs[0])
    judge(theirs[0], compared, yardstick, no_rule, experts, outcome)
    if dtype == "bf16":
        with step(f"{label}: yardstick, the same weights in fp32"):
            exact = generate(model.float(), module, text, options.steps, theirs[0])
        judge_errors(theirs[0], ours[0], exact, outcome)
    arrived, calls = len(served), ours[-1].calls
    if arrived != calls or calls == 0:
        outcome.faults.append(f"{arrived} of {calls} calls reached deltanet_ext")
    for what in ("prefill", "rule_prefill"):
        setattr(outcome, what, tuple(min(getattr(r, what) for r in x) for x in readings))
    for what in ("decode", "rule_decode"):
        setattr(outcome, what, tuple(min(getattr(r, what) for r in x) for x in (theirs, ours)))
    return outcome


def count_steps(options: Options) -> int:
    passes = sum(2 * options.repeats if dtype == "fp32" else 6 for dtype in options.dtypes)
    return len(options.models) * (passes + 4 * len(options.dtypes))


def main(options: Options, json_path: str | None = None) -> int:
    """Runs the demo and returns the exit code: 0 agreed, 1 did not, 2 something is missing."""
    if (problem := missing()) is not None:
        print(problem, file=sys.stderr)
        return 2

    from rich.console import Console

    choose_threads(options.threads)
    console = Console(highlight=False)
    console.print(environment(), markup=False)
    console.print(
        f"{options.tokens:,} bytes of text, {options.steps} tokens generated, "
        f"{2 * options.key_heads} value heads on {options.key_heads} key heads of 128; "
        "one to three minutes on two idle cores"
    )
    progress = Progress(console, count_steps(options))
    outcomes = [
        compare(model, dtype, options, progress)
        for model in options.models
        for dtype in options.dtypes
    ]
    render(outcomes, console)
    console.print(
        "Differences are between logits, relative to their size; `allowed` is what rounding "
        "explains (docs/numerics.md).\n`closest choice`: how far apart the two best logits came; "
        "`text, without rule`: the difference if the rule's output were zero;\n`rule in ...`: the "
        "seconds that the gated delta rule alone took."
    )
    if "bf16" in options.dtypes:
        console.print(
            "bf16: both were fed the tokens that transformers chose; `same tokens` counts where "
            "both would have chosen the same. Differences: of the rule alone. Errors: of the whole "
            "layer, against the same weights in fp32."
        )
    if (load := os.getloadavg()[0]) > (os.cpu_count() or 1) + 0.5:
        console.print(f"The times are disturbed: load {load:.1f} on {os.cpu_count()} cores.")
    if json_path is not None:
        result = {
            "environment": environment(),
            "options": dataclasses.asdict(options),
            "outcomes": [dataclasses.asdict(outcome) for outcome in outcomes],
        }
        Path(json_path).write_text(json.dumps(result, indent=1) + "\n")
    for outcome in outcomes:
        for fault in outcome.faults:
            console.print(f"{outcome.title} {outcome.dtype}: {fault}", style="bold red")
    return 1 if any(outcome.faults for outcome in outcomes) else 0
