# SPDX-License-Identifier: Apache-2.0
"""What is benchmarked: shapes, their inputs, and the floor of work that each one needs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CHUNK = 16  # of the floor below


@dataclass(frozen=True)
class Case:
    """One call of the rule, as a model makes it. A `decode` case has one token and a state; a
    `train` case is a forward and a backward pass, with gradients of all inputs, and a `backward`
    case the latter alone."""

    name: str
    batch: int
    tokens: int
    key_heads: int
    value_heads: int
    key_dim: int = 128
    value_dim: int = 128
    decode: bool = False
    train: bool = False
    backward: bool = False
    strided: bool = False  # q, k, v as views of one [B, D, T] tensor, which is what models pass
    quick: bool = True  # part of --quick
    in_place: bool = False  # a decode step that overwrites its states
    fast: bool = False  # products of bf16 pairs, on CPUs that have them
    sequences: int = 1  # packed along the tokens, of equal length

    def __str__(self) -> str:
        return (
            f"{self.name}: B={self.batch} T={self.tokens} HK={self.key_heads} "
            f"HV={self.value_heads} K={self.key_dim} V={self.value_dim}"
        )

    @property
    def token_heads(self) -> int:
        return self.batch * self.tokens * self.value_heads

    @property
    def flop(self) -> float:
        """The least that the chunked rule does, counting triangles as halves and products that key
        heads share once: 6 K V + 2 C (K HK / HV + V) per token and value head. The backward pass
        has 8 products with states, two of which make them again: 16 K V + C (6 K + 5 V).
        """
        k, v = self.key_dim, self.value_dim
        shared = k * self.key_heads / self.value_heads
        forward = 0 if self.backward else 6 * k * v + 2 * CHUNK * (shared + v)
        backward = 16 * k * v + CHUNK * (6 * k + 5 * v) if self.train or self.backward else 0
        return self.token_heads * (forward + backward)

    @property
    def bounds(self) -> tuple[str, ...]:
        """What may bound it: arithmetic, or one pass over the states; where few tokens go with a
        state, either."""
        states = self.decode or self.sequences > 1
        return (*(["GB/s"] if states else []), *(["GFLOP/s"] if self.tokens > 1 else []))

    @property
    def padded(self) -> Case:
        """The same with head dims that fill vectors of 8: what an odd size has to pay for."""
        key_dim, value_dim = (-(-dim // 8) * 8 for dim in (self.key_dim, self.value_dim))
        return replace(self, key_dim=key_dim, value_dim=value_dim)

    @property
    def state_floats(self) -> int:
        return self.batch * self.sequences * self.value_heads * self.key_dim * self.value_dim

    def runs_here(self, dtype: str) -> bool:
        from deltanet_ext import available_cpu_isas

        return not self.fast or (dtype == "bf16" and "avx512_bf16" in available_cpu_isas())

    def inputs(self, dtype: torch.dtype) -> dict[str, Any]:
        """Seeded inputs with gates as the models start with: A = U(1, 16), dt_bias = 1."""
        rng = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=rng)

        b, t, hk, hv = self.batch, self.tokens, self.key_heads, self.value_heads
        keys, values = hk * self.key_dim, hv * self.value_dim
        mixed = normal(b, 2 * keys + values, t).to(dtype).transpose(1, 2)
        if not self.strided:
            q, k, v = (x.contiguous() for x in mixed.split((keys, keys, values), -1))
        else:
            q, k, v = mixed.split((keys, keys, values), -1)
        a = torch.empty(hv).uniform_(1, 16, generator=rng)
        return {
            "query": q.reshape(b, t, hk, self.key_dim),
            "key": k.reshape(b, t, hk, self.key_dim),
            "value": v.reshape(b, t, hv, self.value_dim),
            "g": -a * torch.nn.functional.softplus(normal(b, t, hv) + 1),
            "beta": normal(b, t, hv).sigmoid().to(dtype),
            "initial_state": normal(b, hv, self.key_dim, self.value_dim) if self.decode else None,
            "output_final_state": True,
            "use_qk_l2norm_in_kernel": True,
        } | (
            {"cu_seqlens": torch.arange(0, t + 1, t // self.sequences)}
            if self.sequences > 1
            else {}
        )


CASES = (
    Case("prefill 4096", 1, 4096, 16, 32),
    Case("prefill 4096, fast", 1, 4096, 16, 32, fast=True),
    Case("prefill 4096, strided", 1, 4096, 16, 32, strided=True, quick=False),
    Case("prefill 1024", 1, 1024, 8, 16),
    Case("prefill 4 x 512", 4, 512, 8, 16, quick=False),
    Case("prefill 1024, dims 64", 1, 1024, 8, 16, key_dim=64, value_dim=64, quick=False),
    Case("train 1024", 1, 1024, 8, 16, train=True),
    Case("train 4096", 1, 4096, 16, 32, train=True, quick=False),
    Case("backward 4096", 1, 4096, 16, 32, backward=True, quick=False),
    Case("decode 1", 1, 1, 16, 32, decode=True),
    Case("decode 32", 32, 1, 16, 32, decode=True),
    Case("decode 1, in place", 1, 1, 16, 32, decode=True, in_place=True),
    Case("decode 32, in place", 32, 1, 16, 32, decode=True, in_place=True),
)

# Every kind of shape that users have, by itself and with few rounds: run.py --shapes.
SHAPES = (
    Case("headline", 1, 2048, 8, 16),
    *(Case(f"dims {d}", 1, 2048, 4, 8, key_dim=d, value_dim=d) for d in (64, 96, 192, 256)),
    Case("K 64, V 128", 1, 2048, 4, 8, key_dim=64),
    Case("K 128, V 64", 1, 2048, 4, 8, value_dim=64),
    Case("odd dims", 1, 2048, 4, 8, key_dim=101, value_dim=75),
    *(Case(f"HV/HK {n}", 1, 1024, 2, 2 * n) for n in (1, 3, 8)),
    Case("channels first", 1, 2048, 8, 16, strided=True),
    Case("1000 sequences of 10", 1, 10_000, 2, 4, sequences=1000),
    Case("1000 sequences of 30", 1, 30_000, 2, 4, sequences=1000),
    Case("long, T 32768", 1, 32_768, 2, 4),
    Case("short, T 512", 1, 512, 2, 4),
    *(Case(f"verify {t}", 8, t, 8, 16, decode=True) for t in (1, 2, 4, 8, 16)),
)
