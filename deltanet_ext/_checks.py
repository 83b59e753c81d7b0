# SPDX-License-Identifier: Apache-2.0
"""Argument checks of the public functions.

Each `check_*` first makes one cheap pass of comparisons (`_plain_*`; a decode step runs it once per
layer and token, so it counts in nanoseconds). Only when something is not plain does the matching
`_explain_*` go through the same rules one by one, and raise an error that names the function, the
argument, what it got and what is supported. What is unusual but right passes both.

Nothing here reads the contents of a tensor, with one exception: `cu_seqlens` on the CPU, in eager
mode. Contents on a GPU are never waited for; its kernels keep within bounds whatever they find. The
C++ operators check everything again, also what a traced graph cannot. Eager calls on the CPU
without gradients go to them first, and come here only with what they refused (ops.py).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from deltanet_ext import _load

MAX_HEAD_DIM = 256
MAX_INVERSE_SIZE = 128

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_CUDA_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_INDICES = (torch.int64, torch.int32)
_CUDA = _load.cuda_library() is not None


def check_chunk_size(call: str, chunk_size: int) -> None:
    """A hint, but not any hint: a positive int."""
    if not isinstance(chunk_size, int) or isinstance(chunk_size, bool):
        raise TypeError(f"{call}: chunk_size is {_kind(chunk_size)}; supported: int, 1 or more")
    if chunk_size < 1:
        raise ValueError(f"{call}: chunk_size is {chunk_size}; supported: 1 or more")


def check_rule(
    call: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    scale: float | None,
    output_final_state: bool,
    use_qk_l2norm_in_kernel: bool,
    use_gate_in_kernel: bool,
    use_beta_sigmoid_in_kernel: bool,
    allow_neg_eigval: bool,
    state_v_first: bool,
) -> None:
    """The arguments that `chunk_gated_delta_rule` and `recurrent_gated_delta_rule` share."""
    if not (
        cu_seqlens is None  # packed calls are long: the thorough pass costs them nothing
        and _plain_tokens(query, key, value, g, beta)
        and (initial_state is None or _plain_state(query, value, initial_state, state_v_first))
        and (scale is None or type(scale) is float)
        and type(output_final_state) is bool
        and type(use_qk_l2norm_in_kernel) is bool
        and type(state_v_first) is bool
        and (
            _plain_gate(value, g, A_log, dt_bias)
            if use_gate_in_kernel is True
            else use_gate_in_kernel is False and A_log is None and dt_bias is None
        )
        and (
            type(allow_neg_eigval) is bool and beta is not None
            if use_beta_sigmoid_in_kernel is True
            else use_beta_sigmoid_in_kernel is False and allow_neg_eigval is False
        )
    ):
        _need_tensor(call, "query", query)
        _explain_tokens(call, query, key, value, g, beta, cu_seqlens)
        _explain_state(call, query, value, initial_state, cu_seqlens, state_v_first)
        _explain_flags(
            call,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            state_v_first=state_v_first,
            use_gate_in_kernel=use_gate_in_kernel,
            use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
            allow_neg_eigval=allow_neg_eigval,
        )
        _explain_scale(call, scale)
        _explain_gate(call, query, value, g, use_gate_in_kernel, A_log, dt_bias)
        _explain_beta(call, beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)


def check_transition(
    call: str,
    key: Tensor,
    value: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    use_qk_l2norm_in_kernel: bool,
    cu_seqlens: Tensor | None,
) -> None:
    """The arguments of `chunk_transition`: those of the rule, without a query and a state."""
    if not (
        cu_seqlens is None
        and type(use_qk_l2norm_in_kernel) is bool
        and _plain_tokens(key, key, value, g, beta)
    ):
        _explain_tokens(call, None, key, value, g, beta, cu_seqlens)
        _explain_flags(call, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)


def check_rule_update(
    call: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    state_indices: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    scale: float | None,
    *flags: bool,
) -> None:
    """The arguments of `gated_delta_rule_update`: those of the rule, and a state to write."""
    check_rule(call, query, key, value, g, beta, None, None, A_log, dt_bias, scale, False, *flags)
    if query.device.type == "cuda":
        raise NotImplementedError(
            f"{call}: query is on {query.device}; supported: cpu, and on cuda "
            "recurrent_gated_delta_rule with initial_state"
        )
    state_v_first = flags[-1]
    _need_tensor(call, "state", state)
    _need_device(call, "state", state, query.device)
    _need_dtype(call, "state", state, (state_dtype(query),))
    batch, _, heads, dim_v = value.shape
    matrix = (dim_v, query.shape[3]) if state_v_first else (query.shape[3], dim_v)
    text = "[N, HV, V, K]" if state_v_first else "[N, HV, K, V]"
    _need_rank(call, "state", state, text)
    slots = batch if state_indices is None else state.shape[0]
    if state_indices is not None:
        _explain_slots(call, "state_indices", state_indices, query, batch, slots)
    _need_shape(call, "state", state, text, (slots, heads, *matrix))
    if not state.is_contiguous():
        _need_own_memory(call, "state", state)
    if torch.is_grad_enabled():
        for name, given in (
            ("query", query),
            ("key", key),
            ("value", value),
            ("g", g),
            ("beta", beta),
            ("state", state),
            ("A_log", A_log),
            ("dt_bias", dt_bias),
        ):
            _need_no_gradient(
                call, name, given, "state", "recurrent_gated_delta_rule with initial_state"
            )


def check_inverse(call: str, L: Tensor) -> None:
    """One `[..., C, C]` tensor, C from 1 to 128."""
    _need_tensor(call, "L", L)
    _need_dtype(call, "L", L, _FLOATS)
    if L.dim() < 2 or L.shape[-1] != L.shape[-2]:
        raise ValueError(f"{call}: L has shape {_shape(L)}; supported: [..., C, C]")
    if not 1 <= L.shape[-1] <= MAX_INVERSE_SIZE:
        raise ValueError(
            f"{call}: L has size C = {L.shape[-1]}; supported: 1 to {MAX_INVERSE_SIZE}"
        )
    _need_device(call, "L", L, L.device)
    _need_cuda_dtype(call, "L", L)


# ---- the cheap pass: True when everything is as the common case has it -----------------


def _plain_tokens(query: Any, key: Any, value: Any, g: Any, beta: Any) -> bool:
    if not (isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)):
        return False
    if query.is_nested or key.is_nested or value.is_nested:  # has no shape
        return False
    key_shape, value_shape, dtype = key.shape, value.shape, query.dtype
    if len(key_shape) != 4 or len(value_shape) != 4 or dtype not in _FLOATS:
        return False
    batch, tokens, key_heads, dim_k = key_shape
    value_batch, value_tokens, heads, dim_v = value_shape
    on = _plain_device(query)
    return (
        (query is key or query.shape == key_shape)
        and batch == value_batch
        and tokens == value_tokens
        and 1 <= key_heads <= heads
        and heads % key_heads == 0
        and 1 <= dim_k <= MAX_HEAD_DIM
        and 1 <= dim_v <= MAX_HEAD_DIM
        and key.dtype == dtype
        and value.dtype == dtype
        and (on is None or (on.type == "cuda" and _CUDA and dtype in _CUDA_FLOATS))
        and _is_plain(query, on)
        and _is_plain(key, on)
        and _is_plain(value, on)
        and (g is None or _plain_per_token(g, batch, tokens, heads, dtype, on))
        and (beta is None or _plain_per_token(beta, batch, tokens, heads, dtype, on))
    )


def _plain_per_token(
    x: Any, batch: int, tokens: int, heads: int, dtype: torch.dtype, on: torch.device | None
) -> bool:
    return (
        isinstance(x, Tensor)
        and not x.is_nested
        and x.shape == (batch, tokens, heads)
        and (x.dtype == dtype or (x.dtype == torch.float32 and dtype != torch.float64))
        and _is_plain(x, on)
    )


def _plain_state(query: Tensor, value: Tensor, state: Any, state_v_first: bool) -> bool:
    batch, _, heads, dim_v = value.shape
    dim_k = query.shape[3]
    return (
        isinstance(state, Tensor)
        and not state.is_nested
        and state.shape
        == ((batch, heads, dim_v, dim_k) if state_v_first else (batch, heads, dim_k, dim_v))
        and state.dtype in _FLOATS
        and _is_plain(state, _plain_device(query))
    )


def _plain_gate(value: Tensor, g: Any, A_log: Any, dt_bias: Any) -> bool:
    heads, on = value.shape[2], _plain_device(value)
    return (
        g is not None
        and _plain_per_head(A_log, heads, on)
        and (dt_bias is None or _plain_per_head(dt_bias, heads, on))
    )


def _plain_per_head(x: Any, heads: int, on: torch.device | None) -> bool:
    return (
        isinstance(x, Tensor)
        and not x.is_nested
        and x.shape == (heads,)
        and x.dtype in _FLOATS
        and _is_plain(x, on)
    )


def _plain_device(x: Tensor) -> torch.device | None:
    """None is the CPU, the device that is asked for without making an object."""
    return None if x.is_cpu else x.device


def _is_plain(x: Tensor, on: torch.device | None) -> bool:
    return (x.is_cpu if on is None else x.device == on) and x.layout is torch.strided


# ---- the thorough pass: raises, or agrees ----------------------------------------------


def _explain_tokens(
    call: str,
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    cu_seqlens: Tensor | None,
) -> None:
    """q, k, v, g, beta, cu_seqlens. `query=None` for the function that has none."""
    first, first_name = (key, "key") if query is None else (query, "query")
    required = {"key": key, "value": value}
    if query is not None:
        required = {"query": query, **required}
    for name, x in required.items():
        _need_tensor(call, name, x)
        _need_dtype(call, name, x, _FLOATS)
        _need_rank(call, name, x, "[B, T, HV, V]" if name == "value" else "[B, T, HK, K]")
    for name, x in required.items():
        if x.dtype != first.dtype:
            raise TypeError(
                f"{call}: {name} is {_dtype(x)} and {first_name} is {_dtype(first)}; "
                "supported: one dtype for query, key and value"
            )
    if query is not None and query.shape != key.shape:
        raise ValueError(
            f"{call}: query has shape {_shape(query)} and key has shape {_shape(key)}; "
            "supported: the same shape [B, T, HK, K]"
        )
    batch, tokens, key_heads, dim_k = key.shape
    heads, dim_v = value.shape[2:]
    if value.shape[:2] != key.shape[:2]:
        raise ValueError(
            f"{call}: value has shape {_shape(value)}; supported: [B, T, HV, V] "
            f"with B = {batch} and T = {tokens} as in key"
        )
    if key_heads < 1:
        raise ValueError(f"{call}: key has {key_heads} heads; supported: 1 or more")
    if heads < 1 or heads % key_heads != 0:
        raise ValueError(
            f"{call}: value has {heads} heads and key has {key_heads}; "
            "supported: a multiple of the key heads"
        )
    for name, dim in (("key", dim_k), ("value", dim_v)):
        if not 1 <= dim <= MAX_HEAD_DIM:
            raise ValueError(f"{call}: {name} has head dim {dim}; supported: 1 to {MAX_HEAD_DIM}")
    for name, per_token in (("g", g), ("beta", beta)):
        if per_token is None:
            continue
        _need_tensor(call, name, per_token, "torch.Tensor or None")
        _need_dtype(call, name, per_token, _per_token_dtypes(first.dtype))
        _need_shape(call, name, per_token, "[B, T, HV]", (batch, tokens, heads))
    for name, given in {**required, "g": g, "beta": beta, "cu_seqlens": cu_seqlens}.items():
        if isinstance(given, Tensor):
            _need_device(call, name, given, first.device)
    _need_cuda_dtype(call, first_name, first)
    if cu_seqlens is not None:
        _explain_cu_seqlens(call, cu_seqlens, batch, tokens)


def _explain_cu_seqlens(call: str, cu_seqlens: Tensor, batch: int, tokens: int) -> None:
    _need_tensor(call, "cu_seqlens", cu_seqlens, "torch.Tensor or None")
    _need_dtype(call, "cu_seqlens", cu_seqlens, _INDICES)
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(f"{call}: cu_seqlens has shape {_shape(cu_seqlens)}; supported: [N + 1]")
    if batch != 1:
        raise ValueError(
            f"{call}: cu_seqlens is given and the batch size is {batch}; "
            "supported: sequences packed along T with batch size 1"
        )
    if not _contents_are_at_hand(cu_seqlens):
        return
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0:
        raise ValueError(f"{call}: cu_seqlens starts at {bounds[0]}; supported: 0")
    for n, (start, stop) in enumerate(pairwise(bounds)):
        if stop < start:
            raise ValueError(
                f"{call}: cu_seqlens decreases from {start} to {stop} at sequence {n}; "
                "supported: bounds that never decrease"
            )
    if bounds[-1] > tokens:
        raise ValueError(f"{call}: cu_seqlens ends at {bounds[-1]}; supported: up to T = {tokens}")


def _contents_are_at_hand(x: Tensor) -> bool:
    """Reading must neither wait for a device nor break a trace."""
    return (
        not torch.compiler.is_compiling()
        and type(x) in (Tensor, torch.nn.Parameter)
        and x.is_cpu
        and torch._C._len_torch_dispatch_stack() == 0
        and not torch._C._functorch.is_functorch_wrapped_tensor(x)
    )


def _explain_state(
    call: str,
    query: Tensor,
    value: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    state_v_first: bool,
) -> None:
    if initial_state is None:
        return
    _need_tensor(call, "initial_state", initial_state, "torch.Tensor or None")
    _need_dtype(call, "initial_state", initial_state, _FLOATS)
    sequences = value.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    heads, dim_v, dim_k = value.shape[2], value.shape[3], query.shape[3]
    if state_v_first:
        text, wanted = "[N, HV, V, K] (state_v_first)", (sequences, heads, dim_v, dim_k)
    else:
        text, wanted = "[N, HV, K, V]", (sequences, heads, dim_k, dim_v)
    _need_shape(call, "initial_state", initial_state, text, wanted)
    _need_device(call, "initial_state", initial_state, query.device)


def state_dtype(query: Tensor) -> torch.dtype:
    """The state, and all arithmetic, is fp32; fp64 for fp64 inputs."""
    return torch.float64 if query.dtype == torch.float64 else torch.float32


def _explain_slots(call: str, name: str, indices: Any, x: Tensor, batch: int, slots: int) -> None:
    """Indices [B] into a pool of states that is written."""
    _need_tensor(call, name, indices, "torch.Tensor or None")
    _need_device(call, name, indices, x.device)
    _need_dtype(call, name, indices, _INDICES)
    _need_shape(call, name, indices, "[B]", (batch,))
    if not _contents_are_at_hand(indices):
        return
    taken = set()
    for row, slot in enumerate(indices.tolist()):
        if slot >= slots:
            raise ValueError(
                f"{call}: {name} has {slot} at position {row}; supported: below the "
                f"{slots} states, or negative for none"
            )
        if slot in taken:
            raise ValueError(f"{call}: {name} has {slot} twice; two rows would write one state")
        if slot >= 0:
            taken.add(slot)


def _need_own_memory(call: str, name: str, written: Tensor) -> None:
    """Elements that share memory cannot be written one by one."""
    reach = 0
    for stride, size in sorted(zip(written.stride(), written.shape, strict=True)):
        if size > 1 and stride <= reach:
            raise ValueError(
                f"{call}: {name} overlaps itself (shape {_shape(written)}, strides "
                f"{tuple(written.stride())}); supported: elements with memory of their own"
            )
        reach += stride * (size - 1) if size > 1 else 0


def _need_no_gradient(
    call: str, name: str, x: Tensor | None, written: str, differentiable: str
) -> None:
    """What is overwritten has no gradient."""
    if x is not None and x.requires_grad:
        raise NotImplementedError(
            f"{call}: {name} requires grad, and {written} is overwritten; supported: "
            f"torch.no_grad(), or {differentiable}"
        )


def _explain_flags(call: str, **flags: bool) -> None:
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise TypeError(f"{call}: {name} is {_kind(flag)}; supported: bool")


def _explain_scale(call: str, scale: float | None) -> None:
    if scale is None:
        return
    if not isinstance(scale, (int, float)) or isinstance(scale, bool):
        raise TypeError(f"{call}: scale is {_kind(scale)}; supported: float or None (K ** -0.5)")
    try:
        float(scale)
    except OverflowError:
        raise ValueError(
            f"{call}: scale is too large for a float; supported: float or None (K ** -0.5)"
        ) from None


def _explain_gate(
    call: str,
    query: Tensor,
    value: Tensor,
    g: Tensor | None,
    use_gate_in_kernel: bool,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
) -> None:
    for name, x in (("A_log", A_log), ("dt_bias", dt_bias)):
        if x is None:
            continue
        if not use_gate_in_kernel:
            raise ValueError(
                f"{call}: {name} is given and use_gate_in_kernel is False; "
                f"supported: {name} with use_gate_in_kernel=True only"
            )
        _need_tensor(call, name, x, "torch.Tensor or None")
        _need_dtype(call, name, x, _FLOATS)
        _need_shape(call, name, x, "[HV]", (value.shape[2],))
        _need_device(call, name, x, query.device)
    if use_gate_in_kernel:
        if A_log is None:
            raise ValueError(
                f"{call}: A_log is None and use_gate_in_kernel is True; supported: a tensor [HV]"
            )
        if g is None:
            raise ValueError(
                f"{call}: g is None and use_gate_in_kernel is True; "
                "supported: a tensor [B, T, HV] with the raw gate"
            )


def _explain_beta(
    call: str, beta: Tensor | None, use_beta_sigmoid_in_kernel: bool, allow_neg_eigval: bool
) -> None:
    if use_beta_sigmoid_in_kernel and beta is None:
        raise ValueError(
            f"{call}: beta is None and use_beta_sigmoid_in_kernel is True; "
            "supported: a tensor [B, T, HV] with the raw beta"
        )
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        raise ValueError(
            f"{call}: allow_neg_eigval is True and use_beta_sigmoid_in_kernel is False; "
            "supported: allow_neg_eigval with use_beta_sigmoid_in_kernel=True only "
            "(a beta in [0, 2] may also be given directly)"
        )


def refuse_tangents(*args: Any) -> None:
    """Forward-mode gradients: a custom operator would silently drop them."""
    for x in args:
        if isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError(
                "deltanet_ext: forward-mode gradients are not built yet; "
                "use torch.autograd (reverse mode)"
            )


def refuse_transforms(*args: Any) -> None:
    """torch.func.grad and its kin go another way than torch.autograd. `vmap` does not."""
    for x in args:
        if isinstance(x, Tensor) and torch._C._functorch.is_gradtrackingtensor(x):
            raise NotImplementedError(
                "deltanet_ext: the gradients of torch.func (grad, vjp, jacrev) are not built; "
                "use torch.autograd"
            )


# ---- one argument, one rule ------------------------------------------------------------


def _need_tensor(call: str, name: str, x: Any, supported: str = "torch.Tensor") -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{call}: {name} is {_kind(x)}; supported: {supported}")
    if x.is_nested:
        raise TypeError(f"{call}: {name} is a nested tensor; supported: {supported}, strided")


def _need_dtype(call: str, name: str, x: Tensor, supported: Sequence[torch.dtype]) -> None:
    if x.dtype not in supported:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in supported)
        raise TypeError(f"{call}: {name} is {_dtype(x)}; supported: {names}")


def _need_rank(call: str, name: str, x: Tensor, shape: str) -> None:
    if x.dim() != 4:
        raise ValueError(f"{call}: {name} has shape {_shape(x)}; supported: {shape}")


def _need_shape(call: str, name: str, x: Tensor, text: str, wanted: Sequence[int]) -> None:
    if x.shape != wanted:
        sizes = ", ".join(str(operator.index(size)) for size in wanted)
        raise ValueError(f"{call}: {name} has shape {_shape(x)}; supported: {text} = [{sizes}]")


def _need_device(call: str, name: str, x: Tensor, device: torch.device) -> None:
    if x.layout is not torch.strided:
        layout = str(x.layout).removeprefix("torch.")
        raise TypeError(f"{call}: {name} has layout {layout}; supported: strided")
    if x.device.type not in ("cpu", "cuda", "meta"):  # meta: shapes only
        raise ValueError(
            f"{call}: {name} is on {x.device}; supported: {'cpu, cuda' if _CUDA else 'cpu'} "
            "(there are no kernels for other devices)"
        )
    if x.device.type == "cuda" and not _CUDA:
        raise ValueError(f"{call}: {name} is on {x.device}; supported: cpu ({_load.why_no_cuda()})")
    if x.device != device:
        raise ValueError(
            f"{call}: {name} is on {x.device} and other arguments are on {device}; "
            "supported: one device"
        )


def _need_cuda_dtype(call: str, name: str, x: Tensor) -> None:
    """fp64 is for gradient checks, which need no GPU."""
    if x.device.type == "cuda" and x.dtype == torch.float64:
        raise TypeError(
            f"{call}: {name} is float64 on {x.device}; supported there: float32, bfloat16, float16 "
            "(float64 on cpu only)"
        )


def _per_token_dtypes(dtype: torch.dtype) -> Sequence[torch.dtype]:
    """What g and beta may be: fp32 or as query; fp64 mixes with nothing."""
    return (dtype,) if dtype in (torch.float32, torch.float64) else (torch.float32, dtype)


def _kind(x: Any) -> str:
    """What an argument of the wrong type is, in words."""
    if x is None:
        return "None"
    if isinstance(x, (bool, int, float)):
        return f"{x!r} ({type(x).__name__})"
    kind = type(x)
    # NumPy has a bool of its own.
    return (
        f"a {kind.__module__}.{kind.__name__}" if kind.__name__ == "bool" else f"a {kind.__name__}"
    )


def _shape(x: Tensor) -> str:
    # index: a size that is symbolic in a trace has no text there.
    return f"[{', '.join(str(operator.index(size)) for size in x.shape)}]"


def _dtype(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")
