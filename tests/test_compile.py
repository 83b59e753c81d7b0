# SPDX-License-Identifier: Apache-2.0
"""torch.compile(fullgraph=True), torch.export, meta tensors: the public functions trace."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensor

import deltanet_ext
from cases import Case
from closeness import assert_same_bits
from deltanet_ext import _checks

FUNCTIONS = (deltanet_ext.chunk_gated_delta_rule, deltanet_ext.recurrent_gated_delta_rule)
# One of them in the quick run: both share everything that is traced.
TRACED = (FUNCTIONS[0], pytest.param(FUNCTIONS[1], marks=pytest.mark.slow))
PER_TOKEN = ("query", "key", "value", "g", "beta")


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, backend="aot_eager", **options)


def inputs(T: int, **options: Any) -> dict[str, Any]:
    sizes = {"HK": 2, "HV": 4, "K": 16, "V": 24, "state": torch.float32}
    return Case("compile", T=T, **{**sizes, **options}).inputs()


def assert_same_results(got: Any, want: Any) -> None:
    for x, y in zip(got, want, strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            assert_same_bits(x, y)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no state": {"state": None},
    "bf16 state": {"state": torch.bfloat16},
    "no gate": {"g": "none"},
    "no beta": {"beta": "none"},
    "scale": {"scale": 0.25},
    "V first": {"state_v_first": True},
    "gate in kernel": {"raw_gate": True},
    "beta in kernel": {"raw_beta": True, "neg_eigval": True},
    "packed": {"cu": (0, 0, 9, 31)},
}


@pytest.mark.parametrize("function", TRACED)
@pytest.mark.parametrize("name", OPTIONS)
def test_fullgraph(name: str, function: Callable[..., Any]) -> None:
    args = inputs(40, **OPTIONS[name])
    assert_same_results(compiled(function)(**args), function(**args))
    args["output_final_state"] = False
    assert_same_results(compiled(function)(**args), function(**args))


@pytest.mark.parametrize("function", TRACED)
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_lengths_do_not_recompile(packed: bool, function: Callable[..., Any]) -> None:
    """Two graphs: the first length, then every other. Also for other contents of cu_seqlens."""
    counter = CompileCounterWithBackend("aot_eager")
    call = torch.compile(function, fullgraph=True, backend=counter)
    for T, cut in ((40, 3), (41, 0), (65, 65), (130, 64), (7, 2), (300, 299)):
        args = inputs(T, cu=(0, cut, T) if packed else None)
        assert_same_results(call(**args), function(**args))
    assert counter.frame_count == 2


def test_numbers_of_sequences_do_not_recompile() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    call = torch.compile(deltanet_ext.chunk_gated_delta_rule, fullgraph=True, backend=counter)
    for cu in ((0, 5, 40), (0, 1, 2, 40), (0, 0, 3, 9, 27), (0, 1, 2, 3, 4, 5, 6)):
        args = inputs(40, cu=cu)
        assert_same_results(call(**args), deltanet_ext.chunk_gated_delta_rule(**args))
    assert counter.frame_count == 2


@pytest.mark.parametrize("function", TRACED)
def test_every_size_dynamic(function: Callable[..., Any]) -> None:
    call = compiled(function, dynamic=True)
    for options in ({"B": 2, "K": 16}, {"B": 3, "K": 20}, {"B": 2, "HK": 1, "HV": 3, "V": 5}):
        args = inputs(33, **options)
        assert_same_results(call(**args), function(**args))


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_wrong_shape_is_named_in_a_trace_too(dynamic: bool) -> None:
    call = compiled(deltanet_ext.chunk_gated_delta_rule, dynamic=dynamic)
    args = inputs(33)
    args["g"] = args["g"][:, :-1]
    with pytest.raises(Exception, match=r"g has shape \[1, 32, .*supported: \[B, T, HV\]"):
        call(**args)


def test_the_other_functions() -> None:
    args = inputs(40)
    rule = {name: args[name] for name in ("key", "value", "g", "beta")}
    for dynamic in (False, True):
        call = compiled(deltanet_ext.chunk_transition, dynamic=dynamic)
        assert_same_results(call(**rule), deltanet_ext.chunk_transition(**rule))
        call = compiled(deltanet_ext.unit_lower_triangular_inverse, dynamic=dynamic)
        L = torch.randn(3, 9, 9)
        assert_same_results([call(L)], [deltanet_ext.unit_lower_triangular_inverse(L)])


@pytest.mark.slow
def test_inductor() -> None:
    """The default backend, with code around the call."""

    def layer(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        out, _ = deltanet_ext.chunk_gated_delta_rule(
            query * 2, key, value, -g.abs(), beta.sigmoid(), use_qk_l2norm_in_kernel=True
        )
        return out.flatten(2).relu()

    args = [inputs(40)[name] for name in PER_TOKEN]
    with torch.no_grad():
        got = torch.compile(layer, fullgraph=True)(*args)
        torch.testing.assert_close(got, layer(*args))


class Layer(torch.nn.Module):
    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        return deltanet_ext.chunk_gated_delta_rule(
            query, key, value, g, beta, output_final_state=True, use_qk_l2norm_in_kernel=True
        )


@pytest.mark.parametrize("strict", [False, True])
def test_export_keeps_the_operator(strict: bool) -> None:
    args = tuple(inputs(40)[name] for name in PER_TOKEN)
    tokens = torch.export.Dim("tokens", min=2, max=4096)
    program = torch.export.export(Layer(), args, dynamic_shapes=[{1: tokens}] * 5, strict=strict)
    targets = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert torch.ops.deltanet_ext.chunk_gated_delta_rule_forward.default in targets
    other = tuple(inputs(77)[name] for name in PER_TOKEN)
    assert_same_results(program.module()(*other), Layer()(*other))
    decomposed = program.run_decompositions()
    targets = [node.target for node in decomposed.graph.nodes if node.op == "call_function"]
    assert torch.ops.deltanet_ext.chunk_gated_delta_rule_forward.default in targets


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("name", OPTIONS)
def test_meta_tensors(name: str, function: Callable[..., Any]) -> None:
    """Shapes, dtypes and strides without numbers, as the real call has them."""
    args = inputs(40, **OPTIONS[name])
    meta = {n: x.to("meta") if isinstance(x, Tensor) else x for n, x in args.items()}
    for got, want in zip(function(**meta), function(**args), strict=True):
        assert got.device.type == "meta"
        assert (got.shape, got.dtype, got.stride()) == (want.shape, want.dtype, want.stride())


def test_meta_tensors_of_the_other_functions() -> None:
    args = inputs(40)
    rule = [args[name].to("meta") for name in ("key", "value", "g", "beta")]
    M, U = deltanet_ext.chunk_transition(*rule)
    assert (M.shape, U.shape) == ((1, 4, 16, 16), (1, 4, 16, 24))
    L = torch.empty(3, 9, 9, dtype=torch.half, device="meta")
    T = deltanet_ext.unit_lower_triangular_inverse(L)
    assert (T.shape, T.dtype) == (L.shape, L.dtype)


def test_fake_tensors_with_packed_sequences() -> None:
    """The contents of a fake cu_seqlens cannot be read, and are not."""
    with torch._subclasses.FakeTensorMode() as mode:
        args = {n: mode.from_tensor(x) if isinstance(x, Tensor) else x
                for n, x in inputs(40, cu=(0, 7, 40)).items()}  # fmt: skip
        out, state = deltanet_ext.chunk_gated_delta_rule(**args)
    assert out.shape == (1, 40, 4, 24)
    assert state.shape == (2, 4, 16, 24)


@pytest.mark.parametrize("name", ["plain", "no state", "V first", "packed", "gate in kernel"])
def test_fake_tensors_on_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a compiler sees a call on CUDA: results lie where the arguments do. Nothing is read."""
    monkeypatch.setattr(_checks, "_CUDA", True)
    args = inputs(40, **OPTIONS[name])
    want = deltanet_ext.chunk_gated_delta_rule(**args)
    gpu = torch.device("cuda", 0)
    meta = {n: x.to("meta") if isinstance(x, Tensor) else x for n, x in args.items()}
    with torch._subclasses.FakeTensorMode() as mode:
        moved = {n: FakeTensor(mode, x, gpu) if isinstance(x, Tensor) else x
                 for n, x in meta.items()}  # fmt: skip
        got = deltanet_ext.chunk_gated_delta_rule(**moved)
    for x, y in zip(got, want, strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            assert x.device == gpu
            assert (x.shape, x.dtype, x.stride()) == (y.shape, y.dtype, y.stride())


@pytest.mark.parametrize("function", FUNCTIONS)
def test_what_a_trace_cannot_see_is_checked_below(function: Callable[..., Any]) -> None:
    """The graph does not read cu_seqlens; the operator does."""
    call = compiled(function)
    call(**inputs(40, cu=(0, 7, 40)))
    for cu, text in (
        ((1, 7, 40), "cu_seqlens starts with 1"),
        ((0, 9, 7), "cu_seqlens decreases from 9 to 7"),
        ((0, 7, 41), "cu_seqlens ends at 41"),
    ):
        args = inputs(40, cu=(0, 7, 40))
        args["cu_seqlens"] = torch.tensor(cu)
        with pytest.raises(RuntimeError, match=text):
            call(**args)


def test_grad_in_a_trace_is_refused_too() -> None:
    args = inputs(40)
    args["value"].requires_grad_()
    with pytest.raises(Exception, match=r"gradients are not built yet|Observed exception"):
        compiled(deltanet_ext.chunk_gated_delta_rule)(**args)
    with torch.no_grad():
        compiled(deltanet_ext.chunk_gated_delta_rule)(**args)
