"""The header of a GGUF file, checked to the last field before any tensor is read; ``formats.gguf`` shows the bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from trapetum.blocktypes import BLOCK_TYPES, BLOCK_TYPES_BY_ID, BlockType
from trapetum.errors import FormatError
from trapetum.formats.gguf_values import Cursor, KeyValue, MoreBytes, ValueType
from trapetum.formats.mapped import MappedFile
from trapetum.formats.strict_json import shown
from trapetum.tensors import matrix_shape

__all__ = [
    "ALIGNMENT_KEY",
    "DEFAULT_ALIGNMENT",
    "MAGIC",
    "MAX_DIMS",
    "MAX_NAME_BYTES",
    "GgufTensor",
    "Header",
    "padded",
    "read_header",
]

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32
ALIGNMENT_KEY = "general.alignment"
MAX_NAME_BYTES = 63  # 64 with the final NUL in ggml's struct
MAX_DIMS = 4

# Bounds that keep a hostile header within a second and 200 MB; the largest real models have 2,000 tensors,
# 60 pairs.
_MAX_TENSORS = 1 << 16
_MAX_PAIRS = 1 << 16
_MAX_HEADER = 1 << 26
_FIRST_READ = 1 << 24


def padded(size: int, alignment: int) -> int:
    """``size`` rounded up to a multiple of ``alignment``."""
    return -(-size // alignment) * alignment


@dataclass(frozen=True)
class GgufTensor:
    """Where a tensor lies and how it is stored.

    Parameters
    ----------
    name : str
    shape : tuple of int
        As in NumPy: the row length is last.
    type_id : int
        As in the file.
    type : BlockType or None
        None for an id that we do not know.
    start, end : int
        Bytes in the file; of an unknown type up to the next tensor.
    """

    name: str
    shape: tuple[int, ...]
    type_id: int
    type: BlockType | None
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """Stored bytes."""
        return self.end - self.start

    @property
    def kind(self) -> str:
        """The type's name, as ``inspect`` shows it."""
        return self.type_name

    @property
    def type_name(self) -> str:
        """Name of the type, or ``type 250``."""
        return self.type.name if self.type is not None else f"type {self.type_id}"


@dataclass
class Header:
    """What the header says, and ``notes`` about what is unusual in it."""

    version: int
    kv: dict[str, KeyValue]
    alignment: int
    data_start: int
    tensors: dict[str, GgufTensor]
    notes: list[str]


def read_header(file: MappedFile, strict: bool) -> Header:
    """Parse and check a header; ``strict`` as in :meth:`GgufFile.open`.

    Raises
    ------
    FormatError
        Names the file, the tensor or key, what was found and what is allowed.
    """
    if file.pages is not None:
        return _parse(memoryview(file.pages), file, strict)  # the view keeps lazy strings valid after close()
    size = _FIRST_READ
    while True:  # without a map: read more until the header is complete
        try:
            return _parse(file.read(0, min(size, file.size)).data, file, strict)
        except MoreBytes:
            size = min(4 * size, _MAX_HEADER)


def _parse(data: Any, file: MappedFile, strict: bool) -> Header:
    where = str(file.path)
    # A bound on the header, so that a sparse file of any size costs no more than a small one.
    cursor = Cursor(data, min(file.size, _MAX_HEADER), where)
    cursor.need(24, "the fixed part of the header")
    magic = bytes(data[:4])
    if magic != MAGIC:
        raise FormatError(f"{where}: begins with {magic!r}; a GGUF file begins with {MAGIC!r}")
    cursor.at = 4
    version = cursor.number("I", "the version")
    if version not in (2, 3):
        what = "a big-endian file" if version in (2 << 24, 3 << 24) else f"version {version}"
        raise FormatError(f"{where}: {what}; little-endian GGUF of version 2 or 3 can be read")
    tensor_count, pair_count = cursor.number("Q", "the tensor count"), cursor.number("Q", "the pair count")
    for what, count, limit in (("tensors", tensor_count, _MAX_TENSORS), ("pairs", pair_count, _MAX_PAIRS)):
        if count > limit:
            raise FormatError(f"{where}: {count} {what}; at most {limit} are allowed")
    kv = _pairs(cursor, pair_count)
    alignment = _alignment(kv, where)
    infos = _infos(cursor, tensor_count)
    data_start = padded(cursor.at, alignment)
    notes: list[str] = []
    tensors = _place(infos, data_start, alignment, file, strict, notes)
    return Header(version, kv, alignment, data_start, tensors, notes)


def _pairs(cursor: Cursor, count: int) -> dict[str, KeyValue]:
    kv: dict[str, KeyValue] = {}
    for i in range(count):
        key = cursor.name(f"key {i}")
        if key in kv:
            raise FormatError(f"{cursor.where}: the key {shown(key)} occurs twice")
        what = f"the key {shown(key)}"
        kv[key] = cursor.value(cursor.value_type(what), what)
    return kv


def _alignment(kv: dict[str, KeyValue], where: str) -> int:
    entry = kv.get(ALIGNMENT_KEY, KeyValue(DEFAULT_ALIGNMENT, ValueType.UINT32))
    value = entry.value
    if entry.type is not ValueType.UINT32:
        raise FormatError(f"{where}: {ALIGNMENT_KEY} is stored as {entry.type.name}; UINT32 is required")
    if value <= 0 or value & (value - 1):
        raise FormatError(f"{where}: {ALIGNMENT_KEY} is {value}; a power of two is required")
    return int(value)


