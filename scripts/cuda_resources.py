#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Registers, spills and shared memory of the CUDA kernels: no GPU needed.

    cuda_resources.py                compile for sm_80 and sm_90, and write docs/cuda_resources.md
    cuda_resources.py --check PART   compile the files whose path holds PART, and compare with the
                                     table; exit 1 if it lies

Registers are ptxas's. Whether a spill lies in a loop is read from the machine code, which takes
nvdisasm: that of the toolkit, or pip install nvidia-cuda-nvdisasm. Another toolkit may allocate
otherwise: the page names the one that it was written with.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import sass

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "docs" / "cuda_resources.md"
ARCHITECTURES = ("80", "90")
# Of a multiprocessor: registers, shared memory in KB (each block takes 1 KB more), threads, blocks.
REGISTERS, SHARED_KB, THREADS, MOST_BLOCKS = 65536, {"80": 164, "90": 228}, 2048, 32
PRECISIONS = ("exact", "fast")
SMALL_KB = 99  # what sm_86, 89 and 120 give a block

sys.path.insert(0, str(ROOT / "tests" / "ptx_emulator"))
import build  # noqa: E402

# What ptxas cannot know: dynamic shared memory, as the launchers ask for it, at K = 128.
DYNAMIC = """
#include <cstdio>
#include "cuda/simt_adjoint.cuh"
#include "cuda/simt_adjoint_scan.cuh"
#include "cuda/simt_gradients.cuh"
#include "cuda/simt_prepare_kernel.cuh"
#include "cuda/simt_scan.cuh"
#include "cuda/simt_walk.cuh"
#include "cuda/tensor_core/scan_roles.cuh"
#include "cuda/triangular_inverse.cu"
using namespace deltanet::cuda;
using namespace deltanet::cuda::tensor_core;
#define SHOW(E, K, P) \\
  std::printf("scan_output_" #E "_" #K "/scan_output_kernel<" #K ", %s> %d\\n", \\
              P == Precision::kExact ? "exact" : "fast", \\
              int(tensor_core::ScanTraits<E, K, P>::shared_bytes(4)));
#define ROLES(E, P) \\
  std::printf("scan_roles_" #E "_128/scan_roles_kernel<128, %s> %d\\n", \\
              P == Precision::kExact ? "exact" : "fast", \\
              int(sizeof(SharedOfRoles<tensor_core::ScanTraits<E, 128, P, true>>)));
#define SIMT(C) std::printf("simt_forward/scan_kernel<" #C "> %d\\n", \\
                            int(simt::ScanTraits<C>::shared_bytes(128)));
#define BACKWARD(FILE, NAME, TRAITS) \\
  std::printf("simt_" #FILE "/" #NAME " %d\\n", int(simt::TRAITS::shared_bytes(128)));
#define INVERSE(N) std::printf("triangular_inverse/triangular_inverse_kernel<" #N "> %d\\n", \\
                               int(sizeof(InverseTraits<N>::Shared)));
int main() {
  SHOW(bf16, 64, Precision::kExact) SHOW(bf16, 64, Precision::kFast)
  SHOW(bf16, 128, Precision::kExact) SHOW(bf16, 128, Precision::kFast)
  SHOW(fp16, 64, Precision::kExact) SHOW(fp16, 64, Precision::kFast)
  SHOW(fp16, 128, Precision::kExact) SHOW(fp16, 128, Precision::kFast)
  ROLES(bf16, Precision::kExact) ROLES(bf16, Precision::kFast)
  ROLES(fp16, Precision::kExact) ROLES(fp16, Precision::kFast)
  SIMT(16) SIMT(32) SIMT(64)
  BACKWARD(adjoint, adjoint_kernel<16>, AdjointTraits<16>)
  BACKWARD(adjoint, adjoint_kernel<32>, AdjointTraits<32>)
  BACKWARD(adjoint, adjoint_scan_kernel, AdjointScanTraits)
  BACKWARD(gradients, gradient_kernel<8>, GradientTraits<8>)
  BACKWARD(gradients, gradient_kernel<16>, GradientTraits<16>)
  BACKWARD(walk, walk_kernel<8>, GradientTraits<8>)
  BACKWARD(walk, walk_kernel<16>, GradientTraits<16>)
  INVERSE(16) INVERSE(32) INVERSE(64) INVERSE(128)
  std::printf("simt_forward/prepare_kernel %d\\n",
              int(simt::PrepareKernelTraits::shared_bytes(128)));
}
"""


def flags(arch: str) -> list[str]:
    include = build.cuda_root() / "include" / "cccl"
    return [
        f"-arch=sm_{arch}",
        "-std=c++17",
        "-O3",
        "--expt-relaxed-constexpr",
        "-diag-suppress=177",
        f"-I{ROOT / 'csrc'}",
        f"-I{include}",
    ]


def run(command: list[str | Path]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stderr}")
    return done.stdout + done.stderr


