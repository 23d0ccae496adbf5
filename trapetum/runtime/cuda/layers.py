"""A decoder layer on the card: which kernels it launches, in order.

Residual stream float32, activations float16 from each norm to the next product, products float32: no pass that only
casts. Adding a block's output to the residual stream is part of the next norm. What a layer keeps is in fixed buffers,
so that a captured graph of all launches can be replayed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from trapetum.kernels.cuda.module import import_cupy, kernels
from trapetum.runtime.blocks import FEED_FORWARDS
from trapetum.runtime.cuda.products import Product, build_product

if TYPE_CHECKING:
    from trapetum.kernels.cuda.workspace import Workspace
    from trapetum.runtime.layers import FeedForward, Norm
    from trapetum.runtime.weights import Weights

__all__ = [
    "CHUNK",
    "Buffers",
    "CardLayer",
    "KeyValueCache",
    "Pass",
    "build_card_layer",
    "card_argument",
    "launch",
]

CHUNK = 128
"""Positions of one split of attention; ``CHUNK`` of ``decoder.cu``."""
_ATTENTION_THREADS = 128
_TILE = 64
_GATES = {"silu": 0, "gelu_pytorch_tanh": 1, "gelu": 2}


def card_argument(value: Any) -> Any:
    """A kernel's argument: Python numbers become 32-bit ones, anything else stays."""
    if isinstance(value, bool | int):
        return np.int32(value)
    return np.float32(value) if isinstance(value, float) else value


def launch(name: str, grid: tuple[int, ...], threads: int, arguments: list[Any], shared: int = 0) -> None:
    """A kernel of ``decoder.cu`` on the current stream; Python integers and floats become 32-bit ones."""
    kernels("decoder_f16")[name].launch(
        grid, threads, [card_argument(a) for a in arguments], shared, early=True
    )


@dataclass(frozen=True)
class Pass:
    """What a run through the layers works on.

    Parameters
    ----------
    tokens : int
        Rows of the buffers that are used.
    position : cupy.ndarray of int32, shape (tokens,)
    sequence : cupy.ndarray of int32, shape (tokens,), optional
        The sequence of each row in the cache; row m is sequence m where left out.
    past : int or None
        None: one new token of each sequence, at its own position. Else the rows are consecutive positions of the
        cache's first sequence, from this one on.
    """

    tokens: int
    position: Any
    sequence: Any = None
    past: int | None = None


class Buffers:
    """Activations of up to ``tokens`` rows.

    Parameters
    ----------
    tokens : int
    hidden, query : int
        Widths of the residual stream and of all query heads.
    """

    def __init__(self, tokens: int, hidden: int, query: int) -> None:
        cupy = import_cupy()
        self.tokens = tokens
        self.h = cupy.empty((tokens, hidden), cupy.float32)
        self.delta = cupy.empty((tokens, hidden), cupy.float32)
        self.x = cupy.empty((tokens, hidden), cupy.float16)
        self.q = cupy.empty((tokens, query), cupy.float16)
        self.mixed = cupy.empty((tokens, query), cupy.float16)
        self._scratch: dict[Any, Any] = {}

    def of(self, key: Any, make: Any) -> Any:
        """A buffer that layers of one shape share; made at first use (never while a graph is captured)."""
        if key not in self._scratch:
            self._scratch[key] = make()
        return self._scratch[key]


