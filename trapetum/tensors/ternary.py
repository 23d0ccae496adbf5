"""Two-bit codes around zero, and a scale for each group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from trapetum.packing import pack_bits, packed_row_bytes, unpack_bits
from trapetum.tensors.base import QuantizedTensor, matrix_shape, require_floats

__all__ = ["TernaryTensor"]


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
        require_floats(scales=self.scales)
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
        self._settle_shape(*self.codes.shape)

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
        part = slice(None) if rows is None else rows
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
