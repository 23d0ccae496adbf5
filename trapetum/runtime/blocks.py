"""Builds a layer from a checkpoint: the table of block kinds.

An architecture names the kinds of a layer's mixer and feed-forward (``Architecture.blocks``); a row here builds one
from :class:`~trapetum.runtime.weights.Weights`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from trapetum.runtime.delta import build_delta_net
from trapetum.runtime.layers import Attention, FeedForward, GatedMlp, Layer, Mixer
from trapetum.runtime.mla import build_latent_attention
from trapetum.runtime.moe import build_experts
from trapetum.runtime.weights import Weights

__all__ = ["FEED_FORWARDS", "MIXERS", "build_layer"]


def _attention(weights: Weights, layer: int) -> Attention:
    config = weights.config
    sinks = weights.find("sinks", layer)
    q, k, v, o = (weights.linear(part, layer) for part in ("q", "k", "v", "o"))
    return Attention(
        q,
        k,
        v,
        o,
        head_dim=config.head_dim,
        window=config.windows[layer],
        q_norm=weights.norm_if_any("q_norm", layer),
        k_norm=weights.norm_if_any("k_norm", layer),
        scale=config.attention_scale,
        softcap=config.attention_softcap,
        sinks=None if sinks is None else weights.vector("sinks", layer),
        cache_type=weights.cache_type,
    )


def _gated_attention(weights: Weights, layer: int) -> Attention:
    return replace(_attention(weights, layer), gated=True)


def _mlp(weights: Weights, layer: int) -> GatedMlp:
    gate, up, down = (weights.linear(part, layer) for part in ("gate", "up", "down"))
    return GatedMlp(gate, up, down, weights.config.hidden_act)


MIXERS: dict[str, Callable[[Weights, int], Mixer]] = {
    "attention": _attention,
    "delta_net": build_delta_net,
    "gated_attention": _gated_attention,
    "latent_attention": build_latent_attention,
}
"""Kind -> (weights, layer) -> mixer."""
FEED_FORWARDS: dict[str, Callable[[Weights, int], FeedForward]] = {"mlp": _mlp, "experts": build_experts}
"""Kind -> (weights, layer) -> feed-forward."""


def build_layer(weights: Weights, layer: int) -> Layer:
    """A layer of a model.

    Raises
    ------
    CheckpointError
        If a part is missing.
    """
    config = weights.config
    mixer, ffn = config.architecture.blocks(config, layer)
    return Layer(
        mixer=MIXERS[mixer](weights, layer),
        ffn=FEED_FORWARDS[ffn](weights, layer),
        attn_norm=weights.norm_if_any("attn_norm", layer),
        ffn_norm=weights.norm_if_any("ffn_norm", layer),
        attn_post_norm=weights.norm_if_any("attn_post_norm", layer),
        ffn_post_norm=weights.norm_if_any("ffn_post_norm", layer),
        rope=config.ropes[layer],
    )
