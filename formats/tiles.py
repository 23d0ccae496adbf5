"""Codebook and additive matrices in the order in which GPU kernels read them: codes in tiles of lanes, then tables.

A warp of 32 lanes loads 16 bytes a lane at once, 512 consecutive bytes; what these are is fixed here so that nothing is
re-arranged at load. Each matrix is one uint8 tensor without header or gaps. N rows and K inputs are padded with code 0,
whose table entries in padded rows are 0.

=============  =============  ==========================================================================================
layout         tile           content
=============  =============  ==========================================================================================
codebook4-v1   64 x 16        codes [N/64][K/16][lane 32][16]: byte 4 i + 2 h + b of a lane is row 32 h + lane, input
                              4 i + 2 b in the low nibble and the next one in the high nibble; then entries
                              float16 [N/64 * 64][16]
codebook8-v1   128 x 8        codes [N/128][K/8][q 2][lane 32][16]: byte 8 i + 4 h + b is row 64 q + 32 h + lane, input
                              4 i + b; then entries float16 [N/128][256][q 2][lane 32][h 2] of the same rows
additive-v1    16 x 32 G      codes [N/16][K/(32 G)][L][lane 32][16], for M codebooks L = 3 if M = 3 else 1 and
                              G = 8 L / M: byte (2 i + h) M + m of a lane's 16 L is row 8 h + lane / 4, codebook m,
                              group of eight inputs 4 i + lane % 4; then codebooks float16 [M][256][8]; then scales
                              float16 [N/16 * 16]
=============  =============  ==========================================================================================

A codebook of fewer entries is filled up with zeros. Tables in float32 do not occur: such tensors stay dense.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from trapetum.tensors import AdditiveTensor, CodebookTensor, QuantizedTensor

__all__ = ["TILES", "AdditiveTiles", "Codebook4Tiles", "Codebook8Tiles", "Tiles", "tiles_for"]

Bytes = NDArray[np.uint8]


def _whole(count: int, of: int) -> int:
    return -(-count // of)


def _padded(array: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """Zeros behind the array on every axis."""
    out = np.zeros(shape, array.dtype)
    out[tuple(slice(n) for n in array.shape)] = array
    return out


@dataclass(frozen=True)
class Tiles:
    """Sizes of one tiled matrix, its packing and its unpacking.

    Parameters
    ----------
    rows, in_features : int
        N and K.
    entries : int
        ``codebook_size`` of a codebook, ``num_codebooks`` of additive ones.
    """

    rows: int
    in_features: int
    entries: int
    layout: ClassVar[str]
    tensor: ClassVar[type[QuantizedTensor]]
    sizes: ClassVar[range]
    """What ``entries`` may be."""
    whole: ClassVar[int] = 1
    """Rows are a multiple of so many inputs."""

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and inputs of a tile."""
        raise NotImplementedError

    @property
    def tiles(self) -> tuple[int, int]:
        """Tiles along the rows and along the inputs."""
        return _whole(self.rows, self.tile[0]), _whole(self.in_features, self.tile[1])

    @property
    def tables_offset(self) -> int:
        """First byte behind the codes."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        raise NotImplementedError

    @classmethod
    def of(cls, tensors: Sequence[QuantizedTensor]) -> Self:
        """The sizes for tensors that are concatenated by rows first."""
        raise NotImplementedError

    def pack(self, tensors: Sequence[Any]) -> Bytes:
        """Tensors, concatenated by rows -> bytes, uint8 (nbytes,)."""
        raise NotImplementedError

    def unpack(self, data: Bytes, rows: slice | None = None, shape: tuple[int, ...] = ()) -> Any:
        """Bytes -> the tensor, or a range of its rows, of this shape; () is (rows, in_features).

        Raises
        ------
        ValueError
            If a code has no entry.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class _CodebookTiles(Tiles):
    tensor: ClassVar[type[QuantizedTensor]] = CodebookTensor

    @classmethod
    def of(cls, tensors: Sequence[QuantizedTensor]) -> Self:
        """Rows add up; the largest codebook counts."""
        sizes = [t.codebook_size for t in tensors if isinstance(t, CodebookTensor)]
        return cls(sum(t.rows for t in tensors), tensors[0].in_features, max(sizes))

    def _joined(self, tensors: Sequence[CodebookTensor], entries: int) -> tuple[Bytes, NDArray[np.float16]]:
        """Codes and tables of whole tiles."""
        rows, count = (n * size for n, size in zip(self.tiles, self.tile, strict=True))
        codes = _padded(np.concatenate([t.codes for t in tensors]), (rows, count))
        tables = np.concatenate([_padded(t.codebook.astype(np.float16), (t.rows, entries)) for t in tensors])
        return codes, _padded(tables, (rows, entries))

    def _made(
        self, codes: Bytes, tables: NDArray[np.float16], rows: slice | None, shape: tuple[int, ...]
    ) -> CodebookTensor:
        chosen = slice(*(rows or slice(None)).indices(self.rows))
        codes = np.ascontiguousarray(codes[chosen, : self.in_features])
        if codes.size and int(codes.max()) >= self.entries:
            raise ValueError(f"code {int(codes.max())} has no entry in a codebook of {self.entries}")
        return CodebookTensor(codes, np.ascontiguousarray(tables[chosen, : self.entries]), shape)


