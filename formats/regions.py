"""Byte regions between open files."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from trapetum.errors import FormatError
from trapetum.formats.atomic import atomic_file

__all__ = ["copy_file", "copy_region", "pwrite_all"]

_COPY_BYTES = 4 << 20
_NO_COPY_RANGE = {errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF}


def pwrite_all(fd: int, data: memoryview, offset: int) -> None:
    """Write all of ``data`` at byte ``offset``."""
    while data.nbytes:
        written = os.pwrite(fd, data, offset)  # at most 2 GiB a call; short at a file-size limit
        data = data[written:]
        offset += written


def copy_region(source: int, offset: int, target: int, target_offset: int, count: int) -> None:
    """Copy bytes between open files inside the kernel where it can, else through a 4 MiB buffer.

    Parameters
    ----------
    source, target : int
        File descriptors.
    offset, target_offset, count : int
        Bytes.

    Raises
    ------
    FormatError
        If the source ends before ``count`` bytes.
    """
    done = 0
    while done < count:
        try:
            n = os.copy_file_range(source, target, count - done, offset + done, target_offset + done)
        except AttributeError:  # not Linux
            break
        except OSError as error:
            if error.errno not in _NO_COPY_RANGE:
                raise
            break
        if n == 0:
            break
        done += n
    while done < count:
        block = os.pread(source, min(_COPY_BYTES, count - done), offset + done)
        if not block:
            raise FormatError(f"a file ended {count - done} bytes early while it was copied")
        pwrite_all(target, memoryview(block), target_offset + done)
        done += len(block)


def copy_file(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Copy a file's bytes to a new name, whole or not at all; its mode follows the umask.

    Raises
    ------
    FormatError
        If the source cannot be read.
    OutputError
        If the copy cannot be written.
    """
    try:
        fd = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise FormatError(f"{source}: cannot be read: {error.strerror}") from None
    try:
        size = os.fstat(fd).st_size
        with atomic_file(Path(target), size=size) as file:
            copy_region(fd, 0, file.fileno(), 0, size)
    finally:
        os.close(fd)
