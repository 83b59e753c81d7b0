# SPDX-License-Identifier: Apache-2.0
"""The convolution on CUDA, on the emulator: cases and yardsticks of test_causal_conv1d.py.

Then what only CUDA promises: no order of threads changes a bit, and what a captured graph replays
does not depend on the contents of index tensors, which are never trusted either.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import pytest
import test_causal_conv1d as shared
import torch
from test_causal_conv1d import CASES, DIFFERENTIABLE, TRAINED, Conv, forward, gradients, leaves_of
from torch import Tensor

import emulated
from cases import name_of
from closeness import assert_same_bits
from deltanet_ext import causal_conv1d_fn, causal_conv1d_update

if reason := emulated.why_not():
    pytest.skip(f"emulated CUDA operators: {reason}", allow_module_level=True)

pytestmark = pytest.mark.slow  # the first run compiles for minutes

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
dtypes = pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=name_of)
two_dtypes = pytest.mark.parametrize("dtype", [FP32, BF16], ids=name_of)


@pytest.fixture(autouse=True)
def on_the_emulator(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test with a schedule of its own: in order, in reverse, or one of many random ones."""
    with emulated.path(), emulated.schedule(zlib.crc32(request.node.name.encode()) % 50):
        yield


# ---- the shared tests ----------------------------------------------------------------------------

# Tiles are 128 tokens forward and 64 backward, strips 256; channels come 64 at a time.
LONG = [
    *(Conv(B=2, D=70, T=T, W=W) for T, W in ((127, 4), (128, 3), (129, 8), (260, 4))),
    *(Conv(D=66, T=T, W=W, channels_first=True) for T, W in ((132, 4), (257, 7))),
    Conv(B=1, D=65, T=300, cu=(0, 63, 64, 64, 127, 128, 130, 256, 290)),
    Conv(B=1, D=8, T=264, W=8, cu=(0, 3, 250, 257), channels_first=True),
]  # fmt: skip


@dtypes
@pytest.mark.parametrize("case", [*CASES, *LONG], ids=str)
def test_is_as_exact_as_torch(case: Conv, dtype: torch.dtype, poison: None) -> None:
    shared.test_is_as_exact_as_torch(case, dtype, "", None)


@dtypes
@pytest.mark.parametrize("case", [*TRAINED, *LONG], ids=str)
def test_gradients(case: Conv, dtype: torch.dtype, poison: None) -> None:
    shared.test_gradients(case, dtype, "", None)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=name_of)
@pytest.mark.parametrize("case", [Conv(), Conv(W=8, D=130, activation=None)], ids=str)
def test_sixteen_bits_are_rounded_once(case: Conv, dtype: torch.dtype) -> None:
    shared.test_sixteen_bits_are_rounded_once(case, dtype, "")


def test_weights_of_another_dtype() -> None:
    shared.test_weights_of_another_dtype()


@dtypes
def test_special_values(dtype: torch.dtype) -> None:
    shared.test_special_values(dtype, "")


@two_dtypes
@pytest.mark.parametrize("width", [1, 2, 4, 7])
@pytest.mark.parametrize("split", [0, 1, 2, 64, 70])
def test_prefill_and_continuation_equal_the_whole(
    split: int, width: int, dtype: torch.dtype
) -> None:
    shared.test_prefill_and_continuation_equal_the_whole(split, width, dtype, "")


@two_dtypes
@pytest.mark.parametrize(
    ("width", "kept"), [(4, 3), (4, 4), (2, 4), (4, 9), (8, 7), (2, 1), (1, 0), (1, 2)]
)
@pytest.mark.parametrize("step", [1, 5, 40])
def test_prefill_and_updates_equal_the_whole(
    step: int, width: int, kept: int, dtype: torch.dtype, poison: None
) -> None:
    shared.test_prefill_and_updates_equal_the_whole(step, width, kept, dtype, "", None)


def test_an_update_with_two_axes() -> None:
    shared.test_an_update_with_two_axes()


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_index_tensors(index: torch.dtype, poison: None) -> None:
    shared.test_an_update_of_a_pool_of_states(index, None)
    shared.test_seq_idx_equals_separate(index, None)


@two_dtypes
def test_no_state_is_a_state_of_zeros(dtype: torch.dtype) -> None:
    shared.test_no_state_is_a_state_of_zeros(dtype, "")


