"""The thread pool: every piece once, errors raised, BLAS held to one thread."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from threadpoolctl import threadpool_info

from trapetum.errors import RecipeError
from trapetum.kernels.cpu.pool import Pool, available_cpus


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("total", [0, 1, 7, 64])
@pytest.mark.parametrize("size", [1, 3, 64, 100])
def test_blocks_cover_everything_once(threads: int, total: int, size: int) -> None:
    seen = np.zeros(total, np.int64)

    def piece(rows: slice) -> None:
        assert 0 < rows.stop - rows.start <= size
        seen[rows] += 1

    Pool(threads).blocks(piece, total, size)
    assert (seen == 1).all()


def test_work_is_spread_over_threads() -> None:
    meet = threading.Barrier(2, timeout=120)  # passes only if two pieces run at the same time
    Pool(2).run(lambda i: meet.wait(), 2)


@pytest.mark.parametrize("threads", [1, 3])
def test_an_exception_is_raised(threads: int) -> None:
    def piece(i: int) -> None:
        if i == 5:
            raise ValueError("five")

    with pytest.raises(ValueError, match="five"):
        Pool(threads).run(piece, 8)


def test_blas_is_single_threaded_inside_and_restored_after() -> None:
    np.ones((2, 2)) @ np.ones((2, 2))
    before = [i["num_threads"] for i in threadpool_info() if i["user_api"] == "blas"]
    assert before
    with Pool(2).session():
        assert {i["num_threads"] for i in threadpool_info() if i["user_api"] == "blas"} == {1}
    assert [i["num_threads"] for i in threadpool_info() if i["user_api"] == "blas"] == before


def test_sessions_that_overlap_restore_what_was_before_them() -> None:
    np.ones((2, 2)) @ np.ones((2, 2))
    before = [i["num_threads"] for i in threadpool_info() if i["user_api"] == "blas"]
    first, second = Pool(1).session(), Pool(2).session()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)  # not the last one: BLAS must stay on one thread for the other
    assert {i["num_threads"] for i in threadpool_info() if i["user_api"] == "blas"} == {1}
    second.__exit__(None, None, None)
    assert [i["num_threads"] for i in threadpool_info() if i["user_api"] == "blas"] == before


def test_work_inside_work_ends() -> None:
    # the inner calls find every thread taken: they do their own work and wait for nobody
    pool, seen = Pool(2), np.zeros((4, 5), np.int64)

    def outer(i: int) -> None:
        def inner(k: int) -> None:
            seen[i, k] += 1

        pool.run(inner, 5)

    pool.run(outer, 4)
    assert (seen == 1).all()


def test_closing_ends_the_threads() -> None:
    pool, before = Pool(3), set(threading.enumerate())
    pool.close()
    pool.run(lambda i: time.sleep(0.01), 6)
    started = set(threading.enumerate()) - before
    assert started
    pool.close()
    assert not any(thread.is_alive() for thread in started)
    seen: list[int] = []
    pool.run(seen.append, 4)
    assert sorted(seen) == [0, 1, 2, 3]
    pool.close()


def test_thread_counts() -> None:
    assert Pool().threads == available_cpus() >= 1
    with pytest.raises(RecipeError, match="threads"):
        Pool(0)


def test_threads_inherit_the_callers_context() -> None:
    """NumPy's error state above all: what a caller ignores is not warned of by a helper."""
    huge = np.full(1000, 3e38, np.float32)
    with np.errstate(over="ignore"):
        Pool(3).run(lambda i: np.multiply(huge, huge), 50)
    with pytest.raises(RuntimeWarning):
        Pool(1).run(lambda i: np.multiply(huge, huge), 50)
