"""The baseline of the k-means figures: the plain NumPy way that the reference quantizer works.

A codebook of K entries for each output channel, started as a uniform grid between the channel's smallest and largest
weight; eight Lloyd steps over blocks of channels, each of which broadcasts the distance of every weight to every
entry as a [K, in, block] array; a last assignment after the last update. Written from this description only.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["reference_codebooks"]


def reference_codebooks(
    weight: NDArray[np.float32], codebook_size: int, steps: int = 8, block: int = 64
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Fit one codebook a row by Lloyd steps from a uniform grid.

    Parameters
    ----------
    weight : ndarray of float32, shape (rows, in_features)
    codebook_size : int
        2 to 256.
    steps : int
        Lloyd steps.
    block : int
        Rows worked on at a time; memory is ``4 * codebook_size * in_features * block`` bytes.

    Returns
    -------
    codes : ndarray of uint8, shape (rows, in_features)
    codebook : ndarray of float32, shape (rows, codebook_size)
    """
    codes = np.empty(weight.shape, np.uint8)
    codebook = np.empty((weight.shape[0], codebook_size), np.float32)
    ramp = np.linspace(0.0, 1.0, codebook_size, dtype=np.float32)[:, None]
    for start in range(0, weight.shape[0], block):
        x = np.ascontiguousarray(weight[start : start + block].T)  # [in, block]
        low, high = x.min(axis=0), x.max(axis=0)
        entries = low + ramp * (high - low)  # [K, block]
        for _ in range(steps):
            nearest = np.abs(x[None] - entries[:, None]).argmin(axis=0)  # over [K, in, block]
            for k in range(codebook_size):
                mine = nearest == k
                count = mine.sum(axis=0)
                total = np.where(mine, x, np.float32(0)).sum(axis=0)
                entries[k] = np.where(count > 0, total / np.maximum(count, 1), entries[k])
        codes[start : start + block] = np.abs(x[None] - entries[:, None]).argmin(axis=0).T
        codebook[start : start + block] = entries.T
    return codes, codebook
