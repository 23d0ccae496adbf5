"""The S16 record of a .cbk: 4-bit codes in transposed order, then a table of 16 float32 for each output row.

With ``code[o, i]`` the code of ``weight[o, i]`` (o = output row, i = input)::

    offset                 bytes          content
    0                      in * out / 2   byte (i, j) = code[2j, i] | code[2j + 1, i] << 4, j fastest
    in * out / 2           64 * out       codebook f32 [16][out], entry (k, o) at k * out + o

``weight[o, i] = codebook[code[o, i]][o]``. Everything else in this package keeps [out, in] order, so
packing is a transpose. Tiles of 256 x 1024 bytes keep both sides of it in the L2 cache: 1 ns a weight
packing and 1.5 unpacking (4096 x 4096, one core of a Xeon), far from being what an export waits for, so
plain NumPy is enough.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["S16Builder", "unpack_s16"]

ENTRIES = 16
_ROWS, _INPUTS = 512, 1024


class S16Builder:
    """Collects one S16 record from blocks of output rows.

    Holds the packed record only (half a byte a weight): 262 MB for a head of 128k x 4096. Rows that are never
    put stay zero in codes and codebook, which is what vocabulary padding has to be.

    Parameters
    ----------
    rows : int
        Output rows (even).
    in_features : int

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
        self._packed = np.zeros((in_features, rows // 2), np.uint8)
        self._codebook = np.zeros((ENTRIES, rows), "<f4")

    def put(self, start: int, codes: NDArray[np.uint8], codebook: NDArray[Any]) -> None:
        """Store rows ``start ..``.

        Parameters
        ----------
        start : int
            First row (even).
        codes : ndarray of uint8, shape (n, in_features)
            Every code below K.
        codebook : ndarray of float16 or float32, shape (n, K)
            At most 16 entries: a smaller table is repeated, which changes no value.

        Raises
        ------
        ValueError
            If the block is misaligned or does not fit.
        """
        count, size = codebook.shape
        if start % 2 or size > ENTRIES or start + count > self._codebook.shape[1]:
            raise ValueError(f"rows {start}..{start + count} with {size} entries do not fit an S16 record")
        if codes.size and int(codes.max()) >= size:
            raise ValueError(f"code {int(codes.max())} has no entry in a codebook of {size}")
        self._codebook[:, start : start + count] = codebook[:, np.arange(ENTRIES) % size].T
        if count % 2:  # the last nibble belongs to a row that is not there
            codes = np.concatenate([codes, np.zeros((1, codes.shape[1]), np.uint8)])
        for r in range(0, codes.shape[0], _ROWS):
            part = codes[r : r + _ROWS]
            pairs = part[0::2] | (part[1::2] << np.uint8(4))
            column = (start + r) // 2
            for i in range(0, codes.shape[1], _INPUTS):
                block = pairs[:, i : i + _INPUTS].T
                self._packed[i : i + _INPUTS, column : column + block.shape[1]] = block

    def parts(self) -> Iterator[NDArray[Any]]:
        """The record's arrays in file order: packed codes, codebook."""
        yield self._packed
        yield self._codebook


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
