"""Search for the cluster borders of one sorted row: group, solve the groups exactly, refine, polish.

Input is a row as ``m`` ascending distinct values ``x`` with their weights, given as prefix sums ``pw, px, pxx``
(length m + 1) of w, w*x and w*x*x: the squared error of any interval costs three subtractions and a division. The
result is ``borders`` (length K + 1): cluster k holds the values [borders[k], borders[k + 1]).

1. *Group* the values into at most M intervals whose borders follow the density to the power 1/3 (the companding law of
   Panter and Dite: where an optimal quantizer puts its levels) mixed with equal mass.
2. *Solve* k-means over the groups exactly: a table of all interval costs, then K rounds of
   ``F_k(j) = min_i F_{k-1}(i) + cost(i, j)``. Float32, full scan, no divide and conquer: the inner loop is an add and a
   minimum over contiguous memory, so SIMD makes it faster than the asymptotically better methods at M of about 100.
3. *Refine*: let every border choose among a window of finer candidates around its place, again all of them at once by
   dynamic programming (K * window**2 evaluations). This moves borders jointly, which Lloyd's steps cannot.
4. *Polish* with Lloyd steps; borders only walk, so a step costs O(K).

Plain IEEE arithmetic without libm calls: the result does not depend on the CPU or on the thread.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from trapetum.kernels.jit import jit

__all__ = ["LANES", "SEARCH_VERSION", "compand", "fill_up", "polish", "refine", "solve_groups"]

F64 = NDArray[np.float64]
I32 = NDArray[np.int32]

# numba's disk cache of a caller does not see a change in this file; callers name this constant in their code.
SEARCH_VERSION = 1

LANES = 8  # groups are padded to a multiple, so the inner loop has no scalar remainder


@jit(error_model="numpy")
def _capped_total(count: int, cube: Any, cap: Any) -> float:
    """Sum of ``min(cube, cap)``; four fixed partial sums, for the latency of one addition is four cycles."""
    a = np.float32(0.0)
    b = np.float32(0.0)
    c = np.float32(0.0)
    d = np.float32(0.0)
    whole = count - count % 4
    for j in range(0, whole, 4):
        a += min(cube[j], cap)
        b += min(cube[j + 1], cap)
        c += min(cube[j + 2], cap)
        d += min(cube[j + 3], cap)
    for j in range(whole, count):
        a += min(cube[j], cap)
    return np.float32((a + b) + (c + d))


@jit(error_model="numpy")
def _cap(count: int, cube: Any, parts: int) -> Any:
    """The cap that makes the capped measure of all gaps about ``parts`` caps: one border for one cap of measure."""
    cap = np.float32(np.inf)
    for _ in range(3):
        cap = _capped_total(count, cube, cap) / np.float32(parts)
    return cap


@jit(error_model="numpy")
def compand(
    m: int, x: F64, pw: F64, parts: int, subparts: int, cube: Any, fine: I32, coarse: I32
) -> tuple[int, int]:
    """Cut m values into about ``subparts`` intervals and these into at most ``parts``.

    The measure of a gap between neighbours is (their weight * gap**2) ** (1/3), the integral of density ** (1/3). A gap
    takes one border at most, whatever its measure: else an outlier's gap would eat the borders of the others.

    Returns the two counts; ``fine[0 .. nf]`` are indices of values, ``coarse[0 .. nc]`` indices of fine intervals.
    ``cube`` is float32 scratch of length m.
    """
    bits = cube.view(np.int32)
    for j in range(m - 1):
        gap = x[j + 1] - x[j]
        cube[j] = np.float32((pw[j + 2] - pw[j]) * gap * gap)
    for j in range(m - 1):  # cube root by dividing the exponent, 3 % off at most: this is only a placement
        bits[j] = bits[j] // np.int32(3) + np.int32(0x2A514067)
    cap = np.float32(1.0) / _cap(m - 1, cube, parts)
    subcap = np.float32(1.0) / _cap(m - 1, cube, subparts) if subparts < m else np.float32(np.inf)
    one = np.float32(1.0)
    fine[0] = coarse[0] = 0
    nf = np.uint32(0)
    nc = np.uint32(0)
    t = np.float32(0.0)
    u = np.float32(0.0)
    last = np.uint32(parts - 1)
    group = np.int32(0)
    subgroup = np.int32(0)
    # Without branches, for where the borders fall cannot be predicted, and with one addition as the only chain.
    for j in range(np.uint32(1), np.uint32(m)):
        gap = cube[j - np.uint32(1)]
        t += min(gap * cap, one)
        u += min(gap * subcap, one)
        g, h = np.int32(t), np.int32(u)
        cut = np.uint32((g != group) & (nc < last))
        group = g
        subcut = np.uint32(h != subgroup) | cut
        subgroup = h
        fine[nf + np.uint32(1)] = j  # stays if it is a border, else the next one takes its place
        nf += subcut
        coarse[nc + np.uint32(1)] = nf
        nc += cut
    nf += np.uint32(1)
    fine[nf] = m
    nc += np.uint32(1)
    coarse[nc] = nf
    return np.int64(nf), np.int64(nc)


@jit(error_model="numpy")
def fill_up(k: int, count: int, borders: I32) -> None:
    """Raise the number of intervals from ``count`` to k by cutting single values off, from the right.

    There must be at least k values, ``borders[count] >= k``.
    """
    old = count
    above = borders[count] + 1
    for slot in range(k, -1, -1):
        if slot == old or borders[old] == above - 1:
            above = borders[old]
            old -= 1
        else:
            above -= 1
        borders[slot] = above


@jit(error_model="numpy")
def solve_groups(
    groups: int,
    k: int,
    edges: I32,
    pw: F64,
    px: F64,
    pxx: F64,
    table: Any,
    layers: Any,
    gathered: F64,
    reach: I32,
    borders: I32,
) -> None:
    """Optimal k intervals over the groups ``edges[0 .. groups]``; k <= groups.

    Exact pruning: cutting the groups into k equal runs gives an upper bound of the optimum, and no interval, and no
    beginning of a solution, may cost more than that. On smooth densities this leaves about a fifth of the work.

    ``table`` is float32 [groups, padded], ``layers`` float32 [k, padded], ``gathered`` float64 [3, padded], ``reach``
    int32 [groups], with ``padded`` a multiple of LANES above ``groups``.
    """
    padded = (groups // LANES + 1) * LANES
    gw, gx, gxx = gathered[0], gathered[1], gathered[2]
    for j in range(padded):
        e = edges[min(j, groups)]
        gw[j] = pw[e]
        gx[j] = px[e]
        gxx[j] = pxx[e]
    bound = 0.0
    for b in range(k):
        i, j = b * groups // k, (b + 1) * groups // k
        dx = gx[j] - gx[i]
        bound += (gxx[j] - gxx[i]) - dx * dx / (gw[j] - gw[i])
    bound *= 1.0 + 1e-5  # float32 rounds the costs below
    limit = np.float32(bound)
    infinity = np.float32(np.inf)
    # The inner loops run over slices that start at zero: with an offset in the index numba must allow for negative
    # indices, and that costs the SIMD form (7x at 128 groups).
    far = 0
    for i in range(groups):
        far = max(far, i + 1)
        while far < groups:
            dx = gx[far + 1] - gx[i]
            if (gxx[far + 1] - gxx[i]) - dx * dx / (gw[far + 1] - gw[i]) > bound:
                break
            far += 1
        start = (i + 1) // LANES * LANES
        stop = (far // LANES + 1) * LANES
        reach[i] = stop
        row = table[i, start:stop]
        w, x, xx = gw[start:stop], gx[start:stop], gxx[start:stop]
        w0, x0, xx0 = gw[i], gx[i], gxx[i]
        for j in range(row.size):
            dx = x[j] - x0
            row[j] = np.float32((xx[j] - xx0) - dx * dx / (w[j] - w0))
        for j in range(start, i + 1):
            table[i, j] = infinity
    layers[:k, :padded] = infinity
    layers[0, : reach[0]] = table[0, : reach[0]]
    for layer in range(1, k):
        before = layers[layer - 1]
        for i in range(layer, groups - (k - 1 - layer)):
            base = before[i]
            if base > limit:
                continue
            start = (i + 1) // LANES * LANES
            row = table[i, start : reach[i]]
            now = layers[layer, start : reach[i]]
            for j in range(row.size):
                cost = base + row[j]
                now[j] = cost if cost < now[j] else now[j]
    j = groups
    borders[k] = edges[groups]
    for layer in range(k - 1, 0, -1):
        best = infinity
        where = j - 1
        before = layers[layer - 1]
        for i in range(j - 1, layer - 1, -1):
            if reach[i] <= j:
                break
            value = before[i] + table[i, j]
            if value < best:
                best = value
                where = i
        borders[layer] = edges[where]
        j = where
    borders[0] = 0


@jit(error_model="numpy")
def refine(
    k: int, window: int, stride: int, pw: F64, px: F64, pxx: F64, shifts: F64, sums: F64, sides: Any, costs: Any,
    score: Any, borders: I32,
) -> None:
    """Move every border to the best of ``window`` candidates, ``stride`` values apart, around it; all jointly.

    All costs are computed with the cluster as the innermost index, which makes SIMD loops of length k. Float32 holds
    them well, for each cluster's sums are taken about its own present centroid: nothing cancels. Float64 with the
    candidate innermost took 21 us a row at k = 256 and a window of 8, this takes 8.

    Scratch: ``shifts`` float64 [3, k + 1] (change of the three sums from border to candidate), ``sums`` float64 [3, k],
    ``sides`` float32 [6, window, k], ``costs`` float32 [window, window, k], ``score`` float32 [k, window].
    """
    m = borders[k]
    half = window // 2
    for b in range(k):
        i, j = borders[b], borders[b + 1]
        weight = pw[j] - pw[i]
        mean = (px[j] - px[i]) / weight
        sums[0, b] = weight
        sums[1, b] = mean
        sums[2, b] = (pxx[j] - pxx[i]) - mean * (px[j] - px[i])
    weight, mean, error = sums[0], sums[1], sums[2]
    for c in range(window):
        offset = (c - half) * stride
        sw, sx, sxx = shifts[0], shifts[1], shifts[2]
        sw[0] = sx[0] = sxx[0] = sw[k] = sx[k] = sxx[k] = 0.0
        for b in range(1, k):
            old = np.uint32(borders[b])
            p = np.uint32(min(max(borders[b] + offset, b), m - (k - b)))
            sw[b] = pw[p] - pw[old]
            sx[b] = px[p] - px[old]
            sxx[b] = pxx[p] - pxx[old]
        lw, lx, lxx = sides[0, c], sides[1, c], sides[2, c]
        for b in range(lw.size):
            t = sx[b] - mean[b] * sw[b]
            lw[b] = np.float32(sw[b])
            lx[b] = np.float32(t)
            lxx[b] = np.float32(sxx[b] - mean[b] * (sx[b] + t))
        rw, rx, rxx = sides[3, c], sides[4, c], sides[5, c]
        sw, sx, sxx = sw[1:], sx[1:], sxx[1:]
        for b in range(rw.size):
            t = sx[b] - mean[b] * sw[b]
            rw[b] = np.float32(sw[b] + weight[b])
            rx[b] = np.float32(t)
            rxx[b] = np.float32((sxx[b] - mean[b] * (sx[b] + t)) + error[b])
    infinity = np.float32(np.inf)
    zero = np.float32(0.0)
    for i in range(window):
        lw, lx, lxx = sides[0, i], sides[1, i], sides[2, i]
        for c in range(window):
            rw, rx, rxx = sides[3, c], sides[4, c], sides[5, c]
            out = costs[c, i]
            for b in range(out.size):
                w = rw[b] - lw[b]
                x = rx[b] - lx[b]
                cost = (rxx[b] - lxx[b]) - x * x / w
                out[b] = cost if w > zero else infinity
    for c in range(window):
        score[0, c] = costs[c, half, 0]
    for b in range(1, k - 1):
        before = score[b - 1]
        now = score[b]
        for c in range(window):
            best = infinity
            for i in range(window):
                cost = before[i] + costs[c, i, b]
                best = cost if cost < best else best
            now[c] = best
    c = half  # the end of the last cluster does not move
    for b in range(k - 1, 0, -1):
        best = infinity
        where = half
        for i in range(window):
            cost = score[b - 1, i] + costs[c, i, b]
            if cost < best:
                best = cost
                where = i
        c = where
        borders[b] = min(max(borders[b] + (c - half) * stride, b), m - (k - b))


@jit(error_model="numpy")
def polish(k: int, steps: int, x: F64, pw: F64, px: F64, centroids: F64, borders: I32) -> None:
    """Lloyd steps until no border moves, ``steps`` at most; ``centroids`` are those of the final borders."""
    for b in range(k):
        lo, hi = borders[b], borders[b + 1]
        centroids[b] = (px[hi] - px[lo]) / (pw[hi] - pw[lo])
    for _ in range(steps):
        moved = False
        for b in range(1, k):
            middle = 0.5 * (centroids[b - 1] + centroids[b])
            p = borders[b]
            floor = borders[b - 1] + 1
            ceiling = borders[b + 1] - 1
            while p > floor and x[p - 1] > middle:
                p -= 1
            while p < ceiling and x[p] <= middle:
                p += 1
            if p != borders[b]:
                borders[b] = p
                moved = True
        if not moved:
            return
        for b in range(k):
            lo, hi = borders[b], borders[b + 1]
            centroids[b] = (px[hi] - px[lo]) / (pw[hi] - pw[lo])
