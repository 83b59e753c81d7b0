# SPDX-License-Identifier: Apache-2.0
"""Builds deltanet_ext._C through torch.utils.cpp_extension.

Environment:
    DELTANET_CUDA=auto|on|off   CUDA kernels. auto: when torch is a CUDA build, an nvcc of the same
                                major version is found and there are CUDA sources. Whether a GPU is
                                visible never matters. FORCE_CUDA=1 means on.
    DELTANET_WERROR=1           warnings of our own code are errors (developers, CI)
    DEBUG=1                     -O0 -g and assertions
    MAX_JOBS=N                  compile at most N files at once
    CXX                         the C++ compiler; ccache is used when it is installed
"""

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pybind11
import setuptools
import torch
from torch.utils import cpp_extension

ROOT = Path(__file__).resolve().parent
os.chdir(ROOT)  # sources and build folders are relative to this file, whoever runs it

CPU_SOURCES = [
    "csrc/cpu/registry.cpp",
    "csrc/cpu/backward.cpp",
    "csrc/cpu/forward.cpp",
    "csrc/cpu/isa_scalar.cpp",
    "csrc/cpu/isa_avx2.cpp",
    "csrc/cpu/isa_avx512.cpp",
]
OPS_SOURCES = [
    "csrc/ops/schema.cpp",
    "csrc/ops/allocate.cpp",
    "csrc/ops/gated_delta_rule_cpu.cpp",
    "csrc/ops/triangular_inverse_cpu.cpp",
    "csrc/ops/module.cpp",
]
CUDA_SOURCES: list[str] = []

OLDEST_TORCH = (2, 10)  # the stable ABI we build for: docs/decisions/0001-stable-abi.md
TORCH_TARGET_VERSION = f"0x{OLDEST_TORCH[0]:02x}{OLDEST_TORCH[1]:02x}000000000000"


def fail(message: str) -> None:
    raise SystemExit(f"deltanet_ext: {message}")


def torch_release() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def flag(name: str) -> bool:
    """True for NAME=1, False for NAME=0 or unset; anything else is an error."""
    value = os.environ.get(name, "") or "0"
    if value not in ("0", "1"):
        fail(f"{name}={value} is not known; supported: 0, 1")
    return value == "1"


