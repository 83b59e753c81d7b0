# SPDX-License-Identifier: Apache-2.0
"""Trains a two-layer Gated DeltaNet from scratch on multi-query associative recall.

    pip install "deltanet_ext[examples]"
    python examples/train_recall.py              a minute or two on one core, to over 99%
    python examples/train_recall.py --resume     goes on where it was interrupted, same curve
    python examples/train_recall.py --compare    losses next to those with transformers' function

The task is that of the DeltaNet papers (Arora et al., Zoology, arXiv:2312.04927). A sequence begins
with pairs, a key and its value each; later every key comes again once, at a random place between
random values, and the model has to name its value. A model can only do that if it has learned to
write pairs into its state and to read them back, so it learns nothing until the gradients through
the rule are right.

Every sequence is drawn anew; which one follows from the seed and the step alone, so a resumed run
sees what an uninterrupted one sees. The held-out sequences have a seed of their own.

Exit code 0: held-out accuracy (or, with --compare, agreement) as promised; 1: not; 2: bad
arguments, or something is not installed.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import deltanet_ext

Rule = Callable[..., Any]

COMPARED_STEPS = 100
AGREEMENT = 1e-3  # between two losses of about 4: what rounding in another order explains
HELD_OUT = 512  # sequences
CONVOLUTION = 4  # tokens that the short convolution sees
UNASKED = -100  # label of a token at which nothing is asked; cross_entropy leaves it out


@dataclass(frozen=True)
class Options:
    """What a run is made of; two runs with the same options give the same curve."""

    steps: int = 400
    batch: int = 64
    tokens: int = 64
    pairs: int = 8
    vocabulary: int = 64  # one half keys, the other half values
    width: int = 64
    heads: int = 2
    head_dim: int = 32
    rate: float = 1e-2
    # Longer than usual: without it rounding grows to 1e-2 within the compared steps,
    # also between two chunk sizes of transformers' function.
    warmup: int = 100
    seed: int = 0


# ---- the task ----------------------------------------------------------------------------------


def sequences(options: Options, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Tokens `[count, T]`, and as labels `[count, T]` the value where a key comes again."""
    rng = torch.Generator().manual_seed(seed)
    pairs, first_value = options.pairs, options.vocabulary // 2
    keys = torch.rand(count, first_value, generator=rng).argsort(-1)[:, :pairs]
    shape = (count, options.tokens)
    tokens = torch.randint(first_value, options.vocabulary, shape, generator=rng)
    values = tokens[:, 1 : 2 * pairs : 2]
    tokens[:, 0 : 2 * pairs : 2] = keys
    later = options.tokens - 2 * pairs
    asked = 2 * pairs + torch.rand(count, later, generator=rng).argsort(-1)[:, :pairs]
    labels = torch.full_like(tokens, UNASKED).scatter_(1, asked, values)
    return tokens.scatter_(1, asked, keys), labels


# ---- the model ---------------------------------------------------------------------------------


class GatedDeltaNet(nn.Module):
    """The token mixer (Yang, Kautz, Hatamizadeh: Gated Delta Networks, arXiv:2412.06464, figure 1):
    short convolutions, l2-normalized keys and queries, decay and write strength from the token, a
    normalized and gated output."""

    def __init__(self, options: Options, rule: Rule) -> None:
        super().__init__()
        self.rule, self.heads = rule, options.heads
        width, inner = options.width, options.heads * options.head_dim
        self.qkv = nn.Linear(width, 3 * inner, bias=False)
        self.convolution = nn.Conv1d(
            3 * inner, 3 * inner, CONVOLUTION, groups=3 * inner, padding=CONVOLUTION - 1, bias=False
        )
        self.beta_and_decay = nn.Linear(width, 2 * options.heads, bias=False)
        self.gate = nn.Linear(width, inner, bias=False)
        self.norm = nn.RMSNorm(options.head_dim, eps=1e-6)
        self.out = nn.Linear(inner, width, bias=False)
        # Memories between one token and a thousand at the start, as in Mamba-2.
        self.A_log = nn.Parameter(torch.empty(options.heads).uniform_(1, 16).log())
        step = torch.empty(options.heads).uniform_(math.log(1e-3), math.log(1e-1)).exp()
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))  # softplus of it is step

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.shape[1]
        mixed = F.silu(self.convolution(self.qkv(x).mT)[..., :tokens]).mT
        q, k, v = mixed.unflatten(-1, (3, self.heads, -1)).unbind(2)
        beta, decay = self.beta_and_decay(x).chunk(2, -1)
        g = -self.A_log.exp() * F.softplus(decay + self.dt_bias)
        out, _ = self.rule(q, k, v, g=g, beta=beta.sigmoid(), use_qk_l2norm_in_kernel=True)
        return self.out((self.norm(out) * F.silu(self.gate(x)).view_as(out)).flatten(2))


