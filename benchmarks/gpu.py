# SPDX-License-Identifier: Apache-2.0
"""What on_gpu.sh runs on a machine with an NVIDIA GPU, each step by itself:

    python benchmarks/gpu.py facts                      the card, the toolkit, the build
    python benchmarks/gpu.py measure --out m.json       forward, decode, and what others published
    python benchmarks/gpu.py outputs --out o.pt         results of small calls
    python benchmarks/gpu.py compare a.pt b.pt --out c.json     those of two devices, and of fp64
    python benchmarks/gpu.py small                      every operator once, for compute-sanitizer

`--device cpu` and `--device emulated` (the PTX emulator) are for rehearsals: same code, tiny sizes,
and times that mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import math
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import deltanet_ext

TESTS = Path(__file__).resolve().parent.parent / "tests"
DEVICES = ("cuda", "cpu", "emulated")


# ---- what is measured ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """One call in bf16 with K = V = 128, and what others published for it on an H200, in ms."""

    name: str
    key_heads: int
    value_heads: int
    lengths: tuple[int, ...]  # of the packed sequences; one sequence is not packed
    batch: int = 1  # decode: sequences of one token with a state each
    published: dict[str, float] = field(default_factory=dict, compare=False)

    @property
    def decode(self) -> bool:
        return self.lengths == (1,)

    @property
    def tokens(self) -> int:
        return self.batch * sum(self.lengths)

    @property
    def bytes(self) -> int:
        """The floor: q, k, v, g, beta read once, o written once; decode: the states both ways."""
        per_token = 2 * 2 * 128 * self.key_heads + (2 * 2 * 128 + 4 + 2) * self.value_heads
        states = 2 * 4 * 128 * 128 * self.value_heads * self.batch if self.decode else 0
        return self.tokens * per_token + states

    @property
    def flop(self) -> float:
        """The floor with chunks of 64: docs/algorithm.md; products of keys once per key head."""
        shared = 128 * self.key_heads / self.value_heads
        return self.tokens * self.value_heads * (6 * 128 * 128 + 2 * 64 * (shared + 128))


def _published(flashqla: float, flashinfer: float, fla: float) -> dict[str, float]:
    return {"FlashQLA": flashqla, "FlashInfer": flashinfer, "fla": fla}


# FlashQLA's own table of an H200 (fla 0.5.1, FlashInfer 0.6.13, with CUDA graphs).
SHAPES = (
    Shape("2/8, 1 x 2048", 2, 8, (2048,), published=_published(0.061, 0.109, 0.081)),
    Shape("2/8, 1 x 8192", 2, 8, (8192,), published=_published(0.119, 0.417, 0.234)),
    Shape("2/8, 1 x 32768", 2, 8, (32768,), published=_published(0.320, 1.655, 0.902)),
    Shape("4/16, 1 x 8192", 4, 16, (8192,), published=_published(0.175, 0.418, 0.316)),
    Shape("16/16, 1 x 8192", 16, 16, (8192,), published=_published(0.178, 0.418, 0.334)),
    Shape("8/32, 1 x 8192", 8, 32, (8192,), published=_published(0.280, 0.394, 0.466)),
    Shape("8/32, 4 x 8192", 8, 32, (8192,) * 4, published=_published(0.609, 0.419, 1.886)),
    Shape("16/32, 1 x 2048", 16, 32, (2048,), published=_published(0.109, 0.106, 0.132)),
    Shape("16/32, 1 x 8192", 16, 32, (8192,), published=_published(0.280, 0.394, 0.472)),
    Shape("16/48, 1 x 8192", 16, 48, (8192,), published=_published(0.410, 0.393, 0.665)),
    Shape("16/64, 1 x 8192", 16, 64, (8192,), published=_published(0.397, 0.392, 0.814)),
    Shape("16/64, 8 x 4096", 16, 64, (4096,) * 8, published=_published(1.217, 0.841, 3.390)),
    Shape("decode 1", 16, 32, (1,), 1),
    Shape("decode 8", 16, 32, (1,), 8),
    Shape("decode 32", 16, 32, (1,), 32),
    Shape("decode 128", 16, 32, (1,), 128),
)


def tiny(shape: Shape) -> Shape:
    """For a rehearsal."""
    lengths = tuple(min(n, 70) for n in shape.lengths)
    return replace(shape, key_heads=1, value_heads=2, lengths=lengths, batch=min(shape.batch, 2))


def inputs(shape: Shape, device: str, seed: int) -> dict[str, Any]:
    """As a model makes them: A = U(1, 16), dt_bias = 1, beta a sigmoid in bf16."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator, device=device)

    length = sum(shape.lengths)
    rows = (shape.batch, length)
    rate = torch.linspace(1, 16, shape.value_heads, device=device)
    made: dict[str, Any] = {
        "query": normal(*rows, shape.key_heads, 128).bfloat16(),
        "key": normal(*rows, shape.key_heads, 128).bfloat16(),
        "value": normal(*rows, shape.value_heads, 128).bfloat16(),
        "g": -rate * torch.nn.functional.softplus(normal(*rows, shape.value_heads) + 1),
        "beta": normal(*rows, shape.value_heads).sigmoid().bfloat16(),
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
    }
    if shape.decode:
        made["initial_state"] = normal(shape.batch, shape.value_heads, 128, 128)
    if len(shape.lengths) > 1:
        bounds = torch.tensor((0, *shape.lengths)).cumsum(0)
        made["cu_seqlens"] = bounds.to(device)
    return made


