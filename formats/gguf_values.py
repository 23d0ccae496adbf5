"""Metadata of a GGUF file: thirteen value types, read lazily and checked before anything is allocated.

::

    string   length u64, then UTF-8 bytes
    value    type u32, then: a number of 1 to 8 bytes; a bool of one byte, 0 or 1; a string; or an array
    array    item type u32, count u64, then the items without padding; items may be arrays
    pair     key (string), value

Vocabularies are the reason for the lazy arrays: a file may hold 128 thousand tokens and 280 thousand
merges, of which most readers need none. Opening such a file only walks the lengths; a string is decoded
when it is asked for.

Source: the GGUF specification (ggml, docs/gguf.md).
"""

from __future__ import annotations

import enum
import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self, overload

import numpy as np

from trapetum.errors import FormatError

__all__ = ["Cursor", "KeyValue", "MoreBytes", "StringArray", "ValueType", "encode_string", "encode_value"]


class ValueType(enum.IntEnum):
    """Type numbers of metadata values."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


_DTYPES: dict[ValueType, np.dtype[Any]] = {
    ValueType.UINT8: np.dtype("u1"),
    ValueType.INT8: np.dtype("i1"),
    ValueType.UINT16: np.dtype("<u2"),
    ValueType.INT16: np.dtype("<i2"),
    ValueType.UINT32: np.dtype("<u4"),
    ValueType.INT32: np.dtype("<i4"),
    ValueType.FLOAT32: np.dtype("<f4"),
    ValueType.BOOL: np.dtype("?"),
    ValueType.UINT64: np.dtype("<u8"),
    ValueType.INT64: np.dtype("<i8"),
    ValueType.FLOAT64: np.dtype("<f8"),
}

# Bounds on what one header may make us walk: 3 million strings take 0.5 s; the largest vocabulary seen,
# with merges, has 0.6 million. Without a bound a sparse file of zeros is a valid header of endless empty
# strings.
_WALK_LIMIT = 3_000_000
_DEPTH_LIMIT = 4
_ARRAY_COST = 100  # an array inside an array takes as long as 100 strings, and 600 bytes

_STRUCTS = {code: struct.Struct("<" + code) for code in ("I", "Q", "IQ")}


class MoreBytes(Exception):
    """The header goes on beyond the bytes at hand, which are not the whole file."""


class StringArray(Sequence[str]):
    """Strings inside a header, decoded on access; bytes that are not UTF-8 become surrogates and survive a
    copy.

    Parameters
    ----------
    data : buffer
        The header.
    starts : array of unsigned 64-bit
        Position of each string's length field, and one past the last string.
    """

    def __init__(self, data: Any, starts: array[int]) -> None:
        self._data, self._starts = data, starts

    def __len__(self) -> int:
        return len(self._starts) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if index < 0:
            index += len(self)
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self._text(self._starts[index] + 8, self._starts[index + 1])

    def __iter__(self) -> Iterator[str]:
        starts, text = self._starts, self._text
        for i in range(len(starts) - 1):
            yield text(starts[i] + 8, starts[i + 1])

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Sequence)
            and len(self) == len(other)
            and all(a == b for a, b in zip(self, other))
        )

    __hash__ = None  # type: ignore[assignment]

    def _text(self, start: int, end: int) -> str:
        return bytes(self._data[start:end]).decode("utf-8", "surrogateescape")


@dataclass(frozen=True)
class KeyValue:
    """One metadata value with the types that it is stored under.

    Parameters
    ----------
    value : bool, int, float, str, ndarray, StringArray or list
        A list only for an array of arrays (of ``KeyValue``).
    type : ValueType
    item_type : ValueType, optional
        Of an array.
    """

    value: Any
    type: ValueType
    item_type: ValueType | None = None

    @classmethod
    def text(cls, value: str) -> Self:
        """A string."""
        return cls(value, ValueType.STRING)

    @classmethod
    def count(cls, value: int) -> Self:
        """An unsigned number of 32 bits, as llama.cpp's converter writes counts and ids."""
        return cls(value, ValueType.UINT32)

    @classmethod
    def number(cls, value: float) -> Self:
        """A float32, as it writes epsilons and bases."""
        return cls(value, ValueType.FLOAT32)


