# SPDX-License-Identifier: Apache-2.0
"""What was in memory before must not matter: poisoned tensors, poisoned malloc for scratch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import deltanet_ext
from cases import case_named

HERE = Path(__file__).parent


def test_the_poison_reaches_the_tensors_of_the_library(poison: None) -> None:
    """Or every test that uses the fixture would show nothing."""
    args = case_named("T=5").inputs()
    library = deltanet_ext._load.library()
    library.poison_results(True)  # begins to count
    deltanet_ext.chunk_gated_delta_rule(**args)
    assert library.poison_results(True) == 2
    assert torch.empty(3).isnan().all()


def large_state(scale: float = 1.0) -> torch.Tensor:
    """A final state of 4 MB, which lies in a block of its own (csrc/ops/allocate.h)."""
    torch.manual_seed(0)
    query, value = torch.randn(1, 1, 64, 128), torch.randn(1, 1, 64, 128) * scale
    beta = torch.rand(1, 1, 64)
    _, state = deltanet_ext.recurrent_gated_delta_rule(
        query, query, value, None, beta, output_final_state=True
    )
    assert state is not None
    return state


def test_a_large_result_is_kept_memory_only_once_nothing_refers_to_it() -> None:
    first = large_state()
    address, expected = first.data_ptr(), first.clone()
    part = first[0, 3]
    del first
    second = large_state(2.0)
    assert second.data_ptr() != address, "memory was handed out while a view of it lived"
    assert torch.equal(part, expected[0, 3])
    array = part.numpy()
    del part
    assert large_state(3.0).data_ptr() != address
    assert (array == expected[0, 3].numpy()).all()
    del array
    assert torch.equal(large_state(), expected)


def test_large_results_can_be_poisoned(poison: None) -> None:
    """Or tests of large results would show nothing; the kernel overwrites all of it."""
    assert large_state().isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("megabytes", "kept"), [("0", False), ("3", False), ("5", True), (None, True)]
)
def test_how_much_memory_is_kept(megabytes: str | None, kept: bool) -> None:
    script = (
        "from test_memory import large_state\n"
        "def resident():\n"
        "    return int(open('/proc/self/statm').read().split()[1]) * 4096\n"
        "large_state().sum()\n"
        "state = large_state(); full = resident(); del state\n"
        "print(full - resident() < 2_000_000)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
    environment.pop("DELTANET_KEEP_MB", None)
    if megabytes is not None:
        environment["DELTANET_KEEP_MB"] = megabytes
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(kept)


@pytest.mark.slow
def test_a_wrong_amount_is_an_error() -> None:
    script = "from test_memory import large_state; large_state()"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]),
        "DELTANET_KEEP_MB": "much",
    }
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "DELTANET_KEEP_MB is 'much'; supported: a number of megabytes, 0 or more" in done.stderr


@pytest.mark.slow
def test_training_takes_little_more_than_what_the_caller_sees() -> None:
    """At a length at which anything that grows with T, and should not, shows."""
    pytest.importorskip("transformers", minversion="5.15")  # benchmarks/run.py imports it
    script = HERE.parent / "benchmarks" / "memory.py"
    command = [sys.executable, str(script), "--child", "deltanet_ext", "--tokens", "65536"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["visible"] > 1e9
    assert result["peak"] > result["visible"], "the measurement misses something"
    assert result["peak"] < 1.5 * result["visible"] + result["saved_states"]


SCRIPT = """
import ctypes, hashlib, sys
import torch
import deltanet_ext
from cases import DTYPES, case_named

libc = ctypes.CDLL(None)
M_PERTURB = -6
libc.mallopt(M_PERTURB, int(sys.argv[1]))

names = ["T=0", "T=1", "T=17", "T=130", "K=33 V=100", "K=3 V=5", "K=255 V=13", "HK=2 HV=6",
         "state V first", "state V first, none", "gate in kernel", "packed130[0,65,65,65,66,120]",
         "packed64[0,0,64]", "B=0", "g none", "beta none"]
digest = hashlib.sha256()
for isa in deltanet_ext.available_cpu_isas():
    deltanet_ext.force_cpu_isa(isa)
    for name in names:
        for dtype in DTYPES:
            args = case_named(name).inputs(dtype)
            results = [*deltanet_ext.chunk_gated_delta_rule(**args)]
            results += deltanet_ext.recurrent_gated_delta_rule(**args)
            if "scale" not in args and "A_log" not in args and "state_v_first" not in args:
                results += deltanet_ext.chunk_transition(
                    args["key"], args["value"], args["g"], args["beta"],
                    cu_seqlens=args.get("cu_seqlens"))
            for x in results:
                digest.update(x.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    for C in (1, 5, 16, 33, 128):
        L = torch.randn(3, C, C, generator=torch.Generator().manual_seed(C)) / C
        x = deltanet_ext.unit_lower_triangular_inverse(L)
        digest.update(x.flatten().view(torch.uint8).numpy().tobytes())
libc.malloc.restype = ctypes.c_void_p
fresh = ctypes.string_at(libc.malloc(3000), 3000)[100:2900]
print(digest.hexdigest(), len(set(fresh)) == 1 and fresh[0])
"""


def run_with_malloc_byte(perturb: int) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(perturb)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


@pytest.mark.slow
def test_scratch_may_hold_anything() -> None:
    """The same bits whether malloc hands out zeros, NaN or large numbers."""
    plain, _ = run_with_malloc_byte(0)
    # glibc fills fresh memory with the low byte of (perturb xor 0xff): 0xff is NaN as fp32 and fp64
    # (0 means off, hence 0x100), 0x7f is 3.4e38.
    for perturb in (0x100, 0x80):
        poisoned, byte = run_with_malloc_byte(perturb)
        if byte != str((perturb ^ 0xFF) & 0xFF):
            pytest.skip("this C library does not fill fresh memory")
        assert poisoned == plain
