"""Every GGUF tensor type that we know, by name and by id.

Plain numbers have a block of one element; types without our own decode carry their size, so that files that
hold them can be read, checked, copied and split, and decode through PyPI ``gguf``.

Source: llama.cpp, ggml/include/ggml.h (ids) and ggml/src/ggml-common.h (sizes); ids 142 and 143: the Prism
fork.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from trapetum.blocktypes.base import BlockType, Bytes, Parts
from trapetum.blocktypes.kquants import KQUANT_TYPES
from trapetum.blocktypes.simple import SIMPLE_TYPES
from trapetum.blocktypes.ternary import TERNARY_TYPES
from trapetum.errors import KernelUnavailable

__all__ = ["BLOCK_TYPES", "BLOCK_TYPES_BY_ID", "PLAIN_TYPES", "plain_type"]


def _plain(name: str, id: int, dtype: Any) -> BlockType:
    kind = np.dtype(dtype)

    def unpack(raw: Mapping[str, Bytes]) -> Parts:
        return {"values": np.ascontiguousarray(raw["values"]).view(kind)}

    def pack(parts: Parts) -> Mapping[str, Bytes]:
        return {"values": np.ascontiguousarray(parts["values"], dtype=kind).view(np.uint8)}

    def values(parts: Parts) -> NDArray[np.float32]:
        return parts["values"].astype(np.float32)

    fields = (("values", kind.itemsize),)
    return BlockType(name, id, 1, fields, kind, unpack=unpack, pack=pack, values=values)


def _foreign(name: str, id: int, block_size: int, fields: tuple[tuple[str, int], ...]) -> BlockType:
    """A type whose value grids we do not carry: decoded by PyPI ``gguf``."""

    def unpack(raw: Mapping[str, Bytes]) -> Parts:
        return {"bytes": np.concatenate([raw[field] for field, _ in fields], axis=1)}

    def values(parts: Parts) -> NDArray[np.float32]:
        try:
            import gguf
        except ImportError:
            raise KernelUnavailable(
                f"tensors of type {name} decode through the package gguf, which is not installed",
                hint="pip install gguf",
            ) from None
        blocks = np.ascontiguousarray(parts["bytes"])
        return np.asarray(gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType(id)), np.float32)

    return BlockType(name, id, block_size, fields, unpack=unpack, values=values)


PLAIN_TYPES: tuple[BlockType, ...] = (
    _plain("F32", 0, "<f4"),
    _plain("F16", 1, "<f2"),
    _plain("I8", 24, "i1"),
    _plain("I16", 25, "<i2"),
    _plain("I32", 26, "<i4"),
    _plain("I64", 27, "<i8"),
    _plain("F64", 28, "<f8"),
    _plain("BF16", 30, ml_dtypes.bfloat16),
)

_FOREIGN_TYPES: tuple[BlockType, ...] = (
    BlockType("Q8_1", 9, 32, (("d", 2), ("s", 2), ("qs", 32))),  # activations; never stored
    BlockType("Q8_K", 15, 256, (("d", 4), ("qs", 256), ("bsums", 32))),  # activations; never stored
    _foreign("IQ2_XXS", 16, 256, (("d", 2), ("qs", 64))),
    _foreign("IQ2_XS", 17, 256, (("d", 2), ("qs", 64), ("scales", 8))),
    _foreign("IQ3_XXS", 18, 256, (("d", 2), ("qs", 96))),
    _foreign("IQ1_S", 19, 256, (("d", 2), ("qs", 32), ("qh", 16))),
    _foreign("IQ3_S", 21, 256, (("d", 2), ("qs", 64), ("qh", 8), ("signs", 32), ("scales", 4))),
    _foreign("IQ2_S", 22, 256, (("d", 2), ("qs", 64), ("qh", 8), ("scales", 8))),
    _foreign("IQ1_M", 29, 256, (("qs", 32), ("qh", 16), ("scales", 8))),
)

BLOCK_TYPES: dict[str, BlockType] = {
    t.name: t for t in (*PLAIN_TYPES, *SIMPLE_TYPES, *KQUANT_TYPES, *TERNARY_TYPES, *_FOREIGN_TYPES)
}
BLOCK_TYPES_BY_ID: dict[int, BlockType] = {t.id: t for t in BLOCK_TYPES.values()}


def plain_type(dtype: np.dtype[Any]) -> BlockType:
    """The plain type that stores a dtype.

    Raises
    ------
    ValueError
        If GGUF has none (float8, bool, unsigned integers).

    Examples
    --------
    >>> plain_type(np.dtype("float16")).name
    'F16'
    """
    for entry in PLAIN_TYPES:
        if entry.dtype == np.dtype(dtype):
            return entry
    raise ValueError(f"GGUF has no type for {dtype}; {', '.join(t.name for t in PLAIN_TYPES)} can be stored")
