# SPDX-License-Identifier: Apache-2.0
"""Peak memory of a forward and a backward pass, next to transformers' function.

    python benchmarks/memory.py

Each is measured in a process of its own: what the process takes at most while the two passes run,
over what it has before the inputs are made. So inputs, outputs and gradients count, and the ratio
is against these alone.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any

OURS, THEIRS = "deltanet_ext", "transformers"


def measure(contestant: str, tokens: int, heads: int) -> dict[str, Any]:
    """Bytes: `peak`, and of tensors that the caller sees, `visible`, and of saved states."""
    import run
    import torch

    from cases import Case
    from deltanet_ext._autograd import SEGMENT_TOKENS
    from deltanet_ext.demo.training import forget_peak, memory

    torch.set_num_threads(1)
    # Libraries load, and thread pools start, at the first call.
    small = Case("warm up", 1, 70, heads, heads, train=True)
    run.contestants(small)[contestant](**small.inputs(torch.float32))

    case = Case("memory", 1, tokens, heads, heads, train=True)
    forget_peak()
    before = memory("VmRSS")
    inputs = case.inputs(torch.float32)
    names = ("query", "key", "value", "g", "beta")
    leaves = [inputs.pop(name).requires_grad_() for name in names]
    forget_peak()  # random numbers are made in another order
    function = run.functions(case)[contestant]
    out, state = function(**inputs, **dict(zip(names, leaves, strict=True)))
    grad = torch.ones_like(out)
    gradients = torch.autograd.grad(out, leaves, grad)
    peak = memory("VmHWM") - before
    visible = [*leaves, out, state, grad, *gradients]
    saved = tokens // SEGMENT_TOKENS * heads * case.key_dim * case.value_dim * 4
    return {
        "contestant": contestant,
        "tokens": tokens,
        "peak": peak,
        "visible": sum(x.nbytes for x in visible),
        "saved_states": saved if contestant == OURS else 0,
    }


def in_a_child(contestant: str, tokens: int, heads: int) -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", __file__, "--child", contestant]
    command += ["--tokens", str(tokens), "--heads", str(heads)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--heads", type=int, default=4, help="key heads and value heads")
    parser.add_argument("--theirs", type=int, default=8192, help="tokens for transformers")
    parser.add_argument("--child", help=argparse.SUPPRESS)  # which contestant to measure
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(options.child, options.tokens, options.heads)))
        return 0
    ours = in_a_child(OURS, options.tokens, options.heads)
    short = in_a_child(OURS, options.theirs, options.heads)
    theirs = in_a_child(THEIRS, options.theirs, options.heads)
    print(f"forward and backward, B=1 HK=HV={options.heads} K=V=128, fp32")
    for row in (ours, short, theirs):
        rest = row["peak"] - row["saved_states"]
        print(
            f"{row['contestant']:13} T={row['tokens']:<6} peak {row['peak'] / 1e6:6.0f} MB, "
            f"inputs, outputs and gradients {row['visible'] / 1e6:5.0f} MB, saved states "
            f"{row['saved_states'] / 1e6:3.0f} MB: {rest / row['visible']:.2f} x"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
