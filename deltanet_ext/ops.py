# SPDX-License-Identifier: Apache-2.0
"""The public functions. Each checks its arguments, calls one `torch.ops.deltanet_ext` operator, and
names results as transformers does.

Common to all (equation numbers are those of docs/algorithm.md):

* Shapes: query, key `[B, T, HK, K]`; value `[B, T, HV, V]`; g, beta `[B, T, HV]`; states
  `[N, HV, K, V]`. HV is a multiple of HK and value head h reads key head `h // (HV / HK)`. K and V
  from 1 to 256, T from 0. N is B, or the number of sequences in `cu_seqlens`. Any strides.
* dtypes: query, key, value are all float32, bfloat16, float16 or float64. g and beta are float32 or
  of query's dtype (float64 for float64). All arithmetic, and the state, is fp32 (fp64 for float64).
* Devices: the CPU, and CUDA where `build_info()["cuda"]`; all tensors of a call on one of them.
  float64 on the CPU only. `cu_seqlens` on a GPU is never waited for: what is wrong with it there is
  no error, and its tokens and states are arbitrary.
* Outputs are new contiguous tensors; no argument is ever written, but the `state` of
  `gated_delta_rule_update`, which is there for it.
* Gradients: of every tensor argument but `cu_seqlens`, by torch.autograd; not of
  `gated_delta_rule_update`. For the backward pass a
  call keeps its inputs and one state per 1056 tokens. Second derivatives and forward mode raise
  NotImplementedError.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from deltanet_ext import _checks, _load, _settings

__all__ = [
    "available_cpu_isas",
    "build_info",
    "chunk_gated_delta_rule",
    "chunk_transition",
    "cpu_isa",
    "force_cpu_isa",
    "fused_recurrent_gated_delta_rule",
    "gated_delta_rule_update",
    "recurrent_gated_delta_rule",
    "unit_lower_triangular_inverse",
]


def _operator(name: str) -> Callable[..., Any]:
    """The operator, looked up once; without the library, something that says why when called."""
    if _load.is_loaded():
        operator: Callable[..., Any] = getattr(torch.ops.deltanet_ext, name).default
        return operator

    def unavailable(*args: Any) -> Any:
        _load.library()

    return unavailable


_chunk_forward = _operator("chunk_gated_delta_rule_forward")
_chunk_forward_saving = _operator("chunk_gated_delta_rule_forward_saving")
_recurrent_forward = _operator("recurrent_gated_delta_rule_forward")
_recurrent_forward_saving = _operator("recurrent_gated_delta_rule_forward_saving")
_update = _operator("gated_delta_rule_update")
_chunk_transition = _operator("chunk_transition")
_inverse = _operator("unit_lower_triangular_inverse")


def _run(operator: Callable[..., Any], *args: Any, saving: Callable[..., Any] | None = None) -> Any:
    """Calls an operator on checked arguments; where a gradient will be needed, the one that also
    saves states for it.

    Outside of a trace the Python autograd layer of torch.library is several microseconds of a
    decode step's few dozen, so eager calls that need no gradient go below it.
    """
    compiling = torch.compiler.is_compiling()
    transformed = not compiling and _in_transform()
    if not compiling and forward_ad._current_level >= 0:
        _checks.refuse_tangents(*args)
    if transformed:
        _checks.refuse_transforms(*args)
    if torch.is_grad_enabled() and _any_requires_grad(args):
        return (saving or operator)(*args)
    if compiling or transformed:
        return operator(*args)
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*args)


def _run_rule(
    call: str,
    operator: Callable[..., Any],
    saving: Callable[..., Any],
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
    *flags: bool,
) -> tuple[Tensor, Tensor | None]:
    """The rule on arguments as they came."""
    tensors = (query, key, value, g, beta, initial_state, cu_seqlens, A_log, dt_bias)
    options = (output_final_state, *flags)
    out, state, *_ = _call(call, _checks.check_rule, operator, tensors, scale, options, saving)
    return out, state if output_final_state else None


def _call(
    call: str,
    check: Callable[..., None],
    operator: Callable[..., Any],
    tensors: tuple[Any, ...],
    scale: float | None,
    options: tuple[bool, ...],
    saving: Callable[..., Any] | None = None,
) -> Any:
    """An operator of the rule on arguments as they came, the query first.

    A decode step cannot afford to check everything twice, and the C++ operator checks all that can
    be wrong with tensors on the CPU. So an eager call without gradients goes there at once, and
    only what it refuses is looked at in Python, for an error in better words.
    """
    refused = None
    if (
        _are_plain_cpu_tensors(tensors)
        and (scale is None or type(scale) is float)
        and {*map(type, options)} == {bool}  # the operator would take 1 for True
        and forward_ad._current_level < 0
        and not torch.compiler.is_compiling()
        and not _in_transform()
    ):
        try:
            factor = tensors[0].shape[-1] ** -0.5 if scale is None else scale
            with torch._C._AutoDispatchBelowAutograd():
                return operator(*tensors, factor, *options)
        except Exception as error:
            refused = error
    check(call, *tensors, scale, *options)
    if refused is not None:
        raise refused
    factor = tensors[0].shape[-1] ** -0.5 if scale is None else scale
    return _run(operator, *tensors, factor, *options, saving=saving)


def _note_write(x: Tensor) -> None:
    """Who saved x for a backward pass must learn that it has changed."""
    if not torch.compiler.is_compiling() and not x.is_inference():
        torch.autograd.graph.increment_version(x)


def _in_transform() -> bool:
    """Inside torch.vmap or torch.func, whose tensors hide that those they wrap need gradients."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def _are_plain_cpu_tensors(tensors: tuple[Any, ...]) -> bool:
    """On the CPU each (a tensor on another device would choose its operator) and without a gradient
    to compute. None is fine."""
    with_grad = torch.is_grad_enabled()
    for x in tensors:
        if x is not None and (
            not isinstance(x, Tensor) or not x.is_cpu or (with_grad and x.requires_grad)
        ):
            return False
    return True


