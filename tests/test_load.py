# SPDX-License-Identifier: Apache-2.0
"""Importing: the instruction-set variable, and life without the compiled library."""

import os
import subprocess
import sys

import pytest

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
    assert info["cuda"] is False
    assert info["cuda_reason"]


def test_public_names() -> None:
    for name in deltanet_ext.__all__:
        assert getattr(deltanet_ext, name).__doc__
