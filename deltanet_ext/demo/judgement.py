# SPDX-License-Identifier: Apache-2.0
"""Whether two runs agree as far as rounding explains. docs/numerics.md has the reasons."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from deltanet_ext.demo.models import DTYPES
from deltanet_ext.demo.runs import Run


@dataclass
class Difference:
    """How far two sets of logits are apart."""

    largest: float
    # Medians over tokens of the root mean square over the vocabulary. The generated tokens see the
    # text through the state, so a wrong final state shows there.
    text: float
    generated: float


# How many times the yardstick a difference may be. In bf16 every right implementation is at 0.9 to
# 1.1 of it (the largest at 0.7 to 1.4), and one that is off by 0.2% at 1.6 or more. In fp32 the
# yardstick depends on how transformers' products round, and a fault is hundreds of times larger.
# For 2,048 tokens of text and 64 generated; see `widened`.
LIMITS = {
    "fp32": Difference(largest=4.0, text=2.0, generated=2.0),
    "bf16": Difference(largest=2.0, text=1.25, generated=1.4),
}
# 16 bits, the whole layer switched: how many times transformers' own error, which is rounding and
# mostly outside the layer, ours may be. docs/numerics.md has what is usual.
ERROR_LIMIT = {"text": 1.1, "generated": 1.25}


def widened(limit: float, tokens: int, usual: int) -> float:
    """Fewer tokens say less: the scatter of a median falls with the root of their number."""
    return 1 + (limit - 1) * math.sqrt(max(1.0, usual / max(1, tokens)))


# Setting the rule's output to zero must change the logits by this many times more than the switch.
RULE_MATTERS = 20.0


@dataclass
class Outcome:
    """What came out for one model in one dtype. Seconds: (transformers, deltanet_ext)."""

    title: str
    dtype: str
    steps: int
    same_tokens: int = 0
    closest_choice: float = 0.0  # the smallest lead of a generated token over the second best
    difference: Difference | None = None  # deltanet_ext to transformers
    allowed: Difference | None = None
    # bf16: errors against the same weights in fp32, (transformers, deltanet_ext)
    error: dict[str, tuple[float, float]] = field(default_factory=dict)
    without_rule: float = 0.0  # the text's difference when the rule's output is zero
    prefill: tuple[float, float] = (0.0, 0.0)
    decode: tuple[float, float] = (0.0, 0.0)
    rule_prefill: tuple[float, float] = (0.0, 0.0)
    rule_decode: tuple[float, float] = (0.0, 0.0)
    faults: list[str] = field(default_factory=list)


def difference(a: Run, b: Run) -> Difference:
    tokens = min(len(a.logits), len(b.logits))
    apart = (a.logits[:tokens] - b.logits[:tokens]).double()
    per_token = apart.square().mean(-1).sqrt()
    text, generated = per_token[: a.text], per_token[a.text :]
    return Difference(
        largest=float(apart.abs().max()),
        text=float(text.median()),
        generated=float(generated.median()) if len(generated) else 0.0,
    )


def judge(
    theirs: Run, ours: Run, yardstick: Run, no_rule: Run, experts: bool, outcome: Outcome
) -> None:
    """Fills in the differences, and says in `faults` what is not as it should be.

    `experts`: each run chose its own. What a near-tie does to a token's logits has no bound, so the
    largest difference is shown and not judged.
    """
    best, second = theirs.choices().topk(2).values.unbind(-1)
    outcome.closest_choice = float((best - second).min())
    if outcome.dtype == "fp32" and ours.tokens != theirs.tokens:
        outcome.faults.append("the tokens differ")

    found, usual = difference(ours, theirs), difference(yardstick, theirs)
    limit = LIMITS[outcome.dtype]
    # On a short text the two runs of the yardstick may agree: a last bit of the logits is allowed.
    least = last_bit(outcome.dtype, theirs)
    outcome.difference, outcome.allowed = (
        found,
        Difference(
            largest=math.inf if experts else limit.largest * max(usual.largest, least),
            text=widened(limit.text, theirs.text, 2048) * max(usual.text, least),
            generated=widened(limit.generated, outcome.steps, 64) * max(usual.generated, least),
        ),
    )
    for name in ("largest", "text", "generated"):
        got, allowed = getattr(found, name), getattr(outcome.allowed, name)
        if not got <= allowed:  # a NaN is a fault too
            outcome.faults.append(f"logit difference ({name}) {got:.2e}, allowed {allowed:.2e}")

    outcome.without_rule = difference(no_rule, theirs).text
    if not outcome.without_rule >= RULE_MATTERS * found.text:
        outcome.faults.append("the logits hardly depend on the rule, so agreement means little")


def last_bit(dtype: str, run: Run) -> float:
    return torch.finfo(DTYPES[dtype]).eps * float(run.logits.square().mean().sqrt())


def judge_errors(theirs: Run, ours: Run, exact: Run, outcome: Outcome) -> None:
    """16 bits: how far both are from the same weights in fp32."""
    usual, found = difference(theirs, exact), difference(ours, exact)
    outcome.error = {"text": (usual.text, found.text)}
    outcome.error["generated"] = usual.generated, found.generated
    limits = {
        "text": widened(ERROR_LIMIT["text"], theirs.text, 2048),
        "generated": widened(ERROR_LIMIT["generated"], outcome.steps, 64),
    }
    for name, (theirs_is, ours_is) in outcome.error.items():
        if not ours_is <= limits[name] * max(theirs_is, last_bit(outcome.dtype, exact)):
            outcome.faults.append(
                f"error of the logits ({name}) {ours_is:.2e}, of transformers {theirs_is:.2e}"
            )
