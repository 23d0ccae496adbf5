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
Every output is written by one call whatever the number of threads, hence results do not depend on it. Between
operations finished tiles are waited for, not threads: one that wakes late, or not at all, costs only its help.
``kernels.cpu.crew`` runs programs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numba
from numba.core import types

__all__ = ["callback"]

_SIGNATURE = types.void(types.CPointer(types.int64), types.int64, types.int64)  # type: ignore[no-untyped-call]


@cache
def callback(function: Callable[..., Any]) -> Any:
    """Compile a function for column 0; ``.address`` of the result. It stays alive with the process."""
    try:
        return numba.cfunc(_SIGNATURE, cache=True)(function)
    except RuntimeError:  # no folder for the cache is writable
        return numba.cfunc(_SIGNATURE)(function)
