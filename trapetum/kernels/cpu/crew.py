"""Threads that wait in compiled code for the next program of kernels, so that starting one costs no Python.

Handing a part of a product to a ``ThreadPoolExecutor`` takes 0.10 to 0.25 ms until it runs (a queue, two wakings, the
interpreter lock), half of what a 4096 x 4096 product of two-bit weights takes as a whole. Here a helper waits in code
that does not hold the interpreter lock, and goes straight from there to the first free tile: 2 us after the start of a
program while it still looks out for one, 70 us when it has gone to sleep on a POSIX condition variable, 200 us after
20 ms of sleep (a virtual machine's core has to come back). It looks out for some 70 us after its work, no longer: other
libraries' threads need the core too. The caller starts at once and waits for tiles; at the end for helpers that are
still there, which find nothing left.

State, int64 [8]; cells 3 to 5 are written before cell 0, which makes them visible:

====== ======================================================================
cell   content
====== ======================================================================
0      number of the program that takes helpers, from 1 on; 0 between programs
1      helpers at work, or about to look whether there is some
2      helpers asleep, or about to be
3, 4   addresses of the program's operations and counters
5      number of its operations
6      1: helpers end
====== ======================================================================

A helper announces itself in cell 1 and looks at cell 0 then; the caller clears cell 0 and then waits until cell 1 is
0: no helper reads a program that is over. In the same way cells 2 and 0: no helper sleeps through a program's start.
The mutex guards only sleep: a helper that met the caller's lock at the start of a program slept 50 us on it.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref

import numpy as np
from numpy.typing import NDArray

from trapetum.kernels.cpu import memory, simd
from trapetum.kernels.jit import inline, jit

__all__ = ["Crew", "run"]

SIMD = "ce3020bb72a775c0"  # simd.fingerprint(): a new one makes numba compile this file again

_OPEN, _HELPERS, _SLEEPERS, _OPERATIONS, _COUNTERS, _COUNT, _END = range(7)
_SPINS = 2000  # some 20 us; then a waiting thread gives the core away each time
_LOOKS = 4000  # with a pause of 40 to 140 cycles between them


@inline
def _work(operations: NDArray[np.int64], counters: NDArray[np.int64], caller: bool, shared: bool) -> None:
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
                memory.call(function, arguments, begin, simd.least(begin + tile, total))
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


@jit()
def run(operations: NDArray[np.int64], counters: NDArray[np.int64]) -> None:
    """Run a program alone; arguments as for a crew."""
    _work(operations, counters, True, False)


@jit()
def _prepare(mutex: int, bell: int) -> None:
    memory.mutex_init(mutex, 0)
    memory.cond_init(bell, 0)


@inline
def _is_new(state: NDArray[np.int64], number: int) -> bool:
    found = memory.load_atomic(state, _OPEN)
    new: bool = (found != 0 and found != number) or memory.load_atomic(state, _END) != 0
    return new


@jit()
def _serve(state: NDArray[np.int64], mutex: int, bell: int) -> None:
    """A helper's whole life."""
    number = 0
    while True:
        looks = 0
        while looks < _LOOKS and not _is_new(state, number):
            memory.pause()
            looks += 1
        if looks == _LOOKS:
            memory.mutex_lock(mutex)
            memory.fetch_add(state, _SLEEPERS, 1)
            if not _is_new(state, number):
                memory.cond_wait(bell, mutex)
            memory.fetch_add(state, _SLEEPERS, -1)
            memory.mutex_unlock(mutex)
            continue  # look out again: who wakes too late for one program is in time for the next
        if memory.load_atomic(state, _END) != 0:
            return
        memory.fetch_add(state, _HELPERS, 1)
        found = memory.load_atomic(state, _OPEN)
        if found != 0:
            number = found
            count = memory.load_atomic(state, _COUNT)
            operations = memory.array(memory.load_atomic(state, _OPERATIONS), np.int64, (count, 5))
            counters = memory.array(memory.load_atomic(state, _COUNTERS), np.int64, (count + 1,))
            _work(operations, counters, False, True)
        memory.fetch_add(state, _HELPERS, -1)


