"""Entries of the architecture table: families with routed experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trapetum.errors import UnsupportedModelError
from trapetum.models.architecture import Architecture
from trapetum.models.experts import (
    SECTION,
    Routing,
    expert_modules,
    expert_routing,
    is_dense,
    is_sparse,
    shared_modules,
    sparse_blocks,
)
from trapetum.models.families import (
    ATTENTION,
    LAYER,
    MLP,
    PRE_NORMS,
    attention_modules,
    mlp_modules,
    outer_modules,
)
from trapetum.models.layer_types import FULL, SLIDING, listed_types, sliding_where_given, window_layers
from trapetum.models.modules import Module

__all__ = ["EXPERTS"]


def _modules(attention: tuple[Module, ...], feed_forward: tuple[Module, ...]) -> tuple[Module, ...]:
    embed, final_norm, head = outer_modules()
    attn_norm, ffn_norm = PRE_NORMS
    return (embed, attn_norm, *attention, ffn_norm, *feed_forward, final_norm, head)


def _router(template: str, *, part: str = "router", rows: str = "experts", bias: str = "") -> Module:
    return Module(part, "router", template, (rows, "hidden"), bias, where=is_sparse)


_DENSE = tuple(replace(m, where=is_dense) for m in mlp_modules())
# One norm for all heads together.
_WIDE_NORMS = (
    Module("q_norm", "norm", ATTENTION + "q_norm", ("query",)),
    Module("k_norm", "norm", ATTENTION + "k_norm", ("key_value",)),
)


def _one_window(given: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    """Qwen3-MoE: every layer has the window where it is switched on."""
    on = given.get("use_sliding_window") and given.get("sliding_window")
    return (SLIDING if on else FULL,) * layers


def _below_window(given: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    """Qwen2-MoE: where the window is switched on, every other layer below ``max_window_layers`` has it."""
    on, below = given.get("use_sliding_window"), window_layers(given)
    return listed_types(given, layers) or tuple(
        SLIDING if on and i % 2 == 0 and i < below else FULL for i in range(layers)
    )


def _alternating_from_first(given: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    """gpt-oss: layers 0, 2, 4 ... have the window."""
    return listed_types(given, layers) or tuple(FULL if i % 2 else SLIDING for i in range(layers))


def _unclipped(given: Mapping[str, Any]) -> Routing:
    """OLMoE, whose old variants clip queries, keys and values."""
    if given.get("clip_qkv") is not None:
        raise UnsupportedModelError(
            f"config.json: clip_qkv is {given['clip_qkv']!r}; it is not computed here"
        )
    return expert_routing(size="intermediate_size")(given)


EXPERTS: tuple[Architecture, ...] = (
    Architecture(
        "mixtral",
        ("MixtralForCausalLM",),
        _modules(
            attention_modules(),
            (
                _router(LAYER + "block_sparse_moe.gate"),
                *expert_modules(LAYER + "block_sparse_moe.", ("w1", "w3", "w2"), stem=MLP),
            ),
        ),
        {"num_key_value_heads": 8, "rope_theta": 1e6},
        layer_types=sliding_where_given,
        blocks=sparse_blocks,
        sections={SECTION: expert_routing(size="intermediate_size", normalise=True)},
        gguf="llama",
    ),
    Architecture(
        "qwen2_moe",
        ("Qwen2MoeForCausalLM",),
        _modules(
            attention_modules(qkv_bias="attention_bias"),
            (
                *_DENSE,
                _router(MLP + "gate"),
                *expert_modules(MLP),
                _router(MLP + "shared_expert_gate", part="shared_router", rows="1"),
                *shared_modules(MLP + "shared_expert."),
            ),
        ),
        {"num_key_value_heads": 16, "sliding_window": 4096, "attention_bias": True},
        aliases={"qkv_bias": "attention_bias"},
        layer_types=_below_window,
        blocks=sparse_blocks,
        sections={SECTION: expert_routing(shared="shared_expert_intermediate_size")},
        gguf="qwen2moe",
    ),
    Architecture(
        "qwen3_moe",
        ("Qwen3MoeForCausalLM",),
        _modules(
            attention_modules(qk_norm=True, qkv_bias="attention_bias", o_bias="attention_bias"),
            (*_DENSE, _router(MLP + "gate"), *expert_modules(MLP)),
        ),
        {"num_key_value_heads": 4, "sliding_window": 4096},
        layer_types=_one_window,
        blocks=sparse_blocks,
        sections={SECTION: expert_routing()},
        gguf="qwen3moe",
    ),
    Architecture(
        "olmoe",
        ("OlmoeForCausalLM",),
        _modules(
            (*attention_modules(qkv_bias="attention_bias", o_bias="attention_bias"), *_WIDE_NORMS),
            (_router(MLP + "gate"), *expert_modules(MLP)),
        ),
        blocks=sparse_blocks,
        sections={SECTION: _unclipped},
        gguf="olmoe",
    ),
    Architecture(
        "gpt_oss",
        ("GptOssForCausalLM",),
        _modules(
            (
                *attention_modules(qkv_bias="attention_bias", o_bias="attention_bias"),
                Module("sinks", "vector", ATTENTION + "sinks", ("heads",), suffix=""),
            ),
            (
                _router(MLP + "router", bias="always"),
                *expert_modules(MLP, bias="always", first="stacked"),
            ),
        ),
        {
            "num_key_value_heads": 8,
            "head_dim": 64,
            "attention_bias": True,
            "sliding_window": 128,
            "rope_theta": 150000.0,
        },
        layer_types=_alternating_from_first,
        blocks=sparse_blocks,
        sections={
            SECTION: expert_routing(
                size="intermediate_size", router="softmax_chosen", normalise=True, activation="clamped"
            )
        },
        gguf="gpt-oss",
    ),
)
