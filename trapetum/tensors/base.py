"""What every layout shares: a matrix of rows, its exact decode, and the arrays it is stored as."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

__all__ = ["QuantizedTensor", "matrix_shape", "require_floats"]


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


def require_floats(**arrays: NDArray[Any]) -> None:
    """Raise ``ValueError`` unless these arrays of a layout, by name, are float16 or float32."""
    for name, array in arrays.items():
        if array.dtype not in (np.float16, np.float32):
            raise ValueError(f"{name} holds {array.dtype}; float16 and float32 are allowed")


class QuantizedTensor(ABC):
    """One stored tensor. Instances are immutable and cheap to slice by rows."""

    layout: ClassVar[str]
    shared: ClassVar[frozenset[str]] = frozenset()
    """Suffixes of stored arrays that belong to all rows; every other array has one row for each row of the matrix."""

    shape: tuple[int, ...]

    def _settle_shape(self, rows: int, in_features: int) -> None:
        """The logical shape, by default that of the matrix; raises ``ValueError`` where it is of another one."""
        object.__setattr__(self, "shape", tuple(self.shape) or (rows, in_features))
        if matrix_shape(self.shape) != (rows, in_features):
            raise ValueError(f"shape {self.shape} is not {rows} rows of {in_features}")

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
