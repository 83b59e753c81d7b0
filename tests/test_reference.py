# SPDX-License-Identifier: Apache-2.0
"""The definition of right, checked by hand, by algebra and by a second formula. No kernel here."""

import math
from collections.abc import Callable

import pytest
import torch

from cases import CASES, Case, case_named, recurrence
from closeness import assert_close
from deltanet_ext import reference

SECOND_OPINION = [
    case for group in ("gates", "packed", "states", "plain", "stress") for case in CASES[group]
]


@pytest.fixture(autouse=True)
def _one_thread(threads: Callable[[int], None]) -> None:
    threads(1)


def test_two_tokens_by_hand() -> None:
    """S = [[x]], a = 1/2, b = 1/2, k = 2, q = 3, K = 1: every number written out."""
    q, k = torch.full((1, 2, 1, 1), 3.0), torch.full((1, 2, 1, 1), 2.0)
    v = torch.tensor([4.0, 8.0]).reshape(1, 2, 1, 1)
    g, b = torch.full((1, 2, 1), math.log(0.5)), torch.full((1, 2, 1), 0.5)
    state = torch.full((1, 1, 1, 1), 2.0)
    out, last = reference.recurrent(q, k, v, g, b, state, output_final_state=True)
    # S1 = 1 + (4 - 1 * 2) / 2 * 2 = 3;    S2 = 1.5 + (8 - 1.5 * 2) / 2 * 2 = 6.5;    o = 3 S
    torch.testing.assert_close(out.flatten(), torch.tensor([9.0, 19.5], dtype=torch.float64))
    assert last is not None
    torch.testing.assert_close(last.item(), 6.5)


def test_axes_by_hand() -> None:
    """One token writes b k v^T: rows are K, columns are V."""
    k = torch.tensor([1.0, 2.0]).reshape(1, 1, 1, 2)
    v = torch.tensor([3.0, 5.0, 7.0]).reshape(1, 1, 1, 3)
    q = torch.tensor([1.0, 0.0]).reshape(1, 1, 1, 2)
    out, state = reference.recurrent(q, k, v, None, None, output_final_state=True, scale=1.0)
    assert state is not None
    assert state.tolist() == [[[[3.0, 5.0, 7.0], [6.0, 10.0, 14.0]]]]
    assert out.flatten().tolist() == [3.0, 5.0, 7.0]


