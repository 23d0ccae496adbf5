"""Planes files: matrices in the form that GPU kernels read without re-layout, everything else beside them.

The container is a safetensors file. Its metadata name the layouts and describe every matrix
(``formats/planes_entries.py``; the bytes are specified in ``planes_layout.py`` and ``tiles.py``); other tensors of the
model (norms, a dense embedding) lie beside them under their own names. Version 1 holds ternary matrices only, version 2
codebook and additive ones, too. A matrix is whole or it is invalid, and so :meth:`PlanesFile.raw` refuses to slice;
decoded rows can be had (:meth:`PlanesFile.load`). ``planes.json`` repeats the description for people and tools, with a
SHA-256 of every matrix.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from trapetum.errors import FormatError
from trapetum.formats.atomic import write_atomic
from trapetum.formats.planes_entries import ENTRIES, MatrixEntry, PlanesEntry, PlanesPart, TilesEntry
from trapetum.formats.planes_layout import (
    GROUP_SIZE,
    LAYOUT,
    blocks_to_planes,
    planes_to_blocks,
    tensor_planes,
)
from trapetum.formats.safetensors import SafetensorsFile
from trapetum.formats.safetensors_writer import Entry, SafetensorsWriter, aligned_order, file_size
from trapetum.formats.strict_json import parse_json, shown
from trapetum.rotation import ROTATION_KEY, HadamardRotation
from trapetum.tensors import DenseTensor, QuantizedTensor, matrix_shape

__all__ = [
    "GROUP_SIZE",
    "LAYOUT",
    "MANIFEST",
    "MatrixEntry",
    "PlanesEntry",
    "PlanesFile",
    "PlanesLayout",
    "PlanesPart",
    "TilesEntry",
    "blocks_to_planes",
    "planes_to_blocks",
    "tensor_planes",
    "write_planes",
]

MANIFEST = "planes.json"
# Key of the metadata -> the version from which on files have it.
_VERSIONS = {PlanesEntry.key: 1, TilesEntry.key: 2}


@dataclass(frozen=True)
class PlanesLayout:
    """What a planes file will hold; its size is exact before any data exists.

    Parameters
    ----------
    entries : tuple of MatrixEntry
    dense : mapping of str to (dtype, shape)
        Tensors that lie beside the planes as they are.
    rotation : HadamardRotation, optional
        Folded into the entries that name one.
    """

    entries: tuple[MatrixEntry, ...]
    dense: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]] = field(default_factory=dict)
    rotation: HadamardRotation | None = None

    @property
    def version(self) -> int:
        """The lowest version that can hold the entries."""
        return max((_VERSIONS[entry.key] for entry in self.entries), default=1)

    @property
    def metadata(self) -> dict[str, str]:
        """Metadata of the container."""
        head = {"layout": LAYOUT, "version": str(self.version), "format": "pt"}
        for key, version in _VERSIONS.items():
            if version <= self.version:
                described = {entry.name: entry.describe() for entry in self.entries if entry.key == key}
                head[key] = json.dumps(described)
        return head | ({"rotation": json.dumps(self.rotation.to_json())} if self.rotation else {})

    @property
    def stored(self) -> list[Entry]:
        """Tensors of the container, in the order of their data."""
        matrices = [Entry(e.name, np.dtype(np.uint8), e.stored_shape) for e in self.entries]
        return aligned_order(
            [*matrices, *(Entry(n, dtype, shape) for n, (dtype, shape) in self.dense.items())]
        )

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return file_size(self.stored, self.metadata)


def write_planes(
    path: str | Path,
    layout: PlanesLayout,
    load: Callable[[str], QuantizedTensor],
    wrote: Callable[[str], object] = lambda name: None,
) -> Path:
    """Write a planes file and ``planes.json`` beside it; one tensor is in memory at a time.

    Parameters
    ----------
    path : path
        The ``.safetensors`` file.
    layout : PlanesLayout
    load : callable
        Name of a weight -> its tensor: that of the entry for a part, a ``DenseTensor`` for ``dense``.
    wrote : callable, optional
        Told the name of each weight that is written.

    Returns
    -------
    Path
        The manifest.

    Raises
    ------
    FormatError
        If a part is not what its entry says or does not fit the layout; names the tensor.
    """
    path = Path(path)
    for entry in layout.entries:
        if entry.misfit:
            raise FormatError(f"{path}: tensor {shown(entry.parts[0].name)} has {entry.misfit}")
    digests = {}
    with SafetensorsWriter(path, layout.stored, layout.metadata) as writer:
        for entry in layout.entries:
            tensors = [_expected(load(part.name), entry, part, path) for part in entry.parts]
            try:
                data = entry.pack(tensors)
            except ValueError as problem:
                raise FormatError(f"{path}: tensor {shown(entry.name)}: {problem}") from None
            digests[entry.name] = hashlib.sha256(data.data).hexdigest()
            writer.write(entry.name, data)
            for part in entry.parts:
                wrote(part.name)
        for name in layout.dense:
            tensor = load(name)
            if not isinstance(tensor, DenseTensor):
                raise FormatError(f"{path}: tensor {shown(name)} is {tensor.layout}, not dense")
            writer.write(name, tensor.values)
            wrote(name)
    manifest = {
        "layout": LAYOUT,
        "version": layout.version,
        "file": path.name,
        "tensors": {e.name: {**e.describe(), "sha256": digests[e.name]} for e in layout.entries},
    }
    target = path.with_name(MANIFEST)
    write_atomic(target, (json.dumps(manifest, indent=2) + "\n").encode())
    return target


def _expected(tensor: QuantizedTensor, entry: MatrixEntry, part: PlanesPart, path: Path) -> QuantizedTensor:
    if not isinstance(tensor, entry.tensor):
        raise FormatError(
            f"{path}: tensor {shown(part.name)} is {tensor.layout}; {entry.layout} holds {entry.tensor.layout} ones"
        )
    if tensor.shape != tuple(part.shape):
        raise FormatError(f"{path}: tensor {shown(part.name)} has shape {tensor.shape}, not {part.shape}")
    return tensor


class PlanesFile:
    """Reader of a planes file; made by :meth:`open`.

    Attributes
    ----------
    path : Path
    entries : dict of str to MatrixEntry
        By name in the file.
    rotation : HadamardRotation or None
        Folded into the weights for which :meth:`rotation_of` gives it.
    """

    def __init__(
        self,
        file: SafetensorsFile,
        entries: Iterable[MatrixEntry],
        rotation: HadamardRotation | None = None,
    ) -> None:
        self._file = file
        self.path = file.path
        self.rotation = rotation
        self.entries = {entry.name: entry for entry in entries}
        self._where: dict[str, tuple[MatrixEntry, int]] = {}
        for entry in self.entries.values():
            first = 0
            for part in entry.parts:
                self._where[part.name] = entry, first
                first += matrix_shape(part.shape)[0]
        self._dense = [name for name in file.tensors if name not in self.entries]

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, mmap: bool = True) -> Self:
        """Open and check a file.

        Raises
        ------
        FormatError
            If it is no planes file, of another version, or its description does not fit its tensors.
        """
        file = SafetensorsFile.open(path, mmap=mmap)
        try:
            layout, version = file.metadata.get("layout"), file.metadata.get("version")
            known = [str(v) for v in _VERSIONS.values()]
            if layout != LAYOUT or version not in known:
                raise FormatError(
                    f"{file.path}: layout {shown(layout)} version {shown(version)}; {LAYOUT} version "
                    f"{' and '.join(known)} can be read"
                )
            entries: list[MatrixEntry] = []
            for kind in ENTRIES:
                if int(version) >= _VERSIONS[kind.key]:
                    text = file.metadata.get(kind.key, "").encode()
                    described = parse_json(text, f"{file.path}: metadata key {kind.key}")
                    entries += _check(kind, described, file)
            _unique(entries, file)
            return cls(file, entries, _rotation(file, entries))
        except BaseException:
            file.close()
            raise

    def names(self) -> list[str]:
        """Names of all weights: the parts of the planes tensors, then the dense ones."""
        return [*self._where, *self._dense]

    def whole(self, names: Sequence[str]) -> MatrixEntry | None:
        """The planes tensor that holds just these weights, in this order; None where there is none."""
        entry = self._where[names[0]][0] if names[0] in self._where else None
        return entry if entry is not None and [part.name for part in entry.parts] == list(names) else None

    def rotation_of(self, name: str) -> HadamardRotation | None:
        """The rotation that is folded into a weight; :meth:`load` gives the weights as stored, rotated."""
        if name not in self._where or self._where[name][0].rotation is None:
            return None
        return self.rotation

    def raw(self, name: str, rows: slice | None = None) -> NDArray[np.uint8]:
        """The bytes of a matrix, uint8 of the entry's stored shape.

        Raises
        ------
        FormatError
            If rows are asked for: a slice of the planes is not a planes tensor.
        """
        if rows is not None:
            raise FormatError(
                f"{self.path}: rows of planes tensor {shown(name)} were asked for; {LAYOUT} is whole or invalid",
                hint="Use load() for decoded rows, or concatenate matrices before laying them out.",
            )
        return self._file.read(name)

    def load(self, name: str, rows: slice | None = None) -> QuantizedTensor:
        """A weight, or some of its rows as a (selected rows, in_features) tensor.

        Returns
        -------
        QuantizedTensor
            Of the entry's kind, or a ``DenseTensor``.

        Raises
        ------
        FormatError
            If a code has no value.
        """
        if name not in self._where:
            return DenseTensor(self._file.read(name, rows))
        entry, first = self._where[name]
        part = next(part for part in entry.parts if part.name == name)
        count = matrix_shape(part.shape)[0]
        start, stop, step = (rows or slice(None)).indices(count)
        if step != 1:
            raise ValueError(f"rows must have step 1, not {step}")
        chosen = slice(first + start, first + max(start, stop))
        try:
            return entry.unpack(self._file.read(entry.name), chosen, part.shape if rows is None else ())
        except ValueError as problem:
            raise FormatError(f"{self.path}: tensor {shown(name)}: {problem}") from None

    def close(self) -> None:
        """Close the file; arrays that were read stay valid."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _rotation(file: SafetensorsFile, entries: Sequence[MatrixEntry]) -> HadamardRotation | None:
    """The rotation of the metadata; every rotated tensor must find its signs there."""
    rotated = [e for e in entries if e.rotation is not None]
    stated = file.metadata.get("rotation")
    rotation = None
    if stated is not None:
        try:
            value = parse_json(stated.encode(), f"{file.path}: metadata key rotation")
            rotation = HadamardRotation.from_json(value)
        except (ValueError, KeyError, TypeError, AttributeError) as problem:
            raise FormatError(f"{file.path}: rotation is not usable: {problem}") from None
    for entry in rotated:
        if rotation is None or entry.rotation != ROTATION_KEY or entry.in_features not in rotation.signs:
            raise FormatError(
                f"{file.path}: planes tensor {shown(entry.name)} is rotated ({shown(entry.rotation)}) and the file has "
                f"no signs for its rows of {entry.in_features} weights"
            )
    return rotation


