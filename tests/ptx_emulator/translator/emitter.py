# SPDX-License-Identifier: Apache-2.0
"""Write one PTX module as C++: a function per kernel, run by each GPU thread on a stack of its own.

Registers become unsigned integers; arithmetic reinterprets them. ``c`` is the running thread, ``P``
the kernel's parameters. An instruction that the opcode table does not know becomes a call that
stops the thread when it is reached.
"""

import re

from . import opcodes
from .parser import BranchTargets, Function, Instruction, Label, Module, Registers, Scope, Variable
from .types import (
    SIZE,
    Unsupported,
    bits,
    cpp_type,
    identifier,
    literal,
    split_list,
    unsigned,
)

SPECIAL_VECTORS = {"tid": "c->tid", "ntid": "c->ntid", "ctaid": "c->ctaid", "nctaid": "c->nctaid"}
SPECIAL = {
    "laneid": "c->lane",
    "warpid": "c->warp",
    "nwarpid": "((c->ntid[0] * c->ntid[1] * c->ntid[2] + 31) / 32)",
    "smid": "0u",
    "nsmid": "1u",
    "gridid": "0u",
    "lanemask_eq": "(1u << c->lane)",
    "lanemask_lt": "((1u << c->lane) - 1u)",
    "lanemask_le": "((2u << c->lane) - 1u)",
    "lanemask_ge": "~((1u << c->lane) - 1u)",
    "lanemask_gt": "~((2u << c->lane) - 1u)",
    "clock": "(uint32_t)clock_ticks(c)",
    "clock64": "clock_ticks(c)",
    "globaltimer": "clock_ticks(c)",
    "dynamic_smem_size": "c->dynamic_size",
    "total_smem_size": "c->shared_size",
    "cluster_ctarank": "0u",
    "cluster_nctarank": "1u",
    "envreg1": "0u",
    "envreg2": "0u",
}
AS_REAL = {"f32": "AS_FLOAT", "f64": "AS_DOUBLE"}
BITS_OF = {"f32": "FLOAT_BITS", "f64": "DOUBLE_BITS"}
_FLOAT, _DOUBLE = re.compile(r"^0[fF][0-9a-fA-F]{8}$"), re.compile(r"^0[dD][0-9a-fA-F]{16}$")
_SUM = re.compile(r"^(.+?)\s*([+-])\s*(-?\d+)$")
INTEGER = re.compile(r"^[-+]?(0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?$")


def translate(module: Module, *, count: bool = False) -> str:
    return ModuleEmitter(module, count).cpp()


