"""Header of a safetensors file: the rules that decide what a file may claim about itself.

Separate from the reader, because all of it works on untrusted bytes and none of it on tensors. Each rule
gives one message that names the file, the tensor, what was found and what is allowed. Numbers from the file
are Python integers, so none can wrap; nothing of a declared size is allocated before the size is checked.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trapetum.errors import FormatError
from trapetum.formats.dtypes import DTYPES
from trapetum.formats.strict_json import parse_json, shown

__all__ = ["HEADER_LIMIT", "TensorInfo", "read_header", "refuse_lfs_pointer"]

HEADER_LIMIT = 256 << 20
"""Longest header that is read, in bytes: 2.5 million tensors. The largest reported in public has 126 MiB."""

_MAX_RANK = 64  # what a NumPy array can have
_MAX_BYTES = (1 << 63) - 1
_AGAIN = "Download or copy the file again."
_LFS = b"version https://git-lfs.github.com/spec/"
_OTHER_FILES = {
    b"<": "a web page (a failed download?)",
    b"PK\x03\x04": "a zip archive, perhaps a PyTorch checkpoint",
    b"\x80\x02": "a Python pickle, perhaps a PyTorch checkpoint",
    b"GGUF": "a GGUF file",
    b"\x1f\x8b": "a gzip archive",
}


class TensorInfo(NamedTuple):
    """Where one tensor lies.

    Parameters
    ----------
    name : str
    dtype : numpy.dtype
        Element type; bfloat16 and float8 from ml_dtypes.
    shape : tuple of int
    start, end : int
        Absolute byte range in the file.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """Stored bytes."""
        return self.end - self.start


def read_header(fd: int, size: int, path: Path) -> tuple[dict[str, TensorInfo], dict[str, str], list[str]]:
    """Read and check the header of an open file.

    Parameters
    ----------
    fd : int
        Descriptor, readable.
    size : int
        Bytes in the file.
    path : Path
        For messages.

    Returns
    -------
    tensors : dict of str to TensorInfo, in the order of their bytes
    metadata : dict of str to str
    notes : list of str

    Raises
    ------
    FormatError
        If any rule is broken.
    """
    head = os.pread(fd, 512, 0)
    refuse_lfs_pointer(head, path)
    if size < 8:
        raise FormatError(f"{path}: {size} bytes; a safetensors file has at least 10", hint=_AGAIN)
    length = int.from_bytes(head[:8], "little")
    if length > size - 8:
        other = next((text for magic, text in _OTHER_FILES.items() if head.startswith(magic)), None)
        if other:
            raise FormatError(f"{path}: {other}, not a safetensors file")
        raise FormatError(
            f"{path}: declares a header of {length} bytes, but the file has {size} bytes in all; "
            "it is cut off, or it is not a safetensors file",
            hint=_AGAIN,
        )
    if length > HEADER_LIMIT:
        raise FormatError(f"{path}: header of {length} bytes; at most {HEADER_LIMIT} are read")
    raw = _read_exactly(fd, length, 8, path)
    if raw[:1] != b"{":
        raise FormatError(f"{path}: the header must begin with '{{', not {shown(raw[:1])}")
    if raw.endswith(b"\0"):
        count = length - len(raw.rstrip(b"\0"))
        raise FormatError(f"{path}: the header is padded with {count} NUL bytes; only spaces are allowed")
    notes: list[str] = []
    with _collector_paused():
        header = parse_json(raw, f"{path}: header")
        metadata = _metadata(header.pop("__metadata__", None), path)
        tensors = _entries(header, 8 + length, path, notes)
        return _in_order(tensors, 8 + length, size, path), metadata, notes


