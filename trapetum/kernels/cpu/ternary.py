"""Two-bit codes around zero with a scale a group, against int8 activations.

Prepared once at load:

======== ===================== ===================================================================================
array    shape                 content
======== ===================== ===================================================================================
codes    u8 [rows, padded/4]   128 inputs are 32 bytes, which the blocks of inputs that share a scale divide: with
                               blocks of s (32, 64 or 128), byte b, bits 2k and 2k + 1, is input
                               ``(b // (s/4)) * s + k * (s/4) + b % (s/4)``; the weight is ``(code - 1) * scale``,
                               code 3 included
scales   u16 or f32            float16 bits, or float32; one for ``size`` inputs
======== ===================== ===================================================================================

So the eight sums of a product of 128 inputs belong to one block, to two or to four, and are scaled by one vector: small
blocks cost no more than large ones. Activations are brought into the same order (``activations.arrange``).

The unsigned code goes into the product and the sum of the activations is taken off, in integers. Precise activations
need no kernel of their own: a 15-bit one is two int8 planes (``activations.split``), which are two tokens with scales
``128 s`` and ``s``; the caller adds the two outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trapetum.kernels.cpu import simd
from trapetum.kernels.cpu.activations import GROUP
from trapetum.kernels.cpu.memory import array, scratch
from trapetum.kernels.jit import inline, jit

__all__ = [
    "decode_rows",
    "multiply_rows",
    "multiply_step",
    "pack_codes",
]

_BLOCKS = (32, 64, GROUP, 0)

SIMD = "ce3020bb72a775c0"  # simd.fingerprint(): a new one makes numba compile this file again


@jit()
def pack_codes(codes: NDArray[np.uint8], size: int, out: NDArray[np.uint8]) -> None:
    """Bring two-bit codes into the order of this module.

    Parameters
    ----------
    codes : ndarray of uint8, shape (rows, in_features)
        Each below 4.
    size : int
        Inputs a scale: a multiple of 128, or 32, or 64.
    out : ndarray of uint8, shape (rows, padded / 4)
        Written; beyond ``in_features`` code 1, which is zero.
    """
    count = codes.shape[1]
    block = simd.least(size, GROUP)
    each = block // 4
    for o in range(codes.shape[0]):
        line, row = out[o], codes[o]
        for i in range(line.shape[0]):
            line[i] = 0x55
        for i in range(count):
            within = i % block
            at = (i >> 7) * 32 + i % GROUP // block * each + within % each
            line[at] ^= (row[i] ^ np.uint8(1)) << np.uint8(within // each * 2)


@inline
def _fields(codes: NDArray[np.uint8], at: int) -> Any:
    """128 codes: four vectors of 32."""
    three = simd.splat_bytes(3)
    v = simd.load_bytes(codes, at)
    return (
        simd.and_bytes(v, three),
        simd.and_bytes(simd.shift_right_bytes(v, simd.splat_bytes(2)), three),
        simd.and_bytes(simd.shift_right_bytes(v, simd.splat_bytes(4)), three),
        simd.shift_right_bytes(v, simd.splat_bytes(6)),
    )


@inline
def _group_sum(u: Any, x: NDArray[np.int8], at: int, quads: NDArray[np.int32], quad: int) -> Any:
    """Products of 128 weights, before their scales."""
    total = simd.dot_bytes(
        simd.load_ints(quads, quad),
        u[0], u[1], u[2], u[3],
        simd.load_bytes(x, at), simd.load_bytes(x, at + 32), simd.load_bytes(x, at + 64), simd.load_bytes(x, at + 96),
    )  # fmt: skip
    return simd.to_floats(total)


@inline
def _group_scales(block: int, scales: NDArray[Any], row: int, g: int, size: int) -> Any:
    """Scales of the eight sums of a group; ``row`` is where the scales of the row begin. ``block`` as below."""
    if block == 32:
        return simd.spread_four(scales, row + g * 4)
    if block == 64:
        return simd.spread_two(scales, row + g * 2)
    if block == GROUP:
        return simd.splat_floats(simd.scalar(scales, row + g))
    return simd.splat_floats(simd.scalar(scales, row + g * GROUP // size))


@inline
def _part(block: int, arguments: Any, o: int, g: int, total: Any) -> Any:
    """Add the products of a group of row ``o`` with one token."""
    codes, scales, size, x, x_scales, quads = arguments
    groups, count = x.shape[1] // GROUP, scales.shape[1]
    at = (o * groups + g) * 32
    if g % 2 == 0:  # a cache line is two groups
        simd.stream(codes, at)
    part = _group_sum(_fields(codes, at), x, g * GROUP, quads, g * 8)
    scale = _group_scales(block, scales, o * count, g, size)
    return simd.fma(part, simd.multiply_floats(scale, simd.splat_floats(x_scales[0, g])), total)


@inline
def _one_token(block: int, arguments: Any, out: NDArray[np.float32], begin: int, end: int) -> None:
    """Products of rows with one token; ``block``: 32, 64, 128, or 0 for larger ones.

    Called with a constant and inlined: as a branch in the loop it took a sixth of the time. Four rows of different
    pages at once are four streams for the hardware's prefetcher: 8.5 instead of 6.9 GB/s from memory on one thread,
    10.8 instead of 8.8 on two. Where rows are no multiple of four, the last ones are computed twice, to the same bits.
    """
    groups = arguments[3].shape[1] // GROUP
    apart = (end - begin + 3) // 4
    for o in range(begin, begin + apart):
        p, q = simd.least(o + apart, end - 1), simd.least(o + 2 * apart, end - 1)
        r = simd.least(o + 3 * apart, end - 1)
        a, b, c, d = simd.zero_floats(), simd.zero_floats(), simd.zero_floats(), simd.zero_floats()
        for g in range(groups):
            a, b = _part(block, arguments, o, g, a), _part(block, arguments, p, g, b)
            c, d = _part(block, arguments, q, g, c), _part(block, arguments, r, g, d)
        out[0, o], out[0, p] = simd.sum_floats(a), simd.sum_floats(b)
        out[0, q], out[0, r] = simd.sum_floats(c), simd.sum_floats(d)


@inline
def _some_tokens(
    codes: NDArray[np.uint8],
    scales: NDArray[Any],
    size: int,
    x: NDArray[np.int8],
    x_scales: NDArray[np.float32],
    quads: NDArray[np.int32],
    out: NDArray[np.float32],
    begin: int,
    end: int,
) -> None:
    tokens, width = x.shape
    groups, count = width // GROUP, scales.shape[1]
    block = size if size <= GROUP else 0
    sums = scratch(tokens * 8)
    for o in range(begin, end):
        for m in range(tokens):
            simd.store_floats(sums, m * 8, simd.zero_floats())
        for g in range(groups):
            at = (o * groups + g) * 32
            simd.stream(codes, at)
            u, scale = _fields(codes, at), _group_scales(block, scales, o * count, g, size)
            for m in range(tokens):
                part = _group_sum(u, x, m * width + g * GROUP, quads, (m * groups + g) * 8)
                both = simd.multiply_floats(scale, simd.splat_floats(x_scales[m, g]))
                simd.store_floats(sums, m * 8, simd.fma(part, both, simd.load_floats(sums, m * 8)))
        for m in range(tokens):
            out[m, o] = simd.sum_floats(simd.load_floats(sums, m * 8))


_several = jit()(_some_tokens)


def _one_token_function(block: int) -> Callable[..., None]:
    """A kernel of its own for each ``block``: all in one took three times as long to compile."""

    @jit()
    def one_token(*arguments: Any) -> None:
        codes, scales, size, x, x_scales, quads, out, begin, end = arguments
        _one_token(block, (codes, scales, size, x, x_scales, quads), out, begin, end)

    return one_token


_ONE_TOKEN = {block: _one_token_function(block) for block in _BLOCKS}


def multiply_rows(
    codes: NDArray[np.uint8],
    scales: NDArray[Any],
    size: int,
    x: NDArray[np.int8],
    x_scales: NDArray[np.float32],
    quads: NDArray[np.int32],
    out: NDArray[np.float32],
    begin: int,
    end: int,
) -> None:
    """``out[:, begin:end] = x @ W[begin:end].T``.

    Parameters
    ----------
    codes, scales
        The prepared matrix.
    size : int
        Inputs a scale: a multiple of 128, or 32, or 64.
    x, x_scales : ndarrays of int8 and float32
        From ``activations.quantize`` with BYTE_LIMIT, or ``activations.split``; arranged.
    quads : ndarray of int32
        From ``activations.quad_sums``.
    out : ndarray of float32, shape (tokens, rows)
        Written in these columns only.
    begin, end : int
    """
    function = _ONE_TOKEN[_block(size)] if x.shape[0] == 1 else _several
    function(codes, scales, size, x, x_scales, quads, out, begin, end)


def _block(size: int) -> int:
    return size if size <= GROUP else 0


@jit()
def decode_rows(
    codes: NDArray[np.uint8], scales: NDArray[Any], size: int, out: NDArray[np.float32], begin: int
) -> None:
    """Rows ``begin, begin + 1, ...`` as float32, exactly.

    Parameters
    ----------
    codes, scales, size
        The prepared matrix; see :func:`multiply_rows`.
    out : ndarray of float32, shape (some rows, in_features)
        Written; ``in_features`` a multiple of ``size``.
    begin : int
    """
    rows, count = out.shape
    groups, per_row = codes.shape[1] // 32, scales.shape[1]
    none, one, three = simd.zero_bytes(), simd.splat_words(np.int16(-1)), simd.splat_bytes(3)
    block = simd.least(size, GROUP)
    each = block // 4
    for r in range(rows):
        o = begin + r
        for g in range(groups):
            v = simd.load_bytes(codes, (o * groups + g) * 32)
            for k in range(4):
                u = simd.and_bytes(simd.shift_right_bytes(v, simd.splat_bytes(np.int8(2 * k))), three)
                low = simd.add_words(simd.interleave_low(u, none), one)
                high = simd.add_words(simd.interleave_high(u, none), one)
                eights = (simd.low_ints(low), simd.low_ints(high), simd.high_ints(low), simd.high_ints(high))
                for c, eight in enumerate(eights):  # bytes 8 c .. 8 c + 7
                    i = g * GROUP + 8 * c // each * block + k * each + 8 * c % each
                    if i < count:
                        scale = simd.splat_floats(simd.scalar(scales, o * per_row + i // size))
                        simd.store_floats(
                            out, r * count + i, simd.multiply_floats(simd.to_floats(eight), scale)
                        )


def multiply_step(kind: Any, size: int, *, precise: bool) -> Callable[..., None]:
    """The operation for ``kernels.cpu.program`` of a matrix with ``size`` inputs a scale.

    Parameters
    ----------
    kind : dtype
        Of the scales: np.uint16 (float16) or np.float32.
    size : int
    precise : bool
        With 15-bit activations.

    Returns
    -------
    callable
        Its arguments: codes, scales, rows, padded, scales a row, size, x, x_scales, quads, out; ``precise``: two planes
        of x, x_scales and quads (``activations.split``), and a buffer float32 [2, rows].
    """
    wide = kind == np.float32
    return _PRECISE_STEPS[wide] if precise else _STEPS[wide, _block(size)]


def _step_function(kind: Any, block: int) -> Callable[..., None]:
    def step(a: Any, begin: int, end: int) -> None:
        rows, width, size = a[2], a[3], a[5]
        arguments = (
            array(a[0], np.uint8, (rows, width // 4)), array(a[1], kind, (rows, a[4])), size,
            array(a[6], np.int8, (1, width)), array(a[7], np.float32, (1, width // GROUP)),
            array(a[8], np.int32, (1, width // GROUP * 8)),
        )  # fmt: skip
        _one_token(block, arguments, array(a[9], np.float32, (1, rows)), begin, end)

    return step


def _precise_step_function(kind: Any) -> Callable[..., None]:
    def step(a: Any, begin: int, end: int) -> None:
        rows, width, size = a[2], a[3], a[5]
        out, both = array(a[9], np.float32, (rows,)), array(a[10], np.float32, (2, rows))
        _some_tokens(
            array(a[0], np.uint8, (rows, width // 4)), array(a[1], kind, (rows, a[4])), size,
            array(a[6], np.int8, (2, width)), array(a[7], np.float32, (2, width // GROUP)),
            array(a[8], np.int32, (2, width // GROUP * 8)), both, begin, end,
        )  # fmt: skip
        for o in range(begin, end):
            out[o] = both[0, o] + both[1, o]

    return step


_KINDS = {False: np.uint16, True: np.float32}  # wide
_STEPS = {(wide, b): _step_function(kind, b) for wide, kind in _KINDS.items() for b in _BLOCKS}
_PRECISE_STEPS = {wide: _precise_step_function(kind) for wide, kind in _KINDS.items()}
