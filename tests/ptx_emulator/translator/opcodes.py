# SPDX-License-Identifier: Apache-2.0
"""What each PTX instruction does, as the C++ statement that does it.

One function per family, registered under its base opcode: it takes the emitter (operands,
registers, addresses) and the instruction, and returns C++. Helpers with a name of their own
(``add_saturating``, ``round_half``) are in ``numbers.h``. A form that is not listed raises
``Unsupported`` and stops the thread that reaches it.
"""

from .types import (
    FLOATS,
    HALVES,
    SIZE,
    SPACES,
    Unsupported,
    bits,
    cpp_type,
    identifier,
    unsigned,
)

TABLE: dict = {}
ROUNDING = {"rn": "kNearest", "rz": "kTowardZero", "rm": "kDown", "rp": "kUp"}
COMPARE = {
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "lo": "<",
    "ls": "<=",
    "hi": ">",
    "hs": ">=",
}
# Floats: a comparison with NaN is false, its opposite true.
REAL_COMPARE = {
    "eq": "({x} == {y})",
    "ne": "({x} < {y} || {x} > {y})",
    "lt": "({x} < {y})",
    "le": "({x} <= {y})",
    "gt": "({x} > {y})",
    "ge": "({x} >= {y})",
    "equ": "!({x} < {y} || {x} > {y})",
    "neu": "({x} != {y})",
    "ltu": "!({x} >= {y})",
    "leu": "!({x} > {y})",
    "gtu": "!({x} <= {y})",
    "geu": "!({x} < {y})",
    "num": "!unordered({x}, {y})",
    "nan": "unordered({x}, {y})",
}


def opcode(*names):
    def register(function):
        for name in names:
            TABLE[name] = function
        return function

    return register


def directed(i) -> str | None:
    """The rounding mode that is not the default one."""
    return next((ROUNDING[s] for s in i.suffixes if s in ("rz", "rm", "rp")), None)


def space_of(i) -> str:
    names = (s.split("__")[0] for s in i.suffixes)
    return next((s for s in names if s in SPACES), "")


# ---- classes, for the counters ----

_CLASSES = {
    "kControl": ("bra", "brx", "ret", "exit", "call", "trap", "brkpt", "nanosleep"),
    "kSpecial": ("ex2", "lg2", "sin", "cos", "tanh", "rsqrt", "rcp", "sqrt", "div"),
    "kConvert": ("cvt",),
    "kMove": ("mov", "selp", "slct", "prmt", "setp", "set", "cvta", "isspacep"),
    "kCollective": ("shfl", "vote", "match", "redux", "activemask", "movmatrix", "elect"),
    "kBarrier": ("bar", "barrier"),
    "kFence": ("membar", "fence"),
    "kMatrixLoad": ("ldmatrix", "stmatrix"),
    "kMatrix": ("mma",),
    "kAsyncCopy": ("cp",),
    "kAtomic": ("atom", "red"),
}
_CLASS_OF = {name: kind for kind, names in _CLASSES.items() for name in names}


def instruction_class(i) -> str:
    if i.opcode in ("ld", "ldu", "st"):
        space, verb = space_of(i), "Store" if i.opcode == "st" else "Load"
        return {
            "shared": f"kShared{verb}",
            "param": "kParameter",
            "const": "kParameter",
            "local": "kLocal",
        }.get(space, f"kGlobal{verb}")
    if i.opcode in _CLASS_OF and not (i.opcode == "div" and i.type not in FLOATS):
        return _CLASS_OF[i.opcode]
    if i.type in FLOATS:
        return "kFloat32" if i.type == "f32" else "kFloat64"
    return "kHalf" if i.type in HALVES else "kInteger"


# ---- control ----


@opcode("bra")
def _bra(e, i):
    return f"goto {e.label(i.operands[0])};"


@opcode("brx")
def _brx(e, i):
    labels = e.targets[i.operands[1]]
    cases = " ".join(f"case {n}: goto {e.label(name)};" for n, name in enumerate(labels))
    index = e.value(i.operands[0], "u32")
    return f"switch ({index}) {{ {cases} default: unsupported(c, {e.site(i)}); }}"


@opcode("ret")
def _ret(e, i):
    return "return;"


@opcode("exit")
def _exit(e, i):
    return "thread_exit(c);"


@opcode("trap", "brkpt")
def _trap(e, i):
    return f"trap(c, {e.site(i)});"


@opcode("nanosleep")
def _nanosleep(e, i):
    return f"yield(c, {e.site(i)}, true);"


@opcode("membar", "fence")
def _fence(e, i):
    return "memory_fence(c);"


@opcode("prefetch", "prefetchu", "discard", "applypriority", "griddepcontrol")
def _hint(e, i):
    return ";"


