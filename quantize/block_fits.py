"""Searches over one tile of blocks: the four ways in which GGUF types store scales.

================== ========================================================= =================================
function           types                                                     a block stores
================== ========================================================= =================================
one_scale          Q4_0 Q5_0 IQ4_NL, and Q8_0 through signed_codes           d
scale_and_offset   Q4_1 Q5_1                                                 d and m
scaled_super       Q3_K Q6_K IQ4_XS                                          d and an integer scale a sub-block
affine_super       Q2_K Q4_K Q5_K                                            d, dmin, two integers a sub-block
================== ========================================================= =================================

A tile is x and w (weights of the squared error), float32 [elements, lanes], one lane a sub-block; see
``block_passes`` for the loops and ``block_search`` for the method. Each function returns the parts that
``BlockType.from_parts`` packs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trapetum.blocktypes import Parts

__all__ = [
    "F16_MAX",
    "F32",
    "Form",
    "affine_super",
    "half",
    "one_scale",
    "scale_and_offset",
    "scaled_super",
    "signed_codes",
]

F32 = NDArray[np.float32]
F16_MAX = 65504.0


@dataclass(frozen=True)
class Form:
    """How a type divides into lanes of equal sub-blocks, and what a code is.

    Parameters
    ----------
    per : int
        Sub-blocks a block; 1 where a block has one scale.
    low, high : int
        Range of a code's value; codes are stored from 0.
    scales : tuple of int
        Range of a sub-block's integer scale (and offset).
    steps : tuple of float
        Trials; see ``block_passes``.
    table : bool
        Whether codes index the table of IQ4_NL.
    """

    per: int
    low: int
    high: int
    scales: tuple[int, int] = (0, 0)
    steps: tuple[float, ...] = ()
    rounds: int = 2
    table: bool | None = None


def half(values: F32) -> NDArray[np.float16]:
    """float16 of float32 values; what is beyond its range becomes its largest number."""
    return np.clip(values, -F16_MAX, F16_MAX).astype(np.float16)


def _inverse(scale: F32) -> F32:
    return np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)


def _by_block(codes: NDArray[np.uint8], per: int) -> NDArray[np.uint8]:
    """Codes [elements, lanes] -> [blocks, per * elements]."""
    return np.ascontiguousarray(codes.T).reshape(codes.shape[1] // per, per * codes.shape[0])


def _group(values: NDArray[Any], per: int) -> NDArray[np.float64]:
    """Sum over the sub-blocks of each block, in float64."""
    sums: NDArray[np.float64] = values.reshape(-1, per).sum(axis=1, dtype=np.float64)
    return sums


def _ratio(a: NDArray[np.float64], b: NDArray[np.float64]) -> F32:
    return np.divide(a, b, out=np.zeros_like(a), where=b != 0).astype(np.float32)


# ---------------------------------------------------------------------------- one scale a block
def one_scale(x: F32, w: F32, form: Form) -> Parts:
    """Blocks with one scale: the codes and the scale with the least weighted squared error.

    Parameters
    ----------
    x, w : ndarray of float32, shape (values of a lane, lanes)
        Weights and their importance.
    form : Form
    """
    from trapetum.quantize import block_passes as passes

    grid = (form.table, np.float32(form.low), np.float32(form.high))
    lanes = x.shape[1]
    scale, error = np.empty(lanes, np.float32), np.empty(lanes, np.float32)
    sums = np.empty((2, lanes), np.float32)
    passes.scan_scaled(x, w, *grid, np.array(form.steps, np.float32), form.rounds, scale)
    best, kept = np.full(lanes, np.inf, np.float32), np.zeros(lanes, np.float32)
    for _ in range(2):  # d as float16, codes re-assigned, and once more from the least-squares d of those
        d = half(scale).astype(np.float32)
        inverse = _inverse(d)
        passes.scaled_error(x, w, d, inverse, *grid, error)
        better = error < best
        best, kept = np.where(better, error, best), np.where(better, d, kept)
        passes.scaled_sums(x, w, inverse, *grid, sums)
        scale = _ratio(sums[0].astype(np.float64), sums[1].astype(np.float64))
    codes = np.empty(x.shape, np.uint8)
    passes.scaled_codes(x, _inverse(kept), *grid, codes)
    return {"d": kept.astype(np.float16), "codes": _by_block(codes, 1)}


def signed_codes(x: F32, w: F32, form: Form) -> Parts:
    """As :func:`one_scale`, for types that store signed codes.

    Parameters
    ----------
    x, w : ndarray of float32, shape (values of a lane, lanes)
        Weights and their importance.
    form : Form
    """
    parts = one_scale(x, w, form)
    return {"d": parts["d"], "codes": (parts["codes"].astype(np.int16) + form.low).astype(np.int8)}


def scale_and_offset(x: F32, w: F32, form: Form) -> Parts:
    """Blocks with a scale and an offset.

    Parameters
    ----------
    x, w : ndarray of float32, shape (values of a lane, lanes)
        Weights and their importance.
    form : Form
    """
    from trapetum.quantize import block_passes as passes

    lanes, high = x.shape[1], np.float32(form.high)
    scale, offset, error = (np.empty(lanes, np.float32) for _ in range(3))
    moments, sums = np.empty((2, lanes), np.float32), np.empty((3, lanes), np.float32)
    passes.scan_affine(
        x, w, high, np.array(form.steps, np.float32), form.rounds, False, scale, offset, moments
    )
    m = half(offset).astype(np.float32)
    best, kept = np.full(lanes, np.inf, np.float32), np.zeros(lanes, np.float32)
    for _ in range(2):  # m is settled; d follows it by least squares
        d = half(scale).astype(np.float32)
        inverse = _inverse(d)
        passes.affine_error(x, w, d, inverse, m, high, error)
        better = error < best
        best, kept = np.where(better, error, best), np.where(better, d, kept)
        passes.affine_sums(x, w, inverse, m, m, high, sums)
        scale = _ratio(sums[2].astype(np.float64), sums[1].astype(np.float64))
    codes = np.empty(x.shape, np.uint8)
    passes.affine_codes(x, _inverse(kept), m, high, codes)
    return {"d": kept.astype(np.float16), "m": m.astype(np.float16), "codes": _by_block(codes, 1)}


# ---------------------------------------------------------------------------- integer scales of sub-blocks
def scaled_super(x: F32, w: F32, form: Form) -> Parts:
    """Super-blocks whose sub-blocks have an integer scale each, all times one float16.

    Parameters
    ----------
    x, w : ndarray of float32, shape (values of a lane, lanes)
        Weights and their importance.
    form : Form
    """
    from trapetum.quantize import block_passes as passes

    grid = (form.table, np.float32(form.low), np.float32(form.high))
    lanes, per, (least, most) = x.shape[1], form.per, form.scales
    scale, error = np.empty(lanes, np.float32), np.empty(lanes, np.float32)
    sums = np.empty((2, lanes), np.float32)
    passes.scan_scaled(x, w, *grid, np.array(form.steps, np.float32), form.rounds, scale)
    by_block = scale.reshape(-1, per)
    peak = np.take_along_axis(by_block, np.abs(by_block).argmax(axis=1)[:, None], axis=1)[:, 0]
    d = half(peak / np.float32(least))  # the range has one step more below zero
    best = np.full(lanes // per, np.inf)
    kept_d, kept_s = np.zeros_like(d), np.zeros(lanes, np.float32)
    for _ in range(form.rounds):
        wide = np.repeat(d.astype(np.float32), per)
        near = np.rint(scale * _inverse(wide))
        chosen, lowest = np.zeros(lanes, np.float32), np.full(lanes, np.inf, np.float32)
        for shift in (0, -1, 1):
            s = np.clip(near + np.float32(shift), least, most)
            a = wide * s
            passes.scaled_error(x, w, a, _inverse(a), *grid, error)
            better = error < lowest
            lowest, chosen = np.where(better, error, lowest), np.where(better, s, chosen)
        total = _group(lowest, per)
        won = total < best
        best, kept_d = np.where(won, total, best), np.where(won, d, kept_d)
        kept_s = np.where(np.repeat(won, per), chosen, kept_s)
        passes.scaled_sums(x, w, _inverse(wide * chosen), *grid, sums)
        d = half(_ratio(_group(chosen * sums[0], per), _group(chosen * chosen * sums[1], per)))
    codes = np.empty(x.shape, np.uint8)
    passes.scaled_codes(x, _inverse(np.repeat(kept_d.astype(np.float32), per) * kept_s), *grid, codes)
    return {"d": kept_d, "scales": kept_s.astype(np.int8).reshape(-1, per), "codes": _by_block(codes, per)}


def affine_super(x: F32, w: F32, form: Form) -> Parts:
    """Super-blocks whose sub-blocks have an integer scale and offset each, all times two float16.

    Parameters
    ----------
    x, w : ndarray of float32, shape (values of a lane, lanes)
        Weights and their importance.
    form : Form
    """
    from trapetum.quantize import block_passes as passes

    lanes, per, high, most = x.shape[1], form.per, np.float32(form.high), form.scales[1]
    scale, offset, error = (np.empty(lanes, np.float32) for _ in range(3))
    moments, sums = np.empty((2, lanes), np.float32), np.empty((3, lanes), np.float32)
    nothing = np.zeros(lanes, np.float32)
    passes.scan_affine(
        x, w, high, np.array(form.steps, np.float32), form.rounds, True, scale, offset, moments
    )
    sw, sx = moments
    d = half(scale.reshape(-1, per).max(axis=1) / np.float32(most))
    dmin = half(-offset.reshape(-1, per).min(axis=1) / np.float32(most))
    best = np.full(lanes // per, np.inf)
    kept_d, kept_dmin = np.zeros_like(d), np.zeros_like(dmin)
    kept_s, kept_m = np.zeros(lanes, np.float32), np.zeros(lanes, np.float32)
    for _ in range(form.rounds):
        wide, wide_min = (np.repeat(v.astype(np.float32), per) for v in (d, dmin))
        near, down = np.rint(scale * _inverse(wide)), _inverse(wide_min)
        chosen_s, chosen_m = np.zeros(lanes, np.float32), np.zeros(lanes, np.float32)
        lowest = np.full(lanes, np.inf, np.float32)
        for shift in (0, -1, 1):
            s = np.clip(near + np.float32(shift), 0, most)
            a = wide * s
            inverse = _inverse(a)
            passes.affine_sums(x, w, inverse, offset, nothing, high, sums)
            m = np.clip(np.rint((a * sums[0] - sx) / sw * down), 0, most)  # the best offset for those codes
            passes.affine_error(x, w, a, inverse, -wide_min * m, high, error)
            better = error < lowest
            lowest = np.where(better, error, lowest)
            chosen_s, chosen_m = np.where(better, s, chosen_s), np.where(better, m, chosen_m)
        total = _group(lowest, per)
        won = total < best
        best = np.where(won, total, best)
        kept_d, kept_dmin = np.where(won, d, kept_d), np.where(won, dmin, kept_dmin)
        wide_won = np.repeat(won, per)
        kept_s, kept_m = np.where(wide_won, chosen_s, kept_s), np.where(wide_won, chosen_m, kept_m)
        passes.affine_sums(x, w, _inverse(wide * chosen_s), -wide_min * chosen_m, nothing, high, sums)
        d, dmin = _solve_pair(chosen_s, chosen_m, sums, sw, sx, per)
    a, b = (np.repeat(v.astype(np.float32), per) for v in (kept_d, kept_dmin))
    codes = np.empty(x.shape, np.uint8)
    passes.affine_codes(x, _inverse(a * kept_s), -b * kept_m, high, codes)
    return {
        "d": kept_d,
        "dmin": kept_dmin,
        "scales": kept_s.astype(np.uint8).reshape(-1, per),
        "mins": kept_m.astype(np.uint8).reshape(-1, per),
        "codes": _by_block(codes, per),
    }


def _solve_pair(
    s: F32, m: F32, sums: F32, sw: F32, sx: F32, per: int
) -> tuple[NDArray[np.float16], NDArray[np.float16]]:
    """d and dmin that minimise ``sum w (x - d s q + dmin m)**2`` over each block, codes q given; dmin >= 0."""
    q, qq, xq = sums
    ss, sm, mm = _group(s * s * qq, per), _group(s * m * q, per), _group(m * m * sw, per)
    xs, xm = _group(s * xq, per), _group(m * sx, per)
    det = ss * mm - sm * sm
    dmin = _ratio(xs * sm - xm * ss, det)
    alone = (dmin <= 0) | (det <= 0)
    dmin = np.where(alone, np.float32(0), dmin)
    d = np.where(alone, _ratio(xs, ss), _ratio(xs * mm - xm * sm, det))
    return half(d), half(dmin)
