"""The exact scale of a ternary or four-level group, without sorting the group.

Values are ``(code - 1) * d`` with codes 0, 1, 2 (three levels: -d, 0, +d) or 0 .. 3 (four levels: the fourth
is +2d, and d may be negative, so {-2, -1, 0, 1} * abs(d) is available as well). For codes q and importance w
the best d is N / M with N = sum w x q and M = sum w q^2, and the error it leaves is sum w x^2 - N^2 / M:
maximise N^2 / M.

As d falls from infinity, codes change one at a time. Write each change as an *item* (v, m) that adds m v to N
and m to M, and it happens when d passes 2 v:

* abs(x) leaves 0 for 1 at d = 2 abs(x):            item (abs(x), w)
* on the side of the fourth level, 1 -> 2 at d = abs(x) / 1.5:   N += w abs(x), M += 3 w, i.e. item (abs(x) /
3, 3 w)

So both problems are one: take the items in falling order of v and find the prefix with the largest N^2 / M,
once for three levels, for each sign of d at four. Sorting 128 items costs about 220 cycles a weight in numba.
Here the items fall into bins of equal width; prefix sums at bin edges are exact, and inside a bin of upper
edge h no prefix can beat the larger of both ends of (N + h m)^2 / (M + m), which is convex in m. Only bins
whose bound beats the best edge are sorted. The result is the exact optimum at 10 to 20 cycles a weight.

Source: threshold d/2 and N^2/M follow from least squares; the sorted form is folklore of ternary weight
networks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from trapetum.kernels.jit import jit
from trapetum.quantize.kmeans_stored import round_stored

__all__ = ["fit_groups"]

_MOST_BINS = 128
_F16_MAX = 65504.0

# Hash of kmeans_stored.py (a test holds it): numba's disk cache looks at this file only, see ``kmeans_rows``.
_COMPILED_IN = "c0ccf1d494dafe5b"


@jit()
def _best_prefix(
    value: Any, mass: Any, count: int, top: float, width: int, bins: Any, head: Any, link: Any, some: Any
) -> Any:
    """(N, M) of the prefix of items, in falling order of value, with the largest N^2 / M."""
    for b in range(width):
        bins[b, 0] = 0.0
        bins[b, 1] = 0.0
        head[b] = -1
    scale = width / top
    for i in range(count):
        b = max(0, min(width - 1, int((top - value[i]) * scale)))  # a NaN must not leave the bins
        bins[b, 0] += mass[i] * value[i]
        bins[b, 1] += mass[i]
        link[i] = head[b]
        head[b] = i
    n = m = 0.0
    best_n, best_m = 0.0, 1.0
    for b in range(width):
        n += bins[b, 0]
        m += bins[b, 1]
        if n * n * best_m > best_n * best_n * m:
            best_n, best_m = n, m
    n = m = 0.0
    for b in range(width):
        first = head[b]
        if first >= 0 and link[first] >= 0:
            upper = top - b / scale
            far = n + upper * bins[b, 1] * (1.0 + 1e-12)
            if far * far * best_m > best_n * best_n * (m + bins[b, 1]):
                size = 0
                i = first
                while i >= 0:
                    j = size
                    while j > 0 and value[some[j - 1]] < value[i]:
                        some[j] = some[j - 1]
                        j -= 1
                    some[j] = i
                    size += 1
                    i = link[i]
                inner_n, inner_m = n, m
                for j in range(size):
                    inner_n += mass[some[j]] * value[some[j]]
                    inner_m += mass[some[j]]
                    if inner_n * inner_n * best_m > best_n * best_n * inner_m:
                        best_n, best_m = inner_n, inner_m
        n += bins[b, 0]
        m += bins[b, 1]
    return best_n, best_m


@jit()
def _to_half(x: float) -> float:
    """``x`` rounded to float16 (nearest, ties to even), never beyond the largest finite value."""
    if abs(x) >= _F16_MAX:
        return _F16_MAX if x > 0.0 else -_F16_MAX
    return round_stored(x, True)


@jit()
def _assign(x: Any, w: Any, start: int, stop: int, d: float, levels: int, codes: Any) -> float:
    """Nearest code of every weight for a stored d (ties away from zero); returns the weighted squared error."""
    error = 0.0
    top = 2.0 if levels == 4 else 1.0
    inverse = 1.0 / d if d != 0.0 else 0.0
    for i in range(start, stop):
        t = x[i] * inverse
        q = np.floor(t + 0.5) if t >= 0.0 else np.ceil(t - 0.5)
        q = min(top, max(-1.0, q))
        codes[i] = np.uint8(q + 1.0)
        e = x[i] - q * d
        error += w[i] * e * e
    return error


@jit()
def _fit(x: Any, w: Any, group: int, levels: int, codes: Any, scales: Any) -> None:
    rows, columns = x.shape
    width = min(
        _MOST_BINS, group
    )  # one item a bin on average: 64 bins serve a group of 64 at 1.3x the speed of 128
    value = np.empty(2 * group)
    mass = np.empty(2 * group)
    link = np.empty(2 * group, np.int64)
    some = np.empty(2 * group, np.int64)
    head = np.empty(width, np.int64)
    bins = np.empty((width, 2))
    trial = np.empty(columns, np.uint8)
    for r in range(rows):
        for g in range(columns // group):
            start, stop = g * group, (g + 1) * group
            top = 0.0
            for i in range(start, stop):
                top = max(top, abs(x[r, i]))
            if top == 0.0:
                scales[r, g] = 0.0
                for i in range(start, stop):
                    codes[r, i] = 1
                continue
            if levels == 3:
                for i in range(group):
                    value[i] = abs(x[r, start + i])
                    mass[i] = w[start + i]
                n, m = _best_prefix(value, mass, group, top, width, bins, head, link, some)
                d = _to_half(n / m)
                _assign(x[r], w, start, stop, d, levels, codes[r])
            else:
                best = np.inf
                d = 0.0
                for sign in (1.0, -1.0):
                    count = 0
                    for i in range(start, stop):
                        t = abs(x[r, i])
                        value[count] = t
                        mass[count] = w[i]
                        count += 1
                        if sign * x[r, i] > 0.0:
                            value[count] = t / 3.0
                            mass[count] = 3.0 * w[i]
                            count += 1
                    n, m = _best_prefix(value, mass, count, top, width, bins, head, link, some)
                    candidate = _to_half(sign * n / m)
                    error = _assign(x[r], w, start, stop, candidate, levels, trial)
                    if error < best:
                        best, d = error, candidate
                        codes[r, start:stop] = trial[start:stop]
            scales[r, g] = d


def fit_groups(
    weight: NDArray[Any], group_size: int, levels: int, importance: NDArray[Any] | None = None
) -> tuple[NDArray[np.uint8], NDArray[np.float16]]:
    """Best codes and stored scales of every group; one thread, releases the GIL.

    Parameters
    ----------
    weight : ndarray of a float dtype, shape (rows, in_features)
        Finite values; ``in_features`` a multiple of ``group_size``.
    group_size : int
        Weights a scale: 64 or 128 in the formats of today, any value here.
    levels : {3, 4}
        3: {-d, 0, +d}. 4: {-d, 0, +d, +2d} with d of either sign.
    importance : ndarray, shape (in_features,), optional
        Non-negative weight of each input's squared error; a group whose weights are all zero is fitted
        uniformly.

    Returns
    -------
    codes : ndarray of uint8, shape (rows, in_features)
        Value is ``(code - 1) * scale``; re-assigned to the scale as stored.
    scales : ndarray of float16, shape (rows, in_features // group_size)
        A group of zeros, or one whose best scale underflows float16, has scale 0 and the codes of zero (1).

    Raises
    ------
    ValueError
        If shapes or ``levels`` do not fit.
    """
    rows, columns = weight.shape
    if levels not in (3, 4):
        raise ValueError(f"levels is {levels}; 3 and 4 are allowed")
    if columns % group_size:
        raise ValueError(f"rows of {columns} weights are not whole groups of {group_size}")
    if importance is None:
        w = np.ones(columns)
    else:
        w = np.array(importance, dtype=np.float64)
        if w.shape != (columns,):
            raise ValueError(f"importance has shape {w.shape}; {(columns,)} is needed")
        by_group = w.reshape(-1, group_size)
        by_group[~by_group.any(axis=1)] = 1.0
    codes = np.empty((rows, columns), np.uint8)
    scales = np.empty((rows, columns // group_size), np.float32)
    _fit(np.ascontiguousarray(weight, dtype=np.float32), w, group_size, levels, codes, scales)
    return codes, scales.astype(np.float16)
