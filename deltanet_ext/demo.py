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

import contextlib
import dataclasses
import functools
import importlib
import importlib.resources
import importlib.util
import inspect
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from deltanet_ext import ops
from deltanet_ext.integrations import transformers as switch

if TYPE_CHECKING:
    from rich.console import Console

CHUNK, RECURRENT = "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_OLD_NAME = "past_key_values"
VOCABULARY = 256  # a token is a byte
LAYERS = ["linear_attention"] * 3 + ["full_attention", "linear_attention"]


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

_MODELS = {
    # name: title, modeling file, config class, model class
    "qwen3_5": ("Qwen3.5", "qwen3_5", "Qwen3_5TextConfig", "Qwen3_5ForCausalLM"),
    "qwen3_next": ("Qwen3-Next", "qwen3_next", "Qwen3NextConfig", "Qwen3NextForCausalLM"),
}
MODELS = tuple(_MODELS)


@dataclass(frozen=True)
class Options:
    """The size of the demo. The defaults are the main job; tests use smaller ones."""

    models: tuple[str, ...] = MODELS
    dtypes: tuple[str, ...] = ("fp32", "bf16")
    tokens: int = 2048
    steps: int = 64
    hidden: int = 256
    key_heads: int = 4  # and twice as many value heads
    repeats: int = 2  # timed runs of each way in fp32; the faster one counts
    threads: int | None = None
    seed: int = 0


# -- the model -----------------------------------------------------------------------------------


def modeling_file(model: str) -> ModuleType:
    folder = _MODELS[model][1]
    return importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")


def build_model(model: str, options: Options) -> torch.nn.Module:
    """A model of transformers with seeded weights: head dims 128, convolution width 4, two value
    heads per key head, a full attention layer between; Qwen3-Next with its mixture of experts."""
    import transformers

    _, _, config_class, model_class = _MODELS[model]
    hidden = options.hidden
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": len(LAYERS),
        "layer_types": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_num_key_heads": options.key_heads,
        "linear_num_value_heads": 2 * options.key_heads,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": options.tokens + options.steps,
    }
    if model == "qwen3_next":
        settings |= {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": hidden // 2,
            "shared_expert_intermediate_size": hidden // 2,
        }
    config = getattr(transformers, config_class)(**settings)
    torch.manual_seed(options.seed)
    built = getattr(transformers, model_class)(config).eval()
    set_weights(built, options.seed)
    return built


@torch.no_grad()
def set_weights(model: torch.nn.Module, seed: int) -> None:
    """Weights under which the text decides what is generated. The gates span memories from one
    token to a thousand, and the scale of the matrices keeps the logits apart, so that a choice is
    rarely close, and the tokens varied."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if name.endswith("A_log"):
            weight.copy_(torch.empty_like(weight).uniform_(1, 16, generator=generator).log())
        elif name.endswith("dt_bias"):
            low, high = math.log(1e-3), math.log(1e-1)
            dt = torch.empty_like(weight).uniform_(low, high, generator=generator).exp()
            weight.copy_(dt + torch.log(-torch.expm1(-dt)))  # softplus of it is dt
        elif "embed_tokens" in name:
            weight.normal_(std=1.0, generator=generator)
        elif "conv1d" in name:
            weight.uniform_(-0.5, 0.5, generator=generator)
        elif weight.dim() > 1:
            weight.normal_(std=2.0 / math.sqrt(weight.shape[-1]), generator=generator)


def prompt(tokens: int) -> torch.Tensor:
    """The first bytes of the text that comes with the package, one token each. `[1, tokens]`"""
    text = importlib.resources.files("deltanet_ext").joinpath("data/delta_rule.txt").read_bytes()
    if tokens > len(text):
        text *= math.ceil(tokens / len(text))
    return torch.tensor([list(text[:tokens])])


# -- what a model does when asked ----------------------------------------------------------------


Routes = list[torch.Tensor]  # the experts chosen for each token, one tensor per call of a router


@dataclass
class Run:
    """One pass over the text and the tokens generated after it."""

    text: int  # bytes read
    tokens: list[int]  # generated
    logits: torch.Tensor  # [text + generated - 1, vocabulary], fp32
    routes: Routes
    calls: int  # of the rule
    prefill: float  # seconds
    decode: float  # that of the median token times their number: a disturbed token does not count
    rule_prefill: float
    rule_decode: float

    def choices(self) -> torch.Tensor:
        """The logits that tokens were chosen from. `[steps, vocabulary]`"""
        return self.logits[-len(self.tokens) :]


@contextlib.contextmanager
def replaced(module: ModuleType, **functions: Callable) -> Iterator[None]:
    """Other functions under these names in a modeling file, for the length of a block."""
    before = {name: getattr(module, name) for name in functions}
    for name, function in functions.items():
        setattr(module, name, function)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(module, name, function)


@contextlib.contextmanager
def clocked(module: ModuleType) -> Iterator[list[float]]:
    """The seconds of each call of the rule of a modeling file, whoever serves it."""
    calls: list[float] = []

    def timed(rule: Callable) -> Callable:
        @functools.wraps(rule)
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = rule(*args, **kwargs)
            calls.append(time.perf_counter() - start)
            return result

        return call

    chunk, recurrent = getattr(module, CHUNK), getattr(module, RECURRENT)
    with replaced(module, **{CHUNK: timed(chunk), RECURRENT: timed(recurrent)}):
        yield calls


@contextlib.contextmanager
def routed(model: torch.nn.Module, given: Routes | None) -> Iterator[Routes]:
    """The choices of a model's routers, in order; with `given`, those are used instead."""
    chosen: Routes = []

    def choose(router: Any, args: Any, result: Any) -> Any:
        logits, scores, experts = result
        if given is not None:
            experts = given[len(chosen)]
            probabilities = logits.softmax(-1, dtype=torch.float).gather(-1, experts)
            if router.norm_topk_prob:
                probabilities = probabilities / probabilities.sum(-1, keepdim=True)
            scores = probabilities.to(scores.dtype)
        chosen.append(experts)
        return logits, scores, experts

    routers = [m for m in model.modules() if type(m).__name__.endswith("TopKRouter")]
    hooks = [router.register_forward_hook(choose) for router in routers]
    try:
        yield chosen
    finally:
        for hook in hooks:
            hook.remove()


