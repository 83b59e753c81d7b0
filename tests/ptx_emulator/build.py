#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Build the emulator and the programs that run on it. Nothing that has not changed is built again.

    build.py                    the runtime library and every program of programs/
    build.py NAME...            the runtime library and these programs; prefill is that of
                                examples/cpp
    build.py --library          the runtime library alone; prints its path
    build.py --operators        the library of emulated torch operators
    build.py --all              the runtime library, every program and the operators, side by side
    build.py --translate in.ptx out.so [--count]   (the runtime calls this when it meets new PTX)

Everything lies in one folder (PTX_EMULATOR_BUILD, by default build/ptx_emulator of the repository),
stamped with what it was made from: sources, headers, compilers and flags. The PTX is translated
here too, so that running starts at once.
"""

import argparse
import concurrent.futures
import contextlib
import fcntl
import functools
import gc
import hashlib
import os
import pathlib
import re
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RUNTIME = HERE / "runtime"
PROGRAMS = HERE / "programs"
BUILD = pathlib.Path(os.environ.get("PTX_EMULATOR_BUILD", ROOT / "build" / "ptx_emulator"))
CXX = os.environ.get("CXX", "g++")
SONAME = "libptx_emulator.so"
RUNTIME_SOURCES = (
    "barriers.cpp",
    "clocks.cpp",
    "counters.cpp",
    "cudart.cpp",
    "memory.cpp",
    "modules.cpp",
    "report.cpp",
    "rounding.cpp",
    "scheduler.cpp",
    "settings.cpp",
    "warp.cpp",
)
RUNTIME_FLAGS = (
    "-std=c++17",
    "-O2",
    "-march=native",
    "-ffp-contract=off",
    "-fPIC",
    "-Wall",
    "-Wextra",
)
# FMA in hardware: std::fma is a slow call without it. No contraction: PTX says where it fuses.
# -Og compiles in half the time of -O1, and the result is no slower: nvcc has optimized already.
# For the same reason registers need not be allocated loop by loop, nor expressions put together.
TRANSLATED_FLAGS = (
    "-std=c++17",
    "-Og",
    "-fira-region=one",
    "-fno-tree-ter",
    "-march=native",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fPIC",
    "-shared",
    "-w",
)
JOBS = int(os.environ.get("MAX_JOBS", "0")) or os.cpu_count() or 1


def find_nvcc() -> str | None:
    """nvcc by DELTANET_NVCC, CUDA_HOME or the path; None where there is none."""
    home = os.environ.get("CUDA_HOME")
    for candidate in (
        os.environ.get("DELTANET_NVCC"),
        home and f"{home}/bin/nvcc",
        shutil.which("nvcc"),
    ):
        if candidate and os.access(candidate, os.X_OK):
            return candidate
    default = "/usr/local/cuda/bin/nvcc"
    return default if os.access(default, os.X_OK) else None


def why_not() -> str | None:
    """Why the emulator cannot be used on this machine; None where it can."""
    import platform

    if platform.machine() != "x86_64" or sys.platform != "linux":
        return f"the emulator runs on Linux x86-64, this is {sys.platform} {platform.machine()}"
    if not find_nvcc():
        return "nvcc was not found (CUDA_HOME, DELTANET_NVCC or PATH)"
    if not shutil.which(CXX):
        return f"the C++ compiler {CXX} was not found"
    return None


@functools.cache
def cuda_root() -> pathlib.Path:
    """The toolkit's own root, which a wrapper script named nvcc does not show."""
    run = subprocess.run(
        [find_nvcc(), "-dryrun", "-c", "x.cu"], capture_output=True, text=True, check=False
    )
    for line in run.stderr.splitlines():
        if line.startswith("#$ TOP="):
            return pathlib.Path(line.removeprefix("#$ TOP=").strip()).resolve()
    return pathlib.Path(find_nvcc()).resolve().parents[1]


def digest(*parts) -> str:
    h = hashlib.sha256()
    for part in parts:
        data = part.read_bytes() if isinstance(part, pathlib.Path) else str(part).encode()
        h.update(len(data).to_bytes(8, "little") + data)
    return h.hexdigest()[:20]


@functools.cache
def compiler_version(command: str) -> str:
    """And what it compiles for: -march=native is another target on another machine."""
    done = subprocess.run([command, "--version"], capture_output=True, text=True, check=False)
    info = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    return done.stdout + next((line for line in info if line.startswith("flags")), "")


