"""Which codebook entries to add: a beam search whose scans are SIMD minima, and the sums of a least-squares fit.

A vector t of eight weights is stored as ``p = sum over m of C_m[k_m]``; its cost in a metric D (8 x 8, symmetric) is::

    (p - t) D (p - t) = t D t + sum over m of score_m[k_m] + sum over i < j of cross_ij[k_i, k_j]
    score_m[k] = C_m[k] D C_m[k] - 2 C_m[k] . (D t)          cross_ij[k, l] = 2 C_i[k] D C_j[l]

The cross terms are the same for all vectors of one metric: tables of 256 x 256 in the second-level cache. The search
keeps the ``beam`` best choices of the first codebook, tries all 256 entries of the next with each, and so on; the last
codebook needs only the best. On Gaussian weights beam 8 comes to within 0.7 % of the best of all 65,536 pairs.

A minimum over 256 numbers is 32 vector steps; numba's own loop over them is not vectorised. To take the 8 smallest of
2,048, the minimum of every 32 is kept, so that each costs one scan over 64 numbers and one over 32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numpy.typing import NDArray

from trapetum.kernels.cpu import simd
from trapetum.kernels.cpu.emit import FLOATS, Emit, operation
from trapetum.kernels.jit import jit

__all__ = ["accumulate", "encode_vectors", "pair"]

SIMD = "ce3020bb72a775c0"  # simd.fingerprint(): a new one makes numba compile this file again

_SEGMENT = 32  # numbers that share a minimum
_I1, _I8, _I32 = ir.IntType(1), ir.IntType(8), ir.IntType(32)


@operation(FLOATS, FLOATS, FLOATS)
def _smaller(e: Emit, a: Any, b: Any) -> Any:
    """The smaller of two numbers, lane by lane."""
    return e.builder.select(e.builder.fcmp_ordered("<", a, b), a, b)


@operation(types.float32, FLOATS)
def _smallest(e: Emit, a: Any) -> Any:
    """The smallest lane."""
    for width in (4, 2, 1):
        low = e.shuffle(a, a, list(range(width)))
        high = e.shuffle(a, a, list(range(width, 2 * width)))
        a = e.builder.select(e.builder.fcmp_ordered("<", low, high), low, high)
    return e.builder.extract_element(a, _I32(0))


@operation(types.int32, FLOATS, types.float32)
def _equal(e: Emit, a: Any, value: Any) -> Any:
    """Number of the first lane that equals ``value``; 8 where none does."""
    equal = e.builder.bitcast(e.builder.fcmp_ordered("==", a, e.splat(value, 8)), _I8)
    return e.builder.cttz(e.builder.or_(e.builder.zext(equal, _I32), _I32(256)), _I1(0))


@jit()
def _find(values: NDArray[np.float32], start: int, count: int, value: np.float32) -> int:
    """First place from ``start`` on, among ``count`` numbers, that holds ``value``."""
    for at in range(start, start + count, 8):
        lane = _equal(simd.load_floats(values, at), value)
        if lane < 8:
            place: int = at + lane
            return place
    return start


@jit()
def _segment_minimum(values: NDArray[np.float32], start: int) -> np.float32:
    low = _smaller(simd.load_floats(values, start), simd.load_floats(values, start + 8))
    high = _smaller(simd.load_floats(values, start + 16), simd.load_floats(values, start + 24))
    least: np.float32 = _smallest(_smaller(low, high))
    return least


@jit()
def _take(
    values: NDArray[np.float32],
    minima: NDArray[np.float32],
    count: int,
    wanted: int,
    costs: NDArray[np.float32],
    places: NDArray[np.int64],
) -> None:
    """Cost and place of the ``wanted`` smallest of ``count`` values, which are overwritten; equal ones in order."""
    segments = count // _SEGMENT
    for b in range(wanted):
        low = simd.load_floats(minima, 0)
        for s in range(8, segments, 8):
            low = _smaller(low, simd.load_floats(minima, s))
        value = _smallest(low)
        segment = _find(minima, 0, segments, value)
        place = _find(values, segment * _SEGMENT, _SEGMENT, value)
        costs[b], places[b] = value, place
        values[place] = np.float32(np.inf)
        minima[segment] = _segment_minimum(values, segment * _SEGMENT)


@jit()
def pair(i: int, j: int) -> int:
    """Place of the table of codebooks i < j among the cross tables."""
    return j * (j - 1) // 2 + i


@jit()
def _sums(
    scores: NDArray[np.float32],
    cross: NDArray[np.float32],
    path: NDArray[np.int64],
    m: int,
    start: int,
) -> tuple[Any, Any, Any, Any]:
    """What entries ``start .. start + 31`` of codebook ``m`` add to the cost of a path."""
    at = m * 256 + start
    a, b = simd.load_floats(scores, at), simd.load_floats(scores, at + 8)
    c, d = simd.load_floats(scores, at + 16), simd.load_floats(scores, at + 24)
    for i in range(m):
        at = (pair(i, m) * 256 + path[i]) * 256 + start
        a = simd.add_floats(a, simd.load_floats(cross, at))
        b = simd.add_floats(b, simd.load_floats(cross, at + 8))
        c = simd.add_floats(c, simd.load_floats(cross, at + 16))
        d = simd.add_floats(d, simd.load_floats(cross, at + 24))
    return a, b, c, d


@jit()
def _expand(
    scores: NDArray[np.float32],
    cross: NDArray[np.float32],
    path: NDArray[np.int64],
    m: int,
    cost: np.float32,
    values: NDArray[np.float32],
    minima: NDArray[np.float32],
    at: int,
) -> None:
    """Costs of a path with each entry of codebook ``m``: 256 values from ``at`` on, and the minimum of every 32."""
    base = simd.splat_floats(cost)
    for start in range(0, 256, _SEGMENT):
        a, b, c, d = _sums(scores, cross, path, m, start)
        a, b = simd.add_floats(a, base), simd.add_floats(b, base)
        c, d = simd.add_floats(c, base), simd.add_floats(d, base)
        simd.store_floats(values, at + start, a)
        simd.store_floats(values, at + start + 8, b)
        simd.store_floats(values, at + start + 16, c)
        simd.store_floats(values, at + start + 24, d)
        minima[(at + start) // _SEGMENT] = _smallest(_smaller(_smaller(a, b), _smaller(c, d)))


@jit()
def _least(
    scores: NDArray[np.float32], cross: NDArray[np.float32], path: NDArray[np.int64], m: int
) -> np.float32:
    """The least that an entry of codebook ``m`` adds to the cost of a path."""
    a, b, c, d = _sums(scores, cross, path, m, 0)
    for start in range(_SEGMENT, 256, _SEGMENT):
        e, f, g, h = _sums(scores, cross, path, m, start)
        a, b, c, d = _smaller(a, e), _smaller(b, f), _smaller(c, g), _smaller(d, h)
    least: np.float32 = _smallest(_smaller(_smaller(a, b), _smaller(c, d)))
    return least


@jit()
def encode_vectors(
    linear: NDArray[np.float32],
    turned: NDArray[np.float32],
    norms: NDArray[np.float32],
    cross: NDArray[np.float32],
    beam: int,
    codes: NDArray[np.uint8],
) -> None:
    """Choose entries; see the module.

    Parameters
    ----------
    linear : ndarray of float32, shape (n, 8)
        ``D t`` of each vector.
    turned : ndarray of float32, shape (8, M * 256)
        ``-2 C``, transposed.
    norms : ndarray of float32, shape (M * 256,)
        ``C D C``.
    cross : ndarray of float32, shape (M * (M - 1) / 2, 256, 256)
        See :func:`pair`.
    beam : int
        1 to 256.
    codes : ndarray of uint8, shape (n, M)
        Written.
    """
    entries = norms.shape[0]
    books = entries // 256
    scores = np.empty(entries, np.float32)
    values = np.empty(beam * 256, np.float32)
    minima = np.empty(beam * 8, np.float32)
    costs, found = np.empty(beam, np.float32), np.empty(beam, np.float32)
    places = np.empty(beam, np.int64)
    paths = np.empty((beam, books), np.int64)
    longer = np.empty((beam, books), np.int64)
    for n in range(linear.shape[0]):
        x0, x1 = simd.splat_floats(linear[n, 0]), simd.splat_floats(linear[n, 1])
        x2, x3 = simd.splat_floats(linear[n, 2]), simd.splat_floats(linear[n, 3])
        x4, x5 = simd.splat_floats(linear[n, 4]), simd.splat_floats(linear[n, 5])
        x6, x7 = simd.splat_floats(linear[n, 6]), simd.splat_floats(linear[n, 7])
        for k in range(0, entries, 8):
            total = simd.fma(x0, simd.load_floats(turned, k), simd.load_floats(norms, k))
            total = simd.fma(x1, simd.load_floats(turned, entries + k), total)
            total = simd.fma(x2, simd.load_floats(turned, 2 * entries + k), total)
            total = simd.fma(x3, simd.load_floats(turned, 3 * entries + k), total)
            total = simd.fma(x4, simd.load_floats(turned, 4 * entries + k), total)
            total = simd.fma(x5, simd.load_floats(turned, 5 * entries + k), total)
            total = simd.fma(x6, simd.load_floats(turned, 6 * entries + k), total)
            total = simd.fma(x7, simd.load_floats(turned, 7 * entries + k), total)
            simd.store_floats(scores, k, total)
        width, costs[0] = 1, np.float32(0)
        for m in range(books - 1):
            for b in range(width):
                _expand(scores, cross, paths[b], m, costs[b], values, minima, b * 256)
            count = width * 256
            width = min(beam, count)
            _take(values, minima, count, width, found, places)
            for b in range(width):
                for i in range(m):
                    longer[b, i] = paths[places[b] // 256, i]
                longer[b, m] = places[b] % 256
            paths, longer = longer, paths
            costs, found = found, costs
        best, least = 0, np.float32(np.inf)
        for b in range(width):
            low = costs[b] + _least(scores, cross, paths[b], books - 1)
            if low < least:
                best, least = b, low
        _expand(scores, cross, paths[best], books - 1, np.float32(0), values, minima, 0)
        _take(values, minima, 256, 1, found, places)
        for i in range(books - 1):
            codes[n, i] = paths[best, i]
        codes[n, books - 1] = places[0]


@jit()
def accumulate(
    codes: NDArray[np.uint8],
    targets: NDArray[np.float32],
    weights: NDArray[np.float64],
    pairs: NDArray[np.float64],
    sums: NDArray[np.float64],
) -> None:
    """Add to the normal equations of ``sum over n of weights[n] * |p[n] - targets[n]|**2`` for the codebooks.

    Parameters
    ----------
    codes : ndarray of uint8, shape (n, M)
    targets : ndarray of float32, shape (n, columns)
    weights : ndarray of float64, shape (n,)
    pairs : ndarray of float64, shape (M * 256, M * 256)
        Weight that entries have together; the diagonal and above it are written.
    sums : ndarray of float64, shape (M * 256, columns)
        Weighted sums of the targets of each entry.
    """
    for n in range(codes.shape[0]):
        for i in range(codes.shape[1]):
            row = i * 256 + np.int64(codes[n, i])
            for j in range(i, codes.shape[1]):
                pairs[row, j * 256 + np.int64(codes[n, j])] += weights[n]
            for d in range(targets.shape[1]):
                sums[row, d] += weights[n] * np.float64(targets[n, d])