class Cursor:
    """Reads a header front to back; every length is checked against the bytes that are left.

    Parameters
    ----------
    data : buffer
        The file, or its first bytes.
    whole : int
        Bytes that the header may span: the file, or the largest header allowed.
    where : str
        Begins every message.
    """

    def __init__(self, data: Any, whole: int, where: str) -> None:
        self.data, self.whole, self.where = data, whole, where
        self.at = 0
        self._held = len(data)
        self._walked = 0

    def need(self, count: int, what: str) -> None:
        """Make sure that ``count`` more bytes are there.

        Raises
        ------
        FormatError
            If the file ends before.
        MoreBytes
            If only the bytes at hand do.
        """
        if count > self.whole - self.at:
            raise FormatError(
                f"{self.where}: {what} at byte {self.at} takes {count} bytes, {self.whole - self.at} are left"
            )
        if self.at + count > self._held:
            raise MoreBytes

    def number(self, code: str, what: str) -> int:
        """One number: ``"I"`` of 32 bits or ``"Q"`` of 64."""
        (value,) = self.numbers(code, what)
        return value

    def numbers(self, code: str, what: str) -> tuple[int, ...]:
        """Numbers in ``struct`` notation, one of ``I``, ``Q``, ``IQ``."""
        form = _STRUCTS[code]
        if self.at + form.size > self._held:
            self.need(form.size, what)
        value = form.unpack_from(self.data, self.at)
        self.at += form.size
        return value

    def raw_string(self, what: str) -> bytes:
        """A string's bytes."""
        length = self.number("Q", what)
        self.need(length, what)
        text = bytes(self.data[self.at : self.at + length])
        self.at += length
        return text

    def name(self, what: str) -> str:
        """A key or tensor name: not empty, valid UTF-8, without NUL."""
        raw = self.raw_string(what)
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError:
            raise FormatError(f"{self.where}: {what} is not UTF-8: {raw[:80]!r}") from None
        if not text or "\0" in text:
            raise FormatError(f"{self.where}: {what} is empty or holds a NUL: {text[:80]!r}")
        return text

    def value_type(self, what: str) -> ValueType:
        """A value's type number."""
        number = self.number("I", what)
        try:
            return ValueType(number)
        except ValueError:
            raise FormatError(f"{self.where}: {what} has the value type {number}; 0 to 12 exist") from None

    def value(self, kind: ValueType, what: str, depth: int = 0) -> KeyValue:
        """The value of a key, or an item of an array."""
        if kind is ValueType.STRING:
            return KeyValue(self.raw_string(what).decode("utf-8", "surrogateescape"), kind)
        if kind is ValueType.ARRAY:
            return self._array(what, depth)
        dtype = _DTYPES[kind]
        self.need(dtype.itemsize, what)
        raw = bytes(self.data[self.at : self.at + dtype.itemsize])
        if kind is ValueType.BOOL and raw[0] > 1:
            raise FormatError(f"{self.where}: {what} is a bool with the byte {raw[0]}; 0 and 1 are allowed")
        self.at += dtype.itemsize
        return KeyValue(np.frombuffer(raw, dtype)[0].item(), kind)

    def _array(self, what: str, depth: int) -> KeyValue:
        if depth >= _DEPTH_LIMIT:
            raise FormatError(f"{self.where}: {what} nests arrays deeper than {_DEPTH_LIMIT}")
        item = self.value_type(what)
        count = self.number("Q", what)
        value: Any
        if item is ValueType.STRING:
            value = self._strings(count, what)
        elif item is ValueType.ARRAY:
            self._walk(count, 12, what, _ARRAY_COST)
            value = [self.value(item, what, depth + 1) for _ in range(count)]
        else:
            dtype = _DTYPES[item]
            self.need(count * dtype.itemsize, what)
            value = np.frombuffer(self.data, np.uint8, count * dtype.itemsize, self.at)
            if item is ValueType.BOOL and count and value.max() > 1:
                raise FormatError(f"{self.where}: {what} holds bools that are neither 0 nor 1")
            value = value.view(dtype) if self.at % dtype.itemsize == 0 else value.copy().view(dtype)
            value.flags.writeable = False
            self.at += count * dtype.itemsize
        return KeyValue(value, ValueType.ARRAY, item)

    def _walk(self, count: int, least: int, what: str, cost: int = 1) -> None:
        self.need(count * least, what)
        self._walked += cost * count
        if self._walked > _WALK_LIMIT:
            raise FormatError(
                f"{self.where}: {what} brings the items to {self._walked}; {_WALK_LIMIT} are allowed"
            )

    def _strings(self, count: int, what: str) -> StringArray:
        self._walk(count, 8, what)
        starts = array("Q", [self.at])
        append, unpack, data = starts.append, struct.Struct("<Q").unpack_from, self.data
        at, end = self.at, min(self.whole, self._held)
        for _ in range(count):  # 0.2 us a string: this loop is the cost of opening a file
            if at + 8 > end:
                break
            at += 8 + unpack(data, at)[0]
            if at > end:
                break
            append(at)
        if len(starts) <= count:
            if end == self.whole:
                raise FormatError(f"{self.where}: {what} reaches beyond the end of the file")
            raise MoreBytes
        self.at = at
        return StringArray(data, starts)