class FunctionEmitter:
    """One function body. The opcode table builds on ``value``, ``assign`` and ``address``."""

    def __init__(self, module: "ModuleEmitter", function: Function):
        self.module, self.function = module, function
        self.scopes: list[dict] = [{}]
        self.values: list[dict] = [{}]  # what value() has found, by scope
        self.registers: list[tuple[str, str]] = []  # (C++ type, name)
        self.arrays: list[str] = []
        self.code: list[str] = []
        self.pending: dict[str, int] = {}
        self.local_bytes = 0
        self.local_arrays: list[tuple[str, int]] = []  # name, bytes
        self.shared_bytes = 0
        self.uses: set[str] = set()  # module-level shared variables and called functions
        self.targets: dict[str, list[str]] = {}
        self.uses_carry = False

    # ---- names ----

    def lookup(self, name: str):
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        found = self.module.symbols.get(name)
        if found and found[0] == "shared":
            self.uses.add(name)
        return found

    def label(self, name: str) -> str:
        for scope in reversed(self.scopes):
            if f"{name}:" in scope:
                return scope[f"{name}:"]
        raise Unsupported(f"label {name}")

    # ---- operands ----

    def raw(self, operand: str) -> tuple[str, str]:
        """The C++ of an operand, and its kind: register, integer, bits32, bits64 or address."""
        operand = operand.strip()
        found = self.lookup(operand)
        if found and found[0] == "register":
            return found[1], "register"
        if _FLOAT.match(operand):
            return f"0x{operand[2:]}u", "bits32"
        if _DOUBLE.match(operand):
            return f"0x{operand[2:]}ull", "bits64"
        if INTEGER.match(operand):
            number = int(operand.rstrip("U"), 0)
            return (
                f"({number}ll)"
                if -(2**63) < number < 2**63
                else f"((long long){number % 2**64}ull)"
            ), "integer"
        if operand == "WARP_SZ":
            return "32", "integer"
        if operand.startswith("%"):
            base, _, axis = operand[1:].partition(".")
            if base in SPECIAL_VECTORS and axis:
                return f"{SPECIAL_VECTORS[base]}[{'xyz'.index(axis)}]", "register"
            if base in SPECIAL:
                return SPECIAL[base], "register"
        if found is None:
            if sum_ := _SUM.match(operand):
                text, kind = self.raw(sum_.group(1))
                return f"({text} {sum_.group(2)} ({sum_.group(3)}))", kind
            raise Unsupported(f"operand {operand}")
        kind, text = found[0], found[1]
        if kind in ("shared", "param"):
            return f"(uint64_t)({text})", "address"
        return f"(uint64_t)(uintptr_t){text}", "address"

    def value(self, operand: str, ptx_type: str) -> str:
        """The operand read as a PTX type."""
        values = self.values[-1]
        if (operand, ptx_type) not in values:
            values[operand, ptx_type] = self._value(operand.strip(), ptx_type)
        return values[operand, ptx_type]

    def _value(self, operand: str, ptx_type: str) -> str:
        if ptx_type == "pred":
            if operand.startswith("!"):
                return f"!{self.value(operand[1:], 'pred')}"
            text, kind = self.raw(operand)
            return text if kind == "register" else f"({text} != 0)"
        text, kind = self.raw(operand)
        if ptx_type == "f32" and kind == "bits64":
            return f"(float)AS_DOUBLE({text})"
        if ptx_type in ("f32", "f64"):
            return f"{AS_REAL[ptx_type]}({self.value(operand, bits(ptx_type))})"
        kept = {"bits32": "uint32_t", "bits64": "uint64_t"}.get(kind) or self.kept_as(operand)
        if kept == cpp_type(ptx_type):
            return text  # a cast would change nothing, and there are millions for g++ to read
        if kind == "integer":
            return literal(self.constant(operand), ptx_type)
        return f"({cpp_type(ptx_type)}){text}"

    def constant(self, operand: str) -> int | None:
        """The value of an operand that is written as an integer."""
        operand = operand.strip().replace("WARP_SZ", "32")
        return int(operand.rstrip("U"), 0) if INTEGER.match(operand) else None

    def kept_as(self, operand: str) -> str | None:
        """The C++ type of a declared register."""
        found = self.lookup(operand)
        return unsigned(SIZE[found[2]]) if found and found[0] == "register" else None

    def assign(self, operand: str, ptx_type: str, expression: str) -> str:
        """The statement that writes an expression of a PTX type to a register.

        Narrow signed values are sign-extended.
        """
        operand = operand.strip()
        if operand == "_":
            return f"(void)({expression});"
        found = self.lookup(operand)
        if found is None or found[0] != "register":
            raise Unsupported(f"destination {operand}")
        name, register = found[1], found[2]
        if ptx_type == "pred":
            return f"{name} = {expression};"
        if ptx_type in ("f32", "f64"):
            return f"{name} = {BITS_OF[ptx_type]}({expression});"
        if SIZE[register] == SIZE[ptx_type]:
            return f"{name} = {expression};"
        wide = ("int" if ptx_type[0] == "s" else "uint") + f"{8 * SIZE[register]}_t"
        return f"{name} = ({wide})({cpp_type(ptx_type)})({expression});"

    def address(self, operand: str, space: str, size: int, i: Instruction, access: str) -> str:
        """The checked host pointer of ``[operand]`` for an access of ``size`` bytes."""
        inner = operand.strip()[1:-1].strip()
        base, offset = inner, 0
        if (found := _SUM.match(inner)) and self.lookup(inner) is None:
            base, offset = (
                found.group(1),
                int(found.group(3)) * (1 if found.group(2) == "+" else -1),
            )
        symbol = self.lookup(base)
        text = self.raw(base)[0]
        if offset:
            text = f"{text} + {offset}" + ("" if -(2**31) < offset < 2**31 else "ll")
        if space == "param" or (symbol and symbol[0] == "param"):
            return f"(uint8_t*)(uintptr_t)({text})"
        if space == "shared" or (not space and symbol and symbol[0] == "shared"):
            return f"shared_at(c, {text}, {size}, {self.site(i)}, {access})"
        if space == "local" and len(self.local_arrays) == 1:  # nvcc lays all of them into one
            name, limit = self.local_arrays[0]
            at = f"(uint64_t)(uintptr_t)({text})"
            return f"local_at(c, {at}, {size}, {self.site(i)}, {name}, {limit})"
        if space == "local":
            return f"(uint8_t*)(uintptr_t)({text})"
        return f"generic_at(c, (uint64_t)({text}), {size}, {self.site(i)}, {access})"

    def vector(self, operand: str) -> list[str]:
        operand = operand.strip()
        return split_list(operand[1:-1]) if operand.startswith("{") else [operand]

    def site(self, i: Instruction) -> int:
        return self.module.site(i)

    # ---- statements ----

    def emit(self, text: str) -> None:
        self.code.append(text)

    def flush_counts(self) -> None:
        if self.module.count and self.pending:
            self.emit(" ".join(f"c->executed[{name}] += {n};" for name, n in self.pending.items()))
        self.pending = {}

    def instruction(self, i: Instruction) -> None:
        name = opcodes.instruction_class(i)
        self.pending[name] = self.pending.get(name, 0) + 1
        handler = opcodes.TABLE.get(i.opcode)
        try:
            if handler is None:
                raise Unsupported(f"instruction {i.opcode}")
            body = handler(self, i)
            guard = self.value(i.guard, "pred") if i.guard else None
        except (Unsupported, KeyError, IndexError, StopIteration, ValueError):
            body, guard = f"unsupported(c, {self.site(i)});", None
        if i.guard or i.opcode in ("bra", "brx", "ret", "exit", "call"):
            self.flush_counts()
        if guard and body.count(";") > 1 and not body.startswith("{"):
            body = f"{{ {body} }}"
        self.emit(f"if ({guard}) {body}" if guard else body)

    def declare(self, v: Variable) -> None:
        if v.space == "shared":
            if v.external:
                self.scopes[-1][v.name] = ("shared", "c->dynamic_offset")
                self.module.dynamic_alignment = max(self.module.dynamic_alignment, v.alignment)
                return
            self.shared_bytes = -(-self.shared_bytes // v.alignment) * v.alignment
            offset = self.shared_bytes
            self.shared_bytes += v.bytes
            base = "" if not self.module.shared_bytes else f"{self.module.shared_bytes} + "
            self.scopes[-1][v.name] = ("shared", f"{base}{offset}")
            return
        if v.space in ("local", "param"):
            name = f"m{len(self.arrays)}_{identifier(v.name)}"
            self.arrays.append(
                f"alignas({max(v.alignment, 16)}) uint8_t {name}[{max(v.bytes, 1)}];"
            )
            self.local_bytes += v.bytes
            if v.space == "local":
                self.local_arrays.append((name, v.bytes))
            self.scopes[-1][v.name] = (v.space, name)
            return
        self.module.declare(v)

    def body(self) -> None:
        """First the labels of every scope (a branch may go forward), then the statements."""
        labels: dict[int, dict[str, str]] = {0: {}}
        opened: dict[int, int] = {}
        stack, scopes = [0], 0
        for at, statement in enumerate(self.function.body):
            if isinstance(statement, Scope) and statement.opens:
                scopes += 1
                opened[at] = scopes
                labels[scopes] = {}
                stack.append(scopes)
            elif isinstance(statement, Scope):
                stack.pop()
            elif isinstance(statement, Label):
                labels[stack[-1]][f"{statement.name}:"] = (
                    f"L{stack[-1]}_{identifier(statement.name)}"
                )
        self.scopes[0].update(labels[0])
        for at, statement in enumerate(self.function.body):
            if isinstance(statement, Scope):
                if statement.opens:
                    self.scopes.append({"#": opened[at], **labels[opened[at]]})
                    self.values.append({})
                else:
                    self.scopes.pop()
                    self.values.pop()
            elif isinstance(statement, Label):
                self.flush_counts()
                self.emit(f"{self.label(statement.name)}:;")
            elif isinstance(statement, Registers):
                prefix = f"s{self.scopes[-1]['#']}_" if len(self.scopes) > 1 else "v_"
                for name in statement.names:
                    c_name = prefix + identifier(name)
                    self.scopes[-1][name] = ("register", c_name, statement.type)
                    kind = "bool" if statement.type == "pred" else unsigned(SIZE[statement.type])
                    self.registers.append((kind, c_name))
            elif isinstance(statement, BranchTargets):
                self.targets[statement.name] = statement.labels
            elif isinstance(statement, Variable):
                self.declare(statement)
            else:
                self.instruction(statement)
        self.flush_counts()


class ModuleEmitter:
    def __init__(self, module: Module, count: bool):
        self.parsed, self.count = module, count
        self.symbols: dict[str, tuple] = {}
        self.functions = {f.name: f for f in module.functions}
        self.globals: list[str] = []
        self.variables: list[tuple[str, str, int, bool]] = []
        self.shared_bytes, self.dynamic_alignment = 0, 16
        self.sites: list[Instruction] = []
        self.site_of: dict[int, int] = {}

    def site(self, i: Instruction) -> int:
        if id(i) not in self.site_of:
            self.site_of[id(i)] = len(self.sites)
            self.sites.append(i)
        return self.site_of[id(i)]

    def declare(self, v: Variable) -> None:
        """A module-level variable, or a static one inside a function."""
        if v.space == "shared":
            if v.external:
                self.dynamic_alignment = max(self.dynamic_alignment, v.alignment)
                self.symbols[v.name] = ("shared", "c->dynamic_offset")
                return
            self.shared_bytes = -(-self.shared_bytes // v.alignment) * v.alignment
            self.symbols[v.name] = ("shared", str(self.shared_bytes))
            self.shared_bytes += v.bytes
            return
        name = f"g_{identifier(v.name)}"
        self.symbols[v.name] = ("global", name)
        if v.external:
            raise Unsupported(
                f"external variable {v.name} at PTX line {v.line}: link the module without -rdc"
            )
        data, relocations = bytearray(), []
        for at, text in enumerate(v.values or []):
            text = text.strip()
            if text[:2].lower() in ("0f", "0d"):
                number = int(text[2:], 16)
            elif INTEGER.match(text):
                number = int(text.rstrip("U"), 0)
            else:
                number = 0
                relocations.append(
                    f"{{{name}, {at * SIZE[v.type]}, (uint64_t){self._symbol(text, v)}}}"
                )
            data += (number % (1 << (8 * SIZE[v.type]))).to_bytes(SIZE[v.type], "little")
        size = max(v.bytes, 1)
        initial = ", ".join(map(str, data))
        self.globals.append(
            f"alignas({max(v.alignment, 16)}) uint8_t {name}[{size}] = {{{initial}}};"
        )
        self.globals += [
            f"const Relocation relocation_{name}_{n}{r};" for n, r in enumerate(relocations)
        ]
        self.variables.append((v.name, name, size, v.space == "const"))

    def _symbol(self, text: str, v: Variable) -> str:
        inner = re.match(r"^generic\((.*)\)$", text)
        found = self.symbols.get(inner.group(1) if inner else text)
        if not found:
            raise Unsupported(f"initial value {text} of {v.name} at PTX line {v.line}")
        return found[1]

    def _reachable(self, uses: dict[str, set[str]], name: str) -> set[str]:
        seen, todo = set(), [name]
        while todo:
            at = todo.pop()
            if at not in seen:
                seen.add(at)
                todo += uses.get(at, ())
        return seen

    def cpp(self) -> str:
        for variable in self.parsed.variables:
            self.declare(variable)
        bodies, emitters = [], []
        for function in self.parsed.functions:
            emitter = FunctionEmitter(self, function)
            emitters.append((emitter, *self._signature(emitter)))
        for emitter, signature, *_ in emitters:
            emitter.body()
            bodies.append(self._definition(emitter, signature))
        uses = {e.function.name: e.uses for e, *_ in emitters}
        kernels = [
            self._kernel(e, offsets, self._reachable(uses, e.function.name))
            for e, _, offsets in emitters
            if e.function.is_kernel
        ]
        prototypes = [f"{signature};" for e, signature, *_ in emitters if not e.function.is_kernel]
        sites = [self._site(i) for i in self.sites]
        variables = [
            f'{{"{n}", {c}, {size}, {int(const)}}}' for n, c, size, const in self.variables
        ]
        parts = [
            '#include "device.h"',
            "using namespace ptx;",
            "namespace {",
            *self.globals,
            *prototypes,
            *bodies,
        ]
        parts += [f"const Site sites[] = {{{', '.join(sites) or '{}'}}};"]
        parts += [f"const Variable variables[] = {{{', '.join(variables) or '{}'}}};"]
        parts += [f"const Kernel kernels[] = {{{', '.join(k for k, _ in kernels) or '{}'}}};"]
        parts[-1:-1] = [arrays for _, arrays in kernels]
        parts += ["}  // namespace"]
        parts += [
            'extern "C" const CompiledModule ptx_module = '
            f"{{kernels, {len(kernels)}, variables, {len(variables)}, sites, {len(sites)}}};"
        ]
        return "\n".join(parts) + "\n"

    def _signature(self, e: FunctionEmitter) -> tuple[str, list[tuple[int, int]]]:
        f = e.function
        if f.is_kernel:
            offset, layout = 0, []
            for p in f.parameters:
                offset = -(-offset // p.alignment) * p.alignment
                e.scopes[0][p.name] = ("param", f"P + {offset}")
                layout.append((offset, p.bytes))
                offset += p.bytes
            return f"static void kernel_{identifier(f.name)}(Thread* c, const uint8_t* P)", layout
        names = ["Thread* c"]
        for p in [*f.results, *f.parameters]:
            names.append(f"uint8_t* P_{identifier(p.name)}")
            e.scopes[0][p.name] = ("param", f"P_{identifier(p.name)}")
        return f"static void function_{identifier(f.name)}({', '.join(names)})", []

    @staticmethod
    def _definition(e: FunctionEmitter, signature: str) -> str:
        lines = [signature + " {"]
        for kind in sorted({k for k, _ in e.registers}):
            names = [f"{name} = 0" for k, name in e.registers if k == kind]
            lines.append(f"  {kind} {', '.join(names)};")
        if e.uses_carry:
            lines.append("  uint32_t carry = 0;")
        return "\n".join([*lines, *e.arrays, *e.code, "}"])

    def _kernel(self, e: FunctionEmitter, layout: list, reachable: set[str]) -> tuple[str, str]:
        f, name = e.function, identifier(e.function.name)
        uses_module = any(self.symbols.get(n, ("",))[0] == "shared" for n in reachable)
        base = self.shared_bytes if uses_module or e.shared_bytes else 0
        shared = base + e.shared_bytes
        size = max((offset + n for offset, n in layout), default=0)
        offsets = ", ".join(str(offset) for offset, _ in layout) or "0"
        sizes = ", ".join(str(n) for _, n in layout) or "0"
        arrays = f"const uint32_t offsets_{name}[] = {{{offsets}}}, sizes_{name}[] = {{{sizes}}};"
        return (
            f'{{"{f.name}", kernel_{name}, sites, {shared}, {self.dynamic_alignment}, '
            f"{len(layout)}, "
            f"offsets_{name}, sizes_{name}, {size}, {f.max_threads}, {e.local_bytes}}}",
            arrays,
        )

    @staticmethod
    def _site(i: Instruction) -> str:
        def quote(text: str) -> str:
            return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'

        where = str(i.location) if i.location else ""
        return f"{{{i.line}, {quote(i.text)}, {quote(where)}}}"


__all__ = ["Unsupported", "bits", "translate"]
