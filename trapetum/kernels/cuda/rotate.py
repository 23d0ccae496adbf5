"""The Hadamard rotation of activations on the card."""

from __future__ import annotations

from typing import Any

from trapetum.kernels.cuda.base import out_kind
from trapetum.kernels.cuda.module import kernels

__all__ = ["rotate"]

MOST = 4096
"""Largest block: its floats lie in shared memory."""


def rotate(
    x: Any, signs: Any, block: int, out: Any = None, *, after: bool = False, stream: Any = None
) -> Any:
    """H (s * x) for each row, what a layer with folded weights takes; ``after``: s * (H x), for a rotated embedding.

    Parameters
    ----------
    x : cupy.ndarray of float16, uint16 (bfloat16 bits) or float32, shape (tokens, width)
    signs : cupy.ndarray of int8, shape (width,)
        +1 and -1; see :class:`trapetum.rotation.HadamardRotation`.
    block : int
        Power of two up to 4096 that divides the width.
    out : cupy.ndarray of any of these dtypes, same shape, optional
        ``x`` by default. Sums are float32, rounded once.
    after : bool
    stream : cupy.cuda.Stream, optional

    Returns
    -------
    cupy.ndarray
        ``out``.

    Raises
    ------
    ValueError
        If the block does not fit.
    """
    tokens, width = x.shape
    if not 2 <= block <= MOST or block & (block - 1) or width % block or signs.shape != (width,):
        raise ValueError(f"blocks of {block} with {signs.shape} signs do not rotate rows of {width}")
    out = x if out is None else out
    arguments = (x, out, signs, block, int(after), out_kind(x), out_kind(out))
    threads = min(256, block // 2) if block > 64 else 32
    kernel = kernels("rotate")["hadamard"]
    kernel.launch((width // block, tokens), threads, arguments, block * 4, stream, early=True)
    return out
