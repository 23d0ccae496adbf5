"""Walsh-Hadamard transform of rows, block by block, in place.

Natural (Sylvester) order: H[r][c] = (-1)**popcount(r & c) / sqrt(B); symmetric, orthogonal, its own inverse. The fast
form is log2(B) passes of butterflies (a, b) -> (a + b, a - b), then one multiplication by 1 / sqrt(B), which is exact
for B = 4, 16, 64, 256, 1024. float64 throughout: 1024 additions of float32 values lose nothing that float32 keeps.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trapetum.kernels.jit import jit

__all__ = ["transform_rows"]


@jit()
def transform_rows(rows: NDArray[np.float64], block: int) -> None:
    """Transform every block of every row in place.

    Parameters
    ----------
    rows : ndarray of float64, shape (rows, width)
        ``width`` a multiple of ``block``.
    block : int
        Power of two.
    """
    scale = 1.0 / np.sqrt(float(block))
    for r in range(rows.shape[0]):
        for start in range(0, rows.shape[1], block):
            x = rows[r, start : start + block]
            half = 1
            while half < block:
                for i in range(0, block, 2 * half):
                    for j in range(i, i + half):
                        a, b = x[j], x[j + half]
                        x[j], x[j + half] = a + b, a - b
                half *= 2
            for i in range(block):
                x[i] *= scale
