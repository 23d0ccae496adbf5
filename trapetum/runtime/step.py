"""One token through the whole model as one program of kernels (``kernels.cpu.program``).

The general forward pass is Python between products: some 60 us a product, which is most of the time of a small model
and a fifth of that of a model of 300 M weights. A :class:`Step` writes down once, for one cache, every call that a
token needs, with the addresses of weights and of buffers; then a token is one call for each thread, which allocates
nothing that grows with the model or the text. What a step cannot do (see :func:`build_step`) goes the general way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from trapetum.kernels.cpu import layer
from trapetum.models.rope import Rope
from trapetum.runtime.attention import Cache
from trapetum.runtime.layers import Attention, GatedMlp, Layer, Linear, Norm, Rotary
from trapetum.runtime.products import add_products, can_multiply
from trapetum.runtime.program import Program

if TYPE_CHECKING:
    from trapetum.runtime.model import Model

__all__ = ["Step", "build_step"]

Floats = NDArray[np.float32]

_GATES: dict[str, Callable[..., None]] = {
    "silu": layer.silu_step,
    "gelu_pytorch_tanh": layer.gelu_tanh_step,
}
"""Value of ``hidden_act`` -> operation; the exact ``gelu`` has none."""


def build_step(model: Model, cache: Cache) -> Step | None:
    """The step of a model that continues a cache of one sequence; None where there is none.

    There is one for plain attention and gated feed-forward, with norms before or after, windows, caps, sinks and rotary
    embedding of any kind that does not depend on the length, where every matrix has a fused kernel (rotated ones too)
    and heads and widths are multiples of 8. The cache must not grow.
    """
    linears: list[Linear] = [model.head]
    for one in model.layers:
        mixer, ffn = one.mixer, one.ffn
        if not isinstance(mixer, Attention) or not isinstance(ffn, GatedMlp):
            return None
        rope = one.rope
        unknown = (
            mixer.gated
            or mixer.head_dim % 8
            or ffn.act not in _GATES
            or (rope is not None and (rope.regime(1 << 60) or model.config.rotary_dim % 2))
        )
        norms = [
            one.attn_norm,
            one.ffn_norm,
            one.attn_post_norm,
            one.ffn_post_norm,
            mixer.q_norm,
            mixer.k_norm,
        ]
        if unknown or any(norm is not None and norm.weight.size % 8 for norm in norms):
            return None
        linears += [mixer.q, mixer.k, mixer.v, mixer.o, ffn.gate, ffn.up, ffn.down]
    return Step(model, cache) if all(can_multiply(linear) for linear in linears) else None


class Step:
    """See :func:`build_step`.

    Parameters
    ----------
    model : Model
    cache : Cache
        Room for every position to come.
    """

    def __init__(self, model: Model, cache: Cache) -> None:
        self._model, self._cache = model, cache
        self._program = Program(model.pool)
        self._hidden = np.zeros(model.config.hidden_size, np.float32)
        half = model.config.rotary_dim // 2
        self._rotary: dict[Rope, Rotary] = {
            one.rope: (np.zeros(half, np.float32), np.zeros(half, np.float32))
            for one in model.layers
            if one.rope is not None
        }
        self._position = np.zeros(1, np.int64)
        rows = model.head.matrix.rows
        padded = np.zeros(-(-rows // 8) * 8, np.float32)  # capped eight at a time
        self.logits = padded[:rows]
        for number, one in enumerate(model.layers):
            self._layer(one, number)
        x = self._norm(self._hidden, model.final_norm)
        add_products(self._program, x, [(model.head, self.logits)])
        if model.head.softcap is not None:
            cap = np.array([model.head.softcap], np.float32)
            self._program.add(layer.cap_step, [padded, padded.size, cap], padded.size // 8, 512)
        self._run = self._program.runner()

    def __call__(self, token: int) -> Floats:
        """Append a token to the cache; float32 [vocab_size], valid until the next call."""
        position = self._cache.length
        self._hidden[:] = self._model.embedding(np.array([token]))[0]
        tables = self._model.rotary(position, position + 1, position + 1)
        for rope, (cos, sin) in self._rotary.items():
            made = cast(Rotary, tables[rope])
            cos[:], sin[:] = made[0][0, 0], made[1][0, 0]
        self._position[0] = position
        self._run()
        self._cache.length += 1
        return self.logits

    def _layer(self, one: Layer, number: int) -> None:
        mixed = self._attention(one, number)
        self._residual(mixed, cast(Attention, one.mixer).o, one.attn_post_norm)
        ffn = cast(GatedMlp, one.ffn)  # build_step saw to it
        x = self._norm(self._hidden, one.ffn_norm)
        gate, up = (
            self._program.buffer(n, linear.matrix.rows) for n, linear in (("gate", ffn.gate), ("up", ffn.up))
        )
        add_products(self._program, x, [(ffn.gate, gate), (ffn.up, up)])
        self._program.add(_GATES[ffn.act], [gate, up, gate.size], gate.size // 8, 512)
        self._residual(gate, ffn.down, one.ffn_post_norm)

    def _attention(self, one: Layer, number: int) -> Floats:
        """Add the operations from the hidden state to the mixed values."""
        program, mixer = self._program, cast(Attention, one.mixer)
        dim = mixer.head_dim
        heads, kv_heads = mixer.q.matrix.rows // dim, mixer.k.matrix.rows // dim
        x = self._norm(self._hidden, one.attn_norm)
        projections = (mixer.q, mixer.k, mixer.v)
        q, k, v = (program.buffer(n, linear.matrix.rows) for n, linear in zip("qkv", projections))
        add_products(program, x, list(zip(projections, (q, k, v))))
        for y, norm in ((q, mixer.q_norm), (k, mixer.k_norm)):
            if norm is not None:
                self._norm(y, norm, y)
            if one.rope is not None:
                cos, sin = self._rotary[one.rope]
                program.add(layer.rotate_step, [y, cos, sin, y.size // dim, dim, cos.size])
        keys, values = self._cache.states[number].first
        capacity = keys.shape[1]
        append, attend = layer.append_step, layer.attend_step
        if keys.dtype == np.float16:
            append, attend = layer.append_halves_step, layer.attend_halves_step
        for y, store in ((k, keys), (v, values)):
            program.add(append, [y, store, kv_heads, dim, capacity, self._position])
        room = -(-capacity // 8) * 8
        scores, mixed = program.buffer("scores", heads * room), program.buffer("mixed", heads * dim)
        scale = dim**-0.5 if mixer.scale is None else mixer.scale
        factors = np.array([scale, mixer.softcap or 0.0], np.float32)
        none = np.full(heads, -np.inf, np.float32)
        sinks = none if mixer.sinks is None else np.ascontiguousarray(mixer.sinks)
        arrays = [q, keys, values, scores, mixed, heads, kv_heads, dim, capacity, room]
        arguments = [*arrays, mixer.window or 0, self._position, factors, sinks]
        program.add(attend, arguments, heads, 1 if capacity > 64 else heads)
        return mixed

    def _residual(self, x: Floats, linear: Linear, norm: Norm | None) -> None:
        y = self._program.buffer("residual", linear.matrix.rows)
        add_products(self._program, x, [(linear, y)])
        if norm is not None:
            self._norm(y, norm, y)
        self._program.add(layer.add_step, [self._hidden, y, y.size])

    def _norm(self, x: Floats, norm: Norm | None, out: Floats | None = None) -> Floats:
        """Add a norm of every ``len(weight)`` numbers of ``x``; ``x`` itself where there is none."""
        if norm is None:
            return x
        out = self._program.buffer("normed", x.size) if out is None else out
        weight, width = np.ascontiguousarray(norm.weight), norm.weight.size
        eps = np.array([norm.eps], np.float64)
        self._program.add(layer.norm_step, [x, weight, eps, out, width, x.size // width])
        return out
