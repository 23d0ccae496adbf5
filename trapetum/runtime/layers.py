"""The layers of a decoder: norms, linear maps, attention, gated feed-forward, and the layer that joins them.

A :class:`Layer` is two blocks with residuals: a :class:`Mixer` works across positions and keeps a state, a
:class:`FeedForward` works on each position by itself. ``runtime.blocks`` builds them from a checkpoint.

Float32 throughout. Element-wise steps run in blocks of rows over the pool: a block's temporaries stay in the
second-level cache, and rows are independent, so the blocks change no bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from trapetum.kernels.cpu.pool import Pool
from trapetum.kernels.cpu.prepared import Activations
from trapetum.models.rope import Rope
from trapetum.rotation import HadamardRotation
from trapetum.runtime.attention import KeyValues, attend, rotate
from trapetum.runtime.finite import unwarned
from trapetum.runtime.matrix import Matrix

__all__ = [
    "GATES",
    "Attention",
    "FeedForward",
    "GatedMlp",
    "Head",
    "Layer",
    "Linear",
    "Mixer",
    "Norm",
    "Observe",
    "Rotary",
    "apply_all",
    "logistic",
]

Floats = NDArray[np.float32]
Rotary = tuple[Floats, Floats]

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

    @unwarned()
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
class Head(Linear):
    """The output head: logits, capped where the model says so.

    Parameters
    ----------
    softcap : float, optional
        Logits become ``softcap * tanh(logits / softcap)``.
    """

    softcap: float | None = None

    @unwarned()
    def __call__(self, x: Floats) -> Floats:
        """Logits of float32 [tokens, hidden]."""
        logits = super().__call__(x)
        if self.softcap is not None:
            logits /= np.float32(self.softcap)
            np.tanh(logits, out=logits)
            logits *= np.float32(self.softcap)
        return logits


class Observe(Protocol):
    """What calibration passes along: it sees inputs before they are multiplied; it must not keep or change them."""

    def __call__(self, part: str, x: Floats, /, *, expert: int | None = None) -> None:
        """Inputs float32 [tokens, in_features] of a part (``Module.input``); of a routed expert, those routed to it."""


class Mixer(Protocol):
    """What mixes positions: attention of any kind, a recurrence."""

    def new_state(self, batch: int, capacity: int) -> Any:
        """What it keeps of ``batch`` sequences; room for ``capacity`` positions where that matters."""

    def __call__(
        self, x: Floats, state: Any, start: int, rotary: Rotary | None, pool: Pool, observe: Observe | None
    ) -> Floats:
        """Mix.

        Parameters
        ----------
        x : ndarray of float32, shape (batch, positions, hidden)
            Normed input of the positions from ``start`` on.
        state
            Extended by them.
        start : int
        rotary : (cos, sin), optional
            Of these positions; None for a layer without rotary embedding.
        pool : Pool
        observe : callable, optional

        Returns
        -------
        ndarray of float32, shape (batch * positions, hidden)
        """


class FeedForward(Protocol):
    """What works on each position by itself."""

    def __call__(self, x: Floats, pool: Pool, observe: Observe | None) -> Floats:
        """Normed float32 [tokens, hidden] -> float32 [tokens, hidden]."""


@dataclass(frozen=True)
class Layer:
    """A mixer and a feed-forward, each with a residual around it and norms before or after it.

    Parameters
    ----------
    mixer : Mixer
    ffn : FeedForward
    attn_norm, ffn_norm : Norm, optional
        Of the inputs.
    attn_post_norm, ffn_post_norm : Norm, optional
        Of the outputs, before they are added.
    rope : Rope, optional
        Which rotary tables the mixer gets.
    """

    mixer: Mixer
    ffn: FeedForward
    attn_norm: Norm | None
    ffn_norm: Norm | None
    attn_post_norm: Norm | None = None
    ffn_post_norm: Norm | None = None
    rope: Rope | None = None

    @unwarned()
    def __call__(
        self,
        h: Floats,
        state: Any,
        start: int,
        rotary: Rotary | None,
        pool: Pool,
        observe: Observe | None = None,
    ) -> None:
        """Advance the residual stream ``h``, float32 [batch, positions, hidden], in place; see :class:`Mixer`."""
        self.mix(h, state, start, rotary, pool, observe)
        self.feed(h, pool, observe)

    def mix(
        self,
        h: Floats,
        state: Any,
        start: int,
        rotary: Rotary | None,
        pool: Pool,
        observe: Observe | None = None,
    ) -> None:
        """The first half."""
        flat = h.reshape(-1, h.shape[-1])
        x = flat if self.attn_norm is None else self.attn_norm(flat, pool)
        y = self.mixer(x.reshape(h.shape), state, start, rotary, pool, observe)
        flat += y if self.attn_post_norm is None else self.attn_post_norm(y, pool)

    def feed(self, h: Floats, pool: Pool, observe: Observe | None = None) -> None:
        """The second half."""
        flat = h.reshape(-1, h.shape[-1])
        x = flat if self.ffn_norm is None else self.ffn_norm(flat, pool)
        y = self.ffn(x, pool, observe)
        flat += y if self.ffn_post_norm is None else self.ffn_post_norm(y, pool)


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention.

    Parameters
    ----------
    q, k, v, o : Linear
    head_dim : int
    window : int, optional
    q_norm, k_norm : Norm, optional
        Of each head, or of all heads together: as wide as their weights.
    scale, softcap : float, optional
        See :func:`~trapetum.runtime.attention.attend`.
    sinks : ndarray of float32, shape (heads,), optional
    gated : bool
        Rows of ``q`` hold, head by head, the query and as many values whose logistic function multiplies the result.
    cache_type : str
        Of ``CACHE_TYPES``.
    """

    q: Linear
    k: Linear
    v: Linear
    o: Linear
    head_dim: int
    window: int | None = None
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: Floats | None = None
    gated: bool = False
    cache_type: str = "f32"

    def new_state(self, batch: int, capacity: int) -> KeyValues:
        """Empty keys and values."""
        heads = self.k.matrix.rows // self.head_dim
        return KeyValues(batch, heads, self.head_dim, capacity, self.cache_type)

    def __call__(
        self,
        x: Floats,
        state: KeyValues,
        start: int,
        rotary: Rotary | None,
        pool: Pool,
        observe: Observe | None,
    ) -> Floats:
        """See :class:`Mixer`."""
        batch, positions, hidden = x.shape
        flat = x.reshape(-1, hidden)
        if observe is not None:
            observe("q", flat)
        projected = apply_all(flat, self.q, self.k, self.v)
        gate = None
        if self.gated:
            both = projected[0].reshape(flat.shape[0], -1, 2, self.head_dim)
            projected[0], gate = np.ascontiguousarray(both[:, :, 0]), both[:, :, 1]
        normed = [
            y if norm is None else norm(y.reshape(-1, norm.weight.size), pool)
            for y, norm in zip(projected, (self.q_norm, self.k_norm, None))
        ]
        q, k, v = (y.reshape(batch, positions, -1, self.head_dim) for y in normed)
        if rotary is not None:
            for part in (q, k):
                pool.blocks(lambda b, part=part: rotate(part[b], *rotary), batch, 1)  # type: ignore[misc]
        keys, values = state.append(start, k, v)
        mixed = attend(
            q, keys, values, self.window, pool, scale=self.scale, softcap=self.softcap, sinks=self.sinks
        )
        merged = mixed.reshape(flat.shape[0], -1)
        if gate is not None:
            merged *= logistic(gate).reshape(merged.shape)
        if observe is not None:
            observe("o", merged)
        return self.o(merged)


