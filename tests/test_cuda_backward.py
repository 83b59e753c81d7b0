# SPDX-License-Identifier: Apache-2.0
"""Gradients on CUDA, kernels and all, on the emulator: cases and yardsticks of test_backward.py.

Then what only CUDA promises: no order of threads changes a bit, nor does it whether strips run side
by side or one block walks over them, and what a captured graph replays does not depend on the
contents of `cu_seqlens`.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from gradients import (
    ABSOLUTE_FLOOR,
    CHUNK,
    FP32_FLOOR,
    GATES,
    NAMES,
    Gradients,
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

import deltanet_ext
import emulated
from cases import CASES, Case, case_named, name_of, one_thread
from closeness import assert_close, assert_same_bits, rmse_ratio
from deltanet_ext import reference
from deltanet_ext._autograd import SEGMENT_TOKENS

if reason := emulated.why_not():
    pytest.skip(f"emulated CUDA operators: {reason}", allow_module_level=True)

pytestmark = pytest.mark.slow  # the first run compiles for minutes

RECURRENT = deltanet_ext.recurrent_gated_delta_rule
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
OPERATOR = "chunk_gated_delta_rule_backward"
# Half of what flash-linear-attention allows itself, for dg and dbeta and for the rest. Rounding a
# gradient to bf16 alone is 1.7e-3.
NARROW, NARROW_GATES = 2e-3, 5e-3


@pytest.fixture(autouse=True)
def on_the_emulator() -> Iterator[None]:
    with emulated.path():
        yield


def reference_in_fp64(**args: Any) -> Any:
    return reference.recurrent(**args, dtype=torch.float64)


def seed_of(name: str) -> int:
    """A schedule for each test: in order, in reverse, or one of many random ones."""
    return zlib.crc32(name.encode()) % 50


# ---- the case table ------------------------------------------------------------------------------

LISTED = (
    "T=0", "T=1", "T=2", "T=15", "T=16", "T=17", "T=33", "T=65", "T=127",
    "HK=1 HV=1", "HK=1 HV=3", "HK=2 HV=6", "HK=3 HV=3",
    "K=1 V=1", "K=1 V=256", "K=256 V=1", "K=2 V=3", "K=9 V=15", "K=17 V=33", "K=33 V=100",
    "K=127 V=129", "K=100 V=60", "K=255 V=13", "K=13 V=255",
    "B=0", "B=2",
    "g model", "g none", "g strong", "g positive", "g all positive", "g strong growth",
    "g some -inf", "g huge negative", "beta none", "beta 0", "beta 0 to 2",
    "narrow gates", "gate in kernel", "gate in kernel, narrow", "beta sigmoid in kernel",
    "beta up to 2 in kernel",
    "state in fp64", "state in bf16", "state in fp16", "state V first", "state V first, none",
    "scale 0.0", "scale -0.5", "no l2norm, unit keys", "no l2norm, small keys",
    "identical keys, beta 1, g none", "identical keys, beta 1.999, g strong",
    "alternating keys, beta 1, g zero", "some zero keys, beta 1, g zero",
    "zero keys, beta 1.999, g zero",
    "identical keys, g drop", "identical keys, g drop-first", "identical keys, g positive",
    "identical keys, g some -inf", "tiny keys, g zero",
    "K=8, identical keys, beta 1", "K=1, beta 1, g 0.5", "K=4, beta 1, g 0.25",
    "norm 2 keys, beta 1, g zero, T=16",
)  # fmt: skip
ALL = {case.name: case for group in CASES.values() for case in group}
STRIPS_LONG = [
    Case("two strips", T=200, HK=2, HV=4, K=20, V=24, state=FP32),
    Case("strips, g none", T=353, HV=1, K=9, V=20, g="none", state=FP32),
    Case("strips, g positive", T=360, HV=2, K=12, V=8, g="positive", raw_beta=True, state=FP32),
]
SELECTED = [*(ALL[name] for name in LISTED), *STRIPS_LONG, *CASES["packed"]]


@pytest.mark.parametrize("case", SELECTED, ids=str)
def test_is_as_exact_as_the_recurrence(case: Case, poison: None) -> None:
    with emulated.schedule(seed_of(case.name)), emulated.backward_mode("parallel"):
        judge_fp32(case)


@pytest.mark.parametrize("name", ["T=17", "g positive", "packed100[0,64,64,100]"])
def test_recurrent(name: str, poison: None) -> None:
    with emulated.schedule(seed_of(name)):
        judge_fp32(case_named(name), RECURRENT)


@pytest.mark.parametrize("uses", ["output", "state"])
def test_whichever_result_is_used(uses: str, poison: None) -> None:
    judge_fp32(Case("uses", T=61, HV=3, K=20, V=28, state=FP32), uses=uses)


@pytest.mark.parametrize("mode", ["parallel", "walk"])
@pytest.mark.parametrize("sizes", [(1, 0), (0, 5), (0, 0)], ids=str)
def test_without_tokens_sums_over_gates_are_zero(
    sizes: tuple[int, int], mode: str, poison: None
) -> None:
    case = Case("no tokens", B=sizes[0], T=sizes[1], HV=4, K=8, V=8, state=FP32, raw_gate=True)
    args = case.inputs()
    for name in ("A_log", "dt_bias", "initial_state"):
        args[name] = args[name].requires_grad_()
    with emulated.backward_mode(mode):
        out, states = deltanet_ext.chunk_gated_delta_rule(**args)
        (out.sum() + states.sum()).backward()
    assert (args["A_log"].grad == 0).all()
    assert (args["dt_bias"].grad == 0).all()
    assert (args["initial_state"].grad == 1).all()


# bf16 with rows of whole quads runs the forward pass on tensor cores.
NARROW_CASES = [
    *(ALL[name] for name in ("T=17", "HK=1 HV=3", "K=33 V=100", "g positive", "state V first",
                             "gate in kernel, narrow", "packed100[0,64,64,100]")),
    Case("aligned", T=70, HV=2, K=64, V=64, state=FP32),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=name_of)
@pytest.mark.parametrize("case", NARROW_CASES, ids=str)
def test_narrow_inputs(case: Case, dtype: torch.dtype, poison: None) -> None:
    with emulated.schedule(seed_of(f"{case} {dtype}")):
        got = ours(case, dtype)
    args = case.inputs(dtype)
    for name, x in got.items():
        assert x is None or x.dtype == args[name].dtype
    bounds = {"g": NARROW_GATES, "beta": NARROW_GATES, "else": NARROW, "narrow": NARROW}
    judge(got, by_recurrence(case, dtype, torch.float64), None, bounds)


@pytest.mark.parametrize("beta", ["sigmoid", "0"])
@pytest.mark.parametrize("gate", GATES)
def test_gates(gate: str, beta: str) -> None:
    judge_gates(gate, beta)


# ---- saved states --------------------------------------------------------------------------------

both_forms = pytest.mark.parametrize("function", [CHUNK, RECURRENT], ids=["chunk", "recurrent"])
LONG = SEGMENT_TOKENS + 130


@both_forms
@pytest.mark.parametrize("cu", [None, (0, 50, SEGMENT_TOKENS + 60, LONG)], ids=["one", "packed"])
def test_long_sequences_start_from_saved_states(
    cu: tuple[int, ...] | None, function: Callable[..., Any], poison: None
) -> None:
    case = Case("long", T=LONG, HV=1, K=8, V=12, cu=cu, state=FP32)
    want = by_recurrence(case, FP32, torch.float64)
    judge(ours(case, function=function), want, None, {"else": FP32_FLOOR})


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=name_of)
@pytest.mark.parametrize("form", ["chunk", "recurrent"])
def test_saved_states_are_few_and_right(form: str, dtype: torch.dtype, poison: None) -> None:
    """bf16: the tensor-core path saves none on its way, and others make them."""
    case = Case("saved", B=2, T=2 * SEGMENT_TOKENS, HV=1, K=8, V=16, state=FP32)
    args = case.inputs(dtype)
    inputs = [args.get(n) for n in NAMES[:6]] + [None] * 3
    options = (8**-0.5, True, True, False, False, False, False)
    out, state, saved = emulated.call(f"{form}_gated_delta_rule_forward_saving", *inputs, *options)
    plain = emulated.call(f"{form}_gated_delta_rule_forward", *inputs, *options)
    assert_same_bits(out, plain[0])
    assert_same_bits(state, plain[1])
    assert saved.shape == (2, 2, 1, 8, 16)
    first = {n: x[:, :SEGMENT_TOKENS] if n in NAMES[:5] else x for n, x in args.items()}
    with one_thread():
        assert_close(saved[:, 0], reference.recurrent(**first, dtype=torch.float64)[1], 1e-5)
    assert not saved[:, 1].any()  # no second segment starts


# ---- segments of the reverse scan ----------------------------------------------------------------

# Gates that forget would hide what segments hand on.
SEGMENTED = [
    Case("segments, g zero", T=720, HV=1, K=8, V=12, g="zero", state=FP32),
    Case("segments, g model", T=410, B=2, HK=1, HV=2, K=20, V=36, state=FP32),
    Case("segments, g positive", T=400, HV=1, K=9, V=7, g="positive", raw_beta=True, state=FP32),
    Case("segments, strong keys", T=720, HV=1, K=8, V=8, g="zero", beta="1.999", state=FP32,
         keys="correlated"),
    Case("segments, wide", T=390, HV=1, K=132, V=20, g="zero", state=FP32),
    Case("segments, state V first", T=400, HV=2, K=6, V=10, g="zero", state=FP32,
         state_v_first=True),
    Case("segments, packed", T=760, HK=1, HV=2, K=8, V=12, g="zero", state=FP32,
         cu=(0, 17, 17, 577, 740)),
    Case("segments, packed, long ones", T=740, HV=1, K=8, V=12, g="zero", state=FP32,
         cu=(0, 0, 176, 740)),
]  # fmt: skip
STRIPS = pytest.mark.parametrize("strips", [1, 2])


@STRIPS
@pytest.mark.parametrize("case", SEGMENTED, ids=str)
def test_segments(case: Case, strips: int, poison: None) -> None:
    with emulated.schedule(seed_of(case.name)), emulated.segment_strips(strips):
        judge_fp32(case)


@pytest.mark.parametrize("uses", ["output", "state"])
def test_segments_whichever_result_is_used(uses: str, poison: None) -> None:
    with emulated.segment_strips(1):
        judge_fp32(SEGMENTED[0], uses=uses)


def test_segments_of_narrow_inputs(poison: None) -> None:
    case = SEGMENTED[1]
    with emulated.segment_strips(1):
        got = ours(case, BF16)
    bounds = {"g": NARROW_GATES, "beta": NARROW_GATES, "else": NARROW, "narrow": NARROW}
    judge(got, by_recurrence(case, BF16, torch.float64), None, bounds)


def test_long_sequences_are_cut_and_batch_invariant_calls_are_not(poison: None) -> None:
    """The latter have the bits of whole sequences, alone and packed. The emulated device has four
    processors: this block alone leaves enough of them idle."""
    case = Case("long", T=LONG, HV=1, K=8, V=12, g="zero", state=FP32)
    cut = ours(case)
    with emulated.segment_strips(2):
        assert_same_bits(ours(case)["initial_state"], cut["initial_state"])
    with deltanet_ext.batch_invariant(True):
        whole = ours(case)
        judge_packed(
            Case("long", T=900, HV=1, K=8, V=12, g="zero", cu=(0, 10, 10, 820, 890), state=FP32)
        )
    assert not torch.equal(cut["initial_state"], whole["initial_state"])
    for name, x in whole.items():
        if x is not None:
            assert rmse_ratio(cut[name], x) < FP32_FLOOR, name


def test_a_map_that_overflows_is_nan_and_never_a_wrong_number(poison: None) -> None:
    """Gates of +1 make the map of the second segment infinite. Nothing comes from behind it: state,
    values and gradients are zero there. Serially zeros stay zeros; the map times zero is NaN, which
    is what the first segment starts from, in front of a token that forgets all."""
    case = Case("overflow", T=4 * 176, HV=1, K=8, V=8, g="zero", state=FP32)
    args = case.inputs()
    args["g"][:, 175], args["g"][:, 176:352] = -torch.inf, 1.0
    args["value"][:, 175:] = 0
    d_out, d_state = upstream(case, FP32)
    d_out[:, 176:], d_state = 0, torch.zeros_like(d_state)

    with one_thread():
        want = backward(reference_in_fp64, leaves(args, torch.float64), d_out, d_state)
    with emulated.segment_strips(4):
        judge(backward(CHUNK, leaves(args), d_out, d_state), want, None, {"else": FP32_FLOOR})
    with emulated.segment_strips(1):
        cut = backward(CHUNK, leaves(args), d_out, d_state)
    assert cut["initial_state"].isnan().all()
    for name in NAMES[:5]:
        known = ~cut[name].isnan()
        assert known[:, 176:].all(), name
        assert known[:, :176].all() == (name == "query"), name  # dq reads no adjoint state
        assert rmse_ratio(cut[name][known], want[name][known]) <= FP32_FLOOR, name


def test_every_schedule_gives_the_same_bits_with_segments() -> None:
    with emulated.segment_strips(1):
        want = ours(SEGMENTED[6])
        for seed in (1, 2):
            with emulated.schedule(seed):
                got = ours(SEGMENTED[6])
            for name, x in want.items():
                if x is not None:
                    assert_same_bits(got[name], x, f"d{name}, seed {seed}")


# ---- the walk ------------------------------------------------------------------------------------

WALKS = [
    Case("walk, several segments", T=2 * SEGMENT_TOKENS + 200, HV=2, K=8, V=12, g="zero",
         state=FP32),
    Case("walk, segments end with it", B=2, T=2 * SEGMENT_TOKENS, HV=1, K=4, V=8, g="model",
         state=FP32),
    Case("walk, packed segments", T=2 * SEGMENT_TOKENS, HK=1, HV=3, K=5, V=9, g="zero", state=FP32,
         cu=(0, 0, 7, SEGMENT_TOKENS + 200, 2 * SEGMENT_TOKENS - 30)),
    Case("walk, more of them than slots", B=14, T=30, HV=2, K=12, V=20, raw_gate=True, state=FP32),
    Case("walk, wide", T=390, HV=2, K=132, V=36, g="zero", state=FP32),
    Case("walk, V first", T=400, HV=3, K=6, V=10, raw_gate=True, state=FP32, state_v_first=True),
]  # fmt: skip
GATE_SUMS = NAMES[6:]  # in fp64, strip by strip or sequence by sequence


def assert_same_gradients(got: Gradients, want: Gradients) -> None:
    for name, x in want.items():
        if x is None:
            assert got[name] is None, name
        elif name in GATE_SUMS:
            torch.testing.assert_close(got[name], x, rtol=2**-23, atol=0)
        else:
            assert_same_bits(got[name], x, f"d{name}")


def walk_and_parallel(case: Case, uses: str = "output, state") -> tuple[Gradients, Gradients]:
    """Nothing is cut into segments."""
    with emulated.backward_mode("parallel"), emulated.segment_strips(100):
        want = ours(case, uses=uses)
    with emulated.backward_mode("walk"), emulated.schedule(seed_of(f"walk {case.name}")):
        return ours(case, uses=uses), want


@pytest.mark.parametrize("case", [*SELECTED, *SEGMENTED, *WALKS], ids=str)
def test_a_walk_gives_the_bits_of_the_parallel_stages(case: Case, poison: None) -> None:
    assert_same_gradients(*walk_and_parallel(case))


@pytest.mark.parametrize("uses", ["output", "state"])
def test_a_walk_whichever_result_is_used(uses: str, poison: None) -> None:
    case = Case("uses", T=361, HV=3, K=20, V=28, g="positive", state=FP32)
    assert_same_gradients(*walk_and_parallel(case, uses))


@pytest.mark.parametrize("name", ["HK=1 HV=3", "K=17 V=33", "g positive", "packed100[0,64,64,100]"])
def test_a_walk_is_as_exact_as_the_recurrence(name: str, poison: None) -> None:
    with emulated.schedule(seed_of(name)), emulated.backward_mode("walk"):
        judge_fp32(case_named(name))


@pytest.mark.parametrize("case", WALKS[:3], ids=str)
def test_a_walk_starts_from_saved_states(case: Case, poison: None) -> None:
    with emulated.backward_mode("walk"):
        got = ours(case)
    judge(got, by_recurrence(case, FP32, torch.float64), None, {"else": FP32_FLOOR})


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=name_of)
def test_a_walk_with_narrow_inputs(dtype: torch.dtype, poison: None) -> None:
    case = Case("aligned", T=200, HV=2, K=64, V=64, state=FP32)
    with emulated.backward_mode("parallel"):
        want = ours(case, dtype)
    with emulated.backward_mode("walk"):
        assert_same_gradients(ours(case, dtype), want)


@pytest.mark.parametrize("needed", NAMES)
def test_a_walk_makes_only_what_is_needed(needed: str, poison: None) -> None:
    case = Case("one", T=190, HV=3, K=12, V=12, raw_gate=True, raw_beta=True, state=FP32)
    args = case.inputs()
    with emulated.backward_mode("walk"):
        want = ours(case)[needed]
        args[needed] = args[needed].clone().requires_grad_()
        got = backward(CHUNK, args, *upstream(case, FP32))
    assert_same_bits(got[needed], want)
    assert all(x is None for name, x in got.items() if name != needed)


def test_a_walk_over_packed_sequences_is_as_if_alone(poison: None) -> None:
    with emulated.backward_mode("walk"):
        judge_packed(
            Case("packed walk", T=430, HV=3, K=20, V=24, cu=(0, 17, 17, 250, 400), state=FP32)
        )


def test_every_schedule_gives_the_same_bits_in_a_walk() -> None:
    with emulated.backward_mode("walk"):
        want = ours(BITS)
        for seed in (1, 2, 3):
            with emulated.schedule(seed):
                assert_same_gradients(ours(BITS), want)


# ---- rows whose norm overflows -------------------------------------------------------------------

SIZES = [(1e20, 1e20), (1e30, 1e10), (3e38, 3e38)]
PLACES = (("key", "key"), ("key", "query"), ("query", "query"))


@pytest.mark.parametrize("mode", ["parallel", "walk"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_gradients_of_rows_whose_norm_overflows(
    sizes: tuple[float, float], mode: str, poison: None
) -> None:
    """They count as zeros, and their own gradients are zero. Of two in a chunk, the products would
    be infinite."""
    case = Case("overflow", T=40, HK=1, HV=2, K=12, V=20, raw_beta=True, state=FP32)
    arriving = upstream(case, FP32)
    for places, tokens in itertools.product(PLACES, ((3, 5), (3, 17), (5, 17))):
        args, zeros = case.inputs(), case.inputs()
        cleared = []
        for name, token, size in zip(places, tokens, sizes, strict=True):
            args[name][0, token] = size
            overflows = size > 1e19
            zeros[name][0, token] = 0 if overflows else size
            if overflows:
                cleared.append((name, token))
        with emulated.backward_mode(mode):
            got = backward(CHUNK, leaves(args), *arriving)
            out, state = CHUNK(**args)
        with one_thread():
            want = backward(reference_in_fp64, leaves(zeros, torch.float64), *arriving)
            exact = reference_in_fp64(**zeros)
        assert_close(out, exact[0], FP32_FLOOR)
        assert_close(state, exact[1], FP32_FLOOR)
        for name, token in cleared:
            want[name][:, token] = 0
            assert not got[name][:, token].any()
        judge(got, want, None, {"else": FP32_FLOOR})


@pytest.mark.parametrize("mode", ["parallel", "walk"])
def test_rows_with_infinities_are_nan(mode: str, poison: None) -> None:
    case = Case("infinite", T=20, HK=1, HV=1, K=12, V=8, state=FP32)
    for name in ("key", "query"):
        args = case.inputs()
        args[name][0, 7, 0, 3] = torch.inf
        with emulated.backward_mode(mode):
            got = backward(CHUNK, leaves(args), *upstream(case, FP32))
            out, _ = CHUNK(**args)
        assert out[:, 7].isnan().all()
        assert out[:, :7].isfinite().all()
        assert got[name][:, 7].isnan().all()


# ---- views ---------------------------------------------------------------------------------------


def test_strided_inputs_and_gradients() -> None:
    case = Case("strides", B=2, T=37, HK=2, HV=4, K=20, V=36, state=FP32)
    args, (d_out, d_state) = case.inputs(), upstream(case, FP32)
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
    case = Case("expanded", T=37, HV=3, K=20, V=24, state=FP32)
    args = leaves(case.inputs())
    out, state = CHUNK(**args)
    (out.sum() + state.sum()).backward()
    want = backward(CHUNK, leaves(case.inputs()), torch.ones_like(out), torch.ones_like(state))
    for name, x in want.items():
        assert_same_bits(args[name].grad, x, name)


def test_one_tensor_in_two_places() -> None:
    x = torch.randn(1, 30, 2, 16, generator=torch.Generator().manual_seed(5), requires_grad=True)
    CHUNK(x, x, x, None, None, use_qk_l2norm_in_kernel=True)[0].square().sum().backward()
    y = x.detach().double().requires_grad_()
    out, _ = reference.recurrent(y, y, y, None, None, use_qk_l2norm_in_kernel=True)
    out.square().sum().backward()
    assert rmse_ratio(x.grad, y.grad) < 1e-5


# ---- bit for bit ---------------------------------------------------------------------------------

BITS = Case("bits", B=2, T=200, HK=1, HV=3, K=40, V=24, g="positive", raw_beta=True, state=FP32)


def test_every_schedule_gives_the_same_bits() -> None:
    want = ours(BITS)
    for seed in (1, 2, 3):
        with emulated.schedule(seed):
            got = ours(BITS)
        for name, x in want.items():
            assert_same_bits(got[name], x, f"d{name}, seed {seed}")


def test_blocks_for_one_head_and_for_all_of_a_key_give_the_same_bits() -> None:
    """A batch of eight has blocks enough for the latter, and more strips than run at once."""
    case = Case("heads", B=8, T=200, HK=1, HV=3, K=20, V=12, raw_gate=True, state=FP32)
    args, (d_out, d_state) = case.inputs(), upstream(case, FP32)
    with emulated.backward_mode("parallel"):
        got = backward(CHUNK, leaves(args), d_out, d_state)
    for n in (0, 7):
        one = {k: x[n : n + 1] if k in NAMES[:6] else x for k, x in args.items()}
        want = backward(CHUNK, leaves(one), d_out[n : n + 1], d_state[n : n + 1])
        for name in NAMES[:6]:
            assert_same_bits(got[name][n : n + 1], want[name], f"d{name}, sequence {n}")


def test_no_state_is_the_zero_state() -> None:
    case = Case("no state", T=40, HV=2, K=24, V=20)
    args = case.inputs()
    want = backward(CHUNK, leaves(args), *upstream(case, FP32))
    zeros = leaves({**args, "initial_state": torch.zeros(1, 2, 24, 20)})
    got = backward(CHUNK, zeros, *upstream(case, FP32))
    for name, x in want.items():
        assert_same_bits(got[name], x, name)


def test_packed_sequences_are_as_if_alone(poison: None) -> None:
    judge_packed(
        Case("packed grads", T=430, HV=3, K=20, V=24, cu=(0, 17, 17, 250, 400), state=FP32)
    )


@pytest.mark.parametrize("needed", NAMES)
def test_only_what_is_needed(needed: str, poison: None) -> None:
    """One gradient alone has the bits that it has among all, and no other one appears."""
    case = Case("one", T=50, HV=3, K=24, V=24, raw_gate=True, raw_beta=True, state=FP32)
    args = case.inputs()
    want = ours(case)[needed]
    args[needed] = args[needed].clone().requires_grad_()
    got = backward(CHUNK, args, *upstream(case, FP32))
    assert_same_bits(got[needed], want)
    assert all(x is None for name, x in got.items() if name != needed)


# ---- what the host never sees --------------------------------------------------------------------


def operator_arguments(args: dict[str, Any], case: Case, wanted: int = 0b111111) -> list[Any]:
    """Positional, as the operator takes them; l2norm and no other option."""
    return [
        *upstream(case, FP32), *(args.get(n) for n in NAMES[:6]), args.get("cu_seqlens"),
        None, None, None, case.K**-0.5, True, False, False, False, False, wanted,
    ]  # fmt: skip


def test_a_graph_replays_with_other_sequences() -> None:
    case = Case("graph", T=130, HK=1, HV=2, K=16, V=20, cu=(0, 17, 20, 130), state=FP32)
    args = case.inputs()
    arguments = operator_arguments(args, case)
    cuts = ((0, 17, 20, 130), (0, 0, 130, 130), (0, 1, 33, 40), (0, 0, 0, 0))
    wanted = []
    for cu in cuts:
        args["cu_seqlens"].copy_(torch.tensor(cu))
        wanted.append(emulated.call(OPERATOR, *arguments))
    with emulated.capture() as graph:
        results = emulated.call(OPERATOR, *arguments)
    for cu, want in zip(cuts, wanted, strict=True):
        args["cu_seqlens"].copy_(torch.tensor(cu))
        for x in results:
            x.fill_(torch.nan)
        graph.replay()
        for name, got, x in zip(NAMES, results, want, strict=True):
            assert_same_bits(got, x, f"d{name}, {cu}")
            assert torch.isfinite(got).all(), f"d{name}, {cu}"


@pytest.mark.parametrize(
    "cu",
    [(0, 30, 10, 50), (5, 3, 2, 1), (-7, 20, 99, 40), (50, 0, 50, 0, 50, 0, 50, 0, 50, 0, 50)],
    ids=str,
)
def test_wrong_sequences_stay_inside_memory(cu: tuple[int, ...]) -> None:
    """Python refuses these where it can see them. What a graph replays with, nobody checks."""
    case = Case("wrong", T=40, HK=1, HV=1, K=16, V=20, cu=cu, state=FP32)
    found = ""
    try:
        emulated.call(OPERATOR, *operator_arguments(case.inputs(), case))
    except RuntimeError as error:
        found = str(error)
    # Sequences that overlap are written twice: what the values are is nobody's promise.
    assert not found or "data race" in found


def test_operators_check_as_the_cpu_does() -> None:
    """The same texts: the same code writes them."""
    cpu = getattr(torch.ops.deltanet_ext, OPERATOR).default
    case = Case("checks", T=SEGMENT_TOKENS + 1, HV=2, K=4, V=4)
    good = operator_arguments(case.inputs(), case, wanted=1)
    for position, wrong in (
        (0, torch.zeros(1, 2, 2, 4)),
        (0, torch.zeros(1, case.T, 2, 4, dtype=torch.float64)),
        (1, torch.zeros(1, 2, 4, 5)),
        (2, torch.zeros(1, 2, 2, 7)),
        (4, torch.zeros(1, 2, 3, 32)),
        (11, None),
        (11, torch.zeros(1, 2, 2, 4, 4)),
        (18, 1 << NAMES.index("initial_state")),
    ):
        args = [*good[:position], wrong, *good[position + 1 :]]
        if position != 11:
            args[11] = torch.zeros(1, 1, 2, 4, 4)
        texts = []
        for call in (cpu, lambda *a: emulated.call(OPERATOR, *a)):
            with pytest.raises(RuntimeError) as found:
                call(*args)
            texts.append(str(found.value).split(f"{OPERATOR}: ")[1].splitlines()[0])
        assert texts[0] == texts[1]


# ---- the other operators -------------------------------------------------------------------------


@pytest.mark.parametrize("cu", [None, (0, 5, 5, 20)], ids=["one", "packed"])
def test_gradients_of_the_transition(cu: tuple[int, ...] | None, poison: None) -> None:
    case = Case("transition", T=21, HV=3, K=12, V=8, cu=cu)
    args = case.inputs()
    names = NAMES[1:5]
    shared = {"use_qk_l2norm_in_kernel": True, "cu_seqlens": args.get("cu_seqlens")}

    def gradients(function: Any, dtype: torch.dtype, **options: Any) -> list[Tensor]:
        leaf = {n: args[n].to(dtype, copy=True).requires_grad_() for n in names}
        M, U = function(**leaf, **shared, **options)
        gen = torch.Generator().manual_seed(1)
        d = [torch.randn(x.shape, generator=gen) for x in (M, U)]
        torch.autograd.backward([M, U], [x.to(dtype) for x in d])
        return [leaf[n].grad for n in names]

    got = gradients(deltanet_ext.chunk_transition, FP32)
    with one_thread():
        want = gradients(reference.transition, torch.float64)
    for name, x, exact in zip(names, got, want, strict=True):
        assert rmse_ratio(x, exact) <= FP32_FLOOR, name


def test_gradient_of_the_inverse() -> None:
    L = 0.2 * torch.randn(2, 20, 20, generator=torch.Generator().manual_seed(2))
    d = torch.randn(2, 20, 20, generator=torch.Generator().manual_seed(3))
    leaf, exact = L.clone().requires_grad_(), L.double().requires_grad_()
    deltanet_ext.unit_lower_triangular_inverse(leaf).backward(d)
    torch.linalg.inv(torch.eye(20, dtype=torch.float64) + exact.tril(-1)).backward(d.double())
    assert rmse_ratio(leaf.grad, exact.grad) <= FP32_FLOOR
    assert leaf.grad.abs().max() > ABSOLUTE_FLOOR