@opcode("call")
def _call(e, i):
    operands = list(i.operands)
    results = e.vector("{" + operands.pop(0)[1:-1] + "}") if operands[0].startswith("(") else []
    name = operands[0]
    arguments = e.vector("{" + operands[1][1:-1] + "}") if len(operands) > 1 else []
    buffer = lambda p: f"(uint8_t*)({e.lookup(p)[1]})"  # noqa: E731
    text = lambda p: f"(const char*)load<uint64_t>({buffer(p)})"  # noqa: E731
    if name == "vprintf":
        values = f"(const uint8_t*)load<uint64_t>({buffer(arguments[1])})"
        return (
            f"store<int32_t>({buffer(results[0])}, device_printf({text(arguments[0])}, {values}));"
        )
    if name == "__assertfail":
        message, file, line, function = arguments[:4]
        number = f"load<uint32_t>({buffer(line)})"
        return f"device_assert(c, {text(message)}, {text(file)}, {number}, {text(function)});"
    if name not in e.module.functions:
        raise Unsupported(f"call of {name}")
    e.uses.add(name)
    passed = ["c", *(buffer(p) for p in results + arguments)]
    return f"function_{identifier(name)}({', '.join(passed)});"


# ---- moves, conversions ----


@opcode("mov")
def _mov(e, i):
    to, source, t = i.operands[0], i.operands[1], i.type
    if to.startswith("{"):
        parts = e.vector(to)
        width = SIZE[t] // len(parts)
        x, apart = e.value(source, bits(t)), source not in parts
        writes = " ".join(
            e.assign(p, f"b{8 * width}", f"{x if apart else 't_'} >> {8 * width * n}")
            for n, p in enumerate(parts)
            if p != "_"
        )
        return writes if apart else f"{{ {unsigned(SIZE[t])} t_ = {x}; {writes} }}"
    if source.startswith("{"):
        parts = e.vector(source)
        width = SIZE[t] // len(parts)
        whole = unsigned(SIZE[t])
        return e.assign(
            to,
            bits(t),
            " | ".join(
                f"({whole}){e.value(p, f'b{8 * width}')} << {8 * width * n}"
                for n, p in enumerate(parts)
            ),
        )
    return e.assign(to, bits(t), e.value(source, bits(t)))


@opcode("cvta")
def _cvta(e, i):
    text, window = e.value(i.operands[1], "u64"), "(uint64_t)(uintptr_t)c->shared"
    if space_of(i) == "shared":
        text = f"{text} - {window}" if i.has("to") else f"{text} + {window}"
    return e.assign(i.operands[0], "u64", text)


@opcode("isspacep")
def _isspacep(e, i):
    inside = f"({e.value(i.operands[1], 'u64')} - (uint64_t)(uintptr_t)c->shared < c->shared_size)"
    if space_of(i) == "shared":
        return e.assign(i.operands[0], "pred", inside)
    if space_of(i) == "global":
        return e.assign(
            i.operands[0], "pred", f"!{inside} && !on_own_stack(c, {e.value(i.operands[1], 'u64')})"
        )
    if space_of(i) == "local":
        return e.assign(i.operands[0], "pred", f"on_own_stack(c, {e.value(i.operands[1], 'u64')})")
    raise Unsupported("isspacep")


def _as_real(e, operand, t):
    """An operand of any float type as the C++ float or double that holds it exactly."""
    if t in ("f16", "bf16"):
        return f"{'half' if t == 'f16' else 'bfloat'}_value({e.value(operand, 'b16')})"
    return e.value(operand, t)


@opcode("cvt")
def _cvt(e, i):
    to, source = i.suffixes[-2], i.suffixes[-1]
    modifiers = i.suffixes[:-2]
    if any(s in modifiers for s in ("rs", "xorsign", "pack")):
        raise Unsupported("cvt")
    mode = directed(i) or "kNearest"
    relu, saturate, flush = (
        "relu" in modifiers,
        "sat" in modifiers or "satfinite" in modifiers,
        "ftz" in modifiers,
    )
    if to in ("f16x2", "bf16x2"):  # the first source is the upper half
        if source != "f32" or len(i.operands) != 3 or saturate:
            raise Unsupported("cvt")
        halves = []
        for operand in i.operands[1:3]:
            x = e.value(operand, "f32")
            x = f"relu({x})" if relu else x
            halves.append(x)
        name = f"{'half' if to == 'f16x2' else 'bfloat'}_pair"
        return e.assign(i.operands[0], "b32", f"{name}({', '.join(halves)}, {mode})")
    if to == "tf32":
        if source != "f32" or saturate:
            raise Unsupported("cvt")
        x = e.value(i.operands[1], "f32")
        x = f"relu({x})" if relu else x
        return e.assign(
            i.operands[0],
            "b32",
            f"round_tf32({x}, {'true' if 'rna' in modifiers else 'false'}, {mode})",
        )
    from_float, to_float = source in (*FLOATS, "f16", "bf16"), to in (*FLOATS, "f16", "bf16")
    if source in ("e4m3x2", "e5m2x2") or to in ("e4m3x2", "e5m2x2"):
        raise Unsupported("cvt")
    x = _as_real(e, i.operands[1], source)
    if flush and source == "f32":
        x = f"flush({x})"
    integral = next((s for s in modifiers if s in ("rni", "rzi", "rmi", "rpi")), None)
    if from_float and integral:
        names = {"rni": "nearbyint", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}
        x = f"std::{names[integral]}({x})"
    if from_float and not to_float:
        wide = source == "f64" or to in ("s64", "u64")
        return e.assign(
            i.operands[0], to, f"to_integer<{cpp_type(to)}>({x}, {'true' if wide else 'false'})"
        )
    if to in ("f16", "bf16"):
        x = f"relu({x})" if relu else f"saturate((double)({x}))" if saturate else x
        return e.assign(
            i.operands[0], "b16", f"round_{'half' if to == 'f16' else 'bfloat'}({x}, {mode})"
        )
    if to_float:
        if mode != "kNearest":
            x = f"convert_rounded<{cpp_type(to)}>({x}, {mode})"
        elif source != to:
            x = f"({cpp_type(to)})({x})"
        x = f"flush({x})" if flush and to == "f32" else x
        x = f"relu({x})" if relu else x
        return e.assign(i.operands[0], to, f"saturate({x})" if saturate else x)
    if saturate:
        x = f"clamp_integer<{cpp_type(to)}>({x})"
    return e.assign(i.operands[0], to, x)


