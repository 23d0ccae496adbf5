"""Linear layers on the card: ``y = x W^T`` from weights exactly as a planes file stores them.

:func:`cuda_linear` uploads the bytes of a planes tensor and returns the :class:`CudaLinear` of its layout.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trapetum.formats.planes_layout import BLOCK, GROUP_SIZE, LAYOUT
from trapetum.formats.tiles import TILES
from trapetum.kernels.cuda.base import MOST_TOKENS, CudaLinear
from trapetum.kernels.cuda.codebooks import AdditiveLinear, Codebook4Linear, Codebook8Linear
from trapetum.kernels.cuda.module import import_cupy
from trapetum.kernels.cuda.ternary import TernaryLinear
from trapetum.kernels.cuda.workspace import Workspace

__all__ = ["LAYOUTS", "MOST_TOKENS", "CudaLinear", "cuda_linear"]

LAYOUTS: dict[str, type[CudaLinear]] = {
    cls.layout: cls for cls in (TernaryLinear, Codebook4Linear, Codebook8Linear, AdditiveLinear)
}


def cuda_linear(
    layout: str,
    data: NDArray[np.uint8],
    rows: int,
    in_features: int,
    entries: int = 0,
    workspace: Workspace | None = None,
) -> CudaLinear:
    """Upload a planes tensor.

    Parameters
    ----------
    layout : str
        Of the file's description: a key of ``LAYOUTS``.
    data : ndarray of uint8
        The tensor, any shape.
    rows, in_features : int
    entries : int
        Codebook size, or number of codebooks; 0 for ternary.
    workspace : Workspace, optional
        Shared with other layers of the same stream; a new one by default.

    Raises
    ------
    KernelUnavailable
        If there is no card.
    ValueError
        If the layout is unknown, or the bytes are not those of such a matrix: kernels would read past their end.
    """
    cupy = import_cupy()
    if layout not in LAYOUTS:
        raise ValueError(f"layout {layout!r} has no CUDA kernels; {', '.join(LAYOUTS)} have")
    if data.nbytes != (wanted := _nbytes(layout, rows, in_features, entries)):
        raise ValueError(
            f"{data.nbytes} bytes are no {layout} matrix of {rows} x {in_features}, which has {wanted}"
        )
    flat = cupy.asarray(np.ascontiguousarray(data).reshape(-1))
    return LAYOUTS[layout](flat, rows, in_features, entries, workspace or Workspace())


def _nbytes(layout: str, rows: int, in_features: int, entries: int) -> int:
    """Bytes of a tensor; ValueError where the layout does not hold such a one."""
    if layout == LAYOUT:
        whole, allowed = GROUP_SIZE, range(1)
    else:
        whole, allowed = TILES[layout].whole, TILES[layout].sizes
    if rows < 1 or in_features < 1 or in_features % whole or entries not in allowed:
        raise ValueError(
            f"{layout} does not hold {rows} x {in_features} with {entries} entries: rows are multiples of {whole} "
            f"inputs, entries {allowed.start} to {allowed.stop - 1}"
        )
    if layout == LAYOUT:
        return rows * BLOCK.row_bytes(in_features)
    return TILES[layout](rows, in_features, entries).nbytes
