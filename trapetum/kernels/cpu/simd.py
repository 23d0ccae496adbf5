"""A small vocabulary of 256-bit vectors for numba: what the decoders need and numba cannot say.

Left alone, numba's vectoriser makes dozens of inserts and shuffles of a table look-up: 0.2 to 1.4 G weights a second
where these operations reach 11 (4-bit codes, one Zen1 core). Every operation below is called from compiled code only.

An operation that x86 has as one instruction, but LLVM as a pattern that old versions do not match, is emitted as the
target's own intrinsic where the target has AVX2, and as plain LLVM IR otherwise. The choice is made at compile time by
the features of numba's target (so ``NUMBA_CPU_NAME`` and ``NUMBA_CPU_FEATURES`` are obeyed): a target intrinsic on a
CPU without AVX2 would abort the process inside LLVM, beyond any ``except``.

numba's disk cache does not see a change in another file, so every module that uses this one carries
:func:`fingerprint` as a constant, and a test compares it.

=========  =============================  ==================================
type       LLVM                           of
=========  =============================  ==================================
``BYTES``  ``<32 x i8>``                  codes, int8 activations
``WORDS``  ``<16 x i16>``                 weights and activations, int16
``INTS``   ``<8 x i32>``                  exact sums
``FLOATS`` ``<8 x float>``                scaled sums, decoded weights
=========  =============================  ==================================
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import types

from trapetum.kernels.cpu.emit import BYTES, F32, FLOATS, I8, I16, I32, INTS, WORDS, Emit, Vector, operation

__all__ = [
    "BYTES",
    "FLOATS",
    "INTS",
    "WORDS",
    "add_bytes",
    "add_floats",
    "add_ints",
    "add_words",
    "and_bytes",
    "copy_eight",
    "divide_floats",
    "dot_bytes",
    "exp2_floats",
    "fingerprint",
    "float_of_bits",
    "fma",
    "high_halves",
    "high_ints",
    "interleave_high",
    "interleave_low",
    "least",
    "load_byte_ints",
    "load_bytes",
    "load_floats",
    "load_ints",
    "load_signed_bytes",
    "load_table",
    "load_words",
    "look_up_bytes",
    "look_up_floats",
    "look_up_in_eight",
    "low_halves",
    "low_ints",
    "magnitude_bits",
    "max_floats",
    "min_floats",
    "multiply_add_words",
    "multiply_floats",
    "or_bytes",
    "prefetch",
    "round_floats",
    "scalar",
    "shift_left_bytes",
    "shift_left_ints",
    "shift_right_bytes",
    "splat_bytes",
    "splat_floats",
    "splat_words",
    "spread_four",
    "spread_two",
    "store_floats",
    "store_halves",
    "store_integer",
    "stream",
    "subtract_floats",
    "sum_floats",
    "to_floats",
    "zero_bytes",
    "zero_floats",
    "zero_ints",
]

_NEAR, _FAR = 512, 8192  # bytes between what a kernel decodes and what it asks for


def fingerprint() -> str:
    """Hash of this file, ``emit`` and ``memory``, for the constant in the modules that are compiled from them."""
    import hashlib
    from pathlib import Path

    digest = hashlib.sha256()
    for name in ("emit.py", "simd.py", "memory.py"):
        digest.update(Path(__file__).with_name(name).read_bytes())
    return digest.hexdigest()[:16]


# ---------------------------------------------------------------------------- memory
def _loader(kind: Vector, name: str, what: str) -> Callable[..., Any]:
    def load(e: Emit, array: Any, index: Any) -> Any:
        return e.load(e.address(array, index), kind.llvm)

    load.__name__ = name
    load.__doc__ = f"{what} from element ``index`` of a C-contiguous array on."
    return operation(kind, None, types.intp)(load)


load_bytes = _loader(BYTES, "load_bytes", "32 bytes")
load_words = _loader(WORDS, "load_words", "16 int16")
load_ints = _loader(INTS, "load_ints", "8 int32")


@operation(FLOATS, None, types.intp)
def load_floats(e: Emit, array: Any, index: Any) -> Any:
    """8 numbers as float32: float32, float16 bits in a uint16 array, or bfloat16 bits in an int16 array."""
    pointer = e.address(array, index)
    if e.signature.args[0].dtype == types.uint16:
        return e.halves(e.load(pointer, ir.VectorType(I16, 8)))
    if e.signature.args[0].dtype == types.int16:
        wide = e.builder.zext(e.load(pointer, ir.VectorType(I16, 8)), INTS.llvm)
        return e.builder.bitcast(e.builder.shl(wide, ir.Constant(INTS.llvm, [16] * 8)), FLOATS.llvm)
    return e.load(pointer, FLOATS.llvm)


@operation(types.float32, None, types.intp)
def scalar(e: Emit, array: Any, index: Any) -> Any:
    """One number as float32: of a float32 array, or of a uint16 array that holds float16 bits."""
    pointer = e.address(array, index)
    if e.signature.args[0].dtype == types.uint16:
        one = e.load(pointer, I16)
        padded = e.builder.insert_element(ir.Constant(ir.VectorType(I16, 8), [0] * 8), one, I32(0))
        return e.builder.extract_element(e.halves(padded), I32(0))
    return e.load(pointer, F32)


def _spreader(count: int, name: str) -> Callable[..., Any]:
    def spread(e: Emit, array: Any, index: Any) -> Any:
        pointer = e.address(array, index)
        lanes = [lane * count // 8 for lane in range(8)]
        if e.signature.args[0].dtype == types.uint16:
            some = e.load(pointer, ir.VectorType(I16, count))
            return e.halves(e.shuffle(some, some, lanes))
        some = e.load(pointer, ir.VectorType(F32, count))
        return e.shuffle(some, some, lanes)

    spread.__name__ = name
    spread.__doc__ = (
        f"{count} numbers as float32, each in {8 // count} lanes side by side; arrays as for :func:`scalar`."
    )
    return operation(FLOATS, None, types.intp)(spread)


spread_two, spread_four = _spreader(2, "spread_two"), _spreader(4, "spread_four")


@operation(WORDS, None, types.intp)
def load_signed_bytes(e: Emit, array: Any, index: Any) -> Any:
    """16 int8 as int16."""
    return e.builder.sext(e.load(e.address(array, index), ir.VectorType(I8, 16)), WORDS.llvm)


@operation(INTS, None, types.intp)
def load_byte_ints(e: Emit, array: Any, index: Any) -> Any:
    """8 int8 as int32."""
    return e.builder.sext(e.load(e.address(array, index), ir.VectorType(I8, 8)), INTS.llvm)


@operation(BYTES, None, types.intp)
def load_table(e: Emit, array: Any, index: Any) -> Any:
    """16 bytes, twice: the table of :func:`look_up_bytes`."""
    table = e.load(e.address(array, index), ir.VectorType(I8, 16))
    return e.shuffle(table, table, [*range(16), *range(16)])


@operation(types.void, None, types.intp, FLOATS)
def store_floats(e: Emit, array: Any, index: Any, value: Any) -> Any:
    """Write 8 float32 from element ``index`` on."""
    pointer = e.builder.bitcast(e.address(array, index), FLOATS.llvm.as_pointer())
    e.builder.store(value, pointer).align = 1
    return e.context.get_dummy_value()


@operation(types.void, None, types.intp, FLOATS)
def store_halves(e: Emit, array: Any, index: Any, value: Any) -> Any:
    """Write 8 numbers, rounded to float16 (to nearest, ties to even), from element ``index`` of a uint16 array on."""
    pointer = e.builder.bitcast(e.address(array, index), ir.VectorType(I16, 8).as_pointer())
    e.builder.store(e.rounded(value), pointer).align = 1
    return e.context.get_dummy_value()


def _ask(e: Emit, pointer: Any, locality: int) -> None:
    kind = ir.FunctionType(ir.VoidType(), [pointer.type, I32, I32, I32])
    name = "llvm.prefetch.p0"
    function = e.builder.module.globals.get(name) or ir.Function(e.builder.module, kind, name)
    e.builder.call(function, [pointer, I32(0), I32(locality), I32(1)])


@operation(types.void, None, types.intp)
def prefetch(e: Emit, array: Any, index: Any) -> Any:
    """Ask for the cache line of element ``index``; it may lie beyond the array."""
    _ask(e, e.builder.bitcast(e.address(array, index), I8.as_pointer()), 3)
    return e.context.get_dummy_value()


@operation(types.void, None, types.intp)
def stream(e: Emit, array: Any, index: Any) -> Any:
    """Ask for what comes behind element ``index`` of an array that is read from front to end.

    A decoder reads memory in bursts with arithmetic between; a virtual machine's hardware prefetcher fell behind it by
    a factor of two to three. Two distances: 8 KiB ahead into the second-level cache, 512 bytes ahead into the first.
    Streamed from memory, in GB/s on one and on two threads: 4-bit codes 4.5 and 5.9 without, 8.8 and 13.4 with 4 KiB
    alone (the best single distance), 9.4 and 14.4 with both; 2-bit codes 7.6 and 11.3 with the one, 8.5 and 11.6 with
    both.
    """
    pointer = e.builder.bitcast(e.address(array, index), I8.as_pointer())
    _ask(e, e.builder.gep(pointer, [ir.IntType(64)(_NEAR)]), 3)
    _ask(e, e.builder.gep(pointer, [ir.IntType(64)(_FAR)]), 2)
    return e.context.get_dummy_value()


# ---------------------------------------------------------------------------- single numbers
@operation(types.uint32, None, types.intp)
def magnitude_bits(e: Emit, array: Any, index: Any) -> Any:
    """Bits of ``|array[index]|`` of a float32 array: as integers they compare like the numbers."""
    return e.builder.and_(e.load(e.address(array, index), I32), I32(0x7FFFFFFF))


@operation(types.float32, types.uint32)
def float_of_bits(e: Emit, bits: Any) -> Any:
    """The float32 that has these bits."""
    return e.builder.bitcast(bits, F32)


@operation(types.void, None, types.intp, types.int32)
def store_integer(e: Emit, array: Any, index: Any, value: Any) -> Any:
    """Write one number that an array of int8 or int16 holds."""
    pointer = e.address(array, index)
    e.builder.store(e.builder.trunc(value, pointer.type.pointee), pointer)
    return e.context.get_dummy_value()


@operation(types.void, None, types.intp, None, types.intp)
def copy_eight(e: Emit, given: Any, at: Any, out: Any, to: Any) -> Any:
    """Copy eight bytes from element ``at`` of one array to element ``to`` of another."""
    kind = ir.IntType(64)
    pointer = e.builder.bitcast(e.address(out, to, 2), kind.as_pointer())
    e.builder.store(e.load(e.address(given, at), kind), pointer).align = 1
    return e.context.get_dummy_value()


@operation(types.intp, types.intp, types.intp)
def least(e: Emit, a: Any, b: Any) -> Any:
    """The smaller index; numba compiles a function of its own for each ``min``."""
    return e.builder.select(e.builder.icmp_signed("<", a, b), a, b)


# ---------------------------------------------------------------------------- constants
def _splatter(kind: Vector, number: Any, name: str) -> Callable[..., Any]:
    def splat(e: Emit, value: Any) -> Any:
        return e.splat(value, kind.llvm.count)

    splat.__name__ = name
    splat.__doc__ = "One number in every lane."
    return operation(kind, number)(splat)


def _zero(kind: Vector, name: str) -> Callable[..., Any]:
    def zero(e: Emit) -> Any:
        return ir.Constant(kind.llvm, [0] * kind.llvm.count)

    zero.__name__ = name
    zero.__doc__ = "Zero in every lane."
    return operation(kind)(zero)


splat_bytes = _splatter(BYTES, types.int8, "splat_bytes")
splat_words = _splatter(WORDS, types.int16, "splat_words")
splat_floats = _splatter(FLOATS, types.float32, "splat_floats")
zero_bytes, zero_ints = _zero(BYTES, "zero_bytes"), _zero(INTS, "zero_ints")
zero_floats = _zero(FLOATS, "zero_floats")


# ---------------------------------------------------------------------------- lane by lane
def _lanewise(kind: Vector, instruction: str, name: str) -> Callable[..., Any]:
    def lanewise(e: Emit, a: Any, b: Any) -> Any:
        return getattr(e.builder, instruction)(a, b)

    lanewise.__name__ = name
    lanewise.__doc__ = f"``{instruction}`` of two vectors, lane by lane."
    return operation(kind, kind, kind)(lanewise)


add_bytes = _lanewise(BYTES, "add", "add_bytes")
and_bytes = _lanewise(BYTES, "and_", "and_bytes")
or_bytes = _lanewise(BYTES, "or_", "or_bytes")
shift_left_bytes = _lanewise(BYTES, "shl", "shift_left_bytes")
shift_right_bytes = _lanewise(BYTES, "lshr", "shift_right_bytes")
add_words = _lanewise(WORDS, "add", "add_words")
add_ints = _lanewise(INTS, "add", "add_ints")
add_floats = _lanewise(FLOATS, "fadd", "add_floats")
divide_floats = _lanewise(FLOATS, "fdiv", "divide_floats")
subtract_floats = _lanewise(FLOATS, "fsub", "subtract_floats")
multiply_floats = _lanewise(FLOATS, "fmul", "multiply_floats")


@operation(INTS, INTS, types.int32)
def shift_left_ints(e: Emit, a: Any, count: Any) -> Any:
    """``a << count``."""
    return e.builder.shl(a, e.splat(count, 8))


@operation(FLOATS, FLOATS, FLOATS, FLOATS)
def fma(e: Emit, a: Any, b: Any, c: Any) -> Any:
    """``a * b + c``; see ``emit.Emit.fused``."""
    return e.fused(a, b, c)


@operation(FLOATS, INTS)
def to_floats(e: Emit, a: Any) -> Any:
    """int32 to float32, rounded to nearest."""
    return e.builder.sitofp(a, FLOATS.llvm)


@operation(FLOATS, FLOATS, FLOATS)
def max_floats(e: Emit, a: Any, b: Any) -> Any:
    """The larger of two numbers; ``b`` where ``a`` is NaN."""
    return e.builder.select(e.builder.fcmp_ordered(">", a, b), a, b)


@operation(FLOATS, FLOATS, FLOATS)
def min_floats(e: Emit, a: Any, b: Any) -> Any:
    """The smaller of two numbers; ``b`` where ``a`` is NaN."""
    return e.builder.select(e.builder.fcmp_ordered("<", a, b), a, b)


@operation(FLOATS, FLOATS)
def round_floats(e: Emit, a: Any) -> Any:
    """To the nearest whole number, of magnitudes below 2**22: adding 1.5 * 2**23 leaves no bits for a fraction."""
    magic = ir.Constant(FLOATS.llvm, [1.5 * 2.0**23] * 8)
    return e.builder.fsub(e.builder.fadd(a, magic), magic)


@operation(FLOATS, FLOATS)
def exp2_floats(e: Emit, a: Any) -> Any:
    """``2**a`` of whole numbers from -126 to 127: the exponent's bits."""
    whole = e.builder.add(e.builder.fptosi(a, INTS.llvm), ir.Constant(INTS.llvm, [127] * 8))
    return e.builder.bitcast(e.builder.shl(whole, ir.Constant(INTS.llvm, [23] * 8)), FLOATS.llvm)


