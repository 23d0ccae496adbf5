"""Take ternary values apart: one pass over each group for its magnitudes, one for its codes.

A group is ternary where its non-zero magnitudes are all one s, or s and 2 s with every 2 s of one sign (code 3 is +2 d,
and d may be negative). The first group that is neither ends it, so weights that are not ternary cost next to nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from trapetum.kernels.jit import jit

__all__ = ["split_groups"]


@jit()
def split_groups(
    x: NDArray[np.float32], group: int, codes: NDArray[np.uint8], scales: NDArray[np.float32]
) -> Any:
    """Codes and scales of every group; one thread, releases the GIL.

    Parameters
    ----------
    x : ndarray of float32, shape (rows, columns)
        Finite; C order.
    group : int
        Divides ``columns``.
    codes : ndarray of uint8, shape (rows, columns)
        Written: the value is ``(code - 1) * scale``. A zero of either sign has code 1.
    scales : ndarray of float32, shape (rows, columns // group)
        Written: 0 for a group of zeros.

    Returns
    -------
    zero_groups, codes_3 : int
        (-1, -1) at the first group that is not ternary; what is written is then incomplete.
    """
    zero_groups = 0
    threes = 0
    for r in range(x.shape[0]):
        for g in range(x.shape[1] // group):
            start = g * group
            low = np.float32(np.inf)
            high = np.float32(0.0)
            for i in range(start, start + group):
                a = abs(x[r, i])
                high = max(high, a)
                low = min(low, a if a > 0 else np.float32(np.inf))
            if high == 0:
                zero_groups += 1
                scales[r, g] = 0
                codes[r, start : start + group] = 1
                continue
            d = low
            if high != low:
                if high != low + low:
                    return -1, -1
                for i in range(start, start + group):
                    if x[r, i] == -high:
                        d = -low
            scales[r, g] = d
            twice = d + d
            for i in range(start, start + group):
                v = x[r, i]
                if v == 0:
                    codes[r, i] = 1
                elif v == d:
                    codes[r, i] = 2
                elif v == -d:
                    codes[r, i] = 0
                elif v == twice:
                    codes[r, i] = 3
                    threes += 1
                else:
                    return -1, -1
    return zero_groups, threes
