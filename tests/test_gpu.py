# SPDX-License-Identifier: Apache-2.0
"""On a real GPU: parity with the fp64 recurrence, bits, CUDA graphs, streams, large offsets.

`make test-gpu` runs these with other checks. DELTANET_TEST_DEVICE=cpu rehearses them without a GPU:
the same code, with what only a GPU has left out.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import gradients
import pytest
import test_backward
import test_causal_conv1d as conv
import test_gated_rms_norm as norm
import torch
from torch import Tensor

import deltanet_ext
from cases import (
    ALL_CASES,
    Case,
    assert_as_exact_as_the_recurrence,
    expected,
    name_of,
    recurrence,
)
from closeness import assert_close, assert_no_worse, assert_same_bits, rmse_ratio
from deltanet_ext import _load, reference

DEVICE = os.environ.get("DELTANET_TEST_DEVICE") or "cuda"
if DEVICE == "cuda":
    if not torch.cuda.is_available():
        pytest.skip("no GPU is visible", allow_module_level=True)
    if reason := _load.why_no_cuda():
        pytest.skip(reason, allow_module_level=True)

pytestmark = pytest.mark.gpu

FUNCTIONS = (deltanet_ext.chunk_gated_delta_rule, deltanet_ext.recurrent_gated_delta_rule)
CHUNK = FUNCTIONS[0]
CUDA_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PER_TOKEN = ("query", "key", "value", "g", "beta")

needs_gpu = pytest.mark.skipif(DEVICE != "cuda", reason="a rehearsal without a GPU")


def moved(args: dict[str, Any]) -> dict[str, Any]:
    """To the GPU, expanded and strided views included."""

    def move(x: Tensor) -> Tensor:
        storage = x.untyped_storage().nbytes() // x.element_size()
        whole = torch.as_strided(x, (storage,), (1,), 0).to(DEVICE)
        return whole.as_strided(x.shape, x.stride(), x.storage_offset())

    return {n: move(x) if isinstance(x, Tensor) else x for n, x in args.items()}


def on_gpu(function: Callable[..., Any], args: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Arguments from the CPU, results on the CPU."""
    out, state = function(**moved(args))
    assert out.device.type == DEVICE
    return out.cpu(), None if state is None else state.cpu()


# ---- right ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", CUDA_DTYPES, ids=name_of)
@pytest.mark.parametrize("case", ALL_CASES, ids=str)
def test_is_as_exact_as_the_recurrence(case: Case, dtype: torch.dtype, poison: None) -> None:
    want = expected(case, dtype)
    for function in FUNCTIONS:
        got = on_gpu(function, case.inputs(dtype))
        assert_as_exact_as_the_recurrence(got, want, dtype)
        if dtype != torch.float32:
            assert_rounded_once(got[0], want.out)


def assert_rounded_once(out: Tensor, exact: Tensor) -> None:
    """A narrow output is the fp32 result, rounded, give or take what split operands lose."""
    finite = torch.isfinite(exact.to(out.dtype))
    out, exact = out.where(finite, 0.0), exact.where(finite, 0.0)
    rounding = rmse_ratio(exact.to(out.dtype), exact)
    assert rmse_ratio(out, exact) <= 1.15 * rounding + 2e-5


@pytest.mark.parametrize("T", [1000, 4096])
@pytest.mark.parametrize("dtype", CUDA_DTYPES, ids=name_of)
def test_long_sequences(T: int, dtype: torch.dtype) -> None:
    """Many segments, few heads: where a scan over segments would be used."""
    case = Case("long", T=T, HK=1, HV=2, K=128, V=64, state=torch.float32, g="weak")
    args = case.inputs(dtype)
    out, state = recurrence(args)
    base_out, base_state = recurrence(args, torch.float32)
    for invariant in (False, True):
        with deltanet_ext.batch_invariant(invariant):
            got_out, got_state = on_gpu(CHUNK, args)
        assert_no_worse(got_out, out, base_out.to(dtype), floor=1e-5, what="output")
        assert_no_worse(got_state, state, base_state, floor=1e-5, what="state")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=name_of)
def test_fast_is_as_good_as_it_says(dtype: torch.dtype) -> None:
    case = Case("fast", T=500, HK=2, HV=4, K=128, V=128, state=torch.float32)
    args = case.inputs(dtype)
    out, state = recurrence(args)
    with deltanet_ext.cuda_precision("fast"):
        got_out, got_state = on_gpu(CHUNK, args)
    assert_close(got_out, out, 2.5e-3, "output")
    assert_close(got_state, state, 2.5e-3, "state")