@operation(types.float32, FLOATS)
def sum_floats(e: Emit, a: Any) -> Any:
    """Sum of the lanes: halves onto each other, three times."""
    for width in (4, 2, 1):
        low = e.shuffle(a, a, list(range(width)))
        high = e.shuffle(a, a, list(range(width, 2 * width)))
        a = e.builder.fadd(low, high)
    return e.builder.extract_element(a, I32(0))


# ---------------------------------------------------------------------------- across lanes
def _interleave(e: Emit, a: Any, b: Any, first: int) -> Any:
    order = [lane + k for half in (0, 16) for k in range(half + first, half + first + 8) for lane in (0, 32)]
    return e.builder.bitcast(e.shuffle(a, b, order), WORDS.llvm)


@operation(WORDS, BYTES, BYTES)
def interleave_low(e: Emit, low: Any, high: Any) -> Any:
    """``low | high << 8`` of bytes 0-7 and 16-23."""
    return _interleave(e, low, high, 0)


@operation(WORDS, BYTES, BYTES)
def interleave_high(e: Emit, low: Any, high: Any) -> Any:
    """``low | high << 8`` of bytes 8-15 and 24-31."""
    return _interleave(e, low, high, 8)


def _part(e: Emit, words: Any, first: int) -> Any:
    return e.shuffle(words, words, list(range(first, first + 8)))