def run(command: list, **options) -> None:
    done = subprocess.run(
        [str(c) for c in command], capture_output=True, text=True, check=False, **options
    )
    if done.returncode:
        raise SystemExit(f"{shlex.join(map(str, command))}\n{done.stdout}{done.stderr}")


@contextlib.contextmanager
def only_one(target: pathlib.Path):
    """Threads and processes that need the same target: one makes it, the others wait."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.with_name(target.name + ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def make(target: pathlib.Path, command, *, stamp: str) -> pathlib.Path:
    """Run ``command(temporary file)`` unless the target with this stamp is there.

    A target is complete, or not there.
    """
    mark = target.with_name(target.name + ".stamp")
    with only_one(target):
        if target.exists() and mark.exists() and mark.read_text() == stamp:
            return target
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            fresh = pathlib.Path(folder) / target.name
            command(fresh)
            os.replace(fresh, target)
        mark.write_text(stamp)
    return target


# ---- the runtime library ----


@functools.cache
def toolchain() -> str:
    """What decides a translation besides its PTX."""
    sources = [
        *sorted((HERE / "translator").glob("*.py")),
        RUNTIME / "device.h",
        RUNTIME / "numbers.h",
    ]
    return digest(*sources, compiler_version(CXX), " ".join(TRANSLATED_FLAGS))


@functools.cache
def library() -> pathlib.Path:
    headers = digest(*sorted(RUNTIME.glob("*.h")), compiler_version(CXX))
    defines = (
        f'-DPTX_EMULATOR_SOURCE="{HERE}"',
        f'-DPTX_EMULATOR_TOOLCHAIN="{toolchain()}"',
    )

    def compile_one(name: str) -> pathlib.Path:
        source = RUNTIME / name
        flags = [*RUNTIME_FLAGS, f"-I{cuda_root() / 'include'}"]
        flags += ["-frounding-math"] if name == "rounding.cpp" else []
        flags += defines if name == "settings.cpp" else []
        stamp = digest(source, headers, " ".join(flags))
        return make(
            BUILD / "runtime" / f"{source.stem}.o",
            lambda out: run([CXX, *flags, "-c", source, "-o", out]),
            stamp=stamp,
        )

    objects = in_parallel(compile_one, RUNTIME_SOURCES)
    exports = RUNTIME / "exports.map"
    stamp = digest(exports, *objects)
    link = [
        CXX,
        "-shared",
        f"-Wl,-soname,{SONAME}",
        f"-Wl,--version-script={exports}",
        "-Wl,-z,defs",
    ]
    return make(
        BUILD / SONAME,
        lambda out: run([*link, *objects, "-o", out, "-ldl", "-lpthread"]),
        stamp=stamp,
    )


def in_parallel(function, items) -> list:
    with concurrent.futures.ThreadPoolExecutor(JOBS) as pool:
        return list(pool.map(function, items))


# ---- translation ----


def translate_file(ptx: pathlib.Path, target: pathlib.Path, count: bool) -> None:
    sys.path.insert(0, str(HERE))
    from translator import parse, translate

    gc.disable()  # a short life, full of objects that stay: looking for garbage takes a fifth of it
    lib = BUILD / SONAME
    if not lib.exists():
        library()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        cpp, so = pathlib.Path(folder) / "module.cpp", pathlib.Path(folder) / "module.so"
        cpp.write_text(translate(parse(ptx.read_text()), count=count))
        run([CXX, *TRANSLATED_FLAGS, f"-I{RUNTIME}", cpp, lib, "-o", so])
        os.replace(so, target)


def fnv(*parts: bytes) -> int:
    h = 1469598103934665603
    for part in parts:
        for byte in part:
            h = ((h ^ byte) * 1099511628211) & 0xFFFFFFFFFFFFFFFF
    return h


def ptx_of(binary: pathlib.Path) -> list[bytes]:
    """The PTX texts that runtime/modules.cpp would choose from the fat binaries of an object."""
    with tempfile.NamedTemporaryFile() as section:
        done = subprocess.run(
            ["objcopy", "-O", "binary", "--only-section=.nv_fatbin", str(binary), section.name],
            capture_output=True,
            check=False,
        )
        data = pathlib.Path(section.name).read_bytes() if done.returncode == 0 else b""
    found, at = [], 0
    while (at := data.find(b"\x50\xed\x55\xba", at)) >= 0:
        header, size = struct.unpack_from("<HQ", data, at + 6)
        entry, end = at + header, at + header + size
        best: dict[int, list[bytes]] = {}
        while entry < end:
            kind, entry_header, length = struct.unpack_from("<HxxIQ", data, entry)
            if kind == 1:
                text = data[entry + entry_header : entry + entry_header + length].split(b"\0", 1)[0]
                target = text.find(b".target sm_") + 11
                arch = int(
                    "".join(chr(c) for c in text[target : target + 4] if chr(c).isdigit()) or 0
                )
                best.setdefault(arch, []).append(text)
            entry += entry_header + length
        if best:
            found += best[max(best)]
        at = max(end, at + 4)
    return found


def pretranslate(binary: pathlib.Path, *, count: bool = False) -> None:
    lib = library()
    for text in ptx_of(binary):
        target = (
            lib.parent
            / "translated"
            / f"{fnv(text, toolchain().encode(), b'count' if count else b''):016x}.so"
        )
        with only_one(target):
            if target.exists():
                continue
            with tempfile.NamedTemporaryFile(suffix=".ptx", dir=lib.parent) as ptx:
                pathlib.Path(ptx.name).write_bytes(text)
                command = [sys.executable, __file__, "--translate", ptx.name, target]
                run(command + (["--count"] if count else []))


# ---- programs ----


def nvcc_flags(arch: str = "80") -> list[str]:
    root = cuda_root()
    return [
        f"-gencode=arch=compute_{arch},code=compute_{arch}",
        "--no-compress",
        "-cudart=none",
        "-std=c++17",
        "-lineinfo",
        "--extended-lambda",
        "--expt-relaxed-constexpr",
        # Device code is optimized all the same; -O3 would be for the host alone, which has little
        # to do and much to compile.
        "-Xcompiler=-fPIC,-O0",
        "-diag-suppress=177",
        f"-I{ROOT / 'csrc'}",
        f"-I{PROGRAMS}",
        f"-I{root / 'include' / 'cccl'}",
    ]


def compile_cuda(
    source: pathlib.Path, target: pathlib.Path, *, arch: str = "80", extra: tuple = ()
) -> pathlib.Path:
    """One .cu to an object whose device code is plain PTX. Depends on the headers it read."""
    flags = [*nvcc_flags(arch), *extra]
    depends = target.with_suffix(".d")
    base = digest(" ".join(map(str, flags)), compiler_version(find_nvcc()))

    def sources() -> set[pathlib.Path]:
        """The source and the headers it read when it was last compiled, those of ours."""
        read = depends.read_text().split("\n") if depends.exists() else []
        return {
            path
            for path in [source, *map(pathlib.Path, read)]
            if path.exists() and not path.is_relative_to(cuda_root()) and path.parts[1] != "usr"
        }

    def stamp() -> str:
        return digest(base, *sorted(sources()))

    mark = target.with_name(target.name + ".stamp")
    with only_one(target):
        if target.exists() and mark.exists() and mark.read_text() == stamp():
            return target
        started = time.time()
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            fresh, listing = pathlib.Path(folder) / target.name, pathlib.Path(folder) / "headers.d"
            run([find_nvcc(), *flags, "-MD", "-MF", listing, "-c", source, "-o", fresh])
            words = listing.read_text().replace("\\\n", " ").split()[1:]
            depends.write_text("\n".join(w for w in words if w != ":" and not w.endswith(":")))
            os.replace(fresh, target)
        # A file saved meanwhile may not be the one that was compiled: no stamp, and the next call
        # compiles again.
        mark.unlink(missing_ok=True)
        if all(path.stat().st_mtime < started for path in sources()):
            mark.write_text(stamp())
    return target


def link(
    target: pathlib.Path, objects: list, *, shared: bool = False, extra: tuple = ()
) -> pathlib.Path:
    lib = library()
    kind = ["-shared", "-Wl,-Bsymbolic"] if shared else []
    command = [CXX, *kind, *objects, *extra, lib, f"-Wl,-rpath,{lib.parent}"]
    stamp = digest(*[pathlib.Path(o) for o in objects], lib.name, " ".join(map(str, command)))
    return make(target, lambda out: run([*command, "-o", out]), stamp=stamp)


# Programs that call kernels of csrc/cuda which the operators need, too.
PROGRAM_KERNELS = {
    "rule_forward": ("recurrent_forward", "scans"),
    "tensor_core": ("paths", "prepare", "scan_output_bf16", "scan_output_fp16", "scans"),
}


def program(
    name: str, *, defines: tuple = (), variant: str = "", arch: str = "80", count: bool = False
) -> pathlib.Path:
    """Build programs/NAME.cu, or a variant of it with macros of its own, ready to run."""
    source = PROGRAMS / f"{name}.cu"
    label = f"{name}-{variant}" if variant else name
    label += "" if arch == "80" else f"-sm{arch}"
    obj = compile_cuda(
        source, BUILD / "programs" / f"{label}.o", arch=arch, extra=tuple(f"-D{d}" for d in defines)
    )
    binary = link(BUILD / "programs" / label, [obj, *map(kernels, PROGRAM_KERNELS.get(name, ()))])
    pretranslate(obj, count=count)
    return binary


# ---- the kernels of csrc/cuda ----

# What is compiled as one file (the name of the unit, and which sources). Before nvcc comes to a
# kernel it reads headers for four seconds, for eight where CUB is among them: the kernels of the
# emulator's own operators go with such a unit.
TEST_KERNELS = ("gate_cumsum", "reads_too_far")
TOGETHER = (
    ("scans", "|".join(("chunk_table", "simt_forward", *TEST_KERNELS))),
    ("backward", "backward|simt_adjoint|simt_gradients"),
    ("causal_conv1d", "causal_conv1d.*"),
    ("gated_rms_norm", "gated_rms_norm.*"),
    ("paths", "forward|tensor_core|segments"),
    ("prepare", "prepare_.*"),
    ("scan_output_bf16", "scan_(output|roles)_bf16_.*"),
    ("scan_output_fp16", "scan_(output|roles)_fp16_.*"),
)


def kernel_units() -> dict[str, list[pathlib.Path]]:
    """Every .cu of csrc/cuda, by the unit it is compiled in. What takes longest comes first."""
    units: dict[str, list[pathlib.Path]] = {}
    tests = [HERE / "operators" / f"{name}.cu" for name in TEST_KERNELS]
    for source in [*sorted((ROOT / "csrc" / "cuda").rglob("*.cu")), *tests]:
        unit = next((u for u, stems in TOGETHER if re.fullmatch(stems, source.stem)), source.stem)
        units.setdefault(unit, []).append(source)
    return dict(sorted(units.items(), key=lambda unit: -len(unit[1])))


def kernels(unit: str) -> pathlib.Path:
    """The object of one unit, translated."""
    sources = kernel_units()[unit]
    text = "".join(f'#include "{source}"\n' for source in sources)
    folder = BUILD / "kernels"
    source = sources[0]
    if len(sources) > 1:
        source = make(folder / f"{unit}.cu", lambda out: out.write_text(text), stamp=digest(text))
    built = compile_cuda(source, folder / f"{unit}.o")
    pretranslate(built)
    return built


# ---- operators of csrc/ops, for torch ----

# Operator code, which includes torch; it grows with csrc.
OPERATOR_SOURCES = (
    "csrc/ops/causal_conv1d_cuda.cpp",
    "csrc/ops/gated_delta_rule_backward_cuda.cpp",
    "csrc/ops/gated_delta_rule_cuda.cpp",
    "csrc/ops/gated_rms_norm_cuda.cpp",
    "csrc/ops/schema.cpp",
    "csrc/ops/triangular_inverse_cuda.cpp",
    "tests/ptx_emulator/operators/backward_workspace.cpp",
    "tests/ptx_emulator/operators/gate_cumsum.cpp",
    "tests/ptx_emulator/operators/reads_too_far.cpp",
    "tests/ptx_emulator/operators/settings.cpp",
    "tests/ptx_emulator/operators/tensor_core.cpp",
)
EMULATED_NAMESPACE = "deltanet_ext_emulated"


def operators(besides: tuple = ()) -> pathlib.Path:
    """One library that registers the CUDA operators under a namespace of its own, for CPU tensors.

    The operator files are those of csrc/ops. Two things make them emulated: their namespace is
    renamed as they are compiled, and ops/cuda_context.h is the one of operators/, which stands
    first in the include path.

    `besides`: programs to build side by side with it.
    """
    import torch
    from torch.utils import cpp_extension

    standard = "c++20" if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14) else "c++17"
    includes = [f"-I{HERE / 'operators'}", f"-I{ROOT / 'csrc'}", f"-I{cuda_root() / 'include'}"]
    includes += [f"-isystem{path}" for path in cpp_extension.include_paths()]
    flags = [f"-std={standard}", "-O0", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"]
    flags += ["-DTORCH_TARGET_VERSION=0x020a000000000000", f"-Ddeltanet_ext={EMULATED_NAMESPACE}"]

    # torch's headers, which every operator file reads, are read once.
    headers = BUILD / "operators" / "torch.h"
    text = "".join(f"#include <torch/csrc/stable/{h}.h>\n" for h in ("library", "ops", "tensor"))
    make(headers, lambda out: out.write_text(text), stamp=digest(text))
    precompile = [CXX, *flags, *includes, "-x", "c++-header", headers]
    header_stamp = digest(
        " ".join(map(str, precompile)), text, torch.__version__, compiler_version(CXX)
    )
    flags += ["-Winvalid-pch", "-include", str(headers)]

    def compile_operator(name: str) -> pathlib.Path:
        make(
            headers.with_name("torch.h.gch"),
            lambda out: run([*precompile, "-o", out]),
            stamp=header_stamp,
        )
        source, target = ROOT / name, BUILD / "operators" / f"{pathlib.Path(name).stem}.o"
        own = sorted(
            [
                *(ROOT / "csrc").rglob("*.h"),
                *(ROOT / "csrc").rglob("*.cuh"),
                *HERE.glob("operators/**/*.h"),
            ]
        )
        stamp = digest(source, *own, " ".join(flags), torch.__version__, compiler_version(CXX))
        return make(
            target, lambda out: run([CXX, *flags, *includes, "-c", source, "-o", out]), stamp=stamp
        )

    library()
    # What takes long comes first, and kernels before the programs that wait for them. The first
    # operator makes torch's headers, which the others find by the time they start.
    first, *others = OPERATOR_SOURCES
    jobs = [
        (compile_operator, first),
        *((kernels, unit) for unit in kernel_units()),
        *((program, name) for name in besides),
        *((compile_operator, name) for name in others),
    ]
    built = in_parallel(lambda job: job[0](job[1]), jobs)
    objects = [made for (kind, _), made in zip(jobs, built, strict=True) if kind is not program]
    torch_lib = pathlib.Path(torch.__file__).parent / "lib"
    extra = (f"-L{torch_lib}", "-ltorch", "-ltorch_cpu", "-lc10")
    return link(
        BUILD / "operators" / f"lib{EMULATED_NAMESPACE}.so", objects, shared=True, extra=extra
    )


def example() -> pathlib.Path:
    """examples/cpp/prefill.cpp: the kernels in a program that g++ compiles."""
    source, target = ROOT / "examples" / "cpp" / "prefill.cpp", BUILD / "programs" / "prefill"
    flags = ["-std=c++17", "-O2", "-Wall", "-Wextra"]
    flags += [f"-I{ROOT / 'csrc'}", f"-I{cuda_root() / 'include'}"]
    headers = [p for end in ("h", "cuh") for p in sorted((ROOT / "csrc").rglob(f"*.{end}"))]
    main = make(
        target.with_suffix(".o"),
        lambda out: run([CXX, *flags, "-c", source, "-o", out]),
        stamp=digest(source, *headers, " ".join(flags), compiler_version(CXX)),
    )
    return link(target, [main, *map(kernels, kernel_units())])


# What takes longest to compile.
LONGEST = ("cub", "block_triangular_inverse", "ops_numbers", "findings", "ops_warp")
# Made for count mode; whoever counts builds it.
ONLY_COUNTED = ("forward_counts",)


def program_names() -> list[str]:
    """Every program that tests run; those that take longest to compile come first."""
    names = sorted(p.stem for p in PROGRAMS.glob("*.cu") if p.stem not in ONLY_COUNTED)
    return sorted(names, key=lambda name: name not in LONGEST)


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("names", nargs="*")
    arguments.add_argument("--library", action="store_true")
    arguments.add_argument(
        "--operators", action="store_true", help="the emulated operators too (needs torch)"
    )
    arguments.add_argument("--all", action="store_true", help="everything that tests run")
    arguments.add_argument("--translate", nargs=2, type=pathlib.Path, metavar=("PTX", "SO"))
    arguments.add_argument("--count", action="store_true")
    options = arguments.parse_args()
    if options.translate:
        translate_file(*options.translate, count=options.count)
        return
    if reason := why_not():
        if options.all:  # the tests are skipped for the same reason
            print(f"ptx_emulator: nothing is built. {reason}")
            return
        raise SystemExit(f"ptx_emulator: {reason}")
    print(library())
    if options.operators or options.all:
        print(operators(besides=tuple(program_names()) if options.all else ()))
    if not (options.library or options.operators or options.all):
        for binary in in_parallel(
            lambda n: example() if n == "prefill" else program(n, count=options.count),
            options.names or program_names(),
        ):
            print(binary)


if __name__ == "__main__":
    main()