@pytest.mark.parametrize("dtype", CUDA_DTYPES, ids=name_of)
@pytest.mark.parametrize("cu", [None, (0, 0, 65, 66, 140)])
def test_transition(cu: tuple[int, ...] | None, dtype: torch.dtype, poison: None) -> None:
    """S -> M S + U for any S is what the recurrence does."""
    case = Case("map", T=150, HK=1, HV=3, K=48, V=40, cu=cu, state=torch.float32)
    args = case.inputs(dtype)
    _, want = recurrence(args)
    names = ("key", "value", "g", "beta", "use_qk_l2norm_in_kernel", "cu_seqlens")
    M, U = deltanet_ext.chunk_transition(**moved({n: args[n] for n in names if n in args}))
    got = M.cpu().double() @ args["initial_state"].double() + U.cpu().double()
    assert_close(got, want, 2e-5, "M S + U")


@pytest.mark.parametrize("size", [1, 2, 15, 16, 17, 33, 64, 100, 128])
@pytest.mark.parametrize("dtype", CUDA_DTYPES, ids=name_of)
def test_inverse(size: int, dtype: torch.dtype, poison: None) -> None:
    generator = torch.Generator().manual_seed(size)
    k = torch.nn.functional.normalize(torch.randn(7, size, 64, generator=generator), dim=-1)
    L = (0.9 * k @ k.mT).to(dtype)
    want = reference.inverse(L.double())
    got = deltanet_ext.unit_lower_triangular_inverse(L.to(DEVICE)).cpu()
    assert_close(got, want, max(2e-6, 0.6 * torch.finfo(dtype).eps), "inverse")


# ---- the rest of the layer -----------------------------------------------------------------------

CONVOLUTIONS = [
    *(conv.Conv(D=200, T=T, W=W) for T, W in ((1, 4), (37, 2), (300, 4), (300, 8))),
    conv.Conv(D=200, T=264, channels_first=True),
    conv.Conv(B=1, D=130, T=300, cu=(0, 63, 64, 64, 128, 130, 290)),
]


@pytest.mark.parametrize("dtype", CUDA_DTYPES, ids=name_of)
@pytest.mark.parametrize("case", CONVOLUTIONS, ids=str)
def test_convolution(case: conv.Conv, dtype: torch.dtype, poison: None) -> None:
    args = case.inputs(dtype)
    want, want_states = conv.exact(args)
    out, states = on_gpu(lambda **x: conv.forward(x), args)
    assert_no_worse(out, want, conv.by_torch(args), floor=conv.FLOORS[dtype], factor=1.5)
    assert_same_bits(states, want_states.to(dtype), "final states")

    grads = conv.grads_of(args)
    leaves = conv.leaves_of(args, torch.float64)
    exact = conv.gradients(conv.in_dtype(torch.float64), leaves, tuple(g.double() for g in grads))
    leaves = conv.leaves_of(args, torch.float32)
    plain = conv.gradients(conv.in_dtype(torch.float32), leaves, tuple(g.float() for g in grads))
    arriving = tuple(g.to(DEVICE) for g in grads)
    results = [conv.gradients(conv.ours, conv.leaves_of(moved(args)), arriving) for _ in range(2)]
    for name, x in exact.items():
        got, again = (found[name].cpu() for found in results)
        assert_no_worse(got, x, plain[name].to(dtype), floor=1e-6, factor=2, what=name)
        assert_same_bits(got, again, f"{name} twice")


@pytest.mark.parametrize("dtype", CUDA_DTYPES, ids=name_of)
def test_prefill_and_updates_equal_the_whole(dtype: torch.dtype) -> None:
    args = moved(conv.Conv(D=130, T=50, state=False).inputs(dtype))
    whole, _ = conv.forward(args)
    x, weights = args["x"], (args["weight"], args["bias"], "silu")
    _, state = conv.forward({**args, "x": x[..., :40]})
    pieces = [
        deltanet_ext.causal_conv1d_update(x[..., t : t + 2], state, *weights)
        for t in range(40, 50, 2)
    ]
    assert_same_bits(torch.cat(pieces, -1).cpu(), whole[..., 40:].cpu(), "output")
    assert_same_bits(state.cpu(), x[..., 47:].cpu(), "state")


