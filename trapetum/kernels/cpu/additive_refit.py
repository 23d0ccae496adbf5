"""Sums of codebook entries, and their transpose: what least squares under a second moment multiplies by."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trapetum.kernels.jit import jit

__all__ = ["gather_entries", "scatter_entries"]


@jit()
def gather_entries(
    books: NDArray[np.float32],
    codes: NDArray[np.uint8],
    factors: NDArray[np.float32],
    out: NDArray[np.float32],
) -> None:
    """Decode rows.

    Parameters
    ----------
    books : ndarray of float32, shape (M * 256, 8)
    codes : ndarray of uint8, shape (rows, groups, M)
    factors : ndarray of float32, shape (rows,)
    out : ndarray of float32, shape (rows, groups * 8), output
    """
    for r in range(codes.shape[0]):
        for g in range(codes.shape[1]):
            for d in range(8):
                total = np.float32(0)
                for m in range(codes.shape[2]):
                    total += books[m * 256 + np.int64(codes[r, g, m]), d]
                out[r, g * 8 + d] = total * factors[r]


@jit()
def scatter_entries(
    values: NDArray[np.float32],
    codes: NDArray[np.uint8],
    factors: NDArray[np.float32],
    out: NDArray[np.float64],
) -> None:
    """Add to each entry the values, times the factor of their row, of the places that use it; arguments as above."""
    out[:] = 0
    for r in range(codes.shape[0]):
        factor = np.float64(factors[r])
        for g in range(codes.shape[1]):
            for m in range(codes.shape[2]):
                k = m * 256 + np.int64(codes[r, g, m])
                for d in range(8):
                    out[k, d] += factor * np.float64(values[r, g * 8 + d])