def _any_requires_grad(args: tuple[Any, ...]) -> bool:
    for x in args:  # noqa: SIM110  a plain loop is faster, and this runs once per layer and token
        if isinstance(x, Tensor) and x.requires_grad:
            return True
    return False


def chunk_gated_delta_rule(
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
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule over whole sequences, chunk by chunk: equations (2) to (7).

    Computes what equation (1) defines, per sequence and value head with state `S [K, V]`:

        S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - exp(g_t) S_{t-1}^T k_t)^T
        o_t = scale S_t^T q_t

    (Yang, Kautz, Hatamizadeh: Gated Delta Networks, arXiv:2412.06464; the first nine parameters are
    those of `torch_chunk_gated_delta_rule` in transformers, the keyword-only ones are named as in
    flash-linear-attention.)

    Args:
        query, key: `[B, T, HK, K]`.
        value: `[B, T, HV, V]`, of the same dtype.
        g: `[B, T, HV]`, natural logarithm of the decay per token, any value, also -inf. None: 0.
        beta: `[B, T, HV]`, write strength, usually in [0, 1] or [0, 2]. None: 1.
        chunk_size: a hint, 1 or more. It never changes the result: each backend uses its best size.
        initial_state: `[N, HV, K, V]` in any of the float dtypes and any strides. None: zeros.
        output_final_state: also return the state after the last token of each sequence.
        use_qk_l2norm_in_kernel: first divide q and k by `sqrt(sum(x^2) + 1e-6)`.
        scale: factor of the output. None: `K ** -0.5`.
        cu_seqlens: `[N + 1]` int32 or int64, for N sequences packed along T with B = 1: sequence n
            is tokens `cu_seqlens[n]` to `cu_seqlens[n + 1]`. Starts at 0 and never decreases;
            sequences may be empty; tokens after `cu_seqlens[-1]` get an output of zero.
        state_v_first: both states are `[N, HV, V, K]`.
        use_gate_in_kernel: the decay is `-exp(A_log) * softplus(g + dt_bias)` instead of g.
        A_log, dt_bias: `[HV]`, any float dtype; dt_bias may be None (0).
        use_beta_sigmoid_in_kernel: beta is `sigmoid(beta)`.
        allow_neg_eigval: beta is `2 * sigmoid(beta)`; needs use_beta_sigmoid_in_kernel.

    Returns:
        The output `[B, T, HV, V]` in query's dtype, and the final state `[N, HV, K, V]` in float32
        (float64 for float64 inputs), or None unless `output_final_state`.

    Raises:
        TypeError, ValueError: an argument has a wrong type, dtype, shape, device or value.
        NotImplementedError: a second derivative, or one in forward mode.
        ImportError: the compiled library is missing.

    >>> q = k = torch.ones(1, 2, 1, 1)  # one sequence, two tokens, one head, K = V = 1
    >>> v = torch.tensor([3.0, 5.0]).reshape(1, 2, 1, 1)
    >>> g, beta = torch.zeros(1, 2, 1), torch.full((1, 2, 1), 0.5)
    >>> out, state = chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=True)
    >>> out.flatten().tolist()  # 0 + (3 - 0) / 2, then 1.5 + (5 - 1.5) / 2
    [1.5, 3.25]
    >>> state.shape, state.item()
    (torch.Size([1, 1, 1, 1]), 3.25)
    """
    _checks.check_chunk_size("chunk_gated_delta_rule", chunk_size)
    if not torch.compiler.is_compiling():
        _settings.follow_torch(query)
    return _run_rule(
        "chunk_gated_delta_rule", _chunk_forward, _chunk_forward_saving,
        query, key, value, g, beta, initial_state, cu_seqlens, A_log, dt_bias, scale,
        output_final_state, use_qk_l2norm_in_kernel, use_gate_in_kernel,
        use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first,
    )  # fmt: skip


def recurrent_gated_delta_rule(
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
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule token by token: equation (1) as it stands. For decoding and short runs.

    Arguments, results and errors are those of `chunk_gated_delta_rule`, without `chunk_size` (the
    parameters are those of `torch_recurrent_gated_delta_rule` in transformers). Both functions
    agree to rounding, so a prefill by chunks can be continued token by token.

    >>> q = k = v = torch.ones(1, 1, 1, 1)
    >>> state = torch.full((1, 1, 1, 1), 3.0)
    >>> beta = torch.full((1, 1, 1), 0.5)
    >>> out, state = recurrent_gated_delta_rule(q, k, v, None, beta, state, output_final_state=True)
    >>> out.item(), state.item()  # 3 + (1 - 3) / 2
    (2.0, 2.0)
    """
    return _run_rule(
        "recurrent_gated_delta_rule", _recurrent_forward, _recurrent_forward_saving,
        query, key, value, g, beta, initial_state, cu_seqlens, A_log, dt_bias, scale,
        output_final_state, use_qk_l2norm_in_kernel, use_gate_in_kernel,
        use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first,
    )  # fmt: skip


