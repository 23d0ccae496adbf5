"""Rows of GGUF blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from trapetum.blocktypes import BLOCK_TYPES, BlockType
from trapetum.tensors.base import QuantizedTensor

__all__ = ["BlockTensor"]


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
        blocks, rest = divmod(width, self.block_type.type_size)
        if rest:
            raise ValueError(f"rows of {width} bytes are not whole blocks of {self.type}")
        self._settle_shape(rows, blocks * self.block_type.block_size)

    @property
    def block_type(self) -> BlockType:
        """Sizes and exact decode of the type."""
        return BLOCK_TYPES[self.type]

    def dequantize(self, rows: slice | None = None) -> NDArray[np.float32]:
        """Weights exactly as ggml decodes them; see :meth:`QuantizedTensor.dequantize`."""
        values = self.block_type.decode(self.blocks[slice(None) if rows is None else rows])
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