@operation(INTS, WORDS)
def low_ints(e: Emit, words: Any) -> Any:
    """The first 8 int16 as int32."""
    return e.builder.sext(_part(e, words, 0), INTS.llvm)


@operation(INTS, WORDS)
def high_ints(e: Emit, words: Any) -> Any:
    """The last 8 int16 as int32."""
    return e.builder.sext(_part(e, words, 8), INTS.llvm)


@operation(FLOATS, WORDS)
def low_halves(e: Emit, words: Any) -> Any:
    """float32 of the first 8 of 16 float16 bit patterns."""
    return e.halves(_part(e, words, 0))


@operation(FLOATS, WORDS)
def high_halves(e: Emit, words: Any) -> Any:
    """float32 of the last 8 of 16 float16 bit patterns."""
    return e.halves(_part(e, words, 8))


@operation(BYTES, BYTES, BYTES)
def look_up_bytes(e: Emit, table: Any, index: Any) -> Any:
    """``table[index]`` with a table of 16 bytes from :func:`load_table`; every index must be below 16."""
    if "avx2" in e.has:
        return e.call("llvm.x86.avx2.pshuf.b", BYTES.llvm, table, index)
    found = ir.Constant(BYTES.llvm, ir.Undefined)
    for lane in range(32):
        entry = e.builder.extract_element(table, e.builder.extract_element(index, I32(lane)))
        found = e.builder.insert_element(found, entry, I32(lane))
    return found


