"""A .cbk that is written in several runs: records are appended, a journal says which of them are whole.

The journal holds one JSON object a line: a record's name and digest, and what the writer wants to know again. A line
is written when its record is on the disk. At the next run every record of the journal is read and compared; the file
is cut after the last one that is whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from trapetum.errors import OutputError
from trapetum.formats.atomic import disk_errors
from trapetum.formats.cbk_records import CbkHeader, Record
from trapetum.formats.cbk_writer import record_entry

__all__ = ["ResumableCbkWriter"]

_CHUNK = 16 << 20
_SYNC_BYTES = 64 << 20  # records of less together share one fsync: a norm is a few kilobytes
_SYNC_SECONDS = 5.0  # most work that a kill may cost, where records take long


class ResumableCbkWriter:
    """As :class:`~trapetum.formats.cbk_writer.CbkWriter`, but what was written stays.

    Parameters
    ----------
    path : Path
        The unfinished file; ``PATH.journal`` lies beside it.
    header : CbkHeader

    Attributes
    ----------
    entries : list of dict
        As of ``CbkWriter``.
    done : dict of str to dict
        Records that an earlier run wrote -> what it noted with them.
    """

    def __init__(self, path: Path, header: CbkHeader) -> None:
        self.path, self.header = path, header
        self.journal = path.with_name(path.name + ".journal")
        self.entries: list[dict[str, Any]] = []
        self.done: dict[str, dict[str, Any]] = {}
        self.header_sha256 = hashlib.sha256(header.to_bytes()).hexdigest()
        self._digest = hashlib.sha256()
        self._records = list(header.records())
        self._unsynced, self._synced = 0, time.monotonic()
        self._waiting: list[str] = []
        self._file: BinaryIO | None = None

    def __enter__(self) -> Self:
        with disk_errors(self.path):
            self._file = open(self.path, "r+b" if self.path.exists() else "w+b")
            try:
                self._take_over(self._file, self._lines())
            except BaseException:
                self._file.close()
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is None:
            return
        try:
            if kind is None or not issubclass(kind, OSError | OutputError):
                self._sync()
        finally:
            with disk_errors(self.path) if kind is None else contextlib.suppress(OSError):
                self._file.close()  # on a full disk what is buffered cannot be flushed, and that is known already

    @property
    def sha256(self) -> str:
        """Digest of everything so far."""
        return self._digest.hexdigest()

    @property
    def complete(self) -> bool:
        """Whether every record is there."""
        return len(self.entries) == len(self._records)

    def write(self, name: str, parts: Iterable[NDArray[Any]]) -> None:
        """Write the next record; :meth:`note` must follow.

        Raises
        ------
        ValueError
            If another record is due, or the parts have another length.
        """
        if self._file is None:
            raise ValueError("ResumableCbkWriter is used outside its with block")
        record = self._records[len(self.entries)]
        if record.name != name:
            raise ValueError(f"record {name} is out of order; {record.name} is next")
        digest, written = hashlib.sha256(), 0
        for part in parts:
            data = np.ascontiguousarray(part).reshape(-1).view(np.uint8).data
            digest.update(data)
            self._digest.update(data)
            with disk_errors(self.path):
                self._file.write(data)
            written += data.nbytes
        if written != record.nbytes:
            raise ValueError(f"record {name} has {written} bytes; {record.nbytes} are due")
        self.entries.append(record_entry(record, digest.hexdigest()))
        self._unsynced += written

    def note(self, content: dict[str, Any]) -> None:
        """Remember the record that was written last, and ``content`` with it."""
        entry = self.entries[-1]
        self._waiting.append(json.dumps({"name": entry["name"], "sha256": entry["sha256"], "note": content}))
        if self._unsynced >= _SYNC_BYTES or time.monotonic() - self._synced >= _SYNC_SECONDS:
            self._sync()

    def _sync(self) -> None:
        """Records to the disk, then their lines."""
        if self._file is None or not self._waiting:
            return
        with disk_errors(self.path):
            self._file.flush()
            os.fsync(self._file.fileno())
            with open(self.journal, "a", encoding="utf-8") as journal:
                journal.write("".join(line + "\n" for line in self._waiting))
                journal.flush()
                os.fsync(journal.fileno())
        self._waiting, self._unsynced, self._synced = [], 0, time.monotonic()

    def _lines(self) -> list[dict[str, Any]]:
        """Lines of the journal, up to the first that is damaged."""
        found = []
        try:
            text = self.journal.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            return []
        for line, _ in pairwise(text.split("\n")):  # what follows the last newline was cut off
            try:
                content = json.loads(line)
                found.append({key: content[key] for key in ("name", "sha256", "note")})
            except (ValueError, KeyError, TypeError):
                break
        return found

    def _take_over(self, file: BinaryIO, lines: list[dict[str, Any]]) -> None:
        """Compare what is there with the journal; cut both after the last whole record."""
        header = self.header.to_bytes()
        self._digest.update(header)
        kept = []
        if file.read(len(header)) == header:
            for record, line in zip(self._records, lines):
                whole = self._digest.copy()
                if line["name"] != record.name or self._read(file, record, whole) != line["sha256"]:
                    break
                self._digest = whole
                self.entries.append(record_entry(record, line["sha256"]))
                self.done[record.name] = line["note"]
                kept.append(json.dumps(line))
        end = len(header) if not kept else sum(e["nbytes"] for e in self.entries) + len(header)
        if not kept:
            file.seek(0)
            file.write(header)
        file.truncate(end)
        file.seek(end)
        with open(self.journal, "w", encoding="utf-8") as journal:
            journal.write("".join(line + "\n" for line in kept))

    def _read(self, file: BinaryIO, record: Record, whole: Any) -> str | None:
        """Digest of a record of the file, which is added to ``whole``; None where it is cut off."""
        digest, left = hashlib.sha256(), record.nbytes
        while left:
            part = file.read(min(left, _CHUNK))
            if not part:
                return None
            digest.update(part)
            whole.update(part)
            left -= len(part)
        return digest.hexdigest()
