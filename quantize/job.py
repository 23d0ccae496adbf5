"""The job: checkpoint -> artifact folder, streaming, and safe to kill at any moment.

1. Plan, and look at the output folder; take its lock; compare with the unfinished job in it, if there is one.
2. Hash the source and survey its weights (NaN, wide codebooks); write ``job.json``.
3. For each tensor without a finished part: row blocks over threads, results in order into a part file that is published
   by rename. The set of parts is the journal.
4. Assemble shards, manifest and side files, rename them into place (``formats.assemble``).

After kill -9 (or Ctrl-C, SIGTERM, a full disk) the next run with the same arguments goes on at the next tensor, and the
final bytes equal those of an uninterrupted run: no result depends on threads, block sizes or the order of work.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import trapetum
from trapetum.errors import OutputError
from trapetum.formats.assemble import assemble, resume_assembly
from trapetum.formats.atomic import WORK_FOLDER, FolderLock, refuse_overlap, require_space
from trapetum.formats.checkpoint import Checkpoint
from trapetum.formats.manifest import (
    INDEX,
    MANIFEST,
    artifact_config,
    build_manifest,
    is_plain_name,
    parse_manifest,
)
from trapetum.formats.output_folder import PARTS, discard_job, output_state
from trapetum.formats.parts import PartWriter, read_part
from trapetum.formats.shard_layout import Shard, shard_layout
from trapetum.hub import resolve_model
from trapetum.progress import Progress
from trapetum.quantize.blocks import MemoryBudget, ordered_map, row_blocks
from trapetum.quantize.card import model_card, read_front_matter
from trapetum.quantize.estimate import predict_seconds, probe
from trapetum.quantize.identity import hash_files, tensor_seed
from trapetum.quantize.journal import Journal, RunLog
from trapetum.quantize.plan import Plan, PlanRow, as_float, make_plan
from trapetum.quantize.recipe import Recipe, resolve_recipe
from trapetum.quantize.report import Report
from trapetum.quantize.survey import survey
from trapetum.tensors import DenseTensor, matrix_shape

__all__ = ["Job", "quantize_model"]

SCAN_LIMIT = 64 * 10**9  # bytes of source that a dry run still reads to make its figures exact
_LICENCES = ("LICENSE", "LICENCE", "NOTICE", "USE_POLICY")


def quantize_model(
    model: str | Path,
    out: str | Path | None = None,
    *,
    bits: float | None = None,
    scheme: str | None = None,
    recipe: str | Path | Recipe | dict[str, Any] | None = None,
    effort: str = "default",
    threads: int | None = None,
    max_memory: int | None = None,
    seed: int = 0,
    revision: str | None = None,
    token: str | None = None,
    overwrite: bool = False,
    resume: bool = True,
    dry_run: bool = False,
    any_architecture: bool = False,
    max_shard_size: int = 5_000_000_000,
    progress: Progress | None = None,
) -> Report:
    """Quantize a checkpoint into an artifact folder.

    Parameters
    ----------
    model : str or Path
        A folder (or one ``.safetensors`` file), or a Hub id.
    out : str or Path, optional
        The artifact folder; ``NAME-trapetum-RECIPE`` in the current folder by default.
    bits, scheme, recipe, effort, seed
        See ``resolve_recipe``; 4 bits by default.
    threads : int, optional
        Worker threads; all usable CPUs by default. The bytes do not depend on it.
    max_memory : int, optional
        Peak resident bytes; see ``memory_budget``.
    revision, token : str, optional
        For a Hub id.
    overwrite : bool
        Replace a finished artifact in ``out``; it stays whole until the new one is complete.
    resume : bool
        Go on with an unfinished job in ``out``; False discards it.
    dry_run : bool
        Write nothing; the report tells what would be done. Sources up to 64 GB are read, so that its sizes are exact.
    any_architecture : bool
        Accept a family outside the table.
    max_shard_size : int
        Data bytes a weight file may hold.
    progress : Progress, optional

    Returns
    -------
    Report

    Raises
    ------
    TrapetumError
        One of its subclasses, with what was found and what to do.
    """
    progress = progress or Progress()
    resolved = resolve_recipe(recipe, bits=bits, scheme=scheme, effort=effort, seed=seed)
    path = resolve_model(model, revision=revision, token=token, progress=progress)
    with Checkpoint.open(path) as source:
        title = _title(source)
        folder = Path(out) if out is not None else Path(f"{title}-trapetum-{resolved.name}")
        refuse_overlap(folder, [source.folder, *(f.path for f in source.files)])
        state = output_state(folder)
        if state.artifact and not state.job and not (overwrite or dry_run):
            raise _finished(folder)
        plan = make_plan(source, resolved, any_architecture=any_architecture)
        budget = plan.budget(threads, max_memory)
        if dry_run:
            return _dry_run(plan, budget, folder, max_shard_size, progress)
        return Job(plan, folder, budget, max_shard_size, title, progress).run(
            resume=resume, overwrite=overwrite
        )


def _finished(folder: Path) -> OutputError:
    return OutputError(
        f"{folder}: already holds a finished artifact",
        hint="Choose another output with -o, or replace it with --overwrite.",
    )


def _title(source: Checkpoint) -> str:
    return (
        str(_hub_identity(source.folder).get("repo", source.folder.resolve().name)).rpartition("/")[2]
        or "model"
    )


def _hub_identity(folder: Path) -> dict[str, str]:
    """Repository and commit where the folder is a snapshot in a Hub cache (models--ORG--NAME/snapshots/COMMIT)."""
    real = folder.resolve()
    if real.parent.name != "snapshots" or not real.parent.parent.name.startswith("models--"):
        return {}
    repo = real.parent.parent.name.removeprefix("models--").replace("--", "/")
    return {"repo": repo, "commit": real.name}


def _shards(plan: Plan, max_shard_size: int) -> list[Shard]:
    return shard_layout({r.name: r.arrays for r in plan.rows}, max_shard_size)


def _dry_run(
    plan: Plan, budget: MemoryBudget, folder: Path, max_shard_size: int, progress: Progress
) -> Report:
    if sum(r.source_nbytes for r in plan.rows) <= SCAN_LIMIT:
        plan = survey(plan, budget, progress)
    else:
        note = "the source is too large to be read in a dry run: sizes assume that no tensor needs float32 codebooks"
        plan = replace(plan, notes=(*plan.notes, note))
    return Report(
        folder,
        plan,
        {s.file: s.size for s in _shards(plan, max_shard_size)},
        dry_run=True,
        predicted_seconds=predict_seconds(plan, budget.threads, probe()),
        predicted_memory=budget.peak,
        notes=plan.notes,
    )


@dataclass(frozen=True)
class _Block:
    """Result of one row block: stored arrays, layout parameters, squared error and squares of each row."""

    arrays: dict[str, NDArray[Any]]
    params: dict[str, Any] = field(default_factory=dict)
    errors: tuple[NDArray[np.float64], NDArray[np.float64]] | None = None


@dataclass
class Job:
    """One artifact in the making.

    Parameters
    ----------
    plan : Plan
    folder : Path
        The output folder.
    budget : MemoryBudget
    max_shard_size : int
    title : str
        Name of the source model.
    progress : Progress
    """

    plan: Plan
    folder: Path
    budget: MemoryBudget
    max_shard_size: int
    title: str
    progress: Progress
    identity: dict[str, Any] = field(default_factory=dict, init=False)

    def run(self, *, resume: bool = True, overwrite: bool = False) -> Report:
        """Do what is left to do.

        Parameters
        ----------
        resume : bool
            Go on with the unfinished job in the folder; False discards it.
        overwrite : bool
            Whether a finished artifact in the folder may be replaced (an unfinished job there had the permission).

        Raises
        ------
        OutputError
            If the folder is locked, holds another job, or cannot be written.
        CheckpointError
            If a weight is not finite.
        """
        started = time.monotonic()
        existed = self.folder.exists()
        resumed = 0
        with FolderLock(self.folder) as lock:
            try:
                self._begin(resume, overwrite)
            except BaseException:
                if self._journal.read() is None:  # nothing was begun: leave no trace
                    discard_job(self.folder)
                    lock.release(remove=True)
                    with contextlib.suppress(OSError):
                        None if existed else self.folder.rmdir()
                raise
            for note in filter(None, [*self.plan.notes, lock.note]):
                self.progress.note(note)
            if not resume_assembly(self.folder, progress=self.progress):
                log = RunLog(self.folder)
                log.start(self.budget.threads)
                entries, resumed = self._quantize(log)
                self._assemble(entries, log)
            manifest, _ = parse_manifest((self.folder / MANIFEST).read_bytes(), str(self.folder / MANIFEST))
            lock.release(remove=True)
        report = self._report(manifest["tensors"])
        return replace(report, seconds=time.monotonic() - started, resumed=resumed)

    @property
    def _journal(self) -> Journal:
        return Journal(self.folder)

    def _begin(self, resume: bool, overwrite: bool) -> None:
        """Join the unfinished job in the folder if it is this one, else begin; settles identity and plan."""
        stored = self._journal.read() if resume else None
        if (self.folder / MANIFEST).is_file() and stored is None and not overwrite:
            raise _finished(self.folder)
        if stored is None:
            discard_job(self.folder)
        else:
            settings = {k: v for k, v in stored["identity"].items() if k != "source"}
            self._journal.require_same(settings, self._settings())  # at once; hashing may take minutes
        self.identity = {**self._settings(), "source": self._source()}
        if stored is not None:
            self._journal.require_same(stored["identity"], self.identity)
            rows = tuple(replace(r, wide=r.name in stored["wide"]) for r in self.plan.rows)
            self.plan = replace(self.plan, rows=rows, notes=tuple(stored["notes"]), scanned=True)
            return
        self.plan = survey(self.plan, self.budget, self.progress)
        largest = max(s.size for s in _shards(self.plan, self.max_shard_size))
        require_space(self.folder, self.plan.nbytes + largest)
        self._journal.write(self.identity, [r.name for r in self.plan.rows if r.wide], list(self.plan.notes))

    def _settings(self) -> dict[str, Any]:
        """What the final bytes depend on, apart from the source."""
        return {
            "tool_version": trapetum.__version__,
            "architecture": self.plan.architecture.model_type,
            "recipe": self.plan.recipe.resolved(),
            "max_shard_size": self.max_shard_size,
        }

    def _source(self) -> dict[str, Any]:
        """The source's name (and place on the Hub) and the hash of every file."""
        source = self.plan.source
        index = source.folder / INDEX
        paths = [*(f.path for f in source.files), *_companions(source), *([index] if index.is_file() else [])]
        hashes = hash_files(paths, self._journal.hashes, self.budget.threads, self.progress)
        return {"name": self.title, **_hub_identity(source.folder), "files": hashes}

    def _quantize(self, log: RunLog) -> tuple[dict[str, dict[str, Any]], int]:
        """Make the missing parts; (manifest entry of each tensor in order, number of parts that were there)."""
        parts = self.folder / WORK_FOLDER / PARTS
        rows = self.plan.rows
        self.progress.begin("quantize", sum(r.source_nbytes for r in rows))
        entries: dict[str, dict[str, Any]] = {r.name: {} for r in rows}
        for i, row in enumerate(rows):
            part = read_part(parts, i, row.name)
            if (
                part is not None
                and part.record.scheme == row.scheme.spec()
                and part.record.shape == row.shape
            ):
                entries[row.name] = part.entry
                self.progress.advance(row.source_nbytes)
        todo = [(i, row) for i, row in enumerate(rows) if not entries[row.name]]
        pool = ThreadPoolExecutor(self.budget.threads, "trapetum-quantize")
        try:
            # Twice the threads: workers go on while the main thread syncs a part to the disk.
            window = 2 * self.budget.threads + 1
            results = ordered_map(pool, self._block, self._blocks([row for _, row in todo]), window)
            for i, row in todo:
                start = time.monotonic()
                with PartWriter(parts, i, row.name, row.arrays) as part_file:
                    entry = part_file.finish(self._drain(row, results, part_file))
                entries[row.name] = entry
                seconds = time.monotonic() - start
                log.add(event="tensor", name=row.name, seconds=round(seconds, 3))
                self.progress.advance(0, _line(row, entry, seconds))
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
        self.progress.end()
        return entries, len(rows) - len(todo)

    def _drain(self, row: PlanRow, results: Iterator[tuple[Any, _Block]], part: PartWriter) -> dict[str, Any]:
        """Write the blocks of one tensor; the draft of its manifest entry."""
        params: dict[str, Any] = {}
        lost: list[float] = []
        squares: list[float] = []
        for (_, cut), block in itertools.islice(results, len(self._cuts(row))):
            part.write(block.arrays)
            self.plan.source.release(row.name, cut)
            params = block.params
            if block.errors is not None:
                lost += block.errors[0].tolist()
                squares += block.errors[1].tolist()
            self.progress.advance((cut.stop - cut.start) * matrix_shape(row.shape)[1] * row.dtype.itemsize)
        total = math.fsum(squares)
        return {
            "layout": row.scheme.layout,
            "shape": row.shape,
            "params": params,
            "scheme": row.scheme.spec(),
            "relative_error": (math.fsum(lost) / total if total else 0.0) if row.quantized else None,
            "role": row.role.kind,
        }

    def _cuts(self, row: PlanRow) -> list[slice]:
        count, width = matrix_shape(row.shape)
        if not row.scheme.row_independent:
            return [slice(0, count)]
        return row_blocks(count, width, self.budget.block_weights) if width else []

    def _blocks(self, rows: list[PlanRow]) -> Iterator[tuple[PlanRow, slice]]:
        return ((row, cut) for row in rows for cut in self._cuts(row))

    def _block(self, item: tuple[PlanRow, slice]) -> _Block:
        """Work on one row block; runs on a worker thread."""
        row, cut = item
        stored = self.plan.source.load(row.name, cut).values
        if not row.quantized:
            return _Block(DenseTensor(stored).to_arrays())
        values = as_float(stored)
        seed = tensor_seed(self.plan.recipe.seed, row.name)
        tensor = row.scheme.quantize(values, wide=row.wide, seed=seed)
        result = _Block(tensor.to_arrays(), tensor.params(), row.scheme.errors(values, tensor))
        self.plan.source.release(row.name, cut)
        return result

    def _assemble(self, entries: dict[str, dict[str, Any]], log: RunLog) -> None:
        header = {
            "tool_version": trapetum.__version__,
            "source": self.identity["source"],
            "architecture": self.plan.architecture.model_type,
            "recipe": self.plan.recipe.resolved(),
        }
        manifest = build_manifest(header, entries)
        carried = read_front_matter(self.plan.source.folder)
        files: dict[str, bytes | Path] = {p.name: p for p in _companions(self.plan.source)}
        files["config.json"] = artifact_config(self.plan.config, manifest)
        files["README.md"] = model_card(self._report(entries), self.title, self.identity["source"], carried)
        log.add(event="assemble")
        assemble(self.folder, manifest, files, max_shard_bytes=self.max_shard_size, progress=self.progress)

    def _report(self, entries: dict[str, dict[str, Any]]) -> Report:
        errors = {n: e["relative_error"] for n, e in entries.items() if e["relative_error"] is not None}
        files = {s.file: s.size for s in _shards(self.plan, self.max_shard_size)}
        return Report(
            self.folder,
            self.plan,
            files,
            errors=errors,
            predicted_memory=self.budget.peak,
            notes=self.plan.notes,
        )


def _companions(source: Checkpoint) -> list[Path]:
    """Files that travel with the weights: config, tokenizer, licences."""
    licences = [p for p in source.folder.iterdir() if p.name.upper().startswith(_LICENCES)]
    return sorted({*source.side_files(), *(p for p in licences if is_plain_name(p.name) and p.is_file())})


def _line(row: PlanRow, entry: dict[str, Any], seconds: float) -> str:
    error = "kept" if entry["relative_error"] is None else f"error {entry['relative_error']:.3e}"
    return f"{row.name}  {row.scheme.label}  {entry['bpw']:.3f} bpw  {error}  {seconds:.1f} s"
