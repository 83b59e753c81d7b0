# SPDX-License-Identifier: Apache-2.0
"""The CUDA operators through the public functions, kernels and all, on the emulator.

The case table of cases.py, both forms of the rule, against the fp64 recurrence with the bounds of
the CPU's tests; then what only CUDA promises: nothing depends on the order in which threads run,
and nothing that a captured graph replays depends on the contents of `cu_seqlens`.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import deltanet_ext
import emulated
from cases import (
    ALL_CASES,
    Case,
    assert_as_exact_as_the_recurrence,
    case_named,
    expected,
    name_of,
    recurrence,
)
from closeness import assert_close, assert_no_worse, assert_same_bits, rmse_ratio
from deltanet_ext import reference

if reason := emulated.why_not():
    pytest.skip(f"emulated CUDA operators: {reason}", allow_module_level=True)

pytestmark = pytest.mark.slow  # the first run compiles for minutes

FUNCTIONS = {
    "chunk": deltanet_ext.chunk_gated_delta_rule,
    "recurrent": deltanet_ext.recurrent_gated_delta_rule,
}
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
both_forms = pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)


@pytest.fixture(autouse=True)
def on_the_emulator() -> Iterator[None]:
    with emulated.path():
        yield


def seed_of(name: str) -> int:
    """A schedule for each test: in order, in reverse, or one of many random ones."""
    return zlib.crc32(name.encode()) % 50


# ---- the case table ------------------------------------------------------------------------------

LISTED = (
    "T=0", "T=1", "T=2", "T=15", "T=16", "T=17", "T=33", "T=65",
    "HK=1 HV=1", "HK=1 HV=3", "HK=2 HV=6", "HK=3 HV=3",
    "K=1 V=1", "K=1 V=256", "K=256 V=1", "K=2 V=3", "K=9 V=15", "K=17 V=33", "K=33 V=100",
    "K=64 V=128", "K=127 V=129",
    "K=100 V=60", "K=255 V=13", "K=13 V=255",
    "B=0", "B=2",
    "narrow gates", "gate in kernel", "gate in kernel, narrow", "beta sigmoid in kernel",
    "beta up to 2 in kernel",
    "state in fp64", "state in bf16", "state in fp16", "state V first", "state V first, none",
    "scale 0.0", "scale -0.5", "no l2norm, unit keys", "no l2norm, small keys",
    "identical keys, beta 1, g none", "identical keys, beta 1.999, g strong",
    "alternating keys, beta 1, g zero",
    "correlated keys, beta 1.999, g zero", "some zero keys, beta 1, g zero",
    "zero keys, beta 1.999, g zero",
    "identical keys, g drop", "identical keys, g positive", "identical keys, g some -inf",
    "tiny keys, g zero",
    "K=8, identical keys, beta 1", "K=1, beta 1, g 0.5", "K=4, beta 1, g 0.25",
    "norm 2 keys, beta 1, g zero, T=16",
)  # fmt: skip


def is_selected(case: Case) -> bool:
    whole_groups = case.name.startswith(("g ", "beta ", "packed"))
    return case.name in LISTED or (whole_groups and "long" not in case.name)


SELECTED = [case for case in ALL_CASES if is_selected(case)]
NARROW = """
    T=1 | T=17 | HK=1 HV=3 | K=33 V=100 | K=127 V=129 | state V first | narrow gates |
    gate in kernel, narrow | packed100[0,64,64,100] | packed40[0,0]
