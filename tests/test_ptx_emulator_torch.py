# SPDX-License-Identifier: Apache-2.0
"""CUDA operators in torch without a GPU: the in-chunk cumulative gate, kernel and operator code."""

from __future__ import annotations

import pytest
import torch

import emulated

if reason := emulated.why_not():
    pytest.skip(f"emulated CUDA operators: {reason}", allow_module_level=True)

pytestmark = pytest.mark.slow  # the first run compiles for minutes


def gate(*sizes: int, seed: int = 0) -> torch.Tensor:
    gen = torch.Generator().manual_seed(seed)
    return -20 * torch.rand(*sizes, generator=gen, dtype=torch.float64).square()


def expected(g: torch.Tensor, chunk: int) -> torch.Tensor:
    """G [B, H, T] in fp64."""
    g = g.double().clamp_min(-120).movedim(2, 1)
    return torch.cat([part.cumsum(-1) for part in g.split(chunk, dim=-1)], dim=-1)


def assert_is_the_pair(pair, want: torch.Tensor) -> None:
    high, low = pair
    assert high.dtype == low.dtype == torch.float32
    assert high.shape == low.shape == want.shape
    assert torch.equal(high, want.float())
    torch.testing.assert_close(high.double() + low.double(), want, rtol=2**-46, atol=1e-30)


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "chunk"), [(1, 16), (63, 32), (64, 64), (65, 64), (300, 128)])
def test_gate_cumsum(tokens, chunk, dtype, seed):
    g = gate(2, tokens, 3).to(dtype)
    with emulated.schedule(seed):
        got = emulated.call("gate_cumsum", g, chunk)
    assert_is_the_pair(got, expected(g, chunk))


def test_views_and_extreme_gates():
    storage = gate(3, 2, 100, 5).float()
    storage[0, 0, 7] = -torch.inf
    g = storage.permute(1, 2, 3, 0)[..., 1:4, 0]  # strided, offset
    assert not g.is_contiguous()
    assert_is_the_pair(emulated.call("gate_cumsum", g, 64), expected(g, 64))
    wide = gate(1, 70, 1).float().expand(2, 70, 4)  # stride 0
    assert_is_the_pair(emulated.call("gate_cumsum", wide, 64), expected(wide, 64))


def test_two_runs_agree_bit_for_bit():
    g = gate(1, 500, 2).float()
    runs = []
    for seed in range(4):
        with emulated.schedule(seed):
            runs.append(torch.stack(emulated.call("gate_cumsum", g, 64)))
    assert all(torch.equal(run, runs[0]) for run in runs)


def test_empty_and_wrong_arguments():
    assert emulated.call("gate_cumsum", torch.empty(0, 8, 2), 64)[0].shape == (0, 2, 8)
    assert emulated.call("gate_cumsum", torch.empty(2, 0, 2), 64)[0].shape == (2, 2, 0)
    with pytest.raises(ValueError, match="chunk size 48 is not built; supported: 16, 32, 64, 128"):
        emulated.call("gate_cumsum", torch.zeros(1, 8, 2), 48)
    with pytest.raises(RuntimeError, match=r"g has shape \[8, 2\]; expected \[B, T, H\]"):
        emulated.call("gate_cumsum", torch.zeros(8, 2), 64)
    with pytest.raises(ValueError, match="g is float64"):
        emulated.call("gate_cumsum", torch.zeros(1, 8, 2, dtype=torch.float64), 64)


def test_capture_and_replay_with_other_contents():
    g = gate(1, 130, 2).float()
    with emulated.capture() as graph:
        pair = emulated.call("gate_cumsum", g, 64)
    for seed in (1, 2):
        g.copy_(gate(1, 130, 2, seed=seed))
        graph.replay()
        assert_is_the_pair(pair, expected(g, 64))


def test_a_finding_is_an_exception_with_the_report():
    base = torch.zeros(1000)
    for x in (torch.zeros(250), base[:250]):  # of its own, and inside a larger storage
        with pytest.raises(RuntimeError) as found:
            emulated.call("reads_too_far", x)
        text = str(found.value)
        assert "reads_too_far: the launch failed" in text
        assert "read of 4 bytes at offset 1000 of an allocation of 1000 bytes" in text
        assert "reads_too_far.cu:9:" in text
        assert "thread   (121,0,0)" in text
        assert "python -m pytest" in text
        assert "test_a_finding_is_an_exception" in text
    assert emulated.call("gate_cumsum", torch.zeros(1, 8, 1), 16)  # and the next call runs


def test_what_breaks_a_graph_is_an_exception():
    runtime = emulated.runtime()
    with (
        pytest.raises(RuntimeError, match="cudaDeviceSynchronize while a stream is capturing"),
        emulated.capture(),
    ):
        runtime.cudaDeviceSynchronize()


def test_schemas_of_the_extension_are_there_too():
    names = ("chunk_gated_delta_rule_forward", "unit_lower_triangular_inverse", "chunk_transition")
    assert all(hasattr(emulated.load(), name) for name in names)


def test_public_functions_go_to_the_emulated_operators():
    """float64 tells them apart: CUDA declines it, the CPU does not."""
    deltanet_ext = pytest.importorskip("deltanet_ext")
    if not deltanet_ext._load.is_loaded():
        pytest.skip("the compiled library deltanet_ext._C is missing")
    inverse = deltanet_ext.unit_lower_triangular_inverse
    L = torch.zeros(4, 4, dtype=torch.float64)
    with emulated.path():
        assert torch.equal(inverse(L.float()), torch.eye(4))
        with pytest.raises(RuntimeError, match="float64 runs on the CPU"):
            inverse(L)
    assert torch.equal(inverse(L), torch.eye(4, dtype=torch.float64))


def test_opcheck():
    g = gate(1, 70, 2).float()
    torch.library.opcheck(emulated.load().gate_cumsum.default, (g, 64), test_utils=("test_schema",))
