"""A list of kernel calls that several threads run together, without Python in between.

A step of decoding is some ten small calls a layer; from Python each costs 5 to 50 us, more than its arithmetic in a
small model. Here a step is a table, written once:

====== ======================================================================================================
column of an operation (int64)
====== ======================================================================================================
0      address of a function ``void f(int64 *arguments, int64 begin, int64 end)``, see :func:`callback`
1      address of its arguments: sizes and addresses of arrays, which must not move
2      total: it works on the range 0 .. total - 1
3      tile: a call takes so much of the range; tiles are handed out as threads come free
4      1: the next operation needs all of this one, so that threads wait for each other
====== ======================================================================================================

An operation of one tile runs on the calling thread, so that a row of such operations needs no waiting between them.
Every output is written by one call whatever the number of threads, hence results do not depend on it. What is waited
for is finished tiles, never threads: one that wakes late, or not at all, costs only its help. Threads wait actively
for some 20 us and then give the core away each time: on a busy machine that costs no more than one thread would.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numba
import numpy as np
from numba.core import types
from numpy.typing import NDArray

from trapetum.kernels.cpu import memory
from trapetum.kernels.jit import jit

__all__ = ["callback", "run"]

SIMD = "f25ed7cbbe6f134f"  # simd.fingerprint(): a new one makes numba compile this file again

_SPINS = 2000
_SIGNATURE = types.void(types.CPointer(types.int64), types.int64, types.int64)  # type: ignore[no-untyped-call]


@cache
def callback(function: Callable[..., Any]) -> Any:
    """Compile a function for column 0; ``.address`` of the result. It stays alive with the process."""
    try:
        return numba.cfunc(_SIGNATURE, cache=True)(function)
    except RuntimeError:  # no folder for the cache is writable
        return numba.cfunc(_SIGNATURE)(function)


@jit()
def run(operations: NDArray[np.int64], counters: NDArray[np.int64], caller: bool, shared: bool) -> None:
    """Run a program, or help to run it.

    Parameters
    ----------
    operations : ndarray of int64, shape (n, 5)
    counters : ndarray of int64, shape (n + 1,)
        Zeros at the start; shared by the threads: the next number of each operation, and the tiles done.
    caller : bool
        False for a helper.
    shared : bool
        Whether there are helpers.
    """
    count = operations.shape[0]
    needed = 0
    for k in range(count):
        function, arguments = operations[k, 0], operations[k, 1]
        total, tile = operations[k, 2], operations[k, 3]
        if total <= tile:
            if caller:
                memory.call(function, arguments, 0, total)
                if shared:
                    memory.fetch_add(counters, count, 1)
            needed += 1
        else:
            begin = memory.fetch_add(counters, k, tile) if shared else 0
            while begin < total:
                memory.call(function, arguments, begin, min(begin + tile, total))
                if shared:
                    memory.fetch_add(counters, count, 1)
                begin = memory.fetch_add(counters, k, tile) if shared else begin + tile
            needed += (total + tile - 1) // tile
        if shared and (operations[k, 4] or k == count - 1):
            spins = 0
            while memory.load_atomic(counters, count) < needed:
                spins += 1
                if spins < _SPINS:
                    memory.pause()
                else:
                    memory.yield_cpu()