class Layer(nn.Module):
    def __init__(self, options: Options, rule: Rule) -> None:
        super().__init__()
        width = options.width
        self.before_mixer, self.before_mlp = (nn.RMSNorm(width, eps=1e-6) for _ in range(2))
        self.mixer = GatedDeltaNet(options, rule)
        self.up, self.down = (
            nn.Linear(width, 4 * width, bias=False),
            nn.Linear(2 * width, width, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.before_mixer(x))
        content, gate = self.up(self.before_mlp(x)).chunk(2, -1)
        return x + self.down(content * F.silu(gate))


class Model(nn.Module):
    def __init__(self, options: Options, rule: Rule) -> None:
        super().__init__()
        self.embedding = nn.Embedding(options.vocabulary, options.width)
        nn.init.normal_(self.embedding.weight, std=0.1)
        self.layers = nn.Sequential(*(Layer(options, rule) for _ in range(2)))
        self.norm = nn.RMSNorm(options.width, eps=1e-6)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.layers(self.embedding(tokens)))
        return F.linear(x, self.embedding.weight)  # logits


# ---- training ----------------------------------------------------------------------------------


@dataclass
class Run:
    """A model that is being trained, and its curve so far."""

    options: Options
    model: Model
    optimizer: torch.optim.Optimizer
    losses: list[float] = field(default_factory=list)  # of each step
    accuracies: list[tuple[int, float]] = field(default_factory=list)  # (steps done, held-out)

    @classmethod
    def start(cls, options: Options, rule: Rule) -> Run:
        torch.manual_seed(options.seed)
        model = Model(options, rule)
        matrices = [p for p in model.parameters() if p.dim() > 1]
        vectors = [p for p in model.parameters() if p.dim() == 1]
        groups = [
            {"params": matrices, "weight_decay": 0.1},
            {"params": vectors, "weight_decay": 0.0},
        ]
        return cls(options, model, torch.optim.AdamW(groups, lr=options.rate, betas=(0.9, 0.95)))

    @property
    def step(self) -> int:
        return len(self.losses)

    def train_step(self) -> float:
        options, step = self.options, self.step
        warm = min(1.0, (step + 1) / options.warmup)
        cosine = 0.5 + 0.5 * math.cos(math.pi * step / options.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = options.rate * warm * cosine
        # Seeds of steps are the numbers from 1 on; 0 belongs to the held-out sequences.
        tokens, labels = sequences(options, options.batch, self.first_seed + step + 1)
        asked = labels != UNASKED
        loss = F.cross_entropy(self.model(tokens)[asked], labels[asked])
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.losses.append(loss.item())
        return self.losses[-1]

    @torch.no_grad()
    def evaluate(self) -> float:
        tokens, labels = sequences(self.options, HELD_OUT, self.first_seed)
        asked = labels != UNASKED
        right = self.model(tokens)[asked].argmax(-1) == labels[asked]
        self.accuracies.append((self.step, right.double().mean().item()))
        return self.accuracies[-1][1]

    @property
    def first_seed(self) -> int:
        return self.options.seed * 1_000_000

    def save(self, path: Path) -> None:
        """In one piece: an interrupted save leaves the checkpoint before it."""
        state = {
            "options": dataclasses.asdict(self.options),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "losses": self.losses,
            "accuracies": self.accuracies,
        }
        unfinished = path.with_suffix(".unfinished")
        torch.save(state, unfinished)
        os.replace(unfinished, path)

    @classmethod
    def resume(cls, path: Path, options: Options, rule: Rule) -> Run:
        state = torch.load(path, weights_only=True)
        for name, now in dataclasses.asdict(options).items():
            if (then := state["options"].get(name)) != now:
                raise SystemExit(
                    f"train_recall: {path} was made with --{name.replace('_', '-')} {then}, "
                    f"and now it is {now}; a resumed run must have the same options"
                )
        run = cls.start(options, rule)
        run.model.load_state_dict(state["model"])
        run.optimizer.load_state_dict(state["optimizer"])
        run.losses, run.accuracies = state["losses"], state["accuracies"]
        return run


def draw(run: Run, path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")  # no display needed
    from matplotlib import pyplot as plt

    figure, left = plt.subplots(figsize=(7, 4), layout="constrained")
    left.plot(range(1, run.step + 1), run.losses, color="tab:blue", linewidth=1)
    left.set(xlabel="step", ylabel="loss, training")
    left.set_ylim(bottom=0)
    left.yaxis.label.set_color("tab:blue")
    right = left.twinx()
    right.plot(*zip(*run.accuracies, strict=True), "o-", color="tab:orange", markersize=3)
    right.set(ylabel="accuracy, held-out sequences", ylim=(0, 1.02))
    right.yaxis.label.set_color("tab:orange")
    figure.suptitle("Multi-query associative recall, two layers of Gated DeltaNet")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def train(run: Run, folder: Path, evaluate_every: int) -> float:
    """To the last step; checkpoint and picture after every evaluation. Returns the accuracy."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    folder.mkdir(parents=True, exist_ok=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns) as progress:
        task = progress.add_task("training", total=run.options.steps, completed=run.step)
        while run.step < run.options.steps:
            loss = run.train_step()
            progress.update(task, completed=run.step, description=f"loss {loss:.4f}")
            if run.step % evaluate_every == 0 or run.step == run.options.steps:
                accuracy = run.evaluate()
                progress.print(
                    f"step {run.step:5}   loss {loss:.4f}   held-out accuracy {accuracy:.2%}"
                )
                run.save(folder / "checkpoint.pt")
                draw(run, folder / "curve.png")
    return run.accuracies[-1][1]


# ---- next to transformers ----------------------------------------------------------------------


def rule_of_transformers() -> Rule:
    from transformers.models.qwen3_5 import modeling_qwen3_5

    rule: Rule = modeling_qwen3_5.torch_chunk_gated_delta_rule
    while hasattr(rule, "__wrapped__"):  # what decorates it may choose another function
        rule = rule.__wrapped__
    return rule


def compare(options: Options) -> bool:
    """Trains the same model on the same sequences with either function, step by step."""
    from rich.progress import track

    ours = Run.start(options, deltanet_ext.chunk_gated_delta_rule)
    theirs = Run.start(options, rule_of_transformers())
    for _ in track(range(min(options.steps, COMPARED_STEPS)), description="both ways"):
        ours.train_step()
        theirs.train_step()
    apart = [abs(a - b) for a, b in zip(ours.losses, theirs.losses, strict=True)]
    # max() would step over a NaN
    largest = math.nan if any(map(math.isnan, apart)) else max(apart)
    print(f"loss, first and last of {ours.step} steps")
    print(f"  deltanet_ext  {ours.losses[0]:.6f}  {ours.losses[-1]:.6f}")
    print(f"  transformers  {theirs.losses[0]:.6f}  {theirs.losses[-1]:.6f}")
    print(f"largest difference of all steps: {largest:.1e}, allowed {AGREEMENT:.0e}")
    return largest <= AGREEMENT


# ---- the command -------------------------------------------------------------------------------


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return number


def positive_float(text: str) -> float:
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number


def share(text: str) -> float:
    number = float(text)
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return number


def seed(text: str) -> int:
    number = int(text)
    if not 0 <= number < 10**9:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 999999999")
    return number


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    texts = {
        "steps": "training steps",
        "batch": "sequences per step",
        "tokens": "length of a sequence",
        "pairs": "keys with a value in a sequence",
        "vocabulary": "different tokens; the first half are keys, the rest values",
        "width": "of the model",
        "heads": "of the rule",
        "head_dim": "of keys and values",
        "rate": "largest learning rate of AdamW",
        "warmup": "steps until the learning rate is reached",
        "seed": "of weights and sequences",
    }
    kinds: dict[str, Callable[[str], Any]] = {"rate": positive_float, "seed": seed}
    for option in dataclasses.fields(Options):
        top.add_argument(
            f"--{option.name.replace('_', '-')}",
            type=kinds.get(option.name, positive),
            default=option.default,
            help=f"{texts[option.name]} ({option.default})",
        )
    top.add_argument(
        "--evaluate-every",
        type=positive,
        default=50,
        metavar="STEPS",
        help="evaluate, save and draw after so many steps (50)",
    )
    top.add_argument("--target", type=share, default=0.99, help="accuracy to reach (0.99)")
    # The matrices are so small that a second thread mostly waits.
    top.add_argument("--threads", type=positive, default=1, help="threads of torch (1)")
    top.add_argument(
        "--out",
        type=Path,
        default=Path("train_recall"),
        metavar="FOLDER",
        help="for checkpoint.pt and curve.png (train_recall)",
    )
    top.add_argument("--resume", action="store_true", help="go on from FOLDER/checkpoint.pt")
    top.add_argument(
        "--compare",
        action="store_true",
        help=f"compare losses of {COMPARED_STEPS} steps with transformers",
    )
    return top


def checked(top: argparse.ArgumentParser, given: argparse.Namespace) -> Options:
    names = [option.name for option in dataclasses.fields(Options)]
    options = Options(**{name: getattr(given, name) for name in names})
    if options.tokens < 3 * options.pairs:
        top.error(
            f"--tokens {options.tokens}: {options.pairs} pairs and as many questions need "
            f"{3 * options.pairs}"
        )
    if options.vocabulary < 2 * options.pairs:
        top.error(
            f"--vocabulary {options.vocabulary}: {options.pairs} different keys need "
            f"{2 * options.pairs}"
        )
    if options.head_dim > 256:
        top.error(f"--head-dim {options.head_dim}: supported are 1 to 256")
    if given.resume and given.compare:
        top.error("--resume and --compare exclude each other")
    if given.resume and not (given.out / "checkpoint.pt").exists():
        top.error(f"--resume: there is no {given.out / 'checkpoint.pt'}")
    needed = ("rich", "transformers") if given.compare else ("rich", "matplotlib")
    if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
        top.error(
            f"{' and '.join(missing)} not installed; "
            'install with: pip install "deltanet_ext[examples]"'
        )
    return options


def main(arguments: list[str] | None = None) -> int:
    top = parser()
    given = top.parse_args(arguments)
    options = checked(top, given)
    torch.set_num_threads(given.threads)
    if given.compare:
        return 0 if compare(options) else 1

    rule = deltanet_ext.chunk_gated_delta_rule
    if given.resume:
        run = Run.resume(given.out / "checkpoint.pt", options, rule)
        print(f"resumed after step {run.step}")
    else:
        run = Run.start(options, rule)
    accuracy = train(run, given.out, given.evaluate_every)
    print(
        f"held-out accuracy {accuracy:.2%}, wanted {given.target:.0%}; "
        f"curve: {given.out / 'curve.png'}"
    )
    return 0 if accuracy >= given.target else 1


if __name__ == "__main__":
    sys.exit(main())
