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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    parse_manifest,
)
from trapetum.formats.names import text_name
from trapetum.formats.output_folder import PARTS, discard_job, output_state
from trapetum.formats.packed_ternary import open_checkpoint
from trapetum.formats.parts import Part
from trapetum.hub import resolve_model
from trapetum.hub_stream import HubStream, open_stream
from trapetum.models.residual import RotatedCheckpoint
from trapetum.progress import Progress
from trapetum.quantize.blocks import MemoryBudget
from trapetum.quantize.budget import allocate, budgeted
from trapetum.quantize.card import model_card, read_front_matter
from trapetum.quantize.config_only import ConfigCheckpoint, has_only_config
from trapetum.quantize.cpu import require_one_cpu
from trapetum.quantize.forecast import forecast, shards_of
from trapetum.quantize.identity import companions, hash_files, hub_identity, model_name
from trapetum.quantize.journal import Journal, RunLog
from trapetum.quantize.plan import Plan, make_plan
from trapetum.quantize.recipe import Recipe, resolve_recipe
from trapetum.quantize.report import Report
from trapetum.quantize.routes import check_routes, check_stream, job_calibration
from trapetum.quantize.schemes import scheme_from_spec
from trapetum.quantize.share import Share
from trapetum.quantize.statistics import Calibration, Statistics
from trapetum.quantize.stream import quantize_tensors
from trapetum.quantize.streamed import quantize_streamed
from trapetum.quantize.survey import survey
from trapetum.quantize.ternary import cost_note
from trapetum.runtime.calibrate import TOKENS

if TYPE_CHECKING:
    from trapetum.quantize.pressed import Route

__all__ = ["Job", "Press", "companions", "leave_no_trace", "quantize_model", "surveyed"]

