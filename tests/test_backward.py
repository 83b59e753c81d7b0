# SPDX-License-Identifier: Apache-2.0
"""Gradients: right, exact, the same bits everywhere, and in every place where autograd reaches."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gradients import (
    CHUNK,
    FP32_FLOOR,
    GATES,
    NAMES,
    NARROW,
    NARROW_GATES,
    backward,
    by_recurrence,
    judge,
    judge_fp32,
    judge_gates,
    judge_packed,
    leaves,
    ours,
    upstream,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import deltanet_ext
from cases import CASES, STRESS, Case, case_named, name_of, one_thread
from closeness import assert_same_bits, rmse_ratio
from deltanet_ext import reference
from deltanet_ext._autograd import SEGMENT_TOKENS

RECURRENT = deltanet_ext.recurrent_gated_delta_rule
OPS = torch.ops.deltanet_ext
OPERATOR = "chunk_gated_delta_rule_backward"
# ---- right -----------------------------------------------------------------------------

SMALL = {"T": 19, "HK": 1, "HV": 3, "K": 3, "V": 5, "state": torch.float64}
GRADCHECK = [
    Case("gradcheck", **SMALL),
    Case("gradcheck raw", raw_gate=True, raw_beta=True, neg_eigval=True, **SMALL),
    Case("gradcheck no l2norm", keys="unit", l2norm=False, scale=0.7, **SMALL),
    Case("gradcheck positive", g="large, both signs", state_v_first=True, **(SMALL | {"T": 7})),
    Case("gradcheck packed", cu=(0, 0, 3, 11), **(SMALL | {"T": 13})),
    Case("gradcheck plain", g="none", beta="none", B=2, HK=2, HV=2, T=5, K=4, V=2),
]


@pytest.mark.parametrize("function", [CHUNK, pytest.param(RECURRENT, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", GRADCHECK, ids=str)
def test_gradcheck(case: Case, function: Callable[..., Any]) -> None:
    args = leaves(case.inputs(torch.float64), torch.float64)
    names = [n for n in NAMES if args.get(n) is not None]

    def call(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return function(**(args | dict(zip(names, tensors, strict=True))))

    with one_thread():
        assert torch.autograd.gradcheck(call, [args[n] for n in names], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("uses", ["output, state", "output", "state"])
def test_whichever_result_is_used(uses: str, isa: str) -> None:
    judge_fp32(Case("uses", T=61, HV=3, K=20, V=28, state=torch.float32), uses=uses)


ORDINARY = (
    [c for c in CASES["head dims"] if c.K * c.V < 5000]
    + CASES["heads"] + CASES["states"] + CASES["scales"] + CASES["plain"] + CASES["packed"]
    + CASES["batches"] + [c for c in CASES["tokens"] if c.T < 70] + CASES["gates"]
)  # fmt: skip
QUICK = {
    "K=1 V=1", "K=17 V=33", "K=7 V=64", "K=65 V=63", "HK=2 HV=6", "state V first",
    "state in bf16", "scale 0.0", "scale 100.0", "packed 64 [0,0,64]", "packed 0 [0,0]",
    "packed 30 [0]", "packed 128 [0,100]", "packed 130 [0,65,65,65,66,120]", "B=0", "B=2", "T=0",
    "T=1", "T=4", "T=25", "T=64", "gate in kernel", "beta up to 2 in kernel", "g positive",
    "g strong growth", "g huge negative",
}  # fmt: skip


def quick_or_slow(cases: list[Case], quick: set[str]) -> list[Any]:
    slow = pytest.mark.slow
    return [pytest.param(c, id=str(c), marks=() if c.name in quick else slow) for c in cases]


@pytest.mark.parametrize("case", quick_or_slow(ORDINARY, QUICK))
def test_ordinary(case: Case, poison: None) -> None:
    judge_fp32(case)


@pytest.mark.parametrize("case", quick_or_slow(ORDINARY, {"T=25", "T=1", "packed 64 [0,0,64]"}))
def test_recurrent(case: Case, poison: None) -> None:
    judge_fp32(case, RECURRENT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=name_of)
@pytest.mark.parametrize("name", ["T=65", "g positive", "beta up to 2 in kernel", "narrow gates"])
def test_narrow(name: str, dtype: torch.dtype, isa: str) -> None:
    case = case_named(name)
    got = ours(case, dtype)
    args = case.inputs(dtype)
    for n, x in got.items():
        assert x.dtype == args[n].dtype
    bounds = {"g": NARROW_GATES, "beta": NARROW_GATES, "else": NARROW}
    judge(got, by_recurrence(case, dtype, torch.float64), None, bounds)


def test_fp64() -> None:
    case = Case("fp64", T=70, HK=2, HV=4, K=24, V=40, state=torch.float64)
    want = by_recurrence(case, torch.float64, torch.float64)
    judge(ours(case, torch.float64), want, None, {"else": 1e-12})


# ---- exact -----------------------------------------------------------------------------


@pytest.mark.parametrize("case", quick_or_slow(STRESS, {
    "identical keys, beta 1, g zero", "identical keys, beta 1.999, g strong",
    "zero keys, beta 1, g zero", "identical keys, g drop", "identical keys, g drop-first",
    "identical keys, g positive", "identical keys, g some -inf", "K=8, identical keys, beta 1",
    "tiny keys, g zero",
}))  # fmt: skip
def test_stress(case: Case) -> None:
    judge_fp32(case)


@pytest.mark.parametrize("beta", ["sigmoid", "0"])
@pytest.mark.parametrize("gate", GATES)
def test_gates(gate: str, beta: str, isa: str) -> None:
    judge_gates(gate, beta)


@pytest.mark.slow
@pytest.mark.parametrize("function", [CHUNK, RECURRENT])
@pytest.mark.parametrize(
    "cu",
    [None, (0, 700, SEGMENT_TOKENS + 1000, 2 * SEGMENT_TOKENS + 1300)],
    ids=["one", "packed"],
)
def test_long_sequences_start_from_saved_states(
    cu: tuple[int, ...] | None, function: Callable[..., Any]
) -> None:
    T = 2 * SEGMENT_TOKENS + 1300 if cu else 2 * SEGMENT_TOKENS + 7
    case = Case("long", T=T, HV=2, K=8, V=12, cu=cu, state=torch.float32)
    want = by_recurrence(case, torch.float32, torch.float64)
    judge(ours(case, function=function), want, None, {"else": FP32_FLOOR})


def test_saved_states_are_few_and_right() -> None:
    case = Case("saved", B=2, T=2 * SEGMENT_TOKENS, HV=2, K=8, V=12, state=torch.float32)
    args = case.inputs()
    positional = [args.get(n) for n in NAMES[:6]] + [None] * 3
    options = (8**-0.5, False, True, False, False, False, False)
    for form in ("chunk", "recurrent"):
        saving = getattr(OPS, f"{form}_gated_delta_rule_forward_saving")
        out, _, saved = saving(*positional, *options)
        assert saved.shape == (2, case.T // SEGMENT_TOKENS, 2, 8, 12)
        first = {n: x[:, :SEGMENT_TOKENS] for n, x in args.items() if n in NAMES[:5]}
        function = getattr(deltanet_ext, f"{form}_gated_delta_rule")
        short_out, state = function(
            **first, initial_state=args["initial_state"], output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        assert_same_bits(saved[:, 0], state)
        assert_same_bits(out[:, :SEGMENT_TOKENS], short_out)
        assert not saved[:, 1].any()  # no second segment starts


def test_the_operator_without_saved_states_runs_the_forward_pass_again() -> None:
    case = Case("again", T=SEGMENT_TOKENS + 50, HV=2, K=8, V=12, state=torch.float32)

    def operator(**args: Any) -> Any:
        inputs = [args.get(n) for n in NAMES[:6]] + [None] * 3
        return OPS.chunk_gated_delta_rule_forward(*inputs, 8**-0.5, True, True, *[False] * 4)

    d_out, d_state = upstream(case, torch.float32)
    got = backward(operator, leaves(case.inputs()), d_out, d_state)
    for name, want in ours(case).items():
        assert_same_bits(got[name], want, name)


# ---- packed sequences, tails, nothing at all ----------------------------------------------


def test_packed_sequences_are_as_if_alone(poison: None) -> None:
    case = Case(
        "packed grads", T=100, HV=3, K=24, V=40, cu=(0, 17, 17, 50, 90), state=torch.float32
    )
    judge_packed(case)


# ---- the same bits ---------------------------------------------------------------------


BITS = [
    Case("bits", B=2, T=200, HK=2, HV=4, K=40, V=48, raw_gate=True, state=torch.float32),
    # Fewer key heads than workers, chunks in pieces, a second segment.
    Case("bits, one key head", T=SEGMENT_TOKENS + 300, HK=1, HV=3, K=40, V=48, g="positive",
         state=torch.float32),
    Case("bits, one key head, packed", T=3000, HK=1, HV=2, K=24, V=20, raw_gate=True,
         cu=(0, 1200, 1200, 1300, 2990), state=torch.float32),
]  # fmt: skip


@pytest.mark.parametrize("case", BITS, ids=str)
def test_same_bits_twice_and_for_any_number_of_threads(
    case: Case, threads: Callable[[int], None]
) -> None:
    threads(1)
    want = ours(case)
    for count in (1, 2, 3, 8):
        threads(count)
        for name, x in ours(case).items():
            assert_same_bits(x, want[name], f"d{name} with {count} threads")


def test_no_state_and_zeros_agree() -> None:
    case = Case("no state", T=70, HV=2, K=24, V=24)
    args = case.inputs()
    d_out, d_state = upstream(case, torch.float32)
    want = backward(CHUNK, leaves(args), d_out, d_state)
    zeros = leaves({**args, "initial_state": torch.zeros(1, 2, 24, 24)})
    got = backward(CHUNK, zeros, d_out, d_state)
    for name, x in want.items():
        assert_same_bits(got[name], x, name)


# ---- in every place where autograd reaches ----------------------------------------------


@pytest.mark.parametrize("needed", NAMES)
def test_only_what_is_needed(needed: str, poison: None) -> None:
    """One gradient alone has the bits that it has among all, and no other one appears."""
    case = Case("one", T=50, HV=3, K=24, V=24, raw_gate=True, raw_beta=True, state=torch.float32)
    args = case.inputs()
    want = ours(case)[needed]
    args[needed] = args[needed].clone().requires_grad_()
    got = backward(CHUNK, args, *upstream(case, torch.float32))
    assert_same_bits(got[needed], want)
    assert all(x is None for name, x in got.items() if name != needed)


def test_strided_inputs_and_gradients() -> None:
    case = Case("strides", B=2, T=50, HK=2, HV=4, K=24, V=32, state=torch.float32)
    args, (d_out, d_state) = case.inputs(), upstream(case, torch.float32)
    want = backward(CHUNK, leaves(args), d_out, d_state)
    strided = leaves(args)
    for name in NAMES[:6]:
        x = args[name]
        strided[name] = x.transpose(1, -1).contiguous().transpose(1, -1).requires_grad_()
    got = backward(CHUNK, strided, d_out.mT.contiguous().mT, d_state.mT.contiguous().mT)
    for name, x in want.items():
        assert_same_bits(got[name], x, name)


def test_expanded_gradients() -> None:
    """`.sum()` makes a gradient of stride 0."""
    case = Case("expanded", T=50, HV=3, K=24, V=24, state=torch.float32)
    args = leaves(case.inputs())
    out, state = CHUNK(**args)
    (out.sum() + state.sum()).backward()
    want = backward(CHUNK, leaves(case.inputs()), torch.ones_like(out), torch.ones_like(state))
    for name, x in want.items():
        assert_same_bits(args[name].grad, x, name)


def test_one_tensor_in_two_places() -> None:
    x = torch.randn(1, 30, 2, 16, requires_grad=True)
    CHUNK(x, x, x, None, None, use_qk_l2norm_in_kernel=True)[0].square().sum().backward()
    y = x.detach().double().requires_grad_()
    out, _ = reference.recurrent(y, y, y, None, None, use_qk_l2norm_in_kernel=True)
    out.square().sum().backward()
    assert rmse_ratio(x.grad, y.grad) < 1e-5


class Calls(TorchDispatchMode):
    """Names and arguments of this package's operators, as they are called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "deltanet_ext":
            self.seen.append((func._opname, args))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("function", [CHUNK, RECURRENT])