class KeyValueCache:
    """Keys and values of all layers.

    Parameters
    ----------
    layers, sequences, kv_heads, capacity, head_dim : int
    """

    def __init__(self, layers: int, sequences: int, kv_heads: int, capacity: int, head_dim: int) -> None:
        cupy = import_cupy()
        self.capacity = -(-capacity // CHUNK) * CHUNK
        self.store = cupy.zeros((layers, 2, sequences, kv_heads, self.capacity, head_dim), cupy.float16)

    @property
    def splits(self) -> int:
        """Splits of attention at full length."""
        return self.capacity // CHUNK

    def of(self, layer: int, sequence: int = 0) -> tuple[Any, Any]:
        """Keys and values of a layer from a sequence on."""
        return self.store[layer, 0, sequence:], self.store[layer, 1, sequence:]


class CardMlp:
    """``down(act(gate(x)) * up(x))`` on the card.

    Parameters
    ----------
    gate_up : Product
        Of the parts gate and up.
    down : Product
    act : str
    """

    def __init__(self, gate_up: Product, down: Product, act: str) -> None:
        self.gate_up, self.down, self._kind = gate_up, down, _GATES[act]
        self.products = (gate_up, down)

    def __call__(self, x: Any, buffers: Buffers, tokens: int) -> None:
        """``x`` float16 [tokens, hidden] -> ``buffers.delta``."""
        cupy = import_cupy()
        width = self.down.in_features
        results = buffers.of(("gate_up", self.gate_up.rows), lambda: self.gate_up.buffers(buffers.tokens))
        gated = buffers.of(("gated", width), lambda: cupy.empty((buffers.tokens, width), cupy.float16))
        outs = [r[:tokens] for r in results]
        self.gate_up(x, outs)
        gate, up = self.gate_up.outputs(outs)
        launch(
            "gate_up",
            (-(-width // 256), tokens),
            256,
            [gate.pointer, up.pointer, gate.stride, up.stride, gated, width, self._kind],
        )
        self.down(gated[:tokens], [buffers.delta[:tokens]])


class HostFeedForward:
    """A feed-forward that stays on the CPU (routed experts in host memory): activations go there and back.

    Parameters
    ----------
    block : FeedForward
    pool : Pool
    """

    products = ()

    def __init__(self, block: FeedForward, pool: Any) -> None:
        self.block, self._pool = block, pool

    def __call__(self, x: Any, buffers: Buffers, tokens: int) -> None:
        """See :class:`CardMlp`."""
        import cupy

        given = cupy.asnumpy(x).astype(np.float32)
        buffers.delta[:tokens].set(np.ascontiguousarray(self.block(given, self._pool, None)))


@dataclass(frozen=True)
class CardAttention:
    """Grouped-query attention on the card.

    Parameters
    ----------
    qkv : Product
        Of the parts q, k and v.
    o : Product
    heads, kv_heads, head_dim : int
    q_norm, k_norm : cupy.ndarray of float32, shape (head_dim,), optional
    window : int
        0 for none.
    scale, softcap : float
        ``softcap`` 0 for none.
    sinks : cupy.ndarray of float32, shape (heads,), optional
    eps : float
        Of the norms.
    frequencies : cupy.ndarray of float32, shape (rotated / 2,), optional
        Shared by layers of one kind; its content may change, its address not.
    magnitude : float
        Of the rotary tables.
    """

    qkv: Product
    o: Product
    heads: int
    kv_heads: int
    head_dim: int
    q_norm: Any
    k_norm: Any
    window: int
    scale: float
    softcap: float
    sinks: Any
    eps: float
    frequencies: Any
    magnitude: float

    def __call__(self, x: Any, buffers: Buffers, now: Pass, cache: KeyValueCache, layer: int) -> None:
        """``x`` float16 [tokens, hidden] -> ``buffers.delta``; extends the cache."""
        tokens = now.tokens
        results = buffers.of(("qkv", self.qkv.rows), lambda: self.qkv.buffers(buffers.tokens))
        outs = [r[:tokens] for r in results]
        self.qkv(x, outs)
        q, k, v = self.qkv.outputs(outs)
        keys, values = cache.of(layer)
        projected = [*(o.pointer for o in (q, k, v)), *(o.stride for o in (q, k, v))]
        if now.past is None:
            self._one_token(projected, buffers, now, cache, keys, values)
        else:
            self._many_tokens(projected, buffers, now, cache, keys, values)
        self.o(buffers.mixed[:tokens], [buffers.delta[:tokens]])

    @property
    def _rotated(self) -> int:
        """Numbers of a head that are rotated."""
        return 0 if self.frequencies is None else 2 * int(self.frequencies.size)

    def _many_tokens(
        self, projected: list[Any], buffers: Buffers, now: Pass, cache: KeyValueCache, keys: Any, values: Any
    ) -> None:
        dim, tokens = self.head_dim, now.tokens
        launch(
            "rotate_append",
            (self.heads + 2 * self.kv_heads, tokens),
            -(-dim // 32) * 32,
            [
                *projected, buffers.q, keys, values, self.q_norm, self.k_norm, self.frequencies, now.position,
                now.sequence, self.heads, self.kv_heads, dim, cache.capacity, self._rotated, self.magnitude,
                self.eps,
            ],
            4 * dim,
        )  # fmt: skip
        arguments = [
            buffers.q, keys, values, buffers.mixed, self.sinks, tokens, now.past, self.heads, self.kv_heads,
            cache.capacity, self.window, self.scale, self.softcap,
        ]  # fmt: skip
        kernel = kernels(f"prefill_f16_{dim}")["attend_prefill"]
        grid = (-(-tokens // _TILE), self.heads)
        kernel.launch(grid, 128, [card_argument(a) for a in arguments], 2 * _TILE * dim * 2, early=True)

    def _one_token(
        self, projected: list[Any], buffers: Buffers, now: Pass, cache: KeyValueCache, keys: Any, values: Any
    ) -> None:
        cupy = import_cupy()
        dim, splits, group = self.head_dim, cache.splits, self.heads // self.kv_heads
        size = buffers.tokens * self.heads * splits * (dim + 2)
        partial = buffers.of(("partial", size), lambda: cupy.empty(size, cupy.float32))
        counters = buffers.tokens * self.kv_heads
        arrived = buffers.of(("arrived", counters), lambda: cupy.zeros(counters, cupy.int32))
        lanes = 1 << (max(1, dim // 8) - 1).bit_length()
        launch(
            "attend_step",
            (splits, self.kv_heads, now.tokens),
            _ATTENTION_THREADS,
            [
                *projected, keys, values, self.q_norm, self.k_norm, self.frequencies, now.position, partial,
                arrived, buffers.mixed, self.sinks, self.kv_heads, group, dim, lanes, cache.capacity,
                self._rotated, self.window, self.magnitude, self.eps, self.scale, self.softcap,
            ],
            4 * (group * dim + group * CHUNK + 8 * _ATTENTION_THREADS + self._rotated),
        )  # fmt: skip


@dataclass(frozen=True)
class CardLayer:
    """One layer; norms are device arrays of float32, or None."""

    attention: CardAttention
    ffn: CardMlp | HostFeedForward
    attn_norm: Any
    attn_post_norm: Any
    ffn_norm: Any
    ffn_post_norm: Any

    @property
    def on_host(self) -> bool:
        """Whether a part of it runs on the CPU, so that no graph can hold it."""
        return isinstance(self.ffn, HostFeedForward)

    @property
    def products(self) -> tuple[Product, ...]:
        """Products on the card."""
        return (self.attention.qkv, self.attention.o, *self.ffn.products)


def _weight(norm: Norm | None) -> Any:
    return None if norm is None else import_cupy().asarray(np.ascontiguousarray(norm.weight, np.float32))


def build_card_layer(weights: Weights, layer: int, workspace: Workspace, frequencies: Any) -> CardLayer:
    """Upload a layer of a model that ``check_support`` took.

    Parameters
    ----------
    weights : Weights
    layer : int
    workspace : Workspace
    frequencies : cupy.ndarray of float32, optional
        Of this layer's rotary embedding.
    """
    config = weights.config
    _, ffn = config.architecture.blocks(config, layer)
    rope = config.ropes[layer]
    scale = config.attention_scale
    sinks = weights.find("sinks", layer)
    attention = CardAttention(
        build_product(weights, ("q", "k", "v"), layer, workspace),
        build_product(weights, ("o",), layer, workspace),
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        q_norm=_weight(weights.norm_if_any("q_norm", layer)),
        k_norm=_weight(weights.norm_if_any("k_norm", layer)),
        window=config.windows[layer] or 0,
        scale=float(config.head_dim**-0.5 if scale is None else scale),
        softcap=float(config.attention_softcap or 0.0),
        sinks=None if sinks is None else import_cupy().asarray(weights.vector("sinks", layer)),
        eps=config.rms_norm_eps,
        frequencies=frequencies,
        magnitude=1.0 if rope is None else float(rope.magnitude),
    )
    block: CardMlp | HostFeedForward
    if ffn == "mlp":
        block = CardMlp(
            build_product(weights, ("gate", "up"), layer, workspace),
            build_product(weights, ("down",), layer, workspace),
            config.hidden_act,
        )
    else:
        block = HostFeedForward(FEED_FORWARDS[ffn](weights, layer), weights.pool)
    return CardLayer(
        attention,
        block,
        *(
            _weight(weights.norm_if_any(part, layer))
            for part in ("attn_norm", "attn_post_norm", "ffn_norm", "ffn_post_norm")
        ),
    )
