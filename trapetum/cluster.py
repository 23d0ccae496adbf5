"""One job over many processes: Dask workers make the tensors, this process plans, watches and assembles.

A task is a few tensors, named by number. Its worker opens the source itself, reads the plan from the job's folder (the
same folder for all: a shared file system) and publishes each tensor's part by rename, as a run without a cluster does;
only numbers and times travel over the network. So a task may run twice, or be cut off and run elsewhere: when a worker
dies, Dask gives its tasks to another, and whole parts are taken over. The bytes are those of a single run.

``workers`` starts that many local processes (spawned, never forked); ``scheduler`` uses a cluster that is already
there. Workers are trusted like this process: whoever can reach a scheduler can run code on its workers.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trapetum.errors import KernelUnavailable, OutputError
from trapetum.progress import Progress
from trapetum.quantize.blocks import MemoryBudget
from trapetum.quantize.journal import Journal, RunLog
from trapetum.quantize.plan import Plan

if TYPE_CHECKING:
    from distributed import Client, Future

    from trapetum.formats.parts import Part

__all__ = ["Cluster"]

_TASK_BYTES = 32 << 20  # of source in a task: seconds of work, far above the few ms that Dask spends on one
_WAIT_SECONDS = 60
_DEATHS = 3  # workers that a task may outlive; Dask's own default


@dataclass(frozen=True)
class Cluster:
    """Where the work is done.

    Parameters
    ----------
    scheduler : str or None
        Address of a Dask scheduler, such as ``tcp://10.0.0.5:8786``; ``tls://`` with Dask's own configuration.
    workers : int or None
        Number of local processes, where there is no scheduler.
    """

    scheduler: str | None = None
    workers: int | None = None

    def press(
        self,
        plan: Plan,
        parts: Path,
        budget: MemoryBudget,
        log: RunLog,
        progress: Progress,
        *,
        mixed_cpus: bool = False,
    ) -> tuple[dict[str, Part], int]:
        """Make the parts that are not there yet; stands in for ``quantize_tensors``.

        Parameters
        ----------
        plan : Plan
            Surveyed, and stored in the folder's journal.
        parts, budget, log, progress
            As for ``quantize_tensors``. The threads are spread over local workers; one tensor takes one thread.
        mixed_cpus : bool
            Not looked at here: whoever assembles sees all parts.

        Raises
        ------
        KernelUnavailable
            If Dask is not installed, or no worker can be reached.
        OutputError
            If the workers do not share the folder, or a tensor outlived several of them.
        """
        from trapetum.quantize.stream import finished_part

        progress.begin("quantize", sum(r.source_nbytes for r in plan.rows))
        made: dict[int, Part] = {}
        for i, row in enumerate(plan.rows):
            found = finished_part(plan, parts, i)
            if found is not None:
                made[i] = found
                progress.advance(row.source_nbytes)
        resumed = len(made)
        todo = [i for i in range(len(plan.rows)) if i not in made]
        if todo:
            folder = parts.parent.parent
            with self._client(budget, progress) as client:
                self._run(client, plan, folder, todo, budget.block_weights, log, progress)
            for i in todo:
                part = finished_part(plan, parts, i)
                if part is None:
                    raise OutputError(
                        f"{folder}: tensor {plan.rows[i].name} was made by a worker but is not whole here",
                        hint="Run the same command again: what is done stays.",
                    )
                made[i] = part
        progress.end()
        return {row.name: made[i] for i, row in enumerate(plan.rows)}, resumed

    @contextlib.contextmanager
    def _client(self, budget: MemoryBudget, progress: Progress) -> Iterator[Client]:
        try:
            import dask
            import distributed
        except ImportError:
            raise KernelUnavailable(
                "workers and schedulers need dask and distributed, which are not installed",
                hint="pip install 'trapetum[cluster]'",
            ) from None
        with contextlib.ExitStack() as stack:
            address = self.scheduler
            if address is None:
                count = self.workers or 1
                scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="trapetum-dask-"))
                stack.enter_context(dask.config.set({"distributed.worker.multiprocessing-method": "spawn"}))
                address = stack.enter_context(
                    distributed.LocalCluster(
                        n_workers=count,
                        threads_per_worker=max(1, budget.threads // count),
                        processes=True,
                        host="127.0.0.1",
                        dashboard_address=None,
                        silence_logs=logging.CRITICAL,
                        memory_limit=0,  # tasks are cut to the job's own budget
                        local_directory=scratch,
                    )
                )
            try:
                client = stack.enter_context(distributed.Client(address, set_as_default=False))
                if not client.nthreads():
                    progress.note(f"{address}: the scheduler has no workers yet; waiting for the first")
                    client.wait_for_workers(1, timeout=_WAIT_SECONDS)
            except (OSError, TimeoutError, ValueError) as error:
                raise KernelUnavailable(
                    f"{self.scheduler}: no Dask cluster with workers there ({type(error).__name__})",
                    hint="Check the address, such as tcp://HOST:8786, and that workers are connected.",
                ) from error
            yield client

    def _run(
        self,
        client: Client,
        plan: Plan,
        folder: Path,
        todo: list[int],
        block_weights: int,
        log: RunLog,
        progress: Progress,
    ) -> None:
        from distributed import as_completed

        slots = sum(client.nthreads().values())
        progress.note(f"{len(client.nthreads())} workers with {slots} threads")
        digest = _digest(folder)
        tasks: dict[Future[Any], list[int]] = {}
        try:
            for numbers in _tasks(plan, todo, slots):
                future = client.submit(
                    _make,
                    str(folder.absolute()),
                    digest,
                    numbers,
                    block_weights,
                    key=f"trapetum-{numbers[0]}-{uuid.uuid4().hex}",
                    pure=False,
                )
                tasks[future] = numbers
            for future in as_completed(list(tasks), loop=client.loop):
                for record in _result(future, plan, tasks[future]):
                    log.add(**record)
                    size = next(r.source_nbytes for r in plan.rows if r.name == record["name"])
                    progress.advance(size, f"{record['name']}  {record['seconds']:.1f} s  {record['worker']}")
        finally:
            client.cancel(list(tasks))


def _tasks(plan: Plan, todo: list[int], slots: int) -> list[list[int]]:
    """Numbers of tensors, largest first, small ones together."""
    total = sum(plan.rows[i].source_nbytes for i in todo)
    least = min(_TASK_BYTES, total // (4 * slots))
    tasks: list[list[int]] = []
    room = 0
    for i in sorted(todo, key=lambda i: (-plan.rows[i].source_nbytes, i)):
        size = plan.rows[i].source_nbytes
        if size > room:
            tasks.append([])
            room = max(least, size)
        tasks[-1].append(i)
        room -= size
    return tasks


def _result(future: Future[Any], plan: Plan, numbers: list[int]) -> list[dict[str, Any]]:
    from distributed import KilledWorker

    name = plan.rows[numbers[0]].name
    try:
        return future.result()  # type: ignore[no-any-return]
    except KilledWorker:
        raise OutputError(
            f"tensor {name}: {_DEATHS} workers or more died while they made it (out of memory?)",
            hint="Give a smaller --max-memory, or workers with more of it; what is done stays.",
        ) from None
    except ModuleNotFoundError as error:
        raise KernelUnavailable(
            f"a worker cannot import {error.name}", hint="Install the same trapetum on all workers."
        ) from None


def _digest(folder: Path) -> str:
    """Of the job in a folder, to tell one shared folder from two of the same name."""
    stored = Journal(folder).read()
    return hashlib.sha256(json.dumps(stored, sort_keys=True).encode()).hexdigest()


class _Records(RunLog):
    """What a worker would write to the log; the one process that holds the folder writes it."""

    def __init__(self, worker: str) -> None:
        self.worker = worker
        self.lines: list[dict[str, Any]] = []

    def add(self, **fields: Any) -> None:
        self.lines.append({**fields, "worker": self.worker})


def _make(folder: str, digest: str, numbers: list[int], block_weights: int) -> list[dict[str, Any]]:
    """Runs on a worker: publish the parts of some tensors that are not there yet."""
    from distributed import get_worker

    from trapetum.formats.atomic import WORK_FOLDER
    from trapetum.formats.output_folder import PARTS
    from trapetum.quantize.stream import quantize_tensors

    log = _Records(get_worker().address)
    parts = Path(folder) / WORK_FOLDER / PARTS
    budget = MemoryBudget(1, block_weights, 0)
    plan, _ = _plan(folder, digest)
    made, resumed = quantize_tensors(plan, parts, budget, log, Progress(), numbers, mixed_cpus=True)
    if resumed:  # a worker before this one published them and died before it could say so
        told = {line["name"] for line in log.lines}
        for name in made.keys() - told:
            log.add(event="tensor", name=name, seconds=0.0)
    return log.lines


@functools.lru_cache(maxsize=1)
def _plan(folder: str, digest: str) -> tuple[Plan, contextlib.ExitStack]:
    """The job's plan on this worker, and what keeps its source open; one at a time."""
    from trapetum.quantize.shared_job import reopen_plan

    path = Path(folder)
    stored = Journal(path).read()
    if stored is None or _digest(path) != digest:
        raise OutputError(
            f"{folder}: a worker does not see the job in this folder",
            hint="The output must lie on a file system that all workers share, under the same path.",
        )
    stack = contextlib.ExitStack()
    return stack.enter_context(reopen_plan(path, stored)), stack
