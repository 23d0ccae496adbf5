"""Rotary embedding, the key/value cache and grouped-query attention with causal and sliding-window masks."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trapetum.kernels.cpu.pool import Pool

__all__ = ["Cache", "attend", "rotary_tables", "rotate"]

Floats = NDArray[np.float32]

_QUERY_BLOCK = 128  # positions at once: later keys are skipped, and scores of 128 x 4096 stay at 2 MiB a head
_PIECE_MACS = 1 << 20


class Cache:
    """Keys and values of the positions seen so far, for a batch of equally long sequences.

    Parameters
    ----------
    layers, batch, heads, head_dim : int
        ``heads`` counts key/value heads.
    capacity : int
        Positions allocated at first; the cache doubles when full.
    """

    def __init__(self, layers: int, batch: int, heads: int, head_dim: int, capacity: int) -> None:
        self.length = 0
        self._store = np.empty((layers, 2, batch, heads, max(1, capacity), head_dim), np.float32)

    def reserve(self, positions: int) -> None:
        """Make room for ``positions`` more."""
        needed, capacity = self.length + positions, self._store.shape[4]
        if needed > capacity:
            shape = list(self._store.shape)
            shape[4] = max(needed, 2 * capacity)
            grown = np.empty(shape, np.float32)
            grown[..., : self.length, :] = self._store[..., : self.length, :]
            self._store = grown

    def store(self, layer: int) -> tuple[Floats, Floats]:
        """Keys and values of a layer of the first sequence with all their room, float32 [heads, capacity, head_dim]."""
        return self._store[layer, 0, 0], self._store[layer, 1, 0]

    def append(self, layer: int, k: Floats, v: Floats) -> tuple[Floats, Floats]:
        """Store one layer's new keys and values; ``length`` moves only when the caller has done all layers.

        Parameters
        ----------
        layer : int
        k, v : ndarray of float32, shape (batch, positions, heads, head_dim)

        Returns
        -------
        (k, v) : views of float32, shape (batch, heads, length + positions, head_dim)
        """
        stop = self.length + k.shape[1]
        views = []
        for which, new in enumerate((k, v)):
            store = self._store[layer, which]
            store[:, :, self.length : stop] = new.transpose(0, 2, 1, 3)
            views.append(store[:, :, :stop])
        return views[0], views[1]


def rotary_tables(inv_freq: Floats, start: int, stop: int) -> tuple[Floats, Floats]:
    """Cosines and sines of positions ``start .. stop - 1``.

    The angle is a float32 product, as where these models were trained: at position 5000 its rounding
    already moves the cosine by 1e-4, so more precision would be a difference.

    Returns
    -------
    (cos, sin) : ndarrays of float32, shape (positions, 1, head_dim / 2)
    """
    angle = np.arange(start, stop, dtype=np.float32)[:, None, None] * inv_freq
    return np.cos(angle), np.sin(angle)


def rotate(x: Floats, cos: Floats, sin: Floats) -> None:
    """Rotate the pairs (d, d + head_dim/2) of every head in place.

    Parameters
    ----------
    x : ndarray of float32, shape (batch, positions, heads, head_dim)
    cos, sin : ndarrays of float32, shape (positions, 1, head_dim / 2)
    """
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    turned = a * cos - b * sin
    b *= cos
    b += a * sin
    a[...] = turned


def attend(q: Floats, k: Floats, v: Floats, window: int | None, pool: Pool) -> Floats:
    """Scaled dot-product attention of the last positions over all.

    Parameters
    ----------
    q : ndarray of float32, shape (batch, new, heads, head_dim)
        The last ``new`` of ``total`` positions.
    k, v : ndarray of float32, shape (batch, kv_heads, total, head_dim)
        Query head h reads key/value head ``h // (heads / kv_heads)``.
    window : int, optional
        A position sees itself and the ``window - 1`` before it.
    pool : Pool

    Returns
    -------
    ndarray of float32, shape (batch, new, heads, head_dim)
    """
    batch, new, heads, dim = q.shape
    kv_heads, total = k.shape[1], k.shape[2]
    group = heads // kv_heads
    past = total - new
    grouped = q.reshape(batch, new, kv_heads, group, dim)
    out = np.empty_like(grouped)
    blocks = -(-new // _QUERY_BLOCK)
    # one piece takes as many heads as make it worth a dispatch: decoding a token of a small model is one
    # piece
    step = max(1, min(kv_heads, _PIECE_MACS // max(1, min(new, _QUERY_BLOCK) * group * total * dim)))
    steps = -(-kv_heads // step)
    scale = np.float32(dim**-0.5)

    def piece(number: int) -> None:
        rest, block = divmod(number, blocks)
        b, part = divmod(rest, steps)
        h = slice(part * step, (part + 1) * step)
        first, last = block * _QUERY_BLOCK, min(new, (block + 1) * _QUERY_BLOCK)
        low = 0 if window is None else max(0, past + first - window + 1)
        high = past + last
        count = last - first
        queries: Floats = grouped[b, first:last, h].transpose(1, 2, 0, 3) * scale  # [kv, group, count, dim]
        some = queries.shape[0]
        scores = queries.reshape(some, group * count, dim) @ k[b, h, low:high].transpose(0, 2, 1)
        _mask(scores.reshape(some * group, count, high - low), past + first, low, window)
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        weight = scores.sum(axis=-1, keepdims=True)
        mixed = scores @ v[b, h, low:high]
        mixed /= weight
        out[b, first:last, h] = mixed.reshape(some, group, count, dim).transpose(2, 0, 1, 3)

    pool.run(piece, batch * steps * blocks)
    return out.reshape(batch, new, heads, dim)


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
