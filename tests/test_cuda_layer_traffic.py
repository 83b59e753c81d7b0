# SPDX-License-Identifier: Apache-2.0
"""How much memory the convolution and the gated norm touch on CUDA, counted on the emulator: whole
sectors, and each byte once but for the tokens before a tile."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import emulated

if reason := emulated.why_not():
    pytest.skip(f"emulated CUDA operators: {reason}", allow_module_level=True)

pytestmark = pytest.mark.slow  # counting kernels are compiled for themselves

TESTS = Path(__file__).resolve().parent
TOKENS, CHANNELS, ROWS, COLUMNS, NARROW = 512, 256, 512, 128, 2  # bytes of bf16
SECTOR = 32

CALLS = f"""
    import torch, emulated

    def randn(*shape):
        return torch.randn(*shape).bfloat16()

    x, grad = (randn(1, {TOKENS}, {CHANNELS}).transpose(1, 2) for _ in range(2))
    weight = randn({CHANNELS}, 4)
    for given in (x, x.contiguous()):
        emulated.call("causal_conv1d_forward", given, weight, *[None] * 4, True, False)
        emulated.call(
            "causal_conv1d_backward", grad, None, given, weight, *[None] * 4, True, 3
        )
    emulated.call(
        "causal_conv1d_update", randn(2, {CHANNELS}, 1), randn(2, {CHANNELS}, 4), weight,
        None, None, True,
    )
    rows, gate, grad = (randn({ROWS}, {COLUMNS}) for _ in range(3))
    weight = randn({COLUMNS})
    emulated.call("gated_rms_norm_forward", rows, gate, weight, 1e-6)
    emulated.call("gated_rms_norm_backward", grad, rows, gate, weight, 1e-6, 7)
"""


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict]]:
    """By kernel, in the order of the calls: its global loads and stores."""
    emulated.load()
    counts = tmp_path_factory.mktemp("counts") / "counts.jsonl"
    environment = {
        **os.environ,
        "PTX_EMULATOR_COUNT": str(counts),
        "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
    }
    code = textwrap.dedent(CALLS)
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    found: dict[str, list[dict]] = {}
    for line in counts.read_text().splitlines():
        launch = json.loads(line)
        for name in (
            "causal_conv1d_kernel", "causal_conv1d_backward_kernel", "causal_conv1d_update_kernel",
            "gated_rms_norm_kernel", "gated_rms_norm_backward_kernel",
        ):  # fmt: skip
            if re.search(rf"::{name}\b", launch["kernel"]):
                found.setdefault(name, []).append(launch["global"])
    return found


def bytes_of(launch: dict, kind: str) -> int:
    """What the sectors of all requests hold. Those of one request count once."""
    return launch[f"global_{kind}"]["sectors"] * SECTOR


def assert_coalesced(launch: dict) -> None:
    for kind in ("global_load", "global_store"):
        assert launch[kind]["sectors"] == launch[kind]["least_sectors"], kind


def test_the_convolution_reads_and_writes_once(launches: dict[str, list[dict]]) -> None:
    tensor = TOKENS * CHANNELS * NARROW
    last, first = launches["causal_conv1d_kernel"]
    assert_coalesced(last)
    assert bytes_of(last, "load") <= 1.06 * tensor
    assert bytes_of(first, "load") <= 1.14 * tensor
    for launch in (last, first):
        assert bytes_of(launch, "store") == tensor
        assert launch["distinct_bytes_written"] == tensor


def test_its_gradients_read_x_and_dy_once(launches: dict[str, list[dict]]) -> None:
    tensor = TOKENS * CHANNELS * NARROW
    last, first = launches["causal_conv1d_backward_kernel"]
    assert_coalesced(last)
    assert bytes_of(last, "load") <= 1.1 * 2 * tensor
    assert bytes_of(first, "load") <= 1.3 * 2 * tensor
    sums = TOKENS // 256 * 5 * CHANNELS * 4
    for launch in (last, first):
        assert bytes_of(launch, "store") == tensor + sums


def test_the_update_reads_and_writes_once(launches: dict[str, list[dict]]) -> None:
    """With states and weights of four numbers side by side, as models have them."""
    (launch,) = launches["causal_conv1d_update_kernel"]
    token, weights = 2 * CHANNELS * NARROW, 4 * CHANNELS * NARROW
    state = 4 * token
    assert_coalesced(launch)
    assert launch["distinct_bytes_read"] == token + state + weights
    assert bytes_of(launch, "load") == token + state + 2 * weights  # for each row of the batch
    assert bytes_of(launch, "store") == launch["distinct_bytes_written"] == token + state


def test_the_norm_reads_and_writes_once(launches: dict[str, list[dict]]) -> None:
    tensor, weights = ROWS * COLUMNS * NARROW, COLUMNS * NARROW
    for name, read, written in (
        ("gated_rms_norm_kernel", 2 * tensor, tensor),
        ("gated_rms_norm_backward_kernel", 3 * tensor, 2 * tensor + ROWS // 64 * COLUMNS * 4),
    ):
        (launch,) = launches[name]
        assert_coalesced(launch)
        assert launch["distinct_bytes_read"] == read + weights
        # A warp reads the weights for every row, from its first-level cache.
        assert bytes_of(launch, "load") == read + ROWS * weights
        assert bytes_of(launch, "store") == written
