"""planes-v1: a ternary matrix as a codes plane and a scales plane, the form that GPU kernels read without re-layout.

For N rows by K weights in groups of 128 (K a multiple of 128), one uint8 tensor of shape (N, K/128 * 34)::

    byte 0 .. N*K/4 - 1          codes, row-major: row*(K/4) + j/4 holds weight j of a row at bits 2*(j%4)
    byte N*K/4 .. N*K/128*34 - 1 scales, float16 little-endian, row-major: row*(K/128) + j/128

The bytes are those of PQ2_0 blocks, gathered: a block's 32 code bytes are consecutive in the first plane, its
scale is in the second. There is no padding, no header and no second copy; a code row begins at a multiple of 32
bytes. Matrices that an engine multiplies as one (q, k, v; gate, up) are concatenated by rows *first* and laid out as
one matrix. Since the planes lie one after the other, rows of the uint8 tensor mean nothing: it is whole or it is
invalid.

Source: the layout is the one that the vLLM GGUF plugin for Prism models prepares at load ("planes-v1").
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from trapetum.blocktypes import BLOCK_TYPES
from trapetum.packing import pack_bits
from trapetum.tensors import TernaryTensor

__all__ = [
    "BLOCK",
    "GROUP_SIZE",
    "LAYOUT",
    "blocks_to_planes",
    "planes_to_blocks",
    "split_planes",
    "tensor_planes",
]

LAYOUT = "planes-v1"
GROUP_SIZE = 128
BLOCK = BLOCK_TYPES["PQ2_0"]
_CODE_BYTES = GROUP_SIZE // 4


def blocks_to_planes(blocks: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """PQ2_0 rows -> planes.

    Parameters
    ----------
    blocks : ndarray of uint8, shape (rows, k * 34)

    Returns
    -------
    ndarray of uint8, same shape
    """
    rows, width = blocks.shape
    if width % BLOCK.type_size:
        raise ValueError(f"rows of {width} bytes are no whole PQ2_0 blocks of {BLOCK.type_size}")
    split = blocks.reshape(rows, width // BLOCK.type_size, BLOCK.type_size)
    return np.concatenate([split[:, :, 2:].reshape(-1), split[:, :, :2].reshape(-1)]).reshape(rows, width)


def planes_to_blocks(planes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Undo :func:`blocks_to_planes`; takes a whole tensor (rows, k * 34)."""
    rows, width = planes.shape
    codes, scales = split_planes(planes, rows, width // BLOCK.type_size * GROUP_SIZE)
    count = width // BLOCK.type_size
    blocks = np.empty((rows, count, BLOCK.type_size), np.uint8)
    blocks[:, :, :2] = scales.view(np.uint8).reshape(rows, count, 2)
    blocks[:, :, 2:] = codes.reshape(rows, count, _CODE_BYTES)
    return blocks.reshape(rows, width)


def tensor_planes(tensors: Sequence[TernaryTensor]) -> NDArray[np.uint8]:
    """Planes of one matrix, or of several that are concatenated by rows first.

    Parameters
    ----------
    tensors : sequence of TernaryTensor
        Groups of 128, float16 scales, equal row lengths.

    Returns
    -------
    ndarray of uint8, shape (rows of all, in_features / 128 * 34)

    Raises
    ------
    ValueError
        If a tensor cannot be stored in this layout.
    """
    first = tensors[0]
    for tensor in tensors:
        if tensor.group_size != GROUP_SIZE or tensor.scales.dtype != np.float16:
            raise ValueError(
                f"groups of {tensor.group_size} with {tensor.scales.dtype} scales; {LAYOUT} holds groups of "
                f"{GROUP_SIZE} with float16 scales"
            )
        if tensor.in_features != first.in_features or tensor.rotation != first.rotation:
            raise ValueError("matrices of different row lengths or rotations cannot be one planes tensor")
    codes = [pack_bits(tensor.codes, 2).reshape(-1) for tensor in tensors]
    scales = [np.ascontiguousarray(t.scales, "<f2").reshape(-1).view(np.uint8) for t in tensors]
    rows = sum(tensor.rows for tensor in tensors)
    return np.concatenate(codes + scales).reshape(rows, BLOCK.row_bytes(first.in_features))


def split_planes(
    planes: NDArray[np.uint8], rows: int, in_features: int
) -> tuple[NDArray[np.uint8], NDArray[np.float16]]:
    """Packed codes [rows, K/4] and scales [rows, K/128] of a whole tensor."""
    flat = planes.reshape(-1)
    at = rows * in_features // 4
    scales = np.ascontiguousarray(flat[at:]).view("<f2").reshape(rows, in_features // GROUP_SIZE)
    return flat[:at].reshape(rows, in_features // 4), scales
