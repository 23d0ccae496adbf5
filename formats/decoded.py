"""The weights that a model means, whatever its source stores: decoded, and without a rotation that was folded in."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trapetum.formats.source import TensorSource
from trapetum.rotation import HadamardRotation

__all__ = ["decoded", "rotation_of"]


def rotation_of(source: TensorSource, name: str) -> HadamardRotation | None:
    """The rotation that is folded into a tensor, of a source that can have one; None elsewhere."""
    ask = getattr(source, "rotation_of", None)
    found: HadamardRotation | None = None if ask is None else ask(name)
    return found


def decoded(source: TensorSource, name: str, rows: slice | None = None) -> NDArray[np.float32]:
    """Weights of a tensor as the layer without any rotation has them.

    Parameters
    ----------
    source : TensorSource
    name : str
    rows : slice, optional
        Rows of the matrix form; all of them, in the logical shape, when omitted.

    Returns
    -------
    ndarray of float32
        Exact, but for the rounding to float32 of an unfolded rotation.
    """
    values = source.load(name, rows).dequantize()
    rotation = rotation_of(source, name)
    return values if rotation is None else rotation.unfold(values)
