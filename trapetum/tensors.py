"""The QuantizedTensor family: what a stored tensor is, and the exact NumPy decode of each layout.

Every quantizer returns one of these, every file format stores one of these, every decoder is tested against
``dequantize`` of one of these. A *layout* names how numbers are laid out (``dense``, ``codebook``, ...); a
*scheme* (package ``quantize``) names the search that chose them. Adding a layout is one class here and one
line in ``LAYOUTS``.

====================  ==========================================================================================
layout                value of weight [o, i]
====================  ==========================================================================================
``dense``             ``values[o, i]`` as stored
``codebook``          ``codebook[o, codes[o, i]]``
``ternary``           ``(codes[o, i] - 1) * scales[o, i // group_size]``, codes 0 .. 2, or 0 .. 3 (``+2 *
scale``) ``blocks``            element ``i`` of row ``o`` of a GGUF block type (``trapetum.blocktypes``)
====================  ==========================================================================================

A tensor of any rank is a matrix of ``rows = prod(shape[:-1])`` by ``in_features = shape[-1]``; ``shape``
keeps the logical form (stacked experts [E, out, in], a leading 1, ...). Vectors and scalars have one row.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from trapetum.blocktypes import BLOCK_TYPES, BlockType
from trapetum.packing import pack_bits, packed_row_bytes, unpack_bits

__all__ = [
    "LAYOUTS",
    "BlockTensor",
    "CodebookTensor",
    "DenseTensor",
    "QuantizedTensor",
    "TernaryTensor",
    "matrix_shape",
]

_ALL = slice(None)


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """(rows, in_features) of a tensor of any rank.

    Examples
    --------
    >>> matrix_shape((8, 4, 16)), matrix_shape((5,)), matrix_shape(())
    ((32, 16), (1, 5), (1, 1))
    """
    if not shape:
        return 1, 1
    return math.prod(shape[:-1]), shape[-1]


class QuantizedTensor(ABC):
    """One stored tensor. Instances are immutable and cheap to slice by rows."""

    layout: ClassVar[str]
    shape: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Number of rows, ``prod(shape[:-1])``."""
        return matrix_shape(self.shape)[0]

    @property
    def in_features(self) -> int:
        """Length of a row, ``shape[-1]``."""
        return matrix_shape(self.shape)[1]

    @property
    def nbytes(self) -> int:
        """Stored bytes, all overhead counted."""
        return sum(a.nbytes for a in self.to_arrays().values())

    @property
    def nbits_per_weight(self) -> float:
        """Stored bits a weight, all overhead counted; 0 for an empty tensor."""
        count = math.prod(self.shape)
        return 8.0 * self.nbytes / count if count else 0.0

    @abstractmethod
    def dequantize(self, rows: slice | None = None) -> NDArray[np.float32]:
        """Decode exactly.

        Parameters
        ----------
        rows : slice, optional
            Rows of the matrix form; all of them, in the logical shape, when omitted.

        Returns
        -------
        ndarray of float32, shape ``shape``, or (selected rows, in_features)
        """

    @abstractmethod
    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """The stored arrays by suffix: a tensor NAME is stored as ``NAME.suffix`` (``""``: as NAME itself)."""

    @abstractmethod
    def params(self) -> dict[str, Any]:
        """What, beside shape and arrays, is needed to read the arrays (JSON values)."""

    @classmethod
    @abstractmethod
    def from_arrays(
        cls, arrays: Mapping[str, NDArray[Any]], shape: tuple[int, ...], params: Mapping[str, Any]
    ) -> Self:
        """Undo :meth:`to_arrays`; raises ``ValueError`` where arrays, shape and params disagree."""