@dataclass(frozen=True)
class GatedMlp:
    """``down(act(gate(x)) * up(x))``.

    Parameters
    ----------
    gate, up, down : Linear
    act : str
        Key of :data:`GATES`.
    prefix : str
        Before the parts that calibration sees: ``shared_`` of a shared expert.
    expert : int, optional
        Of a routed expert.
    """

    gate: Linear
    up: Linear
    down: Linear
    act: str = "silu"
    prefix: str = ""
    expert: int | None = None

    def __call__(self, x: Floats, pool: Pool, observe: Observe | None = None) -> Floats:
        """See :class:`FeedForward`."""
        if observe is not None:
            observe(self.prefix + "gate", x, expert=self.expert)
        gate, up = apply_all(x, self.gate, self.up)
        combine = GATES[self.act]
        pool.blocks(lambda r: combine(gate[r], up[r]), gate.shape[0], _rows_a_block(gate.shape[1]))
        if observe is not None:
            observe(self.prefix + "down", gate, expert=self.expert)
        return self.down(gate)


def logistic(x: Floats) -> Floats:
    """``1 / (1 + exp(-x))``, float32."""
    with np.errstate(over="ignore"):  # exp(-x) = inf gives 0, the right limit
        found = np.exp(-x)
    found += 1
    return np.reciprocal(found, out=found)


def _silu(gate: Floats, up: Floats) -> None:
    """``gate <- gate * sigmoid(gate) * up`` in place."""
    with np.errstate(over="ignore"):  # exp(-x) = inf gives -0.0, the right limit
        denominator = np.exp(-gate)
    denominator += 1
    gate /= denominator
    gate *= up


def _gelu_tanh(gate: Floats, up: Floats) -> None:
    """``gate <- gate * (1 + tanh(sqrt(2/pi) (gate + 0.044715 gate^3))) / 2 * up`` in place."""
    inner = gate * gate
    inner *= gate
    inner *= np.float32(0.044715)
    inner += gate
    inner *= np.float32(math.sqrt(2 / math.pi))
    np.tanh(inner, out=inner)
    inner += 1
    gate *= np.float32(0.5)
    gate *= inner
    gate *= up


def _gelu(gate: Floats, up: Floats) -> None:
    """``gate <- gate * Phi(gate) * up`` in place, Phi the normal distribution function."""
    from scipy.special import ndtr

    gate *= ndtr(gate)
    gate *= up


GATES: dict[str, Callable[[Floats, Floats], None]] = {
    "silu": _silu,
    "gelu_pytorch_tanh": _gelu_tanh,
    "gelu": _gelu,
}
"""Value of ``hidden_act`` -> (gate, up) -> ``act(gate) * up`` in ``gate``."""
