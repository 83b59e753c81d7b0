#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Registers, spills and shared memory of every CUDA kernel, as ptxas reports them: no GPU needed.

    cuda_resources.py [PART]   compile for sm_80 and sm_90, and write the table
    cuda_resources.py --check  compare with the table; exit 1 if it lies

PART selects files of csrc/cuda by their path: "tensor_core/" unless given, "" for all.
The table is docs/cuda_resources.md. ptxas of another toolkit may allocate otherwise.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "docs" / "cuda_resources.md"
ARCHITECTURES = ("80", "90")
# Registers of a multiprocessor, shared memory of one (KB; each block takes 1 KB more), threads.
REGISTERS, SHARED_KB, THREADS = 65536, {"80": 164, "90": 228}, 2048

sys.path.insert(0, str(ROOT / "tests" / "ptx_emulator"))
import build  # noqa: E402

# What ptxas cannot know: threads of a block, and dynamic shared memory as the launcher asks for it.
DYNAMIC = """
#include <cstdio>
#include "cuda/tensor_core/scan_output.cuh"
using namespace deltanet::cuda;
using namespace deltanet::cuda::tensor_core;
#define SHOW(E, K, P) \\
  std::printf("scan_output_" #E "_" #K "_%s %d\\n", P == Precision::kExact ? "exact" : "fast", \\
              int(ScanTraits<E, K, P>::shared_bytes(4)));
int main() {
  SHOW(bf16, 64, Precision::kExact) SHOW(bf16, 64, Precision::kFast)
  SHOW(bf16, 128, Precision::kExact) SHOW(bf16, 128, Precision::kFast)
  SHOW(fp16, 64, Precision::kExact) SHOW(fp16, 64, Precision::kFast)
  SHOW(fp16, 128, Precision::kExact) SHOW(fp16, 128, Precision::kFast)
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


def run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
    return done.stdout + done.stderr


def dynamic_shared() -> dict[str, int]:
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder) / "shared.cu", Path(folder) / "shared"
        source.write_text(DYNAMIC)
        run([build.find_nvcc(), *flags("80"), "-O0", str(source), "-o", str(program)])
        return {n: int(b) for n, b in (line.split() for line in run([program]).splitlines())}


def demangle(name: str) -> str:
    text = run(["c++filt", name]).strip()
    text = re.sub(r"\(anonymous namespace\)::|deltanet::cuda::|tensor_core::|simt::", "", text)
    text = re.sub(r"^void ", "", text)
    return re.sub(r"\(.*$", "", text.replace("__nv_bfloat16", "bf16").replace("__half", "fp16"))


def kernels(source: Path, arch: str) -> list[tuple[str, int, int, int]]:
    """(kernel, registers, spilled bytes, static shared bytes) of one file."""
    found = []
    log = run(
        [build.find_nvcc(), *flags(arch), "-Xptxas", "-v", "-cubin", "-o", os.devnull, str(source)]
    )
    name, spills = "", 0
    for line in log.splitlines():
        if m := re.search(r"Compiling entry function '(\S+)'", line):
            name = m[1]
        elif m := re.search(r"(\d+) bytes spill stores", line):
            spills = int(m[1])
        elif m := re.search(r"Used (\d+) registers", line):
            shared = re.search(r"(\d+) bytes smem", line)
            found.append((demangle(name), int(m[1]), spills, int(shared[1]) if shared else 0))
    return found


def rows(sources: list[Path]) -> list[str]:
    dynamic = dynamic_shared()
    lines = []
    for source in sources:
        stem = source.stem
        for arch in ARCHITECTURES:
            for kernel, registers, spills, static in kernels(source, arch):
                shared = static + dynamic.get(stem, 0)
                short = (
                    kernel.split("<")[0] if stem.startswith(("prepare", "scan_output")) else kernel
                )
                blocks = ""
                if stem.startswith(("prepare", "scan_output")):  # 128 threads each
                    by_shared = (SHARED_KB[arch] << 10) // (shared + 1024)
                    blocks = str(
                        min(by_shared, REGISTERS // (128 * ((registers + 7) // 8 * 8)), 16)
                    )
                cells = (stem, short, f"sm_{arch}", registers, spills, shared, blocks)
                lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", nargs="?", default="tensor_core/")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    sources = sorted((ROOT / "csrc" / "cuda").rglob("*.cu"))
    sources = [s for s in sources if options.part in str(s.relative_to(ROOT))]
    if options.check:
        known = set(TABLE.read_text().splitlines())
        wrong = [line for line in rows(sources) if line not in known]
        print("\n".join(wrong) or f"{len(sources)} files: as the table says")
        return bool(wrong)
    toolkit = re.search(r"release (\S+),", run([build.find_nvcc(), "--version"]))
    head = f"""# What the CUDA kernels occupy

Written by `scripts/cuda_resources.py` with nvcc {toolkit[1] if toolkit else "?"}. Spills: bytes
that a thread stores. Shared memory: static and dynamic, of a block with 4 warps in the chunk pass.
Blocks: how many of 128 threads fit on one multiprocessor of an A100 (sm_80) or H100 (sm_90).

| file | kernel | for | registers | spills | shared | blocks |
|---|---|---|---|---|---|---|
"""
    TABLE.write_text(head + "\n".join(rows(sources)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
