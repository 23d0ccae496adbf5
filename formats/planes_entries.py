"""What a planes file says of each matrix that it holds, and how its bytes become a tensor again.

Two kinds: ternary matrices in planes-v1 (metadata key ``planes``), and codebook and additive ones in the tiles of
``formats/tiles.py`` (key ``tiles``). Both may hold several matrices of a checkpoint, concatenated by rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from trapetum.formats.planes_layout import BLOCK, GROUP_SIZE, split_planes, tensor_planes
from trapetum.formats.tiles import TILES, Tiles
from trapetum.packing import unpack_bits
from trapetum.tensors import QuantizedTensor, TernaryTensor, matrix_shape

__all__ = ["ENTRIES", "MatrixEntry", "PlanesEntry", "PlanesPart", "TilesEntry"]


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
class MatrixEntry(ABC):
    """One tensor of the file that is not dense.

    Parameters
    ----------
    name : str
        Name in the file; of an unfused matrix the weight's own.
    parts : tuple of PlanesPart
        The matrices, in the order of their rows.
    """

    name: str
    parts: tuple[PlanesPart, ...]
    key: ClassVar[str]
    """Of the metadata."""

    @property
    @abstractmethod
    def rotation(self) -> str | None:
        """Key of the Hadamard rotation folded into the weights."""

    @property
    def rows(self) -> int:
        """N."""
        return sum(matrix_shape(part.shape)[0] for part in self.parts)

    @property
    def in_features(self) -> int:
        """K."""
        return matrix_shape(self.parts[0].shape)[1]

    @property
    @abstractmethod
    def layout(self) -> str:
        """Of the bytes: ``planes-v1``, a name of ``tiles.TILES``."""

    @property
    @abstractmethod
    def tensor(self) -> type[QuantizedTensor]:
        """What its matrices are."""

    @property
    @abstractmethod
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of the uint8 tensor."""

    @property
    @abstractmethod
    def misfit(self) -> str | None:
        """Why such a matrix cannot be stored."""

    @property
    @abstractmethod
    def consistent(self) -> bool:
        """Whether the numbers of a description are allowed ones."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """The entry as stored in metadata and manifest."""

    @classmethod
    @abstractmethod
    def read(cls, name: str, parts: tuple[PlanesPart, ...], item: Mapping[str, Any]) -> Self:
        """Undo :meth:`describe`; KeyError, TypeError or ValueError where that cannot be done."""

    @abstractmethod
    def pack(self, tensors: Sequence[Any]) -> NDArray[np.uint8]:
        """The tensors of the parts -> bytes of the stored shape; ValueError where they do not fit."""

    @abstractmethod
    def unpack(self, data: NDArray[np.uint8], rows: slice, shape: tuple[int, ...]) -> QuantizedTensor:
        """Bytes -> some rows of all, as a tensor of this shape; () is (rows, K)."""


@dataclass(frozen=True)
class PlanesEntry(MatrixEntry):
    """A ternary matrix in planes-v1.

    Parameters
    ----------
    levels : {3, 4}
        3 promises that code 3 does not occur.
    rotation : str, optional
        Key of the Hadamard rotation folded into the weights.
    """

    levels: int = 3
    rotation: str | None = None
    key: ClassVar[str] = "planes"
    layout: ClassVar[str] = "planes-v1"
    tensor: ClassVar[type[QuantizedTensor]] = TernaryTensor

    @property
    def scales_offset(self) -> int:
        """First byte of the scales plane."""
        return self.rows * self.in_features // 4

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """(N, K/128 * 34)."""
        return self.rows, self.in_features // GROUP_SIZE * BLOCK.type_size

    @property
    def misfit(self) -> str | None:
        """Rows must be whole groups."""
        if self.in_features % GROUP_SIZE:
            return f"rows of {self.in_features} weights; {self.layout} needs a multiple of {GROUP_SIZE}"
        return None

    @property
    def consistent(self) -> bool:
        """Three or four levels."""
        return self.levels in (3, 4)

    def describe(self) -> dict[str, Any]:
        """See :meth:`MatrixEntry.describe`."""
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

    @classmethod
    def read(cls, name: str, parts: tuple[PlanesPart, ...], item: Mapping[str, Any]) -> Self:
        """See :meth:`MatrixEntry.read`."""
        return cls(name, parts, int(item["levels"]), item["rotation"])

    def pack(self, tensors: Sequence[TernaryTensor]) -> NDArray[np.uint8]:
        """See :meth:`MatrixEntry.pack`."""
        return tensor_planes(tensors)

    def unpack(self, data: NDArray[np.uint8], rows: slice, shape: tuple[int, ...]) -> TernaryTensor:
        """See :meth:`MatrixEntry.unpack`."""
        codes, scales = split_planes(data, self.rows, self.in_features)
        values = unpack_bits(codes[rows], 2, self.in_features)
        return TernaryTensor(values, scales[rows], self.levels, self.rotation, shape)


@dataclass(frozen=True)
class TilesEntry(MatrixEntry):
    """A codebook or additive matrix in tiles.

    Parameters
    ----------
    tiles : Tiles
        Layout and sizes.
    rotation : str, optional
        Key of the Hadamard rotation folded into the weights.
    """

    tiles: Tiles
    rotation: str | None = None
    key: ClassVar[str] = "tiles"
    misfit: ClassVar[None] = None

    @property
    def layout(self) -> str:
        """Name and version of the tiles."""
        return self.tiles.layout

    @property
    def tensor(self) -> type[QuantizedTensor]:
        """What its matrices are."""
        return self.tiles.tensor

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """(bytes,)."""
        return (self.tiles.nbytes,)

    @property
    def consistent(self) -> bool:
        """Tiles of these matrices, with as many entries as the layout can have."""
        same = (self.tiles.rows, self.tiles.in_features) == (self.rows, self.in_features)
        return same and self.tiles.entries in self.tiles.sizes and not self.in_features % self.tiles.whole

    def describe(self) -> dict[str, Any]:
        """See :meth:`MatrixEntry.describe`."""
        return {
            "layout": self.layout,
            "N": self.rows,
            "K": self.in_features,
            "entries": self.tiles.entries,
            "codes_offset": 0,
            "tables_offset": self.tiles.tables_offset,
            "rotation": self.rotation,
            "parts": [asdict(part) for part in self.parts],
        }

    @classmethod
    def read(cls, name: str, parts: tuple[PlanesPart, ...], item: Mapping[str, Any]) -> Self:
        """See :meth:`MatrixEntry.read`."""
        made = TILES[item["layout"]]
        tiles = made(int(item["N"]), int(item["K"]), int(item["entries"]))
        return cls(name, parts, tiles, item["rotation"])

    def pack(self, tensors: Sequence[QuantizedTensor]) -> NDArray[np.uint8]:
        """See :meth:`MatrixEntry.pack`."""
        return self.tiles.pack(tensors)

    def unpack(self, data: NDArray[np.uint8], rows: slice, shape: tuple[int, ...]) -> QuantizedTensor:
        """See :meth:`MatrixEntry.unpack`."""
        found: QuantizedTensor = self.tiles.unpack(data, rows, shape)
        return found


ENTRIES: tuple[type[MatrixEntry], ...] = (PlanesEntry, TilesEntry)
