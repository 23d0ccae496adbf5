"""``--scheme asis`` for AQLM checkpoints: codes, codebooks and scales are taken over, none is searched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from trapetum.quantize.additive import additive_arrays
from trapetum.quantize.scheme import Arrays, Scheme
from trapetum.tensors import AdditiveTensor

__all__ = ["AdditiveAsIs"]


@dataclass(frozen=True)
class AdditiveAsIs(Scheme):
    """The additive codebooks that a source already has.

    Parameters
    ----------
    num_codebooks : int
    codebooks, scales : {"float16", "float32"}
        How the source keeps them.
    """

    num_codebooks: int
    codebooks: str = "float16"
    scales: str = "float16"
    name: ClassVar[str] = "asis-additive"
    layout: ClassVar[str] = AdditiveTensor.layout

    @classmethod
    def of(cls, tensor: AdditiveTensor) -> AdditiveAsIs:
        """The scheme that stores ``tensor`` as it is."""
        return cls(tensor.num_codebooks, tensor.codebooks.dtype.name, tensor.scales.dtype.name)

    @property
    def label(self) -> str:
        """``asis additive 2x8``."""
        return f"asis additive {self.num_codebooks}x8"

    def arrays(self, shape: tuple[int, ...], dtype: np.dtype[Any], wide: bool) -> Arrays:
        """``codes``, ``codebooks`` and ``scales`` in the source's own dtypes."""
        return additive_arrays(shape, self.num_codebooks, np.dtype(self.codebooks), np.dtype(self.scales))

    @property
    def rate(self) -> float:
        """Bound by reading and writing."""
        return 300e6
