# SPDX-License-Identifier: Apache-2.0
"""The rule's fp32 kernels called from C++: schedules, and what they cost in counts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent / "ptx_emulator"))
import build

if reason := build.why_not():
    pytest.skip(f"PTX emulator: {reason}", allow_module_level=True)

pytestmark = pytest.mark.slow  # the program compiles for half a minute

SCHEDULES = ({}, {"SEED": "1"}, {"SEED": "2"}, {"SEED": "3"}, {"ARCH": "86"})


def run(program: Path, **settings: str) -> None:
    settings = {f"PTX_EMULATOR_{name}": value for name, value in settings.items()}
    done = subprocess.run(
        [program], env={**os.environ, **settings}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("settings", SCHEDULES, ids=str)
def test_program(settings: dict[str, str]) -> None:
    run(build.program("rule_forward"), **settings)


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    counts = tmp_path_factory.mktemp("counts") / "counts.jsonl"
    run(build.program("rule_forward", count=True), COUNT=str(counts))
    return [json.loads(line) for line in counts.read_text().splitlines()]


def kinds(launch: dict[str, Any], space: str) -> dict[str, dict[str, int]]:
    return {name: x for name, x in launch[space].items() if isinstance(x, dict)}


def test_decode_reads_and_writes_the_state_once(launches: list[dict[str, Any]]) -> None:
    """4 sequences, 2 value heads of one key head, K = V = 128, fp32."""
    (decode,) = (
        x
        for x in launches
        if "recurrent_forward_kernel<128>" in x["kernel"] and x["grid"][0] == 4 * 2 * 4
    )
    states, row = 4 * 2 * 128 * 128 * 4, 4 * 128 * 4
    gates = 2 * 32  # a sector each
    assert decode["global"]["distinct_bytes_read"] == states + 2 * row + 2 * row + gates
    assert decode["global"]["distinct_bytes_written"] == states + 2 * row
    for name, kind in kinds(decode, "global").items():
        assert kind["sectors"] == kind["least_sectors"], name


@pytest.mark.parametrize(
    "kernel", ["recurrent_forward_kernel<128>", "prepare_kernel", "scan_kernel"]
)
def test_no_bank_conflicts_where_heads_are_wide(
    kernel: str, launches: list[dict[str, Any]]
) -> None:
    """K = V = 128: the last launches of the program."""
    launch = [x for x in launches if kernel in x["kernel"]][-1]
    shared = kinds(launch, "shared")
    assert sum(kind["requests"] for kind in shared.values()) > 0
    assert {name: kind["conflicts"] for name, kind in shared.items() if kind["conflicts"]} == {}
