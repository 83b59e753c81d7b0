# SPDX-License-Identifier: Apache-2.0
"""PTX types and how the generated C++ spells them."""

import re

# Bytes of one element. Registers are kept as unsigned integers of this size.
SIZE = {"pred": 1, "f16x2": 4, "bf16x2": 4, "tf32": 4, "bf16": 2, "f16": 2}
SIZE |= {f"{kind}{bits}": bits // 8 for kind in "bsu" for bits in (8, 16, 32, 64)}
SIZE |= {"f32": 4, "f64": 8, "b128": 16}

FLOATS = ("f32", "f64")
HALVES = ("f16", "bf16", "f16x2", "bf16x2")
SPACES = ("global", "shared", "local", "param", "const")


class Unsupported(Exception):
    """An instruction, operand or declaration that the translator does not know."""


def unsigned(size: int) -> str:
    return f"uint{8 * size}_t"


def bits(ptx_type: str) -> str:
    """The untyped PTX type of the same size."""
    return "pred" if ptx_type == "pred" else f"b{8 * SIZE[ptx_type]}"


def cpp_type(ptx_type: str) -> str:
    """The C++ type whose arithmetic is the PTX type's."""
    special = {"f32": "float", "f64": "double", "pred": "bool"}
    if ptx_type in special:
        return special[ptx_type]
    return ("int" if ptx_type[0] == "s" else "uint") + f"{8 * SIZE[ptx_type]}_t"


def identifier(name: str) -> str:
    """A PTX name as a C++ identifier."""
    return re.sub(r"\W", "_", name.lstrip("%").replace("$", "_"))


def split_list(text: str) -> list[str]:
    """Split at the commas that stand outside brackets."""
    parts, depth, start = [], 0, 0
    for at, char in enumerate(text):
        if char in "[{(":
            depth += 1
        elif char in "]})":
            depth -= 1
        elif char == "," and depth == 0:
            parts.append(text[start:at].strip())
            start = at + 1
    last = text[start:].strip()
    return [*parts, last] if last else parts
