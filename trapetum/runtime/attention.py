"""Rotary embedding, the key/value cache and grouped-query attention with causal and sliding-window masks."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from trapetum.kernels.cpu.pool import Pool

__all__ = ["CACHE_TYPES", "Cache", "KeyValues", "attend", "rotary_tables", "rotate"]

Floats = NDArray[np.float32]

_QUERY_BLOCK = 128  # positions at once: later keys are skipped, and scores of 128 x 4096 stay at 2 MiB a head
_PIECE_MACS = 1 << 20

CACHE_TYPES: dict[str, Any] = {"f32": np.float32, "f16": np.float16}
"""Name -> how keys and values are kept: float16 halves their memory and rounds each by 2**-12 in the mean."""
_LARGEST = np.float32(65504)  # of float16; larger keys and values are cut to it


class KeyValues:
    """State of an attention layer: keys and values of the positions seen so far.

    Parameters
    ----------
    batch, heads, head_dim : int
        ``heads`` counts key/value heads.
    capacity : int
        Positions allocated at first; it doubles when full.
    kind : str
        Of ``CACHE_TYPES``.
    """

    def __init__(self, batch: int, heads: int, head_dim: int, capacity: int, kind: str = "f32") -> None:
        self._store: NDArray[Any] = np.empty((2, batch, heads, max(1, capacity), head_dim), CACHE_TYPES[kind])

    @property
    def first(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """Keys and values of the first sequence with all their room, [heads, capacity, head_dim]."""
        return self._store[0, 0], self._store[1, 0]

    def append(self, start: int, k: Floats, v: Floats) -> tuple[NDArray[Any], NDArray[Any]]:
        """Store the keys and values of positions ``start`` and on.

        Parameters
        ----------
        start : int
        k, v : ndarray of float32, shape (batch, positions, heads, head_dim)

        Returns
        -------
        (k, v) : views of what is kept, shape (batch, heads, start + positions, head_dim)
        """
        stop, capacity = start + k.shape[1], self._store.shape[3]
        if stop > capacity:
            shape = list(self._store.shape)
            shape[3] = max(stop, 2 * capacity)
            grown = np.empty(shape, self._store.dtype)
            grown[..., :start, :] = self._store[..., :start, :]
            self._store = grown
        for store, new in zip(self._store, (k, v)):
            if store.dtype == np.float16:
                new = np.clip(new, -_LARGEST, _LARGEST)
            store[:, :, start:stop] = new.transpose(0, 2, 1, 3)
        return self._store[0][:, :, :stop], self._store[1][:, :, :stop]


class Cache:
    """What a model keeps of the positions seen so far, for a batch of equally long sequences.

    Parameters
    ----------
    states : list
        One a layer, of the kind that its mixer makes.

    Attributes
    ----------
    length : int
        Positions that every layer has seen.
    """

    def __init__(self, states: list[Any]) -> None:
        self.states = states
        self.length = 0


def rotary_tables(inv_freq: Floats, start: int, stop: int, magnitude: float = 1.0) -> tuple[Floats, Floats]:
    """Cosines and sines of positions ``start .. stop - 1``.

    The angle is a float32 product, as where these models were trained: at position 5000 its rounding
    already moves the cosine by 1e-4, so more precision would be a difference.

    Parameters
    ----------
    inv_freq : ndarray of float32, shape (rotated / 2,)
    start, stop : int
    magnitude : float
        Multiplies both.

    Returns
    -------
    (cos, sin) : ndarrays of float32, shape (positions, 1, rotated / 2)
    """
    angle = np.arange(start, stop, dtype=np.float32)[:, None, None] * inv_freq
    cos, sin = np.cos(angle), np.sin(angle)
    if magnitude != 1.0:
        cos *= np.float32(magnitude)
        sin *= np.float32(magnitude)
    return cos, sin


def rotate(x: Floats, cos: Floats, sin: Floats) -> None:
    """Rotate the pairs (d, d + rotated/2) of every head in place; what follows the rotated values stays.

    Parameters
    ----------
    x : ndarray of float32, shape (batch, positions, heads, head_dim)
    cos, sin : ndarrays of float32, shape (positions, 1, rotated / 2)
    """
    half = cos.shape[-1]
    a, b = x[..., :half], x[..., half : 2 * half]
    turned = a * cos - b * sin
    b *= cos
    b += a * sin
    a[...] = turned


def attend(
    q: Floats,
    k: NDArray[Any],
    v: NDArray[Any],
    window: int | None,
    pool: Pool,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Floats | None = None,
) -> Floats:
    """Scaled dot-product attention of the last positions over all.

    Parameters
    ----------
    q : ndarray of float32, shape (batch, new, heads, head_dim)
        The last ``new`` of ``total`` positions.
    k : ndarray of float32 or float16, shape (batch, kv_heads, total, head_dim)
        Query head h reads key/value head ``h // (heads / kv_heads)``.
    v : ndarray of the same dtype, shape (batch, kv_heads, total, value_dim)
    window : int, optional
        A position sees itself and the ``window - 1`` before it.
    pool : Pool
    scale : float, optional
        Of the scores; one over the root of ``head_dim`` where left out.
    softcap : float, optional
        Scores become ``softcap * tanh(scores / softcap)``.
    sinks : ndarray of float32, shape (heads,), optional
        A score of each head that takes part in the softmax and has no value.

    Returns
    -------
    ndarray of float32, shape (batch, new, heads, value_dim)
    """
    batch, new, heads, dim = q.shape
    kv_heads, total, width = v.shape[1:]
    group = heads // kv_heads
    past = total - new
    grouped = q.reshape(batch, new, kv_heads, group, dim)
    out = np.empty((batch, new, kv_heads, group, width), np.float32)
    blocks = -(-new // _QUERY_BLOCK)
    # one piece takes as many heads as make it worth a dispatch: decoding a token of a small model is one
    # piece
    step = max(1, min(kv_heads, _PIECE_MACS // max(1, min(new, _QUERY_BLOCK) * group * total * dim)))
    steps = -(-kv_heads // step)
    factor = np.float32(dim**-0.5 if scale is None else scale)
    sink = None if sinks is None else sinks.reshape(kv_heads, group, 1)

    def piece(number: int) -> None:
        rest, block = divmod(number, blocks)
        b, part = divmod(rest, steps)
        h = slice(part * step, (part + 1) * step)
        first, last = block * _QUERY_BLOCK, min(new, (block + 1) * _QUERY_BLOCK)
        low = 0 if window is None else max(0, past + first - window + 1)
        high = past + last
        count = last - first
        queries: Floats = grouped[b, first:last, h].transpose(1, 2, 0, 3) * factor  # [kv, group, count, dim]
        some = queries.shape[0]
        scores = queries.reshape(some, group * count, dim) @ _float32(k[b, h, low:high]).transpose(0, 2, 1)
        if softcap is not None:
            scores /= np.float32(softcap)
            np.tanh(scores, out=scores)
            scores *= np.float32(softcap)
        _mask(scores.reshape(some * group, count, high - low), past + first, low, window)
        top = scores.max(axis=-1, keepdims=True)
        if sink is not None:
            extra = np.repeat(sink[h], count, axis=1)
            top = np.maximum(top, extra)
        scores -= top
        np.exp(scores, out=scores)
        weight = scores.sum(axis=-1, keepdims=True)
        if sink is not None:
            weight += np.exp(extra - top)
        mixed = scores @ _float32(v[b, h, low:high])
        mixed /= weight
        out[b, first:last, h] = mixed.reshape(some, group, count, width).transpose(2, 0, 1, 3)

    pool.run(piece, batch * steps * blocks)
    return out.reshape(batch, new, heads, width)


def _float32(kept: NDArray[Any]) -> Floats:
    return kept if kept.dtype == np.float32 else kept.astype(np.float32)


def _mask(scores: Floats, first: int, low: int, window: int | None) -> None:
    """Set to -inf what a query must not see; scores [any, queries from ``first``, keys from ``low``].

    Only the two edges can be hidden: the last ``count`` keys (the future of some query) and, with a window,
    the first ones (too old for some query).
    """
    count, keys = scores.shape[1:]
    never = np.float32(-np.inf)
    if count > 1:
        future = ~np.tri(count, dtype=np.bool_)
        np.copyto(scores[:, :, keys - count :], never, where=future)
    if window is not None and (edge := first + count - window - low) > 0:
        old = np.arange(low, low + edge)[None, :] <= np.arange(first, first + count)[:, None] - window
        np.copyto(scores[:, :, :edge], never, where=old)