def nvcc_release() -> tuple[str, int] | None:
    """Version text and major version of the nvcc of CUDA_HOME, or else of PATH."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = shutil.which("nvcc", path=os.path.join(home, "bin") if home else None)
    if nvcc is None:
        return None
    said = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    found = re.search(r"release (\d+)\.(\d+)", said)
    return (f"{found[1]}.{found[2]}", int(found[1])) if found else None


def decide_cuda() -> tuple[bool, str]:
    """Whether the CUDA kernels are built, and why."""
    wish = os.environ.get("DELTANET_CUDA") or ("on" if flag("FORCE_CUDA") else "auto")
    if wish not in ("auto", "on", "off"):
        fail(f"DELTANET_CUDA={wish} is not known; supported: auto, on, off")
    if wish == "off":
        return False, "DELTANET_CUDA=off"

    missing = None
    if not CUDA_SOURCES:
        missing = "this version of deltanet_ext has no CUDA kernels yet"
    elif torch.version.cuda is None:
        missing = f"torch {torch.__version__} is not a CUDA build"
    else:
        nvcc = nvcc_release()
        if nvcc is None:
            missing = "no nvcc found in CUDA_HOME or PATH"
        elif nvcc[1] != int(torch.version.cuda.split(".")[0]):
            missing = f"nvcc {nvcc[0]} and torch's CUDA {torch.version.cuda} differ in major"
    if missing is None:
        return True, f"torch's CUDA {torch.version.cuda}"
    if wish == "on":
        fail(f"DELTANET_CUDA=on cannot be met: {missing}")
    return False, missing


if (
    int(setuptools.__version__.split(".")[0]) < 77
):  # older ones do not know pyproject's licence field
    fail(
        f"setuptools {setuptools.__version__} is too old; supported: 77 and newer "
        '(pip install --upgrade "setuptools>=77")'
    )
if torch_release() < OLDEST_TORCH:
    fail(f"torch {torch.__version__} is too old; supported: 2.10 and newer")

WITH_CUDA, CUDA_REASON = decide_cuda()
DEBUG = flag("DEBUG")
WERROR = flag("DELTANET_WERROR")
STANDARD = "c++20" if torch_release() >= (2, 14) else "c++17"  # what torch's own headers ask for


def extension() -> cpp_extension.CppExtension:
    made = cpp_extension.CppExtension(
        name="deltanet_ext._C",
        sources=CPU_SOURCES + OPS_SOURCES,
        define_macros=[
            ("TORCH_TARGET_VERSION", TORCH_TARGET_VERSION),
            ("DELTANET_TORCH_VERSION", f'"{torch.__version__}"'),
            ("DELTANET_CUDA_REASON", f'"{CUDA_REASON}"'),
        ],
    )
    made.include_dirs = [str(ROOT / "csrc")]  # the others: BuildExtension.system_headers
    made.extra_compile_args = [
        f"-std={STANDARD}",
        "-fvisibility=hidden",
        *(["-O0", "-g", "-UNDEBUG"] if DEBUG else ["-O3"]),
        "-Wall",
        "-Wextra",
        *(["-Werror"] if WERROR else []),
    ]
    # The stable ABI lives in torch_cpu; we call nothing of torch_python or c10.
    made.libraries = ["torch", "torch_cpu"]
    return made


class BuildExtension(cpp_extension.BuildExtension):
    def finalize_options(self) -> None:
        # setuptools gives an editable install a fresh temporary folder each time, and so recompiles
        # everything; ours stays, and ninja sees what is up to date.
        if getattr(self, "editable_mode", False) or self.inplace:
            self.build_temp = os.path.join("build", "extension")
        super().finalize_options()

    def build_extensions(self) -> None:
        for made in self.extensions:
            made.define_macros.append(("DELTANET_VERSION", f'"{self.distribution.get_version()}"'))
            for folder in self.system_headers():
                made.extra_compile_args += ["-isystem", folder]
        self.say_what_is_built()
        super().build_extensions()

    def system_headers(self) -> list[str]:
        """Folders with the headers of pybind11 and torch. As system headers they give no warnings.

        pybind11's own comes first, because torch carries a copy of another version. The compiler
        sees links in the build folder, whose paths stay the same: pip makes a new environment for
        each build, and still nothing is compiled twice; ccache finds them in every checkout.
        """
        folders = [pybind11.get_include(), *cpp_extension.include_paths()]
        links = []
        for number, folder in enumerate(folders):
            link = Path(self.build_temp).absolute() / f"headers-{number}"
            link.parent.mkdir(parents=True, exist_ok=True)
            if link.is_symlink():
                link.unlink()
            link.symlink_to(Path(folder).absolute(), target_is_directory=True)
            links.append(str(link))
        return links

    def say_what_is_built(self) -> None:
        compiler, version = self._check_abi()
        oldest = ".".join(map(str, OLDEST_TORCH))
        rows = {
            "torch": f"{torch.__version__}; the library runs on {oldest} and newer",
            "compiler": f"{compiler} {version}, -std={STANDARD}, "
            + ("debug" if DEBUG else "release")
            + (", warnings are errors" if WERROR else "")
            + (", ccache" if shutil.which("ccache") else ""),
            "CPU kernels": (
                "scalar, AVX2, AVX-512 (chosen at run time)"
                if platform.machine() in ("x86_64", "AMD64")
                else "scalar"
            ),
            "CUDA kernels": "built: " + CUDA_REASON if WITH_CUDA else "not built: " + CUDA_REASON,
        }
        print(f"deltanet_ext {self.distribution.get_version()}")
        for name, what in rows.items():
            print(f"  {name:<13} {what}")
        sys.stdout.flush()


if shutil.which("ccache"):
    # Two checkouts of the same sources share their cache entries.
    os.environ.setdefault("CCACHE_BASEDIR", str(ROOT))
    os.environ.setdefault("CCACHE_NOHASHDIR", "1")

setuptools.setup(ext_modules=[extension()], cmdclass={"build_ext": BuildExtension})
