"""Products with a codebook matrix: codes u8 [rows, in_features], one float32 table a row.

``multiply_rows`` decodes a row into a scratch line that stays in the first-level cache and multiplies it
with every token; ``decode_rows`` decodes a tile for BLAS where there are many tokens. The order of
additions depends on ``in_features`` alone: eight chains, input i in chain i % 8, then pairwise.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trapetum.kernels.jit import jit

__all__ = ["decode_rows", "multiply_rows"]


@jit()
def decode_rows(codes: NDArray[np.uint8], table: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    """``out[o, i] = table[o, codes[o, i]]``.

    Parameters
    ----------
    codes : ndarray of uint8, shape (rows, in_features)
    table : ndarray of float32, shape (rows, codebook_size)
        Every code must be below ``codebook_size``: nothing is checked here.
    out : ndarray of float32, shape (rows, in_features)
        Written.
    """
    for o in range(codes.shape[0]):
        line, row, entries = out[o], codes[o], table[o]
        for i in range(row.shape[0]):
            line[i] = entries[row[i]]


@jit()
def multiply_rows(
    codes: NDArray[np.uint8],
    table: NDArray[np.float32],
    x: NDArray[np.float32],
    out: NDArray[np.float32],
    start: int,
    stop: int,
) -> None:
    """``out[t, o] = sum_i x[t, i] * table[o, codes[o, i]]`` for few tokens and rows ``start <= o < stop``.

    Parameters
    ----------
    codes : ndarray of uint8, shape (rows, in_features)
    table : ndarray of float32, shape (rows, codebook_size)
    x : ndarray of float32, shape (tokens, in_features)
    out : ndarray of float32, shape (tokens, rows)
        Columns ``start`` to ``stop`` are written.
    start, stop : int
        Bounds instead of slices: every call has the same array types, so numba compiles once.
    """
    width = codes.shape[1]
    whole = width - width % 8
    line = np.empty(width, np.float32)
    for o in range(start, stop):
        row, entries = codes[o], table[o]
        for i in range(width):
            line[i] = entries[row[i]]
        for t in range(x.shape[0]):
            xt = x[t]
            a = b = c = d = e = f = g = h = np.float32(0)
            for i in range(0, whole, 8):
                a += line[i] * xt[i]
                b += line[i + 1] * xt[i + 1]
                c += line[i + 2] * xt[i + 2]
                d += line[i + 3] * xt[i + 3]
                e += line[i + 4] * xt[i + 4]
                f += line[i + 5] * xt[i + 5]
                g += line[i + 6] * xt[i + 6]
                h += line[i + 7] * xt[i + 7]
            total = ((a + b) + (c + d)) + ((e + f) + (g + h))
            for i in range(whole, width):
                total += line[i] * xt[i]
            out[t, o] = total
