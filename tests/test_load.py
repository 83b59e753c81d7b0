# SPDX-License-Identifier: Apache-2.0
"""Importing: the instruction-set variable, and life without the compiled library."""

import importlib
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

import deltanet_ext


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("isa", deltanet_ext.available_cpu_isas())
def test_the_variable_chooses(isa: str) -> None:
    code = (
        "import deltanet_ext as d; print(d.cpu_isa()); d.force_cpu_isa('scalar'); "
        "d.force_cpu_isa(None); print(d.cpu_isa())"
    )
    done = python(code, DELTANET_CPU_ISA=isa)
    assert done.stdout.split() == [isa, isa], done.stderr


@pytest.mark.slow
def test_an_empty_variable_is_no_choice() -> None:
    done = python("import deltanet_ext as d; print(d.cpu_isa())", DELTANET_CPU_ISA="")
    assert done.stdout.split() == deltanet_ext.available_cpu_isas()[:1], done.stderr


@pytest.mark.parametrize(
    "name", ["sse9", *(pytest.param(n, marks=pytest.mark.slow) for n in ("AVX2", "avx2,scalar"))]
)
def test_a_wrong_variable_is_an_error_at_import(name: str) -> None:
    done = python("import deltanet_ext", DELTANET_CPU_ISA=name)
    assert done.returncode != 0
    assert "ValueError: DELTANET_CPU_ISA" in done.stderr
    assert f"'{name}'" in done.stderr
    assert "scalar" in done.stderr


@pytest.mark.parametrize("megabytes", ["abc", "-1", "1.5"])
def test_so_is_a_wrong_amount_of_memory_to_keep(megabytes: str) -> None:
    done = python("import deltanet_ext", DELTANET_KEEP_MB=megabytes)
    assert done.returncode != 0
    assert f"ValueError: DELTANET_KEEP_MB is '{megabytes}'; supported" in done.stderr


WITHOUT_LIBRARY = """
import sys
sys.modules["deltanet_ext._C"] = None  # as if it were not there
import torch
import deltanet_ext
from deltanet_ext import reference
q = torch.ones(1, 2, 1, 1)
print(reference.recurrent(q, q, q, None, None)[0].flatten().tolist())
calls = {
    "chunk": lambda: deltanet_ext.chunk_gated_delta_rule(q, q, q, None, None),
    "recurrent": lambda: deltanet_ext.recurrent_gated_delta_rule(q, q, q, None, None),
    "transition": lambda: deltanet_ext.chunk_transition(q, q, None, None),
    "inverse": lambda: deltanet_ext.unit_lower_triangular_inverse(q),
    "info": deltanet_ext.build_info,
    "isas": deltanet_ext.available_cpu_isas,
    "isa": deltanet_ext.cpu_isa,
    "force": lambda: deltanet_ext.force_cpu_isa(None),
}
for name, call in calls.items():
    try:
        call()
    except ImportError as error:
        print(name, error)
"""


@pytest.mark.slow
def test_without_the_library_the_first_call_says_what_to_do() -> None:
    done = python(WITHOUT_LIBRARY)
    assert done.returncode == 0, done.stderr
    reference, *errors = done.stdout.splitlines()
    assert reference == "[1.0, 1.0]"
    assert len(errors) == 8
    for line in errors:
        assert "the compiled library deltanet_ext._C is missing" in line
        assert "pip install --no-build-isolation -e ." in line


def test_version_is_the_version_of_the_library() -> None:
    assert deltanet_ext.__version__ == deltanet_ext.build_info()["version"]


def test_build_info_says_why_there_is_no_cuda() -> None:
    info = deltanet_ext.build_info()
    assert info["torch_target"] == "2.10"
    assert isinstance(info["cuda"], bool)
    assert info["cuda_reason"]
    assert info["cuda"] or info["cuda_reason"] == deltanet_ext._load.why_no_cuda()


# The library as it is, but saying that the CUDA kernels were built beside it.
LIBRARY = deltanet_ext._load.library().__file__
WITH_CUDA = f"""
import importlib.util, sys, types
import torch
spec = importlib.util.spec_from_file_location("deltanet_ext._C", {LIBRARY!r})
library = importlib.util.module_from_spec(spec)
spec.loader.exec_module(library)
facts = library.build_info() | {{"cuda": True, "cuda_reason": "nvcc 13.0.1 for torch's CUDA 13.0"}}
library.build_info = lambda: dict(facts)
sys.modules["deltanet_ext._C"] = library
cuda = types.ModuleType("deltanet_ext._C_cuda")
cuda.build_info = lambda: {{
    "version": facts["version"], "nvcc": "13.0.1", "architectures": "9.0+PTX",
    "built_with_torch": "2.14.1",
}}
told = []
cuda.set_batch_invariant = lambda on: told.append(("batch invariant", on))
cuda.set_fast = lambda on: told.append(("fast", on))
sys.modules["deltanet_ext._C_cuda"] = cuda
"""


