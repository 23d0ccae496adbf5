"""The CBKA record of a .cbk: an additive matrix, which is a header and three arrays.

With M codebooks and ``code[m, g, o]`` the entry of codebook m for inputs ``8g .. 8g + 7`` of output row o; all
little-endian::

    offset               bytes            content
    0                    4                "CBKA"
    4                    20               i32 M, 8 (inputs of a group), 256 (entries), rows, in_features
    24                   4096 * M         codebooks f16 [M][256][8]
    24 + 4096 M          2 * rows         scales f16 [rows]
    24 + 4096 M + 2 rows M * in/8 * rows  codes u8 [M][in/8][rows], rows fastest

``weight[o, 8g + d] = scale[o] * sum over m of codebook[m][code[m, g, o]][d]``. The runtime takes M of 2 and 3, rows in
fours and inputs in eights. Arrays are those of :class:`~trapetum.tensors.AdditiveTensor`, in its order.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trapetum.errors import FormatError
from trapetum.tensors import AdditiveTensor
from trapetum.tensors.additive import ENTRIES, GROUP

__all__ = ["additive_misfit", "additive_record_size", "parse_additive", "record_parts"]

_MAGIC = b"CBKA"
_HEADER = struct.Struct("<4s5i")
_COUNTS = (2, 3)
_ROWS = 4


def additive_record_size(num_codebooks: int, rows: int, in_features: int) -> int:
    """Bytes of a record.

    Examples
    --------
    >>> additive_record_size(2, 4, 16)
    8240
    """
    codebooks, scales = 2 * num_codebooks * ENTRIES * GROUP, 2 * rows
    return _HEADER.size + codebooks + scales + num_codebooks * (in_features // GROUP) * rows


def additive_misfit(num_codebooks: int, rows: int, in_features: int) -> str | None:
    """Why no record holds a matrix of this form, or None.

    Examples
    --------
    >>> additive_misfit(2, 6, 16)
    'it has 6 rows; a multiple of 4 is allowed'
    """
    if num_codebooks not in _COUNTS:
        return f"it has {num_codebooks} codebooks; 2 and 3 are allowed"
    if rows < _ROWS or rows % _ROWS:
        return f"it has {rows} rows; a multiple of {_ROWS} is allowed"
    if in_features < GROUP or in_features % GROUP:
        return f"it has rows of {in_features}; a multiple of {GROUP} is allowed"
    return None


def record_parts(tensor: AdditiveTensor) -> Iterator[NDArray[Any]]:
    """The record's bytes in order: header, codebooks, scales, codes.

    Raises
    ------
    ValueError
        If the record cannot hold the tensor, or a codebook or scale is no float16.
    """
    misfit = additive_misfit(tensor.num_codebooks, tensor.rows, tensor.in_features)
    if misfit is not None:
        raise ValueError(f"a CBKA record does not hold this matrix: {misfit}")
    header = _HEADER.pack(_MAGIC, tensor.num_codebooks, GROUP, ENTRIES, tensor.rows, tensor.in_features)
    yield np.frombuffer(header, np.uint8)
    yield _halves("codebooks", tensor.codebooks)
    yield _halves("scales", tensor.scales)
    yield np.ascontiguousarray(tensor.codes)


def _halves(name: str, values: NDArray[Any]) -> NDArray[Any]:
    with np.errstate(over="ignore"):
        halves = values.astype("<f2")
    if not np.array_equal(halves.astype(np.float32), values.astype(np.float32)):
        raise ValueError(
            f"a CBKA record holds float16; {name} have float32 values that float16 does not hold"
        )
    return halves


def parse_additive(data: bytes | memoryview, what: str) -> AdditiveTensor:
    """Read one record.

    Parameters
    ----------
    data : bytes-like
        Begins with the record; what follows it is not looked at.
    what : str
        File and tensor, as messages name them.

    Raises
    ------
    FormatError
        If it is no such record, or is cut off.
    """
    if len(data) < _HEADER.size:
        raise FormatError(
            f"{what}: a CBKA record of {len(data)} bytes is cut off; its header has {_HEADER.size}"
        )
    magic, count, group, entries, rows, in_features = _HEADER.unpack(data[: _HEADER.size])
    if magic != _MAGIC:
        raise FormatError(f"{what}: a record begins with {magic!r}; {_MAGIC!r} is allowed")
    if (group, entries) != (GROUP, ENTRIES):
        raise FormatError(
            f"{what}: groups of {group} with {entries} entries; {GROUP} with {ENTRIES} are allowed"
        )
    misfit = additive_misfit(count, rows, in_features)
    if misfit is not None:
        raise FormatError(f"{what}: {misfit}")
    size = additive_record_size(count, rows, in_features)
    if len(data) < size:
        raise FormatError(f"{what}: a CBKA record of {size} bytes is cut off after {len(data)}")
    at = _HEADER.size
    codebooks = np.frombuffer(data, "<f2", count * ENTRIES * GROUP, at).reshape(count, ENTRIES, GROUP)
    at += codebooks.nbytes
    scales = np.frombuffer(data, "<f2", rows, at)
    at += scales.nbytes
    codes = np.frombuffer(data, np.uint8, count * (in_features // GROUP) * rows, at)
    return AdditiveTensor(codes.reshape(count, in_features // GROUP, rows), codebooks, scales)