fused_recurrent_gated_delta_rule = recurrent_gated_delta_rule
"""What transformers and flash-linear-attention call `recurrent_gated_delta_rule`."""


def gated_delta_rule_update(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    state_indices: Tensor | None = None,
    *,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    state_v_first: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
) -> Tensor:
    """The next tokens of running sequences, whose states are overwritten: equation (1), in place.

    For servers. `recurrent_gated_delta_rule` gives the same bits, and a new state, which has to be
    written where the old one is not: twice the memory traffic of this. On the CPU only.

    Args:
        query, key, value, g, beta: as in `chunk_gated_delta_rule`, T tokens of each of B sequences;
            made for a few.
        state: `[B, HV, K, V]` float32 (float64 for float64 inputs), any strides. Read and written;
            the other tensors must not share its memory.
        state_indices: `[B]` int32 or int64: `state` is a pool `[N, HV, K, V]`, and row b uses slot
            `state_indices[b]`, each slot at most once. Rows of a negative index touch none and give
            zeros.
        scale, use_qk_l2norm_in_kernel, state_v_first, use_gate_in_kernel, A_log, dt_bias,
            use_beta_sigmoid_in_kernel, allow_neg_eigval: as in `chunk_gated_delta_rule`.

    Returns:
        The output `[B, T, HV, V]` in query's dtype.

    Raises:
        TypeError, ValueError, ImportError: as in `chunk_gated_delta_rule`. Nothing is written then.
        NotImplementedError: tensors on CUDA; or a gradient is needed, and a state that is
            overwritten has none: use `recurrent_gated_delta_rule`.

    >>> q = k = v = torch.ones(1, 1, 1, 1)
    >>> pool = torch.tensor([7.0, 3.0]).reshape(2, 1, 1, 1)
    >>> beta = torch.full((1, 1, 1), 0.5)
    >>> out = gated_delta_rule_update(q, k, v, None, beta, pool, torch.tensor([1]))
    >>> out.item(), pool.flatten().tolist()  # 3 + (1 - 3) / 2
    (2.0, [7.0, 2.0])
    """
    tensors = (query, key, value, g, beta, state, state_indices, A_log, dt_bias)
    flags = (
        use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval,
        state_v_first,
    )  # fmt: skip
    out: Tensor = _call(
        "gated_delta_rule_update", _checks.check_rule_update, _update, tensors, scale, flags
    )
    _note_write(state)
    return out


