# SPDX-License-Identifier: Apache-2.0
"""Installs torch into the environment that runs this file, unless a usable one is there.

On a machine without an NVIDIA driver it looks for a CPU build, which is twenty times smaller than a
CUDA build, in this order:
  1. the indexes that pip is configured with, if they list one ("2.13.0+cpu");
  2. PyTorch's own CPU index, if it answers within a few seconds;
  3. whatever pip takes for the plain pin.
With an NVIDIA driver it takes the plain pin, which is a CUDA build on Linux.

Environment:
    TORCH_SPEC    the requirement, default torch==2.13.0 ("torch==2.13.0+cu130", "torch>=2.10", ...)
    TORCH_INDEX   an index to take it from; nothing is looked for then
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

DEFAULT_SPEC = "torch==2.13.0"
OLDEST = (2, 10)
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
CPU_INDEX_PATIENCE_S = 5


def say(text: str) -> None:
    print(f"==> {text}", flush=True)


def installed_version() -> str | None:
    if importlib.util.find_spec("torch") is None:
        return None
    asked = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.__version__)"],
        capture_output=True,
        text=True,
    )
    if asked.returncode != 0:
        say("the installed torch cannot be imported and is replaced:\n" + asked.stderr.strip())
        return None
    return asked.stdout.strip()


def has_nvidia_driver() -> bool:
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


def configured_indexes_list(version: str) -> bool:
    """True when the indexes that pip is configured with list exactly this version."""
    said = subprocess.run(
        [sys.executable, "-m", "pip", "index", "versions", "torch"],
        capture_output=True,
        text=True,
    ).stdout
    listed = re.search(r"Available versions:(.*)", said)
    return listed is not None and version in [v.strip() for v in listed[1].split(",")]


def cpu_index_answers() -> bool:
    try:
        request = urllib.request.Request(CPU_INDEX + "/torch/", method="HEAD")
        with urllib.request.urlopen(request, timeout=CPU_INDEX_PATIENCE_S) as answer:
            return answer.status == 200
    except OSError:
        return False


def choose() -> tuple[list[str], str]:
    """pip's arguments, and why these."""
    spec = os.environ.get("TORCH_SPEC") or DEFAULT_SPEC
    if index := os.environ.get("TORCH_INDEX"):
        return [spec, "--index-url", index], "TORCH_INDEX"
    if os.environ.get("TORCH_SPEC"):
        return [spec], "TORCH_SPEC"
    if has_nvidia_driver():
        return [spec], "an NVIDIA driver is here"
    if sys.platform != "linux":
        return [spec], "the only build for this system"
    cpu_version = spec.removeprefix("torch==") + "+cpu"
    if configured_indexes_list(cpu_version):
        return [f"torch=={cpu_version}"], "no NVIDIA driver; CPU build from pip's own indexes"
    if cpu_index_answers():
        return [spec, "--index-url", CPU_INDEX], "no NVIDIA driver; CPU build from PyTorch's index"
    return [spec], (
        "no NVIDIA driver, but no CPU build can be reached: this may be a CUDA build of several GB"
        " (TORCH_SPEC and TORCH_INDEX choose another)"
    )


def main() -> int:
    version = installed_version()
    if version is not None:
        release = tuple(int(part) for part in version.split(".")[:2])
        if release >= OLDEST:
            say(f"torch {version} is installed")
            return 0
        say(f"torch {version} is too old (supported: 2.10 and newer) and is replaced")
    arguments, why = choose()
    say(f"installing {' '.join(arguments)} ({why}); this takes a minute or a few")
    return subprocess.call([sys.executable, "-m", "pip", "install", "-qq", *arguments])


if __name__ == "__main__":
    sys.exit(main())
