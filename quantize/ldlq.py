"""Codes by error feedback (LDLQ), for codebooks and for ternary groups, and their refinement under the full moment.

``feed``: input by input, the nearest value to the target of ``quantize.hessian``. Blocks of inputs are left-looking:
what all earlier blocks lost reaches a block in one product of BLAS, inside the block a compiled loop passes it on.

``--effort high`` then alternates, both under the damped moment itself:

* *least squares*: the best codebook (scales) for given codes. Normal equations of K unknowns a row would cost
  in_features^2 additions a row to build; a few steps of preconditioned conjugate gradients on all rows at once are
  products of BLAS instead.
* *coordinate descent*: each input takes the value that is best while the others stay, block by block.

A result depends on the row alone only up to the last bit, for BLAS rounds by the number of rows: the job therefore
cuts rows at multiples of :data:`ROWS`, whatever the memory or the threads.

Source: J. Chee et al., "QuIP" (2023) for LDLQ; Z. Zhang et al., "LNQ" in arXiv 2505.07004 for the alternation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trapetum.quantize.hessian import Factor, Hessian

__all__ = ["ROWS", "Rounds", "codebook_codes", "codebooks_under", "ternary_codes"]

F32 = NDArray[Any]  # float32: NumPy's types forget it in every product

ROWS = 256
"""Rows of a block of work."""

_BLOCK = 128


@dataclass(frozen=True)
class Rounds:
    """How long to refine.

    Parameters
    ----------
    rounds : int
        Least squares followed by descent.
    sweeps : int
        Descents over all inputs in a round, at most.
    steps : int
        Of conjugate gradients.
    """

    rounds: int = 3
    sweeps: int = 4
    steps: int = 10


def codebooks_under(
    weight: NDArray[Any], codebook_size: int, hessian: Hessian, effort: str, *, wide: bool
) -> tuple[NDArray[np.uint8], NDArray[Any]]:
    """Codebooks and codes of rows under a second moment; arguments and result as ``kmeans.fit_codebooks``.

    Inputs are coded by falling mean square (they have no neighbours that they would have to stay with): 5 % less loss
    than in their own order on eight layers of a small transformer, after refinement 1 %.
    """
    from trapetum.quantize.kmeans import fit_codebooks

    damping = hessian.refined_damping if effort == "high" else None
    order = hessian.order
    factor = hessian.shared(ordered=True, damping=damping)
    importance = np.empty(weight.shape[1])
    importance[order] = factor.weights
    codebook = fit_codebooks(weight, codebook_size, importance, effort, wide)[1]
    codes, table = codebook_codes(
        np.ascontiguousarray(weight[:, order], dtype=np.float32),
        codebook.astype(np.float32),
        factor,
        hessian.shared_damped(ordered=True, damping=damping) if effort == "high" else None,
        Rounds(),
        not wide,
    )
    found = np.empty_like(codes)
    found[:, order] = codes
    return found, table.astype(codebook.dtype)


def codebook_codes(
    weight: F32, codebook: F32, factor: Factor, moment: F32 | None, rounds: Rounds, half: bool
) -> tuple[NDArray[np.uint8], F32]:
    """Codes of rows that have a codebook each.

    Parameters
    ----------
    weight : ndarray of float32, shape (rows, in_features)
    codebook : ndarray of float32, shape (rows, K)
        Ascending.
    factor : Factor
        Of the damped moment, by single inputs, in the order of the inputs of ``weight``.
    moment : ndarray of float32, shape (in_features, in_features), optional
        The damped moment: refine under it; None stops after feedback.
    rounds : Rounds
    half : bool
        Round the codebook to float16.

    Returns
    -------
    codes : ndarray of uint8, shape (rows, in_features)
    codebook : ndarray of float32, shape (rows, K)
        Ascending, as it is stored.
    """
    rows, width = weight.shape
    codes = np.empty((rows, width), np.uint8)
    errors = np.empty((rows, width), np.float32)
    for start in range(0, width, _BLOCK):
        cut = slice(start, min(start + _BLOCK, width))
        _feed(weight, factor, errors, cut, codebook, codes)
    if moment is None:
        return codes, codebook
    ones = np.ones((rows, width), np.float32)
    values = weight - errors
    for _ in range(rounds.rounds):
        _solve(weight, values, moment, codes, ones, codebook, rounds.steps)
        codebook = codebook.astype(np.float16).astype(np.float32) if half else codebook
        order = np.argsort(codebook, axis=1, kind="stable")
        codebook = np.take_along_axis(codebook, order, axis=1)
        rank = np.empty_like(order)
        np.put_along_axis(rank, order, np.arange(order.shape[1])[None, :], axis=1)
        codes = np.take_along_axis(rank, codes.astype(np.intp), axis=1).astype(np.uint8)
        values = np.take_along_axis(codebook, codes.astype(np.intp), axis=1)
        _descend(weight, values, moment, codes, lambda cut, table=codebook: table, _BLOCK, rounds.sweeps)
    return codes, codebook


def ternary_codes(
    weight: F32, group: int, levels: int, factor: Factor, moment: F32 | None, rounds: Rounds
) -> tuple[NDArray[np.uint8], NDArray[np.float16]]:
    """Codes and scales of ternary or four-level groups, each scale fitted to the targets when its group is reached.

    Parameters
    ----------
    weight : ndarray of float32, shape (rows, in_features)
        ``in_features`` a multiple of ``group``.
    group : int
    levels : {3, 4}
    factor, moment, rounds
        As for :func:`codebook_codes`.

    Returns
    -------
    codes : ndarray of uint8, shape (rows, in_features)
        As in ``TernaryTensor``.
    scales : ndarray of float16, shape (rows, in_features // group)
    """
    from trapetum.quantize.ternary_search import fit_groups

    rows, width = weight.shape
    ranks = np.empty((rows, width), np.uint8)  # codes into the ascending table
    errors = np.empty((rows, width), np.float32)
    scales = np.empty((rows, width // group), np.float32)
    importance = factor.weights
    for number in range(width // group):
        cut = slice(number * group, (number + 1) * group)
        targets = weight[:, cut] + errors[:, : cut.start] @ factor.upper[: cut.start, cut]
        scales[:, number] = fit_groups(targets, group, levels, importance[cut])[1][:, 0]
        _feed(weight, factor, errors, cut, _levels(scales[:, number], levels), ranks, targets)
    if moment is not None:
        values = weight - errors
        negative = np.signbit(scales)
        groups = np.ascontiguousarray(
            np.broadcast_to((np.arange(width) // group).astype(np.uint16), (rows, width))
        )
        for _ in range(rounds.rounds):
            signs = np.repeat(negative, group, axis=1)
            multiples = np.where(signs, levels - 2.0 - ranks, ranks - 1.0).astype(np.float32)
            before = scales.copy()
            _solve(weight, values, moment, groups, multiples, scales, rounds.steps)
            scales = np.clip(scales, -65504, 65504).astype(np.float16).astype(np.float32)
            flipped = (np.signbit(scales) != negative) | (
                scales == 0
            )  # its order of values would turn around
            scales[flipped] = before[flipped]
            values = multiples * np.repeat(scales, group, axis=1)
            tables = [_levels(scales[:, g], levels) for g in range(width // group)]
            _descend(
                weight,
                values,
                moment,
                ranks,
                lambda cut, t=tables: t[cut.start // group],
                group,
                rounds.sweeps,
            )
    signs = np.repeat(np.signbit(scales), group, axis=1)
    codes = np.where(signs, levels - 1 - ranks, ranks).astype(np.uint8)
    codes[np.repeat(scales == 0, group, axis=1)] = 1
    return codes, scales.astype(np.float16)


def _levels(scale: F32, levels: int) -> F32:
    """Ascending values of groups with these scales, float32 [rows, levels]."""
    multiples = np.arange(levels, dtype=np.float32) - 1
    return np.ascontiguousarray(np.sort(multiples[None, :] * scale[:, None], axis=1))


def _feed(
    weight: F32,
    factor: Factor,
    errors: F32,
    cut: slice,
    table: F32,
    codes: NDArray[np.uint8],
    targets: F32 | None = None,
) -> None:
    """Code the inputs of one block; fills ``errors[:, cut]`` and ``codes[:, cut]``."""
    from trapetum.quantize.feedback import feed_block

    if targets is None:
        targets = weight[:, cut] + errors[:, : cut.start] @ factor.upper[: cut.start, cut]
    feed_block(
        targets,
        np.ascontiguousarray(factor.upper[cut, cut]),
        table,
        errors[:, cut],
        weight[:, cut],
        codes[:, cut],
    )


def _descend(
    weight: F32,
    values: F32,
    moment: F32,
    codes: NDArray[np.uint8],
    table: Any,
    block: int,
    sweeps: int,
) -> None:
    """Coordinate descent; changes ``codes`` and ``values`` in place."""
    from trapetum.quantize.feedback import descend_block

    width = weight.shape[1]
    for _ in range(sweeps):
        moved = 0
        gradient = (weight - values) @ moment
        change = np.empty_like(gradient)
        for start in range(0, width, block):
            cut = slice(start, min(start + block, width))
            here = gradient[:, cut] - change[:, :start] @ moment[:start, cut]
            square = np.ascontiguousarray(moment[cut, cut])
            moved += descend_block(here, square, table(cut), change[:, cut], codes[:, cut])
        values += change
        if moved == 0:
            break


def _solve(weight: F32, values: F32, moment: F32, index: Any, factor: F32, unknowns: F32, steps: int) -> None:
    """Least squares of ``values = gather(unknowns, index) * factor`` under the moment; ``unknowns`` in place.

    Conjugate gradients on all rows at once, preconditioned by the diagonal that single inputs would give; unknowns
    that no input uses keep their value.
    """
    from trapetum.quantize.feedback import gather, scatter

    rows, count = unknowns.shape
    spread = np.empty_like(weight)
    curve = np.empty((rows, count))
    residual = np.empty((rows, count))
    gather(unknowns, index, factor, spread)
    scatter((weight - spread) @ moment, index, factor, residual)
    scatter(np.broadcast_to(moment.diagonal(), weight.shape) * factor, index, factor, curve)
    inverse = np.divide(1.0, curve, out=np.zeros_like(curve), where=curve > 0)
    direction = inverse * residual
    before = (residual * direction).sum(axis=1, keepdims=True)
    solution = unknowns.astype(np.float64)
    for _ in range(steps):
        gather(direction.astype(np.float32), index, factor, spread)
        scatter(spread @ moment, index, factor, curve)
        bend = (direction * curve).sum(axis=1, keepdims=True)
        step = np.divide(before, bend, out=np.zeros_like(bend), where=bend > 0)
        solution += step * direction
        residual -= step * curve
        scaled = inverse * residual
        after = (residual * scaled).sum(axis=1, keepdims=True)
        direction = scaled + np.divide(after, before, out=np.zeros_like(after), where=before > 0) * direction
        before = after
    unknowns[...] = solution