def chunk_transition(
    key: Tensor,
    value: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    *,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """What a whole sequence does to the state: `S -> M S + U`, equation (8).

    Maps compose, `(M2, U2) after (M1, U1) = (M2 M1, M2 U1 + U2)`, so pieces of a sequence can be
    computed apart and joined: that is what a scan over segments, or over processes, needs.

    Args:
        key, value, g, beta, use_qk_l2norm_in_kernel, cu_seqlens: as in `chunk_gated_delta_rule`.

    Returns:
        M `[N, HV, K, K]` and U `[N, HV, K, V]` in float32 (float64 for float64 inputs). An empty
        sequence gives the identity and zero.

    Raises:
        TypeError, ValueError, NotImplementedError, ImportError: as in `chunk_gated_delta_rule`.

    >>> k = v = torch.ones(1, 1, 1, 1)
    >>> g, beta = torch.tensor([[[0.5]]]).log(), torch.tensor([[[0.25]]])
    >>> M, U = chunk_transition(k, v, g, beta)
    >>> M.item(), U.item()  # exp(g) (1 - beta k k^T) and beta k v^T
    (0.375, 0.25)
    """
    _checks.check_transition(
        "chunk_transition", key, value, g, beta, use_qk_l2norm_in_kernel, cu_seqlens
    )
    M, U = _run(_chunk_transition, key, value, g, beta, cu_seqlens, use_qk_l2norm_in_kernel)
    return M, U


def unit_lower_triangular_inverse(L: Tensor) -> Tensor:
    """`(I + tril(L, -1))^-1`, batched, by forward substitution: equation (4).

    Args:
        L: `[..., C, C]`, C from 1 to 128, in float32, float64, bfloat16 or float16. Only what is
            strictly below the diagonal is read.

    Returns:
        The inverse, of L's shape and dtype (bfloat16 and float16 are computed in fp32): ones on the
        diagonal, zeros above.

    Raises:
        TypeError, ValueError, NotImplementedError, ImportError: as in `chunk_gated_delta_rule`.

    >>> unit_lower_triangular_inverse(torch.tensor([[7.0, 7.0], [0.5, 7.0]])).tolist()
    [[1.0, 0.0], [-0.5, 1.0]]
    """
    _checks.check_inverse("unit_lower_triangular_inverse", L)
    inverse: Tensor = _run(_inverse, L)
    return inverse


def build_info() -> dict[str, Any]:
    """How the compiled libraries were built: version, compiler, torch target, ISAs, CUDA.

    `cuda` is True when the CUDA kernels are built and loaded; `cuda_reason` says with what they
    were built, or why they are missing. With them come `cuda_architectures` (as in
    TORCH_CUDA_ARCH_LIST), `cuda_nvcc` and `cuda_built_with_torch`.

    >>> "scalar" in build_info()["cpu_isas_built"]
    True
    """
    info = dict(_load.library().build_info())
    cuda = _load.cuda_library()
    info["cuda"] = cuda is not None
    if cuda is None:
        info["cuda_reason"] = _load.why_no_cuda()
        return info
    facts = cuda.build_info()
    names = ("architectures", "nvcc", "built_with_torch")
    return info | {f"cuda_{name}": facts[name] for name in names}


def available_cpu_isas() -> list[str]:
    """The instruction sets that are built and that this machine has, best first.

    >>> available_cpu_isas()[-1]
    'scalar'
    """
    return list(_load.library().available_cpu_isas())


def cpu_isa() -> str:
    """The instruction set that CPU kernels use now.

    >>> cpu_isa() in available_cpu_isas()
    True
    """
    return str(_load.library().cpu_isa())


def force_cpu_isa(name: str | None) -> None:
    """Make CPU kernels use one instruction set; None: back to DELTANET_CPU_ISA or the best one.

    Raises:
        TypeError: the name is neither a str nor None.
        ValueError: the name is unknown, or this machine does not support it.

    >>> force_cpu_isa("scalar")
    >>> cpu_isa()
    'scalar'
    >>> force_cpu_isa(None)
    """
    supported = ", ".join(available_cpu_isas())
    if name is not None and not isinstance(name, str):
        raise TypeError(
            f"force_cpu_isa: name is a {type(name).__name__}; supported: {supported}, None"
        )
    if name == "":
        raise ValueError(f"force_cpu_isa: name is empty; supported: {supported}, None")
    _load.library().force_cpu_isa(name or "")