# ---- memory ----


def _memory(i):
    """(space, elements, element type, access) of a load or store."""
    count = next((int(s[1]) for s in i.suffixes if s in ("v2", "v4", "v8")), 1)
    return space_of(i), count, i.type


def _word(t):
    """Elements of memory in plain loads and stores (device.h)."""
    return f"Memory{8 * SIZE[t]}"


@opcode("ld", "ldu")
def _ld(e, i):
    space, count, t = _memory(i)
    strong = any(i.has(s) for s in ("volatile", "relaxed", "acquire", "cg", "cv", "mmio"))
    t = t if t[0] == "s" else bits(t)
    if SIZE[t] > 8:
        raise Unsupported("ld.b128")
    pointer = e.address(
        i.operands[1], space, SIZE[t] * count, i, "kStrongLoad" if strong else "kLoad"
    )
    to = e.vector(i.operands[0])
    if strong:
        read = f"load_strong<{cpp_type(t)}>(p_ + {{}} * {SIZE[t]})"
        pause = f"yield(c, {e.site(i)}, false); " if space != "param" else ""
        first = f"{pause}const uint8_t* p_ = {pointer};"
    elif len(to) == 1:
        return e.assign(to[0], t, f"*({_word(t)}*)({pointer})")
    else:
        read, first = "p_[{}]", f"{_word(t)}* p_ = ({_word(t)}*)({pointer});"
    writes = (e.assign(x, t, read.format(n)) for n, x in enumerate(to))
    return f"{{ {first} {' '.join(writes)} }}"


@opcode("st")
def _st(e, i):
    space, count, t = _memory(i)
    strong = any(i.has(s) for s in ("volatile", "relaxed", "release", "cg", "wt", "mmio"))
    if SIZE[t] > 8:
        raise Unsupported("st.b128")
    access = "kStoreRelease" if i.has("release") else "kStoreRelaxed" if strong else "kStore"
    pointer = e.address(i.operands[0], space, SIZE[t] * count, i, access)
    values = [e.value(x, bits(t)) for x in e.vector(i.operands[1])]
    if strong:
        write = f"store_strong<{unsigned(SIZE[t])}>(p_ + {{}} * {SIZE[t]}, {{}});"
        first = f"uint8_t* p_ = {pointer};"
    elif len(values) == 1:
        return f"*({_word(t)}*)({pointer}) = {values[0]};"
    else:
        write, first = "p_[{}] = {};", f"{_word(t)}* p_ = ({_word(t)}*)({pointer});"
    return f"{{ {first} {' '.join(write.format(n, x) for n, x in enumerate(values))} }}"


@opcode("atom", "red")
def _atom(e, i):
    t, operands = i.type, i.operands if i.opcode == "atom" else ["_", *i.operands]
    if any(i.has(s) for s in ("v2", "v4", "v8")) or SIZE[t] > 8:
        raise Unsupported("vector atomic")
    names = ("add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec")
    operation = next(s for s in i.suffixes if s in names)
    access = "kAtomicRelease" if i.has("release") or i.has("acq_rel") else "kAtomicRelaxed"
    word, pointer = unsigned(SIZE[t]), e.address(operands[1], space_of(i), SIZE[t], i, access)
    b = e.value(operands[2], bits(t))
    if t in HALVES:
        if operation not in ("add", "min", "max", "exch"):
            raise Unsupported("atom")
        new = (
            "b_" if operation == "exch" else f"{_HALF_NAMES[operation]}<{_half_format(t)}>(o_, b_)"
        )
    elif t in FLOATS:
        real, pack = ("as_float", "float_bits") if t == "f32" else ("as_double", "double_bits")
        new = {
            "add": f"{pack}({real}(o_) + {real}(b_))",
            "min": f"{pack}(minimum({real}(o_), {real}(b_)))",
            "max": f"{pack}(maximum({real}(o_), {real}(b_)))",
            "exch": "b_",
        }[operation]
    else:
        n = cpp_type(t)
        new = {
            "add": "o_ + b_",
            "and": "o_ & b_",
            "or": "o_ | b_",
            "xor": "o_ ^ b_",
            "exch": "b_",
            "min": f"({n})o_ < ({n})b_ ? o_ : b_",
            "max": f"({n})o_ > ({n})b_ ? o_ : b_",
            "inc": "o_ >= b_ ? 0 : o_ + 1",
            "dec": "o_ == 0 || o_ > b_ ? b_ : o_ - 1",
            "cas": "o_ == b_ ? d_ : o_",
        }[operation]
    swap = f"{word} d_ = {e.value(operands[3], bits(t))}; " if operation == "cas" else ""
    update = f"atomic_update<{word}>({pointer}, [=]({word} o_) -> {word} {{ return {new}; }})"
    update = e.assign(operands[0], bits(t), update)
    return f"{{ {word} b_ = {b}; {swap}yield(c, {e.site(i)}, false); {update} }}"


