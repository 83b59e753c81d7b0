# SPDX-License-Identifier: Apache-2.0
"""The examples in docstrings are run."""

import doctest
import importlib
from types import ModuleType

import pytest

import deltanet_ext
from deltanet_ext import layer, ops

MODULES = [
    "deltanet_ext",
    "deltanet_ext._settings",
    "deltanet_ext.layer",
    "deltanet_ext.ops",
    "deltanet_ext.reference",
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    module: ModuleType = importlib.import_module(name)
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize("name", sorted({*layer.__all__, *ops.__all__}))
def test_every_public_function_has_an_example(name: str) -> None:
    doc = getattr(deltanet_ext, name).__doc__
    assert doc is not None
    assert ">>>" in doc