def lines(code: str) -> list[str]:
    done = python(WITH_CUDA + code)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_cuda_kernels_that_load() -> None:
    found = lines(
        "import deltanet_ext as d; from deltanet_ext import _load\n"
        "info = d.build_info()\n"
        "print(_load.why_no_cuda(), info['cuda'], info['cuda_reason'])\n"
        "print(info['cuda_architectures'], info['cuda_nvcc'], info['cuda_built_with_torch'])\n"
        "with d.batch_invariant(True), d.cuda_precision('fast'): pass\n"
        "print(told)\n"
    )
    assert found[0] == "None True nvcc 13.0.1 for torch's CUDA 13.0"
    assert found[1] == "9.0+PTX 13.0.1 2.14.1"
    changes = [
        ("batch invariant", True), ("fast", False),
        ("batch invariant", True), ("fast", True),
        ("batch invariant", True), ("fast", False),
        ("batch invariant", False), ("fast", False),
    ]  # fmt: skip
    assert found[2] == str(changes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("breaking", "reason"),
    [
        ("sys.modules['deltanet_ext._C_cuda'] = None", "failed to load: import of deltanet_ext._C"),
        (
            "good = cuda.build_info(); cuda.build_info = lambda: good | {'version': '0.0.9'}",
            "failed to load: deltanet_ext._C_cuda is of version 0.0.9 and deltanet_ext._C of",
        ),
        (
            "facts['cuda'] = False; facts['cuda_reason'] = 'DELTANET_CUDA=off'",
            "are not built: DELTANET_CUDA=off",
        ),
    ],
    ids=["cannot be loaded", "another version", "not built, but left from an earlier build"],
)
def test_cuda_kernels_that_do_not_load(breaking: str, reason: str) -> None:
    """Importing works, the CPU works, and the reason is kept for whoever asks for CUDA."""
    found = lines(
        f"{breaking}\n"
        "import deltanet_ext as d\n"
        "L = torch.zeros(2, 2)\n"
        "print(d.unit_lower_triangular_inverse(L).tolist())\n"
        "print(d.build_info()['cuda'], d.build_info()['cuda_reason'])\n"
        "class OnCuda(torch.Tensor):\n"
        "    device = property(lambda self: torch.device('cuda', 0))\n"
        "try: d.unit_lower_triangular_inverse(L.as_subclass(OnCuda))\n"
        "except ValueError as error: print(error)\n"
    )
    assert found[0] == "[[1.0, 0.0], [0.0, 1.0]]"
    assert found[1].startswith(f"False the CUDA kernels {reason}")
    assert found[2].startswith(
        f"unit_lower_triangular_inverse: L is on cuda:0; supported: cpu (the CUDA kernels {reason}"
    )


def test_public_names() -> None:
    for name in deltanet_ext.__all__:
        assert getattr(deltanet_ext, name).__doc__


LOADER = """
#include <dlfcn.h>
#include <stdio.h>
int main(int count, char** libraries) {
  for (int i = 1; i < count; ++i)
    if (!dlopen(libraries[i], RTLD_NOW | RTLD_GLOBAL)) return puts(dlerror()), 1;
  return puts("fine"), 0;
}
"""


def test_a_program_without_an_interpreter_loads_the_operators(tmp_path: Path) -> None:
    """What docs/models.md says a C++ host of an exported model loads."""
    shared = sysconfig.get_config_var("INSTSONAME") or ""
    python = Path(sysconfig.get_config_var("LIBDIR") or "") / shared
    if shutil.which("gcc") is None or not (".so" in shared and python.exists()):
        pytest.skip("no gcc, or a Python that is not a shared library")
    torch_libraries = Path(torch.__file__).parent / "lib"
    operators = Path(importlib.import_module("deltanet_ext._C").__file__ or "")
    (tmp_path / "load.c").write_text(LOADER)
    subprocess.run(["gcc", "load.c", "-o", "load", "-ldl"], cwd=tmp_path, check=True)

    def load(*libraries: Path) -> str:
        command = [tmp_path / "load", torch_libraries / "libtorch.so", *libraries]
        environment = {"LD_LIBRARY_PATH": str(torch_libraries)}
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False
        ).stdout

    assert load(python, operators).strip() == "fine"
    assert "undefined symbol: Py" in load(operators)
