"""The S16 and S256 records of a .cbk: codes in transposed order, then a table of 16 or 256 float32 for each output row.

With ``code[o, i]`` the code of ``weight[o, i]`` (o = output row, i = input)::

    offset                 bytes          content
    0                      in * out / 2   byte (i, j) = code[2j, i] | code[2j + 1, i] << 4, j fastest
    in * out / 2           64 * out       codebook f32 [16][out], entry (k, o) at k * out + o

``weight[o, i] = codebook[code[o, i]][o]``. S256 is the same with a byte a code, ``[in][out]``, and 256 entries.
Everything else in this package keeps [out, in] order, so packing is a transpose. Tiles of 256 x 1024 bytes keep both
sides of it in the L2 cache: 1 ns a weight packing and 1.5 unpacking (4096 x 4096, one core of a Xeon), far from being
what an export waits for, so plain NumPy is enough.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["ENTRIES", "MatrixBuilder", "S16Builder", "S256Builder", "unpack_s16", "unpack_s256"]

ENTRIES = {"S16": 16, "S256": 256}
"""Entries of a row's table, by kind of record."""
_ROWS, _INPUTS = 512, 1024


class MatrixBuilder:
    """Collects one record from blocks of output rows.

    Holds the packed record only (for S16 half a byte a weight: 262 MB for a head of 128k x 4096). Rows and inputs that
    are never put stay zero in codes and codebook, which is what padding has to be.

    Parameters
    ----------
    rows : int
        Output rows.
    in_features : int
    entries : int
        Entries of a row's table.
    """

    def __init__(self, rows: int, in_features: int, entries: int) -> None:
        self.rows, self.in_features, self.entries = rows, in_features, entries
        self._codebook = np.zeros((entries, rows), "<f4")
        self._packed = np.zeros((in_features, self._stored(rows)), np.uint8)

    def put(self, start: int, codes: NDArray[np.uint8], codebook: NDArray[Any]) -> None:
        """Store rows ``start ..``.

        Parameters
        ----------
        start : int
            First row (even).
        codes : ndarray of uint8, shape (n, in_features or less)
            Every code below K.
        codebook : ndarray of float16 or float32, shape (n, K)
            A table that is smaller than the record's is repeated, which changes no value.

        Raises
        ------
        ValueError
            If the block is misaligned or does not fit.
        """
        count, size = codebook.shape
        if start % 2 or size > self.entries or start + count > self.rows or codes.shape[1] > self.in_features:
            raise ValueError(
                f"rows {start}..{start + count} of {codes.shape[1]} with {size} entries do not fit a record of "
                f"{self.rows} x {self.in_features} with {self.entries}"
            )
        if codes.size and int(codes.max()) >= size:
            raise ValueError(f"code {int(codes.max())} has no entry in a codebook of {size}")
        self._codebook[:, start : start + count] = codebook[:, np.arange(self.entries) % size].T
        column = self._stored(start)
        for r in range(0, count, _ROWS):
            part = self._pack(codes[r : r + _ROWS])
            for i in range(0, codes.shape[1], _INPUTS):
                block = part[:, i : i + _INPUTS].T
                self._packed[i : i + block.shape[0], column : column + block.shape[1]] = block
            column += part.shape[0]

    def parts(self) -> Iterator[NDArray[Any]]:
        """The record's arrays in file order: packed codes, codebook."""
        yield self._packed
        yield self._codebook

    def _stored(self, rows: int) -> int:
        """Bytes an input for so many rows."""
        return rows

    def _pack(self, codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Codes [n, in] as bytes [_stored(n), in]."""
        return codes


class S256Builder(MatrixBuilder):
    """An S256 record: a byte a code.

    Examples
    --------
    >>> b = S256Builder(4, 2)
    >>> b.put(0, np.array([[1, 15], [2, 14], [3, 0], [4, 8]], np.uint8), np.zeros((4, 256), np.float32))
    >>> next(b.parts()).tobytes().hex()
    '010203040f0e0008'
    """

    def __init__(self, rows: int, in_features: int) -> None:
        super().__init__(rows, in_features, ENTRIES["S256"])


class S16Builder(MatrixBuilder):
    """An S16 record: two codes a byte, the even row low.

    Examples
    --------
    >>> b = S16Builder(4, 2)
    >>> b.put(0, np.array([[1, 15], [2, 14], [3, 0], [4, 8]], np.uint8), np.zeros((4, 16), np.float32))
    >>> next(b.parts()).tobytes().hex()
    '2143ef80'
    """

    def __init__(self, rows: int, in_features: int) -> None:
        if rows % 2:
            raise ValueError(f"{rows} output rows cannot be packed two a byte")
        super().__init__(rows, in_features, ENTRIES["S16"])

    def _stored(self, rows: int) -> int:
        return rows // 2

    def _pack(self, codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
        if codes.shape[0] % 2:  # the last nibble belongs to a row that is not there
            codes = np.concatenate([codes, np.zeros((1, codes.shape[1]), np.uint8)])
        return codes[0::2] | (codes[1::2] << np.uint8(4))


def unpack_s256(
    packed: NDArray[np.uint8], codebook: NDArray[np.float32], rows: slice
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """As :func:`unpack_s16`, with ``packed`` uint8 [in_features, out_features] and 256 entries."""
    return (
        np.ascontiguousarray(packed[:, rows].T),
        np.ascontiguousarray(codebook[:, rows].T, np.float32),
    )


def unpack_s16(
    packed: NDArray[np.uint8], codebook: NDArray[np.float32], rows: slice
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Codes and codebook of some output rows, in [out, in] order.

    Parameters
    ----------
    packed : ndarray of uint8, shape (in_features, out_features / 2)
    codebook : ndarray of float32, shape (16, out_features)
    rows : slice
        Output rows, step 1.

    Returns
    -------
    codes : ndarray of uint8, shape (n, in_features)
    codebook : ndarray of float32, shape (n, 16)

    Examples
    --------
    >>> packed = np.frombuffer(bytes.fromhex("2143ef80"), np.uint8).reshape(2, 2)
    >>> unpack_s16(packed, np.zeros((16, 4), np.float32), slice(1, 3))[0].tolist()
    [[2, 14], [3, 0]]
    """
    start, stop, _ = rows.indices(codebook.shape[1])
    stop = max(start, stop)
    first, last = start // 2, (stop + 1) // 2
    in_features = packed.shape[0]
    codes = np.empty((2 * (last - first), in_features), np.uint8)
    for r in range(first, last, _ROWS // 2):
        end = min(last, r + _ROWS // 2)
        for i in range(0, in_features, _INPUTS):
            block = packed[i : i + _INPUTS, r:end].T
            target = codes[2 * (r - first) : 2 * (end - first), i : i + _INPUTS]
            target[0::2] = block & np.uint8(15)
            target[1::2] = block >> np.uint8(4)
    part = codes[start - 2 * first : start - 2 * first + stop - start]
    return part, np.ascontiguousarray(codebook[:, start:stop].T, np.float32)
