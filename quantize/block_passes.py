"""Loops of the block-type searches: every pass goes over a tile [elements, LANES], one lane a block.

A tile holds blocks side by side, transposed, so that the inner loop runs over independent lanes: it vectorises
without any re-association, and a block's result depends neither on its neighbours nor on the width of the CPU's
vectors. A pass costs about 0.4 ns an element on one core (AVX-512 server), 0.9 ns with the table.

``table`` selects what a code stands for: ``None`` the integers ``low..high``, ``True`` the sixteen values of IQ4_NL.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from trapetum.blocktypes.simple import IQ4_VALUES
from trapetum.kernels.jit import jit

__all__ = [
    "LANES",
    "affine_codes",
    "affine_error",
    "affine_sums",
    "scaled_codes",
    "scaled_error",
    "scaled_sums",
    "scan_affine",
    "scan_scaled",
]

# Blocks a tile: 32 x 2048 float32 with their weights are 512 KiB, half an L2 cache. A constant: only then does the
# compiler see that the running sums of a lane do not overlap (1.8 -> 0.4 ns an element).
LANES = 2048

_F0 = np.float32(0)
_F1 = np.float32(1)
_TINY = np.float32(1e-30)  # its inverse is still finite; far below what a float16 scale can hold
_EDGES = (IQ4_VALUES[1:] + IQ4_VALUES[:-1]) / np.float32(2)
_RISES = IQ4_VALUES[1:] - IQ4_VALUES[:-1]
_FIRST = np.float32(IQ4_VALUES[0])


@jit()
def _nearest(y: Any, table: Any, low: Any, high: Any) -> Any:
    """The value of the grid nearest to ``y``."""
    if table is None:
        q = np.rint(y)
        q = low if q < low else q
        return high if q > high else q
    v = _FIRST  # fifteen compares, no look-up: a gather is twice as slow (1.9 against 0.9 ns)
    for k in range(15):
        v += _RISES[k] if y > _EDGES[k] else _F0
    return v


@jit()
def scaled_sums(x: Any, w: Any, inverse: Any, table: Any, low: Any, high: Any, sums: Any) -> None:
    """``sums = [sum w x q, sum w q q]`` of every lane; q is the grid value nearest to ``x * inverse``."""
    sums[:] = _F0
    flat = sums.reshape(-1)
    for e in range(x.shape[0]):
        for lane in range(LANES):
            v = x[e, lane]
            q = _nearest(v * inverse[lane], table, low, high)
            t = w[e, lane] * q
            flat[lane] += t * v
            flat[LANES + lane] += t * q


@jit()
def scaled_error(
    x: Any, w: Any, scale: Any, inverse: Any, table: Any, low: Any, high: Any, error: Any
) -> None:
    """``error = sum w (x - scale q)**2`` of every lane."""
    error[:] = _F0
    for e in range(x.shape[0]):
        for lane in range(LANES):
            v = x[e, lane]
            r = v - scale[lane] * _nearest(v * inverse[lane], table, low, high)
            error[lane] += w[e, lane] * r * r


@jit()
def scaled_codes(x: Any, inverse: Any, table: Any, low: Any, high: Any, codes: Any) -> None:
    """Codes uint8 [elements, LANES]: the integer less ``low``, or the index in the table."""
    for e in range(x.shape[0]):
        for lane in range(LANES):
            y = x[e, lane] * inverse[lane]
            if table is None:
                codes[e, lane] = np.uint8(_nearest(y, table, low, high) - low)
            else:
                c = np.uint8(0)
                for k in range(15):
                    c += np.uint8(y > _EDGES[k])
                codes[e, lane] = c


@jit()
def scan_scaled(x: Any, w: Any, table: Any, low: Any, high: Any, steps: Any, rounds: Any, scale: Any) -> None:
    """Least-squares scale of every lane, the best over trial scales.

    Trial k maps the value of largest magnitude to ``steps[k]``, in units of the grid; the best trial is then
    refined by ``rounds`` alternations of nearest codes and least squares.
    """
    peak = np.zeros(LANES, np.float32)
    inverse = np.empty(LANES, np.float32)
    best = np.zeros(LANES, np.float32)
    sums = np.empty((2, LANES), np.float32)
    scale[:] = _F0
    for e in range(x.shape[0]):
        for lane in range(LANES):
            v = x[e, lane]
            peak[lane] = v if abs(v) > abs(peak[lane]) else peak[lane]
    for k in range(steps.size + rounds):
        for lane in range(LANES):
            d = peak[lane] / steps[k] if k < steps.size else scale[lane]
            inverse[lane] = _F1 / d if abs(d) > _TINY else _F0
        scaled_sums(x, w, inverse, table, low, high, sums)
        for lane in range(LANES):
            if sums[1, lane] > _F0:
                s = sums[0, lane] / sums[1, lane]
                gain = s * sums[0, lane]
                if gain > best[lane]:
                    best[lane] = gain
                    scale[lane] = s


@jit()
def affine_sums(x: Any, w: Any, inverse: Any, offset: Any, base: Any, high: Any, sums: Any) -> None:
    """``sums = [sum w q, sum w q q, sum w (x - base) q]``; q = round((x - offset) * inverse) within 0..high."""
    sums[:] = _F0
    flat = sums.reshape(-1)
    for e in range(x.shape[0]):
        for lane in range(LANES):
            v = x[e, lane]
            q = np.rint((v - offset[lane]) * inverse[lane])
            q = _F0 if q < _F0 else q
            q = high if q > high else q
            t = w[e, lane] * q
            flat[lane] += t
            flat[LANES + lane] += t * q
            flat[2 * LANES + lane] += t * (v - base[lane])


@jit()
def affine_error(x: Any, w: Any, scale: Any, inverse: Any, offset: Any, high: Any, error: Any) -> None:
    """``error = sum w (x - scale q - offset)**2`` of every lane."""
    error[:] = _F0
    for e in range(x.shape[0]):
        for lane in range(LANES):
            v = x[e, lane] - offset[lane]
            q = np.rint(v * inverse[lane])
            q = _F0 if q < _F0 else q
            q = high if q > high else q
            r = v - scale[lane] * q
            error[lane] += w[e, lane] * r * r


@jit()
def affine_codes(x: Any, inverse: Any, offset: Any, high: Any, codes: Any) -> None:
    """Codes uint8 [elements, LANES]."""
    for e in range(x.shape[0]):
        for lane in range(LANES):
            q = np.rint((x[e, lane] - offset[lane]) * inverse[lane])
            q = _F0 if q < _F0 else q
            codes[e, lane] = np.uint8(high if q > high else q)


@jit()
def scan_affine(
    x: Any, w: Any, high: Any, steps: Any, rounds: Any, bounded: Any, scale: Any, offset: Any, moments: Any
) -> None:
    """Least-squares scale and offset of every lane, the best over trial scales.

    Trial k spreads the range of the values over ``high + steps[k]`` units from the smallest value up; the best is
    then refined by ``rounds`` alternations. With ``bounded`` the offset stays at or below zero (K-quants store its
    negative, unsigned). ``moments`` receives ``[sum w, sum w x]``.

    All sums are taken about the smallest value: a block far from zero would lose its differences otherwise.
    """
    base = np.zeros(LANES, np.float32)
    top = np.zeros(LANES, np.float32)
    inverse = np.empty(LANES, np.float32)
    best = np.full(LANES, -np.inf, np.float32)
    sums = np.empty((3, LANES), np.float32)
    sw = np.zeros(LANES, np.float32)
    sv = np.zeros(LANES, np.float32)
    for lane in range(LANES):
        base[lane] = top[lane] = x[0, lane]
        if bounded and base[lane] > _F0:
            base[lane] = _F0
    for e in range(x.shape[0]):
        for lane in range(LANES):
            v = x[e, lane]
            base[lane] = v if v < base[lane] else base[lane]
            top[lane] = v if v > top[lane] else top[lane]
    for e in range(x.shape[0]):
        for lane in range(LANES):
            sw[lane] += w[e, lane]
            sv[lane] += w[e, lane] * (x[e, lane] - base[lane])
    for lane in range(LANES):
        scale[lane] = _F0
        offset[lane] = base[lane]
        moments[0, lane] = sw[lane]
        moments[1, lane] = sv[lane] + base[lane] * sw[lane]
    start = base.copy()
    for k in range(steps.size + rounds):
        for lane in range(LANES):
            if k < steps.size:
                width = top[lane] - base[lane]
                inverse[lane] = (high + steps[k]) / width if width > _TINY else _F0
            else:
                inverse[lane] = _F1 / scale[lane] if scale[lane] > _TINY else _F0
                start[lane] = offset[lane]
        affine_sums(x, w, inverse, start, base, high, sums)
        for lane in range(LANES):
            q1, q2, vq = sums[0, lane], sums[1, lane], sums[2, lane]
            det = sw[lane] * q2 - q1 * q1
            if det > _F0:
                a = (sw[lane] * vq - sv[lane] * q1) / det
                b = (sv[lane] * q2 - q1 * vq) / det
                if bounded and b > -base[lane]:
                    b = -base[lane]
                    a = (vq - b * q1) / q2
                gain = a * (vq + vq - a * q2 - (b + b) * q1) + b * (sv[lane] + sv[lane] - b * sw[lane])
                if gain > best[lane] and a > _TINY:
                    best[lane] = gain
                    scale[lane] = a
                    offset[lane] = base[lane] + b