@dataclass(frozen=True)
class _Info:
    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int


def _infos(cursor: Cursor, count: int) -> list[_Info]:
    infos: list[_Info] = []
    seen: set[str] = set()
    for i in range(count):
        name = cursor.name(f"the name of tensor {i}")
        what = f"tensor {shown(name)}"
        if len(name.encode()) > MAX_NAME_BYTES:
            raise FormatError(
                f"{cursor.where}: {what} has a name of {len(name.encode())} bytes; {MAX_NAME_BYTES} are allowed"
            )
        if name in seen:
            raise FormatError(f"{cursor.where}: {what} occurs twice")
        seen.add(name)
        dims = cursor.number("I", what)
        if dims > MAX_DIMS:
            raise FormatError(f"{cursor.where}: {what} has {dims} dimensions; at most {MAX_DIMS} are allowed")
        shape = tuple(cursor.number("Q", what) for _ in range(dims))[::-1]
        if (
            math.prod(n for n in shape if n) >= 1 << 56
        ):  # an empty tensor may not be wide either: no array could
            raise FormatError(
                f"{cursor.where}: {what} has the shape {shape}; no file holds that many elements"
            )
        infos.append(_Info(name, shape, *cursor.numbers("IQ", what)))
    return infos


def _place(
    infos: list[_Info], data_start: int, alignment: int, file: MappedFile, strict: bool, notes: list[str]
) -> dict[str, GgufTensor]:
    """Check types, extents and offsets; see the module's docstring."""
    where = str(file.path)
    for info in infos:
        if info.offset % alignment:
            raise FormatError(
                f"{where}: tensor {shown(info.name)} has the offset {info.offset}; "
                f"a multiple of the alignment {alignment} is required"
            )
    ordered = sorted(infos, key=lambda info: info.offset)
    following = [data_start + info.offset for info in ordered[1:]] + [max(file.size, data_start)]
    types: dict[int, BlockType | None] = {i.type_id: BLOCK_TYPES_BY_ID.get(i.type_id) for i in infos}
    legacy = _legacy_q2(ordered, data_start, following)
    if legacy is not None:
        what = f"tensor {shown(legacy)} of type 42 fits the legacy group 128 (34 bytes for 128 weights)"
        if strict:
            raise FormatError(
                f"{where}: {what}, not Q2_0's group 64 (18 bytes for 64 weights)",
                hint="Stock engines refuse this file; the same bytes under type 142 (PQ2_0) are well formed.",
            )
        notes.append(f"{file.path.name}: {what}; type 42 is read as PQ2_0")
        types[42] = BLOCK_TYPES["PQ2_0"]
    found: dict[str, GgufTensor] = {}
    previous_end, gaps = data_start, 0
    for info, limit in zip(ordered, following):
        kind = types[info.type_id]
        tensor = _tensor(info, kind, data_start, limit, where, strict)
        if tensor.start < previous_end:
            raise FormatError(f"{where}: tensor {shown(info.name)} overlaps the one before it")
        if tensor.end > file.size:
            raise FormatError(
                f"{where}: tensor {shown(info.name)} ({tensor.type_name} {info.shape}) reaches to byte {tensor.end}, "
                f"the file has {file.size}; it is cut short, or the type's size is another"
            )
        gaps += tensor.start - previous_end >= alignment
        previous_end = tensor.end
        found[info.name] = tensor
    if gaps:
        notes.append(f"{file.path.name}: {gaps} gaps between tensors; llama.cpp refuses such a file")
    if file.size > padded(previous_end, alignment):
        extra = file.size - previous_end
        notes.append(f"{file.path.name}: {extra} bytes after the last tensor belong to none")
    unknown = sorted({info.type_id for info in infos if types[info.type_id] is None})
    if unknown:
        ids = ", ".join(map(str, unknown))
        notes.append(f"{file.path.name}: tensors of unknown type {ids} are kept as bytes")
    return {info.name: found[info.name] for info in infos}


def _tensor(
    info: _Info, kind: BlockType | None, data_start: int, limit: int, where: str, strict: bool
) -> GgufTensor:
    start = data_start + info.offset
    if kind is None:
        if strict or (limit <= start and 0 not in info.shape):
            raise FormatError(
                f"{where}: tensor {shown(info.name)} has the unknown type {info.type_id}",
                hint="Known types: " + ", ".join(f"{t.id} {t.name}" for t in BLOCK_TYPES.values()) + ".",
            )
        return GgufTensor(info.name, info.shape, info.type_id, None, start, limit)
    rows, width = matrix_shape(info.shape)
    try:
        size = rows * kind.row_bytes(width)
    except ValueError as error:
        raise FormatError(f"{where}: tensor {shown(info.name)}: {error}") from None
    return GgufTensor(info.name, info.shape, info.type_id, kind, start, start + size)


def _legacy_q2(ordered: list[_Info], data_start: int, following: list[int]) -> str | None:
    """Name of a tensor of type 42 that does not fit as Q2_0, where all of them fit as groups of 128; else
    None."""
    misfit = None
    q2, pq2 = BLOCK_TYPES["Q2_0"], BLOCK_TYPES["PQ2_0"]
    for info, limit in zip(ordered, following):
        if info.type_id != q2.id:
            continue
        rows, width = matrix_shape(info.shape)
        extent = limit - data_start - info.offset
        if width % pq2.block_size or extent < rows * pq2.row_bytes(width):
            return None
        if misfit is None and extent < rows * q2.row_bytes(width):
            misfit = info.name
    return misfit
