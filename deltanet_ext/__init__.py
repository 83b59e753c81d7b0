# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule for PyTorch: prefill, decode and state maps, in C++.

>>> import torch, deltanet_ext
>>> q, k, v = torch.randn(3, 1, 100, 4, 64).unbind()
>>> g, beta = -torch.rand(1, 100, 4), torch.rand(1, 100, 4)
>>> out, state = deltanet_ext.chunk_gated_delta_rule(
...     q, k, v, g, beta, output_final_state=True, use_qk_l2norm_in_kernel=True
... )
>>> out.shape, state.shape
(torch.Size([1, 100, 4, 64]), torch.Size([1, 4, 64, 64]))
"""

from importlib.metadata import PackageNotFoundError, version

from deltanet_ext import _autograd, _fake, _layer_autograd, _load
from deltanet_ext._settings import (
    batch_invariant,
    cpu_precision,
    cuda_precision,
    get_cpu_precision,
    get_cuda_precision,
    is_batch_invariant,
)
from deltanet_ext.integrations._explain import explain
from deltanet_ext.integrations.transformers import disable, enable, enabled
from deltanet_ext.layer import causal_conv1d_fn, causal_conv1d_update, gated_rms_norm
from deltanet_ext.ops import (
    available_cpu_isas,
    build_info,
    chunk_gated_delta_rule,
    chunk_transition,
    cpu_isa,
    force_cpu_isa,
    fused_recurrent_gated_delta_rule,
    gated_delta_rule_update,
    recurrent_gated_delta_rule,
    unit_lower_triangular_inverse,
)

if _load.is_loaded():
    _fake.register()
    _autograd.register()
    _layer_autograd.register()

try:
    __version__ = version("deltanet_ext")
except PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "0+unknown"

__all__ = [
    "available_cpu_isas",
    "batch_invariant",
    "build_info",
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "chunk_gated_delta_rule",
    "chunk_transition",
    "cpu_isa",
    "cpu_precision",
    "cuda_precision",
    "disable",
    "enable",
    "enabled",
    "explain",
    "force_cpu_isa",
    "fused_recurrent_gated_delta_rule",
    "gated_delta_rule_update",
    "gated_rms_norm",
    "get_cpu_precision",
    "get_cuda_precision",
    "is_batch_invariant",
    "recurrent_gated_delta_rule",
    "unit_lower_triangular_inverse",
]
