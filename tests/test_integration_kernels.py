# SPDX-License-Identifier: Apache-2.0
"""The entries for Hugging Face's `kernels`, where the installed transformers accepts it."""

from __future__ import annotations

import logging
from collections import Counter

import pytest
import torch

pytest.importorskip("transformers", minversion="5.14")
kernels = pytest.importorskip("kernels")

from tiny_models import IDS, LAYERS, build, count_calls, greedy  # noqa: E402

from deltanet_ext.integrations.kernels import mapping  # noqa: E402

LINEAR = LAYERS.count("linear_attention")


@pytest.fixture(autouse=True)
def _accepted():
    from transformers.utils import is_kernels_available

    if not is_kernels_available():
        pytest.skip(f"transformers does not accept kernels {kernels.__version__}")
    logging.getLogger("kernels").setLevel(logging.ERROR)


@pytest.fixture
def calls(monkeypatch) -> Counter:
    return count_calls(monkeypatch)


def test_a_model_in_both_modes(calls):
    model = build("qwen3_5")
    want = greedy(model)
    model.train()
    model(IDS, labels=IDS).loss.backward()
    grads = [w.grad.clone() for w in model.parameters()]
    model.zero_grad()
    model.eval()
    assert not calls

    kernels.register_kernel_mapping(mapping())
    model.set_use_kernels(True)
    assert torch.equal(greedy(model), want)
    assert calls == {
        "chunk_gated_delta_rule": LINEAR,
        "recurrent_gated_delta_rule": 7 * LINEAR,
    }
    calls.clear()
    model.train()
    model(IDS, labels=IDS).loss.backward()
    assert calls["chunk_gated_delta_rule"] == LINEAR
    for weight, grad in zip(model.parameters(), grads, strict=True):
        assert (weight.grad - grad).norm() <= 2e-3 * grad.norm()


def test_the_entry_for_cuda_survives_that_of_transformers(monkeypatch):
    """`set_use_kernels` registers its own for plain "cuda" after ours."""
    from kernels.layer import repos
    from kernels.layer.device import Device

    monkeypatch.setattr(repos, "_find_capability", lambda: 90)  # a GPU that is not here
    ours, entry = next((d, e) for d, e in mapping()["chunk_gated_delta_rule"].items() if d != "cpu")
    cuda = repos.DeviceRepos.create_repo(Device(type="cuda"))
    cuda.insert(ours, entry)
    cuda.insert(Device(type="cuda"), {kernels.Mode.INFERENCE: "theirs"})
    assert cuda.repos == entry
