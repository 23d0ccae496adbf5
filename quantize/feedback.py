"""Loops of error feedback, coordinate descent and least squares: rows of codes into ascending tables of values.

Every family of scalar codes looks alike here: row r, input j takes one of K ascending values of a table that belongs to
the row and the *group* of inputs (a codebook: one group, the whole row; ternary: groups of 64 or 128). Compiled, one
thread, no GIL.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from trapetum.kernels.jit import jit

__all__ = ["descend_block", "feed_block", "gather", "scatter"]

F32 = NDArray[Any]  # float32: NumPy's types forget it in every product


@jit(error_model="numpy")
def _nearest(table: Any, value: float) -> int:
    """Index of the nearest of ascending values; of two equally near ones the lower."""
    code = 0
    for k in range(table.size - 1):
        # Not half their sum: it would round.
        code += 1 if value - table[k] > table[k + 1] - value else 0
    return code


@jit(error_model="numpy")
def feed_block(
    targets: F32, upper: F32, table: NDArray[np.float32], errors: F32, weight: F32, codes: NDArray[np.uint8]
) -> None:
    """Code a block of inputs one after another, each error moving the targets after it.

    Parameters
    ----------
    targets : ndarray of float32, shape (rows, block)
        Weights plus the errors of all earlier blocks; overwritten.
    upper : ndarray of float32, shape (block, block)
        The diagonal block of U.
    table : ndarray of float32, shape (rows, K)
        Ascending values.
    errors : ndarray of float32, shape (rows, block), output
        Weight less value.
    weight : ndarray of float32, shape (rows, block)
    codes : ndarray of uint8, shape (rows, block), output
    """
    rows, block = targets.shape
    for r in range(rows):
        target = targets[r]
        for j in range(block):
            code = _nearest(table[r], target[j])
            codes[r, j] = code
            error = weight[r, j] - table[r, code]
            errors[r, j] = error
            row = upper[j]
            for i in range(j + 1, block):
                target[i] += error * row[i]


@jit(error_model="numpy")
def descend_block(
    gradient: F32, hessian: F32, table: NDArray[np.float32], change: F32, codes: NDArray[np.uint8]
) -> int:
    """Put every input of a block on the value that is best while all others stay; returns how many moved.

    Parameters
    ----------
    gradient : ndarray of float32, shape (rows, block)
        ``(w - q) H`` at these inputs; overwritten.
    hessian : ndarray of float32, shape (block, block)
        The diagonal block of H.
    table : ndarray of float32, shape (rows, K)
    change : ndarray of float32, shape (rows, block), output
        New value less old value.
    codes : ndarray of uint8, shape (rows, block)
        Changed in place.
    """
    rows, block = gradient.shape
    moved = 0
    for r in range(rows):
        g = gradient[r]
        for j in range(block):
            old = table[r, codes[r, j]]
            code = _nearest(table[r], old + g[j] / hessian[j, j])
            change[r, j] = 0.0
            if code != codes[r, j]:
                delta = table[r, code] - old
                # Rounding can make the nearest value a worse one; never go uphill.
                if delta * (delta * hessian[j, j] - np.float32(2.0) * g[j]) < 0.0:
                    moved += 1
                    codes[r, j] = code
                    change[r, j] = delta
                    row = hessian[j]
                    for i in range(block):
                        g[i] -= delta * row[i]
    return moved


@jit(error_model="numpy")
def gather(values: F32, index: NDArray[np.uint8], factor: F32, out: F32) -> None:
    """``out[r, j] = values[r, index[r, j]] * factor[r, j]``."""
    rows, columns = out.shape
    for r in range(rows):
        for j in range(columns):
            out[r, j] = values[r, index[r, j]] * factor[r, j]


@jit(error_model="numpy")
def scatter(inputs: F32, index: NDArray[np.uint8], factor: F32, out: NDArray[np.float64]) -> None:
    """``out[r, index[r, j]] += inputs[r, j] * factor[r, j]``, the transpose of :func:`gather`."""
    rows, columns = inputs.shape
    for r in range(rows):
        out[r, :] = 0.0
        for j in range(columns):
            out[r, index[r, j]] += inputs[r, j] * factor[r, j]
