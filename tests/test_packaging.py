# SPDX-License-Identifier: Apache-2.0
"""What is built and shipped: symbols of the library, build settings, versions, package contents."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import deltanet_ext

ROOT = Path(__file__).resolve().parent.parent

try:
    import deltanet_ext._C as _C
except ImportError:  # the other tests say so
    _C = None

needs_library = pytest.mark.skipif(_C is None, reason="deltanet_ext._C is not built")
needs_checkout = pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="not a checkout")


def run_tool(tool: str, *arguments: str) -> str:
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is not installed (Debian: binutils)")
    return subprocess.run(
        [tool, *arguments], check=True, capture_output=True, text=True, errors="replace"
    ).stdout


# ---- the library ---------------------------------------------------------------------------------


@needs_library
def test_the_library_imports_nothing_but_the_stable_abi():
    """This is what lets one build serve every torch from 2.10 on."""
    undefined = run_tool("nm", "-DC", "--undefined-only", _C.__file__)
    assert "aoti_torch_" in undefined, "is this the library with the operators?"
    unstable = [line for line in undefined.splitlines() if re.search(r"\b(at|c10|torch)::", line)]
    assert unstable == []


@needs_library
def test_the_library_exports_only_its_python_entry():
    exported = run_tool("nm", "-D", "--defined-only", _C.__file__)
    strong = {line.split()[-1] for line in exported.splitlines() if line.split()[-2] in "TDB"}
    assert strong - {"__bss_start", "_edata", "_end"} == {"PyInit__C"}  # the linker's own marks


@needs_library
def test_the_library_carries_no_paths_and_no_second_thread_library():
    dynamic = run_tool("readelf", "-d", _C.__file__)
    assert "RPATH" not in dynamic
    assert "RUNPATH" not in dynamic
    needed = re.findall(r"NEEDED.*\[(.*)\]", dynamic)
    assert not [n for n in needed if re.match(r"lib(gomp|iomp|c10|torch_python|cuda)", n)], needed


# ---- instruction sets do not leak ----------------------------------------------------------------


def object_file(isa: str) -> Path:
    source = ROOT / "csrc" / "cpu" / f"isa_{isa}.cpp"
    for candidate in (
        ROOT / "build" / "extension" / "csrc" / "cpu" / f"isa_{isa}.o",
        ROOT / "build" / "cpp-dev" / "CMakeFiles" / "deltanet_core.dir" / "csrc" / "cpu"
        / f"isa_{isa}.cpp.o",
    ):  # fmt: skip
        if candidate.exists() and candidate.stat().st_mtime >= source.stat().st_mtime:
            return candidate
    pytest.skip("no up-to-date object files; `make dev` leaves them in build/")


def leaks(symbols: str, isa: str) -> list[str]:
    """Weak symbols that the linker may take for the whole program, outside the ISA's namespace."""
    found = []
    for line in symbols.splitlines():
        kind, _, name = line[17:].partition(" ")
        if kind in ("W", "V", "u") and f"deltanet::cpu::{isa}::" not in name:
            found.append(name)
    return found


@needs_checkout
@pytest.mark.parametrize("isa", ["avx2", "avx512", "avx512_bf16"])
def test_an_isa_object_defines_no_weak_symbol_outside_its_namespace(isa):
    """A std:: function compiled for AVX-512 could win at link time and crash an older CPU."""
    assert leaks(run_tool("nm", "-C", str(object_file(isa))), isa) == []


def test_the_leak_check_finds_a_leak(tmp_path):
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("no C++ compiler")
    source = tmp_path / "leak.cpp"
    source.write_text(
        "#include <vector>\n"
        "namespace deltanet::cpu::avx512 { void f(std::vector<float>& v) { v.resize(7); } }\n"
    )
    compiled = tmp_path / "leak.o"
    subprocess.run([compiler, "-std=c++17", "-O0", "-c", source, "-o", compiled], check=True)
    assert any("std::vector" in name for name in leaks(run_tool("nm", "-C", compiled), "avx512"))


def functions(disassembly: str) -> Iterator[tuple[str, list[str]]]:
    name, lines = "", []
    for line in disassembly.splitlines():
        if header := re.match(r"[0-9a-f]+ <(.*)>:$", line):
            yield name, lines
            name, lines = header[1], []
        else:
            lines.append(line)
    yield name, lines


@needs_library
def test_vector_instructions_stand_only_in_the_functions_of_their_isa():
    """The same seen from the result: what the linker did take."""
    if os.uname().machine != "x86_64":
        pytest.skip("x86-64 only")
    wide = {"avx2": 0, "avx512": 0}
    disassembly = run_tool("objdump", "-dC", "--no-show-raw-insn", _C.__file__)
    for name, lines in functions(disassembly):
        text = "\n".join(lines)
        if re.search(r"%zmm|%[xy]mm(1[6-9]|2\d|3[01])|\{%k", text):
            assert re.search(r"deltanet::cpu::avx512(_bf16)?::", name), (
                f"AVX-512 instructions in {name}"
            )
            wide["avx512"] += 1
        elif re.search(r"\tv\w+\s.*%[xy]mm", text):
            assert re.search(r"deltanet::cpu::avx(2|512|512_bf16)::", name), (
                f"AVX instructions in {name}"
            )
            wide["avx2"] += 1
    assert min(wide.values()) > 3, f"is this the library with the kernels? {wide}"


