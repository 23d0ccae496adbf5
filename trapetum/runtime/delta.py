"""Gated delta net: the linear-attention layer of Qwen3-Next and Qwen3.5 as a :class:`~trapetum.runtime.layers.Mixer`.

One projection gives queries, keys and values, which pass a short causal convolution (each channel by itself) and SiLU;
queries and keys are normalised to length one, and the recurrence of ``kernels.cpu.delta`` mixes positions. Its output
is normalised head by head and gated by SiLU of a second projection. What a sequence leaves behind has a fixed size: the
last ``taps - 1`` inputs of the convolution, and a matrix a value head.

Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks", 2024; the layer order of Qwen3-Next as published.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from trapetum.kernels.cpu.delta import delta_rule
from trapetum.kernels.cpu.pool import Pool
from trapetum.models.qwen_next import DELTA, DeltaOptions
from trapetum.runtime.layers import Linear, Norm, Observe, Rotary, apply_all

if TYPE_CHECKING:
    from trapetum.runtime.weights import Weights

__all__ = ["DeltaHeads", "DeltaNet", "DeltaState", "build_delta_net"]

Floats = NDArray[np.float32]

_LENGTH_EPS = 1e-6  # added to the squared length of queries and keys
_TOKENS = 64  # positions whose element-wise steps stay in the second-level cache


@dataclass(frozen=True)
class DeltaHeads:
    """Number and width of the heads.

    Parameters
    ----------
    keys, values : int
        Heads; each key head serves ``values / keys`` consecutive value heads.
    key_dim, value_dim : int
    """

    keys: int
    values: int
    key_dim: int
    value_dim: int

    @property
    def key_width(self) -> int:
        """Columns of all key heads (queries have as many)."""
        return self.keys * self.key_dim

    @property
    def value_width(self) -> int:
        """Columns of all value heads."""
        return self.values * self.value_dim

    @property
    def channels(self) -> int:
        """Columns of queries, keys and values together: the channels of the convolution."""
        return 2 * self.key_width + self.value_width

    def fused_order(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Where Qwen3-Next's fused projections keep each column.

        A key head there has its query, key, values and gates side by side, and its steps and decays.

        Returns
        -------
        (qkvz, ba) : ndarrays of intp
            Where ``in_proj_qkvz`` has the columns q | k | v | z, and ``in_proj_ba`` the columns b | a.
        """
        group = self.values // self.keys
        widths = (self.key_dim, self.key_dim, group * self.value_dim, group * self.value_dim)
        return _by_part(self.keys, widths), _by_part(self.keys, (group, group))


def _by_part(heads: int, widths: tuple[int, ...]) -> NDArray[np.intp]:
    columns = np.arange(heads * sum(widths), dtype=np.intp).reshape(heads, -1)
    stops = np.cumsum(widths)
    return np.concatenate(
        [columns[:, stop - w : stop].ravel() for stop, w in zip(stops, widths, strict=True)]
    )


class DeltaState:
    """What a batch of sequences leaves behind in one layer.

    Parameters
    ----------
    batch : int
    heads : DeltaHeads
    taps : int
        Width of the convolution.
    """

    def __init__(self, batch: int, heads: DeltaHeads, taps: int) -> None:
        self.window: Floats = np.zeros((batch, taps - 1, heads.channels), np.float32)
        self.memory: Floats = np.zeros((batch, heads.values, heads.key_dim, heads.value_dim), np.float32)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.window.nbytes + self.memory.nbytes