@dataclass(frozen=True, eq=False)
class DenseTensor(QuantizedTensor):
    """A tensor kept as it was.

    Parameters
    ----------
    values : ndarray of any dtype, shape ``shape``
        bfloat16 and float8 through ml_dtypes.
    """

    values: NDArray[Any]
    layout: ClassVar[str] = "dense"

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """Logical shape."""
        return self.values.shape

    def dequantize(self, rows: slice | None = None) -> NDArray[np.float32]:
        """Values as float32; see :meth:`QuantizedTensor.dequantize`."""
        values = self.values if rows is None else self.values.reshape(self.rows, self.in_features)[rows]
        return values.astype(np.float32)

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """One array under the tensor's own name."""
        return {"": self.values}

    def params(self) -> dict[str, Any]:
        """Nothing: dtype and shape are in the file."""
        return {}

    @classmethod
    def from_arrays(
        cls, arrays: Mapping[str, NDArray[Any]], shape: tuple[int, ...], params: Mapping[str, Any]
    ) -> Self:
        """Take the one array; its shape must be ``shape``."""
        values = arrays[""]
        if values.shape != tuple(shape):
            raise ValueError(f"stored shape {values.shape} is not {tuple(shape)}")
        return cls(values)


@dataclass(frozen=True, eq=False)
class CodebookTensor(QuantizedTensor):
    """One table of ``codebook_size`` values for each output row, and one code a weight.

    Parameters
    ----------
    codes : ndarray of uint8, shape (rows, in_features)
        Index into the row's codebook.
    codebook : ndarray of float16 or float32, shape (rows, codebook_size)
        float32 only where float16 would overflow or lose tiny values (see ``quantize.kmeans``).
    shape : tuple of int, optional
        Logical shape when it is not (rows, in_features).

    Raises
    ------
    ValueError
        If the arrays do not belong together.

    Examples
    --------
    >>> t = CodebookTensor(np.array([[0, 1, 1]], np.uint8), np.array([[-1, 2]], np.float16))
    >>> t.dequantize().tolist(), t.bits
    ([[-1.0, 2.0, 2.0]], 1)
    """

    codes: NDArray[np.uint8]
    codebook: NDArray[Any]
    shape: tuple[int, ...] = ()
    layout: ClassVar[str] = "codebook"

    def __post_init__(self) -> None:
        if self.codes.ndim != 2 or self.codebook.ndim != 2 or self.codes.dtype != np.uint8:
            raise ValueError("codes must be uint8 [rows, in_features] and codebook [rows, codebook_size]")
        if self.codes.shape[0] != self.codebook.shape[0]:
            raise ValueError(
                f"{self.codes.shape[0]} rows of codes, {self.codebook.shape[0]} rows of codebook"
            )
        if self.codebook.dtype not in (np.float16, np.float32):
            raise ValueError(f"codebook is {self.codebook.dtype}; float16 and float32 are allowed")
        if not 2 <= self.codebook.shape[1] <= 256:
            raise ValueError(f"codebook_size is {self.codebook.shape[1]}; 2 to 256 are allowed")
        object.__setattr__(self, "shape", tuple(self.shape) or self.codes.shape)
        if matrix_shape(self.shape) != self.codes.shape:
            raise ValueError(f"shape {self.shape} does not hold {self.codes.shape} codes")

    @property
    def codebook_size(self) -> int:
        """Entries a row."""
        return int(self.codebook.shape[1])

    @property
    def bits(self) -> int:
        """Stored bits a code, ``ceil(log2 codebook_size)``."""
        return (self.codebook_size - 1).bit_length()

    @property
    def nbytes(self) -> int:
        """Stored bytes: packed codes and codebook."""
        return int(self.codes.shape[0] * packed_row_bytes(self.codes.shape[1], self.bits) + self.codebook.nbytes)

    def dequantize(self, rows: slice | None = None) -> NDArray[np.float32]:
        """``codebook[o, codes[o, i]]``; see :meth:`QuantizedTensor.dequantize`."""
        part = _ALL if rows is None else rows
        table = self.codebook[part].astype(np.float32)
        values = np.take_along_axis(table, self.codes[part].astype(np.intp), axis=1)
        return values.reshape(self.shape) if rows is None else values

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """``codes`` u8 [rows, packed bytes], a bit stream (see ``packing``), and ``codebook`` [rows, K]."""
        return {"codes": pack_bits(self.codes, self.bits), "codebook": self.codebook}

    def params(self) -> dict[str, Any]:
        """The codebook size."""
        return {"codebook_size": self.codebook_size}

    @classmethod
    def from_arrays(
        cls, arrays: Mapping[str, NDArray[Any]], shape: tuple[int, ...], params: Mapping[str, Any]
    ) -> Self:
        """Unpack the codes; every code must be below the codebook size."""
        codebook = arrays["codebook"]
        if codebook.ndim != 2 or codebook.shape[1] != params["codebook_size"]:
            raise ValueError(
                f"codebook has shape {codebook.shape}; [rows, {params['codebook_size']}] expected"
            )
        bits = (codebook.shape[1] - 1).bit_length()
        codes = unpack_bits(arrays["codes"], bits, matrix_shape(tuple(shape))[1])
        if codes.size and int(codes.max()) >= codebook.shape[1]:
            raise ValueError(f"code {int(codes.max())} has no entry in a codebook of {codebook.shape[1]}")
        return cls(codes, codebook, tuple(shape))


