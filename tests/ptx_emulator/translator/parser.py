# SPDX-License-Identifier: Apache-2.0
"""Read the text of one PTX module into statements that remember their line.

The parser knows the shape of PTX (functions, scopes, declarations, instructions) and nothing of
what an instruction does.
"""

import re
from dataclasses import dataclass, field

from .types import SIZE, Unsupported, split_list


@dataclass
class Location:
    """A ``.loc``: where an instruction comes from, and through which inlined calls."""

    file: str
    line: int
    column: int
    caller: "Location | None" = None

    def __str__(self) -> str:
        text = f"{self.file}:{self.line}:{self.column}"
        return f"{text} < {self.caller}" if self.caller else text


@dataclass
class Instruction:
    line: int  # of the PTX text
    text: str
    guard: str | None  # "%p1" or "!%p1"
    opcode: str  # "add"
    suffixes: list[str]  # ["rn", "f32"]
    operands: list[str]
    location: Location | None

    @property
    def type(self) -> str:
        return self.suffixes[-1] if self.suffixes else ""

    def has(self, suffix: str) -> bool:
        return suffix in self.suffixes


@dataclass
class Label:
    name: str


@dataclass
class Scope:
    opens: bool


@dataclass
class Registers:
    type: str
    names: list[str]


@dataclass
class BranchTargets:
    name: str
    labels: list[str]


@dataclass
class Variable:
    name: str
    space: str
    type: str
    alignment: int
    count: int  # elements; 0 for an array of unknown size
    external: bool
    values: list[str] | None
    line: int

    @property
    def bytes(self) -> int:
        return SIZE[self.type] * self.count


@dataclass
class Parameter:
    name: str
    bytes: int
    alignment: int


@dataclass
class Function:
    name: str
    is_kernel: bool
    results: list[Parameter]
    parameters: list[Parameter]
    max_threads: int
    body: list


@dataclass
class Module:
    version: str = ""
    target: str = ""
    variables: list[Variable] = field(default_factory=list)
    functions: list[Function] = field(default_factory=list)


_VARIABLE = re.compile(
    r"^((?:\.(?:visible|extern|weak|common|managed)\s+)*)\.(global|const|shared|local|param)\s+"
    r"(?:\.align\s+(\d+)\s+)?(?:\.(v[248])\s+)?\.(\w+)\s+([\w$%]+)\s*"
    r"((?:\[\s*\d*\s*\])*)\s*(?:=\s*(.*))?$",
    re.S,
)
_PARAMETER = re.compile(
    r"^\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+"
    r"(?:\.ptr\s*(?:\.\w+\s*)?(?:\.align\s+\d+\s*)?)?([\w$]+)\s*(?:\[(\d+)\])?$"
)
_FUNCTION = re.compile(r"(?:\.(?:visible|extern|weak|common|noreturn)\s+)*\.(entry|func)\b")
_HEADER = re.compile(
    r"\.(?:entry|func)\s*(\([^)]*\))?\s*([\w$]+)\s*(\(.*?\))?\s*(?:\.[a-z].*)?$", re.S
)
_THREADS = re.compile(r"\.(?:maxntid|reqntid)\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?")
_LOCATION = re.compile(r"^\.loc\s+(\d+)\s+(\d+)\s+(\d+)(?:.*\binlined_at\s+(\d+)\s+(\d+)\s+(\d+))?")
_INSTRUCTION = re.compile(r"^(?:@(!?[%\w$]+)\s+)?([\w.:]+)\s*(.*)$", re.S)
_LABEL = re.compile(r"^\s*([\w$]+)\s*:(?!:)\s*")
_TOKEN = re.compile(r'"[^"]*"|[{};\n]|[^{};\n"]+')


def parse(text: str) -> Module:
    return _Reader(text).module