@pytest.mark.parametrize("dtype", CUDA_DTYPES, ids=name_of)
@pytest.mark.parametrize("shape", [(700, 128), (65, 129), (33, 1024), (9, 8192)], ids=str)
def test_gated_norm(shape: tuple[int, ...], dtype: torch.dtype, poison: None) -> None:
    args = norm.inputs(*shape, dtype=dtype)
    on_device = tuple(x.to(DEVICE) for x in args)
    out = deltanet_ext.gated_rms_norm(*on_device).cpu()
    want = reference.gated_rms_norm(*args)
    assert_no_worse(out, want, norm.plain(*args), floor=norm.FLOORS[dtype], factor=1.5)

    grad = norm.grad_of(args[0])
    exact = norm.gradients(reference.gated_rms_norm, tuple(x.double() for x in args), grad.double())
    plain = norm.gradients(norm.plain, tuple(x.float() for x in args), grad.float())
    got = norm.gradients(deltanet_ext.gated_rms_norm, on_device, grad.to(DEVICE))
    for x, wanted, base in zip(got, exact, plain, strict=True):
        assert_no_worse(x.cpu(), wanted, base.to(dtype), floor=1e-6, factor=2)


# ---- gradients -----------------------------------------------------------------------------------


def gradients_on_gpu(
    function: Callable[..., Any], case: Case, dtype: torch.dtype
) -> gradients.Gradients:
    """Arguments from the CPU, gradients on the CPU."""
    args = gradients.leaves(moved(case.inputs(dtype)))
    arriving = (x.to(DEVICE) for x in gradients.upstream(case, dtype))
    found = gradients.backward(function, args, *arriving)
    return {n: None if x is None else x.cpu() for n, x in found.items()}


@pytest.mark.parametrize("dtype", CUDA_DTYPES, ids=name_of)
@pytest.mark.parametrize("case", test_backward.ORDINARY, ids=str)
def test_gradients(case: Case, dtype: torch.dtype, poison: None) -> None:
    want = gradients.by_recurrence(case, dtype, torch.float64)
    base = gradients.by_recurrence(case, dtype, torch.float32)
    narrow = {"g": 5e-3, "beta": 5e-3, "else": 2e-3}
    bounds = {"else": gradients.FP32_FLOOR} if dtype == torch.float32 else narrow
    for function in FUNCTIONS:
        got = gradients_on_gpu(function, case, dtype)
        gradients.judge(got, want, base, bounds)


@pytest.mark.parametrize("case", test_backward.STRESS, ids=str)
def test_gradients_under_stress(case: Case) -> None:
    want = gradients.by_recurrence(case, torch.float32, torch.float64)
    got = gradients_on_gpu(CHUNK, case, torch.float32)
    gradients.judge(got, want, gradients.yardstick(case, want), {"else": gradients.FP32_FLOOR})


@pytest.mark.parametrize("dtype", CUDA_DTYPES, ids=name_of)
@pytest.mark.parametrize("cu", [None, (0, 700, 1900, 2300)], ids=["one", "packed"])
def test_gradients_of_long_sequences(cu: tuple[int, ...] | None, dtype: torch.dtype) -> None:
    """From saved states, twice with the same bits, and one gradient alone as among all."""
    case = Case("long grads", T=2300, HV=2, K=128, V=128, cu=cu, state=torch.float32)
    want = gradients.by_recurrence(case, dtype, torch.float64)
    got = gradients_on_gpu(CHUNK, case, dtype)
    narrow = {"g": 5e-3, "beta": 5e-3, "else": 2e-3}
    bounds = {"else": gradients.FP32_FLOOR} if dtype == torch.float32 else narrow
    gradients.judge(got, want, None, bounds)
    again = gradients_on_gpu(CHUNK, case, dtype)
    for name, x in got.items():
        if x is not None:
            assert_same_bits(again[name], x, f"d{name}")


def test_gradients_of_many_sequences_are_as_if_alone() -> None:
    """They fill a device, so that one block walks over each; alone, strips run side by side."""
    case = Case("many", B=40, T=200, HK=8, HV=16, K=32, V=24, state=torch.float32)
    args = moved(case.inputs())
    arriving = [x.to(DEVICE) for x in gradients.upstream(case, torch.float32)]
    got = gradients.backward(CHUNK, gradients.leaves(args), *arriving)
    for n in (0, case.B - 1):
        one = {k: x[n : n + 1] if k in gradients.NAMES[:6] else x for k, x in args.items()}
        alone = (x[n : n + 1] for x in arriving)
        with deltanet_ext.batch_invariant(True):
            want = gradients.backward(CHUNK, gradients.leaves(one), *alone)
        for name in gradients.NAMES[:6]:
            assert_same_bits(got[name][n : n + 1].cpu(), want[name].cpu(), f"d{name}, {n}")


@needs_gpu
def test_no_backward_pass_waits_for_the_gpu() -> None:
    args = gradients.leaves(moved(SHAPES[2].inputs(torch.bfloat16)))
    torch.cuda.set_sync_debug_mode("error")
    try:
        for function in FUNCTIONS:
            function(**args)[0].sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_gpu
