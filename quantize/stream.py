"""From tensors to finished parts: row blocks over threads, results in order into one part file after the other.

Memory holds a few row blocks, never a tensor. Workers run ahead of the file that is being written, across the border
between tensors, so that many small tensors keep all threads as busy as one large one.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trapetum.errors import OutputError
from trapetum.formats.parts import Part, PartWriter, read_part
from trapetum.progress import Progress
from trapetum.quantize.blocks import MemoryBudget, ordered_map, row_blocks
from trapetum.quantize.cpu import cpu_features, require_one_cpu
from trapetum.quantize.fitting import Fits
from trapetum.quantize.identity import tensor_seed
from trapetum.quantize.journal import RunLog
from trapetum.quantize.ldlq import ROWS as FEEDBACK_ROWS
from trapetum.quantize.plan import Plan, PlanRow
from trapetum.quantize.statistics import one_blas_thread
from trapetum.quantize.ternary_intake import add_proofs, proof_text
from trapetum.tensors import LAYOUTS, QuantizedTensor, matrix_shape

__all__ = ["Pressed", "cuts", "finished_part", "press_block", "quantize_tensors"]

_Item = tuple[PlanRow, slice]


@dataclass(frozen=True)
class Pressed:
    """Result of one row block.

    Parameters
    ----------
    tensor : QuantizedTensor
    errors : tuple of ndarray, optional
        Squared error and squares of each row; None where nothing is searched.
    proof : mapping, optional
    """

    tensor: QuantizedTensor
    errors: tuple[NDArray[np.float64], NDArray[np.float64]] | None = None
    proof: Mapping[str, int | float] | None = None


@dataclass(frozen=True)
class _Block:
    """What is written of a row block: stored arrays, layout parameters, errors, a proof."""

    arrays: dict[str, NDArray[Any]]
    params: dict[str, Any] = field(default_factory=dict)
    errors: tuple[NDArray[np.float64], NDArray[np.float64]] | None = None
    proof: Mapping[str, int | float] | None = None


def finished_part(plan: Plan, parts: Path, index: int) -> Part | None:
    """The part of the plan's tensor number ``index`` if it is there, whole, and made as the plan says."""
    row = plan.rows[index]
    found = read_part(parts, index, row.name)
    fits = found is not None and found.record.scheme == row.scheme.spec() and found.record.shape == row.shape
    return found if fits else None


def quantize_tensors(
    plan: Plan,
    parts: Path,
    budget: MemoryBudget,
    log: RunLog,
    progress: Progress,
    only: Collection[int] | None = None,
    mixed_cpus: bool = False,
) -> tuple[dict[str, Part], int]:
    """Make the parts that are not there yet.

    Parameters
    ----------
    plan : Plan
        Surveyed.
    parts : Path
        The folder of parts; those that fit the plan are taken over.
    budget : MemoryBudget
    log : RunLog
    progress : Progress
    only : collection of int, optional
        Numbers of the tensors to make; all by default.
    mixed_cpus : bool
        Go on beside parts that were made on a CPU with other features.

    Returns
    -------
    made : dict of str to Part
        The part of each of these tensors, in the order of the plan.
    taken_over : int
        How many were there.

    Raises
    ------
    OutputError
        If the parts cannot be written, or those that are there come from another kind of CPU.
    """
    chosen = [(i, row) for i, row in enumerate(plan.rows) if only is None or i in only]
    progress.begin("quantize", sum(row.source_nbytes for _, row in chosen))
    made: dict[str, Part] = {}
    todo = []
    for i, row in chosen:
        found = finished_part(plan, parts, i)
        if found is not None:
            made[row.name] = found
            progress.advance(row.source_nbytes)
        else:
            todo.append((i, row))
    cpu = cpu_features()
    if todo and not mixed_cpus:
        require_one_cpu(parts.parent.parent, made.values(), cpu)
    items = ((row, cut) for _, row in todo for cut in cuts(plan, row, budget.block_weights))
    fits = Fits(plan)
    # Fits and moments multiply matrices: one thread a worker, and sums that no number of threads changes.
    multiplies = plan.statistics is not None or not all(row.scheme.row_independent for _, row in todo)
    blas = one_blas_thread() if multiplies else None
    pool = ThreadPoolExecutor(budget.threads, "trapetum-quantize")
    try:
        # Twice the threads: workers go on while the main thread syncs a part to the disk.
        results = ordered_map(pool, lambda item: _work(plan, fits, item), items, 2 * budget.threads + 1)
        for i, row in todo:
            start = time.monotonic()
            with PartWriter(parts, i, row.name, row.arrays, cpu) as part:
                mine = itertools.islice(results, len(cuts(plan, row, budget.block_weights)))
                entry = part.finish(_write(plan, row, mine, part, progress))
            published = read_part(parts, i, row.name, check_data=False)
            if published is None:
                raise OutputError(
                    f"{part.path}: vanished or changed right after it was written",
                    hint="Let nothing else write into this folder.",
                )
            made[row.name] = published
            seconds = time.monotonic() - start
            log.add(event="tensor", name=row.name, seconds=round(seconds, 3))
            progress.advance(0, _line(row, entry, seconds))
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        if blas is not None:
            blas.restore_original_limits()
    progress.end()
    return {row.name: made[row.name] for _, row in chosen}, len(chosen) - len(todo)


