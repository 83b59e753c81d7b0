# SPDX-License-Identifier: Apache-2.0
"""Builds deltanet_ext._C, and _C_cuda with the CUDA kernels, through torch.utils.cpp_extension.

Environment:
    DELTANET_CUDA=auto|on|off   CUDA kernels. auto: when torch is a CUDA build and an nvcc of the
                                same major version is found. Whether a GPU is visible never matters.
                                FORCE_CUDA=1 means on.
    TORCH_CUDA_ARCH_LIST=9.0    compute capabilities to compile for ("8.0 9.0+PTX"). Default: those
                                of the installed torch, and PTX of the newest for what comes later.
    CUDA_HOME=/usr/local/cuda   the CUDA toolkit. Default: the one whose nvcc is in PATH.
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
from dataclasses import dataclass
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
    "csrc/cpu/causal_conv1d.cpp",
    "csrc/cpu/forward.cpp",
    "csrc/cpu/gated_rms_norm.cpp",
    "csrc/cpu/isa_scalar.cpp",
]
VECTOR_SOURCES = {
    "x86_64": ["csrc/cpu/isa_avx2.cpp", "csrc/cpu/isa_avx512.cpp", "csrc/cpu/isa_avx512_bf16.cpp"],
    "aarch64": ["csrc/cpu/isa_neon.cpp"],
}
MACHINE = {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())
CPU_SOURCES += VECTOR_SOURCES.get(MACHINE, [])
OPS_SOURCES = [
    "csrc/ops/schema.cpp",
    "csrc/ops/allocate.cpp",
    "csrc/ops/causal_conv1d_cpu.cpp",
    "csrc/ops/gated_delta_rule_cpu.cpp",
    "csrc/ops/gated_rms_norm_cpu.cpp",
    "csrc/ops/triangular_inverse_cpu.cpp",
    "csrc/ops/module.cpp",
]
CUDA_SOURCES = [
    "csrc/cuda/backward.cu",
    "csrc/cuda/causal_conv1d.cu",
    "csrc/cuda/causal_conv1d_backward.cu",
    "csrc/cuda/chunk_table.cu",
    "csrc/cuda/forward.cu",
    "csrc/cuda/gated_rms_norm.cu",
    "csrc/cuda/gated_rms_norm_backward.cu",
    "csrc/cuda/recurrent_forward.cu",
    "csrc/cuda/simt_adjoint.cu",
    "csrc/cuda/simt_forward.cu",
    "csrc/cuda/simt_gradients.cu",
    "csrc/cuda/simt_walk.cu",
    "csrc/cuda/tensor_core.cu",
    "csrc/cuda/tensor_core/prepare_bf16.cu",
    "csrc/cuda/tensor_core/prepare_fp16.cu",
    "csrc/cuda/tensor_core/scan_output_bf16_128.cu",
    "csrc/cuda/tensor_core/scan_output_bf16_64.cu",
    "csrc/cuda/tensor_core/scan_output_fp16_128.cu",
    "csrc/cuda/tensor_core/scan_output_fp16_64.cu",
    "csrc/cuda/tensor_core/scan_roles_bf16_128.cu",
    "csrc/cuda/tensor_core/scan_roles_fp16_128.cu",
    "csrc/cuda/tensor_core/segments.cu",
    "csrc/cuda/triangular_inverse.cu",
    "csrc/ops/causal_conv1d_cuda.cpp",
    "csrc/ops/gated_delta_rule_backward_cuda.cpp",
    "csrc/ops/gated_delta_rule_cuda.cpp",
    "csrc/ops/gated_rms_norm_cuda.cpp",
    "csrc/ops/triangular_inverse_cuda.cpp",
    "csrc/ops/module_cuda.cpp",
]

OLDEST_TORCH = (2, 10)  # the stable ABI we build for: docs/decisions/0001-stable-abi.md
TORCH_TARGET_VERSION = f"0x{OLDEST_TORCH[0]:02x}{OLDEST_TORCH[1]:02x}000000000000"
OLDEST_ARCHITECTURE = (7, 5, "")


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


@dataclass(frozen=True)
class Toolkit:
    """A CUDA toolkit: its own root, which holds include/ and lib64/, and its release."""

    root: Path
    release: str  # 13.0
    version: str  # 13.0.88
    architectures: frozenset[str]  # 75, 80, 90a: what nvcc can compile for

    @property
    def nvcc(self) -> Path:
        return self.root / "bin" / "nvcc"

    @property
    def major(self) -> int:
        return int(self.release.split(".")[0])


def find_toolkit() -> Toolkit | None:
    """That of CUDA_HOME, or else of the nvcc in PATH, or else in /usr/local/cuda."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = shutil.which("nvcc", path=os.path.join(home, "bin") if home else None)
    if nvcc is None and not home:
        nvcc = shutil.which("nvcc", path="/usr/local/cuda/bin")
    if nvcc is None:
        return None

    def ask(*arguments: str) -> str:
        ran = subprocess.run([nvcc, *arguments], capture_output=True, text=True)
        return ran.stdout + ran.stderr

    release = re.search(r"release (\d+\.\d+), V([\d.]+)", ask("--version"))
    if release is None:
        return None
    # An nvcc in PATH may be a script that calls another one: only nvcc itself knows where it lies.
    # Beside a script torch would look for the headers and libraries in vain.
    top = re.search(r"^#\$ TOP=(.*)$", ask("-dryrun", "-c", "any.cu"), re.M)
    root = Path(top[1].strip()) if top else Path(nvcc).resolve().parent.parent
    listed = re.findall(r"compute_(\d+[a-z]?)", ask("--list-gpu-arch"))
    return Toolkit(root.resolve(), release[1], release[2], frozenset(listed))


