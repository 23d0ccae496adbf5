"""What storing does to values: rounding to float16 or float32, which rows float16 cannot serve, the error left."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from trapetum.kernels.jit import jit

__all__ = ["round_stored", "row_errors", "rows_need_wide"]

_SMALLEST_NORMAL = 2.0**-14
_LARGEST = 65504.0


@jit(error_model="numpy")
def round_stored(c: float, half: bool) -> float:
    """Nearest float16 (``half``) or float32; beyond float16's range the result overflows there, not here."""
    if not half:
        return np.float64(np.float32(c))
    if abs(c) < _SMALLEST_NORMAL:  # below it float16 is a grid of 2**-24
        big = 1.5 * 2.0**28
        return (c + big) - big
    t = c * (2.0**42 + 1.0)  # Veltkamp: the upper 11 of 53 bits, rounded to nearest
    return t - (t - c)


@jit(error_model="numpy")
def rows_need_wide(bits: Any, shift: int, power: float, k: int) -> bool:
    """Whether any row of bit patterns (uint16 or uint32) needs a float32 codebook; rule in ``kmeans.py``."""
    rows, n = bits.shape
    seen = np.empty(1024, np.int64)
    word = np.empty(1, np.uint32)
    single = word.view(np.float32)
    sign = np.int64(1) << (8 * bits.itemsize - 1)
    for r in range(rows):
        row = bits[r]
        top = np.int64(0)
        low = sign
        both = np.int64(-1)
        either = np.int64(0)
        for i in range(n):
            b = np.int64(row[i])
            magnitude = b & (sign - 1)
            top = max(top, magnitude)
            low = min(low, magnitude)
            both &= b
            either |= b
        word[0] = top << shift
        largest = np.float64(single[0]) * power
        word[0] = low << shift
        smallest = np.float64(single[0]) * power
        if largest > _LARGEST or 0.0 < largest < _SMALLEST_NORMAL:
            return True
        one_sign = (both & sign) == (either & sign)
        if one_sign and smallest < largest and largest - smallest < k * largest / 256.0:
            return True
        # At most K distinct values, one of them no float16?
        seen[:] = -1
        distinct = 0
        exact = True
        for i in range(n):
            b = np.int64(row[i])
            if b == sign:
                b = np.int64(0)
            slot = (b * 40503 >> 4) & 1023
            while seen[slot] >= 0 and seen[slot] != b:
                slot = (slot + 1) & 1023
            if seen[slot] == b:
                continue
            seen[slot] = b
            distinct += 1
            if distinct > k:
                break
            word[0] = (b & (sign - 1)) << shift
            v = np.float64(single[0]) * power
            exact &= round_stored(v, True) == v
        if distinct <= k and not exact:
            return True
    return False


@jit(error_model="numpy")
def row_errors(
    weight: NDArray[np.float32],
    codes: NDArray[np.uint8],
    codebook: NDArray[np.float32],
    out: NDArray[np.float64],
) -> None:
    """Squared error and sum of squares of row r in ``out[:, r]``, as eight fixed partial sums a row."""
    rows, n = weight.shape
    error = np.empty(8, np.float64)
    power = np.empty(8, np.float64)
    for r in range(rows):
        error[:] = 0.0
        power[:] = 0.0
        table = codebook[r]
        for start in range(0, n - 7, 8):
            for lane in range(8):
                v = np.float64(weight[r, start + lane])
                d = v - np.float64(table[codes[r, start + lane]])
                error[lane] += d * d
                power[lane] += v * v
        for i in range(n - n % 8, n):
            v = np.float64(weight[r, i])
            d = v - np.float64(table[codes[r, i]])
            error[i % 8] += d * d
            power[i % 8] += v * v
        a = 0.0
        b = 0.0
        for lane in range(8):
            a += error[lane]
            b += power[lane]
        out[0, r] = a
        out[1, r] = b
