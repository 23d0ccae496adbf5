"""Writing a .cbk: one record after another, under a temporary name, with a checksum of each.

The format itself has neither names nor checksums, so the writer collects them for the JSON manifest beside
the file.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from trapetum.errors import OutputError
from trapetum.formats.atomic import atomic_file
from trapetum.formats.cbk_records import CbkHeader, Record

__all__ = ["CbkWriter", "record_entry"]


def record_entry(record: Record, sha256: str) -> dict[str, Any]:
    """What the manifest says of a record."""
    return {
        "name": record.name,
        "kind": record.kind,
        "shape": list(record.shape),
        "offset": record.offset,
        "nbytes": record.nbytes,
        "sha256": sha256,
    }


class CbkWriter:
    """Writes a .cbk record by record, in the header's order; the file gets its name at the end.

    A context manager: leaving the block without an exception publishes the file, provided that every record
    was written; otherwise nothing of it remains.

    Parameters
    ----------
    path : path
        Final name.
    header : CbkHeader
    overwrite : bool
        Whether an existing file may be replaced.

    Attributes
    ----------
    entries : list of dict
        What was written: name, kind, shape, offset, nbytes, sha256 of each record.
    header_sha256 : str

    Raises
    ------
    OutputError
        If the file exists, or cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], header: CbkHeader, *, overwrite: bool = False) -> None:
        self.path = Path(path)
        self.header = header
        self.entries: list[dict[str, Any]] = []
        self._overwrite = overwrite
        self._pending = header.records()
        self.header_sha256 = hashlib.sha256(header.to_bytes()).hexdigest()
        self._digest = hashlib.sha256()
        self._stack = contextlib.ExitStack()
        self._file: BinaryIO | None = None

    def __enter__(self) -> Self:
        if self.path.exists() and not self._overwrite:
            raise OutputError(f"{self.path}: exists", hint="Give --overwrite to replace it.")
        size = self.header.file_bytes()
        self._file = self._stack.enter_context(atomic_file(self.path, size=size, replace=self._overwrite))
        self._put(memoryview(self.header.to_bytes()))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and (missing := next(self._pending, None)) is not None:
            error = ValueError(f"{self.path}: record {missing.name} was not written")
            self._stack.__exit__(ValueError, error, None)
            raise error
        self._stack.__exit__(kind, value, trace)

    @property
    def sha256(self) -> str:
        """Digest of everything written so far."""
        return self._digest.hexdigest()

    def write(self, name: str, parts: Iterable[NDArray[Any]]) -> None:
        """Write the next record.

        Parameters
        ----------
        name : str
            Its name, which must be the next one of the header's walk.
        parts : iterable of ndarray
            Its bytes in order: for f32 and f16 rows in that dtype, for a matrix ``S16Builder.parts()``.

        Raises
        ------
        ValueError
            If another record is due, or the parts have another length.
        """
        record = next(self._pending, None)
        if record is None or record.name != name:
            raise ValueError(f"record {name} is out of order; {record and record.name} is next")
        digest, written = hashlib.sha256(), 0
        for part in parts:
            data = np.ascontiguousarray(part).reshape(-1).view(np.uint8).data
            digest.update(data)
            self._put(data)
            written += data.nbytes
        if written != record.nbytes:
            raise ValueError(f"record {name} has {written} bytes; {record.nbytes} are due")
        self.entries.append(record_entry(record, digest.hexdigest()))

    def _put(self, data: memoryview) -> None:
        if self._file is None:
            raise ValueError("CbkWriter is used outside its with block")
        self._digest.update(data)
        self._file.write(data)