def capability(architecture: str) -> tuple[int, int, str]:
    """90a: (9, 0, "a")."""
    major, minor, variant = re.fullmatch(r"(\d+)(\d)([a-z]?)", architecture).groups()
    return int(major), int(minor), variant


def architectures_of_torch(toolkit: Toolkit) -> str:
    """What this torch was built for and nvcc knows, as TORCH_CUDA_ARCH_LIST.

    Torch itself would ask the visible GPUs, and build machines have none.
    """
    flags = torch._C._cuda_getArchFlags() or ""
    known = set(re.findall(r"sm_(\d+[a-z]?)", flags)) & toolkit.architectures
    ours = sorted(capability(a) for a in known if capability(a) >= OLDEST_ARCHITECTURE)
    if not ours:
        fail(
            f"torch was built for {flags or 'no architecture'} and nvcc {toolkit.version} compiles "
            "for none of these; TORCH_CUDA_ARCH_LIST says what to build"
        )
    return " ".join(f"{major}.{minor}{variant}" for major, minor, variant in ours) + "+PTX"


def architectures(toolkit: Toolkit) -> str:
    """The compute capabilities to build for, as torch reads them."""
    wish = os.environ.get("TORCH_CUDA_ARCH_LIST", "").replace(";", " ").split()
    if not wish:
        return architectures_of_torch(toolkit)
    if wish == ["native"] and torch.cuda.device_count() == 0:
        fail("TORCH_CUDA_ARCH_LIST=native and no GPU is visible; name compute capabilities: 9.0")
    return " ".join(wish)


def decide_cuda() -> tuple[Toolkit | None, str]:
    """The toolkit to build the CUDA kernels with, or None, and why."""
    wish = os.environ.get("DELTANET_CUDA") or ("on" if flag("FORCE_CUDA") else "auto")
    if wish not in ("auto", "on", "off"):
        fail(f"DELTANET_CUDA={wish} is not known; supported: auto, on, off")
    if wish == "off":
        return None, "DELTANET_CUDA=off"

    if torch.version.cuda is None:
        missing = f"torch {torch.__version__} is not a CUDA build"
    elif (toolkit := find_toolkit()) is None:
        missing = "no nvcc found in CUDA_HOME or PATH"
    elif toolkit.major != int(torch.version.cuda.split(".")[0]):
        missing = f"nvcc {toolkit.release} and torch's CUDA {torch.version.cuda} differ in major"
    else:
        return toolkit, f"nvcc {toolkit.version} for torch's CUDA {torch.version.cuda}"
    if wish == "on":
        fail(f"DELTANET_CUDA=on cannot be met: {missing}")
    return None, missing


if (
    int(setuptools.__version__.split(".")[0]) < 77
):  # older ones do not know pyproject's licence field
    fail(
        f"setuptools {setuptools.__version__} is too old; supported: 77 and newer "
        '(pip install --upgrade "setuptools>=77")'
    )
if torch_release() < OLDEST_TORCH:
    fail(f"torch {torch.__version__} is too old; supported: 2.10 and newer")

TOOLKIT, CUDA_REASON = decide_cuda()
DEBUG = flag("DEBUG")
WERROR = flag("DELTANET_WERROR")
STANDARD = "c++20" if torch_release() >= (2, 14) else "c++17"  # what torch's own headers ask for


def macros(**values: str) -> list[tuple[str, str]]:
    return [
        ("TORCH_TARGET_VERSION", TORCH_TARGET_VERSION),
        *((f"DELTANET_{name}", f'"{value}"') for name, value in values.items()),
    ]


def cxx_flags() -> list[str]:
    return [
        f"-std={STANDARD}",
        "-fvisibility=hidden",
        *(["-O0", "-g", "-UNDEBUG"] if DEBUG else ["-O3"]),
        # Python's own flags hold -fwrapv, with which each `row * stride + i` of int is computed
        # and sign-extended apart: as many instructions again as the products have.
        "-fstrict-overflow",
        "-Wall",
        "-Wextra",
        *(["-Werror"] if WERROR else []),
    ]


