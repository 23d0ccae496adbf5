"""Count NaN and infinite weights, for every float dtype a checkpoint may hold, at memory speed.

A single NaN would poison a whole row's codebook, so the job looks before it searches. Works on the raw bits: a
value is not finite when its exponent bits are all ones (float8_e4m3fn has no infinity, one NaN pattern a sign).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from trapetum.kernels.jit import jit

__all__ = ["count_nonfinite"]

# dtype name -> (unsigned type of the bits, magnitude of infinity); larger magnitudes are NaN.
_FORMATS: dict[str, tuple[Any, int]] = {
    "float64": (np.uint64, 0x7FF0_0000_0000_0000),
    "float32": (np.uint32, 0x7F80_0000),
    "float16": (np.uint16, 0x7C00),
    "bfloat16": (np.uint16, 0x7F80),
    "float8_e5m2": (np.uint8, 0x7C),
    "float8_e4m3fn": (np.uint8, 0x7E),  # 0x7E is the largest finite value; only 0x7F is above it, the NaN
}
_NO_INFINITY = frozenset({"float8_e4m3fn"})


@jit()
def _any_from(bits: NDArray[Any], start: int, stop: int, mask: Any, limit: Any) -> bool:
    worst = mask & bits[start]
    for i in range(start, stop):  # a plain maximum: the compiler makes SIMD of it
        worst = max(worst, bits[i] & mask)
    return bool(worst > limit)


@jit()
def _count(bits: NDArray[Any], mask: Any, limit: Any, infinity: Any) -> tuple[int, int, int]:
    """NaNs, infinities and first index of either; ``limit`` is the largest finite magnitude."""
    nan = 0
    inf = 0
    first = -1
    for start in range(0, bits.size, 4096):
        stop = min(start + 4096, bits.size)
        if not _any_from(bits, start, stop, mask, limit):
            continue
        for i in range(start, stop):
            magnitude = bits[i] & mask
            if magnitude > limit:
                if first < 0:
                    first = i
                if magnitude == infinity:
                    inf += 1
                else:
                    nan += 1
    return nan, inf, first


def count_nonfinite(weight: NDArray[Any]) -> tuple[int, int, int]:
    """Count the values of an array that are NaN or infinite.

    Parameters
    ----------
    weight : ndarray of float64, float32, float16, bfloat16, float8_e5m2, float8_e4m3fn or any integer type
        Any shape; integers have neither.

    Returns
    -------
    nan_count : int
    inf_count : int
    first_flat_index : int
        Index of the first such value in C order; -1 when all are finite.

    Raises
    ------
    TypeError
        For a dtype that is neither in the list nor an integer.

    Examples
    --------
    >>> count_nonfinite(np.array([[0.0, 1.0], [np.nan, -np.inf]], np.float32))
    (1, 1, 2)
    """
    if weight.dtype.kind in "iub":
        return 0, 0, -1
    name = weight.dtype.name
    if name not in _FORMATS:
        raise TypeError(f"dtype is {name}; one of {', '.join(_FORMATS)} is allowed")
    unsigned, infinity = _FORMATS[name]
    bits = np.ascontiguousarray(weight).reshape(-1).view(unsigned)
    mask = unsigned(np.iinfo(unsigned).max >> 1)
    limit = infinity if name in _NO_INFINITY else infinity - 1
    # Without an infinity no magnitude may be taken for one: 0 is never above the limit.
    nan, inf, first = _count(bits, mask, unsigned(limit), unsigned(0 if name in _NO_INFINITY else infinity))
    return int(nan), int(inf), int(first)