@torch.inference_mode()
def generate(
    model: torch.nn.Module,
    module: ModuleType,
    text: torch.Tensor,
    steps: int,
    like: Run | None = None,
) -> Run:
    """Reads the text, then takes the likeliest token `steps` times.

    With `like`: the tokens and the experts that were chosen there.
    """
    # transformers 5.24 renamed the argument
    cache_name = "cache" if "cache" in inspect.signature(model.forward).parameters else _OLD_NAME
    with clocked(module) as calls, routed(model, like.routes if like else None) as routes:
        start = time.perf_counter()
        result = model(text, use_cache=True)
        logits, cache = [result.logits[0]], result.past_key_values
        prefill, rule_prefill = time.perf_counter() - start, sum(calls)
        layers = len(calls)

        tokens: list[int] = []
        seconds: list[float] = []
        for step in range(steps):
            likeliest = int(logits[-1][-1].argmax())
            tokens.append(likeliest if like is None else like.tokens[step])
            if step + 1 < steps:
                start = time.perf_counter()
                token = torch.tensor([tokens[-1:]])
                result = model(token, use_cache=True, **{cache_name: cache})
                logits.append(result.logits[0])
                seconds.append(time.perf_counter() - start)
    rule = calls[layers:]
    return Run(
        text=text.shape[1],
        tokens=tokens,
        logits=torch.cat(logits).float(),
        routes=routes,
        calls=len(calls),
        prefill=prefill,
        decode=statistics.median(seconds) * len(seconds) if seconds else 0.0,
        rule_prefill=rule_prefill,
        rule_decode=statistics.median(rule) * len(rule) if rule else 0.0,
    )


# -- the yardsticks ------------------------------------------------------------------------------


