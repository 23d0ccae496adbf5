"""Exact one-dimensional k-means by dynamic programming: the oracle that the fast search is measured against.

Sort the values; a cluster is then an interval, and with prefix sums of (w, w*x, w*x*x) the cost of any interval
is three subtractions and a division. ``F_k(j) = min_i F_{k-1}(i) + cost(i, j)`` has monotone minimisers, so divide
and conquer needs O(K m log m) evaluations for m distinct values: an oracle, not an engine.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trapetum.kernels.jit import jit

__all__ = ["optimal_codebook"]


@jit()
def _layer(
    previous: NDArray[np.float64],
    current: NDArray[np.float64],
    split: NDArray[np.int32],
    stack: NDArray[np.int64],
    pw: NDArray[np.float64],
    px: NDArray[np.float64],
    pxx: NDArray[np.float64],
    k: int,
) -> None:
    """Fill ``current[j]``, the cost of items [0, j) in k + 1 clusters, and the last cluster's start."""
    m = pw.size - 1
    top = 1
    stack[0, 0], stack[0, 1], stack[0, 2], stack[0, 3] = k + 1, m, k, m
    while top:
        top -= 1
        lo, hi, first, last = stack[top, 0], stack[top, 1], stack[top, 2], stack[top, 3]
        if lo > hi:
            continue
        j = (lo + hi) // 2
        best = np.inf
        where = first
        for i in range(first, min(j - 1, last) + 1):
            d = px[j] - px[i]
            value = previous[i] + max(0.0, (pxx[j] - pxx[i]) - d * d / (pw[j] - pw[i]))
            if value < best:
                best = value
                where = i
        current[j] = best
        split[j] = where
        stack[top, 0], stack[top, 1], stack[top, 2], stack[top, 3] = lo, j - 1, first, where
        stack[top + 1, 0], stack[top + 1, 1], stack[top + 1, 2], stack[top + 1, 3] = j + 1, hi, where, last
        top += 2


def optimal_codebook(
    values: NDArray[Any], codebook_size: int, weights: NDArray[Any] | None = None
) -> tuple[NDArray[np.float64], float]:
    """Find the codebook of least (weighted) squared error, exactly.

    Parameters
    ----------
    values : ndarray of any float dtype
        Finite values; the shape does not matter.
    codebook_size : int
        At most this many centroids.
    weights : ndarray, same size, optional
        Importance of each value, positive; 1 when omitted.

    Returns
    -------
    centroids : ndarray of float64, shape (<= codebook_size,)
        Ascending.
    sse : float
        Weighted sum of squared errors, summed over the values (no cancellation).

    Source: H. Wang, M. Song, "Ckmeans.1d.dp", R Journal 3/2 (2011), for the recurrence.

    Examples
    --------
    >>> centroids, sse = optimal_codebook(np.array([0.0, 1.0, 10.0, 12.0]), 2)
    >>> centroids.tolist(), sse
    ([0.5, 11.0], 2.5)
    """
    x, inverse = np.unique(np.asarray(values, dtype=np.float64).reshape(-1), return_inverse=True)
    w = np.bincount(
        inverse.reshape(-1), None if weights is None else np.asarray(weights, np.float64).reshape(-1)
    )
    m = x.size
    if m <= codebook_size:
        return x, 0.0
    origin = (x * w).sum() / w.sum()  # less cancellation in the prefix sums
    scale = np.abs(x - origin).max()
    u = (x - origin) / scale
    pw, px, pxx = (np.concatenate([[0.0], np.cumsum(w * u**p)]) for p in (0, 1, 2))
    previous = np.full(m + 1, np.inf)
    previous[0] = 0.0
    stack = np.empty((64 + 2 * int(m).bit_length(), 4), np.int64)
    splits = np.zeros((codebook_size, m + 1), np.int32)
    for k in range(codebook_size):
        current = np.full(m + 1, np.inf)
        _layer(previous, current, splits[k], stack, pw, px, pxx, k)
        previous = current
    edges = [m]
    for k in range(codebook_size - 1, -1, -1):
        edges.append(int(splits[k, edges[-1]]))
    bounds = edges[::-1]
    centroids = np.empty(codebook_size)
    sse = 0.0
    for k, (a, b) in enumerate(pairwise(bounds)):
        centroids[k] = np.average(x[a:b], weights=w[a:b])
        sse += float((w[a:b] * (x[a:b] - centroids[k]) ** 2).sum())
    return centroids, sse
