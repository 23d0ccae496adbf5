"""What storing some weights costs the model at hand: how far its output moves, on a part of the calibration text.

The priors of ``sensitivity`` are one model's, by role. Where a budget comes with a calibration text, each group of
tensors is stored once, alone, and the distance from the original is its loss under that scheme; other schemes follow in
proportion to their errors on sampled rows. The scheme is one of a bit less than the budget: what a budget takes away
decides more than what it adds. The stored weights are those that a job would make (error feedback under the moments):
an error of another kind weighs up to twice as much, or half, even where it is of the same size under the moments.

Measured on the 42 layers of an 18-million-parameter Llama, 4-bit codebooks for all against a budget of the same size,
with moments: priors 0.921 of the loss; measured at 3 bits 0.888 (3,072 tokens) and 0.884 (5,120), at 4 bits 0.901 and
0.907 (2,048). By the linear model, samples of 1,024 tokens choose up to 0.007 worse than 5,120, of 4,096 alike.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from trapetum.formats.source import open_source
from trapetum.kernels.cpu.pool import Pool
from trapetum.models.residual import RotatedCheckpoint
from trapetum.progress import Progress
from trapetum.quantize.blocks import row_blocks
from trapetum.quantize.identity import tensor_seed
from trapetum.quantize.ldlq import ROWS
from trapetum.quantize.scheme import Scheme
from trapetum.quantize.statistics import one_blas_thread
from trapetum.runtime.calibrate import calibration_ids
from trapetum.runtime.divergence import divergences
from trapetum.runtime.tokenizer import read_text
from trapetum.tensors import DenseTensor, matrix_shape

if TYPE_CHECKING:
    from trapetum.quantize.plan import Plan, PlanRow

__all__ = ["Change", "influence"]

_CONTEXT = 512
_SEQUENCES = 8
_MOST_HELD = 1 << 32  # bytes of decoded weights at a time, as much again in the layer that is built of them
_WORK = 1 << 18  # tokens, all changes counted: few changes see 4,096, more than 170 see 1,024 at least


@dataclass(frozen=True)
class Change:
    """Tensors of one layer that are stored together under one scheme, all others staying as they are.

    Parameters
    ----------
    rows : tuple of PlanRow
    scheme : Scheme
    """

    rows: tuple[PlanRow, ...]
    scheme: Scheme


def influence(
    plan: Plan, changes: Sequence[Change], text: Path, threads: int, progress: Progress
) -> list[float]:
    """Mean KL from the original of each change alone.

    Parameters
    ----------
    plan : Plan
        Its statistics are used where there are any.
    changes : sequence of Change
        Each within a layer of the model.
    text : Path
        For calibration; 1,024 to 4,096 tokens are taken, spread over all of it.
    threads : int
    progress : Progress

    Returns
    -------
    list of float
        Infinite where the change breaks the model; NaN where its weights are too many to be held at once (the routed
        experts of a large layer), which the progress is told.
    """
    held = [4 * sum(row.parameters for row in change.rows) <= _MOST_HELD for change in changes]
    if not all(held):
        progress.note(
            f"{held.count(False)} of {len(changes)} groups of tensors are of more than {_MOST_HELD >> 30} GiB once "
            "decoded and were not measured on the model: they count by their priors"
        )
    found = iter(
        _measured(plan, [c for c, fits in zip(changes, held, strict=True) if fits], text, threads, progress)
    )
    return [next(found) if fits else np.nan for fits in held]


def _measured(
    plan: Plan, changes: Sequence[Change], text: Path, threads: int, progress: Progress
) -> list[float]:
    """:func:`influence` of changes that fit."""
    if not changes:
        return []
    rows = {row.name: (row, change.scheme) for change in changes for row in change.rows}

    def changed(name: str) -> DenseTensor:
        return _stored(plan, *rows[name], threads)

    rotated = isinstance(plan.source, RotatedCheckpoint)
    with contextlib.nullcontext(plan.source) if rotated else open_source(plan.source.path) as source:
        sequences = min(_SEQUENCES, max(2, _WORK // (_CONTEXT * max(len(changes), 1))))
        ids = calibration_ids(source, read_text(text), sequences * _CONTEXT, _CONTEXT)
        wanted = [(change.rows[0].role.layer or 0, [row.name for row in change.rows]) for change in changes]
        pool = Pool(threads)
        try:
            return divergences(source, wanted, changed, ids, pool, progress)
        finally:
            pool.close()


def _stored(plan: Plan, row: PlanRow, scheme: Scheme, threads: int) -> DenseTensor:
    """A tensor as the scheme would store it, decoded and turned back."""
    count, width = matrix_shape(row.shape)
    seed, importance = tensor_seed(plan.recipe.seed, row.name), plan.importance(row)
    fitted = scheme
    if not scheme.row_independent:
        fitted = scheme.fit(count, lambda rows: plan.sampled(row, rows), seed, importance)
    found = np.empty((count, width), np.float32)

    def work(rows: slice) -> None:
        values = plan.sampled(row, rows, scheme.limit)
        tensor = fitted.quantize(values, importance, wide=fitted.wide(values), seed=seed)
        decoded = tensor.dequantize(slice(None))
        found[rows] = plan.rotation.unfold(decoded) if plan.rotation is not None and row.rotated else decoded

    blas = one_blas_thread()
    try:
        with ThreadPoolExecutor(threads, "trapetum-measure") as executor:
            list(executor.map(work, row_blocks(count, 1, ROWS)))
    finally:
        blas.restore_original_limits()
    plan.source.release(row.name)
    return DenseTensor(found.reshape(row.shape))
