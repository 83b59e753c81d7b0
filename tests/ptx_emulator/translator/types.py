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

_NO_WORD, _BRACKET = re.compile(r"\W"), re.compile(r"[\[\]{}()]")


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


def literal(number: int, ptx_type: str) -> str:
    """A number as a C++ literal of the type: a cast for each of them is much for g++ to read."""
    size = 8 * SIZE[ptx_type]
    number %= 1 << size
    if ptx_type[0] == "s" and number >> (size - 1):
        number -= 1 << size
    if size < 32 or number == -(1 << (size - 1)):  # the smallest number has no literal
        return f"({cpp_type(ptx_type)})({number}ll)" if size < 64 else "INT64_MIN"
    text = f"{number}" + {"s32": "", "s64": "ll"}.get(ptx_type, "u" if size == 32 else "ull")
    return f"({text})" if number < 0 else text


def identifier(name: str) -> str:
    """A PTX name as a C++ identifier."""
    name = name.lstrip("%")
    return name if name.isidentifier() and name.isascii() else _NO_WORD.sub("_", name)


def split_list(text: str) -> list[str]:
    """Split at the commas that stand outside brackets."""
    if not _BRACKET.search(text):
        parts = [part.strip() for part in text.split(",")]
        return parts if parts[-1] else parts[:-1]
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