def plain(function: Callable) -> Callable:
    """transformers' own PyTorch function, without what decorates it."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def token_by_token(module: ModuleType) -> Callable:
    """The recurrence of transformers where its chunked function stands."""
    recurrent = plain(getattr(module, RECURRENT))

    def rule(
        query: Any, key: Any, value: Any, g: Any, beta: Any, chunk_size: int = 64, **options: Any
    ) -> Any:
        return recurrent(query, key, value, g=g, beta=beta, **options)

    return rule


def without_output(module: ModuleType) -> Callable:
    """The chunked function of transformers with its output set to zero."""
    chunk = plain(getattr(module, CHUNK))

    def rule(*args: Any, **options: Any) -> Any:
        output, state = chunk(*args, **options)
        return torch.zeros_like(output), state

    return rule


@contextlib.contextmanager
def counted_operators() -> Iterator[list[str]]:
    """The names of the operators of this package that were called, one for each call."""
    names: list[str] = []

    def counting(operator: Callable) -> Callable:
        @functools.wraps(operator)
        def call(*args: Any, **kwargs: Any) -> Any:
            names.append(operator.__name__)
            return operator(*args, **kwargs)

        return call

    chunk, recurrent = ops.chunk_gated_delta_rule, ops.recurrent_gated_delta_rule
    with replaced(
        ops,
        chunk_gated_delta_rule=counting(chunk),
        recurrent_gated_delta_rule=counting(recurrent),
    ):
        yield names


# -- one model in one dtype ----------------------------------------------------------------------


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


def compare(model_name: str, dtype: str, options: Options, step: Callable) -> Outcome:
    """Runs one model in one dtype both ways. `step(text)` is a context that shows progress."""
    title, module = _MODELS[model_name][0], modeling_file(model_name)
    label, text = f"{title} {dtype}", prompt(options.tokens)
    outcome = Outcome(title, dtype, options.steps)

    with step(f"{label}: build the model"):
        model = build_model(model_name, options).to(DTYPES[dtype])
    run = functools.partial(generate, model, module, text, options.steps)

    with step(f"{label}: warm up, both ways"):
        short = text[:, : min(128, options.tokens)]
        generate(model, module, short, 2)
        with switch.enabled():
            generate(model, module, short, 2)

    # bf16 passes are slow on CPUs without bf16 instructions, whoever serves the rule: one of each
    repeats = options.repeats if dtype == "fp32" else 1
    theirs: list[Run] = []
    ours: list[Run] = []
    for _ in range(repeats):
        with step(f"{label}: transformers"):
            theirs.append(run())
        like = theirs[0] if dtype == "bf16" else None
        with step(f"{label}: deltanet_ext"), switch.enabled(), counted_operators() as served:
            ours.append(run(like))
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
    for what in ("prefill", "decode", "rule_prefill", "rule_decode"):
        best = [min(getattr(r, what) for r in runs) for runs in (theirs, ours)]
        setattr(outcome, what, tuple(best))
    return outcome


# -- what the user sees --------------------------------------------------------------------------


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


def count_steps(options: Options) -> int:
    passes = sum(2 * options.repeats if dtype == "fp32" else 4 for dtype in options.dtypes)
    return len(options.models) * (passes + 4 * len(options.dtypes))


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


def missing() -> str | None:
    """What the demo needs and does not have, and how to get it."""
    packages = [p for p in ("transformers", "rich") if importlib.util.find_spec(p) is None]
    if packages:
        return (
            f"demo: {' and '.join(packages)} not installed; "
            'install with: pip install "deltanet_ext[demo]", or run: make demo'
        )
    import transformers

    transformers.logging.set_verbosity_error()  # it warns of what this demo is about
    try:
        switch.enable(quiet=True)
        switch.disable()
        for model in MODELS:
            modeling_file(model)
    except ImportError as error:
        return f"demo: {error}"
    return None


def idle_cores() -> float | None:
    """How many cores nobody used during the last third of a second; None where that is unknown."""

    def ticks() -> tuple[int, int]:
        with open("/proc/stat") as stat:
            numbers = [int(number) for number in stat.readline().split()[1:]]
        return numbers[3] + numbers[4], sum(numbers[:8])  # idle and waiting for a disk, all

    try:
        idle, all_ticks = ticks()
        time.sleep(0.3)
        later_idle, later_all = ticks()
    except (OSError, ValueError, IndexError):
        return None
    return (os.cpu_count() or 1) * (later_idle - idle) / max(1, later_all - all_ticks)


def choose_threads(wanted: int | None) -> None:
    """Threads that wait for a core that is busy elsewhere slow both ways down many times over."""
    idle = idle_cores()
    if wanted is not None:
        torch.set_num_threads(wanted)
    elif idle is not None:
        torch.set_num_threads(max(1, min(torch.get_num_threads(), round(idle))))


def environment() -> str:
    import transformers

    return (
        f"deltanet_ext {ops.build_info()['version']} ({ops.cpu_isa()}), torch {torch.__version__}, "
        f"transformers {transformers.__version__}, {torch.get_num_threads()} of "
        f"{os.cpu_count()} cores"
    )


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