@dataclass(frozen=True)
class DeltaNet:
    """See the module.

    Parameters
    ----------
    heads : DeltaHeads
    projections : mapping of str to Linear
        ``qkv``, ``z``, ``b`` and ``a``; or ``qkvz`` or ``ba`` for two of them, fused by key heads.
    conv : ndarray of float32, shape (channels, taps)
        The last tap weighs the position itself.
    rate : ndarray of float32, shape (value_heads,)
        ``exp(A_log)``: how fast each head forgets.
    dt_bias : ndarray of float32, shape (value_heads,)
    norm : Norm
        Over a value head.
    out : Linear
    """

    heads: DeltaHeads
    projections: Mapping[str, Linear]
    conv: Floats
    rate: Floats
    dt_bias: Floats
    norm: Norm
    out: Linear

    def new_state(self, batch: int, capacity: int) -> DeltaState:
        """An empty state; ``capacity`` does not matter."""
        return DeltaState(batch, self.heads, self.conv.shape[1])

    def __call__(
        self,
        x: Floats,
        state: DeltaState,
        start: int,
        rotary: Rotary | None,
        pool: Pool,
        observe: Observe | None = None,
    ) -> Floats:
        """See :class:`~trapetum.runtime.layers.Mixer`; ``start`` and ``rotary`` do not matter."""
        batch, positions, hidden = x.shape
        heads, flat = self.heads, x.reshape(-1, hidden)
        if observe is not None:
            observe("delta_qkv", flat)
        qkv, z, b, a = self._project(flat)
        q, k, v = self._convolved(qkv.reshape(batch, positions, -1), state, pool)
        with np.errstate(over="ignore"):  # exp = inf gives 0, the right limit
            step = (1 / (1 + np.exp(-b))).reshape(batch, positions, -1)
            decay = np.exp(-self.rate * np.logaddexp(np.float32(0), a + self.dt_bias)).reshape(step.shape)
        mixed = np.empty((batch, positions, heads.values, heads.value_dim), np.float32)

        def piece(number: int) -> None:
            one, h = divmod(number, heads.values)
            delta_rule(q[one], k[one], v[one], decay[one], step[one], state.memory[one], mixed[one], h, h + 1)

        pool.run(piece, batch * heads.values)
        normed = self.norm(mixed.reshape(-1, heads.value_dim), pool).reshape(flat.shape[0], -1)
        with np.errstate(over="ignore"):  # exp(-z) = inf gives -0.0, the right limit
            normed *= z / (1 + np.exp(-z))
        if observe is not None:
            observe("delta_out", normed)
        return self.out(normed)

    def _project(self, x: Floats) -> list[Floats]:
        """``qkv, z, b, a`` of float32 [tokens, hidden]."""
        found = dict(zip(self.projections, apply_all(x, *self.projections.values()), strict=True))
        heads, orders = self.heads, self.heads.fused_order()
        for parts, order, at in (("qkv z", orders[0], heads.channels), ("b a", orders[1], heads.values)):
            if (fused := found.pop(parts.replace(" ", ""), None)) is not None:
                both = fused[:, order]
                found |= dict(zip(parts.split(), (both[:, :at], both[:, at:]), strict=True))
        return [found[part] for part in ("qkv", "z", "b", "a")]

    def _convolved(self, qkv: Floats, state: DeltaState, pool: Pool) -> tuple[Floats, Floats, Floats]:
        """Queries, keys and values after the convolution: [batch, positions, heads, width]; advances the window."""
        heads, taps = self.heads, self.conv.shape[1]
        batch, positions, _ = qkv.shape
        padded = np.concatenate([state.window, qkv], axis=1)
        state.window[:] = padded[:, positions:]
        weights = np.ascontiguousarray(self.conv.T)
        out = np.empty_like(qkv)

        def piece(rows: slice) -> None:
            total = weights[0] * padded[:, rows]
            for tap in range(1, taps):
                total += weights[tap] * padded[:, rows.start + tap : rows.stop + tap]
            with np.errstate(over="ignore"):
                total /= 1 + np.exp(-total)
            edge = 2 * heads.key_width
            for part, scale in ((slice(0, edge // 2), heads.key_dim**-0.5), (slice(edge // 2, edge), 1.0)):
                y = total[..., part].reshape(batch, -1, heads.keys, heads.key_dim)
                length = np.sqrt((y * y).sum(axis=-1, keepdims=True) + np.float32(_LENGTH_EPS))
                y *= np.float32(scale) / length
            out[:, rows] = total

        pool.blocks(piece, positions, _TOKENS)
        edge = 2 * heads.key_width
        q, k = (
            np.ascontiguousarray(y).reshape(batch, positions, heads.keys, heads.key_dim)
            for y in (out[..., : edge // 2], out[..., edge // 2 : edge])
        )
        v = np.ascontiguousarray(out[..., edge:]).reshape(batch, positions, heads.values, heads.value_dim)
        return q, k, v


def build_delta_net(weights: Weights, layer: int) -> DeltaNet:
    """The delta net of a layer.

    Raises
    ------
    CheckpointError
        If a part is missing.
    """
    options = weights.config.sections[DELTA]
    if not isinstance(options, DeltaOptions):
        raise TypeError(f"the options of a delta net are {type(options).__name__}")
    parts = ("qkvz", "qkv", "z", "ba", "b", "a")
    stored = [part for part in parts if weights.find(f"delta_{part}", layer) is not None]
    return DeltaNet(
        DeltaHeads(options.key_heads, options.value_heads, options.key_dim, options.value_dim),
        {part: weights.linear(f"delta_{part}", layer) for part in stored},
        conv=weights.vector("delta_conv", layer).reshape(-1, options.taps),
        rate=np.exp(weights.vector("delta_rate", layer)),
        dt_bias=weights.vector("delta_dt", layer),
        norm=weights.norm("delta_norm", layer),
        out=weights.linear("delta_out", layer),
    )
