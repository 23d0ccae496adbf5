"""Ternary codes and scales -> a GGUF block type, without loss or not at all.

A block has one scale where the tensor may have one for every 128 weights or one for all: a smaller block repeats
the scale, a larger one needs groups that agree (a group of zeros agrees with anything). Scales are float16 in every
type. A scale that float16 cannot hold stays exact where it is the same for the whole tensor: blocks get the scale 1
and the value goes into a one-element tensor ``NAME.scale``, by which engines multiply the layer's output.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import numpy as np
from numpy.typing import NDArray

from trapetum.blocktypes import BlockType
from trapetum.formats.source import TensorSource
from trapetum.quantize.blocks import row_blocks
from trapetum.tensors import TernaryTensor, matrix_shape

__all__ = ["TERNARY_NAMES", "TernaryFit", "pack_ternary", "ternary_fit"]

TERNARY_NAMES = ("Q2_0", "PQ2_0", "PTQ1_0", "TQ2_0", "TQ1_0")
"""Types for ternary tensors; the first one is what stock engines read fastest to support and the default."""

_TRITS_ONLY = ("PTQ1_0", "TQ2_0", "TQ1_0")  # +2d is not a value of these, or not one that engines expect
_BLOCK_WEIGHTS = 2 << 20


@dataclass(frozen=True)
class TernaryFit:
    """Whether and how a tensor fits a type.

    Parameters
    ----------
    problem : str
        Why it does not; empty where it does.
    common_scale : float, optional
        The tensor's one float32 scale, where blocks get the scale 1.
    """

    problem: str = ""
    common_scale: float | None = None


def ternary_fit(source: TensorSource, name: str, kind: BlockType) -> TernaryFit:
    """Read a tensor's scales (and codes where they matter) to see whether a type holds it without loss.

    Parameters
    ----------
    source : TensorSource
    name : str
        A ternary tensor.
    kind : BlockType
        One of :data:`TERNARY_NAMES`.
    """
    rows, width = matrix_shape(source.shape(name))
    if width % kind.block_size:
        return TernaryFit(f"a row of {width} weights is not a multiple of {kind.name}'s {kind.block_size}")
    disagreeing, group, wide, common = 0, 0, False, set[float]()
    for block in row_blocks(rows, width, _BLOCK_WEIGHTS):
        tensor = source.load(name, block)
        if not isinstance(tensor, TernaryTensor):
            raise TypeError(f"{name} is not ternary")
        if tensor.levels != 3 and kind.name in _TRITS_ONLY:
            return TernaryFit(f"{kind.name} holds -d, 0 and d; the tensor has the fourth level 2d")
        scales = tensor.scales.astype(np.float32)
        if not np.isfinite(scales).all():
            return TernaryFit("a scale is not finite")
        with np.errstate(over="ignore"):
            wide |= bool((scales.astype(np.float16).astype(np.float32) != scales).any())
        common.update(np.unique(np.abs(scales)).tolist()[:3])
        group = tensor.group_size
        if group % kind.block_size:
            disagreeing += int(_block_scales(tensor, kind.block_size)[1].sum())
        source.release(name)
    if disagreeing:
        return TernaryFit(
            f"in {disagreeing} blocks of {kind.block_size} the groups of {group} have different scales"
        )
    if not wide:
        return TernaryFit()
    common -= {0.0}
    if len(common) == 1:
        return TernaryFit(common_scale=common.pop())
    return TernaryFit("its scales are float32 values that float16 cannot hold, and they are not all alike")


def pack_ternary(tensor: TernaryTensor, kind: BlockType, *, unit: bool = False) -> NDArray[np.uint8]:
    """Blocks of some rows; :func:`ternary_fit` must have found that the tensor fits.

    Parameters
    ----------
    tensor : TernaryTensor of shape (rows, in_features)
    kind : BlockType
    unit : bool
        Store the scale's sign, or zero, instead of the scale.

    Returns
    -------
    ndarray of uint8, shape (rows, row bytes)

    Examples
    --------
    >>> from trapetum.blocktypes import BLOCK_TYPES
    >>> t = TernaryTensor(np.full((1, 128), 2, np.uint8), np.array([[1.5]], np.float16))
    >>> pack_ternary(t, BLOCK_TYPES["Q2_0"])[0, :3].tolist()
    [0, 62, 170]
    """
    scales = _block_scales(tensor, kind.block_size)[0]
    if unit:
        scales = np.sign(scales)
    codes = tensor.codes.reshape(-1, kind.block_size)
    blocks = kind.from_parts({"d": scales.reshape(-1).astype(np.float16), "codes": codes})
    return blocks.reshape(tensor.rows, kind.row_bytes(tensor.in_features))


def _block_scales(tensor: TernaryTensor, block_size: int) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """One scale a block, and which blocks would need more than one: both of shape (rows, blocks)."""
    unit = gcd(tensor.group_size, block_size)
    scales = np.repeat(tensor.scales.astype(np.float32), tensor.group_size // unit, axis=1)
    scales = scales.reshape(tensor.rows, -1, block_size // unit)
    if scales.shape[2] == 1:
        return scales[:, :, 0], np.zeros(scales.shape[:2], np.bool_)
    used = (tensor.codes != 1).reshape(*scales.shape, unit).any(axis=3) & (scales != 0)
    first = np.take_along_axis(scales, used.argmax(axis=2)[:, :, None], axis=2)
    return first[:, :, 0], (used & (scales != first)).any(axis=2)
