# SPDX-License-Identifier: Apache-2.0
"""The machine a benchmark runs on: its name, its load, what it can do, and which cores are ours."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
BUILD = HERE.parent / "build" / "benchmarks"


def pin(threads: int) -> list[int]:
    """Stay on the first `threads` of the cores that we may use. Call before torch is imported: its
    thread pool reads the mask when it starts."""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    os.sched_setaffinity(0, cores)
    return cores


def cpu_facts() -> dict[str, str]:
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    found = dict(re.findall(r"^(model name|cpu family|model|stepping)\s*: (.*)$", text, re.M))
    return {
        "cpu": found.get("model name", platform.processor() or platform.machine()),
        "family": found.get("cpu family", "?"),
        "model": found.get("model", "?"),
        "cores": str(os.cpu_count()),
        "system": f"{platform.system()} {platform.machine()}",
    }


def slug() -> str:
    """A folder name for results: amd-epyc-family25-model1-2cores."""
    facts = cpu_facts()
    name = f"{facts['cpu']} family{facts['family']} model{facts['model']} {facts['cores']}cores"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


class Peak:
    """Limits at this moment: `gflops()` from registers, `gbs(n)` for passes over n floats."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.library = ctypes.CDLL(str(self._build()))
        self.library.fma_gflops.restype = self.library.update_gbs.restype = ctypes.c_double
        self.bits = int(self.library.vector_bits())
        self.array: Any = None

    @staticmethod
    def _build() -> Path:
        source, library = HERE / "peak.cpp", BUILD / "peak.so"
        if library.exists() and library.stat().st_mtime > source.stat().st_mtime:
            return library
        compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
        if compiler is None:
            raise SystemExit("benchmarks: no C++ compiler found for peak.cpp")
        BUILD.mkdir(parents=True, exist_ok=True)
        flags = ["-O3", "-march=native", "-std=c++17", "-pthread", "-shared", "-fPIC"]
        subprocess.run([compiler, *flags, str(source), "-o", str(library)], check=True)
        return library

    def gflops(self) -> float:
        """One measurement of about 20 ms."""
        if self.bits == 0:
            return float("nan")
        rounds = ctypes.c_int64(5_000_000)
        return float(self.library.fma_gflops(self.bits, self.threads, rounds))

    def gbs(self, floats: int) -> float:
        """Some passes over an array of this size in place; reads and writes counted."""
        import torch

        if self.array is None or self.array.numel() != floats:
            self.array = torch.ones(floats)
        pointer, n = ctypes.c_void_p(self.array.data_ptr()), ctypes.c_int64(floats)
        passes = max(1, 60_000_000 // floats)
        return float(self.library.update_gbs(pointer, n, self.threads, passes))
