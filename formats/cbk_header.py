"""The bytes under a .cbk reader, and the checks that its header allows before anything else is read.

The order of the checks matters: nothing is allocated from a size that the length of the file does not
support.
"""

from __future__ import annotations

import contextlib
import mmap as mmap_module
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trapetum.errors import FormatError
from trapetum.formats.cbk_records import CBK_LAYOUTS, CbkHeader

__all__ = ["MappedFile", "read_header"]


class MappedFile:
    """Read-only bytes of a file: mapped where possible, read piece by piece elsewhere."""

    def __init__(self, path: Path, *, mmap: bool) -> None:
        self._fd = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        self._map: mmap_module.mmap | None = None
        self._path = path
        try:
            self.size = os.fstat(self._fd).st_size
            if mmap and self.size:
                with contextlib.suppress(OSError, ValueError):  # file systems without mmap
                    self._map = mmap_module.mmap(self._fd, 0, access=mmap_module.ACCESS_READ)
        except BaseException:
            os.close(self._fd)
            raise

    def read(self, offset: int, count: int) -> NDArray[np.uint8]:
        """``count`` bytes; the range must lie inside the file."""
        if self._map is not None:
            return np.frombuffer(self._map, np.uint8, count, offset) if count else np.empty(0, np.uint8)
        out = np.empty(count, np.uint8)
        view, done = memoryview(out.data), 0
        while done < count:
            got = os.preadv(self._fd, [view[done:]], offset + done)
            if not got:
                raise FormatError(f"{self._path}: the file became shorter while it was read")
            done += got
        return out

    def release(self, offset: int, count: int) -> None:
        if self._map is None or not hasattr(self._map, "madvise"):
            return
        page = mmap_module.PAGESIZE
        start, stop = -(-offset // page) * page, (offset + count) // page * page
        if stop > start:
            self._map.madvise(mmap_module.MADV_DONTNEED, start, stop - start)

    def close(self) -> None:
        """Close the descriptor; the mapping goes when the last array that uses it does."""
        self._map = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def read_header(path: Path, data: MappedFile) -> CbkHeader:
    magic = bytes(data.read(0, min(4, data.size))).decode("latin-1")
    layout = CBK_LAYOUTS.get(magic)
    if layout is None:
        raise FormatError(f"{path}: begins with {magic!r}; known are {', '.join(CBK_LAYOUTS)}")
    fields_end = 4 + struct.calcsize(layout.format)
    if data.size < fields_end:
        raise FormatError(f"{path}: {data.size} bytes, shorter than a {magic} header of {fields_end}")
    fields = struct.unpack(layout.format, data.read(4, fields_end - 4).tobytes())
    values = dict(zip([name for name, _ in layout.fields], fields))
    if broken := layout.violations(values):
        raise FormatError(f"{path}: the {magic} header is impossible: {'; '.join(broken)}")
    odd = [name for name, code in layout.fields if code == "f" and not np.isfinite(values[name])]
    if odd or not 0 <= values["eps"] < 1:
        names = ", ".join(odd or ["eps"])
        raise FormatError(f"{path}: the {magic} header is impossible: {names} out of range")
    count = layout.sizes(values)[layout.inv_freq]
    if not layout.stored_inv_freq:
        inv_freq = _computed_inv_freq(path, values)
    elif data.size < fields_end + 4 * count:
        raise FormatError(f"{path}: {data.size} bytes, shorter than its header of {fields_end + 4 * count}")
    else:
        inv_freq = data.read(fields_end, 4 * count).view("<f4").copy()
    if not np.isfinite(inv_freq).all():
        raise FormatError(f"{path}: the rotary frequencies hold values that are not finite")
    header = CbkHeader(layout, values, inv_freq)
    if (expected := header.file_bytes()) != data.size:
        fault = "truncated" if data.size < expected else "bytes after the last record"
        raise FormatError(
            f"{path}: the file has {data.size:,} bytes, its header describes {expected:,} ({fault})",
            hint="Copy or export the file again.",
        )
    return header


def _computed_inv_freq(path: Path, values: dict[str, Any]) -> NDArray[np.float32]:
    base, scale = values["rope_base"], values.get("rope_scale", 1.0)
    if base <= 0 or scale <= 0:
        raise FormatError(f"{path}: rope_base {base} and rope_scale {scale} must be positive")
    dim = values["head_dim"]
    frequencies = base ** (-np.arange(0, dim, 2, dtype=np.float64) / dim) / scale
    return np.asarray(frequencies, np.float32)
