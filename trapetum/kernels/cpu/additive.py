"""Additive codebooks: eight weights are a sum of M vectors, each one of 256, times the row's scale.

``W[o, 8g + d] = scale[o] * sum over m of codebook[m, code[m, g, o], d]``. Two ways to multiply:

* by table: the products of every codebook vector with every eight activations are computed once a token (*LUT*), and a
  weight vector costs one load and one addition. Sixteen groups of two codebooks are 32 KiB, the first-level cache;
  eight tokens are one vector of an entry.
* directly: multiply by the codebook's rows. No LUT to build, so faster below about 700 outputs.

======== ============================= ===========================================================================
array    shape                         content
======== ============================= ===========================================================================
codes    u8 [tiles, rows, tile * M]    a tile is ``tile`` consecutive groups, the M codes of a group side by side
books    f32 [M * 256, 8]              the codebooks
scales   f32 [rows]
lut      f32 [padded groups, M * 256]  of one token; or [padded groups, M * 256, 8] of eight
======== ============================= ===========================================================================

Groups are padded to whole tiles with code 0 and a LUT of zeros.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from trapetum.kernels.cpu import pages, simd
from trapetum.kernels.cpu.memory import array, scratch
from trapetum.kernels.jit import inline, jit

__all__ = [
    "TILE",
    "build_lut",
    "build_lut8",
    "build_lut_step",
    "decode_rows",
    "multiply_direct",
    "multiply_direct_step",
    "multiply_lut",
    "multiply_lut8",
    "multiply_lut_step",
    "pack_codes",
]

SIMD = "ce3020bb72a775c0"  # simd.fingerprint(): a new one makes numba compile this file again

_MOST_ROWS = 2048  # whose sums, 64 KiB, lie on the stack; a tile has more only in very narrow matrices
TILE = 16  # groups; cycles a code: 0.90 at 4, 0.73 at 8, 0.71 at 16, 0.88 at 32, 1.33 at 64 (Zen1)


def pack_codes(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Tiles of groups, a row's codes of a tile side by side.

    Parameters
    ----------
    codes : ndarray of uint8, shape (M, groups, rows)

    Returns
    -------
    ndarray of uint8, shape (tiles, rows, TILE * M)
    """
    books, groups, rows = codes.shape
    tiles = -(-groups // TILE)
    out = pages.empty((tiles, rows, TILE, books), np.uint8)
    out[-1] = 0
    for t in range(tiles):
        part = codes[:, t * TILE : (t + 1) * TILE]
        out[t, :, : part.shape[1]] = part.transpose(2, 1, 0)
    return out.reshape(tiles, rows, TILE * books)


@inline
def _build_lut(
    books: NDArray[np.float32], x: NDArray[np.float32], lut: NDArray[np.float32], begin: int, end: int
) -> None:
    """Products of all codebook vectors with the activations of groups ``begin .. end - 1``.

    Parameters
    ----------
    books : ndarray of float32, shape (8, M * 256)
        The codebooks, transposed: the loop runs along the entries.
    x : ndarray of float32, shape (in_features,)
    lut : ndarray of float32, shape (padded groups, M * 256)
        Written; zeros where a group lies beyond ``in_features``.
    begin, end : int
    """
    count = books.shape[1]
    for g in range(begin, end):
        if g * 8 >= x.shape[0]:
            for k in range(0, count, 8):
                simd.store_floats(lut, g * count + k, simd.zero_floats())
            continue
        x0, x1 = simd.splat_floats(x[g * 8]), simd.splat_floats(x[g * 8 + 1])
        x2, x3 = simd.splat_floats(x[g * 8 + 2]), simd.splat_floats(x[g * 8 + 3])
        x4, x5 = simd.splat_floats(x[g * 8 + 4]), simd.splat_floats(x[g * 8 + 5])
        x6, x7 = simd.splat_floats(x[g * 8 + 6]), simd.splat_floats(x[g * 8 + 7])
        for k in range(0, count, 8):
            total = simd.multiply_floats(x0, simd.load_floats(books, k))
            total = simd.fma(x1, simd.load_floats(books, count + k), total)
            total = simd.fma(x2, simd.load_floats(books, 2 * count + k), total)
            total = simd.fma(x3, simd.load_floats(books, 3 * count + k), total)
            total = simd.fma(x4, simd.load_floats(books, 4 * count + k), total)
            total = simd.fma(x5, simd.load_floats(books, 5 * count + k), total)
            total = simd.fma(x6, simd.load_floats(books, 6 * count + k), total)
            total = simd.fma(x7, simd.load_floats(books, 7 * count + k), total)
            simd.store_floats(lut, g * count + k, total)


@jit()
def build_lut8(
    books: NDArray[np.float32], x: NDArray[np.float32], lut: NDArray[np.float32], begin: int, end: int
) -> None:
    """The same for eight tokens.

    Parameters
    ----------
    books : ndarray of float32, shape (M * 256, 8)
    x : ndarray of float32, shape (in_features, 8)
        Tokens are the last axis; missing ones are zero.
    lut : ndarray of float32, shape (padded groups, M * 256, 8)
        Written.
    begin, end : int
    """
    count = books.shape[0]
    for g in range(begin, end):
        if g * 8 >= x.shape[0]:
            for k in range(count):
                simd.store_floats(lut, (g * count + k) * 8, simd.zero_floats())
            continue
        at = g * 64
        x0, x1 = simd.load_floats(x, at), simd.load_floats(x, at + 8)
        x2, x3 = simd.load_floats(x, at + 16), simd.load_floats(x, at + 24)
        x4, x5 = simd.load_floats(x, at + 32), simd.load_floats(x, at + 40)
        x6, x7 = simd.load_floats(x, at + 48), simd.load_floats(x, at + 56)
        for k in range(count):
            total = simd.multiply_floats(x0, simd.splat_floats(books[k, 0]))
            total = simd.fma(x1, simd.splat_floats(books[k, 1]), total)
            total = simd.fma(x2, simd.splat_floats(books[k, 2]), total)
            total = simd.fma(x3, simd.splat_floats(books[k, 3]), total)
            total = simd.fma(x4, simd.splat_floats(books[k, 4]), total)
            total = simd.fma(x5, simd.splat_floats(books[k, 5]), total)
            total = simd.fma(x6, simd.splat_floats(books[k, 6]), total)
            total = simd.fma(x7, simd.splat_floats(books[k, 7]), total)
            simd.store_floats(lut, (g * count + k) * 8, total)


@inline
def _multiply_lut(
    codes: NDArray[np.uint8],
    scales: NDArray[np.float32],
    lut: NDArray[np.float32],
    out: NDArray[np.float32],
    begin: int,
    end: int,
) -> None:
    """``out[begin:end] = W[begin:end] @ x`` from the LUT of x.

    Parameters
    ----------
    codes, scales, lut
        See the module.
    out : ndarray of float32, shape (rows,)
        Written in these entries only.
    begin, end : int
    """
    sums = scratch(_MOST_ROWS * 8)
    for first in range(begin, end, _MOST_ROWS):
        _multiply_some(codes, scales, lut, sums, out, first, simd.least(first + _MOST_ROWS, end))


@inline
def _multiply_some(
    codes: NDArray[np.uint8],
    scales: NDArray[np.float32],
    lut: NDArray[np.float32],
    sums: NDArray[np.float32],
    out: NDArray[np.float32],
    begin: int,
    end: int,
) -> None:
    tiles, rows, width = codes.shape
    for to in range(0, (end - begin) * 8, 8):
        simd.store_floats(sums, to, simd.zero_floats())
    for t in range(tiles):
        first = t * width * 256
        for o in range(begin, end):
            at, to = (t * rows + o) * width, (o - begin) * 8
            for k in range(-at % 64, width, 64):  # cache lines that begin in this row
                simd.stream(codes, at + k)
            total = simd.load_floats(sums, to)
            for i in range(0, width, 8):
                part = simd.look_up_in_eight(lut, first + i * 256, codes, at + i)
                total = simd.add_floats(total, part)
            simd.store_floats(sums, to, total)
    for o in range(begin, end):
        out[o] = simd.sum_floats(simd.load_floats(sums, (o - begin) * 8)) * scales[o]


@jit()
def multiply_lut8(
    codes: NDArray[np.uint8],
    scales: NDArray[np.float32],
    lut: NDArray[np.float32],
    out: NDArray[np.float32],
    begin: int,
    end: int,
) -> None:
    """The same for eight tokens: ``out`` float32 [rows, 8]."""
    tiles, rows, width = codes.shape
    count = lut.shape[1]
    books = width // TILE
    for o in range(begin, end):
        simd.store_floats(out, o * 8, simd.zero_floats())
    for t in range(tiles):
        for o in range(begin, end):
            at = (t * rows + o) * width
            a, b = simd.load_floats(out, o * 8), simd.zero_floats()
            for j in range(0, TILE, 2):
                entry = (t * TILE + j) * count
                for m in range(books):
                    code = np.int64(codes[t, o, j * books + m]) + m * 256
                    a = simd.add_floats(a, simd.load_floats(lut, (entry + code) * 8))
                    code = np.int64(codes[t, o, (j + 1) * books + m]) + m * 256
                    b = simd.add_floats(b, simd.load_floats(lut, (entry + count + code) * 8))
            simd.store_floats(out, o * 8, simd.add_floats(a, b))
            for k in range(-at % 64, width, 64):
                simd.stream(codes, at + k)
    for o in range(begin, end):
        simd.store_floats(
            out, o * 8, simd.multiply_floats(simd.load_floats(out, o * 8), simd.splat_floats(scales[o]))
        )


@inline
def _multiply_direct(
    codes: NDArray[np.uint8],
    books: NDArray[np.float32],
    scales: NDArray[np.float32],
    x: NDArray[np.float32],
    out: NDArray[np.float32],
    begin: int,
    end: int,
) -> None:
    """``out[:, begin:end] = x @ W[begin:end].T`` without a LUT.

    Parameters
    ----------
    codes, books, scales
        See the module.
    x : ndarray of float32, shape (tokens, padded groups * 8)
        Zeros beyond ``in_features``.
    out : ndarray of float32, shape (tokens, rows)
        Written in these columns only.
    begin, end : int
    """
    tiles, _, width = codes.shape
    each = width // TILE
    inputs = x.shape[1]
    for o in range(begin, end):
        for m in range(x.shape[0]):
            a, b = simd.zero_floats(), simd.zero_floats()
            for t in range(tiles):
                for j in range(0, TILE, 2):
                    to = m * inputs + (t * TILE + j) * 8
                    x0, x1 = simd.load_floats(x, to), simd.load_floats(x, to + 8)
                    for k in range(each):
                        code = np.int64(codes[t, o, j * each + k]) + k * 256
                        a = simd.fma(x0, simd.load_floats(books, code * 8), a)
                        code = np.int64(codes[t, o, (j + 1) * each + k]) + k * 256
                        b = simd.fma(x1, simd.load_floats(books, code * 8), b)
            out[m, o] = simd.sum_floats(simd.add_floats(a, b)) * scales[o]


@jit()
def decode_rows(
    codes: NDArray[np.uint8],
    books: NDArray[np.float32],
    scales: NDArray[np.float32],
    out: NDArray[np.float32],
    begin: int,
) -> None:
    """Rows ``begin, begin + 1, ...`` as float32: the sum of the vectors in the order of m, then times the scale.

    Parameters
    ----------
    codes, books, scales
        See the module.
    out : ndarray of float32, shape (some rows, in_features)
        Written; ``in_features`` a multiple of 8.
    begin : int
    """
    rows, count = out.shape
    each = codes.shape[2] // TILE
    for r in range(rows):
        scale = simd.splat_floats(scales[begin + r])
        for g in range(count // 8):
            total = simd.zero_floats()
            for k in range(each):
                code = np.int64(codes[g // TILE, begin + r, g % TILE * each + k]) + k * 256
                total = simd.add_floats(total, simd.load_floats(books, code * 8))
            simd.store_floats(out, r * count + g * 8, simd.multiply_floats(total, scale))


build_lut, multiply_lut, multiply_direct = jit()(_build_lut), jit()(_multiply_lut), jit()(_multiply_direct)


# ---------------------------------------------------------------------------- for kernels.cpu.program, one token
def build_lut_step(a: Any, begin: int, end: int) -> None:
    """books (transposed), entries, x, in_features, lut, groups; groups begin .. end - 1."""
    books, x = array(a[0], np.float32, (8, a[1])), array(a[2], np.float32, (a[3],))
    _build_lut(books, x, array(a[4], np.float32, (a[5], a[1])), begin, end)


def multiply_lut_step(a: Any, begin: int, end: int) -> None:
    """codes, tiles, rows, width, scales, lut, out."""
    tiles, rows, width = a[1], a[2], a[3]
    codes, lut = (
        array(a[0], np.uint8, (tiles, rows, width)),
        array(a[5], np.float32, (tiles * TILE, width * 16)),
    )
    _multiply_lut(codes, array(a[4], np.float32, (rows,)), lut, array(a[6], np.float32, (rows,)), begin, end)


def multiply_direct_step(a: Any, begin: int, end: int) -> None:
    """codes, tiles, rows, width, scales, books, padded x, out."""
    tiles, rows, width = a[1], a[2], a[3]
    _multiply_direct(
        array(a[0], np.uint8, (tiles, rows, width)), array(a[5], np.float32, (width * 16, 8)),
        array(a[4], np.float32, (rows,)), array(a[6], np.float32, (1, tiles * TILE * 8)),
        array(a[7], np.float32, (1, rows)), begin, end,
    )  # fmt: skip