def cuts(plan: Plan, row: PlanRow, block_weights: int) -> list[slice]:
    """The row blocks that a tensor is worked on in."""
    count, width = matrix_shape(row.shape)
    if plan.statistics is not None and plan.statistics.has_moment(row):
        return row_blocks(
            count, 1, FEEDBACK_ROWS
        )  # BLAS rounds by the number of rows: cut by the shape alone
    return row_blocks(count, width, block_weights) if width else []


def press_block(plan: Plan, fits: Fits, row: PlanRow, cut: slice) -> Pressed:
    """Quantize one row block; of a row with a second moment, one of :func:`cuts`."""
    taken = plan.taken(row, cut)
    if taken is not None:
        return Pressed(taken)
    values = plan.values(row, cut)
    seed = tensor_seed(plan.recipe.seed, row.name)
    scheme = fits.scheme(row)
    tensor = scheme.quantize(plan.aimed(row, cut, values), plan.importance(row), wide=row.wide, seed=seed)
    result = Pressed(tensor, scheme.errors(values, tensor), scheme.proof(values, tensor))
    plan.source.release(row.name, cut)
    return result


def _work(plan: Plan, fits: Fits, item: _Item) -> _Block:
    """Runs on a worker thread."""
    found = press_block(plan, fits, *item)
    return _Block(found.tensor.to_arrays(), found.tensor.params(), found.errors, found.proof)


def _write(
    plan: Plan, row: PlanRow, results: Iterator[tuple[_Item, _Block]], part: PartWriter, progress: Progress
) -> dict[str, Any]:
    """Write the blocks of one tensor; the draft of its manifest entry.

    Row errors are added with ``fsum``, exactly rounded: no order of blocks can change the last bit.
    """
    params: dict[str, Any] = {}
    lost: list[float] = []
    squares: list[float] = []
    proofs: list[Mapping[str, int | float]] = []
    width = matrix_shape(row.shape)[1]
    shared = LAYOUTS[row.scheme.layout].shared
    for (_, cut), block in results:
        part.write({s: a[:0] if s in shared and cut.start else a for s, a in block.arrays.items()})
        plan.source.release(row.name, cut)  # a kept tensor's pages were read by this write
        params = block.params
        if block.errors is not None:
            lost += block.errors[0].tolist()
            squares += block.errors[1].tolist()
        if block.proof is not None:
            proofs.append(block.proof)
        progress.advance((cut.stop - cut.start) * width * row.dtype.itemsize)
    total = math.fsum(squares)
    draft = {
        "layout": row.scheme.layout,
        "shape": row.shape,
        "params": params,
        "scheme": row.scheme.spec(),
        "relative_error": (math.fsum(lost) / total if total else 0.0) if row.quantized else None,
        "role": row.role.kind,
    }
    return draft | ({"proof": add_proofs(proofs)} if proofs else {})


def _line(row: PlanRow, entry: dict[str, Any], seconds: float) -> str:
    error = "kept" if entry["relative_error"] is None else f"error {entry['relative_error']:.3e}"
    line = f"{row.name}  {row.scheme.label}  {entry['bpw']:.3f} bpw  {error}  {seconds:.1f} s"
    return f"{line}  {proof_text(entry['proof'])}, sha256 {entry['sha256']}" if "proof" in entry else line
