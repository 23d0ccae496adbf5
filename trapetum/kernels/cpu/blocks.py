"""GGUF blocks against int16 activations: small integer codes, a scale for 32 or 16 of them, perhaps an offset.

Prepared once at load, at the size of the file or, for most types, 3 % more:

======== ======================= =================================================================================
array    shape                   content
======== ======================= =================================================================================
codes    u8 [rows, group bytes]  128 inputs a group; see below
d        u16 [rows, n]           float16 bits, as in the file
steps    i8 [rows, blocks]       integer scale of a block, or no column: then every block has its own ``d``
dmin     u16 [rows, n]           of the offset, or no column
mins     i8 [rows, blocks]       integer offset of a block, or no column
======== ======================= =================================================================================

The weight is ``d * step * value(code) - dmin * min``, in float32 and in this order, as ggml computes it.

====== ============ ===== ==================================================================== =====================
kind   block        bytes codes of a group                                                     value
====== ============ ===== ==================================================================== =====================
TABLE  32           64    nibbles in the order of ``codebook16``                               int8 table of 16
NIBBLE 32           64    likewise                                                             the code
BYTE   32           128   int8                                                                 the code
SIX    16           96    low nibbles as above, then 32 bytes: bits 2k of byte LANE[t] belong  code - 32
                          to input 32k + t
BYTE16 16           128   int8                                                                 the code
====== ============ ===== ==================================================================== =====================

The types of 5, 3 and 2 bits that are not worth a kernel of their own are held as bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from trapetum.kernels.cpu import simd
from trapetum.kernels.cpu.activations import GROUP
from trapetum.kernels.cpu.memory import array, scratch
from trapetum.kernels.jit import inline, jit

__all__ = [
    "BYTE",
    "BYTE16",
    "DECODE",
    "MULTIPLY",
    "NIBBLE",
    "SIX",
    "STEP",
    "TABLE",
    "block_size",
    "group_bytes",
    "pack_top_bits",
]

SIMD = "ce3020bb72a775c0"  # simd.fingerprint(): a new one makes numba compile this file again

TABLE, NIBBLE, BYTE, SIX, BYTE16 = 0, 1, 2, 3, 4

# Rows whose scales are made at once: read right after it was written, a scale costs 2 cycles a weight (512 inputs).
_AHEAD_ROWS = 8


@inline
def group_bytes(kind: int) -> int:
    """Bytes of the codes of 128 inputs."""
    return 96 if kind == SIX else 64 if kind in (TABLE, NIBBLE) else 128


@inline
def block_size(kind: int) -> int:
    """Inputs that share a scale."""
    return 16 if kind in (SIX, BYTE16) else 32


@jit()
def pack_top_bits(codes: NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
    """Third quarter of a SIX group: bits 4 and 5 of 128 codes in 32 bytes.

    Parameters
    ----------
    codes : ndarray of uint8, shape (rows, padded)
        Each below 64.
    out : ndarray of uint8, shape (rows, groups, 96)
        Its last 32 bytes are written.
    """
    for o in range(codes.shape[0]):
        for g in range(out.shape[1]):
            for k in range(64, 96):
                out[o, g, k] = 0
        for i in range(codes.shape[1]):
            t = i & 31
            lane = (t & 7) | ((t & 8) << 1) | ((t & 16) >> 1)
            out[o, i >> 7, 64 + lane] |= (codes[o, i] >> 4) << np.uint8((i >> 5 & 3) * 2)


@inline
def _pair(kind: int, low: Any, high: Any, codes: Any) -> Any:
    """int16 values of 32 codes below 64 in lane order, as two vectors in natural order."""
    if kind == TABLE:
        a, b = simd.look_up_bytes(low, codes), simd.look_up_bytes(high, codes)
    else:
        a, b = codes, simd.zero_bytes()
    w0, w1 = simd.interleave_low(a, b), simd.interleave_high(a, b)
    if kind == SIX:
        middle = simd.splat_words(np.int16(-32))
        w0, w1 = simd.add_words(w0, middle), simd.add_words(w1, middle)
    return w0, w1


@inline
def _words(kind: int, low: Any, high: Any, codes: NDArray[np.uint8], at: int) -> Any:
    """int16 values of the 128 weights whose codes begin at byte ``at``."""
    if kind in (BYTE, BYTE16):
        return (
            simd.load_signed_bytes(codes, at), simd.load_signed_bytes(codes, at + 16),
            simd.load_signed_bytes(codes, at + 32), simd.load_signed_bytes(codes, at + 48),
            simd.load_signed_bytes(codes, at + 64), simd.load_signed_bytes(codes, at + 80),
            simd.load_signed_bytes(codes, at + 96), simd.load_signed_bytes(codes, at + 112),
        )  # fmt: skip
    nibble, four = simd.splat_bytes(15), simd.splat_bytes(4)
    v = simd.load_bytes(codes, at)
    c0, c1 = simd.and_bytes(v, nibble), simd.shift_right_bytes(v, four)
    v = simd.load_bytes(codes, at + 32)
    c2, c3 = simd.and_bytes(v, nibble), simd.shift_right_bytes(v, four)
    if kind == SIX:
        v, top, two = simd.load_bytes(codes, at + 64), simd.splat_bytes(48), simd.splat_bytes(2)
        c0 = simd.or_bytes(c0, simd.and_bytes(simd.shift_left_bytes(v, four), top))
        c1 = simd.or_bytes(c1, simd.and_bytes(simd.shift_left_bytes(v, two), top))
        c2 = simd.or_bytes(c2, simd.and_bytes(v, top))
        c3 = simd.or_bytes(c3, simd.and_bytes(simd.shift_right_bytes(v, two), top))
    w0, w1 = _pair(kind, low, high, c0)
    w2, w3 = _pair(kind, low, high, c1)
    w4, w5 = _pair(kind, low, high, c2)
    w6, w7 = _pair(kind, low, high, c3)
    return w0, w1, w2, w3, w4, w5, w6, w7


@inline
def _scale(scales: NDArray[np.float32], b: int) -> Any:
    return simd.splat_floats(simd.scalar(scales, b))


@inline
def _madd(x: NDArray[np.int16], at: int, w: Any) -> Any:
    return simd.multiply_add_words(simd.load_words(x, at), w)


@inline
def _sum32(x: NDArray[np.int16], at: int, w: Any, scales: NDArray[np.float32], b: int) -> Any:
    """Products of 128 weights in four blocks, scaled."""
    part = simd.to_floats(simd.add_ints(_madd(x, at, w[0]), _madd(x, at + 16, w[1])))
    total = simd.multiply_floats(part, _scale(scales, b))
    part = simd.to_floats(simd.add_ints(_madd(x, at + 32, w[2]), _madd(x, at + 48, w[3])))
    total = simd.fma(part, _scale(scales, b + 1), total)
    part = simd.to_floats(simd.add_ints(_madd(x, at + 64, w[4]), _madd(x, at + 80, w[5])))
    total = simd.fma(part, _scale(scales, b + 2), total)
    part = simd.to_floats(simd.add_ints(_madd(x, at + 96, w[6]), _madd(x, at + 112, w[7])))
    return simd.fma(part, _scale(scales, b + 3), total)


@inline
def _sum16(x: NDArray[np.int16], at: int, w: Any, scales: NDArray[np.float32], b: int) -> Any:
    """Products of 128 weights in eight blocks, scaled."""
    total = simd.multiply_floats(simd.to_floats(_madd(x, at, w[0])), _scale(scales, b))
    total = simd.fma(simd.to_floats(_madd(x, at + 16, w[1])), _scale(scales, b + 1), total)
    total = simd.fma(simd.to_floats(_madd(x, at + 32, w[2])), _scale(scales, b + 2), total)
    total = simd.fma(simd.to_floats(_madd(x, at + 48, w[3])), _scale(scales, b + 3), total)
    total = simd.fma(simd.to_floats(_madd(x, at + 64, w[4])), _scale(scales, b + 4), total)
    total = simd.fma(simd.to_floats(_madd(x, at + 80, w[5])), _scale(scales, b + 5), total)
    total = simd.fma(simd.to_floats(_madd(x, at + 96, w[6])), _scale(scales, b + 6), total)
    return simd.fma(simd.to_floats(_madd(x, at + 112, w[7])), _scale(scales, b + 7), total)


@inline
def _eight(d: NDArray[np.uint16], steps: NDArray[Any], each: int, o: int, b: int, blocks: int) -> Any:
    """``d * step`` of blocks b .. b + 7 of row o, one float32 multiplication; ``each`` blocks share a d."""
    count = d.shape[1]
    if steps.shape[1] == 0:
        return simd.load_floats(d, o * count + b)
    scale = simd.splat_floats(simd.scalar(d, o * count + b // each))
    return simd.multiply_floats(scale, simd.to_floats(simd.load_byte_ints(steps, o * blocks + b)))


@inline
def _row_scales(
    d: NDArray[np.uint16],
    steps: NDArray[Any],
    each: int,
    o: int,
    blocks: int,
    out: NDArray[np.float32],
    at: int,
) -> None:
    """``out[at + b] = d * step`` of row o; a number of blocks that is no multiple of 8 has no steps."""
    whole = blocks // 8 * 8
    for b in range(0, whole, 8):
        simd.store_floats(out, at + b, _eight(d, steps, each, o, b, blocks))
    for b in range(whole, blocks):
        out[0, at + b] = simd.scalar(d, o * d.shape[1] + b)


@inline
def _row_offset(
    d: NDArray[np.uint16],
    steps: NDArray[Any],
    each: int,
    o: int,
    blocks: int,
    x_sums: NDArray[np.float32],
    m: int,
) -> np.float32:
    """``sum(d * step * x_sums[m])`` of row o."""
    whole = blocks // 8 * 8
    total = simd.zero_floats()
    for b in range(0, whole, 8):
        part = simd.load_floats(x_sums, m * x_sums.shape[1] + b)
        total = simd.fma(_eight(d, steps, each, o, b, blocks), part, total)
    offset: np.float32 = simd.sum_floats(total)
    for b in range(whole, blocks):
        offset += simd.scalar(d, o * d.shape[1] + b) * x_sums[m, b]
    return offset


@inline
def _multiply(kind: int, arguments: Any) -> None:
    """``out[:, begin:end] = x @ W[begin:end].T``.

    Parameters
    ----------
    kind : int
        A constant.
    arguments : tuple
        table
            uint8 (32,): 16 low, 16 high bytes of the values, for TABLE.
        codes, d, steps, dmin, mins
            The prepared matrix.
        x, x_scales
            int16 and float32 from ``activations.quantize`` with WORD_LIMIT.
        x_sums
            float32 (tokens, blocks rounded up to a multiple of 8), from ``activations.block_sums``; unused without
            ``dmin``.
        out
            float32 (tokens, rows); written in these columns only.
        begin, end
            int
    """
    if arguments[6].shape[0] == 1:
        _one_token(kind, arguments)
    else:
        _some_tokens(kind, arguments)


@inline
def _one_token(kind: int, arguments: Any) -> None:
    """A loop of its own, see ``codebook16``; and all that a step has to compile."""
    table, codes, d, steps, dmin, mins, x, x_scales, x_sums, out, begin, end = arguments
    groups, stride, size, blocks, each = _sizes(kind, codes, x)
    low, high = simd.load_table(table, 0), simd.load_table(table, 16)
    scales = scratch(_AHEAD_ROWS * blocks)
    for o in range(begin, end):
        row = (o - begin) % _AHEAD_ROWS * blocks
        if row == 0:
            for k in range(simd.least(_AHEAD_ROWS, end - o)):
                _row_scales(d, steps, each, o + k, blocks, scales, k * blocks)
        one = simd.zero_floats()
        for g in range(groups):
            w = _fetch(kind, low, high, codes, (o * groups + g) * stride, stride)
            part = _sum(size, x, g * GROUP, w, scales, row + g * GROUP // size)
            one = simd.fma(part, simd.splat_floats(x_scales[0, g]), one)
        out[0, o] = simd.sum_floats(one)
        if dmin.shape[1]:
            out[0, o] -= _row_offset(dmin, mins, each, o, blocks, x_sums, 0)


@inline
def _some_tokens(kind: int, arguments: Any) -> None:
    table, codes, d, steps, dmin, mins, x, x_scales, x_sums, out, begin, end = arguments
    tokens, width = x.shape
    groups, stride, size, blocks, each = _sizes(kind, codes, x)
    low, high = simd.load_table(table, 0), simd.load_table(table, 16)
    scales, sums = scratch(blocks), scratch(tokens * 8)
    for o in range(begin, end):
        _row_scales(d, steps, each, o, blocks, scales, 0)
        for m in range(tokens):
            simd.store_floats(sums, m * 8, simd.zero_floats())
        for g in range(groups):
            w = _fetch(kind, low, high, codes, (o * groups + g) * stride, stride)
            for m in range(tokens):
                part = _sum(size, x, m * width + g * GROUP, w, scales, g * GROUP // size)
                total = simd.load_floats(sums, m * 8)
                simd.store_floats(sums, m * 8, simd.fma(part, simd.splat_floats(x_scales[m, g]), total))
        for m in range(tokens):
            out[m, o] = simd.sum_floats(simd.load_floats(sums, m * 8))
            if dmin.shape[1]:
                out[m, o] -= _row_offset(dmin, mins, each, o, blocks, x_sums, m)


@inline
def _sizes(kind: int, codes: NDArray[np.uint8], x: NDArray[np.int16]) -> tuple[int, int, int, int, int]:
    """Groups of a row, bytes of one, inputs of a block, blocks of a row, blocks that share a ``d``."""
    groups, size = x.shape[1] // GROUP, block_size(kind)
    return groups, codes.shape[1] // groups, size, x.shape[1] // size, 256 // size


@inline
def _fetch(kind: int, low: Any, high: Any, codes: NDArray[np.uint8], at: int, stride: int) -> Any:
    """:func:`_words`, and a request for those to come."""
    simd.stream(codes, at)
    if stride > 64:
        simd.stream(codes, at + 64)
    return _words(kind, low, high, codes, at)


@inline
def _sum(size: int, x: NDArray[np.int16], at: int, w: Any, scales: NDArray[np.float32], b: int) -> Any:
    """Products of 128 weights in blocks of ``size``, scaled."""
    return _sum16(x, at, w, scales, b) if size == 16 else _sum32(x, at, w, scales, b)


@inline
def _store(
    first: Any, second: Any, scales: Any, offsets: Any, b: int, step: int, out: NDArray[np.float32], at: int
) -> None:
    """32 weights, of block b and, where ``step`` is 2, of the next one."""
    _store_half(first, _scale(scales, b), _scale(offsets, b), out, at)
    _store_half(second, _scale(scales, b + step // 2), _scale(offsets, b + step // 2), out, at + 16)


@inline
def _store_half(words: Any, scale: Any, offset: Any, out: NDArray[np.float32], at: int) -> None:
    low = simd.multiply_floats(scale, simd.to_floats(simd.low_ints(words)))
    high = simd.multiply_floats(scale, simd.to_floats(simd.high_ints(words)))
    simd.store_floats(out, at, simd.subtract_floats(low, offset))
    simd.store_floats(out, at + 8, simd.subtract_floats(high, offset))


@inline
def _decode(kind: int, arguments: Any) -> None:
    """Rows ``begin, begin + 1, ...`` as float32, exactly.

    Parameters
    ----------
    kind : int
        A constant.
    arguments : tuple
        table, codes, d, steps, dmin, mins
            As for :func:`_multiply`.
        out
            float32 (some rows, in_features); written.
        begin
            int
    """
    table, codes, d, steps, dmin, mins, out, begin = arguments
    rows, count = out.shape
    size, stride = block_size(kind), group_bytes(kind)
    groups = codes.shape[1] // stride
    blocks = groups * GROUP // size
    each = 256 // size
    low, high = simd.load_table(table, 0), simd.load_table(table, 16)
    scales, offsets = scratch(blocks), scratch(blocks)
    for b in range(blocks):
        offsets[0, b] = 0
    for r in range(rows):
        o = begin + r
        _row_scales(d, steps, each, o, blocks, scales, 0)
        if dmin.shape[1]:
            _row_scales(dmin, mins, each, o, blocks, offsets, 0)
        for g in range(groups):
            w = _words(kind, low, high, codes, (o * groups + g) * stride)
            at, b, step = r * count + g * GROUP, g * GROUP // size, 32 // size  # blocks in 32 weights
            left = count - g * GROUP  # a multiple of 32
            _store(w[0], w[1], scales, offsets, b, step, out, at)
            if left > 32:
                _store(w[2], w[3], scales, offsets, b + step, step, out, at + 32)
            if left > 64:
                _store(w[4], w[5], scales, offsets, b + 2 * step, step, out, at + 64)
            if left > 96:
                _store(w[6], w[7], scales, offsets, b + 3 * step, step, out, at + 96)


@inline
def _step(kind: int, a: Any, begin: int, end: int) -> None:
    """For ``kernels.cpu.program``.

    table, codes, d, steps, dmin, mins, rows, padded, columns of d, steps, dmin and mins, x, x_scales, x_sums, columns
    of x_sums, out.
    """
    rows, width = a[6], a[7]
    arguments = (
        array(a[0], np.uint8, (32,)), array(a[1], np.uint8, (rows, width // GROUP * group_bytes(kind))),
        array(a[2], np.uint16, (rows, a[8])), array(a[3], np.int8, (rows, a[9])),
        array(a[4], np.uint16, (rows, a[10])), array(a[5], np.int8, (rows, a[11])),
        array(a[12], np.int16, (1, width)), array(a[13], np.float32, (1, width // GROUP)),
        array(a[14], np.float32, (1, a[15])), array(a[16], np.float32, (1, rows)),
        begin, end,
    )  # fmt: skip
    _one_token(kind, arguments)


# One function a kind, so that the kind is a constant in it: chosen at run time, it costs more than the product.
@jit()
def _multiply_table(*arguments: Any) -> None:
    _multiply(TABLE, arguments)


@jit()
def _decode_table(*arguments: Any) -> None:
    _decode(TABLE, arguments)


def _step_table(a: Any, begin: int, end: int) -> None:
    _step(TABLE, a, begin, end)


@jit()
def _multiply_nibble(*arguments: Any) -> None:
    _multiply(NIBBLE, arguments)


@jit()
def _decode_nibble(*arguments: Any) -> None:
    _decode(NIBBLE, arguments)


def _step_nibble(a: Any, begin: int, end: int) -> None:
    _step(NIBBLE, a, begin, end)


@jit()
def _multiply_byte(*arguments: Any) -> None:
    _multiply(BYTE, arguments)


@jit()
def _decode_byte(*arguments: Any) -> None:
    _decode(BYTE, arguments)


def _step_byte(a: Any, begin: int, end: int) -> None:
    _step(BYTE, a, begin, end)


@jit()
def _multiply_six(*arguments: Any) -> None:
    _multiply(SIX, arguments)


@jit()
def _decode_six(*arguments: Any) -> None:
    _decode(SIX, arguments)


def _step_six(a: Any, begin: int, end: int) -> None:
    _step(SIX, a, begin, end)


@jit()
def _multiply_byte16(*arguments: Any) -> None:
    _multiply(BYTE16, arguments)


@jit()
def _decode_byte16(*arguments: Any) -> None:
    _decode(BYTE16, arguments)


def _step_byte16(a: Any, begin: int, end: int) -> None:
    _step(BYTE16, a, begin, end)


# arguments of :func:`_multiply` without the kind
MULTIPLY = {
    TABLE: _multiply_table,
    NIBBLE: _multiply_nibble,
    BYTE: _multiply_byte,
    SIX: _multiply_six,
    BYTE16: _multiply_byte16,
}
# arguments of :func:`_decode` without the kind
DECODE = {
    TABLE: _decode_table,
    NIBBLE: _decode_nibble,
    BYTE: _decode_byte,
    SIX: _decode_six,
    BYTE16: _decode_byte16,
}
# arguments: :func:`_step`
STEP = {TABLE: _step_table, NIBBLE: _step_nibble, BYTE: _step_byte, SIX: _step_six, BYTE16: _step_byte16}
