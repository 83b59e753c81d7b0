# SPDX-License-Identifier: Apache-2.0
"""What the CUDA forward moves and multiplies, as docs/performance.md says, and its bars."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
import cuda_counts  # noqa: E402

if reason := cuda_counts.build.why_not():
    pytest.skip(f"PTX emulator: {reason}", allow_module_level=True)

pytestmark = pytest.mark.slow  # half a minute to compile, a minute to count


@pytest.fixture(scope="module")
def results() -> cuda_counts.Results:
    return cuda_counts.measure()


@pytest.mark.parametrize("precision", ["exact", "fast"])
def test_a_launch_moves_little_more_than_inputs_and_outputs(
    precision: str, results: cuda_counts.Results
) -> None:
    launches = results.fast if precision == "fast" else results.exact[cuda_counts.MAIN]
    floor = cuda_counts.floor_bytes(cuda_counts.MAIN, cuda_counts.SHORT)
    assert [x.name for x in launches] == ["prepare", "scan_roles"]
    for launch in launches:
        assert launch.bytes <= cuda_counts.MOST_BYTES * floor, launch.name
    # No bar, but a promise of the page: together.
    assert sum(x.bytes for x in launches) <= 2.41 * floor


@pytest.mark.parametrize("precision", ["exact", "fast"])
def test_split_operands_cost_few_products(precision: str, results: cuda_counts.Results) -> None:
    launches = results.fast if precision == "fast" else results.exact[cuda_counts.MAIN]
    assert 1 < cuda_counts.mma_ratio(launches) <= cuda_counts.MOST_MMA[precision]


def test_no_bank_conflict_in_the_chunk_loop(results: cuda_counts.Results) -> None:
    passes = results.passes()
    assert [x.name for x in passes].count("scan_output") == 1 + 1 + 1
    assert [x.name for x in passes].count("scan_roles") == 3 + 1
    for launch in passes:
        assert launch.wavefronts > 0
        assert launch.conflicts == 0, cuda_counts.conflicts_by_site([launch])


def test_bank_conflicts_elsewhere_stay_few(results: cuda_counts.Results) -> None:
    (prepare,) = (x for x in results.exact[cuda_counts.MAIN] if x.name == "prepare")
    assert prepare.conflicts <= 0.02 * prepare.wavefronts


@pytest.mark.parametrize("heads", cuda_counts.HEADS)
def test_few_launches_that_fill_the_device(heads: int, results: cuda_counts.Results) -> None:
    plan, packed = results.plans[heads], results.packed[heads]
    # Roles and 32 columns of V where that is one block for each multiprocessor, or 16, or segments.
    assert plan.roles == (heads < 64)
    assert (plan.warps, plan.segments) == {8: (2, 4), 16: (1, 1), 32: (2, 1), 64: (4, 1)}[heads]
    assert len(plan.grids) == (4 if plan.segments > 1 else 2)
    assert packed.grids[0].name == "chunk_table"
    assert len(packed.grids) == len(plan.grids) + 1 <= cuda_counts.MOST_LAUNCHES
    for grid in (*plan.grids, *packed.grids[1:]):
        assert cuda_counts.with_work(grid.blocks) >= cuda_counts.LEAST_BUSY, grid


def test_the_page_says_so(results: cuda_counts.Results) -> None:
    if f"nvcc {cuda_counts.nvcc_release()}." not in cuda_counts.PAGE.read_text():
        pytest.skip(f"the page was written with another nvcc than {cuda_counts.nvcc_release()}")
    assert cuda_counts.page_with(cuda_counts.section(results)) == cuda_counts.PAGE.read_text(), (
        "run scripts/cuda_counts.py"
    )
