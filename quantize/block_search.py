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
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trapetum.blocktypes import BLOCK_TYPES, BlockType, Parts
from trapetum.errors import RecipeError
from trapetum.quantize.block_fits import (
    F16_MAX,
    F32,
    Form,
    affine_super,
    half,
    one_scale,
    scale_and_offset,
    scaled_super,
    signed_codes,
)
from trapetum.tensors import BlockTensor

__all__ = ["SEARCHES", "fit_blocks"]

_Search = Callable[[F32, "F32 | None", BlockType], NDArray[np.uint8]]

# As for codebooks: an input that calibration never saw still counts one hundredth of the average one.
_IMPORTANCE_FLOOR = 0.01


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
    if not top <= F16_MAX:
        raise ValueError(f"the largest magnitude is {top}; {type} holds finite weights up to {F16_MAX}")
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


def _tiles(
    values: F32, weights: F32 | None, entry: BlockType, form: Form, search: Callable[..., Parts]
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
    return entry.from_parts({"d": half(d.astype(np.float32)), "codes": (x >= 0).astype(np.uint8)})


# ---------------------------------------------------------------------------- the table
def _tiled(search: Callable[[F32, F32, Form], Parts], form: Form) -> _Search:
    def run(values: F32, weights: F32 | None, entry: BlockType) -> NDArray[np.uint8]:
        return _tiles(values, weights, entry, form, search)

    return run


def _steps(first: float, last: float, count: int) -> tuple[float, ...]:
    return tuple(np.linspace(first, last, count).tolist())


_OFFSET_STEPS = _steps(-1.0, 1.0, 11)

SEARCHES: dict[str, _Search] = {
    "Q8_0": _tiled(signed_codes, Form(1, -127, 127, steps=_steps(127, 122, 12), rounds=1)),
    "Q4_0": _tiled(one_scale, Form(1, -8, 7, steps=(*_steps(-9, -6.5, 11), *_steps(6.5, 8, 7)))),
    "Q5_0": _tiled(one_scale, Form(1, -16, 15, steps=(*_steps(-17, -14.5, 11), *_steps(14.5, 16, 7)))),
    "Q4_1": _tiled(scale_and_offset, Form(1, 0, 15, steps=_OFFSET_STEPS)),
    "Q5_1": _tiled(scale_and_offset, Form(1, 0, 31, steps=_OFFSET_STEPS)),
    "IQ4_NL": _tiled(
        one_scale, Form(1, 0, 15, steps=(*_steps(-135, -104, 9), *_steps(119, 89, 8)), table=True)
    ),
    "Q2_K": _tiled(affine_super, Form(16, 0, 3, (0, 15), _steps(-0.9, 0.6, 11), rounds=3)),
    "Q3_K": _tiled(
        scaled_super, Form(16, -4, 3, (-32, 31), (*_steps(-5, -3, 11), *_steps(2.6, 4, 7)), rounds=3)
    ),
    "Q4_K": _tiled(affine_super, Form(8, 0, 15, (0, 63), _OFFSET_STEPS)),
    "Q5_K": _tiled(affine_super, Form(8, 0, 31, (0, 63), _OFFSET_STEPS)),
    "Q6_K": _tiled(scaled_super, Form(16, -32, 31, (-128, 127), (*_steps(-33, -31, 5), *_steps(30, 32, 5)))),
    "IQ4_XS": _tiled(
        scaled_super,
        Form(8, 0, 15, (-32, 31), (*_steps(-135, -104, 9), *_steps(119, 89, 8)), table=True),
    ),
    "TQ1_0": _levels(3),
    "TQ2_0": _levels(3),
    "Q2_0": _levels(4),
    "PQ2_0": _levels(4),
    "PTQ1_0": _levels(3),
    "Q1_0": _sign,
}
"""Search of each type. The two-bit types use their fourth code, +2d; TQ2_0 does not: engines expect trits there."""