RECIPE = "recipe.toml"  # beside the weights where a budget was spent: gives the same bytes again
Press = Callable[..., tuple[dict[str, Part], int]]


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
    target_bpw: float | None = None,
    candidates: Sequence[str] | None = None,
    rotate: str | None = None,
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
    sequential: bool = False,
    imatrix: str | Path | None = None,
    stream_download: bool = False,
    route: Route | None = None,
    progress: Progress | None = None,
) -> Report:
    """Quantize a checkpoint into an artifact folder.

    Parameters
    ----------
    model : str or Path
        A folder (or one ``.safetensors`` or ``.gguf`` file), or a Hub id.
    out : str or Path, optional
        The artifact folder; ``NAME-trapetum-RECIPE`` in the current folder by default.
    bits, scheme, recipe, effort, seed, levels, group_size, hadamard, fallback, target_bpw, candidates, rotate
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
    sequential : bool
        With ``calibrate``: each layer sees what the layers before it have become, and makes up for it
        (``quantize.sequential``); three times the calibration.
    imatrix : path-like, optional
        An importance matrix of llama.cpp, or second moments of ``trapetum imatrix --hessian``.
    stream_download : bool
        Fetch the weight files of a Hub id one after another and remove each when its tensors are done: the disk holds
        two of them at most. The bytes are the same.
    route : Route, optional
        What to make instead of an artifact; ``out`` then holds the unfinished work only.
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
    check_routes(share, workers, scheduler, resume)
    calibration = job_calibration(calibrate, calib_tokens, imatrix, sequential)
    if calibration is not None and (share is not None or workers is not None or scheduler is not None):
        raise RecipeError(
            "a job with calibration or an importance file is not spread over processes",
            hint="Leave out part, workers and scheduler.",
        )
    if stream_download:
        check_stream(model, share, workers, scheduler, calibrate)
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
        target_bpw=target_bpw,
        candidates=candidates,
        rotate=rotate,
    )
    if resolved.rotate is not None and (imatrix is not None or stream_download):
        raise RecipeError(
            "rotate residual goes with neither an importance file, which knows the inputs before the rotation, nor a "
            "streamed download",
            hint="Use --calibrate, which runs the rotated model." if imatrix is not None else None,
        )
    with contextlib.ExitStack() as stack:
        stream = None
        if stream_download:
            stream = stack.enter_context(
                open_stream(str(model), revision=revision, token=token, progress=progress)
            )
            source = stream.source
        else:
            path = resolve_model(model, revision=revision, token=token, progress=progress)
            source = ConfigCheckpoint(path) if dry_run and has_only_config(path) else open_checkpoint(path)
            stack.callback(source.close)
        name = model_name(source)
        folder = Path(out) if out is not None else Path(f"{name}-trapetum-{resolved.name}")
        refuse_overlap(folder, [source.folder, *(f.path for f in source.files)])
        state = output_state(folder)
        if state.artifact and not state.job and not (overwrite or dry_run):
            raise _finished(folder)
        plan = make_plan(source, resolved, any_architecture=any_architecture)
        if budgeted(plan) and stream is not None:
            raise RecipeError(
                "a bit budget looks at every tensor before the first is made, a streamed download has them one by one",
                hint="Leave one of them out, or give a recipe that a run with the budget has left behind.",
            )
        if (cost := cost_note(plan)) is not None:
            plan = replace(plan, notes=(*plan.notes, cost))
        if imatrix is not None:
            with open_statistics(imatrix) as file:  # what it does not fit is said before any work
                plan = replace(plan, notes=(*plan.notes, *Statistics(file).notes(plan.rows)))
        budget = plan.budget(threads, max_memory)
        job = Job(
            plan,
            folder,
            budget,
            max_shard_size,
            text_name(name),
            progress,
            mixed_cpus,
            calibration=calibration,
            stream=stream,
            extra={} if route is None else route.settings,
        )
        if dry_run:
            with open_statistics(imatrix) if imatrix is not None else contextlib.nullcontext() as file:
                known = replace(plan, statistics=None if file is None else Statistics(file, plan.rotation))
                plan = replace(allocate(known, budget.threads, progress), statistics=None)
            remote = stream is not None or isinstance(source, ConfigCheckpoint)
            report = forecast(plan, budget, folder, max_shard_size, share, progress, remote=remote)
            return report if route is None else route.preview(report, job)
        if route is not None:
            return route.run(job, resume=resume, overwrite=overwrite)
        if share is not None:
            from trapetum.quantize.shared_job import run_share

            return run_share(job, share, overwrite=overwrite)
        if workers is not None or scheduler is not None:
            from trapetum.cluster import Cluster

            job.press = Cluster(scheduler, workers).press
        return job.run(resume=resume, overwrite=overwrite)


def _finished(folder: Path) -> OutputError:
    return OutputError(
        f"{folder}: already holds a finished artifact",
        hint="Choose another output with -o, or replace it with --overwrite.",
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
    stream : HubStream, optional
        Where the weights come from file by file; the plan's source is its source.
    extra : mapping
        More settings that make the job what it is.
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
    stream: HubStream | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
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
                with self.statistics():
                    made, resumed = self._make(log)
                self.assemble(made, log)
            manifest, _ = parse_manifest((self.folder / MANIFEST).read_bytes(), str(self.folder / MANIFEST))
            lock.release(remove=True)
        report = self.report(manifest["tensors"])
        return replace(report, seconds=time.monotonic() - started, resumed=resumed)

    def _make(self, log: RunLog) -> tuple[dict[str, Part], int]:
        """The parts that are not there yet; a plan that is surveyed on the way is settled after it."""
        where = (self.plan, self.parts, self.budget, log, self.progress)
        if self.calibration is not None and self.calibration.sequential:
            from trapetum.quantize.sequential import press_in_order

            text, tokens = self.calibration.path, self.calibration.tokens or TOKENS
            return press_in_order(text, tokens, *where, mixed_cpus=self.mixed_cpus)
        if self.stream is None:
            return self.press(*where, mixed_cpus=self.mixed_cpus)
        made, resumed, plan = quantize_streamed(self.stream, *where, self.mixed_cpus)
        self.plan = replace(plan, statistics=self.plan.statistics)
        return made, resumed

    @contextlib.contextmanager
    def statistics(self, aloud: bool = True) -> Iterator[None]:
        """What is known of the inputs is in the plan while tensors are measured or made."""
        if self.calibration is None or (self.calibration.sequential and aloud):  # stages bring their own
            yield
            return
        source = self.plan.source
        found = self.calibration.statistics(
            source if isinstance(source, RotatedCheckpoint) else source.path,
            self.folder / WORK_FOLDER,
            self.budget.threads,
            self.progress,
            self.plan.rotation,
        )
        with found.file:
            if aloud and self.calibration.tokens is not None:
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
            if self.stream is None:
                self.plan = surveyed(self.plan, stored)
            return
        if self.stream is None:
            with self.statistics(aloud=False) if budgeted(self.plan) else contextlib.nullcontext():
                text = None if self.calibration is None else self.calibration.text
                self.plan = allocate(self.plan, self.budget.threads, self.progress, text)
            self.plan = survey(self.plan, self.budget, self.progress)
        largest = max(s.size for s in shards_of(self.plan, self.max_shard_size))
        coming = 0 if self.stream is None else self.stream.most_bytes
        require_space(self.folder, self.plan.nbytes + largest + coming)
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
        return settings | dict(self.extra)

    def _source(self) -> dict[str, Any]:
        """The source's name (and place on the Hub) and the hash of every file."""
        source = self.plan.source
        index = source.folder / INDEX
        known = {} if self.stream is None else self.stream.hashes
        paths = [*(f.path for f in source.files), *companions(source), *([index] if index.is_file() else [])]
        here = [p for p in paths if p.name not in known]
        hashes = hash_files(here, self.journal.hashes, self.budget.threads, self.progress)
        hashes |= {text_name(p.name): known[p.name] for p in paths if p.name in known}
        return {"name": self.title, **hub_identity(source.path), "files": dict(sorted(hashes.items()))}

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
        if self.plan.recipe.target_bpw is not None:
            files[RECIPE] = self.plan.recipe.to_toml().encode()
        files["README.md"] = model_card(self.report(entries), self.title, self.identity["source"], carried)
        log.add(event="assemble")
        log.seal()
        assemble(self.folder, manifest, files, max_shard_bytes=self.max_shard_size, progress=self.progress)

    def report(self, entries: Mapping[str, dict[str, Any]]) -> Report:
        """On the tensors with these manifest entries."""
        errors = {n: e["relative_error"] for n, e in entries.items() if e["relative_error"] is not None}
        files = {s.file: s.size for s in shards_of(self.plan, self.max_shard_size)}
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
    recipe = resolve_recipe(stored["recipe"])
    return replace(plan, rows=rows, recipe=recipe, notes=tuple(stored["notes"]), scanned=True)