# ---- clocks --------------------------------------------------------------------------------------


class GpuClock:
    """Times between CUDA events, of replays of a graph: what the GPU does, without the host."""

    def __init__(self, calls: list[Callable[[], Any]]) -> None:
        for call in calls:
            call()
        torch.cuda.synchronize()
        self.graph, self.calls = torch.cuda.CUDAGraph(), len(calls)
        with torch.cuda.graph(self.graph):
            self.results = [call() for call in calls]  # kept: the graph writes there
        self.graph.replay()
        torch.cuda.synchronize()

    def milliseconds(self) -> float:
        """Of one call."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / self.calls


class HostClock:
    """The same for a rehearsal on the CPU."""

    def __init__(self, calls: list[Callable[[], Any]]) -> None:
        self.calls = calls

    def milliseconds(self) -> float:
        begin = time.perf_counter()
        for call in self.calls:
            call()
        return (time.perf_counter() - begin) * 1e3 / len(self.calls)


def on_gpu(device: str) -> bool:
    return device == "cuda"


def wait(device: str) -> None:
    if on_gpu(device):
        torch.cuda.synchronize()


def samples(clock: GpuClock | HostClock, seconds: float, least: int = 5) -> list[float]:
    times, begin = [], time.perf_counter()
    while len(times) < least or (time.perf_counter() - begin < seconds and len(times) < 1000):
        times.append(clock.milliseconds())
    return times


def ceilings(device: str, seconds: float) -> dict[str, float]:
    """What this card does at best, measured: GB/s of a copy, TFLOP/s of a bf16 product."""
    clock = GpuClock if on_gpu(device) else HostClock
    floats, size = (1 << 28, 8192) if on_gpu(device) else (1 << 16, 64)
    source = torch.randn(floats, device=device)
    target = torch.empty_like(source)
    copy = min(samples(clock([lambda: target.copy_(source)]), seconds))
    a, b = torch.randn(2, size, size, device=device).bfloat16().unbind()
    product = statistics.median(samples(clock([lambda: a @ b]), seconds))
    return {"copy_gbs": 8 * floats / copy / 1e6, "bf16_tflops": 2 * size**3 / product / 1e9}


# ---- measure -------------------------------------------------------------------------------------

L2_BYTES = 60 << 20  # of an H200; what fits there twice would be measured instead of memory


def measure_shape(shape: Shape, device: str, precision: str, seconds: float) -> dict[str, Any]:
    function = (
        deltanet_ext.recurrent_gated_delta_rule
        if shape.decode
        else deltanet_ext.chunk_gated_delta_rule
    )
    count = min(16, max(2, math.ceil(3 * L2_BYTES / shape.bytes))) if on_gpu(device) else 2
    sets = [inputs(shape, device, seed) for seed in range(count)]
    calls = [lambda x=x: function(**x) for x in sets]
    with torch.inference_mode(), deltanet_ext.cuda_precision(precision):
        out, state = calls[0]()
        error = difference_from_recurrence(shape, sets[0], out, state)
        clock = GpuClock(calls) if on_gpu(device) else HostClock(calls)
        times = samples(clock, seconds)
        # And as a program calls it, one call after another, host included.
        wait(device)
        begin, rounds = time.perf_counter(), 50 if on_gpu(device) else 1
        for i in range(rounds):
            calls[i % count]()
        wait(device)
        eager = (time.perf_counter() - begin) * 1e3 / rounds
    median = statistics.median(times)
    return {
        "case": shape.name,
        "precision": precision,
        "tokens": shape.tokens,
        "key_heads": shape.key_heads,
        "value_heads": shape.value_heads,
        "sequences": shape.batch * len(shape.lengths),
        "ms_median": median,
        "ms_min": min(times),
        "ms_eager": eager,
        "samples": len(times),
        "gbs": shape.bytes / median / 1e6,
        "tflops": shape.flop / median / 1e9,
        "error_against_recurrence": error,
        "published_h200": shape.published,
    }


def difference_from_recurrence(
    shape: Shape, args: dict[str, Any], out: torch.Tensor, state: torch.Tensor
) -> float:
    """Relative error of the output against the other kernel: a speed of wrong results is none."""
    other = (
        deltanet_ext.chunk_gated_delta_rule
        if shape.decode
        else deltanet_ext.recurrent_gated_delta_rule
    )
    want, want_state = other(**args)
    assert torch.isfinite(out).all(), f"{shape.name}: not finite"
    error = max(relative(out, want), relative(state, want_state))
    assert error < 1e-2, f"{shape.name}: chunks and recurrence differ by {error:.1e}"
    return error


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    got, want = got.double(), want.double()
    size = want.square().sum()
    return float(((got - want).square().sum() / size.clamp_min(1e-300)).sqrt())


def measure(options: argparse.Namespace) -> dict[str, Any]:
    device, rows, begin = options.device, [], time.monotonic()
    shapes = SHAPES if on_gpu(device) else [tiny(s) for s in SHAPES]
    plan = [(s, p) for p in ("exact", "fast") for s in shapes]
    limits = ceilings(device, 0.3 if on_gpu(device) else 0)
    skipped = []
    for shape, precision in plan:
        if time.monotonic() - begin > options.seconds:  # a lease ends; what was measured counts
            skipped.append(f"{shape.name}, {precision}")
            continue
        row = measure_shape(shape, device, precision, 0.4 if on_gpu(device) else 0)
        rows.append(row)
        print(
            f"  {shape.name:18} {precision:6} {row['ms_median']:8.4f} ms, eager "
            f"{row['ms_eager']:8.4f}, {row['gbs']:7.0f} GB/s, {row['tflops']:6.1f} TFLOP/s, "
            f"error {row['error_against_recurrence']:.1e}",
            flush=True,
        )
    return {**facts(), "device": device, "ceilings": limits, "rows": rows, "skipped": skipped}


def table(result: dict[str, Any]) -> str:
    """Markdown: ours beside the published figures, which are of an H200."""
    if not on_gpu(result["device"]):
        return "a rehearsal: these times mean nothing"
    lines = [
        "| heads, sequences | precision | ms | FlashQLA | FlashInfer | fla | ms, host included |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for row in result["rows"]:
        published = [row["published_h200"].get(n) for n in ("FlashQLA", "FlashInfer", "fla")]
        numbers = [f"{x:.3f}" if x else "" for x in published]
        lines.append(
            f"| {row['case']} | {row['precision']} | {row['ms_median']:.3f} | "
            f"{' | '.join(numbers)} | {row['ms_eager']:.3f} |"
        )
    return "\n".join(lines)


# ---- facts ---------------------------------------------------------------------------------------


def say(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return "none"
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def facts() -> dict[str, Any]:
    found: dict[str, Any] = {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "deltanet_ext": deltanet_ext.__version__,
        "build": {name: str(fact) for name, fact in deltanet_ext.build_info().items()},
        "torch": torch.__version__,
        "gpu": "none",
        "driver": say("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
    }
    if torch.cuda.is_available():
        card = torch.cuda.get_device_properties(0)
        found |= {
            "gpu": card.name,
            "capability": f"{card.major}.{card.minor}",
            "multiprocessors": card.multi_processor_count,
            "memory_gib": round(card.total_memory / 2**30, 1),
        }
    return found


def slug(gpu: str) -> str:
    """A folder name for results: nvidia-h200."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")


