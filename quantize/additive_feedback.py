"""Additive codes for inputs whose importance is known: error feedback over groups of eight (block LDLQ).

With ``H = U D U^T`` in blocks of eight (``quantize.hessian``) the loss of a row is a sum over its groups of
``(p_g - t_g) D_g (p_g - t_g)``, where the target ``t_g`` is the group and what the errors of earlier groups hand on. So
every group is a search in its own metric ``D_g``, whose table of cross terms serves all rows. An importance of single
inputs is the case of a diagonal H, where nothing is handed on.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from trapetum.quantize.additive_fit import Encoder
from trapetum.quantize.hessian import Hessian
from trapetum.tensors.additive import GROUP

__all__ = ["Weighted"]

Floats = NDArray[np.float32]

_LEAST = 0.01  # of the mean importance: what no input falls below


class Weighted:
    """An :class:`~trapetum.quantize.additive_fit.Encoder` of whole rows under a second moment of their inputs.

    Parameters
    ----------
    codebooks : ndarray of float16, shape (M, 256, 8)
    importance : Hessian, or ndarray of float32, shape (in_features,)
    in_features : int
    """

    def __init__(self, codebooks: NDArray[Any], importance: Hessian | Floats, in_features: int) -> None:
        self._codebooks, self._in = codebooks, in_features
        self._plain = Encoder(codebooks)
        self._upper: Floats | None = None
        if isinstance(importance, Hessian):
            factor = importance.factor(GROUP)
            self._upper, pivots = factor.upper, factor.pivots
            self._moment: NDArray[Any] = importance.damped().astype(np.float32)
        else:
            mean = float(importance.mean(dtype=np.float64))
            weights = np.maximum(importance, _LEAST * mean) if mean > 0 else np.ones(in_features, np.float32)
            pivots = np.eye(GROUP) * weights.astype(np.float64).reshape(-1, 1, GROUP)
            self._moment = weights.astype(np.float32)
        # Each metric by itself decides; its size does not, and float32 must hold it.
        sizes = np.trace(pivots, axis1=1, axis2=2)[:, None, None] / GROUP
        self._metrics: Floats = (pivots / np.where(sizes > 0, sizes, 1)).astype(np.float32)

    def encode(self, vectors: Floats, beam: int) -> NDArray[np.uint8]:
        """Entries for the vectors of whole rows, uint8 [n, M]; see :meth:`Encoder.encode`."""
        wanted = vectors.reshape(-1, self._in)
        rows, groups = wanted.shape[0], self._in // GROUP
        lost = np.zeros_like(wanted)
        codes = np.empty((rows, groups, self._codebooks.shape[0]), np.uint8)
        for g in range(groups):
            at = slice(g * GROUP, (g + 1) * GROUP)
            target = wanted[:, at]
            if self._upper is not None and g:
                target = target + lost[:, : at.start] @ self._upper[: at.start, at]
            codes[:, g] = Encoder(self._codebooks, self._metrics[g]).encode(target, beam)
            lost[:, at] = wanted[:, at] - self._plain.decode(codes[:, g])
        return codes.reshape(rows * groups, -1)

    def decode(self, codes: NDArray[np.uint8]) -> Floats:
        """See :meth:`Encoder.decode`."""
        return self._plain.decode(codes)

    def under(self, sums: Floats) -> Floats:
        """Rows times the second moment."""
        found: Floats = sums * self._moment if self._moment.ndim == 1 else sums @ self._moment
        return found
