"""Multi-head latent attention (DeepSeek V2, V3): a :class:`~trapetum.runtime.layers.Mixer` that caches latents.

A position leaves behind one latent of ``kv_lora_rank`` values and one rotary key of ``rope`` values, which all heads
share. A head's keys and values are linear in the latent, ``[k; v] = kv_b latent``, so there are two orders of work with
the same result:

* **expanded**: ``kv_b`` makes keys and values of every position; then attention over heads of ``nope + rope``.
* **absorbed**: the key half of ``kv_b`` goes into the query and its value half after the mean of latents, so that the
  latents themselves are keys and values; a position costs ``2 kv_lora_rank + rope`` a head instead, but nothing is
  expanded.

A prompt is cheaper the first way, a token the second; the shapes decide (:meth:`LatentAttention._absorbs`).

Source: DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from trapetum.errors import CheckpointError
from trapetum.kernels.cpu.pool import Pool
from trapetum.models.deepseek import LATENT, LatentOptions
from trapetum.runtime.attention import attend, rotate
from trapetum.runtime.layers import Linear, Norm, Observe, Rotary, apply_all
from trapetum.runtime.matrix import build_matrix
from trapetum.tensors import DenseTensor

if TYPE_CHECKING:
    from trapetum.runtime.weights import Weights

__all__ = ["LatentAttention", "LatentState", "build_latent_attention", "rotate_pairs"]

Floats = NDArray[np.float32]

_LATENT_EPS = 1e-6  # of the norms of latents, whatever the config says of the others
# The shared keys serve so many groups of heads, so that the heads of one token are several pieces of work.
_KEY_GROUPS = 8


class LatentState:
    """Latents and rotated keys of the positions so far, float32 [batch, capacity, latent + rope]."""

    def __init__(self, batch: int, options: LatentOptions, capacity: int) -> None:
        self.store: Floats = np.empty((batch, max(1, capacity), options.kv_lora + options.rope), np.float32)

    def extend(self, start: int, positions: int) -> tuple[Floats, Floats]:
        """Room for positions from ``start`` on.

        Returns
        -------
        (rows, seen) : views
            Of the new positions, to be filled; of all positions up to their end.
        """
        batch, capacity, width = self.store.shape
        stop = start + positions
        if stop > capacity:
            grown = np.empty((batch, max(stop, 2 * capacity), width), np.float32)
            grown[:, :start] = self.store[:, :start]
            self.store = grown
        return self.store[:, start:stop], self.store[:, :stop]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.store.nbytes


@dataclass(frozen=True)
class LatentAttention:
    """See the module.

    Parameters
    ----------
    options : LatentOptions
    queries : tuple of Linear
        ``q``; or ``q_a, q_b`` with ``q_norm`` between them.
    q_norm : Norm, optional
    kv_a : Linear
        Rows: the latent, then the rotary key.
    kv_norm : Norm
    kv_b : Linear
        Rows: for each head ``nope`` of the key, then ``value``.
    o : Linear
    """

    options: LatentOptions
    queries: tuple[Linear, ...]
    q_norm: Norm | None
    kv_a: Linear
    kv_norm: Norm
    kv_b: Linear
    o: Linear

    def new_state(self, batch: int, capacity: int) -> LatentState:
        """An empty cache."""
        return LatentState(batch, self.options, capacity)

    def __call__(
        self,
        x: Floats,
        state: LatentState,
        start: int,
        rotary: Rotary | None,
        pool: Pool,
        observe: Observe | None = None,
    ) -> Floats:
        """See :class:`~trapetum.runtime.layers.Mixer`.

        Calibration sees the inputs of ``q`` (``kv_a`` reads the same), ``q_b``, ``kv_b`` and ``o``.
        """
        dims = self.options
        batch, positions, hidden = x.shape
        flat = x.reshape(-1, hidden)
        if observe is not None:
            observe("q", flat)
        q, fresh = apply_all(flat, self.queries[0], self.kv_a)
        if self.q_norm is not None:
            narrow = self.q_norm(q, pool)
            if observe is not None:
                observe("q_b", narrow)
            q = self.queries[1](narrow)
        q = q.reshape(batch, positions, dims.heads, dims.nope + dims.rope)
        latents = self.kv_norm(np.ascontiguousarray(fresh[:, : dims.kv_lora]), pool)
        if observe is not None:
            observe("kv_b", latents)

        rows, seen = state.extend(start, positions)
        rows[..., : dims.kv_lora] = latents.reshape(batch, positions, -1)
        rows[..., dims.kv_lora :] = fresh[:, dims.kv_lora :].reshape(batch, positions, -1)
        if rotary is not None:
            turn = rotate_pairs if dims.interleaved else rotate
            turn(rows[:, :, None, dims.kv_lora :], *rotary)
            turn(q[..., dims.nope :], *rotary)
        order = self._absorbed if self._absorbs(seen.shape[1], positions) else self._expanded
        merged = order(q, seen, pool).reshape(batch * positions, -1)
        if observe is not None:
            observe("o", merged)
        return self.o(merged)

    def _absorbs(self, total: int, new: int) -> bool:
        """Whether that takes fewer multiplications a head; never where ``kv_b`` wants rotated inputs."""
        dims = self.options
        kv = dims.kv_lora * (dims.nope + dims.value)
        absorbed = new * kv + new * total * (2 * dims.kv_lora + dims.rope)
        expanded = total * kv + new * total * (dims.nope + dims.rope + dims.value)
        return self.kv_b.rotation is None and self.kv_b.bias is None and absorbed < expanded

    def _expanded(self, q: Floats, seen: Floats, pool: Pool) -> Floats:
        dims = self.options
        batch, total = seen.shape[:2]
        latents = np.ascontiguousarray(seen[..., : dims.kv_lora]).reshape(batch * total, -1)
        both = self.kv_b(latents).reshape(batch, total, dims.heads, dims.nope + dims.value)
        keys = np.empty((batch, dims.heads, total, dims.nope + dims.rope), np.float32)
        keys[..., : dims.nope] = both[..., : dims.nope].transpose(0, 2, 1, 3)
        keys[..., dims.nope :] = seen[:, None, :, dims.kv_lora :]
        values = np.ascontiguousarray(both[..., dims.nope :].transpose(0, 2, 1, 3))
        return attend(q, keys, values, None, pool, scale=dims.scale)

    def _absorbed(self, q: Floats, seen: Floats, pool: Pool) -> Floats:
        dims = self.options
        batch, new = q.shape[:2]
        wide = np.empty((batch, new, dims.heads, dims.kv_lora + dims.rope), np.float32)
        wide[..., dims.kv_lora :] = q[..., dims.nope :]
        height = dims.nope + dims.value

        def head_rows(head: int) -> tuple[slice, slice]:
            return (
                slice(head * height, head * height + dims.nope),
                slice(head * height + dims.nope, (head + 1) * height),
            )

        def narrow(heads: slice) -> None:
            for head in range(heads.start, heads.stop):
                rows = self.kv_b.matrix.tile(head_rows(head)[0])
                wide[:, :, head, : dims.kv_lora] = q[:, :, head, : dims.nope] @ rows

        pool.blocks(narrow, dims.heads, 1)
        groups = _KEY_GROUPS if dims.heads % _KEY_GROUPS == 0 else 1
        keys = np.broadcast_to(seen[:, None], (batch, groups, *seen.shape[1:]))
        means = attend(wide, keys, keys[..., : dims.kv_lora], None, pool, scale=dims.scale)
        out = np.empty((batch, new, dims.heads, dims.value), np.float32)

        def widen(heads: slice) -> None:
            for head in range(heads.start, heads.stop):
                out[:, :, head] = means[:, :, head] @ self.kv_b.matrix.tile(head_rows(head)[1]).T

        pool.blocks(widen, dims.heads, 1)
        return out


def rotate_pairs(x: Floats, cos: Floats, sin: Floats) -> None:
    """Rotate the pairs (2d, 2d + 1) of every head in place.

    Parameters
    ----------
    x : ndarray of float32, shape (batch, positions, heads, dim)
    cos, sin : ndarrays of float32, shape (positions, 1, dim / 2)
    """
    a, b = x[..., 0::2], x[..., 1::2]
    turned = a * cos - b * sin
    b *= cos
    b += a * sin
    a[...] = turned


def build_latent_attention(weights: Weights, layer: int) -> LatentAttention:
    """The attention of a layer.

    Raises
    ------
    CheckpointError
        If a part is missing.
    """
    options = weights.config.sections[LATENT]
    if not isinstance(options, LatentOptions):
        raise CheckpointError(f"{weights.source.path}: config.json describes no latent attention")
    parts = ("q_a", "q_b") if options.q_lora else ("q",)
    return LatentAttention(
        options,
        queries=tuple(weights.linear(part, layer) for part in parts),
        q_norm=Norm(weights.vector("q_a_norm", layer), _LATENT_EPS) if options.q_lora else None,
        kv_a=weights.linear("kv_a", layer),
        kv_norm=Norm(weights.vector("kv_a_norm", layer), _LATENT_EPS),
        kv_b=_key_values(weights, layer, options),
        o=weights.linear("o", layer),
    )


def _key_values(weights: Weights, layer: int, options: LatentOptions) -> Linear:
    """``kv_b``; where a file has its halves, put together again."""
    if weights.find("kv_b", layer) is not None:
        return weights.linear("kv_b", layer)
    keys, values = (
        weights.source.load(weights.place(part, layer).name).dequantize() for part in ("k_b", "v_b")
    )
    rows = np.concatenate([keys.transpose(0, 2, 1), values], axis=1).reshape(-1, options.kv_lora)
    return Linear(build_matrix(DenseTensor(rows), weights.pool, expand=weights.expand))