def _look_up(e: Emit, table: Any, first: Any, codes: Any, index: Any, stride: int) -> Any:
    b = e.builder
    base, line = e.address(table, first), e.address(codes, index, 2)
    if e.has & {"avx512f", "avxvnni"}:  # cores whose gather beats eight loads
        wide = b.zext(e.load(line, ir.VectorType(I8, 8)), INTS.llvm)
        offsets = b.add(wide, ir.Constant(INTS.llvm, [stride * lane for lane in range(8)]))
        every = b.bitcast(ir.Constant(INTS.llvm, [-1] * 8), FLOATS.llvm)
        nothing = ir.Constant(FLOATS.llvm, ir.Undefined)
        start = b.bitcast(base, I8.as_pointer())
        return e.call("llvm.x86.avx2.gather.d.ps.256", FLOATS.llvm, nothing, start, offsets, every, I8(4))
    found = ir.Constant(FLOATS.llvm, ir.Undefined)
    for lane in range(8):
        code = b.add(b.zext(b.load(b.gep(line, [I32(lane)])), ir.IntType(64)), ir.IntType(64)(stride * lane))
        found = b.insert_element(found, b.load(b.gep(base, [code])), I32(lane))
    return found


@operation(FLOATS, None, types.intp, None, types.intp)
def look_up_floats(e: Emit, table: Any, first: Any, codes: Any, index: Any) -> Any:
    """``table[first + codes[index + lane]]``: a gather, or eight loads (2.7 times as fast as the gather of a Zen1)."""
    return _look_up(e, table, first, codes, index, 0)


