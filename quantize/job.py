"""The job: checkpoint -> artifact folder, streaming, and safe to kill at any moment.

1. Plan, and look at the output folder; take its lock; compare with the unfinished job in it, if there is one.
2. Hash the source and survey its weights (NaN, wide codebooks); write ``job.json``.
3. ``stream``: each tensor without a finished part becomes one, published by rename. The set of parts is the journal.
4. Assemble shards, manifest and side files, rename them into place (``formats.assemble``).

After kill -9 (or Ctrl-C, SIGTERM, a full disk) the next run with the same arguments goes on at the next tensor, and the
final bytes equal those of an uninterrupted run: no result depends on threads, block sizes or the order of work.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import trapetum
from trapetum.errors import OutputError, RecipeError
from trapetum.formats.assemble import assemble, resume_assembly
from trapetum.formats.atomic import WORK_FOLDER, FolderLock, refuse_overlap, require_space
from trapetum.formats.imatrix import open_statistics
from trapetum.formats.manifest import (
    INDEX,
    MANIFEST,
    artifact_config,
    build_manifest,
    is_plain_name,
    parse_manifest,
)
from trapetum.formats.names import text_name
from trapetum.formats.output_folder import PARTS, discard_job, output_state
from trapetum.formats.packed_ternary import AnyCheckpoint, open_checkpoint
from trapetum.formats.parts import Part
from trapetum.formats.shard_layout import Shard, shard_layout
from trapetum.hub import resolve_model
from trapetum.progress import Progress
from trapetum.quantize.blocks import MemoryBudget
from trapetum.quantize.card import model_card, read_front_matter
from trapetum.quantize.cpu import require_one_cpu
from trapetum.quantize.estimate import predict_seconds, probe
from trapetum.quantize.identity import hash_files
from trapetum.quantize.journal import Journal, RunLog
from trapetum.quantize.plan import Plan, make_plan
from trapetum.quantize.recipe import Recipe, resolve_recipe
from trapetum.quantize.report import Report
from trapetum.quantize.schemes import scheme_from_spec
from trapetum.quantize.share import Share
from trapetum.quantize.statistics import Calibration, Statistics
from trapetum.quantize.stream import quantize_tensors
from trapetum.quantize.survey import survey
from trapetum.quantize.ternary import cost_note
from trapetum.runtime.calibrate import TOKENS

__all__ = ["Job", "Press", "companions", "leave_no_trace", "quantize_model", "surveyed"]

SCAN_LIMIT = 64 * 10**9  # bytes of source that a dry run still reads to make its figures exact
Press = Callable[..., tuple[dict[str, Part], int]]
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
    levels: int | None = None,
    group_size: int | None = None,
    hadamard: bool = False,
    fallback: bool = True,
    revision: str | None = None,
    token: str | None = None,
    overwrite: bool = False,
    resume: bool = True,
    dry_run: bool = False,
    any_architecture: bool = False,
    max_shard_size: int = 5_000_000_000,
    part: Share | str | None = None,
    workers: int | None = None,
    scheduler: str | None = None,
    mixed_cpus: bool = False,
    calibrate: str | Path | None = None,
    calib_tokens: int | None = None,
    imatrix: str | Path | None = None,
    progress: Progress | None = None,
) -> Report:
    """Quantize a checkpoint into an artifact folder.

    Parameters
    ----------
    model : str or Path
        A folder (or one ``.safetensors`` or ``.gguf`` file), or a Hub id.
    out : str or Path, optional
        The artifact folder; ``NAME-trapetum-RECIPE`` in the current folder by default.
    bits, scheme, recipe, effort, seed, levels, group_size, hadamard, fallback
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
    part : Share or str, optional
        ``"I/N"``: do this share of the tensors only, beside other processes in ``out``; ``merge_parts`` finishes
        the artifact.
    workers : int, optional
        Do the work in this many local processes (extra ``cluster``).
    scheduler : str, optional
        Do the work on the Dask cluster at this address; its workers see ``model`` and ``out`` under the same paths.
    mixed_cpus : bool
        Accept tensors that were made on CPUs with different features.
    calibrate : path-like, optional
        A text of a few hundred kilobytes that the model is run over first: codes then make up for each other's errors
        (``quantize.ldlq``).
    calib_tokens : int, optional
        Most tokens to take of it, 131,072 by default.
    imatrix : path-like, optional
        An importance matrix of llama.cpp, or second moments of ``trapetum imatrix --hessian``.
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
    share = Share.parse(part) if isinstance(part, str) else part
    if share is not None and share.count == 1:  # the whole
        share = None
    _check_routes(share, workers, scheduler, resume)
    calibration = _calibration(calibrate, calib_tokens, imatrix)
    if calibration is not None and (share is not None or workers is not None or scheduler is not None):
        raise RecipeError(
            "a job with calibration or an importance file is not spread over processes",
            hint="Leave out part, workers and scheduler.",
        )
    resolved = resolve_recipe(
        recipe,
        bits=bits,
        scheme=scheme,
        effort=effort,
        seed=seed,
        levels=levels,
        group_size=group_size,
        hadamard=hadamard,
        fallback=fallback,
    )
    path = resolve_model(model, revision=revision, token=token, progress=progress)
    with open_checkpoint(path) as source:
        name = _name(source)
        folder = Path(out) if out is not None else Path(f"{name}-trapetum-{resolved.name}")
        refuse_overlap(folder, [source.folder, *(f.path for f in source.files)])
        state = output_state(folder)
        if state.artifact and not state.job and not (overwrite or dry_run):
            raise _finished(folder)
        plan = make_plan(source, resolved, any_architecture=any_architecture)
        if (cost := cost_note(plan)) is not None:
            plan = replace(plan, notes=(*plan.notes, cost))
        if imatrix is not None:
            with open_statistics(imatrix) as file:  # what it does not fit is said before any work
                plan = replace(plan, notes=(*plan.notes, *Statistics(file).notes(plan.rows)))
        budget = plan.budget(threads, max_memory)
        if dry_run:
            return _dry_run(plan, budget, folder, max_shard_size, share, progress)
        job = Job(
            plan,
            folder,
            budget,
            max_shard_size,
            text_name(name),
            progress,
            mixed_cpus,
            calibration=calibration,
        )
        if share is not None:
            from trapetum.quantize.shared_job import run_share

            return run_share(job, share, overwrite=overwrite)
        if workers is not None or scheduler is not None:
            from trapetum.cluster import Cluster

            job.press = Cluster(scheduler, workers).press
        return job.run(resume=resume, overwrite=overwrite)


