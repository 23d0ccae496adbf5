"""Whole rows through the codebook search, one thread, no GIL: distinct values, search, rounding, codes.

Two ways to the ascending distinct values of a row, both keep all information:

* *16-bit* inputs (bfloat16, float16): count every bit pattern in a table of 65,536; only the patterns between the
  row's smallest and largest magnitude are visited. A bfloat16 row of 4,096 weights has about 1,400 distinct values
  in some 15 binades. Codes then come from a table of labels by bit pattern.
* *32-bit* inputs arrive sorted; codes come from a branch-free binary search.

A row whose positive side weighs more at the largest magnitude where its two signs differ is mirrored before the
search, so that W and -W see the very same numbers and end with mirrored codebooks and equal errors.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trapetum.kernels.jit import jit
from trapetum.quantize.kmeans_search import WIDTHS, compand, fill_up, polish, refine, solve_groups
from trapetum.quantize.kmeans_stored import round_stored

__all__ = ["fit_rows_16", "fit_rows_32"]

F64 = NDArray[np.float64]
I32 = NDArray[np.int32]
U: Any = np.uint64

_PATTERNS = 65536
_SIGN = 32768

# Hash of kmeans_search.py and kmeans_stored.py (a test holds it). numba's disk cache looks at this file only: what is
# compiled in from the others would go stale if a change there did not change this line.
_COMPILED_IN = "54bdb36c3ac48d32"


@jit(error_model="numpy")
def _search(
    m: int, k: int, params: Any, x: F64, sums: F64, centroids: F64, borders: I32, edges: I32, s: Any
) -> None:
    """Borders and centroids of the m > k values ``x``; ``s`` is the inner tuple of ``_scratch``."""
    pw, px, pxx = sums[0], sums[1], sums[2]
    cube, table, layers, gathered, shifts, moments, sides, costs, score, fine, fsums = s
    groups, subgroups, window, stride, rounds, steps = params
    nf, nc = compand(m, x, pw, groups if groups > 0 else k, max(subgroups, k), cube, fine, edges)
    if nf < k:
        fill_up(k, nf, fine)
        nf = k
    if nc < k:
        fill_up(k, nc, edges)
        nc = k
    fw, fx, fxx = pw, px, pxx
    if nf < m:
        fw, fx, fxx = fsums[0], fsums[1], fsums[2]
        for j in range(U(nf + 1)):
            p = U(fine[j])
            fw[j], fx[j], fxx[j] = pw[p], px[p], pxx[p]
    if groups > 0:
        solve_groups(nc, k, edges, fw, fx, fxx, table, layers, gathered, borders)
    else:
        for b in range(k + 1):
            borders[b] = edges[b]
    # With few values a cluster each of them matters: look twice as far (K = 256 on 512 float32: 18 -> 9 % excess).
    candidates = 2 * window if nf < 4 * k else window
    step = stride
    for _ in range(rounds):
        refine(k, candidates, step, fw, fx, fxx, shifts, moments, sides, costs, score, borders)
        step = max(1, step // 2)
    for b in range(k + 1):
        borders[b] = fine[borders[b]]
    polish(k, steps, x, pw, px, centroids, borders)


@jit(error_model="numpy")
def _store(
    k: int,
    centroids: F64,
    unit: float,
    origin: float,
    half: bool,
    mirrored: bool,
    codebook: F64,
    middles: F64,
) -> int:
    """Round k ascending centroids into ``codebook`` (ascending, true sign) and put their middles in ``middles``.

    Returns the number of distinct entries; the rest repeats the last one and has an infinite middle. A value
    belongs to the first entry whose middle is not below it: the nearest, and of two equally near ones the lower.
    """
    used = 0
    for b in range(k):
        c = centroids[k - 1 - b] if mirrored else centroids[b]
        c = c * unit + origin
        c = round_stored(-c if mirrored else c, half) + 0.0  # + 0.0: no negative zero
        if used == 0 or c > codebook[used - 1]:
            codebook[used] = c
            used += 1
    for b in range(used, codebook.size):
        codebook[b] = codebook[used - 1]
    for b in range(middles.size):
        middles[b] = 0.5 * codebook[b] + 0.5 * codebook[b + 1] if b + 1 < used else np.inf
    return used


@jit(error_model="numpy")
def _prefix(m: int, values: F64, weights: F64, x: F64, sums: F64) -> tuple[float, float]:
    """Scaled values and their prefix sums; returns (unit, origin) with value = x * unit + origin.

    A row of one sign is measured from its end nearest to zero, so that a large offset does not cancel; the unit is
    a power of two, so scaling is exact and the float32 costs of the search do not overflow.
    """
    origin = values[0] if values[0] > 0.0 else (values[m - 1] if values[m - 1] < 0.0 else 0.0)
    span = max(values[m - 1] - origin, origin - values[0])
    unit = 1.0
    while unit < span:
        unit *= 2.0
    while unit > 2.0 * span:
        unit *= 0.5
    inverse = 1.0 / unit
    sw = 0.0
    sx = 0.0
    sxx = 0.0
    pw, px, pxx = sums[0], sums[1], sums[2]
    pw[0] = px[0] = pxx[0] = 0.0
    for j in range(U(m)):
        u = (values[j] - origin) * inverse
        w = weights[j]
        x[j] = u
        sw += w
        sx += w * u
        sxx += w * u * u
        pw[j + U(1)] = sw
        px[j + U(1)] = sx
        pxx[j + U(1)] = sxx
    return unit, origin


@jit(error_model="numpy")
def _fit_distinct(
    m: int,
    params: Any,
    values: F64,
    weights: F64,
    half: bool,
    mirrored: bool,
    codebook: F64,
    middles: F64,
    s: Any,
) -> int:
    """Codebook and middles of m distinct values; returns the number of entries in use."""
    k = codebook.size
    if m <= k:
        return _store(m, values, 1.0, 0.0, half, mirrored, codebook, middles)
    x, sums, centroids, borders, edges, search = s
    unit, origin = _prefix(m, values, weights, x, sums)
    _search(m, k, params, x, sums, centroids, borders, edges, search)
    return _store(k, centroids, unit, origin, half, mirrored, codebook, middles)


@jit(error_model="numpy")
def _scratch(k: int, params: Any, capacity: int) -> Any:
    groups, window = params[0], 2 * params[2]
    parts = max(groups, k) if groups > 0 else 0
    search = (
        np.empty(capacity + 1, np.float32),
        np.empty((parts + WIDTHS, parts + 1), np.float32),
        np.empty((k if groups > 0 else 1, 2 * parts + WIDTHS + 1), np.float32),
        np.empty((3, parts + 1), np.float64),
        np.empty((3, k + 1), np.float64),
        np.empty((3, k), np.float64),
        np.empty((6, window, k), np.float32),
        np.empty((window, window, k + 16), np.float32),
        np.empty((k, window), np.float32),
        np.empty(capacity + k + 2, np.int32),
        np.empty((3, capacity + k + 2), np.float64),
    )
    return (
        np.empty(capacity + 1, np.float64),
        np.empty((3, capacity + 2), np.float64),
        np.empty(k, np.float64),
        np.empty(k + 1, np.int32),
        np.empty(max(groups, k) + 2, np.int32),
        search,
    )


@jit(error_model="numpy")
def _magnitudes(row: NDArray[np.uint16]) -> tuple[int, int]:
    """Smallest non-zero magnitude pattern and one above the largest, as a range; (1, 1) for a row of zeros."""
    top = np.uint16(0)
    low = np.uint16(0xFFFF)
    for i in range(row.size):
        magnitude = np.uint16(row[i] & np.uint16(0x7FFF))
        top = max(top, magnitude)
        low = min(low, np.uint16(magnitude - np.uint16(1)))  # zero wraps to 0xFFFF and never is the smallest
    if top == 0:
        return 1, 1
    return int(low) + 1, int(top) + 1


@jit(error_model="numpy")
def _count(row: NDArray[np.uint16], importance: F64, histogram: F64) -> None:
    """Add the weight of each value to its pattern."""
    if importance.size:
        for i in range(row.size):
            histogram[row[i]] += importance[i]
    else:
        for i in range(row.size):
            histogram[row[i]] += 1.0


@jit(error_model="numpy")
def _is_mirrored(histogram: F64, low: int, top: int) -> bool:
    """Whether, at the largest magnitude where the two signs differ, the positive side weighs more."""
    for q in range(top - 1, low - 1, -1):
        if histogram[q] != histogram[_SIGN + q]:
            return bool(histogram[q] > histogram[_SIGN + q])
    return False


@jit(error_model="numpy")
def fit_rows_16(
    bits: NDArray[np.uint16],
    importance: F64,
    shift: int,
    power: float,
    params: Any,
    half: bool,
    codebook: F64,
    codes: NDArray[np.uint8],
) -> None:
    """Codebooks and codes of rows of 16-bit floats.

    Parameters
    ----------
    bits : ndarray of uint16, shape (rows, in_features)
        Bit patterns of finite values.
    importance : ndarray of float64, shape (in_features,) or (0,)
        Positive weights shared by all rows; empty: all 1.
    shift, power : int, float
        The value of magnitude pattern p is ``float32_from_bits(p << shift) * power``.
    params : tuple of int
        (groups, subgroups, window, stride, rounds, steps), see ``kmeans.py``.
    half : bool
        Round to float16; else to float32.
    codebook : ndarray of float64, shape (rows, K), output
    codes : ndarray of uint8, shape (rows, in_features), output
    """
    rows, n = bits.shape
    k = codebook.shape[1]
    capacity = min(n, _PATTERNS)
    histogram = np.zeros(_PATTERNS, np.float64)
    table = np.zeros(_PATTERNS, np.uint8)
    words = np.empty(_PATTERNS + 1, np.uint32)
    singles = words.view(np.float32)
    weights = np.empty(_PATTERNS + 1, np.float64)
    values = np.empty(capacity + 1, np.float64)
    middles = np.empty(k, np.float64)
    s = _scratch(k, params, capacity)
    for r in range(rows):
        low, top = _magnitudes(bits[r])
        _count(bits[r], importance, histogram)
        mirrored = _is_mirrored(histogram, low, top)
        below = histogram[low:top] if mirrored else histogram[_SIGN + low : _SIGN + top]
        above = histogram[_SIGN + low : _SIGN + top] if mirrored else histogram[low:top]
        # Ascending values: magnitudes downwards on one side, zero, magnitudes upwards on the other.
        low_word = np.uint32(low << shift)
        step = np.uint32(1 << shift)
        word = low_word + step * np.uint32(top - low)
        end = U(0)
        for q in range(top - low - 1, -1, -1):
            word -= step
            words[end] = word
            weights[end] = below[U(q)]
            end += U(below[U(q)] > 0.0)
        zero = end
        words[end] = 0
        weights[end] = histogram[0] + histogram[_SIGN]
        end += U(weights[end] > 0.0)
        word = low_word
        for q in range(U(top - low)):
            words[end] = word
            weights[end] = above[q]
            end += U(above[q] > 0.0)
            word += step
        for q in range(U(top - low)):
            below[q] = above[q] = 0.0
        histogram[0] = histogram[_SIGN] = 0.0
        for j in range(zero):
            values[j] = -power * np.float64(singles[j])
        for j in range(zero, end):
            values[j] = power * np.float64(singles[j])
        m: Any = np.int64(end)
        _fit_distinct(m, params, values, weights, half, mirrored, codebook[r], middles, s)
        # Label the patterns, in true ascending order.
        code = 0
        if mirrored:
            for j in range(m - 1, -1, -1):
                while -values[j] > middles[code]:
                    code += 1
                table[(words[j] >> shift) | np.uint32(0 if U(j) < zero else _SIGN)] = code
        else:
            for j in range(end):
                while values[j] > middles[code]:
                    code += 1
                table[(words[j] >> shift) | np.uint32(_SIGN if j < zero else 0)] = code
        # Zero comes in two patterns, whichever of them was written.
        if end > zero and words[zero] == 0:
            label = table[_SIGN if mirrored else 0]
            table[0] = label
            table[_SIGN] = label
        row = bits[r]
        out = codes[r]
        for i in range(n):
            out[i] = table[row[i]]


@jit(error_model="numpy")
def fit_rows_32(
    rows_values: NDArray[np.float32],
    ordered: NDArray[np.float32],
    order: NDArray[np.uint32],
    importance: F64,
    params: Any,
    half: bool,
    codebook: F64,
    codes: NDArray[np.uint8],
) -> None:
    """Codebooks and codes of rows of float32.

    Parameters
    ----------
    rows_values : ndarray of float32, shape (rows, in_features)
    ordered : ndarray of float32, shape (rows, in_features)
        The same rows, each sorted ascending.
    order : ndarray of uint32, shape (rows, in_features) or (rows, 0)
        Where each sorted value came from; only needed with ``importance``.
    importance, params, half, codebook, codes
        As for :func:`fit_rows_16`.
    """
    rows, n = rows_values.shape
    k = codebook.shape[1]
    weighted = importance.size > 0
    weights = np.empty(n + 1, np.float64)
    values = np.empty(n + 1, np.float64)
    middles = np.empty(256, np.float64)
    s = _scratch(k, params, n)
    for r in range(rows):
        m = 0
        previous = np.float32(np.nan)
        zero = -1
        zeros = 0.0  # the two zeros are summed apart, then added: the order of additions of the 16-bit way
        negatives = 0.0
        for i in range(n):
            v = ordered[r, i]
            w = importance[order[r, i]] if weighted else 1.0
            if v != previous:
                zero = m if v == 0.0 else zero
                values[m] = v
                weights[m] = 0.0
                m += 1
                previous = v
            weights[m - 1] += w
            if v == 0.0:
                positive = math.copysign(1.0, v) > 0.0
                zeros += w if positive else 0.0
                negatives += 0.0 if positive else w
        if zero >= 0:
            values[zero] = 0.0
            weights[zero] = zeros + negatives
        mirrored = False
        for j in range(m):
            a, b = -values[j], values[m - 1 - j]
            if a != b or weights[j] != weights[m - 1 - j]:
                mirrored = b > a or (a == b and weights[m - 1 - j] > weights[j])
                break
        if mirrored:
            values[:m] = -values[:m][::-1].copy()
            weights[:m] = weights[:m][::-1].copy()
        used = _fit_distinct(m, params, values, weights, half, mirrored, codebook[r], middles, s)
        # Binary search for the first middle that is not below the value: no branches on the data.
        span = 1
        while span < used:
            span *= 2
        for i in range(n):
            v = np.float64(rows_values[r, i])
            code = 0
            step = span >> 1
            while step > 0:
                code += step if v > middles[code + step - 1] else 0
                step >>= 1
            codes[r, i] = code