def test_states_are_saved_and_gradients_made_only_where_they_are_needed(
    function: Callable[..., Any],
) -> None:
    args = case_named("T=33").inputs()
    with Calls() as calls:
        function(**args)
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                function(**leaves(args))
    assert len(calls.seen) == 3
    assert not any(name.endswith("_saving") for name, _ in calls.seen)
    args["value"].requires_grad_()
    with Calls() as calls:
        function(**args)[0].sum().backward()
    (forward, _), (name, given) = calls.seen
    assert forward.endswith("_saving")
    assert (name, given[-1]) == (OPERATOR, 1 << NAMES.index("value"))


@pytest.mark.parametrize("function", [CHUNK, RECURRENT])
def test_nothing_is_recorded_without_need(function: Callable[..., Any]) -> None:
    args = leaves(case_named("T=33").inputs())
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            for x in function(**args):
                assert x.grad_fn is None
                assert not x.requires_grad


def test_second_derivatives_are_refused() -> None:
    args = leaves(case_named("T=33").inputs())
    out, _ = CHUNK(**args)
    (grad,) = torch.autograd.grad(out.sum(), args["value"], create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives are not built"):
        grad.sum().backward()


def test_checkpoint() -> None:
    case = case_named("T=65")
    want = ours(case)
    args = leaves(case.inputs())

    def call(*tensors: Tensor) -> Any:
        return CHUNK(**(args | dict(zip(NAMES[:6], tensors, strict=True))))

    out, state = checkpoint(call, *(args[n] for n in NAMES[:6]), use_reentrant=False)
    torch.autograd.backward([out, state], upstream(case, torch.float32))
    for name, x in want.items():
        assert_same_bits(args[name].grad, x, name)


@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16], ids=name_of)
def test_autocast(cast: torch.dtype) -> None:
    case = case_named("T=65")
    want = ours(case)
    args = leaves(case.inputs())
    with torch.autocast("cpu", dtype=cast):
        out, state = CHUNK(**args)
    torch.autograd.backward([out, state], upstream(case, torch.float32))
    for name, x in want.items():
        assert_same_bits(args[name].grad, x, name)


