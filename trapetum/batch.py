"""Many models, one after another: a TOML list of jobs, run to its end whatever single jobs do.

::

    [defaults]                      # any key of a job but model and out
    effort = "high"

    [[jobs]]
    model = "org/name"              # a folder (relative to this file) or a Hub id
    out = "out/name-4bit"           # relative to this file
    bits = 4
    export = ["cbk"]                # written beside the artifact, as `quantize --export` does

The keys are the parameters of ``quantize_model``. Nothing is kept between runs but the outputs: an artifact that is
finished, from a model of that name with that very recipe, is done; an unfinished job goes on; the rest begins.
"""

from __future__ import annotations

import time
import tomllib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trapetum.errors import RecipeError, TrapetumError
from trapetum.formats.manifest import MANIFEST, parse_manifest
from trapetum.formats.output_folder import output_state
from trapetum.progress import Progress

__all__ = ["BatchJob", "Outcome", "read_jobs", "run_batch"]


class BatchJob(BaseModel):
    """One model; see ``quantize_model`` for the options."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(min_length=1)
    out: str = Field(min_length=1)
    bits: float | None = None
    scheme: str | None = None
    recipe: str | None = None
    effort: Literal["fast", "default", "high"] = "default"
    threads: int | None = Field(default=None, ge=1)
    max_memory: int | None = Field(default=None, ge=1)
    seed: int = Field(default=0, ge=0)
    levels: int | None = None
    group_size: int | None = None
    hadamard: bool = False
    fallback: bool = True
    target_bpw: float | None = Field(default=None, gt=0)
    candidates: tuple[str, ...] | None = None
    rotate: Literal["residual"] | None = None
    calibrate: str | None = None
    calib_tokens: int | None = Field(default=None, ge=1)
    sequential: bool = False
    imatrix: str | None = None
    revision: str | None = None
    stream_download: bool = False
    overwrite: bool = False
    resume: bool = True
    any_architecture: bool = False
    max_shard_size: int = Field(default=5_000_000_000, ge=1)
    workers: int | None = Field(default=None, ge=1)
    scheduler: str | None = None
    mixed_cpus: bool = False
    export: tuple[str, ...] = ()


_RECIPE_OPTIONS = (
    *("bits", "scheme", "effort", "seed", "levels", "group_size", "hadamard", "fallback"),
    *("target_bpw", "candidates", "rotate"),
)
_PATHS = ("model", "recipe", "calibrate", "imatrix")


@dataclass(frozen=True)
class Outcome:
    """What became of one job.

    Parameters
    ----------
    model, out : str
    status : {"done", "was done", "failed"}
    seconds : float
    bpw, relative_error : float or None
        Over all tensors; where this run made the artifact.
    exports : tuple of str
        What was written beside it.
    error, hint : str or None
    """

    model: str
    out: str
    status: Literal["done", "was done", "failed"]
    seconds: float
    bpw: float | None = None
    relative_error: float | None = None
    exports: tuple[str, ...] = ()
    error: str | None = None
    hint: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {**asdict(self), "exports": list(self.exports), "seconds": round(self.seconds, 3)}


def read_jobs(path: str | Path) -> list[BatchJob]:
    """The jobs of a file, defaults filled in and paths made absolute.

    Raises
    ------
    RecipeError
        If the file is no TOML, a key is unknown or has a wrong value, an export format is unknown, or two jobs have
        one output: nothing runs before the whole list is right.
    """
    from trapetum.export import FORMATS

    path = Path(path)
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:  # not UTF-8, or not TOML
        raise RecipeError(f"{path}: is not a TOML file: {error}") from None
    defaults, listed = data.get("defaults", {}), data.get("jobs", [])
    if data.keys() - {"defaults", "jobs"} or not isinstance(defaults, dict) or not isinstance(listed, list):
        raise RecipeError(f"{path}: holds {', '.join(sorted(data))}; [defaults] and [[jobs]] are allowed")
    if not listed:
        raise RecipeError(f"{path}: lists no jobs", hint="Add [[jobs]] with model and out.")
    jobs: list[BatchJob] = []
    for number, entry in enumerate(listed, 1):
        where = f"{path}: job {number}"
        try:
            job = BatchJob.model_validate({**defaults, **entry})
        except (ValidationError, TypeError) as error:
            raise RecipeError(f"{where}: {_fault(error)}") from None
        unknown = [f for f in job.export if f not in FORMATS]
        if unknown:
            raise RecipeError(f"{where}: export: {unknown[0]!r} is not one of: {', '.join(FORMATS)}")
        job = _located(job, path.absolute().parent)
        if any(job.out == other.out for other in jobs):
            raise RecipeError(f"{where}: out is that of another job: {job.out}")
        jobs.append(job)
    return jobs


def _fault(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return "is no table"
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"


def _located(job: BatchJob, base: Path) -> BatchJob:
    """Paths of the file, made absolute; what is no path there stays a Hub id or the name of a recipe."""
    changes = {"out": str(base / job.out)}
    for key in _PATHS:
        value = getattr(job, key)
        if value is not None and (base / value).exists():
            changes[key] = str(base / value)
    return job.model_copy(update=changes)


def run_batch(
    jobs: list[BatchJob],
    *,
    token: str | None = None,
    progress: Progress | None = None,
    told: Callable[[Outcome], None] | None = None,
) -> list[Outcome]:
    """Run all jobs; one that fails stops no other.

    Parameters
    ----------
    jobs : list of BatchJob
        From :func:`read_jobs`.
    token : str, optional
        For Hub ids.
    progress : Progress, optional
    told : callable of Outcome, optional
        Called after each job.

    Returns
    -------
    list of Outcome
        In the order of ``jobs``.
    """
    outcomes = []
    for job in jobs:
        started = time.monotonic()
        try:
            outcome = _run(job, token, progress or Progress(), started)
        except TrapetumError as error:
            outcome = _failed(job, started, error.message, error.hint)
        except (OSError, MemoryError) as error:
            outcome = _failed(job, started, f"{type(error).__name__}: {error}", None)
        except Exception as error:  # a fault of ours in one job costs no other
            said = " ".join(f"{type(error).__name__}: {error}".split())
            hint = "This is a bug in trapetum: run this model alone with --debug and report the traceback."
            outcome = _failed(job, started, f"internal error: {said}", hint)
        outcomes.append(outcome)
        if told is not None:
            told(outcome)
    return outcomes


def _failed(job: BatchJob, started: float, error: str, hint: str | None) -> Outcome:
    return Outcome(job.model, job.out, "failed", time.monotonic() - started, error=error, hint=hint)


def _run(job: BatchJob, token: str | None, progress: Progress, started: float) -> Outcome:
    from trapetum.export import export_artifact, shard_size_for
    from trapetum.quantize.job import quantize_model

    out = Path(job.out)
    bpw = error = None
    made = not _is_done(job)
    if made:
        _check_exports(job, token, progress)
        options = job.model_dump(exclude={"model", "out", "export"})
        report = quantize_model(job.model, out, token=token, progress=progress, **options)
        bpw, error = report.bpw, report.mean_relative_error
    exports = []
    for format in job.export:
        target = out.with_name(f"{out.name}-{format}")
        if made or not target.exists():
            size = shard_size_for(format, job.max_shard_size)
            written = export_artifact(
                out, format, target, max_shard_size=size, overwrite=job.overwrite, progress=progress
            )
            exports.append(str(written))
    status: Literal["done", "was done"] = "done" if made or exports else "was done"
    return Outcome(job.model, job.out, status, time.monotonic() - started, bpw, error, exports=tuple(exports))


def _check_exports(job: BatchJob, token: str | None, progress: Progress) -> None:
    """Plan the exports on the model: what a format refuses is said before hours of work, not behind them."""
    from trapetum.export import plan_export
    from trapetum.hub import resolve_model

    out = Path(job.out)
    # What planes hold depends on the scheme alone; the weights of a streamed model are never here as a whole.
    for format in () if job.stream_download else job.export:
        if format != "planes":
            model = resolve_model(job.model, revision=job.revision, token=token, progress=progress)
            with plan_export(model, format, out.with_name(f"{out.name}-{format}"), overwrite=job.overwrite):
                pass


def _is_done(job: BatchJob) -> bool:
    """Whether ``out`` is the finished artifact of this job, by its recipe, its calibration and its source's name."""
    from trapetum.quantize.recipe import resolve_recipe
    from trapetum.quantize.routes import job_calibration

    out = Path(job.out)
    state = output_state(out)
    if not state.artifact or state.job:
        return False
    manifest, _ = parse_manifest((out / MANIFEST).read_bytes(), str(out / MANIFEST))
    source = manifest["source"]
    known = source.get("repo") == job.model or source.get("name") == Path(job.model).resolve().name
    recipe = resolve_recipe(job.recipe, **{k: getattr(job, k) for k in _RECIPE_OPTIONS})
    wanted, found = recipe.resolved(), manifest["recipe"]
    if recipe.target_bpw is not None:  # what the budget was spent on stands in the rules
        wanted, found = ({k: v for k, v in r.items() if k != "rules"} for r in (wanted, found))
    calibration = job_calibration(job.calibrate, job.calib_tokens, job.imatrix, job.sequential)
    same = manifest.get("calibration") == (None if calibration is None else calibration.identity())
    return known and same and bool(wanted == found)
