# SPDX-License-Identifier: Apache-2.0
"""torch.vmap and torch.func: what a transform wraps is not lost below it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import deltanet_ext

H, K, V, T, W = 2, 8, 12, 6, 3
SIZES = {
    "rule": (1, T, H, K),
    "recurrent": (1, T, H, K),
    "transition": (1, T, H, K),
    "inverse": (5, 5),
    "convolution": (1, K, T),
    "norm": (T, K),
}


def functions() -> dict[str, Callable[[Tensor], Tensor]]:
    rng = torch.Generator().manual_seed(1)
    v, g = torch.randn(1, T, H, V, generator=rng), -torch.rand(1, T, H, generator=rng)
    beta = torch.rand(1, T, H, generator=rng)
    weight = torch.randn(K, W, generator=rng)

    def rule(function: Callable[..., tuple[Tensor, Tensor]]) -> Callable[[Tensor], Tensor]:
        def call(x: Tensor) -> Tensor:
            out, state = function(x, x.cos(), v, g, beta, output_final_state=True)
            return out.sum() + state.square().sum()

        return call

    return {
        "rule": rule(deltanet_ext.chunk_gated_delta_rule),
        "recurrent": rule(deltanet_ext.recurrent_gated_delta_rule),
        "transition": lambda x: sum(
            y.square().sum() for y in deltanet_ext.chunk_transition(x, v, g, beta)
        ),
        "inverse": lambda x: deltanet_ext.unit_lower_triangular_inverse(x).square().sum(),
        "convolution": lambda x: deltanet_ext.causal_conv1d_fn(x, weight).square().sum(),
        "norm": lambda x: deltanet_ext.gated_rms_norm(x, x.cos(), torch.ones(K)).sum(),
    }


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", SIZES)
def test_gradients_pass_through_vmap(name: str) -> None:
    function = functions()[name]
    x = torch.randn(3, *SIZES[name], generator=torch.Generator().manual_seed(0)).mul_(0.3)
    x.requires_grad_()
    # Another way to the same gradient must not hide that one is missing.
    together = torch.vmap(lambda y: function(y) + y.sum())(x)
    (got,) = torch.autograd.grad(together.sum(), x)
    alone = torch.stack([function(y) + y.sum() for y in x])
    (want,) = torch.autograd.grad(alone.sum(), x)
    torch.testing.assert_close(together, alone)
    torch.testing.assert_close(got, want)
    assert not torch.allclose(want, torch.ones_like(want))


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev])
def test_gradients_of_torch_func_are_refused(transform: Callable, name: str) -> None:
    with pytest.raises(NotImplementedError, match=r"gradients of torch\.func .* are not built"):
        transform(functions()[name])(torch.zeros(SIZES[name]))
