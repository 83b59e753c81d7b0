# SPDX-License-Identifier: Apache-2.0
"""How far each implementation is from the fp64 recurrence: the table in docs/numerics.md.

    python benchmarks/accuracy.py          write the table
    python benchmarks/accuracy.py --print  print it

Root mean square of the error over that of the result, output / final state. B = 1, T = 1024, two
key heads, four value heads, K = V = 128, from a random state.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch
from report import ROOT, markdown, put

import deltanet_ext
from deltanet_ext import reference

TOKENS, KEY_HEADS, VALUE_HEADS, DIM = 1024, 2, 4, 128
Inputs = dict[str, Any]


def draw(dtype: torch.dtype) -> Inputs:
    rng = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng)

    rate = torch.tensor([0.01, 0.5, 4.0, 16.0])  # of decay per head: models have all of these
    softplus = torch.nn.functional.softplus
    return {
        "query": normal(1, TOKENS, KEY_HEADS, DIM).to(dtype),
        "key": normal(1, TOKENS, KEY_HEADS, DIM).to(dtype),
        "value": normal(1, TOKENS, VALUE_HEADS, DIM).to(dtype),
        "g": -rate * softplus(normal(1, TOKENS, VALUE_HEADS) + 1),
        "beta": normal(1, TOKENS, VALUE_HEADS).sigmoid().to(dtype),
        "initial_state": normal(1, VALUE_HEADS, DIM, DIM),
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
    }


def similar_keys(x: Inputs) -> Inputs:
    noise = 0.5 * x["key"].float()
    return x | {
        "key": (noise + noise[:, :1] * 2).to(x["key"].dtype),
        "g": torch.full_like(x["g"], -1e-3),
        "beta": torch.full_like(x["beta"], 0.995),
    }


def one_key(x: Inputs, beta: float) -> Inputs:
    key = x["key"][:, :1].expand_as(x["key"])
    return x | {"key": key, "g": 0 * x["g"], "beta": torch.full_like(x["beta"], beta)}


REGIMES: dict[str, Callable[[Inputs], Inputs]] = {
    "as models start": lambda x: x,
    "strong decay, g = -20": lambda x: x | {"g": torch.full_like(x["g"], -20.0)},
    "hardly any decay, similar keys": similar_keys,
    "one key throughout, beta 1, g 0": lambda x: one_key(x, 1.0),
    "one key throughout, beta 1.999, g 0": lambda x: one_key(x, 1.999),
}


def contestants() -> dict[str, Callable]:
    from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

    return {
        "deltanet_ext, chunks": deltanet_ext.chunk_gated_delta_rule,
        "deltanet_ext, token by token": deltanet_ext.recurrent_gated_delta_rule,
        "transformers, chunks": modeling.torch_chunk_gated_delta_rule.__wrapped__,
        "transformers, token by token": modeling.torch_recurrent_gated_delta_rule.__wrapped__,
    }


def error(got: torch.Tensor, want: torch.Tensor) -> str:
    return f"{float((got.double() - want).norm() / want.norm()):.1e}"


def table(dtype: torch.dtype) -> list[list[str]]:
    functions = contestants()
    rows = [["", *functions]]
    for name, change in REGIMES.items():
        x = change(draw(dtype))
        want = reference.recurrent(**x)
        row = [name]
        for function in functions.values():
            got = function(**x)
            row.append(" / ".join(error(a, b) for a, b in zip(got, want, strict=True)))
        rows.append(row)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--print", action="store_true", help="change no file")
    options = parser.parse_args()
    text = "\n\n".join(
        f"{title} inputs:\n\n{markdown(table(dtype), names=1)}"
        for title, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16))
    )
    text += f"\n\nKernels {deltanet_ext.cpu_isa()}, torch {torch.__version__}."
    if options.print:
        print(text)
    else:
        put(ROOT / "docs" / "numerics.md", "accuracy", text, source="accuracy.py")
    return 0


if __name__ == "__main__":
    sys.exit(main())
