"""Two-bit codes around zero with a scale a group, against int8 activations.

Prepared once at load:

======== ===================== ===================================================================================
array    shape                 content
======== ===================== ===================================================================================
codes    u8 [rows, padded/4]   128 inputs are 32 bytes: input 32k + b in bits 2k, 2k + 1 of byte b; the weight is
                               ``(code - 1) * scale``, code 3 included
scales   u16 or f32            float16 bits, or float32; one for ``size`` inputs
======== ===================== ===================================================================================

The unsigned code goes into the product and the sum of the activations is taken off, in integers. Precise activations
need no kernel of their own: a 15-bit one is two int8 planes (``activations.split``), which are two tokens with scales
``128 s`` and ``s``; the caller adds the two outputs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from trapetum.kernels.cpu import simd
from trapetum.kernels.cpu.activations import GROUP
from trapetum.kernels.cpu.memory import array
from trapetum.kernels.jit import jit

__all__ = [
    "decode_rows",
    "multiply_rows",
    "multiply_step",
    "pack_codes",
]

SIMD = "0429ca46c4b453e7"  # simd.fingerprint(): a new one makes numba compile this file again


@jit()
def pack_codes(codes: NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
    """Bring two-bit codes into the order of this module.

    Parameters
    ----------
    codes : ndarray of uint8, shape (rows, in_features)
        Each below 4.
    out : ndarray of uint8, shape (rows, padded / 4)
        Written; beyond ``in_features`` code 1, which is zero.
    """
    count = codes.shape[1]
    for o in range(codes.shape[0]):
        line, row = out[o], codes[o]
        line[:] = 0x55
        for i in range(count):
            line[(i >> 7) * 32 + (i & 31)] ^= (row[i] ^ np.uint8(1)) << np.uint8((i >> 5 & 3) * 2)


@jit()
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


@jit()
def _group_sum(u: Any, x: NDArray[np.int8], at: int, quads: NDArray[np.int32], quad: int) -> Any:
    """Products of 128 weights that share a scale."""
    total = simd.dot_bytes(
        simd.load_ints(quads, quad),
        u[0], u[1], u[2], u[3],
        simd.load_bytes(x, at), simd.load_bytes(x, at + 32), simd.load_bytes(x, at + 64), simd.load_bytes(x, at + 96),
    )  # fmt: skip
    return simd.to_floats(total)


@jit()
def _small_sum(
    u: Any,
    x: NDArray[np.int8],
    at: int,
    quads: NDArray[np.int32],
    quad: int,
    scales: NDArray[Any],
    first: int,
    size: int,
) -> Any:
    """Products of 128 weights in two blocks of 64 or four of 32, scaled."""
    none = simd.zero_bytes()
    s0, s1 = simd.load_bytes(x, at), simd.load_bytes(x, at + 32)
    s2, s3 = simd.load_bytes(x, at + 64), simd.load_bytes(x, at + 96)
    d0, d1 = simd.splat_floats(simd.scalar(scales, first)), simd.splat_floats(simd.scalar(scales, first + 1))
    q0, q1 = simd.load_ints(quads, quad), simd.load_ints(quads, quad + 8)
    if size == 64:
        total = simd.to_floats(simd.dot_bytes(q0, u[0], u[1], none, none, s0, s1, none, none))
        part = simd.to_floats(simd.dot_bytes(q1, u[2], u[3], none, none, s2, s3, none, none))
        return simd.fma(part, d1, simd.multiply_floats(total, d0))
    d2, d3 = (
        simd.splat_floats(simd.scalar(scales, first + 2)),
        simd.splat_floats(simd.scalar(scales, first + 3)),
    )
    q2, q3 = simd.load_ints(quads, quad + 16), simd.load_ints(quads, quad + 24)
    total = simd.to_floats(simd.dot_bytes(q0, u[0], none, none, none, s0, none, none, none))
    total = simd.multiply_floats(total, d0)
    total = simd.fma(
        simd.to_floats(simd.dot_bytes(q1, u[1], none, none, none, s1, none, none, none)), d1, total
    )
    total = simd.fma(
        simd.to_floats(simd.dot_bytes(q2, u[2], none, none, none, s2, none, none, none)), d2, total
    )
    return simd.fma(
        simd.to_floats(simd.dot_bytes(q3, u[3], none, none, none, s3, none, none, none)), d3, total
    )


@jit()
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
        From ``activations.quantize`` with BYTE_LIMIT, or ``activations.split``.
    quads : ndarray of int32
        From ``activations.quad_sums`` for blocks of ``min(size, 128)``.
    out : ndarray of float32, shape (tokens, rows)
        Written in these columns only.
    begin, end : int
    """
    tokens, width = x.shape
    groups = width // GROUP
    count = scales.shape[1]
    sums = np.empty(tokens * 8, np.float32)
    for o in range(begin, end):
        one = simd.zero_floats()
        if tokens > 1:
            sums[:] = 0
        for g in range(groups):
            at = (o * groups + g) * 32
            simd.prefetch(codes, at + simd.AHEAD)
            u = _fields(codes, at)
            if size >= GROUP:
                scale = simd.scalar(scales, o * count + g * GROUP // size)
                if tokens == 1:
                    part = _group_sum(u, x, g * GROUP, quads, g * 8)
                    one = simd.fma(part, simd.splat_floats(scale * x_scales[0, g]), one)
                else:
                    for m in range(tokens):
                        part = _group_sum(u, x, m * width + g * GROUP, quads, (m * groups + g) * 8)
                        total = simd.load_floats(sums, m * 8)
                        total = simd.fma(part, simd.splat_floats(scale * x_scales[m, g]), total)
                        simd.store_floats(sums, m * 8, total)
            else:
                each = GROUP // size
                first = o * count + g * each
                if tokens == 1:
                    part = _small_sum(u, x, g * GROUP, quads, g * each * 8, scales, first, size)
                    one = simd.fma(part, simd.splat_floats(x_scales[0, g]), one)
                else:
                    for m in range(tokens):
                        at, quad = m * width + g * GROUP, (m * groups + g) * each * 8
                        part = _small_sum(u, x, at, quads, quad, scales, first, size)
                        total = simd.load_floats(sums, m * 8)
                        total = simd.fma(part, simd.splat_floats(x_scales[m, g]), total)
                        simd.store_floats(sums, m * 8, total)
        if tokens == 1:
            out[0, o] = simd.sum_floats(one)
        else:
            for m in range(tokens):
                out[m, o] = simd.sum_floats(simd.load_floats(sums, m * 8))


@jit()
def _store(words: Any, scale: Any, out: NDArray[np.float32], at: int) -> None:
    one = simd.splat_words(np.int16(-1))
    words = simd.add_words(words, one)
    simd.store_floats(out, at, simd.multiply_floats(simd.to_floats(simd.low_ints(words)), scale))
    simd.store_floats(out, at + 8, simd.multiply_floats(simd.to_floats(simd.high_ints(words)), scale))


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
        Written; ``in_features`` a multiple of 32.
    begin : int
    """
    rows, count = out.shape
    groups, per_row = codes.shape[1] // 32, scales.shape[1]
    none = simd.zero_bytes()
    buffer = np.empty(32, np.float32)
    for r in range(rows):
        o = begin + r
        for b in range(count // 32):
            v = simd.load_bytes(codes, (o * groups + b // 4) * 32)
            v = simd.shift_right_bytes(v, simd.splat_bytes(np.int8(b % 4 * 2)))
            v = simd.and_bytes(v, simd.splat_bytes(3))
            scale = simd.splat_floats(simd.scalar(scales, o * per_row + b * 32 // size))
            low, high = simd.interleave_low(v, none), simd.interleave_high(v, none)
            # bytes 0-7, 16-23, then 8-15, 24-31
            _store(low, scale, buffer, 0)
            _store(high, scale, buffer, 16)
            at = r * count + b * 32
            simd.store_floats(out, at, simd.load_floats(buffer, 0))
            simd.store_floats(out, at + 8, simd.load_floats(buffer, 16))
            simd.store_floats(out, at + 16, simd.load_floats(buffer, 8))
            simd.store_floats(out, at + 24, simd.load_floats(buffer, 24))


def multiply_step(a: Any, begin: int, end: int) -> None:
    """For ``kernels.cpu.program``: codes, float16 scales, rows, padded, scales a row, size, x, x_scales, quads, out."""
    rows, width, size = a[2], a[3], a[5]
    block = min(size, GROUP)
    multiply_rows(
        array(a[0], np.uint8, (rows, width // 4)), array(a[1], np.uint16, (rows, a[4])), size,
        array(a[6], np.int8, (1, width)), array(a[7], np.float32, (1, width // GROUP)),
        array(a[8], np.int32, (1, width // block * 8)), array(a[9], np.float32, (1, rows)),
        begin, end,
    )  # fmt: skip