def test_a_captured_backward_pass_replays() -> None:
    """As torch.cuda.make_graphed_callables does, with other gradients arriving at each replay."""
    args = gradients.leaves(moved(SHAPES[2].inputs(torch.bfloat16)))
    value = args["value"]
    arriving = torch.ones_like(value)

    def step() -> Tensor:
        out, _ = CHUNK(**args)
        return torch.autograd.grad(out, value, arriving)[0]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for factor in (1.0, -3.0):
        arriving.fill_(factor)
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bits(captured.cpu(), step().cpu(), f"factor {factor}")


# ---- bits ----------------------------------------------------------------------------------------

SHAPES = (
    Case("few heads", T=1000, HK=1, HV=2, K=128, V=128, state=torch.float32),
    Case("many heads", B=3, T=150, HK=4, HV=12, K=40, V=72, state=torch.float32),
    Case("packed", T=300, HK=2, HV=4, K=128, V=128, cu=(0, 7, 7, 130, 290), state=torch.float32),
    Case("decode", B=64, T=1, HK=4, HV=8, K=128, V=128, state=torch.float32),
)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=name_of)
@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_a_hundred_runs_agree(case: Case, dtype: torch.dtype, function: Callable) -> None:
    args = moved(case.inputs(dtype))
    want = function(**args)
    for _ in range(99):
        got = function(**args)
        for x, y, what in zip(got, want, ("output", "state"), strict=True):
            if not torch.equal(x, y):
                assert_same_bits(x.cpu(), y.cpu(), what)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=name_of)
@pytest.mark.parametrize("T", [70, 700])
def test_batch_invariance(T: int, dtype: torch.dtype, function: Callable) -> None:
    """A sequence has the same bits alone, in a batch, and packed."""
    case = Case("company", B=5, T=T, HK=2, HV=4, K=128, V=128, state=torch.float32)
    args = case.inputs(dtype)
    with deltanet_ext.batch_invariant(True):
        out, states = on_gpu(function, args)
        packed = {n: args[n].flatten(0, 1)[None] if n in PER_TOKEN else args[n] for n in args}
        packed["cu_seqlens"] = torch.arange(0, case.B * T + 1, T)
        packed_out, packed_states = on_gpu(function, packed)
        assert_same_bits(packed_out.view_as(out), out, "output, packed")
        assert_same_bits(packed_states, states, "states, packed")
        for b in range(case.B):
            one = {n: x[b : b + 1] if isinstance(x, Tensor) else x for n, x in args.items()}
            alone, state = on_gpu(function, one)
            assert_same_bits(alone, out[b : b + 1], f"output of row {b}")
            assert_same_bits(state, states[b : b + 1], f"state of row {b}")


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", CUDA_DTYPES, ids=name_of)
def test_no_state_is_a_zero_state(dtype: torch.dtype, function: Callable) -> None:
    args = Case("no state", B=2, T=70, HK=1, HV=3, K=33, V=20).inputs(dtype)
    want = on_gpu(function, args)
    zeros = torch.zeros(2, 3, 33, 20)
    got = on_gpu(function, {**args, "initial_state": zeros})
    assert_same_bits(got[0], want[0], "output")
    assert_same_bits(got[1], want[1], "state")


def test_arguments_are_not_written() -> None:
    for case in SHAPES:
        args = moved(case.inputs(torch.bfloat16))
        before = {n: x.clone() for n, x in args.items() if isinstance(x, Tensor)}
        for function in FUNCTIONS:
            function(**args)
        for name, x in before.items():
            assert torch.equal(args[name], x), name


# ---- graphs and streams --------------------------------------------------------------------------


def fill(target: dict[str, Any], source: dict[str, Any]) -> None:
    for name, x in source.items():
        if isinstance(x, Tensor):
            target[name].copy_(x)


@needs_gpu
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=name_of)
@pytest.mark.parametrize("packed", [False, True])
def test_a_captured_graph_replays_with_other_contents(
    packed: bool, dtype: torch.dtype, function: Callable
) -> None:
    """Of cu_seqlens too: nothing of it was read by the host, and the chunk table is built anew."""
    cuts = [(0, 7, 7, 130, 290), (0, 64, 128, 256, 300), (0, 300, 300, 300, 300), (0, 0, 0, 0, 1)]
    cases = [
        Case(f"graph {cu}", T=300, HK=2, HV=4, K=128, V=128, cu=cu if packed else None,
             state=torch.float32)
        for cu in cuts
    ]  # fmt: skip
    args = moved(cases[0].inputs(dtype))
    function(**args)  # modules are loaded before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = function(**args)
    for case in (*cases, cases[0]):
        other = moved(case.inputs(dtype))
        want = function(**other)
        fill(args, other)
        for x in captured:
            x.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        for x, y, what in zip(captured, want, ("output", "state"), strict=True):
            assert_same_bits(x.cpu(), y.cpu(), f"{what} of {case}")