def _check(kind: type[MatrixEntry], described: Any, file: SafetensorsFile) -> list[MatrixEntry]:
    """Entries of one key of the metadata, held against the tensors that the file has."""
    if not isinstance(described, dict):
        raise FormatError(f"{file.path}: metadata key {kind.key} is not a table of tensors")
    entries: list[MatrixEntry] = []
    for name, item in described.items():
        what = f"{file.path}: planes tensor {shown(name)}"
        try:
            parts = tuple(PlanesPart(p["name"], tuple(map(int, p["shape"]))) for p in item["parts"])
            entry = kind.read(name, parts, item)
            exact = entry.describe() == {**item, "parts": [asdict(part) for part in parts]}
        except (KeyError, TypeError, ValueError, IndexError):
            raise FormatError(f"{what} is described incompletely in the file's metadata") from None
        if not exact or not entry.consistent or any(p.shape[-1:] != (entry.in_features,) for p in parts):
            raise FormatError(f"{what}: its description contradicts itself: {shown(json.dumps(item))}")
        info = file.tensors.get(name)
        if info is None or info.shape != entry.stored_shape or info.dtype != np.uint8 or entry.misfit:
            found = "missing" if info is None else f"{info.dtype} {info.shape}"
            raise FormatError(f"{what} is {found}; uint8 {entry.stored_shape} is described")
        entries.append(entry)
    return entries


def _unique(entries: Sequence[MatrixEntry], file: SafetensorsFile) -> None:
    """No weight may be in two places."""
    seen = set(file.tensors) - {entry.name for entry in entries}
    names = [entry.name for entry in entries]
    if len(set(names)) < len(names):
        raise FormatError(f"{file.path}: a tensor is described as planes and as tiles")
    for part in (part for entry in entries for part in entry.parts):
        if part.name in seen:
            raise FormatError(f"{file.path}: weight {shown(part.name)} occurs twice")
        seen.add(part.name)
