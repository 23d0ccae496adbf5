"""Threads that run programs together: every tile once, in order of need, whoever wakes when."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trapetum.kernels.cpu.crew import Crew
from trapetum.kernels.cpu.memory import array
from trapetum.kernels.cpu.pool import Pool
from trapetum.runtime.program import Program


def grow_step(a: Any, begin: int, end: int) -> None:
    """x, y, size: every number of y becomes the sum of all x, plus one; numbers begin .. end - 1."""
    x, y = array(a[0], np.int64, (a[2],)), array(a[1], np.int64, (a[2],))
    total = 0
    for i in range(a[2]):
        total += x[i]
    for i in range(begin, end):
        y[i] += total + 1  # not "=": a tile that ran twice would show


class Chain:
    """Operations of which each needs all of the one before; ``expected`` follows from sizes alone."""

    def __init__(self, pool: Pool, sizes: list[tuple[int, int]], count: int = 64) -> None:
        self.program = Program(pool)
        self.arrays = [np.zeros(count, np.int64) for _ in range(len(sizes) + 1)]
        for x, y, (total, tile) in zip(self.arrays, self.arrays[1:], sizes):
            self.program.add(grow_step, [x, y, count], total, tile)
        self.expected, sum_before = [], 0
        for total, _ in sizes:
            self.expected.append([sum_before + 1] * total + [0] * (count - total))
            sum_before = (sum_before + 1) * total

    def check(self, run: Any) -> None:
        """Run once from zeros."""
        for one in self.arrays:
            one[:] = 0
        run()
        assert [one.tolist() for one in self.arrays[1:]] == self.expected


SIZES = [(64, 1), (1, 1), (64, 64), (3, 2), (64, 7), (5, 5), (2, 1), (64, 63)]


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_every_tile_runs_once_and_in_order_of_need(threads: int) -> None:
    pool = Pool(threads)
    chain = Chain(pool, SIZES)
    run = chain.program.runner()
    for number in range(150):
        if number % 50 == 0:
            time.sleep(0.01)  # so that helpers sleep
        chain.check(run)
    pool.close()
    chain.check(run)  # a closed pool starts again
    pool.close()


def test_several_callers_share_a_crew() -> None:
    pool, failures = Pool(3), []

    def work(seed: int) -> None:
        chain = Chain(pool, [SIZES[i] for i in np.random.default_rng(seed).permutation(4)])
        run = chain.program.runner()
        try:
            for _ in range(100):
                chain.check(run)
        except AssertionError as error:
            failures.append(error)

    callers = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    pool.close()
    assert not failures


def _helpers() -> int:
    return sum(thread.name.startswith("trapetum-crew") for thread in threading.enumerate())


def _wait_for(count: int) -> None:
    gc.collect()
    end = time.monotonic() + 120
    while _helpers() > count and time.monotonic() < end:
        time.sleep(0.01)
    assert _helpers() == count


def test_helpers_end_with_their_pool() -> None:
    gc.collect()
    before, pool = _helpers(), Pool(4)
    chain = Chain(pool, SIZES)
    chain.program.runner()()
    assert _helpers() == before + 3
    del pool, chain
    _wait_for(before)


def test_a_crew_that_cannot_start_leaves_no_helper(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()
    before, start, started = _helpers(), threading.Thread.start, []

    def fail_at_the_third(thread: threading.Thread) -> None:
        started.append(thread.name)
        if len(started) == 3:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fail_at_the_third)
    with pytest.raises(RuntimeError):
        Crew(4)
    monkeypatch.undo()
    _wait_for(before)


def test_a_collector_that_ends_a_crew_does_not_wait_for_the_compiler() -> None:
    from numba.core.compiler_lock import global_compiler_lock

    gc.collect()
    before = _helpers()
    with global_compiler_lock:
        crew = Crew(1)
        del crew
        gc.collect()
    _wait_for(before)


_FORK = """
import os, sys, warnings
sys.path.insert(0, {folder!r})
warnings.simplefilter("ignore")
from test_crew import SIZES, Chain
from trapetum.kernels.cpu.pool import Pool
pool = Pool(2)
chain = Chain(pool, SIZES)
run = chain.program.runner()
chain.check(run)
child = os.fork()
chain.check(run)
if child:
    assert os.waitpid(child, 0)[1] == 0
print("both")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_has_helpers_of_its_own(tmp_path: Path) -> None:
    code = _FORK.format(folder=str(Path(__file__).parent))
    # A cache of its own: numba keeps the name of the module with a kernel, and there this file has another one.
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["both", "both"]
