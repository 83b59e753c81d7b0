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
from deltanet_ext.demo import inference, models, training


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
            f"{', '.join(deltanet_ext.available_cpu_isas())}; "
            f"precision: {deltanet_ext.get_cpu_precision()})",
            "cuda kernels": _cuda_kernels(),
            **{f"build: {name}": fact for name, fact in deltanet_ext.build_info().items()},
        }
    except ImportError as error:
        facts["library"] = str(error)
    width = max(map(len, facts))
    for name, fact in facts.items():
        print(f"{name:{width}}  {fact}")
    return 2 if "library" in facts else 0


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return number


def writable(path: str) -> str:
    """Known before the demo has run for minutes."""
    try:
        with open(path, "a"):
            return path
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path}: {error.strerror}") from None


def parser() -> argparse.ArgumentParser:
    defaults, trained = models.Options(), training.Options()
    top = argparse.ArgumentParser(prog="python -m deltanet_ext", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True)

    show = commands.add_parser(
        "demo",
        help="run a Gated DeltaNet model with and without this package and compare",
        description=f"{inference.__doc__}\n{training.__doc__}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    show.add_argument("--train", action="store_true", help="train a Qwen3.5 model instead, in fp32")
    show.add_argument("--model", choices=models.MODELS, action="append", help="default: both")
    show.add_argument(
        "--dtype", choices=tuple(models.DTYPES), action="append", help="default: both"
    )
    for name, text in (
        ("tokens", "bytes of text to read, or of a training step"),
        ("steps", "tokens to generate, or training steps"),
        ("hidden", "width of the model"),
        ("key-heads", "key heads of the rule; there are twice as many value heads"),
        ("repeats", "timed runs in fp32; the fastest one counts"),
        ("seed", "of the weights"),
    ):
        field = name.replace("-", "_")
        default = getattr(defaults, field)
        if (other := getattr(trained, field, default)) != default:
            default = f"{default}; with --train {other}"
        kind = int if name == "seed" else positive
        show.add_argument(f"--{name}", type=kind, help=f"{text} ({default})")
    show.add_argument("--threads", type=positive, help="default: one per idle core")
    show.add_argument(
        "--json", metavar="PATH", type=writable, help="write the figures there as well"
    )

    commands.add_parser("info", help="versions, build and kernels, for a bug report")
    return top


def main(arguments: list[str] | None = None) -> int:
    top = parser()
    given = top.parse_args(arguments)
    if given.command == "info":
        return info()
    names = ("tokens", "steps", "hidden", "key_heads", "repeats", "threads", "seed")
    sizes = {name: value for name in names if (value := getattr(given, name)) is not None}
    if given.train:
        for name in ("model", "dtype", "repeats"):
            if getattr(given, name) is not None:
                top.error(f"--{name} does not go with --train")
        return training.main(training.Options(**sizes), given.json)
    if given.model is not None:
        sizes["models"] = tuple(given.model)
    if given.dtype is not None:
        sizes["dtypes"] = tuple(given.dtype)
    if given.hidden is not None and given.hidden % 8:
        top.error(f"--hidden {given.hidden} is not a multiple of 8, as Qwen3-Next's experts need")
    return inference.main(models.Options(**sizes), given.json)


if __name__ == "__main__":
    sys.exit(main())
