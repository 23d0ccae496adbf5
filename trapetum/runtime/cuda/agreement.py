"""Do the card's kernels agree with NumPy on a stored tensor? ``runtime.agreement`` for ``verify --device cuda``.

Rows are compared bit for bit (rounded to float16 where a layout has no kernels of its own), products of one token to a
prompt with float64, in the same measure: deviation over what a row's product has in the mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from trapetum.kernels.cuda.module import import_cupy
from trapetum.runtime.agreement import product_gap
from trapetum.runtime.cuda.products import DenseCardMatrix, upload
from trapetum.runtime.finite import unwarned
from trapetum.tensors import QuantizedTensor, TernaryTensor

__all__ = ["TOKENS", "card_deviations"]

TOKENS = (1, 3, 16, 20, 64)
"""Each of the ways in which products are computed: matrix-vector kernels, several of these, and tensor cores."""
_LIMIT = 2e-2  # a wrong code is off by a whole unit; 16-bit roundings by a thousandth
_TERNARY = 6e-2  # 8-bit activations


def card_deviations(
    tensor: QuantizedTensor, workspace: Any, rng: np.random.Generator
) -> Iterator[tuple[str, float, float]]:
    """Compare.

    Parameters
    ----------
    tensor : QuantizedTensor
    workspace : Workspace
    rng : numpy.random.Generator
        Of the inputs.

    Yields
    ------
    what : str
    deviation : float
        Infinite where a decode differs in any bit.
    limit : float

    Raises
    ------
    KernelUnavailable
        If there is no card.
    """
    cupy = import_cupy()
    matrix = upload([tensor], workspace)
    expected = tensor.dequantize(slice(None))
    rows = cupy.full(expected.shape, np.nan, np.float32)
    matrix.take(cupy.arange(tensor.rows, dtype=np.int32), rows)
    with unwarned():  # infinities are found by name elsewhere
        stored = expected.astype(np.float16) if isinstance(matrix, DenseCardMatrix) else expected
    same = np.array_equal(cupy.asnumpy(rows), stored.astype(np.float32))
    yield "the card's decode", 0.0 if same else np.inf, 0.0

    x = rng.standard_normal((max(TOKENS), tensor.in_features)).astype(np.float16)
    gap = product_gap(x, expected)
    limit = _TERNARY if isinstance(tensor, TernaryTensor) else _LIMIT
    for tokens in TOKENS:
        out = cupy.full((tokens, tensor.rows), np.nan, np.float32)
        matrix.multiply(cupy.asarray(x[:tokens]), out)
        yield f"the card's fused product of {tokens} tokens", gap(cupy.asnumpy(out)), limit
