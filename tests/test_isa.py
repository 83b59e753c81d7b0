# SPDX-License-Identifier: Apache-2.0
"""Every instruction set of this machine on a representative part of the table; and choosing one."""

import itertools

import pytest
import torch

import deltanet_ext
from cases import (
    CASES,
    Case,
    assert_as_exact_as_the_recurrence,
    case_named,
    dtypes,
    expected,
)

# Each third case of the long groups, all of what is special.
REPRESENTATIVE = [
    *itertools.chain(*(CASES[group][::3] for group in ("tokens", "heads", "head dims", "gates"))),
    *CASES["states"],
    *CASES["packed"],
    *CASES["stress"],
]


@pytest.mark.parametrize("dtype", dtypes(torch.float32))
@pytest.mark.parametrize("case", REPRESENTATIVE, ids=str)
def test_is_as_exact_as_the_recurrence(case: Case, dtype: torch.dtype, isa: str) -> None:
    want = expected(case, dtype)
    for function in (deltanet_ext.chunk_gated_delta_rule, deltanet_ext.recurrent_gated_delta_rule):
        assert_as_exact_as_the_recurrence(function(**case.inputs(dtype)), want, dtype)


def test_best_first_and_scalar_always() -> None:
    names = deltanet_ext.available_cpu_isas()
    known = ["avx512_bf16", "avx512", "avx2", "neon", "scalar"]
    assert names == [name for name in known if name in names]
    assert names[-1] == "scalar"
    assert set(names) <= set(deltanet_ext.build_info()["cpu_isas_built"])


def test_force_and_back() -> None:
    automatic = deltanet_ext.cpu_isa()
    for name in deltanet_ext.available_cpu_isas():
        deltanet_ext.force_cpu_isa(name)
        assert deltanet_ext.cpu_isa() == name
    deltanet_ext.force_cpu_isa(None)
    assert deltanet_ext.cpu_isa() == automatic


@pytest.mark.parametrize("name", ["sse2", "AVX2", "avx2 ", "scalar,avx2"])
def test_an_unknown_name_is_an_error(name: str) -> None:
    before = deltanet_ext.cpu_isa()
    with pytest.raises(ValueError, match=f"force_cpu_isa: .*'{name}'.*supported.*scalar"):
        deltanet_ext.force_cpu_isa(name)
    assert deltanet_ext.cpu_isa() == before


@pytest.mark.skipif(
    deltanet_ext.available_cpu_isas() == deltanet_ext.build_info()["cpu_isas_built"],
    reason="this machine has every instruction set",
)
def test_what_the_machine_lacks_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"'avx512'.*supported.*scalar"):
        deltanet_ext.force_cpu_isa("avx512")


def test_forcing_has_an_effect() -> None:
    """Otherwise the tests above would run one kernel several times."""
    if len(deltanet_ext.available_cpu_isas()) == 1:
        pytest.skip("this machine has one instruction set")
    args = case_named("K=128 V=128").inputs(torch.bfloat16) | {"output_final_state": True}
    states = []
    with deltanet_ext.cpu_precision("fast"):  # without it avx512_bf16 is avx512
        for name in deltanet_ext.available_cpu_isas():
            deltanet_ext.force_cpu_isa(name)
            states.append(deltanet_ext.chunk_gated_delta_rule(**args)[1])
    deltanet_ext.force_cpu_isa(None)
    for a, b in itertools.pairwise(states):
        assert not torch.equal(a, b)  # another order of summation: other last bits