@dataclass(frozen=True)
class Codebook4Tiles(_CodebookTiles):
    """``codebook4-v1``: up to 16 entries a row."""

    layout: ClassVar[str] = "codebook4-v1"
    sizes: ClassVar[range] = range(2, 17)

    @property
    def tile(self) -> tuple[int, int]:
        """64 rows by 16 inputs: 512 bytes."""
        return 64, 16

    @property
    def tables_offset(self) -> int:
        """After 512 bytes a tile."""
        return self.tiles[0] * self.tiles[1] * 512

    @property
    def nbytes(self) -> int:
        """Codes, and 32 bytes a row."""
        return self.tables_offset + self.tiles[0] * 64 * 32

    def pack(self, tensors: Sequence[CodebookTensor]) -> Bytes:
        """See :meth:`Tiles.pack`."""
        codes, tables = self._joined(tensors, 16)
        high, wide = self.tiles
        # [R, h, lane, T, i, b, nibble] -> [R, T, lane, i, h, b, nibble]
        split = codes.reshape(high, 2, 32, wide, 4, 2, 2).transpose(0, 3, 2, 4, 1, 5, 6)
        packed = split[..., 0] | split[..., 1] << np.uint8(4)
        return np.concatenate([packed.reshape(-1), tables.astype("<f2").view(np.uint8).reshape(-1)])

    def unpack(self, data: Bytes, rows: slice | None = None, shape: tuple[int, ...] = ()) -> CodebookTensor:
        """See :meth:`Tiles.unpack`."""
        high, wide = self.tiles
        packed = data[: self.tables_offset].reshape(high, wide, 32, 4, 2, 2)
        split = np.stack([packed & np.uint8(15), packed >> np.uint8(4)], axis=-1)
        codes = split.transpose(0, 4, 2, 1, 3, 5, 6).reshape(high * 64, wide * 16)
        tables = np.ascontiguousarray(data[self.tables_offset :]).view("<f2").reshape(high * 64, 16)
        return self._made(codes, tables, rows, shape)


@dataclass(frozen=True)
class Codebook8Tiles(_CodebookTiles):
    """``codebook8-v1``: 17 to 256 entries a row."""

    layout: ClassVar[str] = "codebook8-v1"
    sizes: ClassVar[range] = range(2, 257)

    @property
    def tile(self) -> tuple[int, int]:
        """128 rows by 8 inputs: 1024 bytes."""
        return 128, 8

    @property
    def tables_offset(self) -> int:
        """After 1024 bytes a tile."""
        return self.tiles[0] * self.tiles[1] * 1024

    @property
    def nbytes(self) -> int:
        """Codes, and 512 bytes a row."""
        return self.tables_offset + self.tiles[0] * 65536

    def pack(self, tensors: Sequence[CodebookTensor]) -> Bytes:
        """See :meth:`Tiles.pack`."""
        codes, tables = self._joined(tensors, 256)
        high, wide = self.tiles
        # [R, q, h, lane, T, i, b] -> [R, T, q, lane, i, h, b]
        packed = codes.reshape(high, 2, 2, 32, wide, 2, 4).transpose(0, 4, 1, 3, 5, 2, 6)
        # [R, q, h, lane, entry] -> [R, entry, q, lane, h]
        entries = tables.reshape(high, 2, 2, 32, 256).transpose(0, 4, 1, 3, 2)
        flat = np.ascontiguousarray(entries, "<f2").view(np.uint8)
        return np.concatenate([packed.reshape(-1), flat.reshape(-1)])

    def unpack(self, data: Bytes, rows: slice | None = None, shape: tuple[int, ...] = ()) -> CodebookTensor:
        """See :meth:`Tiles.unpack`."""
        high, wide = self.tiles
        packed = data[: self.tables_offset].reshape(high, wide, 2, 32, 2, 2, 4)
        codes = packed.transpose(0, 2, 5, 3, 1, 4, 6).reshape(high * 128, wide * 8)
        entries = np.ascontiguousarray(data[self.tables_offset :]).view("<f2").reshape(high, 256, 2, 32, 2)
        tables = entries.transpose(0, 2, 4, 3, 1).reshape(high * 128, 256)
        return self._made(codes, tables, rows, shape)


