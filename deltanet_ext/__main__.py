# SPDX-License-Identifier: Apache-2.0
"""`python -m deltanet_ext`: the demo, and facts for a bug report."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import sys

import torch

import deltanet_ext
from deltanet_ext import demo


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _cuda_kernels() -> str:
    """Which GPUs the CUDA kernels would run on, or why there are none."""
    build = deltanet_ext.build_info()
    if not build["cuda"]:
        return str(build["cuda_reason"])
    gpus = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
    return (
        f"{deltanet_ext.get_cuda_precision()}, "
        f"{'batch invariant' if deltanet_ext.is_batch_invariant() else 'not batch invariant'}; "
        f"GPUs: {', '.join(gpus) or 'none is visible'}"
    )


def info() -> int:
    """Prints what a bug report needs: versions, how the library was built, what would run."""
    facts: dict[str, object] = {
        "deltanet_ext": deltanet_ext.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": _version_of("transformers"),
        "machine": f"{platform.machine()}, {platform.system()} {platform.release()}",
        "threads": f"{torch.get_num_threads()} of {os.cpu_count()} cores",
    }
    try:
        facts |= {
            "cpu kernels": f"{deltanet_ext.cpu_isa()} (this machine runs: "
            f"{', '.join(deltanet_ext.available_cpu_isas())})",
            "cuda kernels": _cuda_kernels(),
            **{f"build: {name}": fact for name, fact in deltanet_ext.build_info().items()},
        }
    except ImportError as error:
        facts["library"] = str(error)
    width = max(map(len, facts))
    for name, fact in facts.items():
        print(f"{name:{width}}  {fact}")
    return 2 if "library" in facts else 0


def parser() -> argparse.ArgumentParser:
    defaults = demo.Options()
    top = argparse.ArgumentParser(prog="python -m deltanet_ext", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True)

    show = commands.add_parser(
        "demo",
        help="run a Gated DeltaNet model with and without this package and compare",
        description=demo.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    show.add_argument("--model", choices=demo.MODELS, action="append", help="default: both")
    show.add_argument("--dtype", choices=tuple(demo.DTYPES), action="append", help="default: both")
    for name, text in (
        ("tokens", "bytes of text to read"),
        ("steps", "tokens to generate"),
        ("hidden", "width of the model"),
        ("key-heads", "key heads of the rule; there are twice as many value heads"),
        ("repeats", "timed runs in fp32; the fastest one counts"),
        ("seed", "of the weights"),
    ):
        default = getattr(defaults, name.replace("-", "_"))
        show.add_argument(f"--{name}", type=int, default=default, help=f"{text} ({default})")
    show.add_argument("--threads", type=int, help="default: one per idle core")
    show.add_argument("--json", metavar="PATH", help="write the figures there as well")

    commands.add_parser("info", help="versions, build and kernels, for a bug report")
    return top


def main(arguments: list[str] | None = None) -> int:
    given = parser().parse_args(arguments)
    if given.command == "info":
        return info()
    options = demo.Options(
        models=tuple(given.model or demo.MODELS),
        dtypes=tuple(given.dtype or demo.DTYPES),
        tokens=given.tokens,
        steps=given.steps,
        hidden=given.hidden,
        key_heads=given.key_heads,
        repeats=given.repeats,
        threads=given.threads,
        seed=given.seed,
    )
    return demo.main(options, given.json)


if __name__ == "__main__":
    sys.exit(main())