@pytest.mark.parametrize("function", [CHUNK, RECURRENT])
def test_compile(function: Callable[..., Any]) -> None:
    case = case_named("T=65")
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    got = backward(compiled, leaves(case.inputs()), *upstream(case, torch.float32))
    for name, x in ours(case, function=function).items():
        assert_same_bits(got[name], x, name)


OPCHECK = [
    Case("opcheck grads", B=2, T=20, HK=2, HV=4, K=8, V=12, state=torch.float32),
    Case(
        "opcheck grads raw", T=9, HV=3, K=5, V=7, raw_gate=True, raw_beta=True, state_v_first=True
    ),
]


@pytest.mark.parametrize("case", OPCHECK, ids=str)
def test_opcheck(case: Case) -> None:
    args = leaves(case.inputs())
    inputs = [args.get(n) for n in NAMES[:6]] + [None, args.get("A_log"), args.get("dt_bias")]
    flags = (case.l2norm, case.raw_gate, case.raw_beta, case.neg_eigval, case.state_v_first)
    torch.library.opcheck(
        OPS.chunk_gated_delta_rule_forward_saving.default, (*inputs, 0.5, True, *flags)
    )
    torch.library.opcheck(OPS.chunk_gated_delta_rule_forward.default, (*inputs, 0.5, True, *flags))
    plain = [x.detach() if isinstance(x, Tensor) else x for x in inputs]
    d_out, d_state = upstream(case, torch.float32)
    present = sum(1 << i for i, n in enumerate(NAMES) if args.get(n) is not None)
    for wanted in (present, present & 0b10101):
        torch.library.opcheck(
            OPS.chunk_gated_delta_rule_backward.default,
            (d_out, d_state, *plain, None, 0.5, *flags, wanted),
        )