@dataclass(frozen=True, eq=False)
class TernaryTensor(QuantizedTensor):
    """Two-bit codes around zero and one float16 scale for each group of a row's weights (PQ2).

    Parameters
    ----------
    codes : ndarray of uint8, shape (rows, in_features)
        0, 1, 2 for -scale, 0, +scale; at four levels also 3 for +2 * scale. Scales may be negative.
    scales : ndarray of float16 or float32, shape (rows, in_features // group_size)
        float32 only where a checkpoint came with a scale that float16 cannot hold.
    levels : {3, 4}
        3 promises that code 3 does not occur.
    rotation : str, optional
        Key of the Hadamard rotation that was folded into the weights (``quantize.hadamard``); ``dequantize``
        returns the weights as stored, rotated.
    shape : tuple of int, optional
        Logical shape when it is not (rows, in_features).

    Raises
    ------
    ValueError
        If the arrays do not belong together.

    Examples
    --------
    >>> t = TernaryTensor(np.array([[0, 1, 2, 3]], np.uint8), np.array([[0.5]], np.float16), 4)
    >>> t.dequantize().tolist(), t.group_size
    ([[-0.5, 0.0, 0.5, 1.0]], 4)
    """

    codes: NDArray[np.uint8]
    scales: NDArray[Any]
    levels: int = 3
    rotation: str | None = None
    shape: tuple[int, ...] = ()
    layout: ClassVar[str] = "ternary"

    def __post_init__(self) -> None:
        if self.codes.ndim != 2 or self.scales.ndim != 2 or self.codes.dtype != np.uint8:
            raise ValueError("codes must be uint8 [rows, in_features] and scales [rows, groups]")
        if self.scales.dtype not in (np.float16, np.float32):
            raise ValueError(f"scales are {self.scales.dtype}; float16 and float32 are allowed")
        if self.levels not in (3, 4):
            raise ValueError(f"levels is {self.levels}; 3 and 4 are allowed")
        rows, count = self.codes.shape
        groups = self.scales.shape[1]
        if self.scales.shape[0] != rows or groups == 0 or count % groups:
            raise ValueError(
                f"scales of shape {self.scales.shape} do not divide codes of shape {self.codes.shape}"
            )
        if self.codes.size and int(self.codes.max()) >= self.levels:
            raise ValueError(f"code {int(self.codes.max())} does not occur at {self.levels} levels")
        object.__setattr__(self, "shape", tuple(self.shape) or self.codes.shape)
        if matrix_shape(self.shape) != self.codes.shape:
            raise ValueError(f"shape {self.shape} does not hold {self.codes.shape} codes")

    @property
    def group_size(self) -> int:
        """Weights a scale."""
        return int(self.codes.shape[1] // self.scales.shape[1])

    @property
    def nbytes(self) -> int:
        """Stored bytes: packed codes and scales."""
        return int(self.codes.shape[0] * packed_row_bytes(self.codes.shape[1], 2) + self.scales.nbytes)

    def dequantize(self, rows: slice | None = None) -> NDArray[np.float32]:
        """``(code - 1) * scale``; see :meth:`QuantizedTensor.dequantize`."""
        part = _ALL if rows is None else rows
        codes, scales = self.codes[part], self.scales[part].astype(np.float32)
        steps = codes.reshape(codes.shape[0], scales.shape[1], -1).astype(np.float32) - np.float32(1)
        values = (steps * scales[:, :, None]).reshape(codes.shape)
        return values.reshape(self.shape) if rows is None else values

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """``codes`` u8 [rows, packed bytes], two bits each, lowest first, and ``scales`` [rows, groups]."""
        return {"codes": pack_bits(self.codes, 2), "scales": self.scales}

    def params(self) -> dict[str, Any]:
        """Levels, group size and the rotation's key."""
        return {"levels": self.levels, "group_size": self.group_size, "rotation": self.rotation}

    @classmethod
    def from_arrays(
        cls, arrays: Mapping[str, NDArray[Any]], shape: tuple[int, ...], params: Mapping[str, Any]
    ) -> Self:
        """Unpack the codes; the scales must divide a row into groups of the stated size."""
        in_features = matrix_shape(tuple(shape))[1]
        scales = arrays["scales"]
        if scales.ndim != 2 or scales.shape[1] * params["group_size"] != in_features:
            raise ValueError(f"scales of shape {scales.shape} are not groups of {params['group_size']}")
        codes = unpack_bits(arrays["codes"], 2, in_features)
        return cls(codes, scales, params["levels"], params.get("rotation"), tuple(shape))


@dataclass(frozen=True, eq=False)
class BlockTensor(QuantizedTensor):
    """Rows of GGUF blocks.

    Parameters
    ----------
    type : str
        Name in ``trapetum.blocktypes.BLOCK_TYPES``: ``"Q4_K"``.
    blocks : ndarray of uint8, shape (rows, row bytes)
        Exactly the bytes that a GGUF file holds.
    shape : tuple of int, optional
        Logical shape when it is not (rows, in_features).

    Raises
    ------
    ValueError
        If the type is unknown or the rows are not whole blocks.

    Examples
    --------
    >>> BlockTensor("Q8_0", np.array([[0, 60] + 32 * [3]], np.uint8)).dequantize()[0, :2].tolist()
    [3.0, 3.0]
    """

    type: str
    blocks: NDArray[np.uint8]
    shape: tuple[int, ...] = ()
    layout: ClassVar[str] = "blocks"

    def __post_init__(self) -> None:
        if self.type not in BLOCK_TYPES:
            raise ValueError(f"block type {self.type!r} is unknown; {', '.join(BLOCK_TYPES)} are known")
        if self.blocks.ndim != 2 or self.blocks.dtype != np.uint8:
            raise ValueError("blocks must be uint8 [rows, row bytes]")
        rows, width = self.blocks.shape
        count = width // self.block_type.type_size * self.block_type.block_size
        object.__setattr__(self, "shape", tuple(self.shape) or (rows, count))
        rows_needed, in_features = matrix_shape(self.shape)
        if rows != rows_needed or width != self.block_type.row_bytes(in_features):
            raise ValueError(f"shape {self.shape} of {self.type} is not {rows} rows of {width} bytes")

    @property
    def block_type(self) -> BlockType:
        """Sizes and exact decode of the type."""
        return BLOCK_TYPES[self.type]

    def dequantize(self, rows: slice | None = None) -> NDArray[np.float32]:
        """Weights exactly as ggml decodes them; see :meth:`QuantizedTensor.dequantize`."""
        values = self.block_type.decode(self.blocks[_ALL if rows is None else rows])
        return values.reshape(self.shape) if rows is None else values

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """``blocks`` u8 [rows, row bytes]."""
        return {"blocks": self.blocks}

    def params(self) -> dict[str, Any]:
        """The type's name."""
        return {"type": self.type}

    @classmethod
    def from_arrays(
        cls, arrays: Mapping[str, NDArray[Any]], shape: tuple[int, ...], params: Mapping[str, Any]
    ) -> Self:
        """Take the blocks as they are."""
        return cls(params["type"], arrays["blocks"], tuple(shape))


LAYOUTS: dict[str, type[QuantizedTensor]] = {
    c.layout: c for c in (DenseTensor, CodebookTensor, TernaryTensor, BlockTensor)
}
