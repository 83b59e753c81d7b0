# SPDX-License-Identifier: Apache-2.0
"""The example that this project grew from, and the sign that it had wrong.

Its formula solved with (I - L) where equation (4) has (I + L). With the sign as a parameter, +1 is
the fp64 recurrence to the last digits, and -1 is something else.
"""

import pytest
import torch
from torch import Tensor

import deltanet_ext
from cases import recurrence
from closeness import assert_close, rmse_ratio
from deltanet_ext.reference import l2norm

B, S, H, D, CHUNK = 1, 256, 12, 128, 64


def example() -> dict[str, Tensor]:
    """g is drawn from randn * 0.1, so about half of the gates are growth and not decay."""
    torch.manual_seed(42)
    q, k, v = (torch.randn(B, S, H, D) for _ in range(3))
    return {
        "query": q,
        "key": k,
        "value": v,
        "g": torch.randn(B, S, H) * 0.1,
        "beta": torch.randn(B, S, H).sigmoid(),
    }


def chunk_rule(args: dict[str, Tensor], sign: float) -> tuple[Tensor, Tensor]:
    """Equations (2) to (7) in fp64, with `I + sign * L` for the system of (4)."""
    q, k, v, g, b = (args[n].double() for n in ("query", "key", "value", "g", "beta"))
    q, k = l2norm(q), l2norm(k)

    def chunks(x: Tensor) -> Tensor:  # [B, S, H, ...] -> [chunks, B, H, CHUNK, ...]
        return x.unflatten(1, (-1, CHUNK)).transpose(0, 1).transpose(2, 3)

    lower = torch.ones(CHUNK, CHUNK, dtype=torch.float64).tril()
    eye = torch.eye(CHUNK, dtype=torch.float64)
    state, outs = torch.zeros(B, H, D, D, dtype=torch.float64), []
    for Q, K, V, g_c, b_c in zip(*(chunks(x) for x in (q, k, v, g, b)), strict=True):
        G = g_c.cumsum(-1)
        decay = (G[..., :, None] - G[..., None, :]).exp() * lower
        L = (b_c[..., None] * (K @ K.mT) * decay).tril(-1)
        T = torch.linalg.inv(eye + sign * L)
        new_v = T @ (b_c[..., None] * (V - G.exp()[..., None] * (K @ state)))
        outs.append(D**-0.5 * (G.exp()[..., None] * (Q @ state) + (Q @ K.mT * decay) @ new_v))
        to_end = (G[..., -1:] - G).exp()[..., None]
        state = G[..., -1, None, None].exp() * state + (to_end * K).mT @ new_v
    return torch.cat([o.transpose(1, 2) for o in outs], 1), state


@pytest.fixture(scope="module")
def exact() -> tuple[Tensor, Tensor]:
    return recurrence({**example(), "output_final_state": True, "use_qk_l2norm_in_kernel": True})


def test_the_example_runs_and_agrees_with_the_recurrence(exact: tuple[Tensor, Tensor]) -> None:
    args = example()
    assert (args["g"] > 0).float().mean() > 0.4
    out, state = deltanet_ext.chunk_gated_delta_rule(
        **args, chunk_size=64, initial_state=None, output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    assert_close(out, exact[0], 1e-6, "output")
    assert_close(state, exact[1], 1e-6, "state")


def test_plus_is_right(exact: tuple[Tensor, Tensor]) -> None:
    out, state = chunk_rule(example(), sign=+1.0)
    assert_close(out, exact[0], 1e-12, "output")
    assert_close(state, exact[1], 1e-12, "state")


def test_minus_is_wrong(exact: tuple[Tensor, Tensor]) -> None:
    out, state = chunk_rule(example(), sign=-1.0)
    assert rmse_ratio(out, exact[0]) > 0.5
    assert rmse_ratio(state, exact[1]) > 0.5
