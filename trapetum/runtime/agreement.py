"""Do the compiled kernels agree with NumPy on a stored tensor? Every form that a model can hold it in is tried.

=========== ========================================================== ==============================================
what        how it is compared                                         limit
=========== ========================================================== ==============================================
decode      bit for bit with the NumPy decode                          equal
products    exact (one token, and a prompt) and fused (one and three   ``LIMITS``, of what a row's product has in the
            tokens) with float64, on Gaussian inputs                   mean: norm times norm over the root of inputs
=========== ========================================================== ==============================================

Weights near float32's largest value would make products infinite that are right; the inputs are then small ones.

The limits are some six times the errors that are stated for the kernels, because the worst of thousands of rows counts,
and that a row with one huge weight rounds the others more coarsely. A kernel that reads a wrong code, table or scale is
off by a whole unit of this measure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trapetum.kernels.cpu.pool import Pool
from trapetum.kernels.cpu.prepared import (
    Additive,
    Blocks,
    Codebook16,
    Dense,
    Expanded,
    Prepared,
    Table,
    Ternary,
)
from trapetum.runtime.finite import unwarned
from trapetum.runtime.matrix import FUSED_TOKENS, PreparedMatrix, build_matrix
from trapetum.tensors import QuantizedTensor

__all__ = ["LIMITS", "deviations", "product_gap"]

LIMITS: dict[type[Prepared], float] = {
    Additive: 1e-4,
    Blocks: 2e-2,
    Codebook16: 2e-2,
    Dense: 1e-4,
    Expanded: 2e-2,
    Table: 1e-4,
    Ternary: 6e-2,
}
"""Prepared layout -> largest deviation of a fused product."""
_EXACT = 1e-4
_EXPONENT = 90  # weights below 2**90 leave float32 sums of 2**30 Gaussian products room
_PROMPT = FUSED_TOKENS + 1


def product_gap(x: NDArray[Any], weights: NDArray[Any]) -> Callable[[NDArray[Any]], float]:
    """What products deviate by from those in float64, over what a row's product has in the mean.

    Parameters
    ----------
    x : ndarray of float, shape (tokens, in_features)
    weights : ndarray of float, shape (rows, in_features)

    Returns
    -------
    callable
        Of the products of the first tokens, shape (some tokens, rows): the largest deviation of any.
    """
    with unwarned():  # infinities are found by name elsewhere
        inputs, wide = x.astype(np.float64), weights.astype(np.float64)
        exact = inputs @ wide.T
        size = np.linalg.norm(inputs, axis=1)[:, None] * np.linalg.norm(wide, axis=1)
        size = size / np.sqrt(x.shape[1]) + np.finfo(np.float32).tiny

    def gap(found: NDArray[Any]) -> float:
        with unwarned():
            return float(np.max(np.abs(found - exact[: len(found)]) / size[: len(found)], initial=0.0))

    return gap


def deviations(
    tensor: QuantizedTensor, pool: Pool, rng: np.random.Generator
) -> Iterator[tuple[str, float, float]]:
    """Compare.

    Parameters
    ----------
    tensor : QuantizedTensor
    pool : Pool
    rng : numpy.random.Generator
        Of the inputs.

    Yields
    ------
    what : str
    deviation : float
        Infinite where a decode differs in any bit.
    limit : float
    """
    from trapetum.kernels.cpu.prepare import every_form

    expected = tensor.dequantize(slice(None))
    x = rng.standard_normal((_PROMPT, tensor.in_features)).astype(np.float32)
    _, exponent = np.frexp(np.abs(expected[np.isfinite(expected)]).max(initial=0.0))
    x = np.ldexp(x, min(0, _EXPONENT - exponent))  # a power of two: exact
    gap = product_gap(x, expected)
    matrix = build_matrix(tensor, pool, expand=False)
    same = np.array_equal(matrix.tile(slice(0, matrix.rows)), expected)
    yield "the compiled decode", 0.0 if same else np.inf, 0.0
    for tokens in (1, _PROMPT):
        yield "the compiled product", gap(matrix(x[:tokens])), _EXACT
    for form in every_form(tensor):
        fused = PreparedMatrix(form, pool, fused=True)
        if not np.array_equal(fused.tile(slice(0, fused.rows)), expected):
            yield f"the decode of {type(form).__name__}", np.inf, 0.0
        for tokens in (1, 3):
            limit = LIMITS[type(form)]
            yield f"the fused product of {type(form).__name__}", gap(fused(x[:tokens])), limit
