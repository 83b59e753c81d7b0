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
    """Measured limits: `gflops()` from registers, `gbs(n)` for passes over n floats in place."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.library = ctypes.CDLL(str(self._build()))
        self.library.fma_gflops.restype = self.library.update_gbs.restype = ctypes.c_double
        self.bits = int(self.library.vector_bits())
        self.best_gflops = 0.0

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
        """One measurement of about 20 ms; keeps the best of all as `best_gflops`."""
        if self.bits == 0:
            return float("nan")
        rounds = ctypes.c_int64(8_000_000)
        now = float(self.library.fma_gflops(self.bits, self.threads, rounds))
        self.best_gflops = max(self.best_gflops, now)
        return now

    def gbs(self, floats: int, repeats: int = 5) -> float:
        """The best of some passes over an array of this size in place; reads and writes counted."""
        import torch

        x = torch.ones(floats)
        pointer = ctypes.c_void_p(x.data_ptr())
        passes = max(1, 100_000_000 // floats)
        n = ctypes.c_int64(floats)
        return max(
            float(self.library.update_gbs(pointer, n, self.threads, passes)) for _ in range(repeats)
        )
