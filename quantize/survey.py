"""One pass over the weights before any is quantized: refuse what is not finite, find what needs wide codebooks.

A NaN found after hours of work would leave nothing to show for them, and the bytes of the artifact depend on which
tensors need float32 codebooks; so every weight is looked at first, at the speed of memory, on all threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np

from trapetum.errors import CheckpointError, UnsupportedModelError
from trapetum.formats.checkpoint import Checkpoint
from trapetum.formats.packed_aqlm import AqlmCheckpoint
from trapetum.formats.packed_fp8 import Fp8Checkpoint
from trapetum.formats.packed_mxfp4 import Mxfp4Checkpoint
from trapetum.progress import Progress
from trapetum.quantize.additive_intake import AdditiveAsIs
from trapetum.quantize.block_scheme import BlocksAsIs
from trapetum.quantize.blocks import MemoryBudget, ordered_map, row_blocks
from trapetum.quantize.float8_intake import Float8AsIs
from trapetum.quantize.plan import FLOATS, Plan, PlanRow, tensor_values
from trapetum.quantize.schemes import Keep
from trapetum.quantize.ternary_intake import AsIs, Recognition, recognise
from trapetum.tensors import DenseTensor, matrix_shape

__all__ = ["Finding", "not_taken", "survey"]

# Their packed tensors are taken over in a form of their own.
_NEVER_TERNARY = (AqlmCheckpoint, Fp8Checkpoint, Mxfp4Checkpoint)
# Masks and tables outside the model proper may hold infinities on purpose.
_LENIENT = ("buffer", "other")


@dataclass
class Finding:
    """What the blocks of one tensor added up to."""

    nan: int = 0
    inf: int = 0
    first: int = -1
    wide: bool = False
    peak: float = 0.0
    ternary: Recognition = field(default_factory=Recognition)

    def add(self, other: Finding, offset: int) -> None:
        """Take in the next block, whose first value has flat index ``offset``."""
        if self.first < 0 <= other.first:
            self.first = offset + other.first
        self.nan += other.nan
        self.inf += other.inf
        self.wide |= other.wide
        self.peak = max(self.peak, other.peak)
        self.ternary.add(other.ternary)


def survey(plan: Plan, budget: MemoryBudget, progress: Progress | None = None, *, whole: bool = True) -> Plan:
    """Read every weight once.

    Parameters
    ----------
    plan : Plan
    budget : MemoryBudget
    progress : Progress, optional
    whole : bool
        Whether these are all rows of the model; if not, ask :func:`not_taken` when all are seen.

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
        elif total.peak > row.scheme.limit:
            raise _too_large(plan, row, total)
    settled = tuple(_settled(plan, r, f) for r, f in zip(plan.rows, findings, strict=True))
    if whole:
        notes += not_taken(plan, settled)
    return replace(plan, rows=settled, notes=(*plan.notes, *notes), scanned=True)


def _look(plan: Plan, row: PlanRow, rows: slice) -> Finding:
    from trapetum.quantize.scan import count_nonfinite

    block = plan.source.load(row.name, rows)
    values = block.values if isinstance(block, DenseTensor) else block.dequantize(slice(None))
    found = Finding(*count_nonfinite(values))
    if not row.quantized or found.first >= 0:
        return found
    floats = tensor_values(block)
    if floats is not values:  # a float64 may be beyond float32
        found = Finding(*count_nonfinite(floats))
        if found.first >= 0:
            return found
    if isinstance(row.scheme, AsIs):
        if not (isinstance(plan.source, _NEVER_TERNARY) and plan.source.is_packed(row.name)):
            found.ternary = recognise(floats)
    else:
        found.wide = row.scheme.wide(floats)
        if row.scheme.limit < np.inf:
            found.peak = float(np.max(np.abs(floats), initial=0))
    return found


def _settled(plan: Plan, row: PlanRow, found: Finding) -> PlanRow:
    """The row with what was found: ``wide``, and for a scheme that asked for it, what the tensor is."""
    if not isinstance(row.scheme, AsIs):
        return replace(row, wide=found.wide)
    if isinstance(plan.source, AqlmCheckpoint) and plan.source.is_packed(row.name):
        return replace(row, scheme=AdditiveAsIs.of(plan.source.stored(row.name, slice(0, 1))))
    if isinstance(plan.source, Fp8Checkpoint) and plan.source.is_packed(row.name):
        return replace(row, scheme=Float8AsIs.of(plan.source.stored(row.name, slice(0, 1))))
    taken = found.ternary.settle(row.shape, row.source_nbytes)
    if taken is None and not isinstance(plan.source, Checkpoint):
        kind = plan.source.block_type(row.name)
        if kind is not None:
            return replace(row, scheme=BlocksAsIs(kind))
    if taken is None:
        return replace(row, scheme=Keep(), why=f"{row.why}; not ternary in groups of a row, 128 or 64")
    return replace(row, scheme=taken[0], wide=taken[1])


def not_taken(plan: Plan, settled: tuple[PlanRow, ...]) -> list[str]:
    """Say which tensors were asked to be taken over and are not ternary; all of them is an error."""
    both = zip(plan.rows, settled, strict=True)
    asked = [now for was, now in both if isinstance(was.scheme, AsIs)]
    kept = [r.name for r in asked if isinstance(r.scheme, Keep)]
    if asked and len(kept) == len(asked):
        raise UnsupportedModelError(
            f"{plan.source.path}: scheme asis takes over weights that are ternary or packed already (GGUF, MXFP4, "
            f"FP8, AQLM), and none of {len(asked)} tensors is, such as {kept[0]}",
            hint="Quantize it: --bits 4, or --scheme ternary and read what that costs.",
        )
    if not kept:
        return []
    more = ", ..." if len(kept) > 8 else ""
    return [
        f"{len(kept)} of {len(asked)} tensors are not ternary and kept as they are: {', '.join(kept[:8])}{more}"
    ]


def _too_large(plan: Plan, row: PlanRow, total: Finding) -> CheckpointError:
    return CheckpointError(
        f"{plan.source.file(row.name)}: tensor {row.name} holds a weight of magnitude {total.peak:g}; "
        f"{row.scheme.label} stores float16 scales, up to {row.scheme.limit:g}",
        hint="Give this tensor another scheme, such as kmeans, or keep it.",
    )


def _not_finite(plan: Plan, row: PlanRow, total: Finding) -> CheckpointError:
    index = [int(i) for i in np.unravel_index(total.first, row.shape)] if row.shape else []
    beyond = " beyond float32" if row.dtype == np.float64 else ""
    return CheckpointError(
        f"{plan.source.file(row.name)}: tensor {row.name} holds {total.nan} NaN and {total.inf} infinite values"
        f"{beyond} of {row.parameters:,}; the first is at {index}; only finite weights can be quantized",
        hint="The file is damaged or the training overflowed: download it again, or ask its author.",
    )
