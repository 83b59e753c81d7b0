# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule in plain PyTorch: the definition of right.

Nothing here uses the compiled library. `recurrent` is equation (1) of docs/algorithm.md, token by
token, in fp64 unless told otherwise: every kernel and every other form is measured against it.
`chunked` is the same rule by equations (2) to (7), `transition` the affine map (8), `inverse`
equation (4) alone. All of them are slow and meant to be read.

Shapes, as everywhere in the package (`HV` is a multiple of `HK`, key head = value head // (HV/HK)):

    query, key [B, T, HK, K]    value [B, T, HV, V]    g, beta [B, T, HV]    state [N, HV, K, V]

`N` is `B`, or the number of sequences when `cu_seqlens` packs them along T with B = 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

__all__ = [
    "L2NORM_EPS",
    "causal_conv1d",
    "chunked",
    "gated_rms_norm",
    "inverse",
    "l2norm",
    "recurrent",
    "transition",
]

L2NORM_EPS = 1e-6


def l2norm(x: Tensor) -> Tensor:
    """`x / sqrt(sum(x^2) + 1e-6)` over the last axis: the epsilon is inside the root."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + L2NORM_EPS)


def gate(g: Tensor, A_log: Tensor, dt_bias: Tensor | None) -> Tensor:
    """The log decay that models make of a raw gate: `-exp(A_log) * softplus(g + dt_bias)`."""
    x = g if dt_bias is None else g + dt_bias
    return -A_log.exp() * torch.logaddexp(x, torch.zeros_like(x))


def recurrent(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    *,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    state_v_first: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor | None]:
    """Equation (1), one token after the other.

        S_t = a_t S_{t-1} + b_t k_t (v_t - a_t S_{t-1}^T k_t)^T    with a_t = exp(g_t)
        o_t = scale S_t^T q_t

    Inputs of any dtype are first converted to `dtype`; the output `[B, T, HV, V]` and the state
    stay in it (nothing is rounded back). Tokens beyond `cu_seqlens[-1]` get an output of zero.

    >>> q = k = torch.ones(1, 2, 1, 1)
    >>> v = torch.tensor([3.0, 5.0]).reshape(1, 2, 1, 1)
    >>> out, state = recurrent(q, k, v, None, torch.full((1, 2, 1), 0.5), output_final_state=True)
    >>> out.flatten().tolist()  # 0 + (3 - 0) / 2, then 1.5 + (5 - 1.5) / 2
    [1.5, 3.25]
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    q, k, v, a_log, b = _prepare(
        query, key, value, g, beta, use_qk_l2norm_in_kernel, use_gate_in_kernel, A_log, dt_bias,
        use_beta_sigmoid_in_kernel, allow_neg_eigval, dtype,
    )  # fmt: skip
    out = torch.zeros_like(v)
    states = _initial_states(initial_state, cu_seqlens, k, v, state_v_first)
    ends = []  # a list, because what autograd has seen must not be written
    for rows, tokens, n in _sequences(cu_seqlens, *v.shape[:2]):
        S = states[n]
        for t in range(tokens.start, tokens.stop):
            q_t, k_t, v_t = q[rows, t, :, :, None], k[rows, t, :, :, None], v[rows, t, :, None, :]
            a_t, b_t = a_log[rows, t].exp()[..., None, None], b[rows, t][..., None, None]
            S = a_t * S
            S = torch.addcmul(S, k_t, b_t * (v_t - k_t.mT @ S))  # S + k (b (v - S^T k))^T
            out[rows, t] = scale * (S.mT @ q_t)[..., 0]
        ends.append(S)
    return out, _final_states(
        torch.cat(ends) if ends else states, output_final_state, state_v_first
    )


def chunked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    *,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    state_v_first: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor | None]:
    """Equations (2) to (7): the same result as `recurrent`, one chunk of tokens after the other."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    q, k, v, a_log, b = _prepare(
        query, key, value, g, beta, use_qk_l2norm_in_kernel, use_gate_in_kernel, A_log, dt_bias,
        use_beta_sigmoid_in_kernel, allow_neg_eigval, dtype,
    )  # fmt: skip
    out = torch.zeros_like(v)
    states = _initial_states(initial_state, cu_seqlens, k, v, state_v_first)
    ends = []  # a list, because what autograd has seen must not be written
    for rows, tokens, n in _sequences(cu_seqlens, *v.shape[:2]):
        S = states[n]
        for start in range(tokens.start, tokens.stop, chunk_size):
            stop = min(start + chunk_size, tokens.stop)
            q_c, k_c, v_c, g_c, b_c = (
                x[rows, start:stop].transpose(1, 2) for x in (q, k, v, a_log, b)
            )
            O, S = _one_chunk(q_c, k_c, v_c, g_c, b_c, S)
            out[rows, start:stop] = scale * O.transpose(1, 2)
        ends.append(S)
    return out, _final_states(
        torch.cat(ends) if ends else states, output_final_state, state_v_first
    )


def transition(
    key: Tensor,
    value: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    *,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Equation (8): M [N, HV, K, K], U [N, HV, K, V] such that a whole sequence maps S to M S + U.

    Straight from the definition: U is what the rule makes of a zero state, and column j of M is
    what it makes of the unit state e_j when every value is zero.
    """
    heads, dim_k = value.shape[2], key.shape[-1]
    sequences = value.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    no_values = value.new_zeros(*value.shape[:3], dim_k)
    unit_states = torch.eye(dim_k, dtype=dtype).expand(sequences, heads, dim_k, dim_k)

    def final_state(v: Tensor, initial_state: Tensor | None) -> Tensor:
        _, state = recurrent(
            key, key, v, g, beta, initial_state, True, use_qk_l2norm_in_kernel,
            cu_seqlens=cu_seqlens, dtype=dtype,
        )  # fmt: skip
        assert state is not None
        return state

    return final_state(no_values, unit_states), final_state(value, None)