@opcode("cp")
def _cp(e, i):
    if i.suffixes[0] != "async":
        raise Unsupported("cp")
    kind = i.suffixes[1]
    if kind == "commit_group":
        return "async_commit(c);"
    if kind == "wait_group":
        return f"async_wait(c, {e.value(i.operands[0], 's32')});"
    if kind == "wait_all":
        return "async_wait(c, -1);"
    if kind not in ("ca", "cg") or "bulk" in i.suffixes:
        raise Unsupported("cp.async")
    size = int(i.operands[2])
    if kind == "cg" and size != 16:
        raise Unsupported("cp.async.cg copies 16 bytes")
    valid = str(size)
    if len(i.operands) > 3 and not any("cache_hint" in s for s in i.suffixes):
        found = e.lookup(i.operands[3].lstrip("!"))
        if found and found[0] == "register" and found[2] == "pred":  # ignore-src
            valid = f"({e.value(i.operands[3], 'pred')} ? 0u : {size}u)"
        else:
            valid = e.value(i.operands[3], "u32")
    to = e.address(i.operands[0], "shared", size, i, "kAsyncStore")
    source = e.value(i.operands[1][1:-1], "u64") if "+" not in i.operands[1] else None
    if source is None:
        base, offset = i.operands[1][1:-1].split("+")
        source = f"({e.value(base, 'u64')} + {int(offset)}ll)"
    return f"{{ uint8_t* p_ = {to}; async_copy(c, {e.site(i)}, p_, {source}, {size}, {valid}); }}"


# ---- arithmetic ----


def _half_format(t):
    return "Half" if t.startswith("f16") else "Bfloat"


_HALF_NAMES = {
    n: f"half_{n}" for n in ("add", "sub", "mul", "fma", "min", "max", "neg", "abs", "ex2", "tanh")
}


def _half(e, i):
    """16-bit floats, one or two to a register: computed exactly, rounded once."""
    t = i.type
    if directed(i) or i.has("xorsign") or i.opcode not in _HALF_NAMES:
        raise Unsupported(f"{i.opcode}.{t}")
    word = "b32" if t.endswith("x2") else "b16"
    operation = f"half_{i.opcode}" + ("_nan" if i.has("NaN") else "")
    arguments = ", ".join(e.value(x, word) for x in i.operands[1:])
    text = f"{operation}<{_half_format(t)}>({arguments})"
    for suffix in ("relu", "sat"):
        if i.has(suffix):
            text = f"half_{suffix}<{_half_format(t)}>({text})"
    if i.has("ftz") and t.startswith("f16"):
        text = f"half_ftz<{_half_format(t)}>({text})"
    return e.assign(i.operands[0], word, text)


def _float(e, i, nearest: str, rounded: str | None):
    """f32, f64: ``nearest`` formats the operands, ``rounded`` names the helper of other modes."""
    t, mode = i.type, directed(i)
    x = [e.value(operand, t) for operand in i.operands[1:]]
    if i.has("ftz"):
        x = [f"flush({v})" for v in x]
    if mode and not rounded:
        raise Unsupported(f"{i.opcode} with directed rounding")
    text = f"{rounded}({', '.join(x)}, {mode})" if mode else nearest.format(*x)
    text = f"flush({text})" if i.has("ftz") else text
    return e.assign(i.operands[0], t, f"saturate({text})" if i.has("sat") else text)


@opcode("add")
def _add(e, i):
    if i.has("cc"):
        return _carry(e, i, "add_carry", "0u")
    if i.type in HALVES:
        return _half(e, i)
    if i.type in FLOATS:
        return _float(e, i, "{} + {}", "add_rounded")
    return _sum(e, i, "+", "add_saturating")


def _sum(e, i, operator, saturating):
    """Integers wrap, so that their sum is that of unsigned ones."""
    if i.has("sat"):
        x, y = (e.value(o, i.type) for o in i.operands[1:3])
        return e.assign(i.operands[0], i.type, f"{saturating}<{cpp_type(i.type)}>({x}, {y})")
    x, y = (e.value(o, bits(i.type)) for o in i.operands[1:3])
    return e.assign(i.operands[0], i.type, f"{x} {operator} {y}")


@opcode("sub")
def _sub(e, i):
    if i.has("cc"):
        return _carry(e, i, "subtract_borrow", "0u")
    if i.type in HALVES:
        return _half(e, i)
    if i.type in FLOATS:
        return _float(e, i, "{} - {}", "subtract_rounded")
    return _sum(e, i, "-", "subtract_saturating")


