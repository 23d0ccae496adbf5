"""Threads for everything that runs on the CPU: numbered pieces of work on one pool, BLAS kept to one thread.

Pieces are cut by shape alone, never by the number of threads, and no two pieces write the same output: a
result has the same bits at any thread count. BLAS would split differently for every count, so inside
:meth:`Pool.session` it runs single threaded and the pieces (row tiles, row blocks, heads) are what is
spread.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import copy_context
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from trapetum.errors import RecipeError

if TYPE_CHECKING:
    from trapetum.kernels.cpu.crew import Crew

__all__ = ["Pool", "available_cpus"]

_session_lock = Lock()
_sessions = 0
_limit: Any = None


def available_cpus() -> int:
    """Number of CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Pool:
    """A fixed number of threads; they start with the first piece of work that needs them.

    Parameters
    ----------
    threads : int, optional
        All CPUs of this process when omitted.

    Raises
    ------
    RecipeError
        If ``threads`` is not positive.
    """

    def __init__(self, threads: int | None = None) -> None:
        if threads is not None and threads < 1:
            raise RecipeError(f"threads is {threads}; at least 1 is needed")
        self.threads = available_cpus() if threads is None else threads
        self._crew: Crew | None = None
        self._crew_lock = Lock()

    @cached_property
    def _executor(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self.threads, thread_name_prefix="trapetum")

    @cached_property
    def _blas(self) -> Any:
        from threadpoolctl import ThreadpoolController

        return ThreadpoolController()

    def close(self) -> None:
        """End the threads; they start again if there is more work."""
        with self._crew_lock:
            if self._crew is not None:
                self._crew.close()
                self._crew = None
        if "_executor" in self.__dict__:
            self._executor.shutdown()
            del self._executor

    @contextmanager
    def session(self) -> Iterator[None]:
        """One BLAS thread for the length of the block (about 50 us to enter and leave: wrap loops, not steps).

        BLAS has one setting for the whole process: of blocks that overlap, in any threads, the first sets it and the
        last one restores it.
        """
        global _sessions, _limit
        with _session_lock:
            if _sessions == 0:
                _limit = self._blas.limit(limits=1, user_api="blas")
            _sessions += 1
        try:
            yield
        finally:
            with _session_lock:
                _sessions -= 1
                if _sessions == 0:
                    _limit.restore_original_limits()

    def run(self, piece: Callable[[int], object], count: int) -> None:
        """Call ``piece(0) .. piece(count - 1)`` in any order; the first exception is raised.

        The caller works too, and threads take the next number when they are free: one submission a thread, not one
        a piece (20 us each), and a helper that has not started when the work is done is not waited for. Threads inherit
        the caller's context, so ``np.errstate`` around a run holds in all of them.
        """
        if count == 1 or self.threads == 1:
            for i in range(count):
                piece(i)
            return
        numbers = iter(range(count))

        def work() -> None:
            for i in numbers:
                piece(i)

        helpers = [
            self._executor.submit(copy_context().run, work) for _ in range(min(self.threads, count) - 1)
        ]
        try:
            work()
        finally:
            started = [helper for helper in helpers if not helper.cancel()]
            wait(started)
        for helper in started:
            helper.result()

    def execute(self, operations: NDArray[np.int64], counters: NDArray[np.int64]) -> None:
        """Run a program of ``kernels.cpu.program`` on all threads; ``counters`` is overwritten."""
        from trapetum.kernels.cpu.crew import Crew, run

        if self.threads == 1:
            run(operations, counters)
            return
        with self._crew_lock:
            if self._crew is None or self._crew.process != os.getpid():
                self._crew = Crew(self.threads - 1)
            crew = self._crew
        crew.execute(operations, counters)

    def blocks(self, piece: Callable[[slice], object], total: int, size: int) -> None:
        """Call ``piece`` for consecutive slices of ``range(total)``, each of ``size`` (the last one shorter)."""
        size = max(1, size)
        self.run(lambda i: piece(slice(i * size, min(total, (i + 1) * size))), -(-total // size))
