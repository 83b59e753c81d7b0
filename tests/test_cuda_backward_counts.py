# SPDX-License-Identifier: Apache-2.0
"""What the CUDA backward pass costs, in counts of the emulator: launches, bytes, instructions,
scratch memory.

The floor of bytes is the function's own: every input and the gradients that arrive read once, every
gradient written once. The floor of arithmetic is that of docs/algorithm.md, eight products with a
state per chunk and the triangles. The bar is 1.5 times the floor, without segments. The walk, for
calls that fill a device with sequences times key heads, is below it; the parallel stages miss it:
the test keeps them where they are, and docs/performance.md says what they are made of.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import emulated

if reason := emulated.why_not():
    pytest.skip(f"emulated CUDA operators: {reason}", allow_module_level=True)

pytestmark = pytest.mark.slow  # kernels are translated once more, to count

# What the parallel stages reach, rounded up, and the bar of the project.
BYTES, ARITHMETIC = 2.7, 1.65
BAR = 1.5

TESTS = Path(__file__).parent
T, HK, HV, K = 352, 2, 2, 128
V = K
SEGMENT = 1056  # tokens: all that a walk does happens in one segment
CHUNK, STRIP, COLUMNS = 16, 176, 16  # of the kernels
PROGRAM = f"""
import sys
import torch
import emulated
from cases import Case
from gradients import NAMES, upstream
T, HK, dim, cu, raw, strips, mode = eval(sys.argv[1])
case = Case("counts", T=T, HK=HK, HV={HV}, K=dim, V=dim, cu=cu, raw_gate=raw,
            state=torch.float32)
args = case.inputs(torch.bfloat16)
with emulated.segment_strips(strips), emulated.backward_mode(mode):
    emulated.call(
        "chunk_gated_delta_rule_backward", *upstream(case, torch.bfloat16),
        *(args.get(n) for n in NAMES[:6]), args.get("cu_seqlens"), args.get("A_log"),
        args.get("dt_bias"), None, dim**-0.5, True, raw, False, False, False,
        0b11111111 if raw else 0b111111,
    )
"""


def launches_of(
    folder: Path,
    tokens: int,
    key_heads: int,
    dim: int,
    *,
    cu: tuple[int, ...] | None = None,
    raw: bool = False,
    strips: int = 100,
    mode: str = "parallel",
) -> list[dict[str, Any]]:
    """The launches of one call in bf16, in order. By default sequences are not cut."""
    emulated.load()  # the build, outside of what is counted
    counts = folder / "counts.jsonl"
    counts.unlink(missing_ok=True)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, repr((tokens, key_heads, dim, cu, raw, strips, mode))],
        env={**os.environ, "PTX_EMULATOR_COUNT": str(counts), "PYTHONPATH": str(TESTS)},
        cwd=TESTS.parent, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in counts.read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return launches_of(tmp_path_factory.mktemp("whole"), T, HK, K)


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The launch of a walk over one segment, one key head."""
    (launch,) = launches_of(tmp_path_factory.mktemp("walk"), SEGMENT, 1, K, mode="walk")
    return launch


def distinct_bytes(launch: dict[str, Any]) -> int:
    return launch["global"]["distinct_bytes_read"] + launch["global"]["distinct_bytes_written"]


def bytes_of(launches: list[dict[str, Any]]) -> int:
    """Distinct sectors of each launch, but for the slots of gradient_kernel, written and read.

    A device has a few of them for each processor, and they serve one strip after the other. In a
    call this short they serve one each.
    """
    found = sum(distinct_bytes(x) for x in launches)
    (gradients,) = (x for x in launches if "gradient_kernel" in x["kernel"])
    states, values, rows = (STRIP // CHUNK - 1) * K * COLUMNS, 2 * STRIP * COLUMNS, 2 * STRIP * K
    return found - gradients["grid"][0] * 4 * (states + values + rows) * 2


def floor_of_bytes(tokens: int, key_heads: int) -> int:
    inputs = 2 * (2 * tokens * key_heads * K + tokens * HV * V)  # q, k, v
    inputs += 2 * tokens * HV * 4  # g, beta
    state = HV * K * V * 4
    arriving = 2 * tokens * HV * V + state
    return (inputs + state + arriving) + (inputs + state)


def floor_of_products(tokens: int) -> int:
    """Fused multiply-adds."""
    return tokens * HV * (8 * K * V + CHUNK // 2 * (6 * K + 5 * V))


def test_bytes(whole: list[dict[str, Any]]) -> None:
    assert bytes_of(whole) / floor_of_bytes(T, HK) < BYTES


def test_arithmetic(whole: list[dict[str, Any]]) -> None:
    """fp32 instructions, of which a fused multiply-add is one."""
    assert sum(x["instructions"]["float32"] for x in whole) / floor_of_products(T) < ARITHMETIC


def test_bytes_of_a_walk(walk: dict[str, Any]) -> None:
    """But for the slot, all of which is written and read: however long a walk is, it has one. What
    is read for the states between strips, and a segment later for the gradients, counts twice."""
    with emulated.backward_mode("walk"):
        slot = emulated.backward_workspace(1, SEGMENT, 1, HV, K)
    again = (SEGMENT - STRIP) * (2 * K + HV * (2 * V + 2 * 4))  # k, v, g, beta
    ratio = (distinct_bytes(walk) - 2 * slot + again) / floor_of_bytes(SEGMENT, 1)
    assert 1 < ratio < BAR


def test_arithmetic_of_a_walk(walk: dict[str, Any]) -> None:
    assert walk["instructions"]["float32"] / floor_of_products(SEGMENT) < BAR


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def test_scratch_of_a_walk_does_not_grow(packed: bool) -> None:
    """With tokens, nor, once the device is full, with sequences, but for two sums of a head."""
    heads, few, many = 4, 20, 80

    def scratch(sequences: int, tokens: int, mode: str = "walk") -> int:
        with emulated.backward_mode(mode):
            return emulated.backward_workspace(sequences, tokens, 2, heads, K, packed)

    assert scratch(few, SEGMENT) == scratch(few, 4 * SEGMENT) > scratch(few, 40)
    assert scratch(many, SEGMENT) - scratch(few, SEGMENT) <= (many - few) * heads * 2 * 8 + 256
    assert scratch(few, 4 * SEGMENT, "parallel") > 3 * scratch(few, SEGMENT, "parallel")


def test_at_most_eight_launches(tmp_path: Path) -> None:
    """Packed, cut into segments, with the sums of A_log and dt_bias: all stages there are. A walk
    has two."""
    shape = (3 * STRIP, HK, 16)
    packed = {"cu": (0, 3 * STRIP), "raw": True}
    assert len(launches_of(tmp_path, *shape, **packed, strips=1)) == 8
    assert len(launches_of(tmp_path, *shape, **packed, mode="walk")) == 2


def test_sequences_times_key_heads_choose_the_walk(tmp_path: Path) -> None:
    """From half of the blocks on that the emulated device holds, three on each of four processors,
    whatever cu_seqlens holds."""
    for key_heads, cu, walks in ((2, None, False), (2, (0, 1, 2), False), (2, (0, 0, 0, 1), True)):
        launches = launches_of(tmp_path, 20, key_heads, 16, cu=cu, strips=0, mode="chosen")
        assert any("walk_kernel" in x["kernel"] for x in launches) == walks
