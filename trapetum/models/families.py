"""Entries of the architecture table: the dense families. Others keep theirs beside their own options.

An entry is data: names, defaults and choices. What differs from the Llama lineage by a norm or a bias is an argument of
:func:`llama_modules`. docs/architectures.md says how a family is added.
"""

from __future__ import annotations

from dataclasses import replace

from trapetum.models.architecture import Architecture
from trapetum.models.layer_types import (
    alternating,
    sliding_where_given,
    sliding_without_rotary,
    switched,
)
from trapetum.models.modules import Module

__all__ = ["DENSE", "attention_modules", "llama_modules", "mlp_modules", "outer_modules"]

LAYER = "model.layers.{layer}."
ATTENTION, MLP = LAYER + "self_attn.", LAYER + "mlp."


def outer_modules(*, offset: float = 0.0) -> tuple[Module, ...]:
    """Embedding, final norm and head."""
    return (
        Module("embed", "embed", "model.embed_tokens", ("vocab", "hidden")),
        Module("final_norm", "norm", "model.norm", ("hidden",), offset=offset),
        Module("head", "head", "lm_head", ("vocab", "hidden")),
    )


def attention_modules(
    *, qkv_bias: str = "", o_bias: str = "", qk_norm: bool = False, offset: float = 0.0
) -> tuple[Module, ...]:
    """Grouped-query attention; ``qk_norm``: with a norm of each head of queries and keys."""
    modules = (
        Module("q", "q", ATTENTION + "q_proj", ("query", "hidden"), qkv_bias, reads="q"),
        Module("k", "k", ATTENTION + "k_proj", ("key_value", "hidden"), qkv_bias, reads="q"),
        Module("v", "v", ATTENTION + "v_proj", ("key_value", "hidden"), qkv_bias, reads="q"),
        Module("o", "o", ATTENTION + "o_proj", ("hidden", "query"), o_bias),
    )
    norms = tuple(
        Module(f"{part}_norm", "norm", ATTENTION + f"{part}_norm", ("head",), offset=offset) for part in "qk"
    )
    return modules + norms if qk_norm else modules


def mlp_modules(*, bias: str = "") -> tuple[Module, ...]:
    """Gated feed-forward."""
    return (
        Module("gate", "gate", MLP + "gate_proj", ("intermediate", "hidden"), bias, reads="gate"),
        Module("up", "up", MLP + "up_proj", ("intermediate", "hidden"), bias, reads="gate"),
        Module("down", "down", MLP + "down_proj", ("hidden", "intermediate"), bias),
    )


def norm_modules(*, offset: float = 0.0, **names: str) -> tuple[Module, ...]:
    """Norms of a layer, part -> the checkpoint's name."""
    return tuple(
        Module(part, "norm", LAYER + name, ("hidden",), offset=offset) for part, name in names.items()
    )


PRE_NORMS = norm_modules(attn_norm="input_layernorm", ffn_norm="post_attention_layernorm")


# Gemma: a norm before and after each block; every norm stores its weight less one.
GEMMA_NORMS = norm_modules(
    offset=1.0,
    attn_norm="input_layernorm",
    attn_post_norm="post_attention_layernorm",
    ffn_norm="pre_feedforward_layernorm",
    ffn_post_norm="post_feedforward_layernorm",
)
# OLMo-2: norms after the blocks only.
POST_NORMS = norm_modules(
    attn_post_norm="post_attention_layernorm", ffn_post_norm="post_feedforward_layernorm"
)
# One norm for all heads together.
WHOLE_NORMS = (
    Module("q_norm", "norm", ATTENTION + "q_norm", ("query",)),
    Module("k_norm", "norm", ATTENTION + "k_norm", ("key_value",)),
)
_QKV = (("q", "query"), ("k", "key_value"), ("v", "key_value"))
_GATE_UP = (("gate", "intermediate"), ("up", "intermediate"))


def _fused_modules() -> tuple[Module, ...]:
    """Phi-3: q, k and v are one tensor, gate and up another."""
    embed, final_norm, head = outer_modules()
    attn_norm, ffn_norm = PRE_NORMS
    qkv, gate_up = "query+key_value+key_value", "intermediate+intermediate"
    return (
        embed,
        attn_norm,
        Module("qkv", "qkv", ATTENTION + "qkv_proj", (qkv, "hidden"), holds=_QKV, reads="q"),
        Module("o", "o", ATTENTION + "o_proj", ("hidden", "query")),
        ffn_norm,
        Module("gate_up", "gate_up", MLP + "gate_up_proj", (gate_up, "hidden"), holds=_GATE_UP, reads="gate"),
        Module("down", "down", MLP + "down_proj", ("hidden", "intermediate")),
        final_norm,
        head,
    )


def _gemma_modules(*, qk_norm: bool, post_norms: bool = True) -> tuple[Module, ...]:
    embed, final_norm, head = outer_modules(offset=1.0)
    attention = attention_modules(
        qkv_bias="attention_bias", o_bias="attention_bias", qk_norm=qk_norm, offset=1.0
    )
    norms = GEMMA_NORMS if post_norms else tuple(replace(norm, offset=1.0) for norm in PRE_NORMS)
    return (embed, *norms, *attention, *mlp_modules(), final_norm, head)


def _olmo2_modules() -> tuple[Module, ...]:
    embed, final_norm, head = outer_modules()
    attention = attention_modules(qkv_bias="attention_bias", o_bias="attention_bias")
    return (embed, *attention, *WHOLE_NORMS, *mlp_modules(), *POST_NORMS, final_norm, head)