def refuse_lfs_pointer(head: bytes, path: Path) -> None:
    """Refuse the small text that git keeps in place of a large file.

    Parameters
    ----------
    head : bytes
        The first 512 bytes of the file, or all of it.
    path : Path

    Raises
    ------
    FormatError
        If it is such a pointer; the message tells the size of the real file.
    """
    if head.startswith(_LFS):
        found = re.search(rb"^size (\d{1,20})$", head, re.MULTILINE)
        expected = f"; the file itself has {int(found[1])} bytes" if found else ""
        raise FormatError(
            f"{path}: a Git LFS pointer, not the file that it stands for{expected}",
            hint="Run `git lfs pull` in that folder, or download the file again.",
        )


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """No cyclic collection meanwhile: it would walk the growing header again and again.

    Measured: 200,000 tensors take 1.1 s of CPU time instead of 1.7 (shared Xeon core).
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _read_exactly(fd: int, count: int, offset: int, path: Path) -> bytes:
    parts: list[bytes] = []
    while count:
        part = os.pread(fd, count, offset)
        if not part:
            raise FormatError(f"{path}: the file shrank while its header was read")
        parts.append(part)
        count, offset = count - len(part), offset + len(part)
    return b"".join(parts)


def _metadata(found: Any, path: Path) -> dict[str, str]:
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise FormatError(f"{path}: __metadata__ is {shown(found)}; an object of strings is allowed")
    for key, value in found.items():
        if not isinstance(value, str):
            raise FormatError(f"{path}: __metadata__ key {shown(key)} is {shown(value)}; a string is allowed")
        if not (_is_text(key) and _is_text(value)):
            raise FormatError(f"{path}: __metadata__ key {shown(key)} holds half of a surrogate pair")
    return found


def _is_text(text: str) -> bool:
    """False for a lone surrogate (from a JSON escape), which no other program could read back."""
    return text.isascii() or not any("\ud800" <= c <= "\udfff" for c in text)


def _is_size(value: Any) -> bool:
    return type(value) is int and value >= 0  # type(): True and False are ints, too


def _entries(header: dict[str, Any], base: int, path: Path, notes: list[str]) -> list[TensorInfo]:
    """Check each tensor by itself: fields, dtype, shape, offsets, byte count."""
    tensors = []
    ignored: set[str] = set()
    for name, entry in header.items():
        try:
            code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
            fault = _fault(name, code, shape, offsets)
        except (TypeError, KeyError):
            fault = f"the header says {shown(entry)}; an object with dtype, shape and data_offsets is allowed"
        if fault:
            raise FormatError(f"{path}: tensor {shown(name)}: {fault}")
        if len(entry) > 3:
            ignored |= entry.keys() - {"dtype", "shape", "data_offsets"}
        start, end = offsets
        tensors.append(TensorInfo(name, DTYPES[code], tuple(shape), base + start, base + end))
    if ignored:
        notes.append(f"{path.name}: ignored unknown header fields: {', '.join(map(shown, sorted(ignored)))}")
    return tensors


def _fault(name: str, code: Any, shape: Any, offsets: Any) -> str | None:
    """What is wrong with one tensor's header entry, or None. Every argument is untrusted JSON."""
    dtype = DTYPES.get(code) if type(code) is str else None
    if dtype is None:
        return f"dtype {shown(code)} is not one that is read; known: {', '.join(DTYPES)}"
    if type(shape) is not list or not all(map(_is_size, shape)):
        return f"shape {shown(shape)}; a list of whole numbers from 0 on is allowed"
    if len(shape) > _MAX_RANK:
        return f"{len(shape)} dimensions; at most {_MAX_RANK} are allowed"
    if type(offsets) is not list or len(offsets) != 2 or not all(map(_is_size, offsets)):
        return f"data_offsets {shown(offsets)}; two whole numbers from 0 on are allowed"
    start, end = offsets
    if end < start:
        return f"data_offsets {shown(offsets)} run backwards"
    needed = math.prod(shape) * dtype.itemsize
    if needed != end - start:
        held = f"data_offsets {shown(offsets)} hold {shown(end - start)}"
        return f"shape {shown(shape)} of {code} needs {shown(needed)} bytes, but its {held}"
    if not needed and math.prod(n for n in shape if n) * dtype.itemsize > _MAX_BYTES:
        return f"empty shape {shown(shape)} has dimensions that no array can have"
    if not _is_text(name):
        return "the name holds half of a surrogate pair, which is no text"
    return None


def _in_order(tensors: list[TensorInfo], base: int, size: int, path: Path) -> dict[str, TensorInfo]:
    """Check that the tensors cover the file exactly: no byte shared, none without an owner, none missing."""
    tensors.sort(key=lambda t: (t.start, t.end))
    at, previous, hole = base, None, None
    for info in tensors:
        if info.start < at:
            raise FormatError(
                f"{path}: tensors {shown(previous)} and {shown(info.name)} overlap: the second begins at data "
                f"byte {info.start - base}, before the first ends at {at - base}; each byte may have one owner"
            )
        if (
            info.start > at and hole is None
        ):  # raised only after the overlaps: a wrong offset leaves a hole, too
            where = "at the beginning of the data" if previous is None else f"after {shown(previous)}"
            hole = (
                f"{path}: {info.start - at} bytes {where} and before {shown(info.name)} belong to no tensor; "
                "holes are not allowed"
            )
        at, previous = info.end, info.name
    if hole:
        raise FormatError(hole)
    if at > size:
        hit = next(t for t in tensors if t.end > size)
        raise FormatError(
            f"{path}: the file is cut off: {at} bytes expected, {size} found; the first tensor hit is "
            f"{shown(hit.name)}",
            hint=_AGAIN,
        )
    if at < size:
        raise FormatError(
            f"{path}: {size - at} bytes at the end belong to no tensor: {at} bytes expected, {size} found",
            hint="Download or copy the file again, or write it anew with the tool that made it.",
        )
    return {t.name: t for t in tensors}