@needs_gpu
def test_the_current_stream_is_used() -> None:
    """Work on another stream waits for what that stream did before, and for nothing else."""
    case = SHAPES[0]
    args = moved(case.inputs(torch.bfloat16))
    want = CHUNK(**args)
    late = {n: x.clone() if isinstance(x, Tensor) else x for n, x in args.items()}
    value = late["value"].clone()
    late["value"].zero_()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # some 10 ms in which another stream would run ahead
        late["value"].copy_(value)
        got = CHUNK(**late)
    stream.synchronize()
    assert_same_bits(got[0].cpu(), want[0].cpu(), "output")


@needs_gpu
def test_no_call_waits_for_the_gpu() -> None:
    args = moved(SHAPES[2].inputs(torch.bfloat16))
    torch.cuda.set_sync_debug_mode("error")
    try:
        for function in FUNCTIONS:
            function(**args)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_gpu
def test_the_device_of_the_tensors_is_used() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    args = moved(SHAPES[2].inputs(torch.bfloat16))
    want = CHUNK(**args)
    there = {n: x.to("cuda:1") if isinstance(x, Tensor) else x for n, x in args.items()}
    got = CHUNK(**there)
    assert got[0].device == torch.device("cuda", 1)
    assert_same_bits(got[0].cpu(), want[0].cpu(), "output")


# ---- limits --------------------------------------------------------------------------------------


@needs_gpu
@pytest.mark.parametrize("contents", [(5, 3, 200, -7, 90), (0, 2**31, 2**62, 9, -1), (9,) * 5])
def test_wrong_contents_of_cu_seqlens_stay_within_bounds(contents: tuple[int, ...]) -> None:
    """Nobody checks them on a GPU; the next call on good ones is right all the same."""
    case = SHAPES[2]
    args = moved(case.inputs(torch.bfloat16))
    want = CHUNK(**args)
    bad = {**args, "cu_seqlens": torch.tensor(contents, device="cuda")}
    for function in FUNCTIONS:
        function(**bad)
        torch.cuda.synchronize()
    assert_same_bits(CHUNK(**args)[0].cpu(), want[0].cpu(), "output")


@needs_gpu
def test_offsets_beyond_two_to_the_31() -> None:
    """The last of many packed sequences, far behind element 2^31, as if it were alone."""
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("less than 24 GiB of free memory")
    case = Case("last", T=200, HK=1, HV=64, K=128, V=128)
    last = moved(case.inputs(torch.bfloat16))
    tokens = 2**31 // (64 * 128) + 4096
    args = {}
    for name in PER_TOKEN:
        x = last[name]
        args[name] = torch.zeros(1, tokens, *x.shape[2:], dtype=x.dtype, device="cuda")
        args[name][:, -200:] = x
    bounds = torch.tensor([0, tokens - 200, tokens], device="cuda")
    with deltanet_ext.batch_invariant(True):
        want = CHUNK(**last)
        options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
        out, states = CHUNK(**args, **options, cu_seqlens=bounds)
    assert_same_bits(out[:, -200:].cpu(), want[0].cpu(), "output")
    assert_same_bits(states[1:].cpu(), want[1].cpu(), "state")
    assert (out[:, :-200] == 0).all()


@needs_gpu
def test_float64_is_refused_below_too() -> None:
    x = torch.zeros(1, 4, 1, 8, dtype=torch.float64, device="cuda")
    with pytest.raises(TypeError, match="query is float64 on cuda:0"):
        CHUNK(x, x, x, None, None)
    operator = torch.ops.deltanet_ext.chunk_gated_delta_rule_forward
    with pytest.raises((RuntimeError, ValueError), match="float64"):
        operator(
            x, x, x, None, None, None, None, None, None, 1.0, True, True, False, False, False, False
        )


@needs_gpu
@pytest.mark.parametrize("function", FUNCTIONS)
def test_compiled(function: Callable) -> None:
    args = moved(SHAPES[2].inputs(torch.bfloat16))
    want = function(**args)
    got = torch.compile(function, fullgraph=True, backend="aot_eager")(**args)
    assert_same_bits(got[0].cpu(), want[0].cpu(), "output")
    assert_same_bits(got[1].cpu(), want[1].cpu(), "state")
