"""Codebooks of at most 16 entries a row: two table look-ups of 32 codes at once, products of int16.

Prepared once at load:

======== ========================== =============================================================================
array    shape                      content
======== ========================== =============================================================================
codes    u8 [rows, padded/2]        64 inputs are 32 bytes: input t < 32 in the low nibble of byte LANE[t], input
                                    32 + t in the high nibble of the same byte
planes   u8 [rows, 32]              the row's table as int16, entries scaled to 8191: 16 low bytes, 16 high bytes
scales   f32 [rows]                 of that table
halves   u8 [rows, 32]              the row's table as float16, likewise: for the exact decode
======== ========================== =============================================================================

LANE puts inputs 0-7, 8-15, 16-23, 24-31 into bytes 0, 16, 8, 24: after both bytes of an entry are looked up,
interleaving them gives weights in natural order, and activations need none of their own. int8 tables would be as fast
(25.9 against 26.9 cycles for 128 weights on Zen1) with a hundred times the error.
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
    "decode_rows",
    "decode_wide",
    "half_tables",
    "multiply_rows",
    "multiply_step",
    "pack_codes",
    "quantize_tables",
]

SIMD = "ce3020bb72a775c0"  # simd.fingerprint(): a new one makes numba compile this file again
TABLE_LIMIT = 8191


@jit()
def pack_codes(codes: NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
    """Bring nibbles into the order of this module.

    Parameters
    ----------
    codes : ndarray of uint8, shape (rows, in_features)
        Each below 16.
    out : ndarray of uint8, shape (rows, padded / 2)
        Written; code 0 beyond ``in_features``.
    """
    count = codes.shape[1]
    for o in range(codes.shape[0]):
        line, row = out[o], codes[o]
        for i in range(line.shape[0]):
            line[i] = 0
        for i in range(count):
            t = i & 31
            lane = (t & 7) | ((t & 8) << 1) | ((t & 16) >> 1)
            line[(i >> 6) * 32 + lane] |= row[i] << np.uint8((i & 32) >> 3)


def quantize_tables(tables: NDArray[Any]) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Tables as int16 planes.

    Parameters
    ----------
    tables : ndarray of float16 or float32, shape (rows, at most 16)

    Returns
    -------
    planes : ndarray of uint8, shape (rows, 32)
    scales : ndarray of float32, shape (rows,)
    """
    values = np.zeros((tables.shape[0], 16), np.float64)
    values[:, : tables.shape[1]] = tables
    largest = np.abs(values).max(axis=1, initial=0.0)
    step = largest / TABLE_LIMIT
    with np.errstate(invalid="ignore", divide="ignore"):
        words = np.where(step[:, None] > 0, np.rint(values / step[:, None]), 0.0)
    return _planes(words.astype("<i2")), step.astype(np.float32)


def half_tables(tables: NDArray[np.float16]) -> NDArray[np.uint8]:
    """float16 tables of at most 16 entries as planes, uint8 [rows, 32]."""
    values = np.zeros((tables.shape[0], 16), "<f2")
    values[:, : tables.shape[1]] = tables
    return _planes(values)


def _planes(values: NDArray[Any]) -> NDArray[np.uint8]:
    """All low bytes of 16 two-byte values, then all high bytes."""
    pairs = np.ascontiguousarray(values).view(np.uint8).reshape(-1, 16, 2)
    return np.ascontiguousarray(pairs.transpose(0, 2, 1)).reshape(-1, 32)


@inline
def _words(low: Any, high: Any, index: Any) -> Any:
    a, b = simd.look_up_bytes(low, index), simd.look_up_bytes(high, index)
    return simd.interleave_low(a, b), simd.interleave_high(a, b)


@inline
def _sum(x: NDArray[np.int16], at: int, w: Any) -> Any:
    """Exact products of 128 activations with weights; one chain, which becomes VPDPWSSD where there is one."""
    total = simd.multiply_add_words(simd.load_words(x, at), w[0])
    total = simd.add_ints(total, simd.multiply_add_words(simd.load_words(x, at + 16), w[1]))
    total = simd.add_ints(total, simd.multiply_add_words(simd.load_words(x, at + 32), w[2]))
    total = simd.add_ints(total, simd.multiply_add_words(simd.load_words(x, at + 48), w[3]))
    total = simd.add_ints(total, simd.multiply_add_words(simd.load_words(x, at + 64), w[4]))
    total = simd.add_ints(total, simd.multiply_add_words(simd.load_words(x, at + 80), w[5]))
    total = simd.add_ints(total, simd.multiply_add_words(simd.load_words(x, at + 96), w[6]))
    return simd.add_ints(total, simd.multiply_add_words(simd.load_words(x, at + 112), w[7]))