def inverse(L: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Equation (4): `(I + tril(L, -1))^-1` for `L [..., C, C]`, row by row (forward substitution).

    Row i of `(I + L) T = I` reads `T_i = e_i - sum_{j<i} L_ij T_j`. What is on and above the
    diagonal of `L` is never read.

    >>> inverse(torch.tensor([[7.0, 7.0], [0.5, 7.0]])).tolist()
    [[1.0, 0.0], [-0.5, 1.0]]
    """
    C = L.shape[-1]
    T = torch.eye(C, dtype=dtype).expand(L.shape).clone()
    for i in range(1, C):
        row = L[..., i : i + 1, :i].to(dtype)
        T[..., i : i + 1, :i] -= row @ T[..., :i, :i]
    return T


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    activation: str | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Equation (29), tap by tap: the output `[B, D, T]` and the final states `[N, D, W - 1]`.

    >>> y, states = causal_conv1d(torch.tensor([[[1.0, 2.0, 3.0]]]), torch.tensor([[10.0, 1.0]]))
    >>> y.tolist(), states.tolist()
    ([[[1.0, 12.0, 23.0]]], [[[3.0]]])
    """
    x, weight = x.to(dtype), weight.to(dtype)
    width = weight.shape[1]
    sequences = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if initial_states is None:
        initial_states = x.new_zeros(sequences, x.shape[1], width - 1)
    out = torch.zeros_like(x)
    ends = []
    for rows, tokens, n in _sequences(cu_seqlens, x.shape[0], x.shape[2]):
        seen = torch.cat([initial_states[n].to(dtype), x[rows, :, tokens]], dim=-1)
        count = tokens.stop - tokens.start
        z = torch.zeros_like(x[rows, :, tokens])
        for j in range(width):
            z = z + weight[:, j, None] * seen[..., j : j + count]
        if bias is not None:
            z = z + bias.to(dtype)[:, None]
        out[rows, :, tokens] = z if activation is None else z * z.sigmoid()
        ends.append(seen[..., count:])
    return out, torch.cat(ends) if ends else initial_states.to(dtype)


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Equation (30): the norm of the last axis, then the weight, then the gate.

    >>> gated_rms_norm(torch.ones(1, 2), torch.zeros(1, 2), torch.ones(2)).tolist()
    [[0.0, 0.0]]
    """
    x, gate = x.to(dtype), gate.to(dtype)
    normed = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)
    return weight.to(dtype) * normed * (gate * gate.sigmoid())


def _one_chunk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, S: Tensor
) -> tuple[Tensor, Tensor]:
    """Unscaled output and next state of one chunk of C tokens.

    q, k [B, HV, C, K], v [B, HV, C, V], g, b [B, HV, C], S [B, HV, K, V].
    """
    C = g.shape[-1]
    # exp(g) is zero long before the clamp; it keeps -inf out of the differences of (2).
    g = g.clamp_min(-800.0 if g.dtype == torch.float64 else -120.0)
    G = g.cumsum(-1)
    above = torch.ones(C, C, dtype=torch.bool).triu(1)
    D = (G[..., :, None] - G[..., None, :]).masked_fill(above, float("-inf")).exp()  # (2)
    L = (b[..., None] * (k @ k.mT) * D).tril(-1)  # (3)
    from_start, to_end = G.exp()[..., None], (G[..., -1:] - G).exp()[..., None]
    residual = b[..., None] * (v - from_start * (k @ S))
    new_v = torch.linalg.solve_triangular(L, residual, upper=False, unitriangular=True)  # (4), (5)
    O = from_start * (q @ S) + ((q @ k.mT) * D) @ new_v  # (6)
    S = from_start[..., -1:, :] * S + (to_end * k).mT @ new_v  # (7)
    return O, S


def _prepare(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    use_qk_l2norm: bool,
    use_gate: bool,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    use_beta_sigmoid: bool,
    allow_neg_eigval: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, g, beta of equation (1): in `dtype`, with HV heads, the options applied."""
    q, k, v = query.to(dtype), key.to(dtype), value.to(dtype)
    if use_qk_l2norm:
        q, k = l2norm(q), l2norm(k)
    group = v.shape[2] // k.shape[2]
    q, k = q.repeat_interleave(group, dim=2), k.repeat_interleave(group, dim=2)
    log_decay = v.new_zeros(v.shape[:3]) if g is None else g.to(dtype)
    if use_gate:
        assert A_log is not None
        bias = None if dt_bias is None else dt_bias.to(dtype)
        log_decay = gate(log_decay, A_log.to(dtype), bias)
    b = v.new_ones(v.shape[:3]) if beta is None else beta.to(dtype)
    if use_beta_sigmoid:
        b = (2.0 if allow_neg_eigval else 1.0) * b.sigmoid()
    return q, k, v, log_decay, b


def _sequences(
    cu_seqlens: Tensor | None, batch: int, tokens: int
) -> Iterator[tuple[slice, slice, slice]]:
    """(rows, tokens, states) of what runs together: the whole batch, or one packed sequence."""
    if cu_seqlens is None:
        yield slice(0, batch), slice(0, tokens), slice(0, batch)
        return
    bounds = cu_seqlens.tolist()
    for n, (start, stop) in enumerate(pairwise(bounds)):
        yield slice(0, 1), slice(start, stop), slice(n, n + 1)


def _initial_states(
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    k: Tensor,
    v: Tensor,
    state_v_first: bool,
) -> Tensor:
    """A fresh [N, HV, K, V] copy of the initial state, or zeros."""
    if initial_state is None:
        sequences = v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        return v.new_zeros(sequences, v.shape[2], k.shape[-1], v.shape[-1])
    state = initial_state.mT if state_v_first else initial_state
    return state.to(v.dtype, copy=True)


def _final_states(states: Tensor, wanted: bool, state_v_first: bool) -> Tensor | None:
    if not wanted:
        return None
    return (states.mT if state_v_first else states).contiguous()
