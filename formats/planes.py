"""planes-v1: ternary matrices as a codes plane and a scales plane, the form that GPU kernels read without re-layout.

For a matrix of N rows by K weights in groups of 128 (K a multiple of 128), one uint8 tensor of shape (N, K/128 * 34)::

    byte 0 .. N*K/4 - 1          codes, row-major: row*(K/4) + j/4 holds weight j of a row at bits 2*(j%4)
    byte N*K/4 .. N*K/128*34 - 1 scales, float16 little-endian, row-major: row*(K/128) + j/128

The bytes are those of PQ2_0 blocks, gathered: a block's 32 code bytes are consecutive in the first plane, its
scale is in the second. There is no padding, no header and no second copy; a code row begins at a multiple of 32
bytes. Matrices that an engine multiplies as one (q, k, v; gate, up) are concatenated by rows *first* and laid out as
one matrix. Since the planes lie one after the other, rows of the uint8 tensor mean nothing: it is whole or it is
invalid, and so :meth:`PlanesFile.raw` refuses to slice. Decoded rows can be had (:meth:`PlanesFile.load`).

The container is a safetensors file. Its metadata name the layout and describe every planes tensor; other tensors of the
model (norms, a dense embedding) lie beside them under their own names. ``planes.json`` repeats the description for
people and tools, with a SHA-256 of every planes tensor.

Source: the layout is the one that the vLLM GGUF plugin for Prism models prepares at load ("planes-v1").
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

from trapetum.blocktypes import BLOCK_TYPES
from trapetum.errors import FormatError
from trapetum.formats.atomic import write_atomic
from trapetum.formats.safetensors import SafetensorsFile
from trapetum.formats.safetensors_writer import Entry, SafetensorsWriter, aligned_order, file_size
from trapetum.formats.strict_json import parse_json, shown
from trapetum.packing import pack_bits, unpack_bits
from trapetum.rotation import ROTATION_KEY, HadamardRotation
from trapetum.tensors import DenseTensor, QuantizedTensor, TernaryTensor, matrix_shape

__all__ = [
    "GROUP_SIZE",
    "LAYOUT",
    "MANIFEST",
    "PlanesEntry",
    "PlanesFile",
    "PlanesLayout",
    "PlanesPart",
    "blocks_to_planes",
    "planes_to_blocks",
    "tensor_planes",
    "write_planes",
]

LAYOUT = "planes-v1"
VERSION = 1
GROUP_SIZE = 128
MANIFEST = "planes.json"
_BLOCK = BLOCK_TYPES["PQ2_0"]
_CODE_BYTES = GROUP_SIZE // 4


def blocks_to_planes(blocks: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """PQ2_0 rows -> planes.

    Parameters
    ----------
    blocks : ndarray of uint8, shape (rows, k * 34)

    Returns
    -------
    ndarray of uint8, same shape
    """
    rows, width = blocks.shape
    if width % _BLOCK.type_size:
        raise ValueError(f"rows of {width} bytes are no whole PQ2_0 blocks of {_BLOCK.type_size}")
    split = blocks.reshape(rows, width // _BLOCK.type_size, _BLOCK.type_size)
    return np.concatenate([split[:, :, 2:].reshape(-1), split[:, :, :2].reshape(-1)]).reshape(rows, width)


def planes_to_blocks(planes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Undo :func:`blocks_to_planes`; takes a whole tensor (rows, k * 34)."""
    rows, width = planes.shape
    codes, scales = _split(planes, rows, width // _BLOCK.type_size * GROUP_SIZE)
    count = width // _BLOCK.type_size
    blocks = np.empty((rows, count, _BLOCK.type_size), np.uint8)
    blocks[:, :, :2] = scales.view(np.uint8).reshape(rows, count, 2)
    blocks[:, :, 2:] = codes.reshape(rows, count, _CODE_BYTES)
    return blocks.reshape(rows, width)


def tensor_planes(tensors: Sequence[TernaryTensor]) -> NDArray[np.uint8]:
    """Planes of one matrix, or of several that are concatenated by rows first.

    Parameters
    ----------
    tensors : sequence of TernaryTensor
        Groups of 128, float16 scales, equal row lengths.

    Returns
    -------
    ndarray of uint8, shape (rows of all, in_features / 128 * 34)

    Raises
    ------
    ValueError
        If a tensor cannot be stored in this layout.
    """
    first = tensors[0]
    for tensor in tensors:
        if tensor.group_size != GROUP_SIZE or tensor.scales.dtype != np.float16:
            raise ValueError(
                f"groups of {tensor.group_size} with {tensor.scales.dtype} scales; {LAYOUT} holds groups of "
                f"{GROUP_SIZE} with float16 scales"
            )
        if tensor.in_features != first.in_features or tensor.rotation != first.rotation:
            raise ValueError("matrices of different row lengths or rotations cannot be one planes tensor")
    codes = [pack_bits(tensor.codes, 2).reshape(-1) for tensor in tensors]
    scales = [np.ascontiguousarray(t.scales, "<f2").reshape(-1).view(np.uint8) for t in tensors]
    rows = sum(tensor.rows for tensor in tensors)
    return np.concatenate(codes + scales).reshape(rows, _BLOCK.row_bytes(first.in_features))


def _split(
    planes: NDArray[np.uint8], rows: int, in_features: int
) -> tuple[NDArray[np.uint8], NDArray[np.float16]]:
    """Packed codes [rows, K/4] and scales [rows, K/128]."""
    flat = planes.reshape(-1)
    at = rows * in_features // 4
    scales = np.ascontiguousarray(flat[at:]).view("<f2").reshape(rows, in_features // GROUP_SIZE)
    return flat[:at].reshape(rows, in_features // 4), scales


@dataclass(frozen=True)
class PlanesPart:
    """One matrix of a planes tensor.

    Parameters
    ----------
    name : str
        The checkpoint's name of the weight.
    shape : tuple of int
        Logical shape.
    """

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class PlanesEntry:
    """Description of one planes tensor.

    Parameters
    ----------
    name : str
        Name in the file; of an unfused matrix the weight's own.
    parts : tuple of PlanesPart
        The matrices, in the order of their rows.
    levels : {3, 4}
        3 promises that code 3 does not occur.
    rotation : str, optional
        Key of the Hadamard rotation folded into the weights.
    """

    name: str
    parts: tuple[PlanesPart, ...]
    levels: int = 3
    rotation: str | None = None

    @property
    def rows(self) -> int:
        """N."""
        return sum(matrix_shape(part.shape)[0] for part in self.parts)

    @property
    def in_features(self) -> int:
        """K."""
        return matrix_shape(self.parts[0].shape)[1]

    @property
    def scales_offset(self) -> int:
        """First byte of the scales plane."""
        return self.rows * self.in_features // 4

    def describe(self) -> dict[str, Any]:
        """The entry as stored in metadata and manifest."""
        return {
            "N": self.rows,
            "K": self.in_features,
            "group": GROUP_SIZE,
            "codes_offset": 0,
            "scales_offset": self.scales_offset,
            "levels": self.levels,
            "rotation": self.rotation,
            "parts": [asdict(part) for part in self.parts],
        }


@dataclass(frozen=True)
class PlanesLayout:
    """What a planes file will hold; its size is exact before any data exists.

    Parameters
    ----------
    entries : tuple of PlanesEntry
    dense : mapping of str to (dtype, shape)
        Tensors that lie beside the planes as they are.
    rotation : HadamardRotation, optional
        Folded into the entries that name one.
    """

    entries: tuple[PlanesEntry, ...]
    dense: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]] = field(default_factory=dict)
    rotation: HadamardRotation | None = None

    @property
    def metadata(self) -> dict[str, str]:
        """Metadata of the container."""
        described = {entry.name: entry.describe() for entry in self.entries}
        head = {
            "layout": LAYOUT,
            "version": str(VERSION),
            "format": "pt",
            "planes": json.dumps(described),
        }
        return head | ({"rotation": json.dumps(self.rotation.to_json())} if self.rotation else {})

    @property
    def stored(self) -> list[Entry]:
        """Tensors of the container, in the order of their data."""
        planes = [
            Entry(e.name, np.dtype(np.uint8), (e.rows, _BLOCK.row_bytes(e.in_features))) for e in self.entries
        ]
        return aligned_order([*planes, *(Entry(n, dtype, shape) for n, (dtype, shape) in self.dense.items())])

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
        Name of a weight -> its tensor: a ``TernaryTensor`` for a part, a ``DenseTensor`` for ``dense``.
    wrote : callable, optional
        Told the name of each weight that is written.

    Returns
    -------
    Path
        The manifest.

    Raises
    ------
    FormatError
        If a part is not ternary or does not fit the layout; names the tensor.
    """
    path = Path(path)
    for entry in layout.entries:
        for part in entry.parts:
            if matrix_shape(part.shape)[1] % GROUP_SIZE:
                raise FormatError(
                    f"{path}: tensor {shown(part.name)} has rows of {matrix_shape(part.shape)[1]} weights; "
                    f"{LAYOUT} needs a multiple of {GROUP_SIZE}"
                )
    digests = {}
    with SafetensorsWriter(path, layout.stored, layout.metadata) as writer:
        for entry in layout.entries:
            planes = tensor_planes([_ternary(load(part.name), part, path) for part in entry.parts])
            digests[entry.name] = hashlib.sha256(planes.data).hexdigest()
            writer.write(entry.name, planes)
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
        "version": VERSION,
        "file": path.name,
        "tensors": {e.name: {**e.describe(), "sha256": digests[e.name]} for e in layout.entries},
    }
    target = path.with_name(MANIFEST)
    write_atomic(target, (json.dumps(manifest, indent=2) + "\n").encode())
    return target


def _ternary(tensor: QuantizedTensor, part: PlanesPart, path: Path) -> TernaryTensor:
    if not isinstance(tensor, TernaryTensor):
        raise FormatError(
            f"{path}: tensor {shown(part.name)} is {tensor.layout}; {LAYOUT} holds ternary ones"
        )
    if tensor.shape != tuple(part.shape):
        raise FormatError(f"{path}: tensor {shown(part.name)} has shape {tensor.shape}, not {part.shape}")
    return tensor


class PlanesFile:
    """Reader of a planes file; made by :meth:`open`.

    Attributes
    ----------
    path : Path
    entries : dict of str to PlanesEntry
        By name in the file.
    rotation : HadamardRotation or None
        Folded into the weights for which :meth:`rotation_of` gives it.
    """

    def __init__(
        self,
        file: SafetensorsFile,
        entries: Iterable[PlanesEntry],
        rotation: HadamardRotation | None = None,
    ) -> None:
        self._file = file
        self.path = file.path
        self.rotation = rotation
        self.entries = {entry.name: entry for entry in entries}
        self._where: dict[str, tuple[PlanesEntry, int]] = {}
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
            if layout != LAYOUT or version != str(VERSION):
                raise FormatError(
                    f"{file.path}: layout {shown(layout)} version {shown(version)}; {LAYOUT} version {VERSION} "
                    "can be read"
                )
            described = parse_json(
                file.metadata.get("planes", "").encode(), f"{file.path}: metadata key planes"
            )
            entries = _check(described, file)
            return cls(file, entries, _rotation(file, entries))
        except BaseException:
            file.close()
            raise

    def names(self) -> list[str]:
        """Names of all weights: the parts of the planes tensors, then the dense ones."""
        return [*self._where, *self._dense]

    def rotation_of(self, name: str) -> HadamardRotation | None:
        """The rotation that is folded into a weight; :meth:`load` gives the weights as stored, rotated."""
        if name not in self._where or self._where[name][0].rotation is None:
            return None
        return self.rotation

    def raw(self, name: str, rows: slice | None = None) -> NDArray[np.uint8]:
        """The bytes of a planes tensor, uint8 (N, K/128 * 34).

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
        TernaryTensor or DenseTensor

        Raises
        ------
        FormatError
            If a code has no value.
        """
        if name not in self._where:
            return DenseTensor(self._file.read(name, rows))
        entry, first = self._where[name]
        part = next(part for part in entry.parts if part.name == name)
        count, width = matrix_shape(part.shape)
        start, stop, step = (rows or slice(None)).indices(count)
        if step != 1:
            raise ValueError(f"rows must have step 1, not {step}")
        chosen = slice(first + start, first + max(start, stop))
        codes, scales = _split(self._file.read(entry.name), entry.rows, width)
        shape = part.shape if rows is None else ()
        values = unpack_bits(codes[chosen], 2, width)
        if entry.levels == 3 and values.size and values.max() == 3:
            raise FormatError(
                f"{self._file.path}: tensor {shown(name)} holds code 3, which 3 levels do not have"
            )
        return TernaryTensor(values, scales[chosen], entry.levels, entry.rotation, shape)

    def close(self) -> None:
        """Close the file; arrays that were read stay valid."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _rotation(file: SafetensorsFile, entries: Sequence[PlanesEntry]) -> HadamardRotation | None:
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


def _check(described: Any, file: SafetensorsFile) -> list[PlanesEntry]:
    """Entries of the metadata, held against the tensors that the file has."""
    if not isinstance(described, dict):
        raise FormatError(f"{file.path}: metadata key planes is not a table of tensors")
    entries, seen = [], set(file.tensors) - set(described)
    for name, item in described.items():
        what = f"{file.path}: planes tensor {shown(name)}"
        try:
            parts = tuple(PlanesPart(p["name"], tuple(map(int, p["shape"]))) for p in item["parts"])
            entry = PlanesEntry(name, parts, int(item["levels"]), item["rotation"])
            exact = entry.describe() == {**item, "parts": [asdict(part) for part in parts]}
        except (KeyError, TypeError, ValueError, IndexError):
            raise FormatError(f"{what} is described incompletely in the file's metadata") from None
        if (
            not exact
            or any(p.shape[-1:] != (entry.in_features,) for p in parts)
            or entry.levels not in (3, 4)
        ):
            raise FormatError(f"{what}: its description contradicts itself: {shown(json.dumps(item))}")
        info = file.tensors.get(name)
        wanted = (entry.rows, entry.in_features // GROUP_SIZE * _BLOCK.type_size)
        if info is None or info.shape != wanted or info.dtype != np.uint8 or entry.in_features % GROUP_SIZE:
            found = "missing" if info is None else f"{info.dtype} {info.shape}"
            raise FormatError(f"{what} is {found}; uint8 {wanted} is described")
        for part in parts:
            if part.name in seen:
                raise FormatError(f"{file.path}: weight {shown(part.name)} occurs twice")
            seen.add(part.name)
        entries.append(entry)
    return entries