def _calibration(
    calibrate: str | Path | None, tokens: int | None, imatrix: str | Path | None
) -> Calibration | None:
    if calibrate is not None and imatrix is not None:
        raise RecipeError("calibrate and imatrix exclude each other: each says what is known of the inputs")
    if tokens is not None and (calibrate is None or tokens < 1):
        raise RecipeError(f"calib_tokens is {tokens}; it takes a positive number, and goes with calibrate")
    if calibrate is not None:
        return Calibration(Path(calibrate), tokens or TOKENS)
    return None if imatrix is None else Calibration(Path(imatrix))


def _check_routes(share: Share | None, workers: int | None, scheduler: str | None, resume: bool) -> None:
    """Ways to spread a job exclude each other."""
    routes = {"part": share, "workers": workers, "scheduler": scheduler}
    given = [name for name, value in routes.items() if value is not None]
    if len(given) > 1:
        raise RecipeError(f"{' and '.join(given)} exclude each other: each says where the whole work is done")
    if share is not None and not resume:
        raise RecipeError(
            "a part cannot begin anew: it would discard the work of the other parts",
            hint="Remove the output folder first, or leave --no-resume out.",
        )


def _finished(folder: Path) -> OutputError:
    return OutputError(
        f"{folder}: already holds a finished artifact",
        hint="Choose another output with -o, or replace it with --overwrite.",
    )