class _Reader:
    def __init__(self, text: str):
        self.module = Module()
        self.files: dict[str, str] = {}
        self.inlined: dict[tuple[str, str, str], Location] = {}
        self._read(self._strip(text))

    def _strip(self, text: str) -> str:
        """Take out what is not code, keeping every line where it was."""
        blank = lambda match: "\n" * match.group(0).count("\n")  # noqa: E731
        text = re.sub(r"/\*.*?\*/", blank, text, flags=re.S)
        text = re.sub(r'("[^"\n]*")|//[^\n]*', lambda match: match.group(1) or "", text)
        if found := re.search(r"^\s*\.version\s+(\S+)", text, re.M):
            self.module.version = found.group(1)
        if found := re.search(r"^\s*\.target\s+([^\n]*)", text, re.M):
            self.module.target = found.group(1).strip()
        for number, path in re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', text, re.M):
            self.files[number] = path
        text = re.sub(r"^[ \t]*\.(version|target|address_size|file)\b[^\n]*$", "", text, flags=re.M)
        text = re.sub(r"\.section\s+\.\w+\s*\{.*?\}", blank, text, flags=re.S)
        return re.sub(r"^([ \t]*\.loc\b[^\n;]*)$", r"\1;", text, flags=re.M)

    def _read(self, text: str) -> None:
        at, line = 0, 1
        while True:
            while at < len(text) and text[at].isspace():
                line += text[at] == "\n"
                at += 1
            if at >= len(text):
                return
            found = _FUNCTION.match(text, at)
            end = self._end_of_head(text, at, stop_at_brace=bool(found))
            head = text[at:end]
            if found and end < len(text) and text[end] == "{":
                close = self._closing_brace(text, end)
                body_line = line + head.count("\n")
                self._function(found.group(1) == "entry", head, text[end + 1 : close], body_line)
                line = body_line + text.count("\n", end, close)
                at = close + 1
                continue
            if not found and head.strip() and not head.lstrip().startswith((".pragma", ".alias")):
                self.module.variables.append(self._variable(head.strip(), line))
            line += head.count("\n")
            at = end + 1

    @staticmethod
    def _end_of_head(text: str, at: int, *, stop_at_brace: bool) -> int:
        depth = 0
        while at < len(text):
            char = text[at]
            if depth == 0 and (char == ";" or (stop_at_brace and char == "{")):
                return at
            depth += (char in "({") - (char in ")}")
            at += 1
        return at

    @staticmethod
    def _closing_brace(text: str, at: int) -> int:
        depth = 0
        for found in re.compile(r"[{}]").finditer(text, at):
            depth += 1 if found.group() == "{" else -1
            if depth == 0:
                return found.start()
        raise Unsupported("a function body without an end")

    def _variable(self, text: str, line: int) -> Variable:
        found = _VARIABLE.match(text)
        if not found:
            raise Unsupported(f"declaration at PTX line {line}: {text}")
        qualifiers, space, align, vector, kind, name, dims, init = found.groups()
        count, sizes = int(vector[1]) if vector else 1, re.findall(r"\[\s*(\d*)\s*\]", dims)
        alignment = int(align or SIZE[kind] * count)
        for size in sizes:
            count *= int(size or 0)
        values = None
        if init:
            init = init.strip()
            values = split_list(init[1:-1]) if init.startswith("{") else [init]
        external = "extern" in qualifiers or count == 0
        return Variable(name, space, kind, alignment, count, external, values, line)

    def _function(self, is_kernel: bool, head: str, body: str, line: int) -> None:
        found = _HEADER.search(head)
        if not found:
            raise Unsupported(f"function header at PTX line {line}: {head}")
        results, name, parameters = found.groups()
        threads = _THREADS.search(head)
        limit = 1024
        if threads:
            limit = 1
            for extent in threads.groups():
                limit *= int(extent or 1)
        lists = [
            [self._parameter(p) for p in split_list(text[1:-1])] if text else []
            for text in (results, parameters)
        ]
        self.module.functions.append(
            Function(name, is_kernel, *lists, limit, self._statements(body, line))
        )

    @staticmethod
    def _parameter(text: str) -> Parameter:
        found = _PARAMETER.match(text)
        if not found:
            raise Unsupported(f"parameter {text}")
        align, kind, name, count = found.groups()
        return Parameter(name, SIZE[kind] * int(count or 1), int(align or SIZE[kind]))

    def _statements(self, body: str, line: int) -> list:
        out: list = []
        current, start, depth, where = "", line, 0, None
        for token in _TOKEN.findall(body):
            if token == "\n":
                line += 1
                current += " "
            elif token == ";" and depth == 0:
                text = current.strip()
                current = ""
                if text.startswith((".loc ", ".loc\t")):  # not .local
                    where = self._location(text) or where
                elif text.startswith(".branchtargets"):
                    out.append(BranchTargets(out.pop().name, split_list(text.split(None, 1)[1])))
                elif text and not text.startswith((".pragma", ".callprototype")):
                    out.append(self._statement(text, start, where))
            elif token in "{}" and not current.strip():
                out.append(Scope(token == "{"))
            else:
                if not current.strip():
                    start = line
                # A label needs no semicolon, and another statement may follow it.
                while found := _LABEL.match(token) if not current.strip() else None:
                    out.append(Label(found.group(1)))
                    token = token[found.end() :]
                depth += token.count("{") - token.count("}")
                current += token
        return out

    def _location(self, text: str) -> Location | None:
        found = _LOCATION.match(text)
        if not found:
            return None
        number, row, column, *inlined = found.groups()
        if row == "0":
            return None
        caller = self.inlined.get(tuple(inlined)) if inlined[0] else None
        where = Location(self.files.get(number, "?"), int(row), int(column), caller)
        # A later "inlined_at" names this place by the same three numbers.
        self.inlined[tuple(text.split(",")[0].split()[1:4])] = where
        return where

    def _statement(self, text: str, line: int, where: Location | None):
        if text.startswith(".reg"):
            kind, names = re.match(r"^\.reg\s*(?:\.v\d\s*)?\.(\w+)\s+(.*)$", text, re.S).groups()
            expanded = []
            for name in split_list(names):
                run = re.match(r"^(.+?)<(\d+)>$", name)
                expanded += (
                    [f"{run.group(1)}{i}" for i in range(int(run.group(2)))] if run else [name]
                )
            return Registers(kind, expanded)
        if text.startswith("."):
            return self._variable(text, line)
        text = " ".join(text.split())
        guard, opcode, operands = _INSTRUCTION.match(text).groups()
        base, *suffixes = opcode.replace("::", "__").split(".")
        return Instruction(line, text, guard, base, suffixes, split_list(operands), where)
