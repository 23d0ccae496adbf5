"""Codebooks of up to 256 entries a row: by a float32 table in the first-level cache, or expanded to int16 at load.

The table kernel needs no preparation (codes u8 [rows, in_features], table f32 [rows, K]) and is as exact as BLAS, but
bound by load ports: 0.8 cycles a weight on Zen1, about the speed of float32 BLAS at a quarter of its memory. Expanded
to int16 (two bytes a weight, entries scaled to 8191) it runs at the speed of memory, with an error of 1e-4.
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
    "expand_rows",
    "multiply_expanded",
    "multiply_expanded_step",
    "multiply_rows",
    "multiply_step",
]

SIMD = "ce3020bb72a775c0"  # simd.fingerprint(): a new one makes numba compile this file again


@jit()
def multiply_rows(
    codes: NDArray[np.uint8],
    table: NDArray[np.float32],
    x: NDArray[np.float32],
    out: NDArray[np.float32],
    begin: int,
    end: int,
) -> None:
    """``out[:, begin:end] = x @ table[codes][begin:end].T``.

    Parameters
    ----------
    codes : ndarray of uint8, shape (rows, in_features)
        Every code must be below K: nothing is checked here.
    table : ndarray of float32, shape (rows, K)
    x : ndarray of float32, shape (tokens, in_features)
    out : ndarray of float32, shape (tokens, rows)
        Written in these columns only.
    begin, end : int
    """
    tokens, count = x.shape
    if tokens == 1:
        _one_token(codes, table, x, out, begin, end)
        return
    entries = table.shape[1]
    whole = count // 32 * 32
    sums = scratch(tokens * 8)
    for o in range(begin, end):
        first, row = o * entries, o * count
        for m in range(tokens):
            simd.store_floats(sums, m * 8, simd.zero_floats())
        for i in range(0, whole, 32):
            w = _look_up(table, first, codes, row + i)
            for m in range(tokens):
                at = m * count + i
                total = simd.fma(simd.load_floats(x, at), w[0], simd.load_floats(sums, m * 8))
                part = simd.multiply_floats(simd.load_floats(x, at + 8), w[1])
                total = simd.fma(simd.load_floats(x, at + 16), w[2], total)
                part = simd.fma(simd.load_floats(x, at + 24), w[3], part)
                simd.store_floats(sums, m * 8, simd.add_floats(total, part))
        for m in range(tokens):
            total = simd.sum_floats(simd.load_floats(sums, m * 8))
            for i in range(whole, count):
                total += x[m, i] * table[o, codes[o, i]]
            out[m, o] = total


@inline
def _one_token(
    codes: NDArray[np.uint8],
    table: NDArray[np.float32],
    x: NDArray[np.float32],
    out: NDArray[np.float32],
    begin: int,
    end: int,
) -> None:
    count, entries = x.shape[1], table.shape[1]
    whole = count // 32 * 32
    for o in range(begin, end):
        a, b, c, d = simd.zero_floats(), simd.zero_floats(), simd.zero_floats(), simd.zero_floats()
        for i in range(0, whole, 32):
            w = _look_up(table, o * entries, codes, o * count + i)
            a = simd.fma(simd.load_floats(x, i), w[0], a)
            b = simd.fma(simd.load_floats(x, i + 8), w[1], b)
            c = simd.fma(simd.load_floats(x, i + 16), w[2], c)
            d = simd.fma(simd.load_floats(x, i + 24), w[3], d)
        total = simd.sum_floats(simd.add_floats(simd.add_floats(a, b), simd.add_floats(c, d)))
        for i in range(whole, count):
            total += x[0, i] * table[o, codes[o, i]]
        out[0, o] = total


@inline
def _look_up(table: NDArray[np.float32], first: int, codes: NDArray[np.uint8], at: int) -> Any:
    """32 weights."""
    simd.stream(codes, at)
    return (
        simd.look_up_floats(table, first, codes, at),
        simd.look_up_floats(table, first, codes, at + 8),
        simd.look_up_floats(table, first, codes, at + 16),
        simd.look_up_floats(table, first, codes, at + 24),
    )


@jit()
def expand_rows(
    codes: NDArray[np.uint8],
    table: NDArray[np.float32],
    limit: int,
    out: NDArray[np.int16],
    scales: NDArray[np.float32],
) -> None:
    """Weights as int16 and a scale a row: ``round(table[code] * limit / max|table|)``.

    Parameters
    ----------
    codes : ndarray of uint8, shape (rows, in_features)
    table : ndarray of float32, shape (rows, K)
    limit : int
        8191, so that the sum of a group fits an int32.
    out : ndarray of int16, shape (rows, padded)
        Written; 0 beyond ``in_features``.
    scales : ndarray of float32, shape (rows,)
        Written.
    """
    words = np.empty(table.shape[1], np.int16)
    for o in range(codes.shape[0]):
        largest = 0.0
        for value in table[o]:
            largest = max(largest, abs(np.float64(value)))
        step = largest / limit
        scales[o] = step
        for k in range(table.shape[1]):
            words[k] = np.int32(np.rint(table[o, k] / step)) if step > 0 else 0
        line, row = out[o], codes[o]
        for i in range(row.shape[0]):
            line[i] = words[row[i]]
        line[row.shape[0] :] = 0


@jit()
def multiply_expanded(
    words: NDArray[np.int16],
    scales: NDArray[np.float32],
    x: NDArray[np.int16],
    x_scales: NDArray[np.float32],
    out: NDArray[np.float32],
    begin: int,
    end: int,
) -> None:
    """``out[:, begin:end] = x @ W[begin:end].T`` of expanded rows.

    Parameters
    ----------
    words, scales
        From :func:`expand_rows`.
    x, x_scales : ndarrays of int16 and float32
        From ``activations.quantize`` with WORD_LIMIT.
    out : ndarray of float32, shape (tokens, rows)
        Written in these columns only.
    begin, end : int
    """
    tokens, width = x.shape
    groups = width // GROUP
    if tokens == 1:
        _one_expanded(words, scales, x, x_scales, out, begin, end)
        return
    sums = scratch(tokens * 8)
    for o in range(begin, end):
        for m in range(tokens):
            simd.store_floats(sums, m * 8, simd.zero_floats())
        for g in range(groups):
            w = _words(words, o * width + g * GROUP)
            for m in range(tokens):
                part = simd.to_floats(_sum(x, m * width + g * GROUP, w))
                total = simd.load_floats(sums, m * 8)
                simd.store_floats(sums, m * 8, simd.fma(part, simd.splat_floats(x_scales[m, g]), total))
        for m in range(tokens):
            out[m, o] = simd.sum_floats(simd.load_floats(sums, m * 8)) * scales[o]


@inline
def _one_expanded(
    words: NDArray[np.int16],
    scales: NDArray[np.float32],
    x: NDArray[np.int16],
    x_scales: NDArray[np.float32],
    out: NDArray[np.float32],
    begin: int,
    end: int,
) -> None:
    """Four rows at once are four streams of memory: 15 % more than one stream gives.

    Where rows are no multiple of four, the last ones are computed twice, to the same bits.
    """
    width = x.shape[1]
    for o in range(begin, end, 4):
        p, q, r = simd.least(o + 1, end - 1), simd.least(o + 2, end - 1), simd.least(o + 3, end - 1)
        a, b, c, d = simd.zero_floats(), simd.zero_floats(), simd.zero_floats(), simd.zero_floats()
        for g in range(width // GROUP):
            at, scale = g * GROUP, simd.splat_floats(x_scales[0, g])
            a = simd.fma(simd.to_floats(_group(words, o * width + at, x, at)), scale, a)
            b = simd.fma(simd.to_floats(_group(words, p * width + at, x, at)), scale, b)
            c = simd.fma(simd.to_floats(_group(words, q * width + at, x, at)), scale, c)
            d = simd.fma(simd.to_floats(_group(words, r * width + at, x, at)), scale, d)
        out[0, o], out[0, p] = simd.sum_floats(a) * scales[o], simd.sum_floats(b) * scales[p]
        out[0, q], out[0, r] = simd.sum_floats(c) * scales[q], simd.sum_floats(d) * scales[r]


@inline
def _words(words: NDArray[np.int16], at: int) -> Any:
    """128 weights."""
    for k in range(0, GROUP, 32):
        simd.stream(words, at + k)
    return (
        simd.load_words(words, at), simd.load_words(words, at + 16),
        simd.load_words(words, at + 32), simd.load_words(words, at + 48),
        simd.load_words(words, at + 64), simd.load_words(words, at + 80),
        simd.load_words(words, at + 96), simd.load_words(words, at + 112),
    )  # fmt: skip


@inline
def _group(words: NDArray[np.int16], at: int, x: NDArray[np.int16], x_at: int) -> Any:
    return _sum(x, x_at, _words(words, at))


@inline
def _sum(x: NDArray[np.int16], at: int, w: Any) -> Any:
    """Exact products of 128 activations with weights."""
    total = simd.multiply_add_words(simd.load_words(x, at), w[0])
    total = simd.add_ints(total, simd.multiply_add_words(simd.load_words(x, at + 16), w[1]))
    total = simd.add_ints(total, simd.multiply_add_words(simd.load_words(x, at + 32), w[2]))
    total = simd.add_ints(total, simd.multiply_add_words(simd.load_words(x, at + 48), w[3]))
    total = simd.add_ints(total, simd.multiply_add_words(simd.load_words(x, at + 64), w[4]))
    total = simd.add_ints(total, simd.multiply_add_words(simd.load_words(x, at + 80), w[5]))
    total = simd.add_ints(total, simd.multiply_add_words(simd.load_words(x, at + 96), w[6]))
    return simd.add_ints(total, simd.multiply_add_words(simd.load_words(x, at + 112), w[7]))


def multiply_step(a: Any, begin: int, end: int) -> None:
    """For ``kernels.cpu.program``: codes, table, rows, in_features, K, x, out."""
    rows, count = a[2], a[3]
    _one_token(
        array(a[0], np.uint8, (rows, count)), array(a[1], np.float32, (rows, a[4])),
        array(a[5], np.float32, (1, count)), array(a[6], np.float32, (1, rows)),
        begin, end,
    )  # fmt: skip


def multiply_expanded_step(a: Any, begin: int, end: int) -> None:
    """For ``kernels.cpu.program``: words, scales, rows, padded, x, x_scales, out."""
    rows, width = a[2], a[3]
    _one_expanded(
        array(a[0], np.int16, (rows, width)), array(a[1], np.float32, (rows,)),
        array(a[4], np.int16, (1, width)), array(a[5], np.float32, (1, width // GROUP)),
        array(a[6], np.float32, (1, rows)), begin, end,
    )  # fmt: skip