def extension() -> cpp_extension.CppExtension:
    made = cpp_extension.CppExtension(
        name="deltanet_ext._C",
        sources=CPU_SOURCES + OPS_SOURCES,
        define_macros=[
            *macros(TORCH_VERSION=torch.__version__, CUDA_REASON=CUDA_REASON),
            ("DELTANET_CUDA_BUILT", "1" if TOOLKIT else "0"),
        ],
    )
    made.include_dirs = [str(ROOT / "csrc")]  # the others: BuildExtension.system_headers
    made.extra_compile_args = {"cxx": cxx_flags()}
    # The stable ABI lives in torch_cpu; we call nothing of torch_python or c10.
    made.libraries = ["torch", "torch_cpu"]
    return made


def cuda_extension(toolkit: Toolkit) -> cpp_extension.CUDAExtension:
    cpp_extension.CUDA_HOME = str(toolkit.root)  # what torch found may be a script's folder
    os.environ["TORCH_CUDA_ARCH_LIST"] = architectures(toolkit)
    if shutil.which("ccache"):
        os.environ.setdefault("PYTORCH_NVCC", f"ccache {toolkit.nvcc}")
    made = cpp_extension.CUDAExtension(name="deltanet_ext._C_cuda", sources=CUDA_SOURCES)
    made.include_dirs = [str(ROOT / "csrc")]
    # As flags of the C++ files: the kernels know nothing of torch, versions or names of ours, and
    # need not be compiled again when one of these changes.
    facts = macros(
        TORCH_VERSION=torch.__version__,
        NVCC_VERSION=toolkit.version,
        CUDA_ARCHITECTURES=os.environ["TORCH_CUDA_ARCH_LIST"],
    )
    made.extra_compile_args = {
        "cxx": [
            *cxx_flags(),
            "-DUSE_CUDA",  # the CUDA functions of the stable ABI
            *(f"-D{name}={value}" for name, value in facts),
            *("-isystem", str(toolkit.root / "include")),
        ],
        "nvcc": [
            "-std=c++17",  # the kernels include nothing of torch
            *(["-O0", "-g", "-UNDEBUG"] if DEBUG else ["-O3"]),
            "-lineinfo",  # profilers and compute-sanitizer name source lines; costs no speed
            "--extended-lambda",
            "-Xcompiler=-fvisibility=hidden,-Wall",
            # torch switches these conversions off for files that include its own types
            "-U__CUDA_NO_HALF_OPERATORS__",
            "-U__CUDA_NO_HALF_CONVERSIONS__",
            "-U__CUDA_NO_BFLOAT16_CONVERSIONS__",
            "-U__CUDA_NO_HALF2_OPERATORS__",
        ],
    }
    made.libraries = ["torch", "torch_cpu", "torch_cuda", "cudart"]
    return made


class BuildExtension(cpp_extension.BuildExtension):
    def finalize_options(self) -> None:
        # setuptools gives an editable install a fresh temporary folder each time, and so recompiles
        # everything; ours stays, and ninja sees what is up to date.
        if getattr(self, "editable_mode", False) or self.inplace:
            self.build_temp = os.path.join("build", "extension")
        super().finalize_options()

    def build_extensions(self) -> None:
        version = f'-DDELTANET_VERSION="{self.distribution.get_version()}"'
        headers = self.system_headers()
        for made in self.extensions:
            flags = made.extra_compile_args["cxx"]
            flags.append(version)
            for folder in headers:
                flags += ["-isystem", folder]
        self.say_what_is_built()
        super().build_extensions()

    def build_extension(self, made: setuptools.Extension) -> None:
        # Each extension has a build.ninja of its own.
        build_temp = self.build_temp
        if made.name.endswith("_cuda"):
            self.build_temp = os.path.join(build_temp, "cuda")
        super().build_extension(made)
        self.build_temp = build_temp

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
            "CPU kernels": ", ".join(
                Path(source).stem.removeprefix("isa_") for source in CPU_SOURCES if "isa_" in source
            )
            + " (the best one is chosen at run time)",
            "CUDA kernels": (
                f"{CUDA_REASON}; compute capabilities {os.environ['TORCH_CUDA_ARCH_LIST']}"
                if TOOLKIT
                else f"not built: {CUDA_REASON}"
            ),
        }
        print(f"deltanet_ext {self.distribution.get_version()}")
        for name, what in rows.items():
            print(f"  {name:<13} {what}")
        sys.stdout.flush()


if shutil.which("ccache"):
    # Two checkouts of the same sources share their cache entries.
    os.environ.setdefault("CCACHE_BASEDIR", str(ROOT))
    os.environ.setdefault("CCACHE_NOHASHDIR", "1")

setuptools.setup(
    ext_modules=[extension(), *([cuda_extension(TOOLKIT)] if TOOLKIT else [])],
    cmdclass={"build_ext": BuildExtension},
)
