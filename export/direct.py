"""Model -> .cbk without an artifact between them: the same bytes as quantize and export, half the disk.

The job is the same as for an artifact: its folder holds ``.trapetum`` with the job's identity while work is unfinished
(``quantize.job``), and here also the growing file and its journal (``formats.cbk_resume``). What the exporter reads is
made when it is asked for (``quantize.pressed``). When the file is whole, the output folder appears under its name and
the job's folder is removed.

A kill at any moment loses at most the records since the last line of the journal; the next run with the same arguments
goes on.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trapetum.errors import RecipeError
from trapetum.export.cbk import CbkPlan, plan_cbk
from trapetum.export.plan import ExportRequest
from trapetum.formats.atomic import WORK_FOLDER, FolderLock
from trapetum.formats.cbk_manifest import MODEL_FILE
from trapetum.formats.output_folder import discard_job
from trapetum.formats.source import TensorSource
from trapetum.quantize.identity import companions
from trapetum.quantize.job import leave_no_trace
from trapetum.quantize.journal import RunLog
from trapetum.quantize.pressed import PressedSource
from trapetum.quantize.report import Report

if TYPE_CHECKING:
    from trapetum.quantize.job import Job

__all__ = ["DirectCbk", "forecast_cbk"]


def forecast_cbk(report: Report, out: Path, magic: str | None = None) -> CbkPlan:
    """The .cbk that an export of the artifact of a dry run would be.

    Raises
    ------
    UnsupportedModelError
        If no .cbk holds the model.
    """
    return plan_cbk(ExportRequest(PressedSource(report.plan, report.out, []), out, magic=magic))


class DirectCbk:
    """A :class:`~trapetum.quantize.pressed.Route` to a .cbk folder.

    Parameters
    ----------
    out : Path, optional
        The folder; beside the job's, with ``-cbk`` after its name, by default.
    overwrite : bool
        Whether it may be replaced.
    threads : int, optional
    magic : str, optional
        See ``export_artifact``.

    Attributes
    ----------
    plan : CbkPlan or None
        What was planned or written last.
    """

    def __init__(
        self,
        out: Path | None = None,
        *,
        overwrite: bool = False,
        threads: int | None = None,
        magic: str | None = None,
    ) -> None:
        self.out, self.overwrite, self.threads, self.magic = out, overwrite, threads, magic
        self.plan: CbkPlan | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """Part of the job's identity."""
        return {"export": {"format": "cbk", "magic": self.magic}}

    def target(self, job: Job) -> Path:
        """The output folder."""
        return self.out or job.folder.with_name(f"{job.folder.resolve().name}-cbk")

    def _plan(self, job: Job, source: TensorSource, *, overwrite: bool | None = None) -> CbkPlan:
        request = ExportRequest(
            source,
            self.target(job),
            overwrite=self.overwrite if overwrite is None else overwrite,
            threads=self.threads,
            magic=self.magic,
        )
        self.plan = plan_cbk(request)
        return self.plan

    def preview(self, report: Report, job: Job) -> Report:
        """The exact size of the file."""
        plan = self._plan(job, PressedSource(report.plan, job.folder, companions(job.plan.source)))
        return replace(
            report,
            out=self.target(job),
            weight_files=dict(plan.files),
            notes=(*report.notes, *plan.notes),
        )

    def run(self, job: Job, *, resume: bool, overwrite: bool) -> Report:
        """Write the folder; see :meth:`Job.run`.

        Raises
        ------
        OutputError
            If the output exists, the folder is locked or holds another job, or cannot be written.
        UnsupportedModelError
            If no .cbk holds the model.
        """
        if job.stream is not None:
            raise RecipeError(
                "a streamed download is made into an artifact; it cannot go straight to a .cbk",
                hint="Leave --stream-download or --drop-artifact out.",
            )
        if job.calibration is not None and job.calibration.sequential:
            raise RecipeError(
                "sequential calibration makes an artifact layer after layer; it cannot go straight to a .cbk",
                hint="Leave --sequential or --drop-artifact out.",
            )
        started = time.monotonic()
        existed = job.folder.exists()
        work = job.folder / WORK_FOLDER / MODEL_FILE
        out = self.target(job)
        # A run that was killed between the publication and the cleaning of its folder leaves two names of one file.
        published = _same_file(work, out / MODEL_FILE)
        self._plan(
            job, job.plan.source, overwrite=published or None
        )  # says what does not fit before any work
        with FolderLock(job.folder) as lock:
            try:
                job.begin(resume, overwrite=True)
            except BaseException:
                if job.journal.read() is None:
                    leave_no_trace(lock, existed)
                raise
            for note in filter(None, [*job.plan.notes, lock.note]):
                job.progress.note(note)
            log = RunLog(job.folder)
            log.start(job.budget.threads)
            with job.statistics():
                identity = job.identity["source"]
                source = PressedSource(job.plan, job.folder, companions(job.plan.source), identity)
                plan = self._plan(job, source, overwrite=published or None)
                errors, resumed = plan.write_resumably(work, source.error_of, job.progress)
            discard_job(job.folder)
            lock.release(remove=True)
        with contextlib.suppress(OSError):
            job.folder.rmdir()
        return Report(
            out,
            job.plan,
            dict(plan.files),
            errors=errors,
            seconds=time.monotonic() - started,
            predicted_memory=job.budget.peak,
            resumed=resumed,
            notes=(*job.plan.notes, *plan.notes),
        )


def _same_file(one: Path, two: Path) -> bool:
    try:
        return one.samefile(two)
    except OSError:
        return False
