"""Quantize a model while its files come from the Hub: one weight file after another, each removed when it is done.

Per file: fetch it whole (the next one is on its way meanwhile), look at its weights (``survey``), make its tensors,
drop it. Every tensor's bytes are those of the ordinary route, which depend on the tensor alone; so are the artifact's.
What a NaN costs is different: it is found when its file comes, not before all work.

A run that goes on takes finished parts over without fetching their files.
"""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from trapetum.formats.parts import Part, read_part
from trapetum.progress import Progress
from trapetum.quantize.blocks import MemoryBudget
from trapetum.quantize.journal import RunLog
from trapetum.quantize.plan import Plan, PlanRow
from trapetum.quantize.schemes import scheme_from_spec
from trapetum.quantize.stream import quantize_tensors
from trapetum.quantize.survey import not_taken, survey
from trapetum.quantize.ternary_intake import AsIs

if TYPE_CHECKING:
    from trapetum.hub_stream import HubStream

__all__ = ["FOLDER", "quantize_streamed", "settled_row"]

FOLDER = "stream"
"""Where weight files lie in the job's work folder."""


def quantize_streamed(
    stream: HubStream,
    plan: Plan,
    parts: Path,
    budget: MemoryBudget,
    log: RunLog,
    progress: Progress,
    mixed_cpus: bool = False,
) -> tuple[dict[str, Part], int, Plan]:
    """Make the parts that are not there yet.

    Parameters
    ----------
    stream : HubStream
        Whose source the plan reads.
    plan : Plan
        Not surveyed.
    parts, budget, log, progress, mixed_cpus
        As for ``quantize_tensors``.

    Returns
    -------
    made : dict of str to Part
        Of all tensors, in the order of the plan.
    taken_over : int
        How many were there.
    plan : Plan
        Surveyed: with the scheme and the width of every row settled.

    Raises
    ------
    CheckpointError
        If a file does not come or is not the one that was announced, or a weight is not finite.
    """
    folder = parts.parent / FOLDER
    made: dict[int, Part] = {}
    for i, row in enumerate(plan.rows):
        found = _finished(parts, i, row)
        if found is not None:
            made[i] = found
    taken_over = len(made)
    rows = [settled_row(row, made[i]) if i in made else row for i, row in enumerate(plan.rows)]
    notes = list(plan.notes)
    files = list(dict.fromkeys(row.file for i, row in enumerate(plan.rows) if i not in made))
    remote = [name for name in files if name in stream.sizes]

    _sweep(folder, remote)
    with ThreadPoolExecutor(1, "trapetum-fetch") as fetcher:

        def fetch(number: int) -> Future[Path] | None:
            return fetcher.submit(stream.fetch, remote[number], folder) if number < len(remote) else None

        try:
            coming, number = fetch(0), 0
            for file in files:
                path = None
                if file in stream.sizes and coming is not None:
                    progress.note(
                        f"weight file {number + 1} of {len(remote)}: {file}, {stream.sizes[file]:,} bytes"
                    )
                    path = coming.result()
                    stream.bring(file, path)
                    number += 1
                    coming = fetch(number)
                mine = [i for i, row in enumerate(plan.rows) if row.file == file and i not in made]
                seen = survey(
                    replace(plan, rows=tuple(rows[i] for i in mine), notes=()), budget, progress, whole=False
                )
                notes += seen.notes
                for i, row in zip(mine, seen.rows, strict=True):
                    rows[i] = row
                current = replace(plan, rows=tuple(rows))
                done, _ = quantize_tensors(current, parts, budget, log, progress, mine, mixed_cpus)
                made |= {i: done[rows[i].name] for i in mine}
                if path is not None:
                    stream.drop(file, path)
        finally:
            stream.end()  # else leaving the block would wait for a download of hours
    notes += not_taken(plan, tuple(rows))
    surveyed = replace(plan, rows=tuple(rows), notes=tuple(notes), scanned=True)
    return {row.name: made[i] for i, row in enumerate(rows)}, taken_over, surveyed


def _sweep(folder: Path, wanted: Collection[str]) -> None:
    """Remove what a killed run left and nothing will use: half a download is not taken up, it is fetched anew."""
    if folder.is_dir():
        for path in folder.rglob("*"):
            if (
                path.is_file()
                and (path.name.endswith(".incomplete") or path.parent == folder)
                and path.name not in wanted
            ):
                path.unlink()


def _finished(parts: Path, index: int, row: PlanRow) -> Part | None:
    """The part of a row if it is there and whole; a scheme that the survey settles is the one it was settled to."""
    found = read_part(parts, index, row.name)
    if found is None or found.record.shape != row.shape:
        return None
    same = isinstance(row.scheme, AsIs) or found.record.scheme == row.scheme.spec()
    return found if same else None


def settled_row(row: PlanRow, part: Part) -> PlanRow:
    """The row as the survey settled it when its part was made."""
    row = replace(row, scheme=scheme_from_spec(part.record.scheme))
    wide = replace(row, wide=True)
    return wide if part.record.stored == wide.arrays != row.arrays else row