@inline
def _wake(state: NDArray[np.int64], mutex: int, bell: int) -> None:
    if memory.load_atomic(state, _SLEEPERS) > 0:
        memory.mutex_lock(mutex)
        memory.cond_broadcast(bell)
        memory.mutex_unlock(mutex)


@jit()
def _execute(
    state: NDArray[np.int64],
    mutex: int,
    bell: int,
    number: int,
    operations: NDArray[np.int64],
    counters: NDArray[np.int64],
) -> None:
    for k in range(counters.shape[0]):
        counters[k] = 0
    state[_OPERATIONS], state[_COUNTERS] = operations.ctypes.data, counters.ctypes.data
    state[_COUNT] = operations.shape[0]
    memory.fetch_add(state, _OPEN, number)
    _wake(state, mutex, bell)
    _work(operations, counters, True, True)
    memory.fetch_add(state, _OPEN, -number)
    while memory.load_atomic(state, _HELPERS) > 0:  # they find nothing left to do
        memory.yield_cpu()


@jit()
def _end(state: NDArray[np.int64], mutex: int, bell: int) -> None:
    memory.fetch_add(state, _END, 1)
    _wake(state, mutex, bell)


class Crew:
    """Helpers of one caller at a time; they end when the object is collected, or with the process.

    Parameters
    ----------
    helpers : int
        At least 1.
    """

    def __init__(self, helpers: int) -> None:
        self.process = os.getpid()  # a forked child has the object but not the threads
        self._state = np.zeros(8, np.int64)
        self._locks = np.zeros((2, 128), np.uint8)
        self._mutex, self._bell = (int(row.ctypes.data) for row in self._locks)
        self._lock = threading.Lock()
        self._number = 0
        self._load()
        self._finish = weakref.finalize(self, _dismiss, self.process, self._state, self._locks)
        self._finish.atexit = False  # see _close_all
        self._threads = [
            threading.Thread(
                target=_live, args=(self._state, self._locks), name=f"trapetum-crew-{i}", daemon=True
            )
            for i in range(helpers)
        ]
        _living.add(self)
        for thread in self._threads:
            thread.start()

    def _load(self) -> None:
        """Compile all, or read it from the cache, in this thread: a collector that ends a crew must not wait for it."""
        _prepare(self._mutex, self._bell)
        state = np.zeros(8, np.int64)
        _execute(state, self._mutex, self._bell, 1, np.empty((0, 5), np.int64), np.zeros(1, np.int64))
        _end(state, self._mutex, self._bell)
        _serve(state, self._mutex, self._bell)

    def close(self) -> None:
        """End the helpers and wait for that."""
        self._finish()
        if self.process == os.getpid():
            for thread in self._threads:
                if thread.ident is not None:
                    thread.join()

    def execute(self, operations: NDArray[np.int64], counters: NDArray[np.int64]) -> None:
        """Run a program with all helpers that wake in time.

        Parameters
        ----------
        operations : ndarray of int64, shape (n, 5)
            See ``kernels.cpu.program``.
        counters : ndarray of int64, shape (n + 1,)
            Overwritten.
        """
        with self._lock:
            self._number += 1
            _execute(self._state, self._mutex, self._bell, self._number, operations, counters)


_living: weakref.WeakSet[Crew] = weakref.WeakSet()


def _live(state: NDArray[np.int64], locks: NDArray[np.uint8]) -> None:
    """A helper: it holds the arrays that it uses, whatever becomes of the crew."""
    _serve(state, int(locks[0].ctypes.data), int(locks[1].ctypes.data))


def _dismiss(process: int, state: NDArray[np.int64], locks: NDArray[np.uint8]) -> None:
    """Tell helpers to end, without waiting: a collector may call this in any thread, under any lock."""
    if process == os.getpid():  # the mutex of a forked child may be locked by a thread that it does not have
        _end(state, int(locks[0].ctypes.data), int(locks[1].ctypes.data))


@atexit.register
def _close_all() -> None:
    for crew in list(_living):
        crew.close()
