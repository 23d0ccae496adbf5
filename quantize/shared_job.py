"""Several processes in one output folder: each makes its share of the tensors, ``merge_parts`` assembles the artifact.

Locks, all of them ``flock`` in ``DIR/.trapetum``, released by kill -9 too:

====================  =========================================================================================
``lock``              shared by the parts; alone by a run without parts and by the merge: these wait for no one
``begin.lock``        alone, for the time of ``Job.begin``: the first part surveys the source, the others wait
``part-I-of-N.lock``  alone, by that part: the same share is not done twice at once
====================  =========================================================================================

Correctness does not hang on them: a tensor that two processes make is published twice by rename, with equal bytes.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import trapetum
from trapetum.errors import CheckpointError, OutputError
from trapetum.formats.assemble import resume_assembly
from trapetum.formats.atomic import WORK_FOLDER, FolderLock
from trapetum.formats.manifest import MANIFEST
from trapetum.formats.output_folder import OUT, PARTS, output_state, read_commit
from trapetum.formats.packed_ternary import open_checkpoint
from trapetum.formats.parts import Part
from trapetum.hub import resolve_model
from trapetum.progress import Progress
from trapetum.quantize.identity import changed_files, companions, hash_files
from trapetum.quantize.job import Job, leave_no_trace, surveyed
from trapetum.quantize.journal import Journal, RunLog
from trapetum.quantize.plan import Plan, make_plan
from trapetum.quantize.recipe import resolve_recipe
from trapetum.quantize.report import Report
from trapetum.quantize.share import Share
from trapetum.quantize.stream import finished_part, quantize_tensors

__all__ = ["merge_parts", "reopen_plan", "run_share"]

_SHOWN = 4  # names of missing tensors in a message


def run_share(job: Job, share: Share, *, overwrite: bool = False) -> Report:
    """Make the tensors of one share that are not there yet.

    Parameters
    ----------
    job : Job
    share : Share
    overwrite : bool
        Whether a finished artifact in the folder may be replaced when the parts are merged.

    Returns
    -------
    Report
        On the tensors of this share; ``share`` says which.

    Raises
    ------
    OutputError
        If the same share, or a run without parts, is at work in the folder; as ``Job.run`` otherwise.
    """
    started = time.monotonic()
    existed = job.folder.exists()
    try:
        with FolderLock(job.folder, shared=True) as lock, FolderLock(job.folder, share.lock):
            with FolderLock(job.folder, "begin.lock", wait=job.progress.note):
                job.begin(True, overwrite, keep_locks=True)
            for note in filter(None, [*job.plan.notes, lock.note]):
                job.progress.note(note)
            if _being_merged(job.folder):
                raise OutputError(
                    f"{job.folder}: all parts are done, and a merge has begun",
                    hint=f"Finish it: trapetum merge {job.folder}",
                )
            mine = share.tensors(job.plan)
            log = RunLog(job.folder, share.label)
            log.start(job.budget.threads)
            made, resumed = quantize_tensors(
                job.plan, job.parts, job.budget, log, job.progress, mine, mixed_cpus=job.mixed_cpus
            )
    except BaseException:
        with contextlib.suppress(OutputError), FolderLock(job.folder) as alone:
            if job.journal.read() is None:
                leave_no_trace(alone, existed)
        raise
    rows = tuple(job.plan.rows[i] for i in mine)
    return Report(
        job.folder,
        replace(job.plan, rows=rows),
        {part.path.name: part.path.stat().st_size for part in made.values()},
        errors={n: e for n, p in made.items() if (e := p.entry["relative_error"]) is not None},
        seconds=time.monotonic() - started,
        predicted_memory=job.budget.peak,
        resumed=resumed,
        share=str(share),
        notes=job.plan.notes,
    )


def _being_merged(folder: Path) -> bool:
    work = folder / WORK_FOLDER
    return (work / OUT / MANIFEST).is_file() or read_commit(work) is not None


def merge_parts(
    folder: str | Path,
    *,
    source: str | Path | None = None,
    mixed_cpus: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Assemble the artifact of a job whose tensors are all made, by parts or any other way; then the work folder goes.

    A merge that was killed is taken up by the next; a folder that holds a finished artifact is left as it is.

    Parameters
    ----------
    folder : path
        The output folder of the parts.
    source : path, optional
        The source model, where it is no longer where the parts found it. Its weights are not read.
    mixed_cpus : bool
        Accept tensors that were made on CPUs with different features.
    progress : Progress, optional

    Returns
    -------
    Path
        ``folder``.

    Raises
    ------
    OutputError
        If tensors are missing (which, and whose), a part is still at work, or CPUs are mixed.
    CheckpointError
        If the source's config or tokenizer files are not those of the job.
    """
    folder = Path(folder)
    progress = progress or Progress()
    state = output_state(folder)
    if not state.job:
        if not state.artifact:
            raise OutputError(f"{folder}: holds no job to merge", hint="Name the -o of the parts.")
        progress.note(f"{folder}: already holds the finished artifact")
        return folder
    _refuse_living_parts(folder)
    with FolderLock(folder) as lock:
        if not resume_assembly(folder, progress=progress):
            _assemble(folder, source, mixed_cpus, progress)
        lock.release(remove=True)
    return folder


