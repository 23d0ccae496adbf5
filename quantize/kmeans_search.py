"""Search for the cluster borders of one sorted row: group, solve the groups exactly, refine, polish.

Input is a row as ``m`` ascending distinct values ``x`` with their weights, given as prefix sums ``pw, px, pxx``
(length m + 1) of w, w*x and w*x*x: the squared error of any interval costs three subtractions and a division. The
result is ``borders`` (length K + 1): cluster k holds the values [borders[k], borders[k + 1]).

1. *Group* the values into at most M intervals of equal measure, density to the power 1/3 (the companding law of
   Panter and Dite: where an optimal quantizer puts its levels; every outlier keeps a group of its own).
2. *Solve* k-means over the groups exactly: a table of interval costs, then K rounds of
   ``F_k(j) = min_i F_{k-1}(i) + cost(i, j)``. Float32 and a plain scan, pruned by an upper bound: the inner loop
   is an addition and a minimum over contiguous memory, so SIMD beats the asymptotically better methods here.
3. *Refine*: let every border choose among a window of finer candidates around its place, again all of them at
   once by dynamic programming. This moves borders jointly, which Lloyd's steps cannot (from 17 to 4 % excess at
   K = 256). At K = 256 and default effort this starts from the companding law directly.
4. *Polish* with Lloyd steps on all values; borders only walk, so a step costs O(K).

Plain IEEE arithmetic without libm calls: the result does not depend on the CPU or on the thread.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from trapetum.kernels.jit import jit

__all__ = ["WIDTHS", "compand", "fill_up", "polish", "refine", "solve_groups"]

F64 = NDArray[np.float64]
I32 = NDArray[np.int32]
U: Any = np.uint64

WIDTHS = 2  # interval widths that one pass of the group solver takes together


@jit(error_model="numpy")
def _capped_total(count: int, cube: Any, cap: Any) -> Any:
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
def compand(
    m: int, x: F64, pw: F64, parts: int, subparts: int, cube: Any, fine: I32, coarse: I32
) -> tuple[Any, Any]:
    """Cut m values into about ``subparts`` intervals and these into at most ``parts``.

    The measure of a gap between neighbours is (their weight * gap**2) ** (1/3), the integral of density ** (1/3).
    A gap takes one border at most, whatever its measure: else an outlier's gap would eat the borders of others.

    Returns the two counts; ``fine[0 .. nf]`` are indices of values, ``coarse[0 .. nc]`` indices of fine intervals.
    ``cube`` is float32 scratch of length m.
    """
    bits = cube.view(np.uint32)
    gaps = U(m - 1)
    for j in range(gaps):
        gap = x[j + U(1)] - x[j]
        cube[j] = np.float32((pw[j + U(2)] - pw[j]) * gap * gap)
    for j in range(gaps):  # cube root by dividing the exponent, 3 % off at most: this is only a placement
        bits[j] = bits[j] // np.uint32(3) + np.uint32(0x2A514067)
    # The total of the gaps, none of them counting for more than one part of it; three rounds come close enough.
    total = _capped_total(m - 1, cube, np.float32(np.inf))
    for _ in range(2):
        total = _capped_total(m - 1, cube, total / np.float32(parts))
    # An infinite scale makes every gap a border: with few enough values nothing is grouped.
    scale = np.float32(parts) / total if parts < m else np.float32(np.inf)
    subscale = np.float32(subparts) / total if subparts < m else np.float32(np.inf)
    one = np.float32(1.0)
    fine[0] = coarse[0] = 0
    nf = U(0)
    nc = U(0)
    t = np.float32(0.0)
    u = np.float32(0.0)
    last = U(parts - 1)
    group = np.int32(0)
    subgroup = np.int32(0)
    # Without branches, for where the borders fall cannot be predicted; one addition is the only chain of latency.
    for j in range(U(1), U(m)):
        gap = cube[j - U(1)]
        t += min(gap * scale, one)
        u += min(gap * subscale, one)
        g, h = np.int32(t), np.int32(u)
        cut = U((g != group) & (nc < last))
        group = g
        subcut = U(h != subgroup) | cut
        subgroup = h
        fine[nf + U(1)] = j  # stays if it is a border, else the next one takes its place
        nf += subcut
        coarse[nc + U(1)] = nf
        nc += cut
    nf += U(1)
    fine[nf] = m
    nc += U(1)
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
    borders: I32,
) -> None:
    """Optimal k intervals over the groups ``edges[0 .. groups]``; k <= groups.

    Exact pruning: cutting the groups into k equal runs gives an upper bound of the optimum; no interval may cost
    more, so none is wider than some ``reach`` groups, and every layer has few places to go on from.

    Costs are stored by width, ``table[d, j]`` for the interval (j - d, j], so that all loops run over j: long,
    contiguous and SIMD. Layers have ``groups + WIDTHS`` infinities in front, which j - d may run into.

    Scratch: ``table`` float32 [groups + WIDTHS, groups + 1], ``layers`` float32 [k, 2 * groups + WIDTHS + 1],
    ``gathered`` float64 [3, groups + 1].
    """
    # Indices are unsigned: with signed ones numba allows for negative indices, and that costs the SIMD form of the
    # inner loops (7x at 128 groups).
    end, one, widths, clusters = U(groups), U(1), U(WIDTHS), U(k)
    infinity = np.float32(np.inf)
    gw, gx, gxx = gathered[0], gathered[1], gathered[2]
    for j in range(end + one):
        e = U(edges[j])
        gw[j] = pw[e]
        gx[j] = px[e]
        gxx[j] = pxx[e]
    bound = 0.0
    for b in range(clusters):
        i, j = b * end // clusters, (b + one) * end // clusters
        dx = gx[j] - gx[i]
        bound += (gxx[j] - gxx[i]) - dx * dx / (gw[j] - gw[i])
    bound = bound * (1.0 + 1e-5) + 1e-12 * gxx[end]  # what rounding may do to the costs below
    limit = np.float32(bound)
    far = U(0)
    reach = one
    for i in range(end):
        far = max(far, i + one)
        while far < end:  # is the cost of (i, far + 1] within the bound?
            dx = gx[far + one] - gx[i]
            if ((gxx[far + one] - gxx[i]) - bound) * (gw[far + one] - gw[i]) > dx * dx:
                break
            far += one
        reach = max(reach, far - i)
    reach = (reach + widths - one) // widths * widths
    for d in range(one, reach + one):
        row = table[d]
        for j in range(min(d, end + one)):
            row[j] = infinity
        for j in range(d, end + one):
            dx = gx[j] - gx[j - d]
            row[j] = np.float32((gxx[j] - gxx[j - d]) - dx * dx / (gw[j] - gw[j - d]))
    front = end + widths
    for layer in range(clusters):
        row = layers[layer]
        for j in range(front + end + one):
            row[j] = infinity
    for j in range(one, min(reach, end) + one):
        layers[0, front + j] = table[j, j]
    start = one
    high = one  # the last place that a beginning within the bound can have reached
    for layer in range(one, clusters):
        before, now = layers[layer - one], layers[layer]
        high = max(high, start)  # below the previous layer's start nothing was computed
        while high < end and before[front + high + one] <= limit:
            high += one
        rest = (clusters - one - layer) * reach
        start = max(layer + one, end - min(rest, end))
        stop = min(high + reach, end) + one
        for d in range(one, reach + one, widths):
            # Slices: with one base index for each operand the compiler sees contiguous streams and uses SIMD.
            c0, c1 = table[d, start:stop], table[d + one, start:stop]
            b0 = before[front + start - d : front + stop - d]
            b1 = before[front + start - d - one : front + stop - d - one]
            to_here = now[front + start : front + stop]
            for j in range(to_here.size):
                cost = b0[j] + c0[j]
                other = b1[j] + c1[j]
                cost = cost if cost < other else other
                to_here[j] = cost if cost < to_here[j] else to_here[j]
    borders[0] = 0
    borders[k] = edges[groups]
    to = groups
    for layer in range(k - 1, 0, -1):
        best = infinity
        where = to - 1
        for d in range(1, min(reach, U(to - layer)) + one):
            value = layers[layer - 1, groups + WIDTHS + to - d] + table[d, to]
            if value < best:
                best = value
                where = to - d
        borders[layer] = edges[where]
        to = where


@jit(error_model="numpy")
def refine(
    k: int,
    window: int,
    stride: int,
    pw: F64,
    px: F64,
    pxx: F64,
    shifts: F64,
    sums: F64,
    sides: Any,
    costs: Any,
    score: Any,
    borders: I32,
) -> None:
    """Move every border to the best of ``window`` candidates, ``stride`` values apart, around it; all jointly.

    All costs are computed with the cluster as the innermost index, which makes SIMD loops of length k. Float32 holds
    them well, for each cluster's sums are taken about its own present centroid: nothing cancels.

    Scratch: ``shifts`` float64 [3, k + 1] (change of the three sums from border to candidate), ``sums`` float64
    [3, k], ``sides`` float32 [6, window, k], ``costs`` float32 [window, window, at least k], ``score`` float32
    [k, window].
    """
    m = borders[k]
    half = window // 2
    clusters, one = U(k), U(1)
    weight, mean, error = sums[0], sums[1], sums[2]
    for b in range(clusters):
        i, j = U(borders[b]), U(borders[b + one])
        weight[b] = pw[j] - pw[i]
        mean[b] = (px[j] - px[i]) / weight[b]
        error[b] = (pxx[j] - pxx[i]) - mean[b] * (px[j] - px[i])
    sw, sx, sxx = shifts[0], shifts[1], shifts[2]
    sw[0] = sx[0] = sxx[0] = sw[k] = sx[k] = sxx[k] = 0.0
    for c in range(window):
        offset = (c - half) * stride
        for b in range(1, k):
            old, new = U(borders[b]), U(min(max(borders[b] + offset, b), m - (k - b)))
            sw[b] = pw[new] - pw[old]
            sx[b] = px[new] - px[old]
            sxx[b] = pxx[new] - pxx[old]
        lw, lx, lxx = sides[0, c], sides[1, c], sides[2, c]
        rw, rx, rxx = sides[3, c], sides[4, c], sides[5, c]
        for b in range(clusters):
            t = sx[b] - mean[b] * sw[b]
            lw[b] = np.float32(sw[b])
            lx[b] = np.float32(t)
            lxx[b] = np.float32(sxx[b] - mean[b] * (sx[b] + t))
        for b in range(clusters):
            w, x, xx = sw[b + one], sx[b + one], sxx[b + one]
            t = x - mean[b] * w
            rw[b] = np.float32(w + weight[b])
            rx[b] = np.float32(t)
            rxx[b] = np.float32((xx - mean[b] * (x + t)) + error[b])
    infinity = np.float32(np.inf)
    zero = np.float32(0.0)
    for c in range(window):
        rw, rx, rxx = sides[3, c], sides[4, c], sides[5, c]
        for i in range(window):
            lw, lx, lxx = sides[0, i], sides[1, i], sides[2, i]
            out = costs[c, i]
            for b in range(clusters):
                dw = rw[b] - lw[b]
                dx = rx[b] - lx[b]
                cost = (rxx[b] - lxx[b]) - dx * dx / dw
                out[b] = cost if dw > zero else infinity
        score[0, c] = costs[c, half, 0]
    for b in range(one, clusters - one):
        for c in range(U(window)):
            best = infinity
            for i in range(U(window)):
                cost = score[b - one, i] + costs[c, i, b]
                best = cost if cost < best else best
            score[b, c] = best
    old = shifts[0]
    to = half  # the end of the last cluster does not move
    for b in range(k - 1, 0, -1):
        least = infinity
        where = half
        for i in range(window):
            cost = score[b - 1, i] + costs[to, i, b]
            if cost < least:
                least = cost
                where = i
        to = where
        old[b] = borders[b]
        borders[b] = min(max(borders[b] + (to - half) * stride, b), m - (k - b))
    # A candidate far outside its cluster does cancel in float32; on rows of hardly more than k values, where errors
    # are tiny, that could win wrongly. So the move must hold in float64.
    gain = 0.0
    for b in range(clusters):
        i, j = U(borders[b]), U(borders[b + one])
        dx = px[j] - px[i]
        gain += error[b] - ((pxx[j] - pxx[i]) - dx * dx / (pw[j] - pw[i]))
    if gain < 0.0:
        for b in range(1, k):
            borders[b] = np.int32(old[b])


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
