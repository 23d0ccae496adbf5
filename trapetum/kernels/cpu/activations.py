"""Activations as integers: int16 (15 bits) or int8, one float32 scale for 128 of them.

The fused products multiply integers exactly and scale once a group, so their error is that of this rounding: relative
to the output 5e-5 at 15 bits (1e-4 together with a 14-bit codebook), 6e-3 at 8 bits (4096 Gaussian inputs).
Rows are padded with zeros to a multiple of ``GROUP``. A value that is not finite makes its group's scale NaN, and so
every output; magnitudes below 1e-34 count as zero.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from trapetum.kernels.cpu import simd
from trapetum.kernels.cpu.memory import array
from trapetum.kernels.jit import inline, jit

__all__ = [
    "BYTE_LIMIT",
    "GROUP",
    "SPLIT_LIMIT",
    "WORD_LIMIT",
    "arrange",
    "arrange_step",
    "block_sums",
    "block_sums_step",
    "byte_form",
    "padded",
    "quad_sums",
    "quad_sums_step",
    "quantize",
    "quantize_bytes_step",
    "quantize_words_step",
    "split",
    "split_form",
    "split_step",
    "sums_form",
    "word_form",
]

SIMD = "ce3020bb72a775c0"  # simd.fingerprint(): a new one makes numba compile this file again

GROUP = 128
# 16 products of a lane, 8191 (14-bit codebook) x 16383, are 2,147,090,448 < 2**31: one int32 holds a group.
WORD_LIMIT = 16383
BYTE_LIMIT = 127
SPLIT_LIMIT = 127 * 128  # the high plane of :func:`split` stays an int8

_TINY, _HUGE = np.uint32(0x0504F6C7), np.uint32(0x7F800000)  # bits of 6.25e-36 and of infinity


def padded(count: int) -> int:
    """``count`` rounded up to whole groups.

    Examples
    --------
    >>> padded(1), padded(256)
    (128, 256)
    """
    return -(-count // GROUP) * GROUP


@inline
def quantize(x: NDArray[np.float32], limit: int, q: NDArray[Any], scales: NDArray[np.float32]) -> None:
    """Round every group to integers of at most ``limit``.

    Parameters
    ----------
    x : ndarray of float32, shape (tokens, in_features)
    limit : int
        ``WORD_LIMIT``, ``BYTE_LIMIT`` or ``SPLIT_LIMIT``.
    q : ndarray of int16 or int8, shape (tokens, padded(in_features))
        Written: ``round(x / scale)``, zeros beyond ``in_features``.
    scales : ndarray of float32, shape (tokens, padded(in_features) // GROUP)
        Written.
    """
    count, width = x.shape[1], q.shape[1]
    for m in range(x.shape[0]):
        for g in range(scales.shape[1]):
            start, to = m * count + g * GROUP, m * width + g * GROUP
            size = simd.least(GROUP, count - g * GROUP)
            top = np.uint32(0)  # compared as integers: a loop of float maxima does not vectorise
            for i in range(size):
                bits = simd.magnitude_bits(x, start + i)
                top = bits if bits > top else top
            if _TINY < top < _HUGE:
                magnitude = simd.float_of_bits(top)
                scales[m, g] = magnitude / np.float32(limit)
                inverse = np.float32(limit) / magnitude
                for i in range(size):
                    simd.store_integer(q, to + i, np.int32(np.rint(simd.scalar(x, start + i) * inverse)))
                for i in range(size, GROUP):
                    simd.store_integer(q, to + i, 0)
            else:
                scales[m, g] = np.float32(0) if top <= _TINY else np.float32(np.nan)
                for i in range(GROUP):
                    simd.store_integer(q, to + i, 0)


@inline
def block_sums(
    q: NDArray[np.int16], scales: NDArray[np.float32], size: int, out: NDArray[np.float32]
) -> None:
    """``out[m, b] = scale * sum(q[m, b*size : (b+1)*size])``, what a constant in every weight of a block is worth.

    Parameters
    ----------
    q : ndarray of int16, shape (tokens, padded)
    scales : ndarray of float32, shape (tokens, padded // GROUP)
    size : int
        A divisor of ``GROUP``.
    out : ndarray of float32, shape (tokens, at least padded // size)
        Written; 0 beyond the last block.
    """
    blocks = q.shape[1] // size
    for m in range(out.shape[0]):
        for b in range(blocks):
            total = np.int32(0)
            for i in range(b * size, (b + 1) * size):
                total += np.int32(q[m, i])
            out[m, b] = np.float32(total) * scales[m, b * size // GROUP]
        for b in range(blocks, out.shape[1]):
            out[m, b] = 0


@inline
def arrange(q: NDArray[np.int8], size: int, out: NDArray[np.int8]) -> None:
    """The order that ``kernels.cpu.ternary`` has for weights that share a scale in blocks of ``size``.

    Parameters
    ----------
    q : ndarray of int8, shape (tokens, padded)
    size : int
        32, 64 or 128 (natural order).
    out : ndarray of int8, shape (tokens, padded)
        Written: number 32 k + b of a group is input ``(b // (size/4)) * size + k * (size/4) + b % (size/4)`` of it.
    """
    each = size // 32  # eight bytes at a time
    for m in range(q.shape[0]):
        at = m * q.shape[1]
        for g in range(at, at + q.shape[1], GROUP):
            for k in range(4):
                for j in range(g + k * each * 8, g + GROUP, 32 * each):
                    for i in range(j, j + each * 8, 8):
                        simd.copy_eight(q, i, out, at)
                        at += 8


@inline
def quad_sums(q: NDArray[np.int8], out: NDArray[np.int32]) -> None:
    """Minus the sums that ``simd.dot_bytes`` makes of weights that are all 1: where a code is the weight plus one.

    Parameters
    ----------
    q : ndarray of int8, shape (tokens, padded)
    out : ndarray of int32, shape (tokens, padded // GROUP * 8)
        Written: lane j of a group is the sum over its four 32-byte vectors of bytes 4j .. 4j + 3, negated.
    """
    for m in range(out.shape[0]):
        for at in range(out.shape[1]):
            start = at // 8 * GROUP + at % 8 * 4
            total = np.int32(0)
            for k in range(start, start + GROUP, 32):
                for i in range(4):
                    total -= np.int32(q[m, k + i])
            out[m, at] = total


@inline
def split(q: NDArray[np.int16], high: NDArray[np.int8], low: NDArray[np.int8]) -> None:
    """``q = 128 * high + low`` with ``low`` in -64 .. 63, for ``q`` within ``SPLIT_LIMIT``.

    Parameters
    ----------
    q : ndarray of int16, shape (tokens, padded)
    high, low : ndarray of int8, same shape
        Written.
    """
    for m in range(q.shape[0]):
        for i in range(q.shape[1]):
            h = (np.int32(q[m, i]) + 64) >> 7
            high[m, i] = h
            low[m, i] = np.int32(q[m, i]) - (h << 7)


# ---------------------------------------------------------------------------- whole forms
# One call from Python each: between products that stream memory, its interpreter is cold, and six calls took 70 us.
@jit()
def word_form(x: NDArray[np.float32]) -> Any:
    """(q int16 [tokens, padded], scales float32 [tokens, groups]) with WORD_LIMIT."""
    groups = (x.shape[1] + GROUP - 1) // GROUP
    q, scales = np.empty((x.shape[0], groups * GROUP), np.int16), np.empty((x.shape[0], groups), np.float32)
    quantize(x, WORD_LIMIT, q, scales)
    return q, scales


@jit()
def sums_form(q: NDArray[np.int16], scales: NDArray[np.float32], size: int) -> Any:
    """What :func:`block_sums` makes, with columns up to a multiple of 8."""
    out = np.empty((q.shape[0], (q.shape[1] // size + 7) // 8 * 8), np.float32)
    block_sums(q, scales, size, out)
    return out


@inline
def _byte_form(q: NDArray[np.int8], scales: NDArray[np.float32], size: int) -> Any:
    if size < GROUP:
        arranged = np.empty_like(q)
        arrange(q, size, arranged)
        q = arranged
    quads = np.empty((q.shape[0], q.shape[1] // GROUP * 8), np.int32)
    quad_sums(q, quads)
    return q, scales, quads


@jit()
def byte_form(x: NDArray[np.float32], size: int) -> Any:
    """(q int8, scales, quads) for ``kernels.cpu.ternary``: arranged for blocks of ``size``."""
    groups = (x.shape[1] + GROUP - 1) // GROUP
    q, scales = np.empty((x.shape[0], groups * GROUP), np.int8), np.empty((x.shape[0], groups), np.float32)
    quantize(x, BYTE_LIMIT, q, scales)
    return _byte_form(q, scales, size)


@jit()
def split_form(x: NDArray[np.float32], size: int) -> Any:
    """The same with two tokens for each: its high and its low plane (:func:`split`)."""
    tokens, groups = x.shape[0], (x.shape[1] + GROUP - 1) // GROUP
    words, q = np.empty((tokens, groups * GROUP), np.int16), np.empty((2 * tokens, groups * GROUP), np.int8)
    scales = np.empty((2 * tokens, groups), np.float32)
    quantize(x, SPLIT_LIMIT, words, scales[tokens:])
    split(words, q[:tokens], q[tokens:])
    for m in range(tokens):
        for g in range(groups):
            scales[m, g] = np.float32(128) * scales[tokens + m, g]
    return _byte_form(q, scales, size)


# ---------------------------------------------------------------------------- for kernels.cpu.program, one token
def quantize_words_step(a: Any, begin: int, end: int) -> None:
    """x, in_features, limit, q, scales."""
    groups = (a[1] + GROUP - 1) // GROUP
    x, q = array(a[0], np.float32, (1, a[1])), array(a[3], np.int16, (1, groups * GROUP))
    quantize(x, a[2], q, array(a[4], np.float32, (1, groups)))


def quantize_bytes_step(a: Any, begin: int, end: int) -> None:
    """x, in_features, limit, q, scales."""
    groups = (a[1] + GROUP - 1) // GROUP
    x, q = array(a[0], np.float32, (1, a[1])), array(a[3], np.int8, (1, groups * GROUP))
    quantize(x, a[2], q, array(a[4], np.float32, (1, groups)))


def block_sums_step(a: Any, begin: int, end: int) -> None:
    """q, padded, scales, size, out, columns of out."""
    q, scales = (
        array(a[0], np.int16, (1, a[1])),
        array(a[2], np.float32, (1, a[1] // GROUP)),
    )
    block_sums(q, scales, a[3], array(a[4], np.float32, (1, a[5])))


def arrange_step(a: Any, begin: int, end: int) -> None:
    """q, rows, padded, size, out."""
    arrange(array(a[0], np.int8, (a[1], a[2])), a[3], array(a[4], np.int8, (a[1], a[2])))


def quad_sums_step(a: Any, begin: int, end: int) -> None:
    """q, rows, padded, out."""
    quad_sums(array(a[0], np.int8, (a[1], a[2])), array(a[3], np.int32, (a[1], a[2] // GROUP * 8)))


def split_step(a: Any, begin: int, end: int) -> None:
    """q int16, scales, padded, planes int8 [2, padded], scales of the planes [2, padded / GROUP]."""
    groups = a[2] // GROUP
    planes, scales = array(a[3], np.int8, (2, a[2])), array(a[4], np.float32, (2, groups))
    split(array(a[0], np.int16, (1, a[2])), planes[:1], planes[1:])
    found = array(a[1], np.float32, (groups,))
    for g in range(groups):
        scales[0, g], scales[1, g] = np.float32(128) * found[g], found[g]