"""


def test_every_listed_case_exists() -> None:
    assert set(LISTED) <= {case.name for case in ALL_CASES}


def assert_rounded_once(out: Tensor, exact: Tensor) -> None:
    """A narrow output is off by little more than the rounding of its own dtype."""
    rounding = rmse_ratio(exact.to(out.dtype), exact)
    assert rmse_ratio(out, exact) <= 1.15 * rounding


def check(function: Any, case: Case, dtype: torch.dtype) -> None:
    with emulated.schedule(seed_of(f"{case} {function} {dtype}")):
        got = function(**case.inputs(dtype))
    want = expected(case, dtype)
    assert_as_exact_as_the_recurrence(got, want, dtype)
    if dtype != FP32 and got[0].numel():
        assert_rounded_once(got[0], want.out)


@both_forms
@pytest.mark.parametrize("case", SELECTED, ids=str)
def test_is_as_exact_as_the_recurrence(case: Case, function: Any, poison: None) -> None:
    check(function, case, FP32)


@both_forms
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=name_of)
@pytest.mark.parametrize("name", [name.strip() for name in NARROW.split("|")])
def test_narrow_inputs(name: str, dtype: torch.dtype, function: Any, poison: None) -> None:
    check(function, case_named(name), dtype)


# Enough blocks for the wide tiles of V, which few heads leave unused.
WIDE = [
    Case("many heads, V=40", B=9, T=18, HK=4, HV=16, K=12, V=40, state=FP32),
    Case("many heads, V=20", B=9, T=18, HK=4, HV=16, K=12, V=20, state=FP32, g="positive"),
]


@pytest.mark.parametrize("case", WIDE, ids=str)
def test_many_heads(case: Case, poison: None) -> None:
    check(deltanet_ext.chunk_gated_delta_rule, case, FP32)


@both_forms
def test_weak_gates_after_strong_ones(function: Any, poison: None) -> None:
    """A running sum that has come to -1000 still knows the small differences behind it."""
    args = Case("weak after strong", T=48, HK=1, HV=2, K=16, V=16).inputs()
    args["g"] = 0.05 * args["g"]
    args["g"][:, torch.arange(48) % 16 < 10] = -100.0
    out, state = function(**args)
    want = recurrence(args)
    assert_close(out, want[0], 1e-6, "output")
    assert_close(state, want[1], 1e-6, "state")


# ---- views ---------------------------------------------------------------------------------------


def strided(x: Tensor) -> Tensor:
    """The same numbers, heads before tokens, every second element, somewhere inside a storage."""
    heads_first = x.movedim(2, 1)
    storage = torch.full((*heads_first.shape[:-1], 2 * heads_first.shape[-1] + 3), torch.nan)
    view = storage.to(x.dtype)[..., 1:-2:2]
    view.copy_(heads_first)
    return view.movedim(1, 2)


def padded(x: Tensor) -> Tensor:
    """The same numbers in aligned rows, which end inside of four that could be read at once."""
    columns = x.shape[-1]
    storage = torch.full((*x.shape[:-1], columns // 8 * 8 + 8), torch.nan, dtype=x.dtype)
    view = storage[..., :columns]
    view.copy_(x)
    return view


VIEWS = {"strided": (strided, 20, 36), "padded": (padded, 21, 38)}


@both_forms
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=name_of)
@pytest.mark.parametrize(("view", "K", "V"), VIEWS.values(), ids=VIEWS)
def test_views(view: Any, K: int, V: int, dtype: torch.dtype, function: Any, poison: None) -> None:
    case = Case("views", B=2, T=21, HK=2, HV=4, K=K, V=V, state=FP32)
    args = case.inputs(dtype)
    want = function(**args)
    for name in ("query", "key", "value"):
        args[name] = view(args[name])
    for name in ("g", "beta"):
        args[name] = args[name].mT.contiguous().mT
    state = args["initial_state"]
    args["initial_state"] = padded(state) if view is padded else state.mT.contiguous().mT
    got = function(**args)
    if dtype == FP32:
        assert_same_bits(got[0], want[0], "output")
        assert_same_bits(got[1], want[1], "state")
    else:  # views may take another path than tensors whose rows are aligned
        exact = recurrence(args)
        assert_rounded_once(got[0], exact[0])
        assert_close(got[1], exact[1], 1e-5)


@both_forms
def test_projections_of_one_tensor_and_expanded_arguments(function: Any, poison: None) -> None:
    """q, k and v as slices of one tensor, one state and one gate for all."""
    gen = torch.Generator().manual_seed(3)
    mixed = torch.randn(2, 19, 2, 24 + 24 + 28, generator=gen)
    query, key, value = mixed.split([24, 24, 28], dim=-1)
    args = {
        "query": query,
        "key": key,
        "value": value,
        "g": torch.tensor([[[-0.1]]]).expand(2, 19, 2),
        "beta": torch.rand(2, 1, 1, generator=gen).expand(2, 19, 2),
        "initial_state": torch.randn(1, 1, 24, 28, generator=gen).expand(2, 2, 24, 28),
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
    }
    got = function(**args)
    want = recurrence(args)
    assert_close(got[0], want[0], 1e-5)
    assert_close(got[1], want[1], 1e-5)


@both_forms
def test_strided_cu_seqlens_of_either_width(function: Any) -> None:
    case = case_named("packed64[0,17,50,64]")
    args = case.inputs()
    want = function(**args)
    for dtype in (torch.int32, torch.int64):
        cu = torch.stack([args["cu_seqlens"], torch.full((4,), 99)], dim=1).to(dtype)[:, 0]
        got = function(**{**args, "cu_seqlens": cu})
        assert_same_bits(got[0], want[0])
        assert_same_bits(got[1], want[1])


# ---- bit for bit ---------------------------------------------------------------------------------

BITS = Case("bits", T=37, HK=1, HV=2, K=40, V=24, g="positive", state=FP32)


@both_forms
def test_every_schedule_gives_the_same_bits(function: Any) -> None:
    args = BITS.inputs()
    want = function(**args)
    for seed in (1, 2, 3, 4):
        with emulated.schedule(seed):
            got = function(**args)
        assert_same_bits(got[0], want[0], f"output, seed {seed}")
        assert_same_bits(got[1], want[1], f"state, seed {seed}")


@both_forms
@pytest.mark.parametrize("g", ["model", "weak", "positive"])
def test_no_state_is_the_zero_state(g: str, function: Any) -> None:
    args = Case(f"zero {g}", T=20, K=24, V=20, g=g).inputs()
    want = function(**args)
    got = function(**args, initial_state=torch.zeros(1, 2, 24, 20))
    assert_same_bits(got[0], want[0], "output")
    assert_same_bits(got[1], want[1], "state")


@both_forms
def test_a_sequence_alone_and_in_company(function: Any) -> None:
    args = case_named("packed64[0,17,50,64]").inputs()
    out, state = function(**args)
    assert state is not None
    for n, (start, stop) in enumerate(((0, 17), (17, 50), (50, 64))):
        alone = {k: x[:, start:stop] if k in ("query", "key", "value", "g", "beta") else x
                 for k, x in args.items() if k != "cu_seqlens"}  # fmt: skip
        alone["initial_state"] = args["initial_state"][n : n + 1]
        got = function(**alone)
        assert_same_bits(got[0], out[:, start:stop], f"output {n}")
        assert_same_bits(got[1], state[n : n + 1], f"state {n}")


def check_that_later_tokens_change_nothing(
    function: Any, case: Case, tokens: tuple[int, ...]
) -> None:
    args = case.inputs()
    want, _ = function(**args)
    # A gate that is not a number cuts the chunk before its token. A value does not.
    for token in tokens:
        for names in (("query", "key", "value", "g", "beta"), ("value",)):
            changed = {k: x.clone() if isinstance(x, Tensor) else x for k, x in args.items()}
            for name in names:
                changed[name][:, token:] = torch.nan
            got, _ = function(**changed)
            assert_same_bits(got[:, :token], want[:, :token], f"before token {token}, {names}")


@both_forms
def test_a_later_token_changes_nothing_before_it(function: Any) -> None:
    check_that_later_tokens_change_nothing(function, BITS, (1, 14, 20, 36))


# There a thread makes one row of the output. In wide tiles it makes two or four in one loop over
# the tokens; token 3 is the last one of two and of four.
@pytest.mark.parametrize("case", WIDE, ids=str)
def test_a_later_token_changes_nothing_before_it_in_a_wide_tile(case: Case) -> None:
    check_that_later_tokens_change_nothing(deltanet_ext.chunk_gated_delta_rule, case, (3,))


@both_forms
def test_without_final_state(function: Any) -> None:
    args = case_named("T=17").inputs()
    want, _ = function(**args)
    got, none = function(**{**args, "output_final_state": False})
    assert none is None
    assert_same_bits(got, want)


# ---- what the host never sees --------------------------------------------------------------------


def operator_arguments(args: dict[str, Any]) -> list[Any]:
    """Positional, as the operators take them; no options."""
    return [
        args["query"], args["key"], args["value"], args["g"], args["beta"],
        args.get("initial_state"), args.get("cu_seqlens"), None, None,
        args["query"].shape[-1] ** -0.5, True, True, False, False, False, False,
    ]  # fmt: skip


OPERATORS = ("chunk_gated_delta_rule_forward", "recurrent_gated_delta_rule_forward")


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_graph_replays_with_other_sequences(operator: str) -> None:
    case = Case("graph", T=50, HK=1, HV=2, K=16, V=20, cu=(0, 17, 20, 50), state=FP32)
    args = case.inputs()
    with emulated.capture() as graph:
        out, state = emulated.call(operator, *operator_arguments(args))
    for cu in ((0, 17, 20, 50), (0, 0, 50, 50), (0, 1, 33, 40), (0, 0, 0, 0)):
        args["cu_seqlens"].copy_(torch.tensor(cu))
        out.fill_(torch.nan)
        graph.replay()
        want = recurrence(args)
        assert_close(out, want[0], 1e-5, f"output, {cu}")
        assert_close(state, want[1], 1e-5, f"state, {cu}")


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize(
    "cu",
    [(0, 30, 10, 50), (5, 3, 2, 1), (-7, 20, 99, 40), (50, 0, 50, 0, 50, 0, 50, 0, 50, 0, 50)],
    ids=str,
)
def test_wrong_sequences_stay_inside_memory(operator: str, cu: tuple[int, ...]) -> None:
    """Python refuses these where it can see them. What a graph replays with, nobody checks."""
    case = Case("wrong", T=40, HK=1, HV=1, K=16, V=20, cu=cu, state=FP32)
    args = case.inputs()
    found = ""
    try:
        emulated.call(operator, *operator_arguments(args))
    except RuntimeError as error:
        found = str(error)
    # Sequences that overlap are written twice: what the values are is nobody's promise.
    assert not found or "data race" in found


def test_float64_runs_on_the_cpu() -> None:
    args = case_named("T=2").inputs(torch.float64)
    for function in FUNCTIONS.values():
        with pytest.raises((ValueError, RuntimeError), match="float64 runs on the CPU"):
            function(**args)
    with pytest.raises((ValueError, RuntimeError), match="float64 runs on the CPU"):
        deltanet_ext.unit_lower_triangular_inverse(torch.zeros(3, 3, dtype=torch.float64))
    with pytest.raises((ValueError, RuntimeError), match="float64 runs on the CPU"):
        deltanet_ext.chunk_transition(args["key"], args["value"], None, None)


@pytest.mark.parametrize("operator", OPERATORS)
def test_operators_check_as_the_cpu_does(operator: str) -> None:
    """The same texts: the same code writes them."""
    cpu = getattr(torch.ops.deltanet_ext, operator).default
    good = operator_arguments(case_named("T=2").inputs())
    for position, wrong in (
        (0, torch.zeros(1, 2, 2, 7)),
        (1, torch.zeros(2, 2)),
        (2, torch.zeros(1, 2, 3, 32)),
        (3, torch.zeros(1, 2, 4, dtype=torch.int32)),
        (5, torch.zeros(1, 4, 32, 31)),
        (6, torch.zeros(2, 2, dtype=torch.int64)),
        (6, torch.zeros(2)),
        (7, torch.zeros(4)),
    ):
        args = [*good[:position], wrong, *good[position + 1 :]]
        texts = []
        for call in (cpu, lambda *a: emulated.call(operator, *a)):
            with pytest.raises(RuntimeError) as found:
                call(*args)
            texts.append(str(found.value).split("_gated_delta_rule: ")[1].splitlines()[0])
        assert texts[0] == texts[1]


# ---- (8): maps -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["T=17", "HK=1 HV=3", "K=17 V=33", "g weak", "g positive", "packed100[0,64,64,100]"]
)
def test_transition(name: str, poison: None) -> None:
    args = case_named(name).inputs()
    rule = {
        n: args[n]
        for n in ("key", "value", "g", "beta", "use_qk_l2norm_in_kernel", "cu_seqlens")
        if n in args
    }
    with emulated.schedule(seed_of(name)):
        M, U = deltanet_ext.chunk_transition(**rule)
    want_M, want_U = reference.transition(**rule)
    base_M, base_U = reference.transition(**rule, dtype=FP32)
    assert_no_worse(M, want_M, base_M, floor=1e-5, what="M")
    assert_no_worse(U, want_U, base_U, floor=1e-5, what="U")


# ---- (4): the inverse ----------------------------------------------------------------------------


def system(kind: str, C: int = 64) -> Tensor:
    """L for the rows of the table in docs/algorithm.md."""
    gen = torch.Generator().manual_seed(7)
    keys = torch.randn(2, C, 64, generator=gen, dtype=torch.float64)
    beta = torch.randn(2, C, 1, generator=gen, dtype=torch.float64).sigmoid()
    if kind != "random":
        keys = keys[:, :1].expand_as(keys)
        beta = torch.full_like(beta, 1.999 if "1.999" in kind else 1.0)
    keys = (2 if "norm 2" in kind else 1) * torch.nn.functional.normalize(keys, dim=-1)
    return (beta * (keys @ keys.mT)).tril(-1).float()


# Three times what forward substitution in fp32 is off by, where C = 64.
TABLE = {"random": 6e-8, "identical": 6e-8, "identical, 1.999": 9e-7, "identical, norm 2": 6e-6}


@pytest.mark.parametrize("kind", TABLE)
def test_accuracy_of_the_inverse(kind: str) -> None:
    L = system(kind)
    assert_close(deltanet_ext.unit_lower_triangular_inverse(L), reference.inverse(L), TABLE[kind])


def substitution(L: torch.Tensor) -> torch.Tensor:
    """(I + L)^-1 row by row in fp32: the plain baseline."""
    eye = torch.eye(L.shape[-1])
    rows: list[torch.Tensor] = []
    for i in range(L.shape[-1]):
        row = eye[i]
        for m in range(i):
            row = row - L[i, m] * rows[m]
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize("C", [64, 100, 128])
def test_inverse_is_as_accurate_as_substitution_where_keys_nearly_repeat(C: int) -> None:
    # Entries of T are near 2 and alternate: errors of inverted diagonal blocks would add up.
    gen = torch.Generator().manual_seed(C)
    L = (1.999 * (1 + 1e-6 * torch.randn(C, C, generator=gen))).tril(-1)
    got, want = deltanet_ext.unit_lower_triangular_inverse(L), reference.inverse(L.double())
    assert_close(got, want, 3 * rmse_ratio(substitution(L), want))


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=name_of)
@pytest.mark.parametrize("C", [1, 2, 15, 16, 17, 33, 64, 65, 100, 128])
def test_inverse_of_every_size(C: int, dtype: torch.dtype, poison: None) -> None:
    gen = torch.Generator().manual_seed(C)
    L = (torch.randn(2, C, C, generator=gen) / C**0.5).to(dtype)
    with emulated.schedule(seed_of(f"{C} {dtype}")):
        got = deltanet_ext.unit_lower_triangular_inverse(L)
    rounding = {FP32: 2e-6, BF16: 3e-3, FP16: 4e-4}
    assert_close(got, reference.inverse(L), rounding[dtype])
    assert_same_bits(got.triu(1), torch.zeros_like(got))
    assert (got.diagonal(dim1=-2, dim2=-1) == 1).all()


@pytest.mark.parametrize("C", [20, 70])
def test_inverse_reads_below_the_diagonal_and_upwards_only(C: int) -> None:
    L = 0.1 * torch.randn(C, C, generator=torch.Generator().manual_seed(C))
    want = deltanet_ext.unit_lower_triangular_inverse(L)
    above = torch.ones(C, C, dtype=torch.bool).triu()
    got = deltanet_ext.unit_lower_triangular_inverse(L.masked_fill(above, torch.nan))
    assert_same_bits(got, want)
    for row in (1, 15, 17, C - 1):
        spoiled = L.clone()
        spoiled[row] = torch.nan
        got = deltanet_ext.unit_lower_triangular_inverse(spoiled)
        assert_same_bits(got[:row], want[:row])


def test_inverse_of_nothing_and_of_views() -> None:
    assert deltanet_ext.unit_lower_triangular_inverse(torch.zeros(0, 5, 5)).shape == (0, 5, 5)
    L = torch.randn(3, 2, 9, 9).permute(1, 0, 3, 2)
    got = deltanet_ext.unit_lower_triangular_inverse(L)
    assert_close(got, reference.inverse(L), 1e-5)
