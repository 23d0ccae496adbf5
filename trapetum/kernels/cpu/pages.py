"""Memory for weights: large pages, one array behind the other.

A product of one token reads every weight once. With pages of 4 KiB each of them costs a look-up in page tables that are
no longer in any cache (in a virtual machine: in two sets of tables), and the hardware's prefetcher stops at its end.
NumPy asks for large pages for arrays from 4 MiB on, but does not align them: of a matrix of 8 MiB a quarter stays in
small pages. Here arrays come from slabs that start at a large page: 4096 x 4096 ternary weights then stream at 60
instead of 40 G weights a second (two threads, virtual machine), and matrices below 4 MiB gain too.
"""

from __future__ import annotations

import errno
import mmap
from contextlib import suppress
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["copy", "empty"]

_PAGE = 2 << 20
_SLAB = 64 << 20
_LEAST = 64 << 10  # smaller arrays stay with NumPy
_LINE = 64
_LARGE = hasattr(mmap, "MADV_HUGEPAGE")

_lock = Lock()
_rest: NDArray[np.uint8] = np.empty(0, np.uint8)  # of the current slab


def empty(shape: int | tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """``np.empty`` for weights that stay.

    From half a slab on an array has memory of its own; smaller ones share slabs, which are freed with the last of
    their arrays. The slab in use stays.

    Parameters
    ----------
    shape : int or tuple of int
    dtype : dtype

    Returns
    -------
    ndarray of ``dtype``, C-contiguous
        From ``_LEAST`` bytes on, and where the system has large pages, aligned to a cache line.

    Raises
    ------
    MemoryError
    """
    global _rest
    kind = np.dtype(dtype)
    nbytes = int(np.prod(shape)) * kind.itemsize
    if nbytes < _LEAST or not _LARGE:
        return np.empty(shape, kind)
    if nbytes >= _SLAB // 2:
        taken = _slab(nbytes)[:nbytes]
    else:
        whole = -(-nbytes // _LINE) * _LINE
        with _lock:
            if whole > _rest.size:
                _rest = _slab(_SLAB)
            taken, rest = _rest[:nbytes], _rest[whole:]
            _rest = (
                rest if rest.size >= _LEAST else np.empty(0, np.uint8)
            )  # an empty view would hold the slab
    made: NDArray[Any] = taken.view(kind).reshape(shape)
    return made


def copy(array: NDArray[Any]) -> NDArray[Any]:
    """``np.array(array)`` for weights that stay."""
    held = empty(array.shape, array.dtype)
    held[...] = array
    return held


def _slab(nbytes: int) -> NDArray[np.uint8]:
    """A piece of address space on large pages; the system gives memory when it is touched."""
    nbytes = -(-nbytes // _PAGE) * _PAGE
    try:
        memory = mmap.mmap(-1, nbytes + _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        if error.errno == errno.ENOMEM:
            raise MemoryError(f"{nbytes} bytes for weights") from error
        raise
    with suppress(OSError):  # a kernel may be built without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    data = np.frombuffer(memory, np.uint8)
    start = -int(data.ctypes.data) % _PAGE
    return data[start : start + nbytes]
