"""One pass over the weights before any is quantized: refuse what is not finite, find what needs wide codebooks.

A NaN found after hours of work would leave nothing to show for them, and the bytes of the artifact depend on which
tensors need float32 codebooks; so every weight is looked at first, at the speed of memory, on all threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from trapetum.errors import CheckpointError
from trapetum.progress import Progress
from trapetum.quantize.blocks import MemoryBudget, ordered_map, row_blocks
from trapetum.quantize.plan import FLOATS, Plan, PlanRow, as_float
from trapetum.tensors import matrix_shape

__all__ = ["Finding", "survey"]

# Masks and tables outside the model proper may hold infinities on purpose.
_LENIENT = ("buffer", "other")


@dataclass
class Finding:
    """What the blocks of one tensor added up to."""

    nan: int = 0
    inf: int = 0
    first: int = -1
    wide: bool = False

    def add(self, other: Finding, offset: int) -> None:
        """Take in the next block, whose first value has flat index ``offset``."""
        if self.first < 0 <= other.first:
            self.first = offset + other.first
        self.nan += other.nan
        self.inf += other.inf
        self.wide |= other.wide


def survey(plan: Plan, budget: MemoryBudget, progress: Progress | None = None) -> Plan:
    """Read every weight once.

    Parameters
    ----------
    plan : Plan
    budget : MemoryBudget
    progress : Progress, optional

    Returns
    -------
    Plan
        With ``wide`` settled in every row.

    Raises
    ------
    CheckpointError
        With file, tensor, counts and first index, if a weight is NaN or infinite.
    """
    progress = progress or Progress()
    progress.begin("scan", sum(r.source_nbytes for r in plan.rows))
    findings = [Finding() for _ in plan.rows]

    def look(item: tuple[int, slice]) -> Finding:
        i, rows = item
        found = _look(plan, plan.rows[i], rows)
        plan.source.release(plan.rows[i].name, rows)
        return found

    def blocks() -> Iterator[tuple[int, slice]]:
        for i, row in enumerate(plan.rows):
            if row.dtype.name in FLOATS:
                for rows in row_blocks(*matrix_shape(row.shape), budget.block_weights):
                    yield i, rows

    with ThreadPoolExecutor(budget.threads, "trapetum-scan") as executor:
        for (i, rows), found in ordered_map(executor, look, blocks(), budget.threads + 2):
            row = plan.rows[i]
            width = matrix_shape(row.shape)[1]
            findings[i].add(found, rows.start * width)
            progress.advance((rows.stop - rows.start) * width * row.dtype.itemsize)
    progress.end()
    notes = []
    for row, total in zip(plan.rows, findings, strict=True):
        if total.nan or total.inf:
            if row.role.kind not in _LENIENT or row.quantized:
                raise _not_finite(plan, row, total)
            notes.append(f"{row.name} holds {total.nan} NaN and {total.inf} infinite values; kept as it is")
    settled = tuple(replace(r, wide=f.wide) for r, f in zip(plan.rows, findings, strict=True))
    return replace(plan, rows=settled, notes=(*plan.notes, *notes), scanned=True)


def _look(plan: Plan, row: PlanRow, rows: slice) -> Finding:
    from trapetum.quantize.scan import count_nonfinite

    block = plan.source.load(row.name, rows).values
    found = Finding(*count_nonfinite(block))
    if row.quantized and found.first < 0:
        values = as_float(block)
        if values is not block:  # a float64 may be beyond float32
            found = Finding(*count_nonfinite(values))
        found.wide = found.first < 0 and row.scheme.wide(values)
    return found


def _not_finite(plan: Plan, row: PlanRow, total: Finding) -> CheckpointError:
    index = [int(i) for i in np.unravel_index(total.first, row.shape)] if row.shape else []
    beyond = " beyond float32" if row.dtype == np.float64 else ""
    return CheckpointError(
        f"{plan.source.file(row.name)}: tensor {row.name} holds {total.nan} NaN and {total.inf} infinite values"
        f"{beyond} of {row.parameters:,}; the first is at {index}; only finite weights can be quantized",
        hint="The file is damaged or the training overflowed: download it again, or ask its author.",
    )