def encode_string(text: str) -> bytes:
    """Length and bytes of a string."""
    raw = text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(raw)) + raw


def encode_value(entry: KeyValue, key: str) -> bytes:
    """Type and bytes of a value.

    Parameters
    ----------
    entry : KeyValue
    key : str
        For messages.

    Raises
    ------
    FormatError
        If the value does not fit its type.
    """
    if entry.type is ValueType.ARRAY:
        if entry.item_type is None:
            raise FormatError(f"GGUF key {key!r} is an array without an item type")
        head = struct.pack("<IIQ", entry.type, entry.item_type, len(entry.value))
        return head + _items(entry.value, entry.item_type, key)
    return struct.pack("<I", entry.type) + _items([entry.value], entry.type, key)


def _items(values: Any, kind: ValueType, key: str) -> bytes:
    if kind is ValueType.ARRAY:
        parts = []
        for item in values:
            if not isinstance(item, KeyValue) or item.item_type is None:
                raise FormatError(f"GGUF key {key!r}: items of an array of arrays must be arrays")
            parts.append(encode_value(item, key)[4:])
        return b"".join(parts)
    if kind is ValueType.STRING:
        if isinstance(values, str) or not all(isinstance(v, str) for v in values):
            raise FormatError(f"GGUF key {key!r} must hold strings, not {_kinds(values)}")
        return b"".join(map(encode_string, values))
    dtype = _DTYPES[kind]
    found = np.asarray(values) if len(values) else np.empty(0, dtype)
    wanted = "b" if kind is ValueType.BOOL else "iu" if dtype.kind in "iu" else "iuf"
    if found.dtype.kind not in wanted or found.ndim != 1:
        raise FormatError(f"GGUF key {key!r} must hold {kind.name} values, not {_kinds(values)}")
    if dtype.kind in "iu" and found.size:
        bounds = np.iinfo(dtype)
        low, high = int(found.min()), int(found.max())
        if low < bounds.min or high > bounds.max:
            worst = low if low < bounds.min else high
            raise FormatError(f"GGUF key {key!r}: {worst} does not fit {kind.name}")
    return np.ascontiguousarray(found, dtype=dtype).tobytes()


def _kinds(values: Any) -> str:
    return ", ".join(sorted({type(v).__name__ for v in list(values)[:1000]}))
