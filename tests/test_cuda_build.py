# SPDX-License-Identifier: Apache-2.0
"""The extension with its CUDA kernels, built against a CUDA build of torch, on a machine without a
GPU: it loads, registers, imports only the stable ABI, and says in words what is wrong.

`make test-cuda-build` builds it in an environment of its own and runs this file there.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

import deltanet_ext
from cases import Case
from deltanet_ext import _load

ROOT = Path(__file__).resolve().parent.parent

if os.environ.get("DELTANET_CUDA_BUILD") != "1":
    pytest.skip("`make test-cuda-build` runs these", allow_module_level=True)

pytestmark = pytest.mark.cuda_build

OPERATORS = (
    "chunk_gated_delta_rule_forward",
    "recurrent_gated_delta_rule_forward",
    "chunk_transition",
    "unit_lower_triangular_inverse",
    "causal_conv1d_forward",
    "causal_conv1d_backward",
    "causal_conv1d_update",
    "gated_rms_norm_forward",
    "gated_rms_norm_backward",
)
FUNCTIONS = (deltanet_ext.chunk_gated_delta_rule, deltanet_ext.recurrent_gated_delta_rule)


def library() -> Path:
    return Path(_load.cuda_library().__file__)


def run_tool(tool: str, *arguments: str) -> str:
    path = shutil.which(tool) or next(
        (str(p) for p in Path(torch.__file__).parents[1].glob(f"triton/**/bin/{tool}")), None
    )
    if path is None:
        pytest.skip(f"{tool} is not installed")
    ran = subprocess.run([path, *arguments], check=True, capture_output=True, text=True)
    return ran.stdout


# ---- loading and registration --------------------------------------------------------------------


def test_it_loads_and_says_what_it_is():
    assert _load.why_no_cuda() is None
    info = deltanet_ext.build_info()
    assert info["cuda"] is True
    assert info["cuda_architectures"] == os.environ["TORCH_CUDA_ARCH_LIST"]
    assert info["cuda_built_with_torch"] == torch.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+", info["cuda_nvcc"])
    assert info["cuda_reason"] == f"nvcc {info['cuda_nvcc']} for torch's CUDA {torch.version.cuda}"


def test_info_names_the_gpus(capsys):
    from deltanet_ext.__main__ import info

    assert info() == 0
    text = capsys.readouterr().out
    assert re.search(r"^cuda kernels +torch, not batch invariant; GPUs: ", text, re.M)
    built = re.search(r"^build: cuda_architectures +(.*)$", text, re.M)[1]
    assert built == os.environ["TORCH_CUDA_ARCH_LIST"]


def test_importing_starts_no_cuda():
    """A process that only forks, or only wants the CPU, must not pay for a CUDA context."""
    code = "import torch, deltanet_ext; print(torch.cuda.is_initialized())"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_are_registered_for_both_devices(name):
    for key in ("CPU", "CUDA"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"deltanet_ext::{name}", key), key


def test_the_cpu_still_works():
    L = torch.zeros(3, 3)
    assert torch.equal(deltanet_ext.unit_lower_triangular_inverse(L), torch.eye(3))


def test_the_switches_reach_the_library():
    with deltanet_ext.batch_invariant(True), deltanet_ext.cuda_precision("fast"):
        pass


# ---- the library ---------------------------------------------------------------------------------


def test_it_imports_nothing_but_the_stable_abi():
    undefined = run_tool("nm", "-DC", "--undefined-only", str(library()))
    assert "aoti_torch_get_current_cuda_stream" in undefined, "is this the one with the operators?"
    unstable = [line for line in undefined.splitlines() if re.search(r"\b(at|c10|torch)::", line)]
    assert unstable == []


def test_it_exports_only_its_python_entry():
    exported = run_tool("nm", "-D", "--defined-only", str(library()))
    strong = {line.split()[-1] for line in exported.splitlines() if line.split()[-2] in "TDB"}
    assert strong - {"__bss_start", "_edata", "_end"} == {"PyInit__C_cuda"}


def test_it_carries_no_paths_and_needs_only_torch_and_the_runtime():
    dynamic = run_tool("readelf", "-d", str(library()))
    assert "RPATH" not in dynamic
    assert "RUNPATH" not in dynamic
    needed = re.findall(r"NEEDED.*\[(lib[a-z_]+)", dynamic)
    ours = {n for n in needed if re.match(r"lib(torch|c10|cuda|cu|gomp)", n)}
    assert ours <= {"libtorch", "libtorch_cpu", "libtorch_cuda", "libcudart"}, ours
    assert {"libtorch_cuda", "libcudart"} <= ours


# ---- resources -----------------------------------------------------------------------------------


def resources() -> dict[str, dict[str, int]]:
    """What each kernel takes, by its name: REG, STACK, SHARED, LOCAL."""
    listed = run_tool("cuobjdump", "--dump-resource-usage", str(library()))
    found = {}
    for name, facts in re.findall(r"Function ([^\s:]+):\s+(REG:.*)", listed):
        found[name] = {k: int(v) for k, v in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", facts)}
    return found


def test_every_kernel_fits_a_block():
    kernels = resources()
    assert kernels, "cuobjdump found no kernel"
    for name, used in kernels.items():
        assert used["REG"] <= 255, f"{name}: {used}"
        assert used["SHARED"] <= 48 << 10, f"{name}: {used}"  # more is dynamic shared memory
        # No tile lies in local memory. What may spill beside that: scripts/cuda_resources.py.
        assert used["STACK"] + used["LOCAL"] <= 256, f"{name}: {used}"


# ---- fake kernels and errors, without a GPU ------------------------------------------------------


def fake(args: dict[str, Any], mode: FakeTensorMode, device: str = "cuda") -> dict[str, Any]:
    return {
        n: mode.from_tensor(x).to(device) if isinstance(x, torch.Tensor) else x
        for n, x in args.items()
    }


CASES = (
    Case("plain", B=2, T=20, HK=2, HV=4, K=8, V=12, state=torch.float32),
    Case("packed", T=20, HK=1, HV=3, K=5, V=7, cu=(0, 0, 9, 17), state=torch.float16),
    Case("V first", B=2, T=5, HK=1, HV=1, K=5, V=7, state_v_first=True),
    Case("raw", B=2, T=5, K=5, V=7, raw_gate=True, raw_beta=True, neg_eigval=True),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_fake_results_are_those_of_the_cpu_on_the_gpu(case, function, dtype):
    want = function(**case.inputs(dtype))
    with FakeTensorMode() as mode:
        got = function(**fake(case.inputs(dtype), mode))
    for x, y in zip(got, want, strict=True):
        assert x.device == torch.device("cuda", 0)
        assert (x.shape, x.dtype, x.stride()) == (y.shape, y.dtype, y.stride())


@pytest.mark.parametrize("function", FUNCTIONS)
def test_bad_arguments_have_the_messages_of_the_cpu(function):
    name = function.__name__
    with FakeTensorMode() as mode:
        good = fake(CASES[0].inputs(), mode)
        wide = torch.empty(2, 20, 2, 300, device="cuda")
        with pytest.raises(ValueError, match=rf"{name}: key has head dim 300; supported: 1 to 256"):
            function(**{**good, "query": wide, "key": wide})
        with pytest.raises(ValueError, match=rf"{name}: g is on cpu and other .* on cuda:0"):
            function(**{**good, "g": mode.from_tensor(CASES[0].inputs()["g"])})
        with pytest.raises(
            TypeError, match=rf"{name}: query is float64 on cuda:0; supported there"
        ):
            function(**fake(CASES[0].inputs(torch.float64), mode))


# ---- settings of the build -----------------------------------------------------------------------

SAY_WHAT_WOULD_BE_BUILT = """
import os, setuptools
setuptools.setup = lambda ext_modules, **_: print(*(e.name for e in ext_modules))
__file__ = os.path.abspath("setup.py")
exec(compile(open(__file__).read(), __file__, "exec"))
from torch.utils import cpp_extension
print(CUDA_REASON)
print(TOOLKIT and cpp_extension.CUDA_HOME)
print(os.environ.get("TORCH_CUDA_ARCH_LIST"))
"""


def setup_py(**environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", SAY_WHAT_WOULD_BE_BUILT],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )


def test_auto_is_on_here_and_builds_for_what_torch_was_built_for():
    ran = setup_py(DELTANET_CUDA="auto", TORCH_CUDA_ARCH_LIST="")
    assert ran.returncode == 0, ran.stderr
    names, _, root, architectures = ran.stdout.splitlines()
    assert names == "deltanet_ext._C deltanet_ext._C_cuda"
    assert (Path(root) / "include" / "cuda_runtime.h").exists()
    *others, newest = architectures.split()
    built = set(re.findall(r"sm_(\d+)", torch._C._cuda_getArchFlags()))
    assert {a.replace(".", "") for a in (*others, newest.removesuffix("+PTX"))} <= built
    assert newest.endswith("+PTX")
    assert "9.0" in architectures


def test_a_list_of_architectures_is_taken_as_it_is():
    assert setup_py(TORCH_CUDA_ARCH_LIST="8.0;9.0+PTX").stdout.splitlines()[3] == "8.0 9.0+PTX"


def script(folder: Path, text: str) -> Path:
    path = folder / "nvcc"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_the_toolkit_is_found_behind_a_script(tmp_path):
    real = setup_py().stdout.splitlines()[2]
    script(tmp_path, f'exec {real}/bin/nvcc "$@"')
    ran = setup_py(PATH=f"{tmp_path}:/usr/bin:/bin", CUDA_HOME="", CUDA_PATH="")
    assert ran.stdout.splitlines()[2] == real, ran.stderr


def test_what_is_missing_is_said(tmp_path):
    no_nvcc = {"CUDA_HOME": str(tmp_path), "CUDA_PATH": ""}
    ran = setup_py(DELTANET_CUDA="on", **no_nvcc)
    assert ran.returncode != 0
    assert "DELTANET_CUDA=on cannot be met: no nvcc found in CUDA_HOME or PATH" in ran.stderr
    ran = setup_py(DELTANET_CUDA="auto", **no_nvcc)
    assert ran.stdout.splitlines()[:2] == ["deltanet_ext._C", "no nvcc found in CUDA_HOME or PATH"]

    script(tmp_path, 'echo "Cuda compilation tools, release 11.8, V11.8.89"')
    ran = setup_py(DELTANET_CUDA="on", PATH=f"{tmp_path}:/usr/bin:/bin", CUDA_HOME="", CUDA_PATH="")
    assert ran.returncode != 0
    assert f"nvcc 11.8 and torch's CUDA {torch.version.cuda} differ in major" in ran.stderr

    ran = setup_py(DELTANET_CUDA="on", TORCH_CUDA_ARCH_LIST="native")
    if torch.cuda.device_count() == 0:
        assert "TORCH_CUDA_ARCH_LIST=native and no GPU is visible" in ran.stderr


def test_off_is_off():
    ran = setup_py(DELTANET_CUDA="off")
    assert ran.stdout.splitlines()[:2] == ["deltanet_ext._C", "DELTANET_CUDA=off"]
