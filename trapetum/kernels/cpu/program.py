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

An operation of one tile runs on thread 0, so that a row of such operations needs no waiting between them. Every output
is written by one call whatever the number of threads, hence results do not depend on it. Threads wait actively for
some 20 us and then give the core away each time: on a busy machine that costs no more than one thread would.
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

SIMD = "5a545be7485887e9"  # simd.fingerprint(): a new one makes numba compile this file again

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
def run(operations: NDArray[np.int64], counters: NDArray[np.int64], thread: int, threads: int) -> None:
    """Run a program as one of several threads.

    Parameters
    ----------
    operations : ndarray of int64, shape (n, 5)
    counters : ndarray of int64, shape (n + 1,)
        Zeros at the start; shared by the threads.
    thread, threads : int
        All of 0 .. threads - 1 must run, each once.
    """
    count = operations.shape[0]
    arrived = 0
    for k in range(count):
        function, arguments = operations[k, 0], operations[k, 1]
        total, tile = operations[k, 2], operations[k, 3]
        if total <= tile:
            if thread == 0:
                memory.call(function, arguments, 0, total)
        else:
            begin = memory.fetch_add(counters, k, tile) if threads > 1 else 0
            while begin < total:
                memory.call(function, arguments, begin, min(begin + tile, total))
                begin = memory.fetch_add(counters, k, tile) if threads > 1 else begin + tile
        if threads > 1 and operations[k, 4]:
            arrived += threads
            memory.fetch_add(counters, count, 1)
            spins = 0
            while memory.load_atomic(counters, count) < arrived:
                spins += 1
                if spins < _SPINS:
                    memory.pause()
                else:
                    memory.yield_cpu()
