"""Write safetensors files as a stream: sizes are known before any data, no tensor is whole in memory.

::

    byte 0   u64 little-endian   H, length of the header
    byte 8   H bytes             compact JSON in data order, padded with spaces to a multiple of 8:
                                 {"__metadata__": {...}, NAME: {"dtype", "shape", "data_offsets"}, ...}
    then     data                C order, little-endian, in the order of the header, without gaps

Source: https://github.com/huggingface/safetensors (README, "Format").

Data are positioned (``pwrite``): the arrays of one tensor can be streamed side by side, row block by row
block.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from trapetum.errors import FormatError, RecipeError
from trapetum.formats.atomic import atomic_file
from trapetum.formats.dtypes import dtype_code
from trapetum.formats.regions import copy_region, pwrite_all

__all__ = [
    "Entry",
    "SafetensorsWriter",
    "aligned_order",
    "file_size",
    "header_bytes",
    "index_bytes",
    "plan_shards",
    "shard_names",
]

_HASH_BYTES = 1 << 20


@dataclass(frozen=True)
class Entry:
    """One array of a file.

    Parameters
    ----------
    name : str
    dtype : numpy.dtype
        Little-endian; bfloat16 and float8 through ml_dtypes.
    shape : tuple of int
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the data."""
        return math.prod(self.shape) * self.dtype.itemsize


def aligned_order(entries: Iterable[Entry]) -> list[Entry]:
    """Entries by falling item size, else in the given order: no array then starts at an odd place.

    Readers that view mapped bytes as an array (PyTorch's does) fail on a float16 array at an odd offset.
    """
    return sorted(entries, key=lambda e: -e.dtype.itemsize)


def header_bytes(
    entries: Sequence[Entry], metadata: Mapping[str, str] | None = None, *, reserve: int = 0
) -> bytes:
    """The length field and the header.

    Parameters
    ----------
    entries : sequence of Entry
        In data order.
    metadata : mapping of str to str, optional
        Stored as ``__metadata__``.
    reserve : int
        Length of the JSON at least, in bytes; filled with spaces.

    Returns
    -------
    bytes
        A multiple of 8 long; equal input gives equal bytes.

    Raises
    ------
    FormatError
        For a name that occurs twice, is ``__metadata__``, or is not valid Unicode.
    ValueError
        For a dtype without a code.
    """
    table: dict[str, Any] = {}
    if metadata is not None:
        table["__metadata__"] = dict(metadata)
    begin = 0
    for e in entries:
        if e.name in table or e.name == "__metadata__":
            raise FormatError(f"tensor name {e.name!r} occurs twice in one safetensors file")
        end = begin + e.nbytes
        table[e.name] = {"dtype": dtype_code(e.dtype), "shape": list(e.shape), "data_offsets": [begin, end]}
        begin = end
    try:
        text = json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError as error:
        raise FormatError(
            f"a tensor name or a metadata value is not valid Unicode: {error.object!r:.80}"
        ) from error
    length = (max(len(text), reserve) + 7) // 8 * 8
    return length.to_bytes(8, "little") + text.ljust(length)


def file_size(
    entries: Sequence[Entry], metadata: Mapping[str, str] | None = None, *, reserve: int = 0
) -> int:
    """Exact bytes of the file that :class:`SafetensorsWriter` will write."""
    return len(header_bytes(entries, metadata, reserve=reserve)) + sum(e.nbytes for e in entries)


class SafetensorsWriter:
    """A file that is written row block by row block and gets its name only when it is complete.

    Parameters
    ----------
    path : path
        Final name.
    entries : sequence of Entry
        In data order.
    metadata : mapping of str to str, optional
    reserve : int
        Bytes kept for the JSON of the header, so that ``metadata`` may be replaced (attribute) until the end.
    sweep : bool
        See :func:`trapetum.formats.atomic.atomic_file`.

    Raises
    ------
    OutputError
        If the file cannot be written.
    ValueError
        From :meth:`write` and on leaving, when the data do not match the entries.

    Notes
    -----
    A context manager; used by one thread. Nothing is left behind when the block raises.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as d:
    ...     with SafetensorsWriter(Path(d) / "x", [Entry("a", np.dtype("u1"), (2, 2))]) as w:
    ...         w.write("a", np.array([[1, 2]], np.uint8))
    ...         w.write("a", np.array([[3, 4]], np.uint8))
    ...     (Path(d) / "x").read_bytes()[-4:]
    b'\\x01\\x02\\x03\\x04'
    """

    def __init__(
        self,
        path: str | Path,
        entries: Sequence[Entry],
        metadata: Mapping[str, str] | None = None,
        *,
        reserve: int = 0,
        sweep: bool = True,
    ) -> None:
        self.path = Path(path)
        self.metadata = metadata
        self.entries = {e.name: e for e in entries}
        self._order = list(entries)
        self._reserve = reserve
        self._sweep = sweep
        self.data_start = len(header_bytes(entries, metadata, reserve=reserve))
        self._begin: dict[str, int] = {}
        self._done = dict.fromkeys(self.entries, 0)
        self._stack = contextlib.ExitStack()
        self._fd = -1
        offset = self.data_start
        for e in entries:
            self._begin[e.name] = offset
            offset += e.nbytes
        self.size = offset

    def __enter__(self) -> Self:
        file = self._stack.enter_context(atomic_file(self.path, size=self.size, sweep=self._sweep))
        self._fd = file.fileno()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._stack.__exit__(kind, value, trace)
            return
        with self._stack:
            self._check_complete()
            header = header_bytes(self._order, self.metadata, reserve=self._reserve)
            if len(header) != self.data_start:
                raise ValueError(f"{self.path}: the metadata outgrew the {self._reserve} reserved bytes")
            pwrite_all(self._fd, memoryview(header), 0)

    def write(self, name: str, rows: NDArray[Any]) -> None:
        """Append rows to one array.

        Parameters
        ----------
        name : str
        rows : ndarray of the entry's dtype, shape (n, in_features), or any shape of whole rows
            The rows that follow those written before.
        """
        entry = self.entries[name]
        if rows.dtype != entry.dtype:
            raise ValueError(f"{self.path}: {name}: rows are {rows.dtype}, {entry.dtype} was announced")
        if rows.ndim and entry.shape and rows.shape[-1] != entry.shape[-1]:
            raise ValueError(
                f"{self.path}: {name}: rows of {rows.shape[-1]}, {entry.shape[-1]} were announced"
            )
        data = np.ascontiguousarray(rows).reshape(-1).view(np.uint8)
        start = self._advance(name, data.nbytes)
        pwrite_all(self._fd, data.data, start)

    def copy(self, name: str, source: int, offset: int) -> None:
        """Take the whole data of one array from a region of an open file; see :func:`copy_region`.

        Parameters
        ----------
        name : str
        source : int
            File descriptor, readable.
        offset : int
            First byte of the region.
        """
        count = self.entries[name].nbytes
        copy_region(source, offset, self._fd, self._advance(name, count), count)

    def hash_data(self, digest: Any) -> None:
        """Feed all data (without the header) to a ``hashlib`` object; they must be complete."""
        self._check_complete()
        offset = self.data_start
        while offset < self.size:
            block = os.pread(self._fd, min(_HASH_BYTES, self.size - offset), offset)
            digest.update(block)
            offset += len(block)

    def _check_complete(self) -> None:
        for e in self._order:
            if self._done[e.name] != e.nbytes:
                raise ValueError(
                    f"{self.path}: {e.name}: {self._done[e.name]} of {e.nbytes} bytes were written"
                )

    def _advance(self, name: str, count: int) -> int:
        done = self._done[name]
        if done + count > self.entries[name].nbytes:
            raise ValueError(
                f"{self.path}: {name}: {done + count} bytes for an array of {self.entries[name].nbytes}"
            )
        self._done[name] = done + count
        return self._begin[name] + done


def plan_shards(sizes: Sequence[int], max_bytes: int) -> list[range]:
    """Split tensors over files, in order.

    Parameters
    ----------
    sizes : sequence of int
        Bytes of each tensor.
    max_bytes : int
        Data bytes a file may hold; a larger tensor gets a file of its own and is never split.

    Returns
    -------
    list of range
        Indices of each file's tensors; at least one file.

    Examples
    --------
    >>> plan_shards([3, 3, 9, 1], 6)
    [range(0, 2), range(2, 3), range(3, 4)]
    """
    if max_bytes < 1:
        raise RecipeError(f"the largest file may hold {max_bytes} bytes; 1 or more are needed")
    shards: list[range] = []
    first, held = 0, 0
    for i, size in enumerate(sizes):
        if i > first and held + size > max_bytes:
            shards.append(range(first, i))
            first, held = i, 0
        held += size
    shards.append(range(first, len(sizes)))
    return shards


def shard_names(count: int, *, numbered: bool = False) -> list[str]:
    """File names of ``count`` shards.

    Parameters
    ----------
    count : int
    numbered : bool
        Whether a single file is numbered too.

    Examples
    --------
    >>> shard_names(1), shard_names(2)
    (['model.safetensors'], ['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors'])
    """
    if count == 1 and not numbered:
        return ["model.safetensors"]
    return [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def index_bytes(files: Mapping[str, Sequence[Entry]]) -> bytes:
    """``model.safetensors.index.json``.

    Parameters
    ----------
    files : mapping of file name to its entries

    Returns
    -------
    bytes
        ``metadata.total_size`` in data bytes, and ``weight_map`` sorted by name.
    """
    weight_map = {e.name: file for file, entries in files.items() for e in entries}
    total = sum(e.nbytes for entries in files.values() for e in entries)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode()