def test_value_head_h_reads_key_head_h_over_group() -> None:
    args = case_named("HK=2 HV=6").inputs()
    out, _ = reference.recurrent(**args)
    for head in range(6):
        one = dict(args)
        for name in ("query", "key"):
            one[name] = args[name][:, :, head // 3 : head // 3 + 1]
        for name in ("value", "g", "beta"):
            one[name] = args[name][:, :, head : head + 1]
        alone, _ = reference.recurrent(**one)
        torch.testing.assert_close(alone[:, :, 0], out[:, :, head])


def test_default_scale() -> None:
    args = case_named("K=64 V=128").inputs()
    out, _ = reference.recurrent(**args)
    unscaled, _ = reference.recurrent(**args, scale=1.0)
    torch.testing.assert_close(out, unscaled / 8)


def test_l2norm_has_epsilon_inside_the_root() -> None:
    x = torch.tensor([3e-3, 4e-3], dtype=torch.float64)
    torch.testing.assert_close(reference.l2norm(x), x / math.sqrt(25e-6 + 1e-6))
    assert (reference.l2norm(torch.zeros(2)) == 0).all()


def test_gate_is_minus_exp_a_log_times_softplus() -> None:
    x = torch.tensor([-800.0, -1.0, 0.0, 1.0, 800.0], dtype=torch.float64)
    got = reference.gate(x - 0.5, torch.tensor(math.log(3.0)), torch.tensor(0.5))
    want = [0.0, -3 * math.log1p(math.exp(-1)), -3 * math.log(2), -3 * math.log1p(math.e), -2400.0]
    torch.testing.assert_close(got.double(), torch.tensor(want, dtype=torch.float64))


def test_beta_options() -> None:
    args = case_named("beta sigmoid in kernel").inputs()
    args.pop("use_beta_sigmoid_in_kernel")
    raw = args.pop("beta").double()
    manual, _ = reference.recurrent(**args, beta=2 * raw.sigmoid())
    options = {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True}
    out, _ = reference.recurrent(**args, beta=raw, **options)
    torch.testing.assert_close(out, manual)


def test_padding_is_a_no_op_on_the_state() -> None:
    args = case_named("T=33").inputs()
    _, state = reference.recurrent(**args)
    for name in ("key", "g", "beta"):
        zeros = torch.zeros_like(args[name][:, :5])
        args[name] = torch.cat([args[name][:, :20], zeros, args[name][:, 20:]], 1)
    for name in ("query", "value"):
        args[name] = torch.cat([args[name][:, :20], args[name][:, :5], args[name][:, 20:]], 1)
    _, padded = reference.recurrent(**args)
    assert torch.equal(state, padded)


def test_packed_sequences_are_separate_calls() -> None:
    case = case_named("packed64[0,17,50,64]")
    args = case.inputs()
    args.pop("cu_seqlens")
    out, states = reference.recurrent(**args, cu_seqlens=torch.tensor(case.cu))
    for n, (start, stop) in enumerate([(0, 17), (17, 50), (50, 64)]):
        one = dict(args)
        for name in ("query", "key", "value", "g", "beta"):
            one[name] = args[name][:, start:stop]
        one["initial_state"] = args["initial_state"][n : n + 1]
        alone, state = reference.recurrent(**one)
        assert torch.equal(alone, out[:, start:stop])
        assert torch.equal(state, states[n : n + 1])


def test_the_tail_is_zero_and_empty_sequences_keep_their_state() -> None:
    args = case_named("packed128[0,100]").inputs()
    args["value"][:, 100:] = float("nan")
    out, _ = reference.recurrent(**args)
    assert (out[:, 100:] == 0).all()
    args = case_named("packed70[0,0,0,0]").inputs()
    out, states = reference.recurrent(**args)
    assert (out == 0).all()
    assert torch.equal(states, args["initial_state"].double())


@pytest.mark.parametrize("case", SECOND_OPINION, ids=str)
def test_chunk_form_is_the_recurrence(case: Case) -> None:
    """Equations (2) to (7) against (1), in fp64."""
    bound = 1e-11 if "norm 2" in case.name else 1e-12  # T of (4) reaches 1e30 there
    args = case.inputs()
    out, state = recurrence(args)
    # A chunk cancels by the growth inside it, however exact each step: small ones where gates grow.
    for chunk_size in (2, 4) if case.g in ("0.25", "0.5") else (7, 64):
        chunk_out, chunk_state = reference.chunked(**args, chunk_size=chunk_size)
        assert_close(chunk_out, out, bound, f"output, chunk_size {chunk_size}")
        assert_close(chunk_state, state, bound, f"state, chunk_size {chunk_size}")


@pytest.mark.parametrize("name", ["T=65", "g positive", "identical keys, beta 1, g zero"])
def test_transition_is_what_a_sequence_does_to_any_state(name: str) -> None:
    args = case_named(name).inputs()
    if "initial_state" not in args:
        K, V, HV = args["key"].shape[-1], args["value"].shape[-1], args["value"].shape[2]
        args["initial_state"] = torch.ones(1, HV, K, V)
    _, state = reference.recurrent(**args)
    rule = {n: args[n] for n in ("key", "value", "g", "beta", "use_qk_l2norm_in_kernel")}
    M, U = reference.transition(**rule)
    assert_close(M @ args["initial_state"].double() + U, state, 1e-13)


def test_inverse_is_the_inverse() -> None:
    L = torch.randn(3, 2, 20, 20, dtype=torch.float64).tril(-1)
    eye = torch.eye(20, dtype=torch.float64)
    garbage = torch.full((20, 20), float("nan")).triu()
    T = reference.inverse(L + garbage)
    assert_close(T @ (L + eye), eye.expand_as(L), 1e-10)
    assert (T.triu(1) == 0).all()


def test_computes_in_the_dtype_it_is_asked_for() -> None:
    args = case_named("T=33").inputs(torch.bfloat16)
    out, state = reference.recurrent(**args, dtype=torch.float32)
    assert state is not None
    assert out.dtype == state.dtype == torch.float32
    exact, _ = reference.recurrent(**args)
    assert 1e-9 < float((out - exact).abs().max()) < 1e-5