def _name(source: AnyCheckpoint) -> str:
    return str(_hub_identity(source.folder).get("repo", source.title)).rpartition("/")[2] or "model"


def _hub_identity(folder: Path) -> dict[str, str]:
    """Repository and commit where the folder is a snapshot in a Hub cache (models--ORG--NAME/snapshots/COMMIT)."""
    real = folder.resolve()
    if real.parent.name != "snapshots" or not real.parent.parent.name.startswith("models--"):
        return {}
    repo = real.parent.parent.name.removeprefix("models--").replace("--", "/")
    return {"repo": text_name(repo), "commit": text_name(real.name)}


def _shards(plan: Plan, max_shard_size: int) -> list[Shard]:
    return shard_layout({r.name: r.arrays for r in plan.rows}, max_shard_size)


def _dry_run(
    plan: Plan,
    budget: MemoryBudget,
    folder: Path,
    max_shard_size: int,
    share: Share | None,
    progress: Progress,
) -> Report:
    if sum(r.source_nbytes for r in plan.rows) <= SCAN_LIMIT:
        plan = survey(plan, budget, progress)
    else:
        note = "the source is too large to be read in a dry run: sizes assume that no tensor needs float32 codebooks"
        plan = replace(plan, notes=(*plan.notes, note))
    if share is not None:
        mine = share.tensors(plan)
        size = sum(plan.rows[i].source_nbytes for i in mine)
        note = f"part {share} would make {len(mine)} of these tensors, from {size:,} bytes of the source"
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
    mixed_cpus : bool
        Accept tensors that were made on CPUs with different features.
    press : callable
        Makes the parts: ``quantize_tensors``, or the same on a cluster.
    calibration : Calibration, optional
    """

    plan: Plan
    folder: Path
    budget: MemoryBudget
    max_shard_size: int
    title: str
    progress: Progress
    mixed_cpus: bool = False
    press: Press = quantize_tensors
    calibration: Calibration | None = None
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
                self.begin(resume, overwrite)
            except BaseException:
                if self.journal.read() is None:
                    leave_no_trace(lock, existed)
                raise
            for note in filter(None, [*self.plan.notes, lock.note]):
                self.progress.note(note)
            if not resume_assembly(self.folder, progress=self.progress):
                log = RunLog(self.folder)
                log.start(self.budget.threads)
                with self._statistics():
                    made, resumed = self.press(
                        self.plan, self.parts, self.budget, log, self.progress, mixed_cpus=self.mixed_cpus
                    )
                self.assemble(made, log)
            manifest, _ = parse_manifest((self.folder / MANIFEST).read_bytes(), str(self.folder / MANIFEST))
            lock.release(remove=True)
        report = self.report(manifest["tensors"])
        return replace(report, seconds=time.monotonic() - started, resumed=resumed)

    @contextlib.contextmanager
    def _statistics(self) -> Iterator[None]:
        """What is known of the inputs is in the plan while tensors are made."""
        if self.calibration is None:
            yield
            return
        found = self.calibration.statistics(
            self.plan.source.path,
            self.folder / WORK_FOLDER,
            self.budget.threads,
            self.progress,
            self.plan.rotation,
        )
        with found.file:
            if self.calibration.tokens is not None:
                for note in found.notes(self.plan.rows):
                    self.progress.note(note)
            self.plan = replace(self.plan, statistics=found)
            try:
                yield
            finally:
                self.plan = replace(self.plan, statistics=None)

    @property
    def journal(self) -> Journal:
        """What the unfinished job in the folder is."""
        return Journal(self.folder)

    @property
    def parts(self) -> Path:
        """The folder of finished tensors."""
        return self.folder / WORK_FOLDER / PARTS

    def begin(self, resume: bool, overwrite: bool, *, keep_locks: bool = False) -> None:
        """Join the unfinished job in the folder if it is this one, else begin; settles identity and plan."""
        stored = self.journal.read() if resume else None
        if (self.folder / MANIFEST).is_file() and stored is None and not overwrite:
            raise _finished(self.folder)
        if stored is None:
            discard_job(self.folder, keep_locks=keep_locks)
        else:
            settings = {k: v for k, v in stored["identity"].items() if k != "source"}
            self.journal.require_same(settings, self._settings())  # at once; hashing may take minutes
        self.identity = {**self._settings(), "source": self._source()}
        if stored is not None:
            self.journal.require_same(stored["identity"], self.identity)
            self.plan = surveyed(self.plan, stored)
            return
        self.plan = survey(self.plan, self.budget, self.progress)
        largest = max(s.size for s in _shards(self.plan, self.max_shard_size))
        require_space(self.folder, self.plan.nbytes + largest)
        self.journal.write(self.identity, self.plan)

    def _settings(self) -> dict[str, Any]:
        """What the final bytes depend on, apart from the source."""
        settings = {
            "tool_version": trapetum.__version__,
            "architecture": self.plan.architecture.model_type,
            "recipe": self.plan.recipe.resolved(),
            "max_shard_size": self.max_shard_size,
        }
        if self.calibration is not None:
            settings["calibration"] = self.calibration.identity()
        return settings

    def _source(self) -> dict[str, Any]:
        """The source's name (and place on the Hub) and the hash of every file."""
        source = self.plan.source
        index = source.folder / INDEX
        paths = [*(f.path for f in source.files), *companions(source), *([index] if index.is_file() else [])]
        hashes = hash_files(paths, self.journal.hashes, self.budget.threads, self.progress)
        return {"name": self.title, **_hub_identity(source.folder), "files": hashes}

    def assemble(self, made: dict[str, Part], log: RunLog) -> None:
        """Make the artifact from the parts of all tensors; the caller holds the folder's lock."""
        if not self.mixed_cpus:
            require_one_cpu(self.folder, made.values())
        entries = {name: part.entry for name, part in made.items()}
        header = {
            "tool_version": trapetum.__version__,
            "source": self.identity["source"],
            "architecture": self.plan.architecture.model_type,
            "recipe": self.plan.recipe.resolved(),
        }
        if self.calibration is not None:
            header["calibration"] = self.identity["calibration"]
        if self.plan.rotation is not None:
            header["rotation"] = self.plan.rotation.to_json()
        manifest = build_manifest(header, entries)
        carried = read_front_matter(self.plan.source.folder)
        files: dict[str, bytes | Path] = {p.name: p for p in companions(self.plan.source)}
        files["config.json"] = artifact_config(self.plan.config, manifest)
        files["README.md"] = model_card(self.report(entries), self.title, self.identity["source"], carried)
        log.add(event="assemble")
        log.seal()
        assemble(self.folder, manifest, files, max_shard_bytes=self.max_shard_size, progress=self.progress)

    def report(self, entries: Mapping[str, dict[str, Any]]) -> Report:
        """On the tensors with these manifest entries."""
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


def leave_no_trace(lock: FolderLock, existed: bool) -> None:
    """Nothing was begun: remove what the attempt made, under the lock that keeps everyone else out."""
    discard_job(lock.folder)
    lock.release(remove=True)
    with contextlib.suppress(OSError):
        None if existed else lock.folder.rmdir()


def surveyed(plan: Plan, stored: Mapping[str, Any]) -> Plan:
    """The plan with what an earlier survey settled, from :meth:`Journal.read`."""
    rows = tuple(
        replace(r, wide=r.name in stored["wide"], scheme=scheme_from_spec(stored["schemes"][r.name]))
        for r in plan.rows
    )
    return replace(plan, rows=rows, notes=tuple(stored["notes"]), scanned=True)


def companions(source: AnyCheckpoint) -> list[Path]:
    """Files that travel with the weights: config, tokenizer, licences."""
    licences = [
        p for p in source.folder.iterdir() if p.name.isascii() and p.name.upper().startswith(_LICENCES)
    ]
    return sorted({*source.side_files(), *(p for p in licences if is_plain_name(p.name) and p.is_file())})
