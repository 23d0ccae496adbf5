"""Entries of the architecture table: the dense families. Others keep theirs beside their own options.

An entry is data: names, defaults and choices. What differs from the Llama lineage by a norm or a bias is an argument of
:func:`llama_modules`. docs/architectures.md says how a family is added.
"""

from __future__ import annotations

from trapetum.models.architecture import Architecture
from trapetum.models.layer_types import sliding_where_given, switched
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


def llama_modules(
    *, qk_norm: bool = False, qkv_bias: str = "", o_bias: str = "", mlp_bias: str = ""
) -> tuple[Module, ...]:
    """Modules of the Llama lineage, in the order of a forward pass."""
    embed, final_norm, head = outer_modules()
    attn_norm, ffn_norm = PRE_NORMS
    attention = attention_modules(qkv_bias=qkv_bias, o_bias=o_bias, qk_norm=qk_norm)
    return (embed, attn_norm, *attention, ffn_norm, *mlp_modules(bias=mlp_bias), final_norm, head)


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
)