def _carry(e, i, name, carry_in):
    e.uses_carry = True
    t = f"u{8 * SIZE[i.type]}"
    x, y = (e.value(o, t) for o in i.operands[1:3])
    carry_out = "&carry" if i.has("cc") else "nullptr"
    return e.assign(i.operands[0], t, f"{name}<{cpp_type(t)}>({x}, {y}, {carry_in}, {carry_out})")


@opcode("addc")
def _addc(e, i):
    return _carry(e, i, "add_carry", "carry")


@opcode("subc")
def _subc(e, i):
    return _carry(e, i, "subtract_borrow", "carry")


@opcode("mul", "mad", "mul24", "mad24")
def _mul(e, i):
    t = i.type
    if t in HALVES:
        return _half(e, i)
    if t in FLOATS:
        if i.opcode == "mad":
            return _fma(e, i)
        return _float(e, i, "{} * {}", "multiply_rounded")
    if i.has("cc"):
        return _mad_carry(e, i, "0u")
    text, result = _product(e, i)
    if i.opcode.startswith("mad"):
        z = e.value(i.operands[3], result)
        text = (
            f"add_saturating<{cpp_type(result)}>({text}, {z})"
            if i.has("sat")
            else f"{text} + {e.value(i.operands[3], bits(result))}"
        )
    return e.assign(i.operands[0], result, text)


def _product(e, i):
    t, narrow = i.type, i.opcode.endswith("24")
    x, y = (e.value(o, t) for o in i.operands[1:3])
    if narrow:
        x, y = f"low24({x})", f"low24({y})"
    n, size = cpp_type(t), SIZE[t]
    if i.has("wide"):
        result = f"{t[0]}{16 * size}"
        return f"({cpp_type(result)}){x} * {y}", result
    if i.has("hi"):
        return (
            f"multiply_high<{n}>({x}, {y})" if not narrow else f"({n})(((int64_t){x} * {y}) >> 16)",
            t,
        )
    if narrow:
        return f"(uint64_t){x} * (uint64_t){y}", t
    x, y = (e.value(o, bits(t)) for o in i.operands[1:3])
    return f"{'(uint32_t)' if size == 2 else ''}{x} * {y}", t  # uint16_t alone would be an int


@opcode("madc")
def _madc(e, i):
    return _mad_carry(e, i, "carry")


def _mad_carry(e, i, carry_in):
    e.uses_carry = True
    text, result = _product(e, i)
    t = f"u{8 * SIZE[result]}"
    carry_out = "&carry" if i.has("cc") else "nullptr"
    z = e.value(i.operands[3], t)
    return e.assign(
        i.operands[0],
        t,
        f"add_carry<{cpp_type(t)}>(({cpp_type(t)})({text}), {z}, {carry_in}, {carry_out})",
    )


@opcode("fma")
def _fma(e, i):
    return _half(e, i) if i.type in HALVES else _float(e, i, "std::fma({}, {}, {})", "fma_rounded")


@opcode("div")
def _div(e, i):
    if i.type in FLOATS:
        return _float(e, i, "{} / {}", "divide_rounded")
    x, y = (e.value(o, i.type) for o in i.operands[1:3])
    return e.assign(i.operands[0], i.type, f"divide<{cpp_type(i.type)}>({x}, {y})")


@opcode("rem")
def _rem(e, i):
    x, y = (e.value(o, i.type) for o in i.operands[1:3])
    return e.assign(i.operands[0], i.type, f"remainder<{cpp_type(i.type)}>({x}, {y})")


@opcode("neg")
def _neg(e, i):
    if i.type in HALVES:
        return _half(e, i)
    if i.type in FLOATS:
        return _float(e, i, "-({})", None)
    return e.assign(i.operands[0], i.type, f"0 - (uint64_t){e.value(i.operands[1], i.type)}")


@opcode("abs")
def _abs(e, i):
    if i.type in HALVES:
        return _half(e, i)
    if i.type in FLOATS:
        return _float(e, i, "std::fabs({})", None)
    return e.assign(
        i.operands[0], i.type, f"absolute<{cpp_type(i.type)}>({e.value(i.operands[1], i.type)})"
    )


@opcode("min", "max")
def _min(e, i):
    if i.has("xorsign") or len(i.operands) != 3:
        raise Unsupported(i.opcode)
    if i.type in HALVES:
        return _half(e, i)
    name = {"min": "minimum", "max": "maximum"}[i.opcode]
    if i.type in FLOATS:
        return _float(e, i, f"{name}{'_nan' if i.has('NaN') else ''}({{}}, {{}})", None)
    x, y = (e.value(o, i.type) for o in i.operands[1:3])
    text = f"({x} {'<' if i.opcode == 'min' else '>'} {y} ? {x} : {y})"
    if i.has("relu"):
        text = f"relu({text})"
    return e.assign(i.operands[0], i.type, text)


@opcode("copysign")
def _copysign(e, i):  # the sign of the first source, the value of the second
    sign, magnitude = (e.value(o, i.type) for o in i.operands[1:3])
    return e.assign(i.operands[0], i.type, f"std::copysign({magnitude}, {sign})")


@opcode("testp")
def _testp(e, i):
    return e.assign(i.operands[0], "pred", f"is_{i.suffixes[0]}({e.value(i.operands[1], i.type)})")


