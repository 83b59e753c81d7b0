# SPDX-License-Identifier: Apache-2.0
"""What a model does when it is asked, by whichever functions: the runs that are compared."""

from __future__ import annotations

import contextlib
import functools
import inspect
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from deltanet_ext import ops

CHUNK, RECURRENT = "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"
_OLD_NAME = "past_key_values"

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
