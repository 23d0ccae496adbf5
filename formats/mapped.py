"""A read-only file as bytes on demand: memory-mapped where that works, through ``pread`` elsewhere.

Network and overlay file systems may refuse a map, and some serve ``pread`` faster; a reader should not care.
"""

from __future__ import annotations

import mmap as _mmap
import os
import stat
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from trapetum.errors import FormatError

__all__ = ["MappedFile"]


class MappedFile:
    """An open regular file; made by :meth:`open`. Reads may come from any number of threads.

    Attributes
    ----------
    path : Path
    size : int
        Bytes, at opening.
    note : str or None
        Why the file is not mapped although that was asked for.
    """

    def __init__(self, path: Path, fd: int, size: int, pages: _mmap.mmap | None, note: str | None) -> None:
        self.path, self.size, self.note = path, size, note
        self._fd: int | None = fd
        self._pages = pages

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, mmap: bool = True) -> Self:
        """Open a file.

        Raises
        ------
        FormatError
            If it is missing, unreadable or not a regular file.
        """
        path = Path(path)
        try:
            if not stat.S_ISREG(os.stat(path).st_mode):  # before open(): a FIFO would block
                raise FormatError(f"{path}: not a regular file")
            fd = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        except (OSError, ValueError) as error:  # ValueError: a NUL in the path
            reason = getattr(error, "strerror", None) or error
            raise FormatError(f"{path}: cannot be opened: {reason}") from None
        size = os.fstat(fd).st_size
        pages, note = None, None
        if mmap and size:
            try:
                pages = _mmap.mmap(fd, 0, access=_mmap.ACCESS_READ)
            except (OSError, ValueError, OverflowError) as error:
                reason = getattr(error, "strerror", None) or error
                note = f"{path.name}: cannot be memory-mapped ({reason}); it is read with pread instead"
        return cls(path, fd, size, pages, note)

    @property
    def pages(self) -> _mmap.mmap | None:
        """The map, where there is one."""
        return self._pages

    def read(self, start: int, end: int) -> NDArray[np.uint8]:
        """Bytes ``start`` to ``end`` as a read-only array: a view on the map, or a fresh one.

        Raises
        ------
        FormatError
            If the file ends before ``end``.
        """
        if self._fd is None:
            raise ValueError(f"{self.path} is closed")
        if end > self.size:
            raise FormatError(f"{self.path}: byte {end} was asked for, the file has {self.size}")
        if self._pages is not None:
            raw = np.frombuffer(self._pages, np.uint8, end - start, start)
        else:
            raw = np.empty(end - start, np.uint8)
            view, done = raw.data, 0
            while done < len(view):  # one call gives at most 2 GiB
                try:
                    got = os.preadv(self._fd, [view[done:]], start + done)
                except OSError as error:
                    raise FormatError(f"{self.path}: cannot be read: {error.strerror}") from None
                if not got:
                    raise FormatError(f"{self.path}: shrank to {start + done} bytes while it was open")
                done += got
        raw.flags.writeable = False
        return raw

    def release(self, start: int, end: int) -> None:
        """Drop the mapped pages of a range; arrays that were read stay valid."""
        if self._pages is not None and end > start and hasattr(_mmap, "MADV_DONTNEED"):
            start -= start % _mmap.PAGESIZE
            self._pages.madvise(_mmap.MADV_DONTNEED, start, end - start)

    def close(self) -> None:
        """Close the file; arrays that were read stay valid."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
        if self._pages is not None:
            try:
                self._pages.close()
            except BufferError:  # views live on; the map goes with the last of them
                pass
            self._pages = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
