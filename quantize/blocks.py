"""Row blocks over threads: how work is cut, how much of it is in memory, and in which order results come back.

Everything heavy in ``quantize`` releases the GIL, so one ``ThreadPoolExecutor`` over row blocks uses all cores. A block
is whole rows of one tensor, so no result depends on where the cuts are. Blocks are submitted lazily and results are
yielded in submission order: the consumer may write a file as they come, and memory is bounded by the window.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import TypeVar

from trapetum.errors import RecipeError

__all__ = ["MemoryBudget", "memory_budget", "ordered_map", "row_blocks", "usable_threads"]

T = TypeVar("T")
R = TypeVar("R")

# 16 MiB as float32: 4096 rows of 1024. Larger blocks gain nothing (a call costs below 0.1 % here) and cost memory.
BLOCK_WEIGHTS = 4 << 20
# Resident size of the process before the first block: interpreter, NumPy, numba with compiled kernels.
BASE_BYTES = 320 << 20
# What of it is there when the budget is made.
STARTED_BYTES = 110 << 20
# Bytes in memory for one weight of a block in work: source pages 2-4, codes 1, packed codes 1, decoded rows for the
# error, kernel scratch; plus finished blocks that wait to be written.
WORK_BYTES = 16
DEFAULT_BUDGET = 1 << 30


@dataclass(frozen=True)
class MemoryBudget:
    """How much may be in work at once.

    Parameters
    ----------
    threads : int
        Worker threads, one block each.
    block_weights : int
        Most weights in a block (a single longer row is a block of its own).
    peak : int
        Predicted peak resident bytes of the process.
    """

    threads: int
    block_weights: int
    peak: int


def usable_threads(threads: int | None = None) -> int:
    """Threads to use: the given number, else the CPUs that this process may run on.

    Raises
    ------
    RecipeError
        If ``threads`` is below 1.
    """
    if threads is None:
        affinity = getattr(os, "sched_getaffinity", None)
        return len(affinity(0)) if affinity else os.cpu_count() or 1
    if threads < 1:
        raise RecipeError(f"threads is {threads}; 1 or more are allowed")
    return threads


def memory_budget(
    threads: int, longest_row: int, max_memory: int | None = None, available: int = 0
) -> MemoryBudget:
    """Choose the block size.

    Parameters
    ----------
    threads : int
        Worker threads.
    longest_row : int
        Weights in the longest row of any tensor: a block holds at least one row.
    max_memory : int, optional
        Peak resident bytes allowed; by default 1 GiB, less where less is available, more only where a single row
        forces it.
    available : int
        Bytes that the process may still take; 0 where that is not known.

    Raises
    ------
    RecipeError
        If ``max_memory``, or what is available, cannot hold one row a thread: said before the work, for the system
        would say no more than "Killed".

    Examples
    --------
    >>> memory_budget(2, 4096).block_weights == BLOCK_WEIGHTS
    True
    """
    least = BASE_BYTES + threads * longest_row * WORK_BYTES
    if max_memory is not None and max_memory < least:
        raise RecipeError(
            f"max_memory is {max_memory:,} bytes; {threads} threads with rows of {longest_row:,} weights "
            f"need {least:,}",
            hint="Allow more memory, or use fewer threads.",
        )
    left = available + STARTED_BYTES
    if available and left < least:
        raise RecipeError(
            f"about {available >> 20} MiB of memory are left to this process; {threads} threads with rows of "
            f"{longest_row:,} weights take {(least - STARTED_BYTES) >> 20}",
            hint="Use fewer threads, free some memory, or raise the limit (ulimit -v, or the container's).",
        )
    default = min(DEFAULT_BUDGET, left) if available else DEFAULT_BUDGET
    room = (default if max_memory is None else max_memory) - BASE_BYTES
    weights = max(longest_row, min(BLOCK_WEIGHTS, room // (threads * WORK_BYTES)), 1)
    return MemoryBudget(threads, weights, BASE_BYTES + threads * weights * WORK_BYTES)


def row_blocks(rows: int, in_features: int, block_weights: int) -> list[slice]:
    """Cut ``rows`` rows into blocks of at most ``block_weights`` weights, at least one row each.

    Examples
    --------
    >>> row_blocks(5, 10, 20)
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    step = max(1, block_weights // max(in_features, 1))
    return [slice(r, min(r + step, rows)) for r in range(0, rows, step)]


def ordered_map(
    executor: Executor, function: Callable[[T], R], items: Iterable[T], window: int
) -> Iterator[tuple[T, R]]:
    """Apply ``function`` on worker threads; yield ``(item, result)`` in the order of ``items``.

    At most ``window`` items are submitted and not yet yielded. Whoever stops early shuts the executor down with
    ``cancel_futures=True``.
    """
    pending: deque[tuple[T, Future[R]]] = deque()
    for item in items:
        pending.append((item, executor.submit(function, item)))
        if len(pending) >= window:
            first, future = pending.popleft()
            yield first, future.result()
    while pending:
        first, future = pending.popleft()
        yield first, future.result()