@operation(FLOATS, None, types.intp, None, types.intp)
def look_up_in_eight(e: Emit, tables: Any, first: Any, codes: Any, index: Any) -> Any:
    """``tables[first + 256 * lane + codes[index + lane]]``: a table of 256 for each lane."""
    return _look_up(e, tables, first, codes, index, 256)


# ---------------------------------------------------------------------------- products
@operation(INTS, WORDS, WORDS)
def multiply_add_words(e: Emit, a: Any, b: Any) -> Any:
    """``a[2j] * b[2j] + a[2j+1] * b[2j+1]`` in int32."""
    if "avx2" in e.has:
        return e.call("llvm.x86.avx2.pmadd.wd", INTS.llvm, a, b)
    wide = ir.VectorType(I32, 16)
    product = e.builder.mul(e.builder.sext(a, wide), e.builder.sext(b, wide))
    even = e.shuffle(product, product, list(range(0, 16, 2)))
    return e.builder.add(even, e.shuffle(product, product, list(range(1, 16, 2))))


@operation(INTS, INTS, *[BYTES] * 8)
def dot_bytes(e: Emit, total: Any, *values: Any) -> Any:
    """``total[j] + sum(u[k][4j+i] * s[k][4j+i])`` over i, k < 4: unsigned ``u0 .. u3`` below 32, int8 ``s0 .. s3``.

    Below 32, so that eight products stay below 2**15 and the 16-bit sums of AVX2 cannot saturate.
    """
    pairs = list(zip(values[:4], values[4:], strict=True))
    if "avxvnni" in e.has or {"avx512vnni", "avx512vl"} <= e.has:
        for u, s in pairs:
            u, s = (e.builder.bitcast(v, INTS.llvm) for v in (u, s))
            total = e.call("llvm.x86.avx512.vpdpbusd.256", INTS.llvm, total, u, s)
        return total
    if "avx2" in e.has:
        sums = [e.call("llvm.x86.avx2.pmadd.ub.sw", WORDS.llvm, u, s) for u, s in pairs]
        words = e.builder.add(e.builder.add(sums[0], sums[1]), e.builder.add(sums[2], sums[3]))
        ones = ir.Constant(WORDS.llvm, [1] * 16)
        return e.builder.add(total, e.call("llvm.x86.avx2.pmadd.wd", INTS.llvm, words, ones))
    wide = ir.VectorType(I32, 32)
    for u, s in pairs:
        product = e.builder.mul(e.builder.zext(u, wide), e.builder.sext(s, wide))
        for i in range(4):
            total = e.builder.add(total, e.shuffle(product, product, list(range(i, 32, 4))))
    return total
