"""What a job would do, without doing it: the report of ``--dry-run``, and the weight files of an artifact."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from trapetum.formats.shard_layout import Shard, shard_layout
from trapetum.progress import Progress
from trapetum.quantize.blocks import MemoryBudget
from trapetum.quantize.estimate import predict_seconds, probe
from trapetum.quantize.plan import Plan
from trapetum.quantize.report import Report
from trapetum.quantize.share import Share
from trapetum.quantize.survey import survey

__all__ = ["forecast", "shards_of"]

SCAN_LIMIT = 64 * 10**9  # bytes of source that a dry run still reads to make its figures exact


def shards_of(plan: Plan, max_shard_size: int) -> list[Shard]:
    """The weight files that the artifact will have."""
    return shard_layout({r.name: r.arrays for r in plan.rows}, max_shard_size)


def forecast(
    plan: Plan,
    budget: MemoryBudget,
    folder: Path,
    max_shard_size: int,
    share: Share | None,
    progress: Progress,
    *,
    remote: bool = False,
) -> Report:
    """The report of a dry run.

    Parameters
    ----------
    plan : Plan
    budget : MemoryBudget
    folder : Path
        The output folder.
    max_shard_size : int
    share : Share, optional
    progress : Progress
    remote : bool
        Whether the weights are not here, so that they are not read.
    """
    if not remote and sum(r.source_nbytes for r in plan.rows) <= SCAN_LIMIT:
        plan = survey(plan, budget, progress)
    else:
        why = "is not here" if remote else "is too large to be read in a dry run"
        note = f"the source {why}: sizes assume that no tensor needs float32 codebooks"
        plan = replace(plan, notes=(*plan.notes, note))
    if share is not None:
        mine = share.tensors(plan)
        size = sum(plan.rows[i].source_nbytes for i in mine)
        note = f"part {share} would make {len(mine)} of these tensors, from {size:,} bytes of the source"
        plan = replace(plan, notes=(*plan.notes, note))
    return Report(
        folder,
        plan,
        {s.file: s.size for s in shards_of(plan, max_shard_size)},
        dry_run=True,
        predicted_seconds=predict_seconds(plan, budget.threads, probe()),
        predicted_memory=budget.peak,
        notes=plan.notes,
    )
