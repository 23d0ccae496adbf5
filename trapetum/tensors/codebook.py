"""One table of values for each row, and a code a weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from trapetum.packing import pack_bits, packed_row_bytes, unpack_bits
from trapetum.tensors.base import QuantizedTensor, matrix_shape, require_floats

__all__ = ["CodebookTensor"]


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
        require_floats(codebook=self.codebook)
        if not 2 <= self.codebook.shape[1] <= 256:
            raise ValueError(f"codebook_size is {self.codebook.shape[1]}; 2 to 256 are allowed")
        self._settle_shape(*self.codes.shape)

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
        return int(
            self.codes.shape[0] * packed_row_bytes(self.codes.shape[1], self.bits) + self.codebook.nbytes
        )

    def dequantize(self, rows: slice | None = None) -> NDArray[np.float32]:
        """``codebook[o, codes[o, i]]``; see :meth:`QuantizedTensor.dequantize`."""
        part = slice(None) if rows is None else rows
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
