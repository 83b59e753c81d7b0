# SPDX-License-Identifier: Apache-2.0
"""The backend for flash-linear-attention, on a machine where fla itself has no GPU to run on."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch

pytest.importorskip("fla.backends", reason="flash-linear-attention 0.6 with Triton")
theirs = pytest.importorskip("fla.ops.gated_delta_rule").chunk_gated_delta_rule

import deltanet_ext  # noqa: E402
from deltanet_ext.integrations.fla import register  # noqa: E402

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="fla would run by itself here")


def inputs(tokens: int = 70, heads: int = 2, value_heads: int = 4, dim: int = 16):
    rng = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, tokens, heads, dim, generator=rng) for _ in range(2))
    v = torch.randn(1, tokens, value_heads, dim, generator=rng)
    g, beta = (torch.randn(1, tokens, value_heads, generator=rng) for _ in range(2))
    return q, k, v, g, beta


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scale": 0.3, "output_final_state": True, "use_qk_l2norm_in_kernel": True},
        {"cu_seqlens": torch.tensor([0, 30, 30, 70]), "output_final_state": True},
        {
            "use_gate_in_kernel": True,
            "A_log": torch.zeros(4),
            "dt_bias": torch.ones(4),
            "use_beta_sigmoid_in_kernel": True,
            "allow_neg_eigval": True,
            "state_v_first": True,
            "output_final_state": True,
        },
    ],
    ids=["plain", "options", "packed", "gates in the kernel"],
)
def test_calls_arrive(options):
    register()
    register()  # a second time does no harm
    q, k, v, g, beta = inputs()
    if not options.get("use_gate_in_kernel"):
        g, beta = -g.abs(), beta.sigmoid()
    options = {"use_qk_l2norm_in_kernel": True} | options
    out, state = theirs(q, k, v, g, beta, **options)
    want_out, want_state = deltanet_ext.chunk_gated_delta_rule(q, k, v, g, beta, **options)
    assert torch.equal(out, want_out)
    assert (state is None) == (want_state is None)
    if state is not None:
        assert torch.equal(state, want_state)


def test_gradients():
    register()
    tensors = [x.requires_grad_() for x in inputs()]
    q, k, v, g, beta = tensors
    out, _ = theirs(q, k, v, -g.abs(), beta.sigmoid(), use_qk_l2norm_in_kernel=True)
    out.square().sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in tensors)


def test_what_we_cannot_serve_goes_to_fla():
    register()
    q, k, v, g, beta = inputs(dim=300)
    with pytest.raises(RuntimeError, match="active drivers"):  # theirs, and it has no GPU
        theirs(q, k, v, -g.abs(), beta.sigmoid())


def test_the_layer_of_fla_trains():
    """With the short convolution and the gated norm off: those are fla's own kernels."""
    register()
    from fla.layers import GatedDeltaNet

    layer = GatedDeltaNet(
        hidden_size=64, head_dim=16, num_heads=4, expand_v=1, mode="chunk",
        use_short_conv=False, use_gate=False,
    )  # fmt: skip
    layer.o_norm = torch.nn.RMSNorm(16)
    out = layer(torch.randn(2, 70, 64))[0]
    out.square().mean().backward()
    assert layer.k_proj.weight.grad.isfinite().all()


def test_it_can_be_turned_off():
    code = """
        import torch
        from deltanet_ext.integrations.fla import register
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
        register()
        x = torch.randn(1, 20, 2, 16)
        gate = -torch.rand(1, 20, 2)
        try:
            chunk_gated_delta_rule(x, x, x, gate, -gate)
        except RuntimeError as error:
            print(error)
    """
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        check=False,
        env={"FLA_DELTANET_EXT": "0", "PATH": "/usr/bin:/bin"},
    )
    assert "active drivers" in result.stdout, result.stderr
