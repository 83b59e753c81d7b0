# SPDX-License-Identifier: Apache-2.0
"""Translate PTX to C++: ``parser`` reads the text, ``opcodes`` knows each instruction, ``emitter`` writes the code."""

from .emitter import translate
from .parser import parse

__all__ = ["parse", "translate"]
