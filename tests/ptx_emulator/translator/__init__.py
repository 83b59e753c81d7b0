# SPDX-License-Identifier: Apache-2.0
"""PTX to C++: ``parser`` reads the text, ``opcodes`` knows the instructions, ``emitter`` writes."""

from .emitter import translate
from .parser import parse

__all__ = ["parse", "translate"]
