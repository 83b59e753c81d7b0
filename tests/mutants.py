#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Seeded bugs in the CUDA kernels, each of which the tests of these kernels on the emulator
(tests/test_cuda_*.py) must find.

    mutants.py              all of them (half a minute to two for each)
    mutants.py NAME...      these
    mutants.py --list

A mutant is one replaced piece of source in a copy of the checkout. It is caught when a test fails.
One that survives is a hole in the tests: the exit status is the number of survivors. Only the
kernels that a mutant's own tests run are compiled with it (tests/unchanged_objects.py).
"""

from __future__ import annotations

import argparse
import os
import queue
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent


PREPARE, SCAN = "csrc/cuda/simt_prepare.cuh", "csrc/cuda/simt_scan.cuh"
RECURRENT, TABLE = "csrc/cuda/recurrent_forward.cuh", "csrc/cuda/chunk_table.cu"
LOAD, PARAMS = "csrc/cuda/load.cuh", "csrc/cuda/rule_params.cuh"
OPERATOR = "csrc/ops/gated_delta_rule_cuda.cpp"
ADJOINT, WALK = "csrc/cuda/simt_adjoint.cuh", "csrc/cuda/simt_walk.cuh"
BLOCK, FINISH = "csrc/cuda/simt_gradient_block.cuh", "csrc/cuda/simt_gradient_finish.cuh"
ROWS = "csrc/cuda/simt_chunk.cuh"
REDUCE, REDUCE_ROW = "csrc/cuda/simt_reduce.cuh", "csrc/cuda/reduce_row.cuh"
ADJOINT_SCAN = "csrc/cuda/simt_adjoint_scan.cuh"
CONV, CONV_FORWARD = "csrc/cuda/causal_conv1d.cuh", "csrc/cuda/causal_conv1d.cu"
CONV_BACKWARD, SILU = "csrc/cuda/causal_conv1d_backward.cu", "csrc/cuda/silu.cuh"
NORM, NORM_BACKWARD = "csrc/cuda/gated_rms_norm.cuh", "csrc/cuda/gated_rms_norm_backward.cu"
SUMS = "csrc/cuda/column_sums.cuh"

# What is compiled with a mutant of these files, which test file must find it, and which of its
# tests (pytest's -k).
CHUNK = ("kernels/scans.o", "emulated", "not recurrent")
BACKWARD = ("kernels/backward.o", "backward", "")
CONVOLUTION = ("kernels/causal_conv1d.o", "causal_conv1d", "")
GATED_NORM = ("kernels/gated_rms_norm.o", "gated_rms_norm", "")
FOUND_BY = {
    **dict.fromkeys((PREPARE, SCAN, TABLE, LOAD, PARAMS), CHUNK),
    RECURRENT: ("kernels/recurrent_forward.o", "emulated", "recurrent"),
    OPERATOR: ("operators/gated_delta_rule_cuda.o", "emulated", "V first"),
    **dict.fromkeys((ADJOINT, ADJOINT_SCAN, BLOCK, FINISH, REDUCE, REDUCE_ROW, ROWS), BACKWARD),
    WALK: ("kernels/simt_walk.o", "backward", "walk"),
    **dict.fromkeys((CONV, CONV_FORWARD, CONV_BACKWARD, SILU), CONVOLUTION),
    **dict.fromkeys((NORM, NORM_BACKWARD, SUMS), GATED_NORM),
}


class Mutant(NamedTuple):
    name: str
    file: str
    old: str
    new: str
    tests: str = ""  # fewer tests than its file's, the first of which to fail is enough

    @property
    def object(self) -> str:
        return FOUND_BY[self.file][0]

    @property
    def test_file(self) -> str:
        return f"tests/test_cuda_{FOUND_BY[self.file][1]}.py"

    @property
    def which(self) -> str:
        return self.tests or FOUND_BY[self.file][2]


MUTANTS = [
    # Mathematics.
    Mutant("beta of the wrong row", PREPARE, "l = shared_.beta[h][i] *",
           "l = shared_.beta[h][j] *"),
    Mutant("G without its low part", PREPARE, "return fmaf(e, low, e);", "return e;"),
    Mutant("chunks are never cut", PREPARE, "kMostRise = 1;", "kMostRise = 1e30;"),
    Mutant("norm of q on k", PREPARE, "query[j] = token ? scale * decay * shared_.q_norm[j]",
           "query[j] = token ? scale * decay * shared_.k_norm[j]"),
    Mutant("the state does not decay", SCAN, "keep = shared_.prepared.keep[first]", "keep = 1"),
    Mutant("output reads later rows", SCAN, "if (m <= row + r) add_scaled", "add_scaled",
           tests="later_token and not recurrent"),
    Mutant("read-out before the decay", RECURRENT, "a * y.x", "y.x"),
    Mutant("heads modulo key heads", PARAMS,
           "return unsigned(head) / (unsigned(p.value_heads) / unsigned(p.key_heads));",
           "return unsigned(head) % unsigned(p.key_heads);"),
    # Edges and options.
    Mutant("-inf is not clamped", LOAD, "return g < kSmallestLogDecay ? kSmallestLogDecay : g;",
           "return g;"),
    Mutant("no epsilon", LOAD, "sum_of_squares + 1e-6f", "sum_of_squares",
           tests="zero and keys and chunk"),
    Mutant("beta is not doubled", LOAD, "float((p.beta_doubled ? 2 : 1) /", "float(1 /",
           tests="beta and kernel and chunk"),
    Mutant("quads across the last column", LOAD, "if (quads && count >= 4) {\n    if (dtype == "
           "DType::kFloat32)\n      return", "if (quads && count > 0) {\n    if (dtype == "
           "DType::kFloat32)\n      return",
           tests="views and chunk"),
    Mutant("V first along the wrong axis", RECURRENT,
           "at + j * x.stride[3], 1, rows, true);", "at + j * x.stride[2], 1, rows, true);"),
    Mutant("the last chunk writes 16 rows", SCAN, "row + r >= first && row + r < end",
           "row + r >= first",
           tests="is_as_exact and chunk"),
    Mutant("empty sequences get chunks", TABLE, "if (offsets[middle] <= i)",
           "if (offsets[middle] < i)",
           tests="packed64 and chunk"),
    Mutant("cu_seqlens is trusted", PARAMS, "return x < 0 ? 0 : x < p.tokens ? x : p.tokens;",
           "return x;",
           tests="wrong_sequences and chunk"),
    Mutant("the tail is left alone", RECURRENT, "if (!p.output.data) return;", "return;"),
    Mutant("states are always K first", OPERATOR, "set_results(out, final_state, x, p);",
           "set_results(out, final_state, x, p); p.final_state.stride[2] = p.dim_v; "
           "p.final_state.stride[3] = 1;",
           tests="is_as_exact and first and chunk"),
    # Order.
    Mutant("no barrier before K S is read", SCAN, "    __syncthreads();  // K S is complete\n", "",
           tests="is_as_exact and chunk"),
    Mutant("no barrier before V' is read", SCAN,
           "    __syncthreads();  // V' is complete, and S has been read\n", "",
           tests="is_as_exact and chunk"),
    Mutant("no barrier between chunks", SCAN, "      __syncthreads();  // the chunk before has been"
           " read, S is complete (first: it is there)\n", "",
           tests="is_as_exact and chunk"),
    Mutant("one buffer for k and q", RECURRENT, "store_rows(buffer ^ 1);", "store_rows(buffer);"),
    Mutant("no barrier before the first token", RECURRENT,
           "      if (i == 0) __syncthreads();  // the first rows are there\n", ""),
    # The backward pass.
    Mutant("Z reads earlier rows", ADJOINT, "sum = fmaf(-f.L[j][i], z[j], sum);",
           "sum = fmaf(-f.L[i][j], z[j], sum);"),
    Mutant("dS without the strip's end", ADJOINT, "i == end - 1 || unsigned(i)", "unsigned(i)"),
    Mutant("the last segment starts from zero", ADJOINT, "else if (at_end)\n", "else if (false)\n"),
    Mutant("the map reads dO", ADJOINT, "with_output_(p.grad_output.data && !of_map_)",
           "with_output_(p.grad_output.data)"),
    Mutant("segments without what comes from behind", ADJOINT_SCAN,
           "add_scaled(sum[r], component(w, k), dS[k])", "add_scaled(sum[r], 0.f, dS[k])"),
    Mutant("the map is transposed", ADJOINT_SCAN, "add_scaled(sum[r], component(w, k), dS[k])",
           "add_scaled(sum[r], m + k < p.dim_k ? W[(m + k) * map_pitch + row + r] : 0.f, dS[k])"),
    Mutant("one state for both segments", ADJOINT_SCAN,
           "float* before = behind + padded_rows(p.dim_k) * kColumns;", "float* before = behind;"),
    Mutant("dg with token t's own future", FINISH,
           "for (int j = first; j < t; ++j) {\n      sum +=",
           "for (int j = first; j <= t; ++j) {\n      sum +=",
           tests="is_as_exact"),
    Mutant("dg without what passes through", FINISH,
           "sum += shared_.through[c * kChunk + first][w];", "sum += 0.f;",
           tests="is_as_exact"),
    Mutant("dbeta divided by beta", FINISH, "-shared_.finish.gradient.KK[thread_][j]",
           "-shared_.prepared.L[thread_][j] / shared_.prepared.value[thread_]",
           tests="is_as_exact and beta"),
    Mutant("X without its transpose", FINISH,
           "fmaf(j < i ? up : down, keys[j], of_key)", "fmaf(j < i ? up : 0.f, keys[j], of_key)",
           tests="is_as_exact"),
    Mutant("dQ of one value head", FINISH, "? *to + x : x;", "? x : x;",
           tests="one_head_and_for_all"),
    Mutant("S of the chunk before", BLOCK, "from = slot() + (c - 1)",
           "from = slot() + (c - 1) / 2"),
    Mutant("states made again one piece short", BLOCK, "for (int i = 0; i < first; i =",
           "for (int i = 0; shared_.prepared.end[i] < first; i ="),
    Mutant("no barrier before K dS is read", BLOCK,
           "    __syncthreads();  // K dS and P^T dO are complete\n", ""),
    Mutant("only one value head of a key", REDUCE_ROW, "for (int h = 0; h < group; ++h) d",
           "for (int h = 0; h < 1; ++h) d"),
    Mutant("the norm is a constant", REDUCE_ROW, "d = fmaf(-row_at(k), factor, d)", "d = d + 0.f"),
    Mutant("sums of gates of the wrong head", REDUCE,
           "reduce_gates(p, x, blockIdx.x - x.row_blocks)", "reduce_gates(p, x, blockIdx.x)"),
    Mutant("overflowing rows meet states", ROWS, "if (which == 0) return;", "return;",
           tests="overflows"),
    Mutant("a walk starts from the initial state", WALK, "else if (strip.index > 0)\n",
           "else if (false)\n"),
    Mutant("a walk hands no adjoint state on", WALK, "    if (ends_sequence())\n",
           "    if (true)\n"),
    Mutant("a walk leaves the tail alone", WALK, "(p, tail.begin, tail.end, key_head)",
           "(p, tail.end, tail.end, key_head)"),
    Mutant("one state for all strips of a walk", WALK, "(int64_t(i) * place().prepared_stride +",
           "(int64_t(0) * place().prepared_stride +"),
    Mutant("sums of gates of one sequence", WALK, "                     n,\n                     "
           "/*first_of_sums", "                     0,\n                     /*first_of_sums"),
    Mutant("no barrier between the strips of a walk", WALK,
           "      __syncthreads();  // the strip has been read\n", ""),
    # The convolution.
    Mutant("taps reach into the sequence before", CONV, "{clamp_to(t - span.begin, past),",
           "{clamp_to(t, past),"),
    Mutant("tokens of negative seq_idx are a sequence", CONV, "number < 0 ? -1 : 0", "0"),
    Mutant("a NaN is bounded", SILU, "x < kLeastSilu ? kLeastSilu : x", "fmaxf(x, kLeastSilu)"),
    Mutant("the newest state first", CONV_FORWARD,
           "for (int64_t i = 0; i < p.state_tokens - kept; ++i) {",
           "for (int64_t i = p.state_tokens - kept - 1; i >= 0; --i) {"),
    Mutant("a quad of the state in reverse", CONV_FORWARD, "make_float4(x[4], x[3], x[2], x[1])",
           "make_float4(x[1], x[2], x[3], x[4])"),
    Mutant("slots are trusted", CONV_FORWARD, "if (slot < 0 || slot >= p.states) {",
           "if (slot < 0) {"),
    Mutant("outputs behind the last token", CONV_FORWARD,
           "if (first + t + r >= p.tokens) continue;", ""),
    Mutant("no barrier before the tile is read", CONV_FORWARD,
           "  __syncthreads();  // the tile, the taps and the places are complete\n", ""),
    Mutant("no barrier before dz is read", CONV_BACKWARD,
           "    __syncthreads();  // dz is complete\n", ""),
    Mutant("no barrier before the next tile", CONV_BACKWARD,
           "    __syncthreads();  // the tile has been read\n", ""),
    Mutant("dx takes from the next sequence", CONV_BACKWARD, "if (i <= place.ahead)",
           "if (i < p.width)"),
    Mutant("dx without the final states", CONV_BACKWARD, "last = p.width - 2 - place.ahead;",
           "last = -1;"),
    Mutant("dweight without the initial states", CONV_BACKWARD,
           "if (i < p.width && i > place.behind)", "if (i > p.width)"),
    Mutant("a short sequence hands nothing on", CONV_BACKWARD, "if (row >= used) sums[row] +=",
           "if (row > p.width) sums[row] +="),
    # The gated norm.
    Mutant("a row's sum is one warp's", NORM, "for (const float part : of_warp) x += part;",
           "x = of_warp[0];"),
    Mutant("no barrier before the next sum", NORM,
           "    __syncthreads();  // the sums before have been read\n", ""),
    Mutant("no gradient through the mean", NORM_BACKWARD, "group_sum.sum(along) /",
           "0.f * group_sum.sum(along) /"),
    Mutant("dweight of one warp", NORM_BACKWARD, "for (int g = 0; g < kGroups; ++g) sum",
           "for (int g = 0; g < 1; ++g) sum"),
    Mutant("sums of two lanes", SUMS, "for (int i = 1; i < kSumLanes; ++i)",
           "for (int i = 1; i < 2; ++i)"),
]  # fmt: skip


class Slot(NamedTuple):
    """A copy of the checkout, and of what was built of it."""

    checkout: Path
    build: Path

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        environment = {
            **os.environ,
            "MAX_JOBS": "1",
            "PTX_EMULATOR_BUILD": str(self.build),
            "PYTHONPATH": os.pathsep.join(
                str(self.checkout / folder) for folder in (".", "tests", "tests/ptx_emulator")
            ),
        }
        return subprocess.run(
            [sys.executable, *command],
            cwd=self.checkout, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip


def slot_in(folder: Path, made: Path) -> Slot:
    slot = Slot(folder / "checkout", folder / "build")
    shutil.rmtree(folder, ignore_errors=True)
    for name in ("csrc", "tests", "deltanet_ext"):
        shutil.copytree(ROOT / name, slot.checkout / name)
    shutil.copy(ROOT / "pyproject.toml", slot.checkout)
    shutil.copytree(made, slot.build)
    return slot


def judge(mutant: Mutant, slot: Slot) -> str | None:
    """What the tests said of it; None: they passed."""
    built = slot.run("-c", "import unchanged_objects, build; build.operators()")
    if built.returncode:  # what does not compile is no merit of the tests
        raise SystemExit(f"mutants.py: {mutant.name}: {built.stdout}{built.stderr}")
    options = ("-x", "-q", "--no-header", "-p", "no:cacheprovider", "-p", "unchanged_objects")
    done = slot.run("-m", "pytest", *options, mutant.test_file, "-k", mutant.which)
    if done.returncode == 0:
        return None
    # Tests that cannot even be run are no merit of the tests either.
    if not re.search(r"^FAILED ", done.stdout, re.M):
        raise SystemExit(f"mutants.py: {mutant.name}: no test failed\n{done.stdout}{done.stderr}")
    found = re.findall(r"^E +(?:\w+Error: )?(.*\S)|^FAILED (.*)$", done.stdout, re.M)
    return " | ".join((a or b)[:110] for a, b in [*found[:1], *found[-1:]])


def survives(mutant: Mutant, slot: Slot) -> bool:
    source, target = slot.checkout / mutant.file, slot.build / mutant.object
    text, built = source.read_text(), target.read_bytes()
    if text.count(mutant.old) != 1:
        raise SystemExit(f"mutants.py: {mutant.name}: not once in {mutant.file}: {mutant.old}")
    source.write_text(text.replace(mutant.old, mutant.new))
    target.unlink()
    said = judge(mutant, slot)
    print(f"{'SURVIVES' if said is None else 'caught'}  {mutant.name}: {said or ''}", flush=True)
    source.write_text(text)
    target.write_bytes(built)
    return said is None


def main() -> int:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("names", nargs="*")
    arguments.add_argument("--list", action="store_true")
    arguments.add_argument("--folder", type=Path, help="where the copies lie")
    arguments.add_argument("--jobs", type=int, default=os.cpu_count(), help="mutants at once")
    options = arguments.parse_args()
    if unknown := set(options.names) - {m.name for m in MUTANTS}:
        raise SystemExit(f"mutants.py: no such mutants: {', '.join(sorted(unknown))}")
    chosen = [m for m in MUTANTS if not options.names or m.name in options.names]
    if options.list:
        print("\n".join(m.name for m in chosen))
        return 0
    made = Path(os.environ.get("PTX_EMULATOR_BUILD", ROOT / "build" / "ptx_emulator"))
    builder = ROOT / "tests" / "ptx_emulator" / "build.py"
    subprocess.run([sys.executable, builder, "--operators"], check=True, stdout=subprocess.DEVNULL)
    folder = options.folder or made.with_name(made.name + "_mutants")
    slots: queue.SimpleQueue[Slot] = queue.SimpleQueue()
    for i in range(options.jobs):
        slots.put(slot_in(folder / str(i), made))

    def try_one(mutant: Mutant) -> bool:
        slot = slots.get()
        try:
            return survives(mutant, slot)
        finally:
            slots.put(slot)

    with ThreadPoolExecutor(options.jobs) as pool:
        survivors = sum(pool.map(try_one, chosen))
    print(f"{len(chosen) - survivors} of {len(chosen)} caught")
    return survivors


if __name__ == "__main__":
    sys.exit(main())
