# SPDX-License-Identifier: Apache-2.0
"""The public functions of the rest of a Gated DeltaNet layer: the short convolution before the rule
and the gated norm behind it.

Common to all (equation numbers are those of docs/algorithm.md):

* dtypes: x is float32, bfloat16, float16 or float64, and so is the result; weights, biases and
  gates are float32 or of x's dtype (float64 for float64). All arithmetic is fp32 (fp64 for
  float64); what is stored in 16 bits is rounded once, at the end.
* Devices: the CPU, and CUDA where `build_info()["cuda"]`; all tensors of a call on one of them.
  float64 on the CPU only. Index tensors on a GPU are never waited for: what is wrong with them
  there is no error, and its tokens and states are arbitrary.
* Gradients: of every float argument, by torch.autograd; not of `causal_conv1d_update`. Nothing is
  kept for them but the inputs. Second derivatives and forward mode raise NotImplementedError.
* Any strides. Outputs are new; no argument is written but the `conv_state` of
  `causal_conv1d_update` and `final_states_out`, which are there for it.
* The same bits for any number of threads, and for a sequence alone, in a batch or packed; not the
  same on the CPU and on CUDA.
"""

from __future__ import annotations

from torch import Tensor

from deltanet_ext import _layer_checks
from deltanet_ext.ops import _note_write, _operator, _run

__all__ = ["causal_conv1d_fn", "causal_conv1d_update", "gated_rms_norm"]

_conv_forward = _operator("causal_conv1d_forward")
_conv_update = _operator("causal_conv1d_update")
_norm_forward = _operator("gated_rms_norm_forward")


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
    *,
    cu_seqlens: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """A causal convolution of each channel by itself, and silu: equation (29).

        z_t = bias + sum_j weight_j x_{t - (W - 1) + j}        j = 0 .. W - 1
        y_t = z_t, or z_t sigmoid(z_t)

    (The parameters up to `activation` are those of the causal-conv1d package.)

    Args:
        x: `[B, D, T]`, T from 0. Channels-last memory is the fast one (`[B, T, D]` transposed, as
            a projection gives it).
        weight: `[D, W]`, W from 1 to 8.
        bias: `[D]`. None: 0.
        seq_idx: `[B, T]` int32 or int64, for rows that hold several sequences: neighbors of equal
            number are one sequence; tokens of a negative number belong to none and give zeros.
            Not together with states.
        initial_states: `[N, D, W - 1]` of x's dtype: the inputs before the first. None: zeros.
        return_final_states: also return the last `W - 1` inputs of each sequence, initial ones
            included.
        final_states_out: a tensor `[N, D, W - 1]` of x's dtype that these are written to.
        activation: None, "silu" or "swish" (the same).
        cu_seqlens: as in `chunk_gated_delta_rule`: N sequences packed along T with B = 1.

    Returns:
        y `[B, D, T]`, stored as `[B, T, D]`, so that `y.transpose(1, 2)` is contiguous and splits
        into rows of q, k and v. With `return_final_states` the pair of y and the final states.

    Raises:
        TypeError, ValueError: an argument has a wrong type, dtype, shape, device or value.
        NotImplementedError: a second derivative, or one in forward mode.
        ImportError: the compiled library is missing.

    >>> import torch
    >>> x = torch.tensor([[[1.0, 2.0, 3.0]]])
    >>> causal_conv1d_fn(x, torch.tensor([[10.0, 1.0]])).tolist()  # 10 x_{t-1} + x_t
    [[[1.0, 12.0, 23.0]]]
    """
    _layer_checks.check_convolution(
        "causal_conv1d_fn",
        x, weight, bias, seq_idx, initial_states, return_final_states, final_states_out,
        activation, cu_seqlens,
    )  # fmt: skip
    out, final_states = _run(
        _conv_forward,
        x, weight, bias, initial_states, seq_idx, cu_seqlens, activation is not None,
        return_final_states,
    )  # fmt: skip
    if not return_final_states:
        result: Tensor = out
        return result
    if final_states_out is not None:
        final_states = final_states_out.copy_(final_states)
    return out, final_states


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    conv_state_indices: Tensor | None = None,
) -> Tensor:
    """The convolution of `causal_conv1d_fn` for the next tokens of sequences, whose last inputs are
    kept in `conv_state`. It is overwritten by the last inputs after these tokens.

    (The parameters are those of `causal_conv1d_update` in the causal-conv1d package, without its
    circular buffers.)

    Args:
        x: `[B, D]`, one token per sequence, or `[B, D, T]`.
        conv_state: `[B, D, S]` of x's dtype, S from `W - 1`: the newest input is the last one.
        weight, bias, activation: as in `causal_conv1d_fn`.
        conv_state_indices: `[B]` int32 or int64: `conv_state` is a pool `[N, D, S]`, and row b uses
            slot `conv_state_indices[b]`, each slot at most once. Rows of a negative index touch
            none and give zeros; so do those of an index from N on where it is not an error (CUDA).

    Returns:
        y of x's shape and dtype.

    Raises:
        TypeError, ValueError, ImportError: as in `causal_conv1d_fn`.
        NotImplementedError: a gradient is needed. A state that is overwritten has none: use
            `causal_conv1d_fn` with `initial_states`.

    >>> import torch
    >>> state = torch.tensor([[[2.0, 3.0]]])
    >>> y = causal_conv1d_update(torch.tensor([[5.0]]), state, torch.tensor([[10.0, 1.0]]))
    >>> y.item(), state.tolist()  # 10 * 3 + 5
    (35.0, [[[3.0, 5.0]]])
    """
    _layer_checks.check_update(
        "causal_conv1d_update", x, conv_state, weight, bias, activation, conv_state_indices
    )
    tokens = x.unsqueeze(-1) if x.dim() == 2 else x
    out: Tensor = _run(
        _conv_update, tokens, conv_state, weight, bias, conv_state_indices, activation is not None
    )
    _note_write(conv_state)
    return out.squeeze(-1) if x.dim() == 2 else out


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """RMS norm over the last axis, then a gate: equation (30).

        y = weight * x / sqrt(mean(x^2) + eps) * silu(gate)

    (What `Qwen3NextRMSNormGated` and its kin in transformers compute. They round to x's dtype after
    the norm and after the weight, which is not done here.)

    Args:
        x: `[..., C]`, C from 1, on CUDA up to 8192.
        gate: of the same shape.
        weight: `[C]`.
        eps: added to the mean of squares, 0 or more.

    Returns:
        y of x's shape and dtype, contiguous.

    Raises:
        TypeError, ValueError, NotImplementedError, ImportError: as in `causal_conv1d_fn`.

    >>> import torch
    >>> x, gate = torch.tensor([[3.0, 4.0]]), torch.tensor([[50.0, 50.0]])
    >>> y = gated_rms_norm(x, gate, torch.ones(2), eps=0.0) / 50  # silu(50) is 50
    >>> (y * 12.5**0.5).tolist()  # the mean of squares is 12.5
    [[3.0, 4.0]]
    """
    _layer_checks.check_norm("gated_rms_norm", x, gate, weight, eps)
    out: Tensor = _run(_norm_forward, x, gate, weight, eps)
    return out