@inline
def _one_token(
    codes: NDArray[np.uint8],
    planes: NDArray[np.uint8],
    scales: NDArray[np.float32],
    x: NDArray[np.int16],
    x_scales: NDArray[np.float32],
    out: NDArray[np.float32],
    begin: int,
    end: int,
) -> None:
    """A loop of its own: as a branch in that for several tokens it took a quarter more time.

    Four rows of different pages at once are four streams for the hardware's prefetcher: 9.6 instead of 8.1 GB/s from
    memory on one thread, 14.6 instead of 12.3 on two. Where rows are no multiple of four, the last ones are computed
    twice, to the same bits.
    """
    groups = x.shape[1] // GROUP
    apart = (end - begin + 3) // 4
    for o in range(begin, begin + apart):
        p, q = simd.least(o + apart, end - 1), simd.least(o + 2 * apart, end - 1)
        r = simd.least(o + 3 * apart, end - 1)
        to, tp, tq, tr = _tables(planes, o), _tables(planes, p), _tables(planes, q), _tables(planes, r)
        a, b, c, d = simd.zero_floats(), simd.zero_floats(), simd.zero_floats(), simd.zero_floats()
        for g in range(groups):
            scale = simd.splat_floats(x_scales[0, g])
            a = simd.fma(_part(codes, (o * groups + g) * 64, to, x, g), scale, a)
            b = simd.fma(_part(codes, (p * groups + g) * 64, tp, x, g), scale, b)
            c = simd.fma(_part(codes, (q * groups + g) * 64, tq, x, g), scale, c)
            d = simd.fma(_part(codes, (r * groups + g) * 64, tr, x, g), scale, d)
        out[0, o], out[0, p] = simd.sum_floats(a) * scales[o], simd.sum_floats(b) * scales[p]
        out[0, q], out[0, r] = simd.sum_floats(c) * scales[q], simd.sum_floats(d) * scales[r]


@jit()
def multiply_rows(
    codes: NDArray[np.uint8],
    planes: NDArray[np.uint8],
    scales: NDArray[np.float32],
    x: NDArray[np.int16],
    x_scales: NDArray[np.float32],
    out: NDArray[np.float32],
    begin: int,
    end: int,
) -> None:
    """``out[:, begin:end] = x @ W[begin:end].T``.

    Parameters
    ----------
    codes, planes, scales
        The prepared matrix.
    x, x_scales : ndarrays of int16 and float32
        From ``activations.quantize`` with WORD_LIMIT.
    out : ndarray of float32, shape (tokens, rows)
        Written in these columns only.
    begin, end : int
    """
    tokens, width = x.shape
    groups = width // GROUP
    if tokens == 1:
        _one_token(codes, planes, scales, x, x_scales, out, begin, end)
        return
    sums = scratch(tokens * 8)
    for o in range(begin, end):
        low, high = simd.load_table(planes, o * 32), simd.load_table(planes, o * 32 + 16)
        for m in range(tokens):
            simd.store_floats(sums, m * 8, simd.zero_floats())
        for g in range(groups):
            w = _group(codes, (o * groups + g) * 64, low, high)
            for m in range(tokens):
                part = simd.to_floats(_sum(x, m * width + g * GROUP, w))
                total = simd.load_floats(sums, m * 8)
                simd.store_floats(sums, m * 8, simd.fma(part, simd.splat_floats(x_scales[m, g]), total))
        for m in range(tokens):
            out[m, o] = simd.sum_floats(simd.load_floats(sums, m * 8)) * scales[o]


@inline
def _tables(planes: NDArray[np.uint8], o: int) -> Any:
    simd.prefetch(planes, (o + 8) * 32)
    return simd.load_table(planes, o * 32), simd.load_table(planes, o * 32 + 16)


