# SPDX-License-Identifier: Apache-2.0
"""Registers, spills and shared memory of the kernels, and devices that have little."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
import cuda_resources  # noqa: E402
import sass  # noqa: E402

if reason := cuda_resources.build.why_not():
    pytest.skip(f"PTX emulator: {reason}", allow_module_level=True)

HEADER = "| file | kernel | for | threads | registers | spills | in loops | shared | blocks |"
SMALL = cuda_resources.SMALL_KB << 10  # bytes of a block on sm_86, 89 and 120


def table() -> list[dict[str, str]]:
    lines = cuda_resources.TABLE.read_text().splitlines()
    names = [name.strip() for name in HEADER.split("|")[1:-1]]
    rows = lines[lines.index(HEADER) + 2 :]
    return [
        dict(zip(names, (c.strip() for c in row.split("|")[1:-1]), strict=True)) for row in rows
    ]


def test_every_kernel_has_its_rows() -> None:
    files = {source.stem for source in cuda_resources.kernel_files()} - {
        "forward",
        "tensor_core",
    }
    for arch in ("sm_80", "sm_90"):
        assert {row["file"] for row in table() if row["for"] == arch} == files


def test_everything_fits_a_block_of_99_kb() -> None:
    """K = 128 and 64 columns of V: what the tensor cores take nowhere needs another tile.

    scan_roles does not fit: scan_output runs in its place, see below.
    """
    rows = [row for row in table() if "scan_roles" not in row["kernel"]]
    assert max(int(row["shared"]) for row in rows) <= SMALL


def test_the_table_shows_no_spill_in_the_loop_over_the_chunks() -> None:
    passes = [row for row in table() if re.match("scan_(output|roles)", row["kernel"])]
    assert len(passes) == 2 * (8 + 4)
    assert [row for row in passes if row["in loops"] != "0"] == []
    assert all(int(row["blocks"]) >= 1 for row in passes)


def test_the_table_shows_no_spill_in_the_backward_pass() -> None:
    files = ("backward", "simt_adjoint", "simt_gradients", "simt_forward", "simt_walk")
    found = [row for row in table() if row["file"] in files]
    assert {row["file"] for row in found} == set(files)
    assert [row for row in found if row["spills"] != "0"] == []


@pytest.mark.slow
def test_the_table_of_the_backward_pass_is_true() -> None:
    check_the_table("simt_", files=4)


@pytest.mark.slow
def test_the_table_of_the_chunk_pass_is_true() -> None:
    check_the_table("tensor_core/scan_", files=6)


def check_the_table(part: str, files: int) -> None:
    """Compiles every instance of it for sm_80 and sm_90."""
    if sass.find_nvdisasm() is None:
        pytest.skip("nvdisasm is not here: pip install nvidia-cuda-nvdisasm")
    if f"with nvcc {cuda_resources.release()}." not in cuda_resources.TABLE.read_text():
        pytest.skip(f"the table was written with another nvcc than {cuda_resources.release()}")
    script = ROOT / "scripts" / "cuda_resources.py"
    done = subprocess.run(
        [sys.executable, script, "--check", part],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == f"{files} files: as the table says\n"


LISTING = """
        /*0000*/                   STL [R1], R2 ;
.L_x_0:
        /*0010*/               @P0 BRA `(.L_x_2) ;
        /*0020*/                   HMMA.16816.F32.BF16 R4, R4, R8, R4 ;
{inside}
        /*0040*/                   BRA `(.L_x_0) ;
.L_x_1:
        /*0050*/                   LDL R3, [R1] ;
        /*0060*/                   EXIT ;
.L_x_2:
        /*0070*/               @P1 BRA `(.L_x_1) ;
        /*0080*/                   IADD3 R5, R5, 0x1, RZ ;
        /*0090*/                   BRA `(.L_x_0) ;
"""


def test_spills_are_told_from_those_outside_of_a_loop() -> None:
    """Before, behind, and in a part of the loop that lies behind the kernel's end."""
    without = sass.looped(LISTING.format(inside=""))
    assert [x.split()[0] for x in without].count("HMMA.16816.F32.BF16") == 1
    assert any("IADD3" in x for x in without)
    assert not any("STL" in x or "LDL" in x for x in without)
    inside = sass.looped(LISTING.format(inside="        /*0030*/   LDL R9, [R1] ;"))
    assert sum("LDL" in x for x in inside) == 1


# A call of dtype, K, V. Prints the error beside the fp64 recurrence's.
CALL = """
import sys, torch
import deltanet_ext, emulated
from cases import Case
from closeness import rmse_ratio
from deltanet_ext import reference
dtype, K, V = getattr(torch, sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
x = Case("small", T=40, HK=1, HV=2, K=K, V=V).inputs(dtype)
with emulated.path():
    out, _ = deltanet_ext.chunk_gated_delta_rule(**x)
wide = {n: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v
        for n, v in x.items()}
want, _ = reference.recurrent(**wide)
print(rmse_ratio(out, want))
"""


SCAN = "11scan_kernelI"  # mangled, before its number of columns


def call(arch: int, dtype: str, dim_k: int, dim_v: int) -> tuple[float, str]:
    """The error, and the kernels that ran."""
    environment = os.environ | {
        "PTX_EMULATOR_ARCH": str(arch),
        "PTX_EMULATOR_TIMES": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
    }
    done = subprocess.run(
        [sys.executable, "-c", CALL, dtype, str(dim_k), str(dim_v)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return float(done.stdout.splitlines()[-1]), done.stderr


@pytest.mark.slow
def test_a_device_with_99_kb_takes_a_narrower_tile() -> None:
    """K = V = 256 in fp32: 64 columns of V do not fit a block there."""
    pytest.importorskip("torch")
    wide_error, wide = call(80, "float32", 256, 256)
    error, narrow = call(86, "float32", 256, 256)
    assert f"{SCAN}Li64E" in wide
    assert f"{SCAN}Li64E" not in narrow
    assert f"{SCAN}Li32E" in narrow
    assert max(error, wide_error) <= 1e-5


@pytest.mark.slow
def test_a_device_with_99_kb_uses_its_tensor_cores() -> None:
    """Without roles: two blocks, which elsewhere would have them."""
    error, kernels = call(86, "bfloat16", 128, 32)
    assert "scan_output_kernel" in kernels
    same, with_roles = call(80, "bfloat16", 128, 32)
    assert "scan_roles_kernel" in with_roles
    assert error == same <= 2e-3
