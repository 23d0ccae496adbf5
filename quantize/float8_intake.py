"""``--scheme asis`` for FP8 checkpoints: codes and scales are taken over, none is searched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from trapetum.quantize.scheme import Arrays, Scheme
from trapetum.tensors import Float8Tensor, matrix_shape
from trapetum.tensors.float8 import FLOAT8

__all__ = ["Float8AsIs"]


@dataclass(frozen=True)
class Float8AsIs(Scheme):
    """The 8-bit floats that a source already has.

    Parameters
    ----------
    group_size : int
        Columns that a scale covers.
    dtype : str
        Key of ``tensors.float8.FLOAT8``.
    """

    group_size: int
    dtype: str = "float8_e4m3fn"
    name: ClassVar[str] = "asis-float8"
    layout: ClassVar[str] = Float8Tensor.layout

    @classmethod
    def of(cls, tensor: Float8Tensor) -> Float8AsIs:
        """The scheme that stores ``tensor`` as it is."""
        return cls(tensor.group_size, tensor.codes.dtype.name)

    @property
    def label(self) -> str:
        """``asis float8 g128``."""
        return f"asis float8 g{self.group_size}"

    def arrays(self, shape: tuple[int, ...], dtype: np.dtype[Any], wide: bool) -> Arrays:
        """``codes`` and ``scales``."""
        rows, width = matrix_shape(shape)
        return {
            "codes": (FLOAT8[self.dtype], (rows, width)),
            "scales": (np.dtype(np.float32), (rows, -(-width // self.group_size))),
        }

    @property
    def rate(self) -> float:
        """Bound by reading and writing."""
        return 300e6