def nvcc() -> str:
    found = build.find_nvcc()
    if found is None:
        raise SystemExit("cuda_resources.py: nvcc was not found (CUDA_HOME, DELTANET_NVCC or PATH)")
    return found


def release() -> str:
    found = re.search(r"release (\S+),", run([nvcc(), "--version"]))
    return found[1] if found else "?"


def dynamic_shared() -> dict[str, int]:
    """Bytes by file and kernel."""
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder) / "shared.cu", Path(folder) / "shared"
        source.write_text(DYNAMIC)
        run([nvcc(), *flags("80"), "-O0", str(source), "-o", str(program)])
        return {n: int(b) for n, b in (line.rsplit(" ", 1) for line in run([program]).splitlines())}


def short_name(mangled: str) -> str:
    """The kernel's name with its numbers and precision: element types stand in the file's name."""
    text = run(["c++filt", mangled]).strip().replace("(anonymous namespace)::", "")
    name = re.search(r"(\w+_kernel)(?:<(.*)>)?\(", text)
    if name is None:
        return text
    values = re.sub(r"\(\S*Precision\)([01])", lambda x: PRECISIONS[int(x[1])], name[2] or "")
    numbers = re.findall(rf"(?<![\w])(?:\d+|{'|'.join(PRECISIONS)})(?![\w])", values)
    return name[1] + (f"<{', '.join(numbers)}>" if numbers else "")


def blocks_at_once(arch: str, threads: int, registers: int, shared: int) -> int:
    by_shared = (SHARED_KB[arch] << 10) // (shared + 1024)
    by_registers = REGISTERS // (threads * ((registers + 7) // 8 * 8))
    return min(by_shared, by_registers, THREADS // threads, MOST_BLOCKS)


def rows_of(source: Path, arch: str, dynamic: dict[str, int]) -> list[str]:
    """The table's rows of one file."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernels.cubin"
        log = run([nvcc(), *flags(arch), "-Xptxas", "-v", "-cubin", "-o", cubin, source])
        code = sass.kernels_of(cubin)
    rows, mangled, spilled = [], "", 0
    for line in log.splitlines():
        if found := re.search(r"Compiling entry function '(\S+)'", line):
            mangled = found[1]
        elif found := re.search(r"(\d+) bytes spill stores", line):
            spilled = int(found[1])
        elif found := re.search(r"Used (\d+) registers", line):
            static = re.search(r"(\d+) bytes smem", line)
            name = short_name(mangled)
            shared = int(static[1]) if static else 0
            shared += dynamic.get(f"{source.stem}/{name}", 0)
            threads = code[mangled].threads or 128  # the chunk pass has __maxnreg__ alone
            registers = int(found[1])
            cells = (
                source.stem,
                name,
                f"sm_{arch}",
                threads,
                registers,
                spilled,
                code[mangled].spills_in_loops,
                shared,
                blocks_at_once(arch, threads, registers, shared),
            )
            rows.append(f"| {' | '.join(map(str, cells))} |")
    return sorted(set(rows))  # instances that differ in a dtype alone may occupy the same


def kernel_files() -> list[Path]:
    return sorted((ROOT / "csrc" / "cuda").rglob("*.cu"))


def rows(sources: list[Path]) -> list[str]:
    dynamic = dynamic_shared()
    jobs = [(source, arch, dynamic) for source in sources for arch in ARCHITECTURES]
    with concurrent.futures.ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", "2"))) as pool:
        return [row for found in pool.map(lambda job: rows_of(*job), jobs) for row in found]


def page(sources: list[Path]) -> str:
    table = "\n".join(rows(sources))
    return f"""# What the CUDA kernels occupy

Written by `scripts/cuda_resources.py` with nvcc {release()}. Spills: bytes that a thread stores,
and how many instructions of loops spill; tests/test_cuda_resources.py keeps `scan_output` and
`scan_roles`, the loops over the chunks, free of them. Shared memory: static and dynamic bytes, at
K = 128, of the chunk pass with 64 columns of V, or with roles 32. Blocks: how many fit on one
multiprocessor of an A100 (sm_80) or an H100 (sm_90).

Devices of sm_86, 89 and 120 give a block {SMALL_KB} KB ({SMALL_KB << 10} bytes): all of these fit
but `scan_roles`, in whose place `scan_output` runs there.
With K = 256 the fp32 scan takes a narrower tile of V there.

| file | kernel | for | threads | registers | spills | in loops | shared | blocks |
|---|---|---|--:|--:|--:|--:|--:|--:|
{table}
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", metavar="PART")
    options = parser.parse_args()
    if options.check is None:
        TABLE.write_text(page(kernel_files()))
        return 0
    sources = [s for s in kernel_files() if options.check in str(s.relative_to(ROOT))]
    known = set(TABLE.read_text().splitlines())
    wrong = [row for row in rows(sources) if row not in known]
    print("\n".join(wrong) or f"{len(sources)} files: as the table says")
    return bool(wrong or not sources)


if __name__ == "__main__":
    sys.exit(main())