@two_dtypes
@pytest.mark.parametrize(
    "cu", [(0, 17, 50, 64), (0, 0, 33, 33, 34, 90), (0, 1, 2, 3, 70), (0, 126, 129, 255)], ids=str
)
def test_packed_equals_separate(cu: tuple[int, ...], dtype: torch.dtype) -> None:
    shared.test_packed_equals_separate(cu, dtype, "")


def test_arguments_and_results() -> None:
    shared.test_final_states_out()
    shared.test_final_states_are_no_views_and_arguments_stay(None)
    shared.test_an_update_is_seen_by_autograd()
    shared.test_an_expanded_input()


@dtypes
@pytest.mark.parametrize("axis", [0, 1, 2, "first", "slice"])
def test_views(axis: int | str, dtype: torch.dtype, poison: None) -> None:
    shared.test_views(axis, dtype, "", None)


@two_dtypes
def test_layout_and_company_do_not_matter(dtype: torch.dtype) -> None:
    shared.test_layout_and_company_do_not_matter(dtype, "")


def test_causality() -> None:
    shared.test_causality("")


@pytest.mark.parametrize("wanted", DIFFERENTIABLE)
def test_each_gradient_alone(wanted: str, poison: None) -> None:
    shared.test_each_gradient_alone(wanted, None)


@pytest.mark.parametrize("kept", [0, 1])
def test_gradients_of_one_result(kept: int) -> None:
    shared.test_gradients_of_one_result(kept)


def test_gradients_of_packed_sequences_equal_separate_ones() -> None:
    shared.test_gradients_of_packed_sequences_equal_separate_ones("")


def test_gradients_of_seq_idx_equal_those_of_packed_sequences() -> None:
    """seq_idx has no double precision here; cu_seqlens is judged above."""
    numbers = torch.tensor([[0] * 5 + [3] * 60 + [1] * 2 + [0] * 68])
    cu = torch.tensor([0, 5, 65, 67, 135])
    args = Conv(B=1, D=70, T=135, state=False).inputs()
    grad = torch.randn(1, 70, 135, generator=torch.Generator().manual_seed(1))
    results = []
    for cuts in ({"seq_idx": numbers}, {"cu_seqlens": cu}):
        leaves = leaves_of(args)
        out = causal_conv1d_fn(**leaves, **cuts)
        out.backward(grad)
        results.append([out, *(leaves[n].grad for n in ("x", "weight", "bias"))])
    for by_index, packed in zip(*results, strict=True):
        assert_same_bits(by_index, packed)


# ---- what only CUDA promises ---------------------------------------------------------------------


def everything(args: dict[str, Any]) -> list[Tensor]:
    """Results, gradients, and an update."""
    out, states = forward(args)
    found = gradients(shared.ours, leaves_of(args), (torch.ones_like(out), torch.ones_like(states)))
    state = states.clone()
    x = args["x"][:, :, :2].expand(states.shape[0], -1, -1)
    after = causal_conv1d_update(x, state, args["weight"], args["bias"], "silu")
    return [out, states, *found.values(), state, after]


@pytest.mark.parametrize("width", [4, 8])
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_no_schedule_changes_a_bit(packed: bool, width: int) -> None:
    cu = (0, 70, 70, 200, 301) if packed else None
    args = Conv(B=1 if packed else 2, D=70, T=301, W=width, cu=cu).inputs()
    results = []
    for seed in (0, 1, 2, 77):
        with emulated.schedule(seed):
            results.append(everything(args))
    for other in results[1:]:
        for got, want in zip(other, results[0], strict=True):
            assert_same_bits(got, want)


def test_a_captured_graph_follows_the_contents() -> None:
    """Nothing that the host does depends on what index tensors hold."""
    args = Conv(B=1, D=20, T=80, cu=(0, 30, 50, 80)).inputs()
    inputs = [args[n] for n in ("x", "weight", "bias", "initial_states")]
    cu = args["cu_seqlens"]
    grads = torch.ones(1, 20, 80), torch.ones(3, 20, 3)
    pool, slots = torch.randn(5, 20, 3), torch.tensor([1, 4])
    token = torch.randn(2, 20, 1)

    def calls(pool: Tensor) -> list[Tensor]:
        forward = emulated.call("causal_conv1d_forward", *inputs, None, cu, True, True)
        backward = emulated.call("causal_conv1d_backward", *grads, *inputs, None, cu, True, 15)
        update = emulated.call("causal_conv1d_update", token, pool, *inputs[1:3], slots, True)
        return [*forward, *backward, update]

    contents = [([0, 30, 50, 80], [1, 4]), ([0, 0, 79, 80], [3, -1])]
    wanted = []
    for edges, chosen in contents:
        cu.copy_(torch.tensor(edges))
        slots.copy_(torch.tensor(chosen))
        fresh = pool.clone()
        wanted.append([*calls(fresh), fresh])
    kept = pool.clone()
    with emulated.capture() as graph:
        recorded = [*calls(kept), kept]
    for (edges, chosen), want in zip(contents, wanted, strict=True):
        cu.copy_(torch.tensor(edges))
        slots.copy_(torch.tensor(chosen))
        kept.copy_(pool)
        graph.replay()
        for got, expected in zip(recorded, want, strict=True):
            assert_same_bits(got, expected)


