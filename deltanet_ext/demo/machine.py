# SPDX-License-Identifier: Apache-2.0
"""What the demo finds on this machine: packages, idle cores, versions."""

from __future__ import annotations

import importlib.util
import os
import time

import torch

from deltanet_ext import ops
from deltanet_ext.demo.models import MODELS, modeling_file
from deltanet_ext.integrations import transformers as switch


def missing() -> str | None:
    """What the demo needs and does not have, and how to get it."""
    packages = [p for p in ("transformers", "rich") if importlib.util.find_spec(p) is None]
    if packages:
        return (
            f"demo: {' and '.join(packages)} not installed; "
            'install with: pip install "deltanet_ext[demo]", or run: make demo'
        )
    import transformers

    transformers.logging.set_verbosity_error()  # it warns of what this demo is about
    try:
        switch.enable(quiet=True)
        switch.disable()
        for model in MODELS:
            modeling_file(model)
    except ImportError as error:
        return f"demo: {error}"
    return None


def idle_cores() -> float | None:
    """How many cores nobody used during the last third of a second; None where that is unknown."""

    def ticks() -> tuple[int, int]:
        with open("/proc/stat") as stat:
            numbers = [int(number) for number in stat.readline().split()[1:]]
        return numbers[3] + numbers[4], sum(numbers[:8])  # idle and waiting for a disk, all

    try:
        idle, all_ticks = ticks()
        time.sleep(0.3)
        later_idle, later_all = ticks()
    except (OSError, ValueError, IndexError):
        return None
    return (os.cpu_count() or 1) * (later_idle - idle) / max(1, later_all - all_ticks)


def choose_threads(wanted: int | None) -> None:
    """Threads that wait for a core that is busy elsewhere slow both ways down many times over."""
    idle = idle_cores()
    if wanted is not None:
        torch.set_num_threads(wanted)
    elif idle is not None:
        torch.set_num_threads(max(1, min(torch.get_num_threads(), round(idle))))


def environment() -> str:
    import transformers

    return (
        f"deltanet_ext {ops.build_info()['version']} ({ops.cpu_isa()}), torch {torch.__version__}, "
        f"transformers {transformers.__version__}, {torch.get_num_threads()} of "
        f"{os.cpu_count()} cores"
    )