@needs_library
def test_loops_over_products_do_not_compute_addresses_apart():
    """Python's own flags ask for wrapping integers; then each `row * stride + i` of int is extended
    to 64 bits by instructions of its own, as many as there are multiply-adds."""
    if os.uname().machine != "x86_64":
        pytest.skip("x86-64 only")
    disassembly = run_tool("objdump", "-dC", "--no-show-raw-insn", _C.__file__)
    tiles = [
        line
        for name, lines in functions(disassembly)
        if re.search(r"avx2::Chunk\w+<.*::Tile<", name)
        for line in lines
    ]
    multiply_adds = sum("\tvfmadd" in line or "\tvfnmadd" in line for line in tiles)
    extensions = sum("\tcltq" in line or "\tmovslq" in line for line in tiles)
    assert multiply_adds > 500
    assert extensions < multiply_adds / 10


# ---- build settings ------------------------------------------------------------------------------


def setup_py(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "setup.py", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
@needs_checkout
@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is a CUDA build")
@pytest.mark.parametrize("variables", [{"DELTANET_CUDA": "on"}, {"FORCE_CUDA": "1"}])
def test_asking_for_cuda_kernels_that_cannot_be_built_is_an_error(variables):
    ran = setup_py("--name", **{"DELTANET_CUDA": "", **variables})
    assert ran.returncode != 0
    reason = f"torch {torch.__version__} is not a CUDA build"
    assert f"DELTANET_CUDA=on cannot be met: {reason}" in ran.stderr


@pytest.mark.slow
@needs_checkout
@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("DELTANET_CUDA", "yes", "DELTANET_CUDA=yes is not known; supported: auto, on, off"),
        ("DEBUG", "true", "DEBUG=true is not known; supported: 0, 1"),
        ("DELTANET_WERROR", "on", "DELTANET_WERROR=on is not known; supported: 0, 1"),
    ],
)
def test_an_unknown_build_setting_is_an_error(variable, value, message):
    ran = setup_py("--name", **{variable: value})
    assert ran.returncode != 0
    assert message in ran.stderr


@needs_library
@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is a CUDA build")
def test_build_info_says_why_there_is_no_cuda():
    info = deltanet_ext.build_info()
    assert info["cuda"] is False
    assert info["cuda_reason"].startswith("the CUDA kernels are not built: ")


# ---- version and contents ------------------------------------------------------------------------


@needs_checkout
def test_there_is_one_version():
    written = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.M)[1]
    assert importlib.metadata.version("deltanet_ext") == written
    assert deltanet_ext.__version__ == written
    assert f"\nversion: {written}\n" in (ROOT / "CITATION.cff").read_text()
    if _C is not None:
        assert deltanet_ext.build_info()["version"] == written


def files_below(*folders: str) -> set[str]:
    found = set()
    for folder in folders:
        for path in (ROOT / folder).rglob("*"):
            ignored = "__pycache__" in path.parts or path.suffix == ".so"
            if path.is_file() and not ignored:
                found.add(str(path.relative_to(ROOT)))
    return found


@pytest.mark.slow
@needs_checkout
def test_the_source_distribution_can_be_built_and_tested(tmp_path):
    ran = setup_py("-q", "sdist", "--dist-dir", str(tmp_path))
    assert ran.returncode == 0, ran.stderr
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    wanted = files_below("csrc", "deltanet_ext", "requirements", "scripts", "tests")
    wanted |= {"setup.py", "pyproject.toml", "LICENSE", "README.md", "Makefile", "CMakeLists.txt"}
    assert sorted(wanted - names) == []
    assert not [name for name in names if name.endswith((".so", ".o", ".pyc"))]


@needs_checkout
@needs_library
@pytest.mark.slow  # compiles where the objects of an editable build are not at hand
def test_a_wheel_holds_the_package_and_nothing_else(tmp_path):
    ran = setup_py(
        "-q",
        *("build", "--build-base", str(tmp_path / "build"), "--build-temp", "build/extension"),
        *("bdist_wheel", "--dist-dir", str(tmp_path), "--bdist-dir", str(tmp_path / "tree")),
    )
    assert ran.returncode == 0, ran.stderr
    (archive,) = tmp_path.glob("*.whl")
    assert f"cp{sys.version_info.major}{sys.version_info.minor}" in archive.name
    with zipfile.ZipFile(archive) as opened:
        names = set(opened.namelist())
    package = {name for name in names if ".dist-info/" not in name}
    libraries = {name for name in package if re.match(r"deltanet_ext/_C(_cuda)?\..*\.so$", name)}
    assert package - libraries == files_below("deltanet_ext")
    assert len(libraries) == 1 + _C.build_info()["cuda"]
    assert [name for name in names if name.endswith("licenses/LICENSE")]