@pytest.mark.parametrize(
    "cu", [(-5, 3, 20), (5, 3, 20), (0, 30, 10), (0, 5, 1000), (2**40, -(2**40), 7), (9, 9, 12)],
    ids=str,
)  # fmt: skip
def test_cu_seqlens_are_not_trusted(cu: tuple[int, ...]) -> None:
    """Whatever they hold, no access leaves a tensor: that would be a finding of the emulator."""
    args = Conv(B=1, D=9, T=20, cu=cu).inputs()
    inputs = [args[n] for n in ("x", "weight", "bias", "initial_states")]
    edges = args["cu_seqlens"]
    emulated.call("causal_conv1d_forward", *inputs, None, edges, True, True)
    grads = torch.ones(1, 9, 20), torch.ones(2, 9, 3)
    emulated.call("causal_conv1d_backward", *grads, *inputs, None, edges, True, 15)


def test_slots_outside_of_the_pool_are_nobodys() -> None:
    args = Conv(B=3, T=1).inputs()
    pool = torch.randn(2, 24, 3)
    before = pool.clone()
    slots = torch.tensor([2, -7, 1])
    out = emulated.call(
        "causal_conv1d_update", args["x"], pool, args["weight"], args["bias"], slots, True
    )
    assert (out[:2] == 0).all()
    assert (out[2] != 0).any()
    assert_same_bits(pool[0], before[0])


# ---- errors --------------------------------------------------------------------------------------


def first_line(function: Any, *args: Any) -> str:
    with pytest.raises(RuntimeError) as found:
        function(*args)
    # Before the message stands where it comes from.
    return str(found.value).splitlines()[0].split(", ", 2)[-1]


def test_operators_check_as_those_of_the_cpu_do() -> None:
    """In the same words."""
    x, weight, state = torch.zeros(2, 8, 6), torch.zeros(8, 4), torch.zeros(2, 8, 3)
    cpu = torch.ops.deltanet_ext
    index, cu = torch.zeros(2, 6, dtype=torch.int64), torch.tensor([0, 6])
    for name, args in (
        ("forward", (x[0], weight, None, None, None, None, True, False)),
        ("forward", (x, torch.zeros(8, 9), None, None, None, None, True, False)),
        ("forward", (x, torch.zeros(7, 4), None, None, None, None, True, False)),
        ("forward", (x, weight, weight[0], None, None, None, True, False)),
        ("forward", (x, weight.double(), None, None, None, None, True, False)),
        ("forward", (x, weight, None, state[..., 1:], None, None, True, False)),
        ("forward", (x, weight, None, state, index, None, True, False)),
        ("forward", (x, weight, None, None, index, cu, True, False)),
        ("forward", (x, weight, None, None, index[:, 1:], None, True, False)),
        ("forward", (x, weight, None, None, torch.zeros(2, 6), None, True, False)),
        ("forward", (x, weight, None, None, None, cu, True, False)),
        ("update", (x, state[..., 1:], weight, None, None, True)),
        ("update", (x, state.bfloat16(), weight, None, None, True)),
        ("update", (x, state, weight, None, torch.zeros(3, dtype=torch.int64), True)),
        ("backward", (x[..., 1:], None, x, weight, None, None, None, None, True, 1)),
        ("backward", (x, state[1:], x, weight, None, None, None, None, True, 1)),
        ("backward", (x, None, x, weight, None, None, None, None, True, 4)),
    ):
        operator = f"causal_conv1d_{name}"
        said = first_line(getattr(cpu, operator), *args)
        assert said == first_line(emulated.call, operator, *args)
        assert "causal_conv1d" in said


def test_double_precision_is_refused() -> None:
    args = Conv().inputs(torch.float64)
    call = (args["x"], args["weight"], None, None, None, None, True, False)
    said = first_line(emulated.call, "causal_conv1d_forward", *call)
    assert "x is float64; supported on CUDA: float32, bfloat16, float16" in said