# ---- small calls: their results, and for compute-sanitizer ---------------------------------------


@contextlib.contextmanager
def kernels_of(device: str) -> Iterator[None]:
    """Inside, the public functions run on this device's kernels."""
    if device != "emulated":
        yield
        return
    sys.path.insert(0, str(TESTS))
    import emulated

    if reason := emulated.why_not():
        raise SystemExit(f"gpu.py: {reason}")
    with emulated.path():
        yield


def small_cases() -> list[Any]:
    """Few tokens, and every kind of argument."""
    sys.path.insert(0, str(TESTS))
    from cases import Case

    whole = {"K": 128, "V": 128, "HK": 1, "HV": 2, "state": torch.float32}
    return [
        Case("chunks", T=130, **whole),
        Case("packed", T=150, cu=(0, 65, 65, 66, 140), **whole),
        Case("batch", B=2, T=70, HK=2, HV=4, K=64, V=64),
        Case("odd sizes", T=67, HK=1, HV=3, K=33, V=100, state=torch.bfloat16),
        Case("wide", T=66, HK=1, HV=1, K=256, V=256, state=torch.float32),
        Case("raw gates", T=65, K=32, V=48, HK=1, HV=2, raw_gate=True, raw_beta=True),
        Case("identical keys", T=128, keys="identical", beta="1.999", g="zero", **whole),
        Case("decode", B=3, T=1, **whole),
    ]


