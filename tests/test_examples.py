# SPDX-License-Identifier: Apache-2.0
"""The examples run, and what the README shows is the file that runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"


def run(name: str) -> str:
    result = subprocess.run(
        [sys.executable, "-W", "ignore", str(EXAMPLES / name)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.slow
def test_quickstart():
    shapes = re.findall(r"torch\.Size\(\[([\d, ]+)\]\)", run("quickstart.py"))
    assert shapes == ["1, 99, 4, 128", "1, 1, 4, 128", "1, 4, 128, 128"]


@pytest.mark.slow
def test_qwen3_next_layer():
    pytest.importorskip("transformers", minversion="5.15")
    assert "same tokens: True" in run("qwen3_next_layer.py")


@pytest.mark.slow
def test_cpp_prefill():
    """The CUDA kernels from plain C++: compiled as the program is, and run on the emulator."""
    import emulated

    build = emulated.build
    if reason := emulated.why_not():
        pytest.skip(f"the PTX emulator: {reason}")
    program = build.example()
    ran = subprocess.run([program], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert re.search(r"150 tokens, 4 value heads: relative error \d\.\de-0[6-9]", ran.stdout)


def test_the_readme_shows_the_quickstart():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    code = (EXAMPLES / "quickstart.py").read_text()
    assert blocks[0].strip() in code