@opcode("ex2", "lg2", "sin", "cos", "tanh", "sqrt", "rsqrt", "rcp")
def _unary(e, i):
    if i.type in HALVES:
        return _half(e, i)
    nearest = {
        "ex2": "std::exp2({})",
        "lg2": "std::log2({})",
        "sin": "std::sin({})",
        "cos": "std::cos({})",
        "tanh": "std::tanh({})",
        "sqrt": "std::sqrt({})",
        "rsqrt": "reciprocal_root({})",
        "rcp": "1 / ({})",
    }[i.opcode]
    return _float(
        e, i, nearest, {"sqrt": "root_rounded", "rcp": "reciprocal_rounded"}.get(i.opcode)
    )


@opcode("sad")
def _sad(e, i):
    x, y, z = (e.value(o, i.type) for o in i.operands[1:4])
    return e.assign(
        i.operands[0],
        i.type,
        f"(uint64_t){z} + ({x} < {y} ? (uint64_t){y} - {x} : (uint64_t){x} - {y})",
    )


@opcode("dp4a")
def _dp4a(e, i):
    x, y, z = (e.value(o, "u32") for o in i.operands[1:4])
    types = ", ".join("int8_t" if s[0] == "s" else "uint8_t" for s in i.suffixes[-2:])
    return e.assign(i.operands[0], "u32", f"dot_bytes<{types}>({x}, {y}, {z})")


@opcode("dp2a")
def _dp2a(e, i):
    x, y, z = (e.value(o, "u32") for o in i.operands[1:4])
    first, second = i.suffixes[-2:]
    halves, quarters = (
        "int16_t" if first[0] == "s" else "uint16_t",
        "int8_t" if second[0] == "s" else "uint8_t",
    )
    types = f"{halves}, {quarters}"
    return e.assign(i.operands[0], "u32", f"dot_halves<{types}>({x}, {y}, {z}, {int(i.has('hi'))})")


# ---- bits ----


def _logic(operator):
    def handler(e, i):
        x, y = (e.value(o, i.type) for o in i.operands[1:3])
        return e.assign(i.operands[0], i.type, f"{x} {operator} {y}")

    return handler


TABLE |= {"and": _logic("&"), "or": _logic("|"), "xor": _logic("^")}


@opcode("not")
def _not(e, i):
    return e.assign(
        i.operands[0], i.type, f"{'!' if i.type == 'pred' else '~'}{e.value(i.operands[1], i.type)}"
    )


@opcode("cnot")
def _cnot(e, i):
    return e.assign(i.operands[0], i.type, f"{e.value(i.operands[1], i.type)} == 0")


@opcode("shl", "shr")
def _shift(e, i):
    t = i.type if i.opcode == "shr" and i.type[0] == "s" else f"u{8 * SIZE[i.type]}"
    count = e.constant(i.operands[2])
    if count is not None and 0 <= count < 8 * SIZE[t]:
        operator = "<<" if i.opcode == "shl" else ">>"
        return e.assign(i.operands[0], t, f"{e.value(i.operands[1], t)} {operator} {count}")
    name = "shift_left" if i.opcode == "shl" else "shift_right"
    return e.assign(
        i.operands[0],
        t,
        f"{name}<{cpp_type(t)}>({e.value(i.operands[1], t)}, {e.value(i.operands[2], 'u32')})",
    )


@opcode("shf")
def _shf(e, i):
    left, clamp = i.has("l"), i.has("clamp")
    arguments = ", ".join(e.value(o, "u32") for o in i.operands[1:4])
    return e.assign(
        i.operands[0],
        "b32",
        f"funnel_shift({str(left).lower()}, {str(clamp).lower()}, {arguments})",
    )


@opcode("lop3")
def _lop3(e, i):
    if i.suffixes != ["b32"]:
        raise Unsupported("lop3")
    arguments = ", ".join(e.value(o, "u32") for o in i.operands[1:5])
    return e.assign(i.operands[0], "b32", f"logic3({arguments})")


@opcode("prmt")
def _prmt(e, i):
    arguments = ", ".join(e.value(o, "u32") for o in i.operands[1:4])
    mode = i.suffixes[1] if len(i.suffixes) > 1 else None
    name = f"permute_{mode}" if mode else "permute"
    return e.assign(i.operands[0], "b32", f"{name}({arguments})")


@opcode("popc", "clz", "ffs")
def _count_bits(e, i):
    name = {"popc": "count_ones", "clz": "leading_zeros"}[i.opcode]
    t = f"u{8 * SIZE[i.type]}"
    return e.assign(i.operands[0], "u32", f"{name}<{cpp_type(t)}>({e.value(i.operands[1], t)})")


@opcode("brev")
def _brev(e, i):
    t = f"u{8 * SIZE[i.type]}"
    return e.assign(i.operands[0], t, f"reverse_bits<{cpp_type(t)}>({e.value(i.operands[1], t)})")


@opcode("bfind")
def _bfind(e, i):
    amount = "true" if i.has("shiftamt") else "false"
    return e.assign(
        i.operands[0],
        "u32",
        f"find_bit<{cpp_type(i.type)}>({e.value(i.operands[1], i.type)}, {amount})",
    )


