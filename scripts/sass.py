# SPDX-License-Identifier: Apache-2.0
"""Machine code of CUDA kernels, as nvdisasm shows it: which spills lie in loops."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

import networkx


def find_nvdisasm() -> str | None:
    """By NVDISASM, the path, or the package nvidia-cuda-nvdisasm; None where there is none."""
    packaged = Path(sysconfig.get_path("purelib"), "nvidia").glob("*/bin/nvdisasm")
    for found in (os.environ.get("NVDISASM"), shutil.which("nvdisasm"), *map(str, packaged)):
        if found and os.access(found, os.X_OK):
            return found
    return None


@dataclass
class Block:
    """Instructions that run one after the other."""

    instructions: list[str] = field(default_factory=list)
    targets: list[str] = field(default_factory=list)  # labels that a branch at its end may go to
    falls_through: bool = True


LABEL, CODE = re.compile(r"^(\.L_\w+|[\w$]+):"), re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;")
# A warp that has diverged meets again at BSYNC, and goes on behind it: no branch.
BRANCH, END = re.compile(r"\b(BRA|JMP|CALL)\b"), re.compile(r"\b(EXIT|RET|BRX|JMX)\b")


def blocks_of(listing: str) -> tuple[list[Block], dict[str, int]]:
    """The blocks of a kernel's text section, and which of them each label names."""
    blocks, labels = [Block()], {}
    for line in listing.splitlines():
        if label := LABEL.match(line):
            if blocks[-1].instructions:
                blocks.append(Block())
            labels[label[1]] = len(blocks) - 1
        elif code := CODE.match(line):
            text, block = code[1], blocks[-1]
            block.instructions.append(text)
            target = re.search(r"`\((\.L_\w+|[\w$]+)\)", text)
            branches = BRANCH.search(text)
            if branches and target:
                block.targets.append(target[1])
            if branches or END.search(text):
                # Under a predicate, or only for lanes that diverged, or to come back.
                conditional = text.startswith("@") or re.search(
                    r"(BRA|EXIT)\S* !?U?P\d|\.DIV|CALL", text
                )
                block.falls_through = bool(conditional)
                blocks.append(Block())
    return blocks, labels


def looped(listing: str) -> list[str]:
    """The instructions of a kernel that lie in a loop."""
    blocks, labels = blocks_of(listing)
    graph = networkx.DiGraph()
    for i, block in enumerate(blocks):
        if block.falls_through and i + 1 < len(blocks):
            graph.add_edge(i, i + 1)
        graph.add_edges_from((i, labels[target]) for target in block.targets if target in labels)
    found = []
    for part in networkx.strongly_connected_components(graph):
        if len(part) > 1 or any(graph.has_edge(i, i) for i in part):
            found += [text for i in part for text in blocks[i].instructions]
    return found


@dataclass(frozen=True)
class KernelCode:
    """What a cubin says of one kernel."""

    threads: int | None  # of __launch_bounds__
    spills_in_loops: int  # loads and stores of local memory


def kernels_of(cubin: Path) -> dict[str, KernelCode]:
    """Every kernel of a cubin, by its mangled name."""
    nvdisasm = find_nvdisasm()
    if nvdisasm is None:
        raise FileNotFoundError("nvdisasm is not here: pip install nvidia-cuda-nvdisasm")
    text = subprocess.run([nvdisasm, cubin], capture_output=True, text=True, check=True).stdout
    parts = re.split(r"^\t?\.section\t(\S+?),.*$", text, flags=re.M)[1:]
    sections = dict(zip(parts[::2], parts[1::2], strict=True))
    found = {}
    for section, listing in sections.items():
        if not section.startswith(".text."):
            continue
        name = section.removeprefix(".text.")
        info = sections.get(f".nv.info.{name}", "")
        threads = re.search(r"EIATTR_MAX_THREADS.*?\.word\s+(0x[0-9a-f]+)", info, re.S)
        spills = sum(bool(re.search(r"\b(STL|LDL)\b", code)) for code in looped(listing))
        found[name] = KernelCode(int(threads[1], 16) if threads else None, spills)
    return found