@dataclass(frozen=True)
class AdditiveTiles(Tiles):
    """``additive-v1``: one to four codebooks of 256 vectors of 8."""

    layout: ClassVar[str] = "additive-v1"
    sizes: ClassVar[range] = range(1, 5)
    whole: ClassVar[int] = 8
    tensor: ClassVar[type[QuantizedTensor]] = AdditiveTensor

    @property
    def loads(self) -> int:
        """Times 16 bytes that a lane has of a tile."""
        return 3 if self.entries == 3 else 1

    @property
    def groups(self) -> int:
        """Groups of a row that a lane has of a tile."""
        return 8 * self.loads // self.entries

    @property
    def tile(self) -> tuple[int, int]:
        """16 rows by 32 inputs for each group of a lane."""
        return 16, 32 * self.groups

    @property
    def tables_offset(self) -> int:
        """After 512 bytes a load of a tile."""
        return self.tiles[0] * self.tiles[1] * 512 * self.loads

    @property
    def scales_offset(self) -> int:
        """After the codebooks."""
        return self.tables_offset + self.entries * 256 * 8 * 2

    @property
    def nbytes(self) -> int:
        """Codes, codebooks, and 2 bytes a row."""
        return self.scales_offset + self.tiles[0] * 16 * 2

    @classmethod
    def of(cls, tensors: Sequence[QuantizedTensor]) -> Self:
        """One tensor: matrices do not share codebooks."""
        (tensor,) = tensors
        if not isinstance(tensor, AdditiveTensor):
            raise ValueError(f"{tensor.layout} is not {cls.tensor.layout}")
        return cls(tensor.rows, tensor.in_features, tensor.num_codebooks)

    def pack(self, tensors: Sequence[AdditiveTensor]) -> Bytes:
        """See :meth:`Tiles.pack`."""
        (tensor,) = tensors
        high, wide = self.tiles
        count, groups = self.entries, self.groups
        padded = _padded(tensor.codes, (count, wide * groups * 4, high * 16))
        # [m, U, i, t, R, h, g] -> [R, U, lane (g, t), byte (i, h, m)]
        lanes = padded.reshape(count, wide, groups, 4, high, 2, 8).transpose(4, 1, 6, 3, 2, 5, 0)
        codes = lanes.reshape(high, wide, 32, self.loads, 16).transpose(0, 1, 3, 2, 4)
        books = np.ascontiguousarray(tensor.codebooks.astype("<f2")).view(np.uint8)
        scales = _padded(tensor.scales.astype("<f2"), (high * 16,)).view(np.uint8)
        return np.concatenate([codes.reshape(-1), books.reshape(-1), scales])

    def unpack(self, data: Bytes, rows: slice | None = None, shape: tuple[int, ...] = ()) -> AdditiveTensor:
        """See :meth:`Tiles.unpack`."""
        high, wide = self.tiles
        count, groups = self.entries, self.groups
        codes = data[: self.tables_offset].reshape(high, wide, self.loads, 32, 16).transpose(0, 1, 3, 2, 4)
        lanes = codes.reshape(high, wide, 8, 4, groups, 2, count)
        padded = lanes.transpose(6, 1, 4, 3, 0, 5, 2).reshape(count, wide * groups * 4, high * 16)
        books = np.ascontiguousarray(data[self.tables_offset : self.scales_offset]).view("<f2")
        scales = np.ascontiguousarray(data[self.scales_offset :]).view("<f2")
        chosen = slice(*(rows or slice(None)).indices(self.rows))
        return AdditiveTensor(
            np.ascontiguousarray(padded[:, : self.in_features // 8, chosen]),
            books.reshape(count, 256, 8),
            np.ascontiguousarray(scales[chosen]),
            shape,
        )


TILES: dict[str, type[Tiles]] = {cls.layout: cls for cls in (Codebook4Tiles, Codebook8Tiles, AdditiveTiles)}


def tiles_for(tensor: QuantizedTensor) -> type[Tiles] | None:
    """The layout that holds a tensor, or None where only a dense copy will do.

    Examples
    --------
    >>> tiles_for(CodebookTensor(np.zeros((1, 4), np.uint8), np.zeros((1, 16), np.float16))).layout
    'codebook4-v1'
    """
    if isinstance(tensor, CodebookTensor) and tensor.codebook.dtype == np.float16:
        return Codebook4Tiles if tensor.codebook_size <= 16 else Codebook8Tiles
    if isinstance(tensor, AdditiveTensor) and tensor.num_codebooks <= 4:
        if tensor.codebooks.dtype == np.float16 and tensor.scales.dtype == np.float16:
            return AdditiveTiles
    return None
