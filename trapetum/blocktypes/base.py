"""What a GGUF block type is: a name, a type id, and bytes named field by field.

A row of weights is cut into blocks of ``block_size`` elements; each block is stored in ``type_size`` bytes,
the sum of its ``fields`` in file order. Between bytes and weights stand *parts*: the scales and codes of a
block as plain integer and float16 arrays, one row a block. ``unpack`` and ``pack`` translate bytes <-> parts
without loss (they hold every bit trick), ``values`` computes the weights from parts (it holds the arithmetic,
in float32 and in the order that ggml uses, so that results agree bit for bit). Which scales and codes are
good is not decided here: see
``quantize.block_search``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["BlockType", "Bytes", "Parts", "f16", "join_bits", "split_bits", "to_bytes"]

Bytes = NDArray[np.uint8]
Parts = Mapping[str, NDArray[Any]]

# Decoding needs ~10 bytes of scratch a weight; 64 Ki weights a chunk stay in the L2 cache (1.6x on 4096 x
# 4096).
_CHUNK_WEIGHTS = 1 << 16


@dataclass(frozen=True)
class BlockType:
    """One way to store a block of weights.

    Parameters
    ----------
    name : str
        GGUF's name: ``"Q4_K"``.
    id : int
        GGUF's type number of a tensor (not ``general.file_type``).
    block_size : int
        Elements a block; a row's length must be a multiple.
    fields : tuple of (str, int)
        Name and bytes of each field, in file order.
    dtype : numpy dtype, optional
        Of the elements, for types that are plain numbers.
    unpack, pack, values : callables, optional
        Raw fields -> parts, parts -> raw fields, parts -> float32; absent where only the size is known.
    """

    name: str
    id: int
    block_size: int
    fields: tuple[tuple[str, int], ...]
    dtype: np.dtype[Any] | None = None
    unpack: Callable[[Mapping[str, Bytes]], Parts] | None = None
    pack: Callable[[Parts], Mapping[str, Bytes]] | None = None
    values: Callable[[Parts], NDArray[np.float32]] | None = None

    @property
    def type_size(self) -> int:
        """Bytes a block."""
        return sum(size for _, size in self.fields)

    @property
    def bits_per_weight(self) -> float:
        """Stored bits a weight."""
        return 8 * self.type_size / self.block_size

    def row_bytes(self, in_features: int) -> int:
        """Bytes of a row of ``in_features`` weights.

        Raises
        ------
        ValueError
            If the row is not a whole number of blocks.

        Examples
        --------
        >>> from trapetum.blocktypes import BLOCK_TYPES
        >>> BLOCK_TYPES["Q4_K"].row_bytes(512)
        288
        """
        if in_features % self.block_size:
            raise ValueError(
                f"a row of {in_features} weights is not a multiple of {self.name}'s block of {self.block_size}"
            )
        return in_features // self.block_size * self.type_size

    def split(self, blocks: Bytes) -> dict[str, Bytes]:
        """Raw fields of blocks [n, type_size], each uint8 [n, bytes], views where possible."""
        out, at = {}, 0
        for name, size in self.fields:
            out[name] = blocks[:, at : at + size]
            at += size
        return out

    def to_parts(self, blocks: Bytes) -> Parts:
        """Scales and codes of blocks.

        Parameters
        ----------
        blocks : ndarray of uint8, shape (n, type_size)

        Returns
        -------
        mapping of str to ndarray, each of n rows
        """
        if self.unpack is None:
            raise NotImplementedError(f"{self.name} is known by its size only")
        return self.unpack(self.split(blocks))

    def from_parts(self, parts: Parts) -> Bytes:
        """Blocks of the given scales and codes; the exact inverse of :meth:`to_parts`.

        Returns
        -------
        ndarray of uint8, shape (n, type_size)
        """
        if self.pack is None:
            raise NotImplementedError(f"{self.name} is known by its size only")
        raw = self.pack(parts)
        return np.concatenate([raw[name] for name, _ in self.fields], axis=1)

    def decode(self, blocks: Bytes) -> NDArray[np.float32]:
        """Weights of rows of blocks, exactly as ggml computes them.

        Parameters
        ----------
        blocks : ndarray of uint8, shape (rows, k * type_size)

        Returns
        -------
        ndarray of float32, shape (rows, k * block_size)

        Raises
        ------
        ValueError
            If a row is not a whole number of blocks.
        """
        rows, width = blocks.shape
        if width % self.type_size:
            raise ValueError(
                f"{width} bytes are not a whole number of {self.type_size}-byte {self.name} blocks"
            )
        if self.values is None or self.unpack is None:
            raise NotImplementedError(f"{self.name} is known by its size only")
        flat = np.ascontiguousarray(blocks).reshape(-1, self.type_size)
        out = np.empty((len(flat), self.block_size), np.float32)
        step = max(1, _CHUNK_WEIGHTS // self.block_size)
        # Scales of a damaged file may be infinite or NaN; that is for a finite check to say, not for a warning.
        with np.errstate(over="ignore", invalid="ignore"):
            for at in range(0, len(flat), step):
                out[at : at + step] = self.values(self.unpack(self.split(flat[at : at + step])))
        return out.reshape(rows, width // self.type_size * self.block_size)


def f16(raw: Bytes) -> NDArray[np.float16]:
    """One float16 a block from its two bytes: uint8 [n, 2k] -> float16 [n, k] ([n] for k = 1)."""
    values = np.ascontiguousarray(raw).view("<f2")
    return values[:, 0] if raw.shape[1] == 2 else values


def to_bytes(values: NDArray[Any], dtype: str) -> Bytes:
    """Little-endian bytes of one value, or a row of values, a block: [n] or [n, k] -> uint8 [n, bytes]."""
    values = np.ascontiguousarray(values, dtype=dtype)
    return (values[:, None] if values.ndim == 1 else values).view(np.uint8)


def split_bits(raw: Bytes, bits: int, group: int) -> Bytes:
    """Codes stored *planar*: code ``k`` of the ``8/bits`` codes in byte ``m`` of a group is element ``k*group
    + m``.

    Parameters
    ----------
    raw : ndarray of uint8, shape (n, g * group)
    bits : int
        1, 2 or 4.
    group : int
        Bytes that belong together; 1 gives the interleaved order (four neighbours in a byte).

    Returns
    -------
    ndarray of uint8, shape (n, g * group * 8 / bits)
    """
    n, width = raw.shape
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[None, None, :, None]
    codes = (raw.reshape(n, width // group, 1, group) >> shifts) & np.uint8((1 << bits) - 1)
    return codes.reshape(n, width * 8 // bits)


def join_bits(codes: Bytes, bits: int, group: int) -> Bytes:
    """Undo :func:`split_bits`; every code must be below ``2**bits`` (checked).

    Raises
    ------
    ValueError
        If a code does not fit.
    """
    if codes.size and int(codes.max()) >> bits:
        raise ValueError(f"code {int(codes.max())} does not fit in {bits} bits")
    n, count = codes.shape
    per = 8 // bits
    grouped = codes.astype(np.uint8, copy=False).reshape(n, count // (per * group), per, group)
    out = grouped[:, :, 0].copy()
    for k in range(1, per):
        out |= grouped[:, :, k] << np.uint8(k * bits)
    return out.reshape(n, count // per)
