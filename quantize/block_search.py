"""Scales and codes of GGUF block types: searches that minimise the (importance-weighted) squared error.

For a block with one scale d, the best d for given codes follows from least squares, and the best codes for a given d
are the nearest ones. The search tries a range of scales, takes the codes and the least-squares scale of each, keeps the
best, and alternates a little. K-quants store the scales of sub-blocks as small integers times a float16 d: after
the sub-blocks have been fitted alone, each chooses among neighbouring integers by its true error with the codes
re-assigned, d (and dmin) are re-fitted to all sub-blocks at once by least squares, and the choice is made again.

What is minimised is ``sum_j h_j (w_j - decoded_j)**2``, h the importance of input j (alike without one). Nothing is
random and nothing depends on other blocks: results are equal for any thread count and any split by rows.

Sources: the layouts, llama.cpp ggml/src/ggml-quants.c; the alternation is Lloyd's; exact ternary scales,
``quantize.ternary_search``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trapetum.blocktypes import BLOCK_TYPES, BlockType, Parts
from trapetum.errors import RecipeError
from trapetum.tensors import BlockTensor

__all__ = ["SEARCHES", "fit_blocks"]

F32 = NDArray[np.float32]
_Search = Callable[[F32, "F32 | None", BlockType], NDArray[np.uint8]]

# As for codebooks: an input that calibration never saw still counts one hundredth of the average one.
_IMPORTANCE_FLOOR = 0.01
_F16_MAX = 65504.0


def fit_blocks(weight: NDArray[Any], type: str, importance: NDArray[Any] | None = None) -> BlockTensor:
    """Quantize a matrix into a GGUF block type; one thread, the loops release the GIL.

    Parameters
    ----------
    weight : ndarray of a float dtype, shape (rows, in_features)
        Finite; in_features a multiple of the type's block.
    type : str
        A key of ``SEARCHES``: ``"Q4_K"``.
    importance : ndarray, shape (in_features,), optional
        Non-negative importance of each input; only ratios matter.

    Returns
    -------
    BlockTensor

    Raises
    ------
    ValueError
        If the rows are not whole blocks, a value is not finite or its scale would overflow float16.
    RecipeError
        If the type has no search or the importance does not fit.

    Examples
    --------
    >>> fit_blocks(np.linspace(-1, 1, 64).reshape(2, 32), "Q8_0").nbits_per_weight
    8.5
    """
    if type not in SEARCHES:
        raise RecipeError(f"there is no encoder for {type}; {', '.join(SEARCHES)} have one")
    entry = BLOCK_TYPES[type]
    rows, in_features = weight.shape
    width = entry.row_bytes(in_features)
    values = np.ascontiguousarray(weight, dtype=np.float32)
    top = float(np.max(np.abs(values), initial=0.0))
    if not top <= _F16_MAX:
        raise ValueError(f"the largest magnitude is {top}; {type} holds finite weights up to {_F16_MAX}")
    blocks = SEARCHES[type](values, _weights(importance, in_features), entry)
    return BlockTensor(type, blocks.reshape(rows, width))


def _weights(importance: NDArray[Any] | None, in_features: int) -> F32 | None:
    """Positive importance of mean about 1 as float32, or None for "all alike"."""
    if importance is None:
        return None
    h = np.asarray(importance, dtype=np.float64)
    if h.shape != (in_features,):
        raise RecipeError(
            f"importance has shape {h.shape}; one value for each of {in_features} inputs is needed"
        )
    if not np.isfinite(h).all() or (h < 0).any():
        raise RecipeError("importance holds a negative or non-finite value")
    mean = float(h.mean()) if h.size else 0.0
    if mean == 0.0:
        return None
    return (h / mean + _IMPORTANCE_FLOOR).astype(np.float32)


# ---------------------------------------------------------------------------- tiles
@dataclass(frozen=True)
class _Form:
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


def _tiles(
    values: F32, weights: F32 | None, entry: BlockType, form: _Form, search: Callable[..., Parts]
) -> NDArray[np.uint8]:
    """Run a search over tiles of LANES sub-blocks, the last one padded with zeros."""
    from trapetum.quantize.block_passes import LANES

    size = entry.block_size // form.per
    lanes = values.reshape(-1, size)
    count = len(lanes)
    w = np.ones((size, LANES), np.float32)
    spread = None if weights is None else weights.reshape(-1, size)
    x = np.empty((size, LANES), np.float32)
    out = np.empty((count // form.per, entry.type_size), np.uint8)
    for start in range(0, count, LANES):
        part = lanes[start : start + LANES]
        if len(part) < LANES:
            x[:, len(part) :] = 0
        x[:, : len(part)] = part.T
        if spread is not None:
            w[...] = spread[np.arange(start, start + LANES) % len(spread)].T
        blocks = entry.from_parts(search(x, w, form))
        first, held = start // form.per, len(part) // form.per
        out[first : first + held] = blocks[:held]
    return out


def _half(values: F32) -> NDArray[np.float16]:
    return np.clip(values, -_F16_MAX, _F16_MAX).astype(np.float16)


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
def _one_scale(x: F32, w: F32, form: _Form) -> Parts:
    from trapetum.quantize import block_passes as passes

    grid = (form.table, np.float32(form.low), np.float32(form.high))
    lanes = x.shape[1]
    scale, error = np.empty(lanes, np.float32), np.empty(lanes, np.float32)
    sums = np.empty((2, lanes), np.float32)
    passes.scan_scaled(x, w, *grid, np.array(form.steps, np.float32), form.rounds, scale)
    best, kept = np.full(lanes, np.inf, np.float32), np.zeros(lanes, np.float32)
    for _ in range(2):  # d as float16, codes re-assigned, and once more from the least-squares d of those
        d = _half(scale).astype(np.float32)
        inverse = _inverse(d)
        passes.scaled_error(x, w, d, inverse, *grid, error)
        better = error < best
        best, kept = np.where(better, error, best), np.where(better, d, kept)
        passes.scaled_sums(x, w, inverse, *grid, sums)
        scale = _ratio(sums[0].astype(np.float64), sums[1].astype(np.float64))
    codes = np.empty(x.shape, np.uint8)
    passes.scaled_codes(x, _inverse(kept), *grid, codes)
    return {"d": kept.astype(np.float16), "codes": _by_block(codes, 1)}


def _q8(x: F32, w: F32, form: _Form) -> Parts:
    parts = _one_scale(x, w, form)
    return {"d": parts["d"], "codes": (parts["codes"].astype(np.int16) + form.low).astype(np.int8)}


def _scale_and_offset(x: F32, w: F32, form: _Form) -> Parts:
    from trapetum.quantize import block_passes as passes

    lanes, high = x.shape[1], np.float32(form.high)
    scale, offset, error = (np.empty(lanes, np.float32) for _ in range(3))
    moments, sums = np.empty((2, lanes), np.float32), np.empty((3, lanes), np.float32)
    passes.scan_affine(
        x, w, high, np.array(form.steps, np.float32), form.rounds, False, scale, offset, moments
    )
    m = _half(offset).astype(np.float32)
    best, kept = np.full(lanes, np.inf, np.float32), np.zeros(lanes, np.float32)
    for _ in range(2):  # m is settled; d follows it by least squares
        d = _half(scale).astype(np.float32)
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
def _scaled_super(x: F32, w: F32, form: _Form) -> Parts:
    from trapetum.quantize import block_passes as passes

    grid = (form.table, np.float32(form.low), np.float32(form.high))
    lanes, per, (least, most) = x.shape[1], form.per, form.scales
    scale, error = np.empty(lanes, np.float32), np.empty(lanes, np.float32)
    sums = np.empty((2, lanes), np.float32)
    passes.scan_scaled(x, w, *grid, np.array(form.steps, np.float32), form.rounds, scale)
    by_block = scale.reshape(-1, per)
    peak = np.take_along_axis(by_block, np.abs(by_block).argmax(axis=1)[:, None], axis=1)[:, 0]
    d = _half(peak / np.float32(least))  # the range has one step more below zero
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
        d = _half(_ratio(_group(chosen * sums[0], per), _group(chosen * chosen * sums[1], per)))
    codes = np.empty(x.shape, np.uint8)
    passes.scaled_codes(x, _inverse(np.repeat(kept_d.astype(np.float32), per) * kept_s), *grid, codes)
    return {"d": kept_d, "scales": kept_s.astype(np.int8).reshape(-1, per), "codes": _by_block(codes, per)}


def _affine_super(x: F32, w: F32, form: _Form) -> Parts:
    from trapetum.quantize import block_passes as passes

    lanes, per, high, most = x.shape[1], form.per, np.float32(form.high), form.scales[1]
    scale, offset, error = (np.empty(lanes, np.float32) for _ in range(3))
    moments, sums = np.empty((2, lanes), np.float32), np.empty((3, lanes), np.float32)
    nothing = np.zeros(lanes, np.float32)
    passes.scan_affine(
        x, w, high, np.array(form.steps, np.float32), form.rounds, True, scale, offset, moments
    )
    sw, sx = moments
    d = _half(scale.reshape(-1, per).max(axis=1) / np.float32(most))
    dmin = _half(-offset.reshape(-1, per).min(axis=1) / np.float32(most))
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
    return _half(d), _half(dmin)


# ---------------------------------------------------------------------------- ternary and sign
def _levels(count: int) -> _Search:
    """Exact optimum of {-d, 0, d}, or with 4 levels of {-d, 0, d, 2d} with d of either sign."""

    def run(values: F32, weights: F32 | None, entry: BlockType) -> NDArray[np.uint8]:
        from trapetum.quantize.ternary_search import fit_groups

        codes, scales = fit_groups(values, entry.block_size, count, weights)
        return entry.from_parts({"d": scales.reshape(-1), "codes": codes.reshape(-1, entry.block_size)})

    return run


def _sign(values: F32, weights: F32 | None, entry: BlockType) -> NDArray[np.uint8]:
    x = values.reshape(-1, entry.block_size)
    if weights is None:
        d = np.abs(x).mean(axis=1, dtype=np.float64)
    else:
        per_row = weights.reshape(-1, entry.block_size).astype(np.float64)
        w = per_row[np.arange(len(x)) % len(per_row)]
        d = (np.abs(x) * w).sum(axis=1) / w.sum(axis=1)
    return entry.from_parts({"d": _half(d.astype(np.float32)), "codes": (x >= 0).astype(np.uint8)})


# ---------------------------------------------------------------------------- the table
def _tiled(search: Callable[[F32, F32, _Form], Parts], form: _Form) -> _Search:
    def run(values: F32, weights: F32 | None, entry: BlockType) -> NDArray[np.uint8]:
        return _tiles(values, weights, entry, form, search)

    return run


def _steps(first: float, last: float, count: int) -> tuple[float, ...]:
    return tuple(np.linspace(first, last, count).tolist())


_OFFSET_STEPS = _steps(-1.0, 1.0, 11)

SEARCHES: dict[str, _Search] = {
    "Q8_0": _tiled(_q8, _Form(1, -127, 127, steps=_steps(127, 122, 12), rounds=1)),
    "Q4_0": _tiled(_one_scale, _Form(1, -8, 7, steps=(*_steps(-9, -6.5, 11), *_steps(6.5, 8, 7)))),
    "Q5_0": _tiled(_one_scale, _Form(1, -16, 15, steps=(*_steps(-17, -14.5, 11), *_steps(14.5, 16, 7)))),
    "Q4_1": _tiled(_scale_and_offset, _Form(1, 0, 15, steps=_OFFSET_STEPS)),
    "Q5_1": _tiled(_scale_and_offset, _Form(1, 0, 31, steps=_OFFSET_STEPS)),
    "IQ4_NL": _tiled(
        _one_scale, _Form(1, 0, 15, steps=(*_steps(-135, -104, 9), *_steps(119, 89, 8)), table=True)
    ),
    "Q2_K": _tiled(_affine_super, _Form(16, 0, 3, (0, 15), _steps(-0.9, 0.6, 11), rounds=3)),
    "Q3_K": _tiled(
        _scaled_super, _Form(16, -4, 3, (-32, 31), (*_steps(-5, -3, 11), *_steps(2.6, 4, 7)), rounds=3)
    ),
    "Q4_K": _tiled(_affine_super, _Form(8, 0, 15, (0, 63), _OFFSET_STEPS)),
    "Q5_K": _tiled(_affine_super, _Form(8, 0, 31, (0, 63), _OFFSET_STEPS)),
    "Q6_K": _tiled(
        _scaled_super, _Form(16, -32, 31, (-128, 127), (*_steps(-33, -31, 5), *_steps(30, 32, 5)))
    ),
    "IQ4_XS": _tiled(
        _scaled_super,
        _Form(8, 0, 15, (-32, 31), (*_steps(-135, -104, 9), *_steps(119, 89, 8)), table=True),
    ),
    "TQ1_0": _levels(3),
    "TQ2_0": _levels(3),
    "Q2_0": _levels(4),
    "PQ2_0": _levels(4),
    "PTQ1_0": _levels(3),
    "Q1_0": _sign,
}
"""Search of each type. The two-bit types use their fourth code, +2d; TQ2_0 does not: engines expect trits there."""
