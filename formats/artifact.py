"""A quantized model folder, opened lazily. Specified byte for byte in docs/formats/artifact.md.

:meth:`Artifact.open` checks the manifest against the headers of all weight files, so that a missing,
surplus or misshapen array is found before anything is computed; values are read when asked for, by rows
where asked so. :meth:`Artifact.check_sums` reads every byte.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

import numpy as np

from trapetum.errors import FormatError
from trapetum.formats.atomic import WORK_FOLDER
from trapetum.formats.checkpoint import SIDE_FILES
from trapetum.formats.checksums import file_sha256, log_fault, parse_sums
from trapetum.formats.manifest import (
    INDEX,
    MANIFEST,
    RUN_LOG,
    SUMS,
    TensorRecord,
    is_plain_name,
    manifest_rotation,
    parse_manifest,
)
from trapetum.formats.safetensors import SafetensorsFile
from trapetum.formats.strict_json import parse_json, shown
from trapetum.progress import Progress
from trapetum.rotation import HadamardRotation
from trapetum.tensors import LAYOUTS, DenseTensor, QuantizedTensor

__all__ = ["Artifact"]

_FLOAT32: np.dtype[Any] = np.dtype(np.float32)
_HASH_BYTES = 16 << 20  # rows are read and dropped in pieces of about this size


class Artifact:
    """An open artifact; implements ``TensorSource``. Made by :meth:`open`; reads may come from any thread.

    Attributes
    ----------
    path : Path
    manifest : dict
        Content of ``trapetum.json``.
    records : dict of str to TensorRecord
        Its tensors, checked, in order.
    config : dict
        Content of ``config.json``.
    rotation : HadamardRotation or None
        Folded into the tensors for which :meth:`rotation_of` gives it.
    notes : list of str

    Examples
    --------
    ::

        with Artifact.open("out") as art:
            art["model.layers.0.mlp.up_proj.weight"].dequantize(slice(0, 8))   # float32 [8, in_features]
    """

    kind = "artifact"

    def __init__(
        self,
        path: Path,
        manifest: dict[str, Any],
        records: dict[str, TensorRecord],
        config: dict[str, Any],
        files: dict[str, SafetensorsFile],
    ) -> None:
        self.path, self.manifest, self.records, self.config = path, manifest, records, config
        self.notes = [note for file in files.values() for note in file.notes]
        self.rotation = manifest_rotation(manifest, str(path / MANIFEST))
        self._files = files
        self._where = {array: file for file in files.values() for array in file.tensors}

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, mmap: bool = True) -> Self:
        """Open an artifact and check everything but the values.

        Parameters
        ----------
        path : path-like
            The folder.
        mmap : bool
            See :meth:`SafetensorsFile.open`.

        Raises
        ------
        FormatError
            If it is not an artifact, is unfinished, has a newer format or a layout that is not known
            here, or if manifest, index and weight files disagree.
        """
        path = Path(path)
        manifest, records = parse_manifest(_read_manifest(path), str(path / MANIFEST))
        config = _read_object(path / "config.json", constants=True)
        where = _read_index(path / INDEX, records)
        files: dict[str, SafetensorsFile] = {}
        try:
            for name in sorted(set(where.values())):
                files[name] = SafetensorsFile.open(path / name, mmap=mmap)
            _check_arrays(path, records, where, files)
        except BaseException:
            for file in files.values():
                file.close()
            raise
        return cls(path, manifest, records, config, files)

    def names(self) -> list[str]:
        """Tensor names in the manifest's order."""
        return list(self.records)

    def shape(self, name: str) -> tuple[int, ...]:
        """Logical shape."""
        return self._record(name).shape

    def dtype(self, name: str) -> np.dtype[Any]:
        """Stored dtype of a dense tensor; float32 of a quantized one."""
        record = self._record(name)
        return record.arrays[""].dtype if record.layout == DenseTensor.layout else _FLOAT32

    def layout(self, name: str) -> str:
        """Layout, a key of ``trapetum.tensors.LAYOUTS``."""
        return self._record(name).layout

    def rotation_of(self, name: str) -> HadamardRotation | None:
        """The rotation that is folded into a tensor; ``load`` gives the weights as stored, rotated."""
        return None if self._record(name).params.get("rotation") is None else self.rotation

    def file(self, name: str) -> Path:
        """The file that holds a tensor, for messages."""
        return self._where[next(iter(self._record(name).arrays.values())).name].path

    def load(self, name: str, rows: slice | None = None) -> QuantizedTensor:
        """A tensor, or some of its rows as a (selected rows, in_features) tensor; only their bytes are read.

        Raises
        ------
        FormatError
            If there is no such tensor, its bytes cannot be read, or a code has no codebook entry.
        """
        record = self._record(name)
        shared = LAYOUTS[record.layout].shared
        arrays = {
            s: self._where[e.name].read(e.name, None if s in shared else rows)
            for s, e in record.arrays.items()
        }
        shape = record.shape
        if rows is not None:  # every array but shared ones has one row a weight row
            count = next(a.shape[0] for s, a in arrays.items() if s not in shared)
            shape = (count, record.shape[-1] if record.shape else 1)
        try:
            return LAYOUTS[record.layout].from_arrays(arrays, shape, record.params)
        except ValueError as error:
            raise FormatError(f"{self.file(name)}: tensor {shown(name)}: {error}") from None

    def __getitem__(self, name: str) -> QuantizedTensor:
        return self.load(name)

    def __contains__(self, name: object) -> bool:
        return name in self.records

    def __iter__(self) -> Iterator[str]:
        return iter(self.records)

    def __len__(self) -> int:
        return len(self.records)

    def release(self, name: str, rows: slice | None = None) -> None:
        """Drop mapped pages of a tensor or of some of its rows."""
        record = self._record(name)
        for suffix, entry in record.arrays.items():
            if rows is None or suffix not in LAYOUTS[record.layout].shared:
                self._where[entry.name].release(entry.name, rows)

    def tokenizer_file(self) -> Path | None:
        """tokenizer.json, where there is one."""
        path = self.path / "tokenizer.json"
        return path if path.is_file() else None

    def side_files(self) -> list[Path]:
        """Config, tokenizer and generation files, sorted; no licences, no model card."""
        return sorted(p for p in self.path.iterdir() if SIDE_FILES.fullmatch(p.name) and p.is_file())

    def check_sums(self, progress: Progress | None = None) -> list[str]:
        """Read every byte: files against SHA256SUMS, tensors against the manifest.

        Returns
        -------
        list of str
            One sentence a problem; empty if all is well.
        """
        try:
            sums = parse_sums(self.path / SUMS)
        except FormatError as error:
            return [error.message]
        present = {p.name for p in self.path.iterdir() if is_plain_name(p.name) and p.is_file()}
        present -= {SUMS, RUN_LOG}
        problems = [f"{self.path / name}: is not listed in {SUMS}" for name in sorted(present - sums.keys())]
        if (fault := log_fault(self.path / RUN_LOG)) is not None:
            problems.append(fault)
        total = sum(r.nbytes for r in self.records.values())
        meter = progress or Progress()
        meter.begin("checking sums", 2 * total)
        with ThreadPoolExecutor() as pool:  # hashing releases the GIL
            problems += filter(
                None, pool.map(lambda item: self._check_file(item[0], item[1], meter), sorted(sums.items()))
            )
            problems += filter(None, pool.map(lambda r: self._check_tensor(r, meter), self.records.values()))
        meter.end()
        return problems

    def _check_file(self, name: str, digest: str, progress: Progress) -> str | None:
        path = self.path / name
        if not is_plain_name(name):
            return f"{self.path / SUMS}: {shown(name)} is not the name of a file in this folder"
        if not path.is_file():
            return f"{path}: is listed in {SUMS} but does not exist"
        try:
            found = file_sha256(path)
        except FormatError as error:
            return error.message
        if name in self._files:
            progress.advance(sum(t.nbytes for t in self._files[name].tensors.values()))
        return None if found == digest else f"{path}: SHA-256 is {found}; {SUMS} says {digest}"

    def _check_tensor(self, record: TensorRecord, progress: Progress) -> str | None:
        digest = sha256()
        for entry in record.arrays.values():
            file = self._where[entry.name]
            rows = entry.nbytes // max(1, entry.shape[-1] * entry.dtype.itemsize) if entry.shape else 1
            step = max(1, _HASH_BYTES * rows // max(1, entry.nbytes))
            for first in range(0, rows, step):
                block = slice(first, first + step)
                try:
                    data = file.read(entry.name, block)
                except FormatError as error:
                    return error.message
                digest.update(np.ascontiguousarray(data).reshape(-1).view(np.uint8).data)
                file.release(entry.name, block)
        progress.advance(record.nbytes)
        if digest.hexdigest() == record.sha256:
            return None
        return (
            f"{self.file(record.name)}: tensor {shown(record.name)}: SHA-256 is {digest.hexdigest()}; "
            f"{MANIFEST} says {record.sha256}"
        )

    def close(self) -> None:
        """Close all files. Tensors that were loaded stay valid."""
        for file in self._files.values():
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _record(self, name: str) -> TensorRecord:
        try:
            return self.records[name]
        except KeyError:
            raise FormatError(f"{self.path}: there is no tensor named {shown(name)}") from None


def _read_manifest(path: Path) -> bytes:
    try:
        return (path / MANIFEST).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        if (path / WORK_FOLDER).is_dir():
            raise FormatError(
                f"{path}: the quantization into this folder is not finished",
                hint="Run the same `trapetum quantize` command again: it goes on where it stopped.",
            ) from None
        raise FormatError(f"{path}: is not an artifact: it has no {MANIFEST}") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        text = getattr(error, "strerror", None) or error
        raise FormatError(f"{path / MANIFEST}: cannot be read: {text}") from None


def _read_object(path: Path, *, constants: bool = False) -> dict[str, Any]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise FormatError(f"{path}: cannot be read: {error.strerror}") from None
    found = parse_json(data, str(path), constants=constants)
    if not isinstance(found, dict):
        raise FormatError(f"{path}: {shown(found)} is not an object")
    return found


def _read_index(path: Path, records: dict[str, TensorRecord]) -> dict[str, str]:
    """stored array -> file; exactly the arrays of the manifest."""
    where = _read_object(path).get("weight_map")
    if not isinstance(where, dict):
        raise FormatError(f"{path}: weight_map is {shown(where)}; an object is allowed")
    for array, file in where.items():
        if not is_plain_name(file):
            raise FormatError(
                f"{path}: {shown(array)} is said to be in {shown(file)}, not a file of this folder"
            )
    expected = {e.name for r in records.values() for e in r.arrays.values()}
    if missing := sorted(expected - where.keys()):
        raise FormatError(f"{path}: lacks {shown(missing[0])} ({len(missing)} in all), which {MANIFEST} has")
    if surplus := sorted(where.keys() - expected):
        raise FormatError(
            f"{path}: lists {shown(surplus[0])} ({len(surplus)} in all), which {MANIFEST} lacks"
        )
    return where


def _check_arrays(
    path: Path, records: dict[str, TensorRecord], where: dict[str, str], files: dict[str, SafetensorsFile]
) -> None:
    for record in records.values():
        for entry in record.arrays.values():
            file = files[where[entry.name]]
            found = file.tensors.get(entry.name)
            if found is None:
                raise FormatError(
                    f"{file.path}: tensor {shown(entry.name)} is missing; {INDEX} says it is here"
                )
            if (found.dtype, found.shape) != (entry.dtype, entry.shape):
                raise FormatError(
                    f"{file.path}: tensor {shown(entry.name)} is {found.dtype} {list(found.shape)}; "
                    f"{MANIFEST} says {entry.dtype} {list(entry.shape)}"
                )
    for name, file in files.items():
        for array in file.tensors:
            if where.get(array) != name:
                raise FormatError(f"{file.path}: holds {shown(array)}, which {INDEX} does not place here")
