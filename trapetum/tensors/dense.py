"""Values as they were."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from trapetum.tensors.base import QuantizedTensor

__all__ = ["DenseTensor"]


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
