# SPDX-License-Identifier: Apache-2.0
"""`gated_delta_rule_update`: the bits of the recurrence, written into a pool of states."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import deltanet_ext
from cases import DTYPES, Case, name_of
from closeness import assert_same_bits

OPS = torch.ops.deltanet_ext
update = deltanet_ext.gated_delta_rule_update

TOKENS = (0, 1, 3, 17)
# The last one's states are beyond the caches.
SIZES = (
    {"B": 3, "HK": 1, "HV": 2, "K": 40, "V": 24},
    {"B": 2, "HK": 2, "HV": 4, "K": 128, "V": 128},
    {"B": 2, "HK": 1, "HV": 3, "K": 17, "V": 200},
    {"B": 40, "HK": 2, "HV": 4, "K": 128, "V": 128},
)
UNUSED = 3  # slots of a pool beyond those of the batch


def inputs(dtype: torch.dtype, T: int = 1, **sizes: Any) -> tuple[dict[str, Any], Tensor]:
    """Arguments of an update, and the states before it."""
    args = Case("update", T=T, state=torch.float32, **sizes).inputs(dtype)
    args.pop("output_final_state")
    states = args.pop("initial_state")
    return args, states.double() if dtype == torch.float64 else states


def recurrent(args: dict[str, Any], states: Tensor) -> tuple[Tensor, Tensor]:
    out, after = deltanet_ext.recurrent_gated_delta_rule(
        **args, initial_state=states, output_final_state=True
    )
    assert after is not None
    return out, after


@pytest.mark.parametrize("T", TOKENS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_has_the_bits_of_the_recurrence(
    dtype: torch.dtype, sizes: dict[str, int], T: int, isa: str, poison: None
) -> None:
    args, states = inputs(dtype, T, **sizes)
    out, after = recurrent(args, states)
    state = states.clone()
    assert_same_bits(update(**args, state=state), out)
    assert_same_bits(state, after)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("T", [1, 2, 5])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_pool(
    sizes: dict[str, int], T: int, index_dtype: torch.dtype, isa: str, poison: None
) -> None:
    """Rows use the slots that they name, a row of a negative index none, and no other is read."""
    args, states = inputs(torch.bfloat16, T, **sizes)
    batch = sizes["B"]
    slots = torch.randperm(batch + UNUSED, generator=torch.Generator().manual_seed(1))[:batch]
    slots[1] = -7
    pool = torch.full((batch + UNUSED, *states.shape[1:]), float("nan"))
    used = slots >= 0
    pool[slots[used]] = states[used]
    before = pool.clone()

    out, after = recurrent(args, states)
    got = update(**args, state=pool, state_indices=slots.to(index_dtype))
    assert_same_bits(got[used], out[used])
    assert (got[~used] == 0).all()
    before[slots[used]] = after[used]
    assert_same_bits(pool, before)


def as_v_first(x: Tensor) -> Tensor:
    return x.transpose(2, 3).contiguous().transpose(2, 3)


def with_gaps(x: Tensor) -> Tensor:
    wide = torch.full((2, *x.shape[:-1], x.shape[-1] + 3), float("nan"), dtype=x.dtype)
    wide[1, ..., 3:] = x
    return wide[1, ..., 3:]


@pytest.mark.parametrize("layout", [as_v_first, with_gaps])
@pytest.mark.parametrize("T", [1, 2, 5])
def test_any_strides(layout: Callable[[Tensor], Tensor], T: int, isa: str) -> None:
    args, states = inputs(torch.float32, T, **SIZES[0])
    out, after = recurrent(args, states)
    state = layout(states)
    assert_same_bits(update(**args, state=state), out)
    assert_same_bits(state.contiguous(), after)


def test_v_first() -> None:
    args, states = inputs(torch.float32, 2, **SIZES[2])
    out, after = recurrent(args, states)
    state = states.transpose(2, 3).contiguous()
    assert_same_bits(update(**args | {"state_v_first": True}, state=state), out)
    assert_same_bits(state.transpose(2, 3).contiguous(), after)


def test_gates_in_the_kernel() -> None:
    case = Case("update", B=2, T=2, HV=2, K=24, V=40, raw_gate=True, raw_beta=True, neg_eigval=True)
    args = case.inputs(torch.float32)
    args.pop("output_final_state")
    states = torch.randn(2, 2, 24, 40)
    out, after = recurrent(args, states)
    state = states.clone()
    assert_same_bits(update(**args, state=state), out)
    assert_same_bits(state, after)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_any_number_of_threads(
    sizes: dict[str, int], threads: Callable[[int], None], isa: str
) -> None:
    args, states = inputs(torch.float32, 1, **sizes)
    results = []
    for count in (1, 2, 5):
        threads(count)
        state = states.clone()
        results.append((update(**args, state=state), state))
    for out, state in results[1:]:
        assert_same_bits(out, results[0][0])
        assert_same_bits(state, results[0][1])


def wrong() -> dict[str, tuple[type[Exception], dict[str, Any]]]:
    state = torch.zeros(3, 2, 40, 24)
    slots = torch.tensor([0, 1, 2])
    return {
        "state is None; supported: torch.Tensor": (TypeError, {"state": None}),
        "state is bfloat16; supported: float32": (TypeError, {"state": state.bfloat16()}),
        "state is float64; supported: float32": (TypeError, {"state": state.double()}),
        "state has shape [4, 2, 40, 24]": (ValueError, {"state": torch.zeros(4, 2, 40, 24)}),
        "state has shape [3, 2, 24, 40]": (ValueError, {"state": torch.zeros(3, 2, 24, 40)}),
        "state has shape [3, 2, 40]": (ValueError, {"state": torch.zeros(3, 2, 40)}),
        "state overlaps itself": (ValueError, {"state": state[:1].expand(3, -1, -1, -1)}),
        "state is on meta": (ValueError, {"state": state.to("meta")}),
        "state_indices has 3 at position 2": (
            ValueError, {"state": state, "state_indices": torch.tensor([0, -1, 3])}),
        "state_indices has 1 twice": (
            ValueError, {"state": state, "state_indices": torch.tensor([1, 0, 1])}),
        "state_indices is float32": (
            TypeError, {"state": state, "state_indices": slots.float()}),
        "state_indices has shape [2]": (
            ValueError, {"state": state, "state_indices": slots[:2]}),
        "state_indices is a list": (TypeError, {"state": state, "state_indices": [0, 1, 2]}),
        "use_qk_l2norm_in_kernel is 1 (int)": (
            TypeError, {"state": state, "use_qk_l2norm_in_kernel": 1}),
        "scale is a str": (TypeError, {"state": state, "scale": "1"}),
        "query has shape [3, 1, 1, 7]": (
            ValueError, {"state": state, "query": torch.zeros(3, 1, 1, 7)}),
        "state requires grad": (NotImplementedError, {"state": state.clone().requires_grad_()}),
        "value requires grad": (
            NotImplementedError,
            {"state": state, "value": torch.zeros(3, 1, 2, 24, requires_grad=True)}),
    }  # fmt: skip


@pytest.mark.parametrize("text", wrong())
def test_wrong_arguments(text: str) -> None:
    """Each error names the argument, and nothing has been written."""
    kind, changed = wrong()[text]
    args, _ = inputs(torch.float32, 1, **SIZES[0])
    args |= changed
    with pytest.raises(kind) as raised:
        update(**args)
    assert type(raised.value) is kind
    assert str(raised.value).startswith("gated_delta_rule_update: ")
    assert text in str(raised.value)
    if isinstance(args["state"], Tensor) and args["state"].device.type == "cpu":
        assert (args["state"] == 0).all()


def arguments_of_the_operator(
    args: dict[str, Any], state: Tensor, slots: Tensor | None = None
) -> tuple[Any, ...]:
    tensors = (args["query"], args["key"], args["value"], args["g"], args["beta"], state, slots)
    return (*tensors, None, None, 1.0, True, False, False, False, False)


def test_the_operator_checks_again() -> None:
    args, states = inputs(torch.float32, 1, **SIZES[0])
    for text, state, slots in (
        ("state has shape", states[:2], None),
        ("state is bfloat16", states.bfloat16(), None),
        ("state overlaps itself", states[:1].expand(3, -1, -1, -1), None),
        ("state_indices has 3 at position 0", states, torch.tensor([3, 0, 1])),
        ("state_indices has 0 twice", states, torch.tensor([0, 0, 1])),
        ("state_indices is float32", states, torch.zeros(3)),
    ):
        with pytest.raises(RuntimeError, match=text.replace("[", r"\[")):
            OPS.gated_delta_rule_update(*arguments_of_the_operator(args, state, slots))


@pytest.mark.parametrize("slots", [None, torch.tensor([4, -1, 0])], ids=["rows", "pool"])
def test_opcheck(slots: Tensor | None) -> None:
    args, states = inputs(torch.bfloat16, 2, **SIZES[0])
    state = states if slots is None else torch.cat([states, states])
    torch.library.opcheck(
        OPS.gated_delta_rule_update.default, arguments_of_the_operator(args, state, slots)
    )


@pytest.mark.slow
def test_compiles_as_one_graph() -> None:
    args, states = inputs(torch.float32, 1, **SIZES[0])
    slots = torch.tensor([2, 0, 1])

    def step(state: Tensor, **args: Any) -> Tensor:
        return update(**args, state=state, state_indices=slots) * 2

    compiled = torch.compile(step, fullgraph=True)
    state, want_state = states.clone(), states.clone()
    for _ in range(3):
        got, want = compiled(state, **args), step(want_state, **args)
        assert_same_bits(got, want)
        assert_same_bits(state, want_state)


def test_who_saved_the_state_learns_of_it() -> None:
    args, states = inputs(torch.float32, 1, **SIZES[0])
    factor = torch.ones((), requires_grad=True)
    product = factor * states
    with torch.no_grad():
        update(**args, state=states)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()
