"""The layers of a decoder: root-mean-square norm, linear with optional bias, and one transformer layer.

Float32 throughout. Element-wise steps run in blocks of rows over the pool: a block's temporaries stay in
the second-level cache, and rows are independent, so the blocks change no bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trapetum.kernels.cpu.pool import Pool
from trapetum.kernels.cpu.prepared import Activations
from trapetum.rotation import HadamardRotation
from trapetum.runtime.attention import Cache, attend, rotate
from trapetum.runtime.matrix import Matrix

__all__ = ["Layer", "Linear", "Norm", "apply_all"]

Floats = NDArray[np.float32]

_BLOCK_BYTES = 1 << 18


def _rows_a_block(width: int) -> int:
    return max(1, _BLOCK_BYTES // (4 * width))


@dataclass(frozen=True)
class Norm:
    """``x / sqrt(mean(x^2) + eps) * weight`` along the last axis.

    Parameters
    ----------
    weight : ndarray of float32, shape (width,)
    eps : float
    """

    weight: Floats
    eps: float

    def __call__(self, x: Floats, pool: Pool) -> Floats:
        """Normalise every row of ``x`` [..., width]; returns a new array of the same shape."""
        flat = x.reshape(-1, x.shape[-1])
        out = np.empty_like(flat)

        def piece(rows: slice) -> None:
            part = flat[rows]
            mean = np.mean(part * part, axis=-1, keepdims=True)
            np.multiply(part, 1.0 / np.sqrt(mean + np.float32(self.eps)), out=out[rows])
            out[rows] *= self.weight

        pool.blocks(piece, flat.shape[0], _rows_a_block(flat.shape[1]))
        return out.reshape(x.shape)


@dataclass(frozen=True)
class Linear:
    """``x W^T + bias``.

    Parameters
    ----------
    matrix : Matrix
    bias : ndarray of float32, shape (rows,), optional
    rotation : HadamardRotation, optional
        Folded into the matrix, so that its inputs must be rotated as well.
    """

    matrix: Matrix
    bias: Floats | None = None
    rotation: HadamardRotation | None = None

    def __call__(self, x: Floats) -> Floats:
        """Apply to float32 [tokens, in_features]."""
        return apply_all(x, self)[0]


def apply_all(x: Floats, *linears: Linear) -> list[Floats]:
    """Apply layers that read the same float32 [tokens, in_features]; it is rotated at most once."""
    given = Activations(x)
    rotated = None
    results = []
    for linear in linears:
        if linear.rotation is not None and rotated is None:
            rotated = Activations(_rotate(x, linear.rotation, linear.matrix.pool))
        y = linear.matrix(given if linear.rotation is None or rotated is None else rotated)
        if linear.bias is not None:
            y += linear.bias
        results.append(y)
    return results


def _rotate(x: Floats, rotation: HadamardRotation, pool: Pool) -> Floats:
    out = np.empty_like(x)

    def piece(rows: slice) -> None:
        out[rows] = rotation.fold(x[rows])

    pool.blocks(piece, x.shape[0], _rows_a_block(x.shape[1]))
    return out


@dataclass(frozen=True)
class Layer:
    """Attention and gated feed-forward with a norm before each and a residual around each."""

    attn_norm: Norm
    q: Linear
    k: Linear
    v: Linear
    o: Linear
    ffn_norm: Norm
    gate: Linear
    up: Linear
    down: Linear
    head_dim: int
    window: int | None = None
    q_norm: Norm | None = None
    k_norm: Norm | None = None

    def __call__(
        self,
        h: Floats,
        number: int,
        rotary: tuple[Floats, Floats],
        cache: Cache,
        pool: Pool,
        observe: Callable[[str, Floats], None] | None = None,
    ) -> None:
        """Advance the residual stream in place.

        Parameters
        ----------
        h : ndarray of float32, shape (batch, positions, hidden)
        number : int
            Of this layer, in the cache.
        rotary : (cos, sin)
            Of these positions.
        cache : Cache
        pool : Pool
        observe : callable, optional
            Receives the input [tokens, in_features] of ``q`` (k and v read the same), ``o``, ``gate`` (up too)
            and ``down`` before it is multiplied; it must not keep or change it.
        """
        batch, positions, hidden = h.shape
        flat = h.reshape(-1, hidden)
        x = self.attn_norm(flat, pool)
        if observe is not None:
            observe("q", x)
        q, k, v = (
            y.reshape(batch, positions, -1, self.head_dim) for y in apply_all(x, self.q, self.k, self.v)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q, pool), self.k_norm(k, pool)
        for part in (q, k):
            pool.blocks(lambda b, part=part: rotate(part[b], *rotary), batch, 1)  # type: ignore[misc]
        keys, values = cache.append(number, k, v)
        mixed = attend(q, keys, values, self.window, pool)
        merged = mixed.reshape(flat.shape[0], -1)
        if observe is not None:
            observe("o", merged)
        flat += self.o(merged)

        x = self.ffn_norm(flat, pool)
        if observe is not None:
            observe("gate", x)
        gate, up = apply_all(x, self.gate, self.up)
        pool.blocks(lambda r: _gated(gate[r], up[r]), gate.shape[0], _rows_a_block(gate.shape[1]))
        if observe is not None:
            observe("down", gate)
        flat += self.down(gate)


def _gated(gate: Floats, up: Floats) -> None:
    """``gate <- gate * sigmoid(gate) * up`` in place."""
    with np.errstate(over="ignore"):  # exp(-x) = inf gives -0.0, the right limit
        denominator = np.exp(-gate)
    denominator += 1
    gate /= denominator
    gate *= up
