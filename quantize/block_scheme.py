"""Schemes of GGUF block types: ``gguf:TYPE`` searches blocks, so that an export copies bytes; ``asis`` takes them over.

The search is ``quantize.block_search``; the layout is ``blocks``. A row must be whole blocks of the type. Rows that are
not take a type of 32 weights a block of about the same size, then codebooks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from trapetum.blocktypes import BLOCK_TYPES
from trapetum.errors import RecipeError
from trapetum.quantize.hessian import Hessian
from trapetum.quantize.scheme import Arrays, Importance, Scheme
from trapetum.tensors import BlockTensor, matrix_shape

__all__ = ["PREFIX", "Blocks", "BlocksAsIs"]

PREFIX = "gguf:"

# What a row takes that is no whole number of blocks: the next larger type whose blocks have 32 weights.
_SMALLER_BLOCKS = {
    "Q2_K": "IQ4_NL", "Q3_K": "IQ4_NL", "IQ4_XS": "IQ4_NL", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0",
    "TQ1_0": "Q2_0", "TQ2_0": "Q2_0", "PQ2_0": "Q2_0", "PTQ1_0": "Q2_0", "Q2_0": "IQ4_NL", "Q1_0": "Q2_0",
}  # fmt: skip

# Weights a second on the reference core of ``estimate``; Gaussian rows of 4096, the error's sum included.
_RATES = {
    "Q8_0": 33e6, "Q4_0": 30e6, "Q5_0": 28e6, "Q4_1": 24e6, "Q5_1": 21e6, "IQ4_NL": 18e6,
    "Q2_K": 11e6, "Q3_K": 15e6, "Q4_K": 17e6, "Q5_K": 16e6, "Q6_K": 20e6, "IQ4_XS": 16e6,
    "TQ1_0": 30e6, "TQ2_0": 30e6, "Q2_0": 12e6, "PQ2_0": 12e6, "PTQ1_0": 30e6, "Q1_0": 40e6,
}  # fmt: skip


@dataclass(frozen=True)
class Blocks(Scheme):
    """Blocks of one GGUF type.

    Parameters
    ----------
    type : str
        A key of ``quantize.block_search.SEARCHES``, such as ``Q4_K``.

    Examples
    --------
    >>> Blocks("Q4_K").misfit((8, 96))
    'rows of 96 are not whole blocks of 256 (Q4_K)'
    """

    type: str
    name: ClassVar[str] = "gguf"
    layout: ClassVar[str] = BlockTensor.layout
    limit: ClassVar[float] = 65504.0

    def __post_init__(self) -> None:
        from trapetum.quantize.block_search import SEARCHES

        if self.type not in SEARCHES:
            raise RecipeError(f"GGUF type is {self.type!r}; types that can be written: {', '.join(SEARCHES)}")

    @property
    def label(self) -> str:
        """``gguf:Q4_K``."""
        return PREFIX + self.type

    def arrays(self, shape: tuple[int, ...], dtype: np.dtype[Any], wide: bool) -> Arrays:
        """``blocks``, exactly the bytes of a GGUF file."""
        rows, in_features = matrix_shape(shape)
        return {"blocks": (np.dtype(np.uint8), (rows, BLOCK_TYPES[self.type].row_bytes(in_features)))}

    def misfit(self, shape: tuple[int, ...]) -> str | None:
        """Rows must be whole blocks."""
        length, block = matrix_shape(shape)[1], BLOCK_TYPES[self.type].block_size
        return f"rows of {length} are not whole blocks of {block} ({self.type})" if length % block else None

    def fallbacks(self) -> tuple[Scheme, ...]:
        """Types with smaller blocks, then 4-bit codebooks, which fit any row."""
        from trapetum.quantize.schemes import KMeans

        found: list[Scheme] = []
        kind = self.type
        while (kind := _SMALLER_BLOCKS.get(kind, "")) and kind != self.type:
            found.append(Blocks(kind))
        return (*found, KMeans(16))

    def quantize(
        self,
        weight: NDArray[Any],
        importance: Importance = None,
        *,
        wide: bool = False,
        seed: int = 0,
    ) -> BlockTensor:
        """Search every block; deterministic, the seed is not used."""
        from trapetum.quantize.block_search import fit_blocks

        if isinstance(importance, Hessian):
            importance = importance.diagonal.astype(np.float32)
        return fit_blocks(weight, self.type, importance)

    @property
    def rate(self) -> float:
        """Measured on Gaussian rows of 4096."""
        return _RATES[self.type]


@dataclass(frozen=True)
class BlocksAsIs(Scheme):
    """The blocks that a GGUF source already has, byte for byte.

    Parameters
    ----------
    type : str
        A key of ``trapetum.blocktypes.BLOCK_TYPES``.
    """

    type: str
    name: ClassVar[str] = "asis-gguf"
    layout: ClassVar[str] = BlockTensor.layout

    @property
    def label(self) -> str:
        """``asis gguf:Q4_1``."""
        return f"asis {PREFIX}{self.type}"

    def arrays(self, shape: tuple[int, ...], dtype: np.dtype[Any], wide: bool) -> Arrays:
        """``blocks``, exactly the bytes of the source."""
        rows, in_features = matrix_shape(shape)
        return {"blocks": (np.dtype(np.uint8), (rows, BLOCK_TYPES[self.type].row_bytes(in_features)))}

    @property
    def rate(self) -> float:
        """Bound by reading and writing."""
        return 300e6
