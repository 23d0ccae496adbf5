"""Codes as a little-endian bit stream: exactly ``bits`` bits a code, every row on a byte boundary.

Code ``i`` of a row occupies bits ``i*bits .. (i+1)*bits - 1`` of the row's stream; bit ``b`` of the stream is
bit ``b % 8`` of byte ``b // 8``. At 4 bits the even input therefore sits in the low nibble. Plain NumPy: this
is the reference that the fast decoders are tested against.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["pack_bits", "packed_row_bytes", "unpack_bits"]

# Eight codes of b bits fill b bytes: they are put together in one uint64. 1 MiB of codes keeps the scratch at 2 MiB.
_CHUNK_CODES = 1 << 20


def packed_row_bytes(count: int, bits: int) -> int:
    """Bytes of one packed row.

    Parameters
    ----------
    count : int
        Codes in the row.
    bits : int
        Bits a code, 1 to 8.

    Examples
    --------
    >>> packed_row_bytes(5, 3)
    2
    """
    return (count * bits + 7) // 8


def pack_bits(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Pack codes at ``bits`` bits each.

    Parameters
    ----------
    codes : ndarray of uint8, shape (rows, count)
        Every code below ``2**bits``.
    bits : int
        1 to 8.

    Returns
    -------
    ndarray of uint8, shape (rows, packed_row_bytes(count, bits))

    Raises
    ------
    ValueError
        If a code does not fit; codes never wrap around.

    Examples
    --------
    >>> pack_bits(np.array([[1, 2, 3]], np.uint8), 4).tolist()
    [[33, 3]]
    """
    if not 1 <= bits <= 8:
        raise ValueError(f"bits is {bits}; 1 to 8 can be packed")
    codes = np.ascontiguousarray(codes, dtype=np.uint8)
    rows, count = codes.shape
    if bits < 8 and codes.size and int(codes.max()) >> bits:
        raise ValueError(f"code {int(codes.max())} does not fit in {bits} bits")
    if bits == 8:
        return codes.copy()
    out = np.zeros((rows, packed_row_bytes(count, bits)), np.uint8)
    if bits in (1, 2, 4):
        per = 8 // bits
        for k in range(per):
            part = codes[:, k::per]
            out[:, : part.shape[1]] |= part << np.uint8(k * bits)
        return out
    eights = (count + 7) // 8
    step = max(1, _CHUNK_CODES // max(count, 1))
    for r in range(0, rows, step):
        part = codes[r : r + step]
        words = np.zeros((part.shape[0], eights), "<u8")
        for k in range(8):
            column = part[:, k::8]
            words[:, : column.shape[1]] |= column.astype("<u8") << np.uint64(k * bits)
        stream = words.view(np.uint8).reshape(part.shape[0], eights, 8)[:, :, :bits]
        out[r : r + step] = stream.reshape(part.shape[0], -1)[:, : out.shape[1]]
    return out


def unpack_bits(packed: NDArray[np.uint8], bits: int, count: int) -> NDArray[np.uint8]:
    """Undo :func:`pack_bits`.

    Parameters
    ----------
    packed : ndarray of uint8, shape (rows, packed_row_bytes(count, bits))
    bits : int
        1 to 8.
    count : int
        Codes a row.

    Returns
    -------
    ndarray of uint8, shape (rows, count)

    Raises
    ------
    ValueError
        If the row length does not match ``count`` codes.

    Examples
    --------
    >>> unpack_bits(np.array([[33, 3]], np.uint8), 4, 3).tolist()
    [[1, 2, 3]]
    """
    if not 1 <= bits <= 8:
        raise ValueError(f"bits is {bits}; 1 to 8 can be unpacked")
    packed = np.ascontiguousarray(packed, dtype=np.uint8)
    rows, width = packed.shape
    if width != packed_row_bytes(count, bits):
        raise ValueError(
            f"rows hold {width} bytes; {count} codes of {bits} bits need {packed_row_bytes(count, bits)}"
        )
    if bits == 8:
        return packed.copy()
    out = np.empty((rows, count), np.uint8)
    if bits in (1, 2, 4):
        per, mask = 8 // bits, np.uint8((1 << bits) - 1)
        for k in range(per):
            part = out[:, k::per]
            part[...] = (packed[:, : part.shape[1]] >> np.uint8(k * bits)) & mask
        return out
    eights = (count + 7) // 8
    step = max(1, _CHUNK_CODES // max(count, 1))
    for r in range(0, rows, step):
        part = packed[r : r + step]
        stream = np.zeros((part.shape[0], eights * bits), np.uint8)
        stream[:, :width] = part
        padded = np.zeros((part.shape[0], eights, 8), np.uint8)
        padded[:, :, :bits] = stream.reshape(part.shape[0], eights, bits)
        words = padded.view("<u8")[:, :, 0]
        for k in range(8):
            column = out[r : r + step, k::8]
            column[...] = (words[:, : column.shape[1]] >> np.uint64(k * bits)) & np.uint64((1 << bits) - 1)
    return out