@opcode("bfe")
def _bfe(e, i):
    t = cpp_type(i.type)
    x, at, length = e.value(i.operands[1], i.type), *(e.value(o, "u32") for o in i.operands[2:4])
    return e.assign(i.operands[0], i.type, f"extract_field<{t}>({x}, {at}, {length})")


@opcode("bfi")
def _bfi(e, i):
    t = f"u{8 * SIZE[i.type]}"
    x, y = (e.value(o, t) for o in i.operands[1:3])
    at, length = (e.value(o, "u32") for o in i.operands[3:5])
    return e.assign(i.operands[0], t, f"insert_field<{cpp_type(t)}>({x}, {y}, {at}, {length})")


@opcode("bmsk")
def _bmsk(e, i):
    at, length = (e.value(o, "u32") for o in i.operands[1:3])
    return e.assign(
        i.operands[0], "b32", f"bit_mask({str(i.has('clamp')).lower()}, {at}, {length})"
    )


# ---- comparison and selection ----


@opcode("selp")
def _selp(e, i):
    t = bits(i.type)
    x, y = (e.value(o, t) for o in i.operands[1:3])
    return e.assign(i.operands[0], t, f"{e.value(i.operands[3], 'pred')} ? {x} : {y}")


@opcode("slct")
def _slct(e, i):
    t = bits(i.suffixes[-2])
    x, y = (e.value(o, t) for o in i.operands[1:3])
    condition = e.value(i.operands[3], i.type)
    return e.assign(i.operands[0], t, f"{condition} >= 0 ? {x} : {y}")


def _comparison(e, i, t):
    name, a, b = i.suffixes[0], i.operands[1], i.operands[2]
    x, y = (_as_real(e, o, t) for o in (a, b))
    if i.has("ftz") and t == "f32":
        x, y = f"flush({x})", f"flush({y})"
    if t not in (*FLOATS, "f16", "bf16"):
        return f"({x} {COMPARE[name]} {y})"
    return REAL_COMPARE[name].format(x=x, y=y)


def _combined(e, i, test, extra):
    """``setp.lt.and p, a, b, c`` combines the comparison with a third predicate."""
    name = next((s for s in i.suffixes[1:] if s in ("and", "or", "xor")), None)
    if not name:
        return test
    operator = {"and": "&", "or": "|", "xor": "^"}[name]
    return f"({test} {operator} {e.value(extra, 'pred')})"


@opcode("setp")
def _setp(e, i):
    t = i.type
    extra = i.operands[3] if len(i.operands) > 3 else None
    if t in ("f16x2", "bf16x2"):
        raise Unsupported("setp on pairs")
    first, *second = i.operands[0].split("|")
    if not second:
        return e.assign(first, "pred", _combined(e, i, _comparison(e, i, t), extra))
    both = e.assign(first, "pred", _combined(e, i, "e_", extra))
    both += " " + e.assign(second[0], "pred", _combined(e, i, "(!e_)", extra))
    return f"{{ bool e_ = {_comparison(e, i, t)}; {both} }}"


@opcode("set")
def _set(e, i):
    to, t = i.suffixes[-2], i.type
    if to in HALVES or t in HALVES:
        raise Unsupported("set on halves")
    extra = i.operands[3] if len(i.operands) > 3 else None
    test = _combined(e, i, _comparison(e, i, t), extra)
    return e.assign(
        i.operands[0], to, f"{test} ? 1.0f : 0.0f" if to == "f32" else f"{test} ? ~0u : 0u"
    )


# ---- barriers and warp collectives ----


@opcode("bar", "barrier")
def _bar(e, i):
    kind = next((s for s in i.suffixes if s in ("warp", "sync", "arrive", "red")), None)
    site, u32 = e.site(i), lambda o: e.value(o, "u32")
    if kind == "warp":
        return f"warp_sync(c, {site}, {u32(i.operands[0])});"
    if kind == "sync":
        count = u32(i.operands[1]) if len(i.operands) > 1 else "0"
        return f"block_barrier(c, {site}, {u32(i.operands[0])}, {count}, kNoReduction, false);"
    if kind == "arrive":
        return f"barrier_arrive(c, {site}, {u32(i.operands[0])}, {u32(i.operands[1])});"
    if kind == "red":
        operation = next(
            name for s, name in (("popc", "kCount"), ("and", "kAll"), ("or", "kAny")) if i.has(s)
        )
        count = u32(i.operands[2]) if len(i.operands) > 3 else "0"
        vote = e.value(i.operands[-1], "pred")
        return e.assign(
            i.operands[0],
            i.type,
            f"block_barrier(c, {site}, {u32(i.operands[1])}, {count}, {operation}, {vote})",
        )
    raise Unsupported(i.opcode)


@opcode("activemask")
def _activemask(
    e, i
):  # a lane alone is always a legal answer, and defeats code that assumes convergence
    return e.assign(i.operands[0], "b32", "1u << c->lane")


def _with_predicate(e, i, call):
    """Collectives that return a value and, after a bar, a predicate."""
    first, *second = i.operands[0].split("|")
    also = e.assign(second[0], "pred", "p_") if second else "(void)p_;"
    return f"{{ bool p_ = false; {e.assign(first, 'b32', call)} {also} }}"