def test_the_operator_checks_what_it_gets() -> None:
    args = Case("checks", T=SEGMENT_TOKENS + 1, K=4, V=4).inputs()
    inputs = [args.get(n) for n in NAMES[:6]] + [None] * 3
    d_out = torch.zeros_like(args["value"])

    def call(d_out: Tensor | None, saved: Tensor | None, wanted: int) -> None:
        OPS.chunk_gated_delta_rule_backward(
            d_out, None, *inputs, saved, 0.5, True, *[False] * 4, wanted
        )

    with pytest.raises(RuntimeError, match="saved_states is missing; sequences of more than 1056"):
        call(d_out, None, 1)
    states = torch.zeros(1, 1, 2, 4, 4)
    call(d_out, states, 1)
    with pytest.raises(RuntimeError, match="grad_out has shape"):
        call(d_out[:, 1:], states, 1)
    with pytest.raises(RuntimeError, match="grad_out is float64 and query is float32"):
        call(d_out.double(), states, 1)
    with pytest.raises(RuntimeError, match="gradient of a missing argument"):
        call(d_out, states, 1 << NAMES.index("initial_state"))


# ---- the other operators ---------------------------------------------------------------


@pytest.mark.parametrize("cu", [None, (0, 5, 5, 20)])
def test_gradcheck_of_the_transition(cu: tuple[int, ...] | None) -> None:
    case = Case("transition", T=21, HV=3, K=3, V=4, cu=cu)
    args = leaves(case.inputs(torch.float64))
    names = NAMES[1:5]

    def call(*tensors: Tensor) -> Any:
        return deltanet_ext.chunk_transition(
            *tensors, use_qk_l2norm_in_kernel=True, cu_seqlens=args.get("cu_seqlens")
        )

    with one_thread():
        assert torch.autograd.gradcheck(call, [args[n] for n in names])


def test_gradcheck_of_the_inverse() -> None:
    L = torch.randn(2, 6, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(deltanet_ext.unit_lower_triangular_inverse, (L,))


# ---- a model ---------------------------------------------------------------------------


def test_a_model_of_transformers_trains_alike() -> None:
    pytest.importorskip("transformers", minversion="5.15")
    from test_integration_transformers import IDS, build

    from deltanet_ext.integrations import transformers as switch

    def losses(switched: bool) -> list[float]:
        model = build("qwen3_5").train()
        with (
            torch.no_grad()
        ):  # with weights as large as there, Adam magnifies rounding within steps
            for weight in model.parameters():
                weight.mul_(0.1 if weight.dim() > 1 else 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        if switched:
            switch.enable()
        try:
            seen = []
            for _ in range(5):
                loss = model(IDS, labels=IDS, use_cache=False).loss
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                seen.append(loss.item())
        finally:
            switch.disable()
        return seen

    want, got = losses(False), losses(True)
    assert want[-1] < want[0]
    assert all(math.isclose(a, b, rel_tol=1e-3) for a, b in zip(want, got, strict=True)), (
        want,
        got,
    )
