"""Strict, lazy reader of one ``.safetensors`` file.

::

    offset   size   what
    0        8      N, length of the header, u64 little-endian
    8        N      header: a JSON object, first byte "{", may end in spaces
                    NAME: {"dtype": CODE, "shape": [...], "data_offsets": [begin, end]}   counted from 8 + N
                    "__metadata__": {string: string}                                      optional
    8 + N    ...    the tensors' bytes, row-major, little-endian

What every command of this package therefore agrees on: each byte after the header belongs to exactly one
tensor (overlaps, holes and trailing bytes are refused, as the reference reader does), ``shape x dtype`` is
the byte range, names are unique, and the header is at most ``HEADER_LIMIT`` long.
:meth:`SafetensorsFile.open` checks all of it (module ``safetensors_header``) before any tensor is read.

Data are read on demand, either as read-only views on a memory map (no copy) or, where the file system refuses
one (network and overlay mounts) or with ``mmap=False``, as fresh read-only arrays through ``pread``.

Source: the safetensors format description.
"""

from __future__ import annotations

import mmap as _mmap
import os
import stat
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from trapetum.errors import FormatError
from trapetum.formats.safetensors_header import HEADER_LIMIT, TensorInfo, read_header
from trapetum.formats.strict_json import shown
from trapetum.tensors import matrix_shape

__all__ = ["HEADER_LIMIT", "SafetensorsFile", "TensorInfo"]


class SafetensorsFile:
    """One validated file; made by :meth:`open`. Reads may come from any number of threads.

    Attributes
    ----------
    path : Path
    tensors : dict of str to TensorInfo
        In the order of their bytes.
    metadata : dict of str to str
    notes : list of str
        What a person should know, such as the fall-back to pread.
    """

    def __init__(
        self,
        path: Path,
        tensors: dict[str, TensorInfo],
        metadata: dict[str, str],
        notes: list[str],
        fd: int | None,
        pages: _mmap.mmap | None,
    ) -> None:
        self.path, self.tensors, self.metadata, self.notes = path, tensors, metadata, notes
        self._fd, self._pages = fd, pages

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, mmap: bool = True) -> Self:
        """Check a file and open it; no tensor is read.

        Parameters
        ----------
        path : path-like
        mmap : bool, default True
            Map the file; False reads with pread, which network disks often serve faster.

        Raises
        ------
        FormatError
            Names the file, the tensor, what was found and what is allowed. No content raises another.
        """
        path = Path(path)
        fd = _open_regular(path)
        try:
            tensors, metadata, notes = read_header(fd, os.fstat(fd).st_size, path)
            pages = None
            if mmap:
                try:
                    pages = _mmap.mmap(fd, 0, access=_mmap.ACCESS_READ)
                except (OSError, ValueError, OverflowError) as error:
                    reason = getattr(error, "strerror", None) or error
                    notes.append(f"{path.name}: cannot be memory-mapped ({reason}); read with pread instead")
        except OSError as error:
            os.close(fd)
            raise FormatError(f"{path}: cannot be read: {error.strerror or error}") from None
        except BaseException:
            os.close(fd)
            raise
        if pages is None:
            return cls(path, tensors, metadata, notes, fd, None)
        os.close(fd)  # the map keeps its own descriptor
        return cls(path, tensors, metadata, notes, None, pages)

    def read(self, name: str, rows: slice | None = None) -> NDArray[Any]:
        """Values of a tensor, or of some of its rows.

        Parameters
        ----------
        name : str
        rows : slice, optional
            Rows of the matrix form (``prod(shape[:-1])`` by ``shape[-1]``), step 1; only they are touched.

        Returns
        -------
        ndarray of the stored dtype, of shape ``shape`` or (selected rows, ``shape[-1]``)
            Read-only and aligned. A view on the map where the tensor is aligned in the file, else a copy.

        Raises
        ------
        FormatError
            If there is no such tensor, the file shrank meanwhile, or a BOOL byte is neither 0 nor 1.
        """
        info = self._info(name)
        start, end, shape = _byte_range(info, rows)
        if self._pages is not None:
            raw = np.frombuffer(self._pages, np.uint8, end - start, start)
            if start % info.dtype.itemsize:  # the header is no multiple of 8 long; kernels want alignment
                raw = raw.copy()
        else:
            raw = self._pread(info, start, end)
        if info.dtype == np.bool_ and raw.size and raw.max() > 1:
            raise FormatError(
                f"{self.path}: BOOL tensor {shown(name)} holds the byte {int(raw.max())}; 0 and 1 are allowed"
            )
        values = raw.view(info.dtype).reshape(shape)
        values.flags.writeable = False
        return values

    def release(self, name: str, rows: slice | None = None) -> None:
        """Drop the mapped pages of a tensor, or of some rows, so that this process's memory stays bounded.

        Arrays that were read stay valid: their pages come back from the page cache or the disk when touched.
        Without a map this does nothing.
        """
        start, end, _ = _byte_range(self._info(name), rows)
        if self._pages is not None and end > start and hasattr(_mmap, "MADV_DONTNEED"):
            start -= start % _mmap.PAGESIZE
            self._pages.madvise(_mmap.MADV_DONTNEED, start, end - start)

    def close(self) -> None:
        """Close the file. Arrays that were read stay valid."""
        if self._fd is not None:
            os.close(self._fd)
        elif self._pages is not None:
            try:
                self._pages.close()
            except BufferError:  # views live on; the map goes with the last of them
                pass
        self._fd = self._pages = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _info(self, name: str) -> TensorInfo:
        try:
            return self.tensors[name]
        except KeyError:
            raise FormatError(f"{self.path}: there is no tensor named {shown(name)}") from None

    def _pread(self, info: TensorInfo, start: int, end: int) -> NDArray[np.uint8]:
        if self._fd is None:
            raise ValueError(f"{self.path} is closed")
        out = np.empty(end - start, np.uint8)
        view, done = out.data, 0
        while done < len(view):  # one call gives at most 2 GiB
            try:
                got = os.preadv(self._fd, [view[done:]], start + done)
            except OSError as error:
                raise FormatError(
                    f"{self.path}: cannot read tensor {shown(info.name)}: {error.strerror}"
                ) from None
            if not got:
                raise FormatError(
                    f"{self.path}: ended at byte {start + done} inside tensor {shown(info.name)}, "
                    f"which reaches to {info.end}; the file shrank while it was open"
                )
            done += got
        return out


def _byte_range(info: TensorInfo, rows: slice | None) -> tuple[int, int, tuple[int, ...]]:
    """(start, end, shape) of a tensor or of a block of its rows."""
    if rows is None:
        return info.start, info.end, info.shape
    count, width = matrix_shape(info.shape)
    first, last, step = rows.indices(count)
    if step != 1:
        raise ValueError(f"rows must have step 1, not {step}")
    last = max(first, last)
    stride = width * info.dtype.itemsize
    return info.start + first * stride, info.start + last * stride, (last - first, width)


def _open_regular(path: Path) -> int:
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # before open(): a FIFO would block
            raise FormatError(f"{path}: not a regular file")
        return os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    except FileNotFoundError:
        raise FormatError(f"{path}: there is no such file") from None
    except PermissionError:
        raise FormatError(
            f"{path}: permission denied", hint="Make the file readable for this user."
        ) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise FormatError(f"{path}: cannot be opened: {getattr(error, 'strerror', None) or error}") from None