@opcode("shfl")
def _shfl(e, i):
    mode = {"up": "kUp_", "down": "kDown_", "bfly": "kButterfly", "idx": "kIndex"}[i.suffixes[1]]
    arguments = ", ".join(e.value(o, "u32") for o in i.operands[1:5])
    return _with_predicate(e, i, f"shuffle(c, {e.site(i)}, {mode}, {arguments}, &p_)")


@opcode("vote")
def _vote(e, i):
    mode = {"all": "kVoteAll", "any": "kVoteAny", "uni": "kVoteUniform", "ballot": "kBallot"}[
        i.suffixes[1]
    ]
    predicate, mask = e.value(i.operands[1], "pred"), e.value(i.operands[2], "u32")
    call = f"vote(c, {e.site(i)}, {mode}, {predicate}, {mask})"
    return e.assign(i.operands[0], "b32" if mode == "kBallot" else "pred", call)


@opcode("match")
def _match(e, i):
    all_ = "true" if i.suffixes[0] == "all" else "false"
    value, mask = e.value(i.operands[1], i.type), e.value(i.operands[2], "u32")
    call = f"match(c, {e.site(i)}, {all_}, {value}, {mask}, &p_)"
    return _with_predicate(e, i, call)


@opcode("redux")
def _redux(e, i):
    if i.type == "f32":
        raise Unsupported("redux.f32")
    signed = "Signed" if i.type == "s32" else ""
    names = {
        "add": "kAdd",
        "and": "kAnd",
        "or": "kOr",
        "xor": "kXor",
        "min": f"kMin{signed}",
        "max": f"kMax{signed}",
    }
    operation = names[i.suffixes[1]]
    value, mask = (e.value(o, "u32") for o in i.operands[1:3])
    call = f"reduce(c, {e.site(i)}, {operation}, {value}, {mask})"
    return e.assign(i.operands[0], "b32", call)


# ---- tensor cores ----

MMA_SHAPES = {("bf16", 16), ("f16", 16), ("bf16", 8), ("f16", 8), ("tf32", 8), ("tf32", 4)}


@opcode("mma")
def _mma(e, i):
    shape = next(s for s in i.suffixes if s.startswith("m") and "n" in s and "k" in s)
    to, a_type, b_type, c_type = i.suffixes[-4:]
    k = int(shape.split("k")[1])
    if (
        not shape.startswith("m16n8k")
        or a_type != b_type
        or (a_type, k) not in MMA_SHAPES
        or to != c_type
    ):
        raise Unsupported("mma")
    if (
        not (i.has("row") and i.has("col"))
        or to not in ("f32", "f16")
        or (to == "f16" and a_type != "f16")
    ):
        raise Unsupported("mma")

    words = []
    for o, count in zip(i.operands[1:4], (4, 2, 4), strict=True):
        given = [e.value(x, "b32") for x in e.vector(o)]
        words += given + ["0"] * (count - len(given))
    kind = {"bf16": "kBf16", "f16": "kF16", "tf32": "kTf32"}[a_type]
    half = "true" if to == "f16" else "false"
    call = f"mma(c, {e.site(i)}, {k}, {kind}, {half}, {', '.join(words)})"
    return _words_out(e, i, call)


def _words_out(e, i, call):
    """The results of a call lie in the thread, whose next collective overwrites them."""
    to = enumerate(e.vector(i.operands[0]))
    writes = " ".join(e.assign(x, "b32", f"d_[{n}]") for n, x in to)
    return f"{{ const uint32_t* d_ = {call}; {writes} }}"


def _matrix_address(e, i, operand, count, access):
    """Row pointers come from the first 8 lanes per matrix; the rest of the lanes give none."""
    return f"c->lane < {8 * count} ? {e.address(operand, space_of(i), 16, i, access)} : nullptr"


@opcode("ldmatrix")
def _ldmatrix(e, i):
    count = next(int(s[1]) for s in i.suffixes if s in ("x1", "x2", "x4"))
    if not i.has("m8n8") or i.type != "b16":
        raise Unsupported("ldmatrix")
    row = _matrix_address(e, i, i.operands[1], count, "kMatrixRead")
    trans = str(i.has("trans")).lower()
    return _words_out(e, i, f"load_matrix(c, {e.site(i)}, {count}, {trans}, {row})")


@opcode("stmatrix")
def _stmatrix(e, i):
    count = next(int(s[1]) for s in i.suffixes if s in ("x1", "x2", "x4"))
    if not i.has("m8n8") or i.type != "b16":
        raise Unsupported("stmatrix")
    values = [e.value(x, "b32") for x in e.vector(i.operands[1])]
    words = ", ".join(values + ["0"] * (4 - len(values)))
    row = _matrix_address(e, i, i.operands[0], count, "kMatrixWrite")
    trans = str(i.has("trans")).lower()
    return f"store_matrix(c, {e.site(i)}, {count}, {trans}, {row}, {words});"


@opcode("movmatrix")
def _movmatrix(e, i):
    return e.assign(
        i.operands[0], "b32", f"move_matrix(c, {e.site(i)}, {e.value(i.operands[1], 'b32')})"
    )
