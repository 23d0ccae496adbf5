"""Finished tensors of a running job, one small file each. The set of published parts IS the journal.

``DIR/.trapetum/parts/IIIII-HHHHHHHHHHHHHHHH.safetensors`` holds the stored arrays of one tensor (I: its
place in the plan, H: begin of the SHA-256 of its name), sorted by suffix, and its complete manifest entry
as JSON in the header's metadata. Beside it stand the CPU features of its maker (``cpu``): no part of the artifact,
but parts from unlike machines may differ in a last bit. A part is published by rename when all of it is on
disk, so no second record of progress could disagree with the data: after kill -9 the next run asks for each
tensor's part and computes those that are not there. A part that is empty, cut off or altered counts as not there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from numpy.typing import NDArray

from trapetum.errors import FormatError
from trapetum.formats.atomic import disk_errors
from trapetum.formats.checksums import file_sha256
from trapetum.formats.manifest import TensorRecord, parse_record, tensor_entry
from trapetum.formats.safetensors import SafetensorsFile
from trapetum.formats.safetensors_writer import SafetensorsWriter, header_bytes
from trapetum.formats.stored_arrays import Arrays, stored_entries
from trapetum.formats.strict_json import parse_json

__all__ = ["Part", "PartWriter", "part_path", "read_part", "write_part"]

_ENTRY_BYTES = 4096  # room for the entry's JSON: about 600 bytes are used


@dataclass(frozen=True)
class Part:
    """A published tensor.

    Parameters
    ----------
    path : Path
    name : str
    entry : dict
        The tensor's manifest entry.
    record : TensorRecord
        The same, checked.
    offsets : dict of suffix to int
        Where each array begins in the file.
    cpu : str
        CPU features of its maker, as :func:`trapetum.quantize.cpu.cpu_features` gives them; empty if unknown.
    """

    path: Path
    name: str
    entry: dict[str, Any]
    record: TensorRecord
    offsets: dict[str, int]
    cpu: str = ""


def part_path(folder: str | Path, index: int, name: str) -> Path:
    """Where the part of tensor ``name``, number ``index`` of the plan, is published."""
    return Path(folder) / f"{index:05d}-{hashlib.sha256(name.encode()).hexdigest()[:16]}.safetensors"


class PartWriter:
    """Stream one tensor, row block by row block, and publish it with its manifest entry.

    Parameters
    ----------
    folder : path
        ``DIR/.trapetum/parts``; created.
    index : int
        Place of the tensor in the plan, from 0.
    name : str
        Name of the tensor.
    arrays : mapping of suffix to (dtype, shape)
        The stored arrays of the whole tensor, as ``Scheme.arrays`` gives them.
    cpu : str
        CPU features of this machine.

    Notes
    -----
    A context manager; used by one thread::

        with PartWriter(parts, index, name, scheme.arrays(shape, dtype, wide)) as part:
            for block in blocks:
                part.write(scheme.quantize(block, wide=wide).to_arrays())
            entry = part.finish({"layout": ..., "shape": ..., "scheme": ..., ...})

    Leaving the block publishes; an exception, or leaving without :meth:`finish`, leaves nothing behind.

    Raises
    ------
    OutputError
        If it cannot be written.
    ValueError
        If the blocks do not make up the announced arrays.
    """

    def __init__(self, folder: str | Path, index: int, name: str, arrays: Arrays, cpu: str = "") -> None:
        self.path = part_path(folder, index, name)
        self.name = name
        self.entry: dict[str, Any] | None = None
        self._arrays = dict(arrays)
        entries = stored_entries(name, arrays)
        self._stored = {suffix: e.name for suffix, e in zip(sorted(arrays), entries)}
        self._metadata = {"name": name, "cpu": cpu, "entry": ""}
        reserve = len(header_bytes(entries, self._metadata)) + _ENTRY_BYTES
        self._writer = SafetensorsWriter(self.path, entries, self._metadata, reserve=reserve, sweep=False)

    def __enter__(self) -> Self:
        with disk_errors(self.path.parent):
            self.path.parent.mkdir(parents=True, exist_ok=True)
        self._writer.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self.entry is None:
            kind, value = ValueError, ValueError(f"{self.name}: finish() was not called")
            self._writer.__exit__(kind, value, None)
            raise value
        self._writer.__exit__(kind, value, trace)

    def write(self, block: Mapping[str, NDArray[Any]]) -> None:
        """Append the arrays of the next row block, by suffix, as ``QuantizedTensor.to_arrays`` gives them."""
        if block.keys() != self._stored.keys():
            raise ValueError(
                f"{self.name}: arrays {sorted(block)} were given, {sorted(self._stored)} announced"
            )
        for suffix, rows in block.items():
            self._writer.write(self._stored[suffix], rows)

    def finish(self, draft: Mapping[str, Any]) -> dict[str, Any]:
        """Complete the manifest entry from the data on disk.

        Parameters
        ----------
        draft : mapping
            See :func:`trapetum.formats.manifest.tensor_entry`.

        Returns
        -------
        dict
            The complete entry.
        """
        digest = hashlib.sha256()
        self._writer.hash_data(digest)
        self.entry = tensor_entry(self.name, draft, self._arrays, digest.hexdigest())
        text = json.dumps(self.entry, ensure_ascii=False, allow_nan=False)
        self._writer.metadata = {**self._metadata, "entry": text}
        return self.entry


def write_part(
    folder: str | Path, index: int, name: str, arrays: Mapping[str, NDArray[Any]], draft: Mapping[str, Any]
) -> dict[str, Any]:
    """Publish a tensor whose arrays are at hand whole; see :class:`PartWriter`.

    Returns
    -------
    dict
        The complete manifest entry.
    """
    with PartWriter(folder, index, name, {s: (a.dtype, a.shape) for s, a in arrays.items()}) as part:
        part.write(arrays)
        return part.finish(draft)


def read_part(folder: str | Path, index: int, name: str, *, check_data: bool = True) -> Part | None:
    """The published part of a tensor.

    Parameters
    ----------
    folder : path
    index : int
    name : str
    check_data : bool
        Whether to compare the SHA-256 of the data too (about 1 s a GB); do so when a job resumes.

    Returns
    -------
    Part or None
        None if there is none, or it is empty, cut off, altered or another tensor's: compute it again.
    """
    path = part_path(folder, index, name)
    if not path.is_file():
        return None
    try:
        with SafetensorsFile.open(path, mmap=False) as file:
            return _part(file, name, check_data)
    except FormatError:
        return None


def _part(file: SafetensorsFile, name: str, check_data: bool) -> Part | None:
    if file.metadata.get("name") != name or "entry" not in file.metadata:
        return None
    entry = parse_json(file.metadata["entry"].encode(), str(file.path))
    record = parse_record(name, entry)
    found = [(t.name, t.dtype, t.shape) for t in file.tensors.values()]
    expected = [(e.name, e.dtype, e.shape) for e in record.arrays.values()]
    if sorted(found, key=lambda t: t[0]) != sorted(expected, key=lambda t: t[0]):
        return None
    data_start = min((t.start for t in file.tensors.values()), default=0)
    if check_data and file_sha256(file.path, data_start) != record.sha256:
        return None
    offsets = {suffix: file.tensors[e.name].start for suffix, e in record.arrays.items()}
    return Part(file.path, name, entry, record, offsets, file.metadata.get("cpu", ""))