SMALL_DTYPES = (torch.bfloat16, torch.float32)


def small_results(device: str) -> dict[str, torch.Tensor]:
    """By name: outputs, states, maps and inverses, on the CPU."""
    place = "cuda" if on_gpu(device) else "cpu"
    found: dict[str, torch.Tensor] = {}
    functions = {
        "chunk": deltanet_ext.chunk_gated_delta_rule,
        "recurrent": deltanet_ext.recurrent_gated_delta_rule,
    }
    with torch.inference_mode(), kernels_of(device):
        for case in small_cases():
            for dtype in SMALL_DTYPES:
                args = {
                    n: x.to(place) if isinstance(x, torch.Tensor) else x
                    for n, x in case.inputs(dtype).items()
                }
                for name, function in functions.items():
                    out, state = function(**args)
                    label = f"{case.name}, {str(dtype).removeprefix('torch.')}, {name}"
                    found |= {f"{label}: output": out.cpu(), f"{label}: state": state.cpu()}
        args = small_cases()[1].inputs(torch.bfloat16)
        names = ("key", "value", "g", "beta")
        M, U = deltanet_ext.chunk_transition(
            *(args[n].to(place) for n in names),
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=args["cu_seqlens"].to(place),
        )
        found |= {"transition: M": M.cpu(), "transition: U": U.cpu()}
        generator = torch.Generator().manual_seed(5)
        for size in (1, 16, 37, 64, 128):
            L = 0.1 * torch.randn(3, size, size, generator=generator)
            inverse = deltanet_ext.unit_lower_triangular_inverse(L.to(place))
            found[f"inverse of size {size}"] = inverse.cpu()
    return found


def exact_results() -> dict[str, torch.Tensor]:
    """Outputs and states of the small cases by the recurrence in fp64."""
    sys.path.insert(0, str(TESTS))
    from cases import recurrence

    found = {}
    for case in small_cases():
        for dtype in SMALL_DTYPES:
            out, state = recurrence(case.inputs(dtype))
            for name in ("chunk", "recurrent"):
                label = f"{case.name}, {str(dtype).removeprefix('torch.')}, {name}"
                found |= {f"{label}: output": out, f"{label}: state": state}
    return found


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Two devices differ by how a tensor core adds up, which is some 1e-6 before rounding."""
    first, second = (torch.load(path) for path in options.files)
    exact, rows = exact_results(), []
    assert first.keys() == second.keys(), "the files are of different versions"
    for name, x in first.items():
        y = second[name]
        row = {"result": name, "difference": relative(x, y), "same_bits": torch.equal(x, y)}
        if name in exact:
            row["errors"] = [relative(x, exact[name]), relative(y, exact[name])]
        rows.append(row)
    worst = max(rows, key=lambda row: row["difference"])
    # A narrow output may be rounded to its neighbor where fp32 results differ in the last bits.
    limits = {row["result"]: 5e-3 if "bfloat16" in row["result"] and "output" in row["result"]
              else 1e-2 if "identical keys" in row["result"] else 5e-5 for row in rows}  # fmt: skip
    failed = [row["result"] for row in rows if not row["difference"] <= limits[row["result"]]]
    print(f"  {len(rows)} results, {sum(row['same_bits'] for row in rows)} with the same bits; ")
    print(f"  largest difference {worst['difference']:.1e}: {worst['result']}")
    for name in failed:
        print(f"  DIFFERS: {name}")
    return {"files": [Path(f).stem for f in options.files], "failed": failed, "rows": rows}


# ---- command line --------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = top.add_subparsers(dest="command", required=True)
    for name in ("facts", "slug", "measure", "outputs", "small", "compare"):
        command = commands.add_parser(name)
        if name == "compare":
            command.add_argument("files", nargs=2)
        else:
            command.add_argument("--device", choices=DEVICES, default="cuda")
        command.add_argument("--out", help="file for the result")
        if name == "measure":
            command.add_argument("--seconds", type=float, default=80, help="begin nothing after")
    return top


def main() -> int:
    options = parser().parse_args()
    result: dict[str, Any] = {}
    if options.command == "slug":
        print(slug(facts()["gpu"]))
    elif options.command == "facts":
        result = facts()
        print(json.dumps(result, indent=1))
    elif options.command == "measure":
        result = measure(options)
        print(table(result))
    elif options.command == "outputs":
        torch.save(small_results(options.device), options.out)
        return 0
    elif options.command == "small":
        print(f"  {len(small_results(options.device))} results")
    else:
        result = compare(options)
    if options.out:
        Path(options.out).write_text(json.dumps(result, indent=1) + "\n")
    return 1 if result.get("failed") else 0


if __name__ == "__main__":
    sys.exit(main())
