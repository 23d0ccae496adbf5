"""Writes down a program of ``kernels.cpu.program``: operations, their arguments, the buffers between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trapetum.kernels.cpu.pool import Pool
from trapetum.kernels.cpu.program import callback

__all__ = ["Call", "Program"]

Call = tuple[Callable[..., None], list[Any], int, int]
"""Function (of Python, or what ``numba.cfunc`` made of one), arguments (contiguous arrays, integers), total, tile."""


class Program:
    """Collects operations for the threads of a pool; every array that they name stays alive with it.

    Parameters
    ----------
    pool : Pool
    like : Program, optional
        Its buffers are used, as those of one program are by all its layers; the two must not run at the same time.
    """

    def __init__(self, pool: Pool, like: Program | None = None) -> None:
        self.pool = pool
        self._rows: list[list[int]] = []
        self._group: list[int] = []  # operations of one number need nothing of each other
        self._alive: list[Any] = []
        self._buffers: dict[Any, NDArray[Any]] = {} if like is None else like._buffers

    def buffer(self, name: Any, size: int, dtype: Any = np.float32) -> NDArray[Any]:
        """A buffer of zeros by name and size, shared by all layers."""
        key = (name, size, np.dtype(dtype))
        if key not in self._buffers:
            self._buffers[key] = np.zeros(size, dtype)
        return self._buffers[key]

    def add(self, function: Callable[..., None], arguments: list[Any], total: int = 1, tile: int = 1) -> None:
        """An operation that needs the ones before it."""
        self.add_side_by_side([(function, arguments, total, tile)])

    def add_side_by_side(self, calls: Sequence[Call]) -> None:
        """Operations that need the ones before them, but not each other."""
        group = self._group[-1] + 1 if self._group else 0
        for function, arguments, total, tile in calls:
            compiled = function if hasattr(function, "address") else callback(function)
            numbers = np.array([_number(a) for a in arguments], np.int64)
            self._alive += [compiled, numbers, *arguments]
            self._rows.append([compiled.address, numbers.ctypes.data, total, tile, 0])
            self._group.append(group)

    def table(self) -> NDArray[np.int64]:
        """The operations, int64 [n, 5]; threads wait only where one of them needs what another wrote."""
        table = np.array(self._rows, np.int64)
        spread = table[:, 2] > table[:, 3]
        group = np.array(self._group)
        spread_groups = set(group[spread].tolist())
        for k in range(len(table) - 1):
            ends = group[k] != group[k + 1]
            table[k, 4] = ends and (int(group[k]) in spread_groups or int(group[k + 1]) in spread_groups)
        return table

    def runner(self) -> Callable[[], None]:
        """A call of it runs what is written down by now; one call at a time."""
        operations = self.table()
        return partial(self._run, operations, np.zeros(len(operations) + 1, np.int64))

    def _run(self, operations: NDArray[np.int64], counters: NDArray[np.int64]) -> None:
        self.pool.execute(operations, counters)


def _number(argument: Any) -> int:
    if isinstance(argument, np.ndarray):
        if not argument.flags.c_contiguous:
            raise ValueError("arguments of a program are contiguous arrays")
        return int(argument.ctypes.data)
    return int(argument)
