"""Additive codebooks: eight weights at once are a sum of vectors, one of each codebook, times the row's scale."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from trapetum.tensors.base import QuantizedTensor, matrix_shape, require_floats

__all__ = ["ENTRIES", "GROUP", "MAX_CODEBOOKS", "AdditiveTensor"]

ENTRIES, GROUP, MAX_CODEBOOKS = 256, 8, 8


@dataclass(frozen=True, eq=False)
class AdditiveTensor(QuantizedTensor):
    """``W[o, 8g + d] = scales[o] * sum over m of codebooks[m, codes[m, g, o], d]``; the codebooks serve all rows.

    Parameters
    ----------
    codes : ndarray of uint8, shape (num_codebooks, in_features / 8, rows)
    codebooks : ndarray of float16 or float32, shape (num_codebooks, 256, 8)
    scales : ndarray of float16 or float32, shape (rows,)
    shape : tuple of int, optional
        Logical shape when it is not (rows, in_features).

    Raises
    ------
    ValueError
        If the arrays do not belong together.

    Notes
    -----
    Decoded in float32: the vectors are added in the order of m, the sum is multiplied by the scale; each step is
    rounded once. The layout of AQLM with groups of 8 inputs and 256 entries.

    Examples
    --------
    >>> books = np.arange(2 * 256 * 8, dtype=np.float32).reshape(2, 256, 8)
    >>> t = AdditiveTensor(np.array([[[1]], [[0]]], np.uint8), books, np.array([0.5], np.float16))
    >>> t.dequantize()[0, :2].tolist(), t.shape
    ([1028.0, 1029.0], (1, 8))
    """

    codes: NDArray[np.uint8]
    codebooks: NDArray[Any]
    scales: NDArray[Any]
    shape: tuple[int, ...] = ()
    layout: ClassVar[str] = "additive"
    shared: ClassVar[frozenset[str]] = frozenset({"codebooks"})

    def __post_init__(self) -> None:
        if self.codes.ndim != 3 or self.codes.dtype != np.uint8:
            raise ValueError("codes must be uint8 [num_codebooks, in_features / 8, rows]")
        count, groups, rows = self.codes.shape
        if self.codebooks.shape != (count, ENTRIES, GROUP) or not 1 <= count <= MAX_CODEBOOKS:
            raise ValueError(
                f"codebooks have shape {self.codebooks.shape} for {count} codes a group; "
                f"[1 to {MAX_CODEBOOKS}, {ENTRIES}, {GROUP}] expected"
            )
        if self.scales.shape != (rows,):
            raise ValueError(f"scales have shape {self.scales.shape} for {rows} rows of codes")
        require_floats(codebooks=self.codebooks, scales=self.scales)
        self._settle_shape(rows, GROUP * groups)

    @property
    def num_codebooks(self) -> int:
        """Vectors that are added."""
        return int(self.codes.shape[0])

    @property
    def nbytes(self) -> int:
        """Stored bytes: codes, codebooks and scales."""
        return int(self.codes.nbytes + self.codebooks.nbytes + self.scales.nbytes)

    def dequantize(self, rows: slice | None = None) -> NDArray[np.float32]:
        """Sum, then scale; see :meth:`QuantizedTensor.dequantize`."""
        part = slice(None) if rows is None else rows
        codes, scales = self.codes[:, :, part], self.scales[part].astype(np.float32)
        books = self.codebooks.astype(np.float32)
        total = np.zeros((scales.shape[0], codes.shape[1], GROUP), np.float32)
        with np.errstate(over="ignore", invalid="ignore"):  # for a finite check to say, not for a warning
            for book, chosen in zip(books, codes, strict=True):
                total += book[chosen.T]
            values = (total * scales[:, None, None]).reshape(scales.shape[0], GROUP * codes.shape[1])
        return values.reshape(self.shape) if rows is None else values

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """``codes`` u8 [rows, in_features / 8 * M], a group's M codes side by side; ``scales`` [rows, 1]."""
        count, groups, rows = self.codes.shape
        codes = np.ascontiguousarray(self.codes.transpose(2, 1, 0)).reshape(rows, groups * count)
        return {"codes": codes, "codebooks": self.codebooks, "scales": self.scales.reshape(rows, 1)}

    def params(self) -> dict[str, Any]:
        """The number of codebooks."""
        return {"num_codebooks": self.num_codebooks}

    @classmethod
    def from_arrays(
        cls, arrays: Mapping[str, NDArray[Any]], shape: tuple[int, ...], params: Mapping[str, Any]
    ) -> Self:
        """Turn the codes back; nothing in them can be wrong but their number."""
        count = params["num_codebooks"]
        rows, in_features = matrix_shape(tuple(shape))
        stored = arrays["codes"]
        if in_features % GROUP or stored.shape != (rows, in_features // GROUP * count):
            raise ValueError(
                f"codes of shape {stored.shape} are not {count} for each {GROUP} of {tuple(shape)}"
            )
        codes = np.ascontiguousarray(stored.reshape(rows, in_features // GROUP, count).transpose(2, 1, 0))
        return cls(codes, arrays["codebooks"], arrays["scales"].reshape(-1), tuple(shape))