@inline
def _part(codes: NDArray[np.uint8], at: int, tables: Any, x: NDArray[np.int16], g: int) -> Any:
    """Products of a group of one row with one token, before their scales."""
    return simd.to_floats(_sum(x, g * GROUP, _group(codes, at, tables[0], tables[1])))


@inline
def _group(codes: NDArray[np.uint8], at: int, low: Any, high: Any) -> Any:
    """128 weights, as eight vectors in natural order."""
    nibble, four = simd.splat_bytes(15), simd.splat_bytes(4)
    simd.stream(codes, at)
    v = simd.load_bytes(codes, at)
    w0, w1 = _words(low, high, simd.and_bytes(v, nibble))
    w2, w3 = _words(low, high, simd.shift_right_bytes(v, four))
    v = simd.load_bytes(codes, at + 32)
    w4, w5 = _words(low, high, simd.and_bytes(v, nibble))
    w6, w7 = _words(low, high, simd.shift_right_bytes(v, four))
    return w0, w1, w2, w3, w4, w5, w6, w7


@jit()
def decode_rows(
    codes: NDArray[np.uint8], halves: NDArray[np.uint8], out: NDArray[np.float32], begin: int
) -> None:
    """Rows ``begin, begin + 1, ...`` as float32, exactly.

    Parameters
    ----------
    codes, halves
        The prepared matrix.
    out : ndarray of float32, shape (some rows, in_features)
        Written.
    begin : int
    """
    rows, count = out.shape
    groups = codes.shape[1] // 64
    whole = count // GROUP
    nibble, four = simd.splat_bytes(15), simd.splat_bytes(4)
    rest = scratch(GROUP)
    for r in range(rows):
        o = begin + r
        low, high = simd.load_table(halves, o * 32), simd.load_table(halves, o * 32 + 16)
        for g in range(groups):
            target, to = (out, r * count + g * GROUP) if g < whole else (rest, 0)
            for k in range(2):
                v = simd.load_bytes(codes, (o * groups + g) * 64 + k * 32)
                w0, w1 = _words(low, high, simd.and_bytes(v, nibble))
                w2, w3 = _words(low, high, simd.shift_right_bytes(v, four))
                i = to + k * 64
                simd.store_floats(target, i, simd.low_halves(w0))
                simd.store_floats(target, i + 8, simd.high_halves(w0))
                simd.store_floats(target, i + 16, simd.low_halves(w1))
                simd.store_floats(target, i + 24, simd.high_halves(w1))
                simd.store_floats(target, i + 32, simd.low_halves(w2))
                simd.store_floats(target, i + 40, simd.high_halves(w2))
                simd.store_floats(target, i + 48, simd.low_halves(w3))
                simd.store_floats(target, i + 56, simd.high_halves(w3))
        for i in range(whole * GROUP, count):  # not a slice: numba compiles 4 s of error messages for that
            out[r, i] = rest[0, i - whole * GROUP]


@jit()
def decode_wide(
    codes: NDArray[np.uint8], table: NDArray[np.float32], out: NDArray[np.float32], begin: int
) -> None:
    """:func:`decode_rows` for the rare tables that float16 cannot hold; ``table`` float32 [rows, K]."""
    rows, count = out.shape
    for r in range(rows):
        line, entries = codes[begin + r], table[begin + r]
        for i in range(count):
            t = i & 31
            lane = (t & 7) | ((t & 8) << 1) | ((t & 16) >> 1)
            out[r, i] = entries[line[(i >> 6) * 32 + lane] >> np.uint8((i & 32) >> 3) & np.uint8(15)]


def multiply_step(a: Any, begin: int, end: int) -> None:
    """For ``kernels.cpu.program``: codes, planes, scales, rows, padded, x, x_scales, out."""
    rows, width = a[3], a[4]
    _one_token(
        array(a[0], np.uint8, (rows, width // 2)), array(a[1], np.uint8, (rows, 32)),
        array(a[2], np.float32, (rows,)), array(a[5], np.int16, (1, width)),
        array(a[6], np.float32, (1, width // GROUP)), array(a[7], np.float32, (1, rows)),
        begin, end,
    )  # fmt: skip