def _assemble(folder: Path, source: str | Path | None, mixed_cpus: bool, progress: Progress) -> None:
    stored = Journal(folder).read()
    if stored is None:
        raise OutputError(f"{folder}: no part has begun here yet", hint="Run the parts first.")
    if "calibration" in stored["identity"]:
        raise OutputError(
            f"{folder}: holds a job with calibration, which is not run in parts",
            hint="Give its own quantize command again: it goes on where it stopped.",
        )
    with reopen_plan(folder, stored, source) as plan:
        made = _all_parts(folder, plan, progress)
        identity = stored["identity"]
        _require_companions(plan, identity["source"]["files"])
        title, size = identity["source"]["name"], identity["max_shard_size"]
        job = Job(plan, folder, plan.budget(), size, title, progress, mixed_cpus)
        job.identity = identity
        log = RunLog(folder)
        log.collect()
        log.add(event="merge")
        job.assemble(made, log)


@contextlib.contextmanager
def reopen_plan(folder: Path, stored: dict[str, Any], model: str | Path | None = None) -> Iterator[Plan]:
    """The plan of the unfinished job in ``folder``, on the source that it names.

    Parameters
    ----------
    folder : Path
    stored : dict
        From ``Journal.read``.
    model : path, optional
        The source, where it has moved.

    Raises
    ------
    OutputError
        If another version of the tool began the job.
    CheckpointError
        If the source is not there.
    """
    identity = stored["identity"]
    if identity["tool_version"] != trapetum.__version__:
        raise OutputError(
            f"{folder}: the job was begun by trapetum {identity['tool_version']}; this is {trapetum.__version__}",
            hint="Use that version everywhere.",
        )
    origin = identity["source"]
    path = Path(model) if model is not None else Path(stored["model"])
    if model is None and not path.exists() and "repo" in origin:
        path = resolve_model(origin["repo"], revision=origin["commit"])
    if not path.exists():
        raise CheckpointError(
            f"{path}: the source model of the job in {folder} is not there",
            hint="Name the folder that holds it now: trapetum merge DIR --source MODEL",
        )
    with open_checkpoint(path) as source:
        known = identity["architecture"]
        plan = make_plan(source, resolve_recipe(identity["recipe"]), any_architecture=True)
        if plan.architecture.model_type != known or [r.name for r in plan.rows] != list(stored["schemes"]):
            raise CheckpointError(f"{path}: is not the source model of the job in {folder}")
        yield surveyed(plan, stored)


def _all_parts(folder: Path, plan: Plan, progress: Progress) -> dict[str, Part]:
    """Every tensor's part; else an error that says which are missing and whose they are."""
    parts = folder / WORK_FOLDER / PARTS
    progress.begin("checking parts", plan.nbytes)
    made: dict[str, Part] = {}
    missing: list[int] = []
    for i, row in enumerate(plan.rows):
        found = finished_part(plan, parts, i)
        if found is None:
            missing.append(i)
        else:
            made[row.name] = found
        progress.advance(row.nbytes)
    progress.end()
    if missing:
        raise _incomplete(folder, plan, missing)
    return made


def _incomplete(folder: Path, plan: Plan, missing: list[int]) -> OutputError:
    begun = _shares(folder)
    count = max((s.count for s in begun), default=1)
    lines = []
    for share in (Share(i, count) for i in range(1, count + 1)):
        mine = set(share.tensors(plan)).intersection(missing)
        if mine:
            names = [plan.rows[i].name for i in sorted(mine)]
            state = "stopped" if share in begun else "never begun"
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            lines.append(f"part {share} ({state}): {', '.join(names[:_SHOWN])}{more}")
    return OutputError(
        f"{folder}: {len(missing)} of {len(plan.rows)} tensors are missing: {'; '.join(lines)}",
        hint="Run these parts again with the same options, or the same command without --part, which does the rest.",
    )


def _shares(folder: Path) -> list[Share]:
    """The shares that ever began in a folder."""
    names = sorted(p.name for p in (folder / WORK_FOLDER).glob("part-*.lock"))
    return [share for name in names if (share := Share.of_lock(name)) is not None]


def _refuse_living_parts(folder: Path) -> None:
    for share in _shares(folder):
        try:
            with FolderLock(folder, share.lock):
                pass
        except OutputError as error:
            raise OutputError(
                f"part {share} is still at work: {error.message}", hint="Merge when all parts have ended."
            ) from None


def _require_companions(plan: Plan, hashes: dict[str, str]) -> None:
    """The small files that travel along must be those of the job; weights are not read again."""
    now = hash_files(companions(plan.source), None, 1)
    changed = changed_files({name: hashes.get(name, "") for name in now}, now)
    if changed:
        raise CheckpointError(
            f"{plan.source.path}: {changed[0]} is not the file that the job began with",
            hint="Restore it, or name an unchanged copy of the model with --source.",
        )
