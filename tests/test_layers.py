# SPDX-License-Identifier: Apache-2.0
"""The layers depend on each other in one direction: core <- cpu, cuda <- ops <- python.

Read off the #include and import lines, so a wrong one fails here and not in a year.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"

# What each layer may include of the others. cpu and cuda never see each other.
LAYERS = {
    "core": {"core"},
    "cpu": {"core", "cpu"},
    "cuda": {"core", "cuda"},
    "ops": {"core", "cpu", "cuda", "ops"},
}
TORCH = re.compile(r"(torch|ATen|c10|caffe2|pybind11)/|Python\.h$")
CUDA = re.compile(r"(cuda|cub|thrust|nv|cooperative_groups)")
SOURCE_ENDINGS = {".h", ".cpp", ".cu", ".cuh"}


def sources(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix in SOURCE_ENDINGS)


def includes(path: Path) -> list[str]:
    return re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', path.read_text(), re.MULTILINE)


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_every_source_lies_in_a_layer():
    assert sources(CSRC), "no sources found: is this a checkout?"
    for path in sources(CSRC):
        assert path.relative_to(CSRC).parts[0] in LAYERS, name(path)


@pytest.mark.parametrize("path", sources(CSRC), ids=name)
def test_a_layer_includes_only_what_stands_below_it(path):
    layer = path.relative_to(CSRC).parts[0]
    for included in includes(path):
        first = included.split("/")[0]
        if (CSRC / included).exists():
            assert first in LAYERS[layer], f"{layer} must not include {included}"
        elif first in LAYERS and first != "cuda":  # cuda/ is also a folder of CUDA's own headers
            pytest.fail(f"{included} does not exist")
        else:
            # The stable ABI's header-only checks are all that CUDA code may take of torch.
            if layer != "ops" and not (
                layer == "cuda" and path.name == "launch.cuh" and "torch/headeronly/" in included
            ):
                assert not TORCH.match(included), f"{layer} must not include {included}"
            if layer in ("core", "cpu"):
                assert not CUDA.match(included), f"{layer} must not include {included}"


@pytest.mark.parametrize("path", sources(ROOT / "tests" / "cpp"), ids=name)
def test_the_cpp_tests_need_no_torch(path):
    for included in includes(path):
        assert not TORCH.match(included), included
        if (CSRC / included).exists():
            assert included.split("/")[0] in {"core", "cpu"}, included


def test_ops_use_only_the_stable_part_of_torch():
    allowed = re.compile(r"torch/(csrc/(stable|inductor/aoti_torch/c)|headeronly)/")
    for path in sources(CSRC / "ops"):
        for included in includes(path):
            if TORCH.match(included) and not included.startswith("pybind11/"):
                assert allowed.match(included), f"{name(path)} includes {included}"


def test_pybind11_stays_in_the_module_files():
    using = [p.name for p in sources(CSRC) if any("pybind11/" in i for i in includes(p))]
    assert using == ["module.cpp", "module_cuda.cpp"]  # one for each library


def test_the_build_lists_name_every_source_once():
    """Explicit lists in setup.py and CMakeLists.txt, and none of them has forgotten a file."""
    on_disk = {name(p) for p in sources(CSRC) if p.suffix in (".cpp", ".cu")}
    in_setup = re.findall(r'"(csrc/[^"]+\.(?:cpp|cu))"', (ROOT / "setup.py").read_text())
    assert sorted(in_setup) == sorted(on_disk)
    in_cmake = re.findall(r"^\s*(csrc/\S+\.cpp)$", (ROOT / "CMakeLists.txt").read_text(), re.M)
    torch_free = {p for p in on_disk if not p.startswith(("csrc/ops/", "csrc/cuda/"))}
    assert sorted(in_cmake) == sorted(torch_free)


def imported_modules(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_the_operators_know_nothing_of_their_users():
    """The package's core imports neither integrations nor the demo, and needs only torch."""
    package = ROOT / "deltanet_ext"
    for path in package.glob("*.py"):
        if path.name in ("__init__.py", "__main__.py"):
            continue  # the front, which hands out what all layers have
        for module in imported_modules(path):
            assert not module.startswith(("deltanet_ext.integrations", "deltanet_ext.demo")), (
                f"{path.name} imports {module}"
            )
            assert module.split(".")[0] not in ("transformers", "numpy", "rich"), (
                f"{path.name} imports {module}"
            )


def test_the_reference_does_not_use_what_it_judges():
    for module in imported_modules(ROOT / "deltanet_ext" / "reference.py"):
        assert not module.startswith("deltanet_ext"), module