def llama_modules(
    *, qk_norm: bool = False, qkv_bias: str = "", o_bias: str = "", mlp_bias: str = ""
) -> tuple[Module, ...]:
    """Modules of the Llama lineage, in the order of a forward pass."""
    embed, final_norm, head = outer_modules()
    attn_norm, ffn_norm = PRE_NORMS
    attention = attention_modules(qkv_bias=qkv_bias, o_bias=o_bias, qk_norm=qk_norm)
    return (embed, attn_norm, *attention, ffn_norm, *mlp_modules(bias=mlp_bias), final_norm, head)


# Granite: of embeddings, of what blocks add, of scores, and what logits are divided by.
_MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
_GEMMA_OPTIONS = frozenset({"query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"})
_GEMMA_ALIASES = {"hidden_activation": "hidden_act", "_sliding_window_pattern": "sliding_window_pattern"}

DENSE: tuple[Architecture, ...] = (
    Architecture(
        "llama",
        ("LlamaForCausalLM",),
        llama_modules(qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias="mlp_bias"),
        cbk="CBK3",
        gguf="llama",
    ),
    Architecture(
        "mistral",
        ("MistralForCausalLM",),
        llama_modules(),
        {"num_key_value_heads": 8, "sliding_window": 4096},
        layer_types=sliding_where_given,
        cbk="CBK3",
        gguf="llama",
    ),
    Architecture(
        "qwen2",
        ("Qwen2ForCausalLM",),
        llama_modules(qkv_bias="always"),
        {"sliding_window": 4096},
        layer_types=switched,
        cbk="CBK3",
        gguf="qwen2",
    ),
    Architecture(
        "qwen3",
        ("Qwen3ForCausalLM",),
        llama_modules(qk_norm=True, qkv_bias="attention_bias", o_bias="attention_bias"),
        {"head_dim": 128, "sliding_window": 4096},
        layer_types=switched,
        gguf="qwen3",
    ),
    Architecture(
        "phi3",
        ("Phi3ForCausalLM",),
        _fused_modules(),
        {"original_max_position_embeddings": 4096, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        options=frozenset({"partial_rotary_factor"}),
        layer_types=sliding_where_given,
        cbk="CBK3",
        gguf="phi3",
    ),
    Architecture(
        "gemma",
        ("GemmaForCausalLM",),
        _gemma_modules(qk_norm=False, post_norms=False),
        {
            "num_key_value_heads": 16,
            "head_dim": 256,
            "hidden_act": "gelu_pytorch_tanh",
            "max_position_embeddings": 8192,
        },
        aliases=_GEMMA_ALIASES,
        acts={"gelu": "gelu_pytorch_tanh"},  # the first releases
        embedding_scale=True,
        gguf="gemma",
    ),
    Architecture(
        "gemma2",
        ("Gemma2ForCausalLM",),
        _gemma_modules(qk_norm=False),
        {
            "num_key_value_heads": 4,
            "head_dim": 256,
            "hidden_act": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "sliding_window_pattern": 2,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "max_position_embeddings": 8192,
        },
        options=_GEMMA_OPTIONS,
        aliases=_GEMMA_ALIASES,
        layer_types=alternating,
        embedding_scale=True,
        cbk="CBKG",
        gguf="gemma2",
    ),
    Architecture(
        "gemma3_text",
        ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
        _gemma_modules(qk_norm=True),
        {  # config.json of the published models says little more than the sizes
            "vocab_size": 262_208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "hidden_act": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "max_position_embeddings": 131_072,
        },
        options=_GEMMA_OPTIONS | {"rope_local_base_freq"},
        aliases=_GEMMA_ALIASES,
        layer_types=alternating,
        embedding_scale=True,
        gguf="gemma3",
    ),
    Architecture(
        "granite",
        ("GraniteForCausalLM",),
        llama_modules(qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias="mlp_bias"),
        {"max_position_embeddings": 2048, **dict.fromkeys(_MULTIPLIERS, 1.0)},
        options=frozenset(_MULTIPLIERS),
        gguf="granite",
    ),
    Architecture(
        "seed_oss",
        ("SeedOssForCausalLM",),
        llama_modules(qkv_bias="attention_bias", mlp_bias="mlp_bias"),
        {
            "num_key_value_heads": 8,
            "head_dim": 128,
            "attention_bias": True,
            "max_position_embeddings": 524_288,
        },
        cbk="CBK3",
        gguf="seed_oss",
    ),
    Architecture(
        "smollm3",
        ("SmolLM3ForCausalLM",),
        llama_modules(qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias="mlp_bias"),
        {"num_key_value_heads": 4, "rope_theta": 2e6, "max_position_embeddings": 32768},
        options=frozenset({"no_rope_layers"}),
        layer_types=sliding_without_rotary,
        gguf="smollm3",
    ),
    Architecture(
        "olmo2",
        ("Olmo2ForCausalLM",),
        _olmo2_modules(),
        {"rms_norm_eps": 1e-5, "max_position_embeddings": 2048},
        gguf="olmo2",
    ),
    Architecture(
        "olmo3",
        ("Olmo3ForCausalLM",),
        _olmo2_modules(),
        {
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 2048,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "rope_theta": 500000.0,
        },
        options=frozenset({"rope_local_base_freq"}),
        layer_types=alternating,
        gguf="olmo2",
    ),
)
