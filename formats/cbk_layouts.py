"""The magics of .cbk files, one table: CBK1 to CBK3 and CBKG here, the DeepSeek ones in ``formats.cbk_deepseek``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trapetum.formats.cbk_deepseek import DEEPSEEK_LAYOUTS
from trapetum.formats.cbk_records import Block, CbkLayout, Item, Rule
from trapetum.formats.cbk_rules import (
    between,
    multiple_of_256,
    not_negative,
    positive,
    power_of_two,
    small,
)

__all__ = ["CBK_LAYOUTS"]

Sizes = Mapping[str, int]

# S16 kernels take 256 output columns at a time; head_dim is reduced in a tree with one thread an element.
_LLAMA_RULES = (
    # bounds the walk of a file whose header is garbage: a million layers would take half a minute to refuse
    between("n_layers", "num_hidden_layers", 1, 4096),
    positive("n_heads", "num_attention_heads"),
    positive("n_kv", "num_key_value_heads"),
    Rule("n_heads % n_kv", "num_attention_heads % num_key_value_heads", "0", lambda n: n == 0),
    power_of_two("head_dim", "head_dim"),
    multiple_of_256("hidden", "hidden_size"),
    multiple_of_256("inter", "intermediate_size"),
    multiple_of_256("q_dim", "num_attention_heads * head_dim"),
    multiple_of_256("kv_dim", "num_key_value_heads * head_dim"),
    multiple_of_256("vocab", "the padded vocabulary"),
    small("eps", "rms_norm_eps"),
)


def _has_bias(sizes: Sizes) -> bool:
    return bool(sizes.get("has_bias"))


_LAYER = "model.layers.{layer}."
_ATTENTION = _LAYER + "self_attn."
_EMBED = Item("model.embed_tokens.weight", "f16", ("vocab", "hidden"))
_FEED_FORWARD = (
    Item(_LAYER + "mlp.gate_proj.weight", "S16", ("inter", "hidden")),
    Item(_LAYER + "mlp.up_proj.weight", "S16", ("inter", "hidden")),
    Item(_LAYER + "mlp.down_proj.weight", "S16", ("hidden", "inter")),
)
_END = (
    Item("model.norm.weight", "f32", ("hidden",)),
    Item("lm_head.weight", "S16", ("vocab", "hidden")),
)


def _norm(name: str) -> Item:
    return Item(_LAYER + name + ".weight", "f32", ("hidden",))


def _biased(part: str, rows: str) -> tuple[Item, Item]:
    return (
        Item(f"{_ATTENTION}{part}_proj.weight", "S16", (rows, "hidden")),
        Item(f"{_ATTENTION}{part}_proj.bias", "f32", (rows,), _has_bias),
    )


_ATTENTION_ITEMS = (
    *_biased("q", "q_dim"),
    *_biased("k", "kv_dim"),
    *_biased("v", "kv_dim"),
    Item(_ATTENTION + "o_proj.weight", "S16", ("hidden", "q_dim")),
)
_LLAMA_WALK = (
    _EMBED,
    Block(
        "layer",
        "n_layers",
        (_norm("input_layernorm"), *_ATTENTION_ITEMS, _norm("post_attention_layernorm"), *_FEED_FORWARD),
    ),
    *_END,
)


def _gemma_norm(name: str) -> Item:
    return Item(_LAYER + name + ".weight", "f32", ("hidden",), stored="plus one")


# Norms and embedding are stored as they are multiplied; the head is the embedding of the checkpoint.
_GEMMA_WALK = (
    Item("model.embed_tokens.weight", "f16", ("vocab", "hidden"), stored="times root of hidden"),
    Block(
        "layer",
        "n_layers",
        (
            _gemma_norm("input_layernorm"),
            *_ATTENTION_ITEMS,
            _gemma_norm("post_attention_layernorm"),
            _gemma_norm("pre_feedforward_layernorm"),
            *_FEED_FORWARD,
            _gemma_norm("post_feedforward_layernorm"),
        ),
    ),
    Item("model.norm.weight", "f32", ("hidden",), stored="plus one"),
    Item("lm_head.weight", "S16", ("vocab", "hidden")),
)
_INTS = tuple((n, "i") for n in ("n_layers", "hidden", "n_heads", "n_kv", "head_dim", "inter", "vocab"))
_DERIVED: dict[str, Callable[[Sizes], int]] = {
    "q_dim": lambda s: s["n_heads"] * s["head_dim"],
    "kv_dim": lambda s: s["n_kv"] * s["head_dim"],
    "half_head": lambda s: s["head_dim"] // 2,
    "n_heads % n_kv": lambda s: s["n_heads"] % s["n_kv"] if s["n_kv"] > 0 else s["n_heads"],
}
_CONFIG_KEYS = {
    "num_hidden_layers": "n_layers",
    "hidden_size": "hidden",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv",
    "head_dim": "head_dim",
    "intermediate_size": "inter",
    "vocab_size": "vocab",
    "rms_norm_eps": "eps",
    "rope_theta": "rope_base",
}


def _llama_config(values: Mapping[str, int | float]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }


def _gemma_config(values: Mapping[str, int | float]) -> dict[str, Any]:
    """Gemma 2 as the runtimes of the format compute it: no window."""
    return {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": False,
        "query_pre_attn_scalar": values["head_dim"],
        "attn_logit_softcapping": values["attn_softcap"] or None,
        "final_logit_softcapping": values["final_softcap"] or None,
        "layer_types": ["full_attention"] * int(values["n_layers"]),
    }


def _llama(magic: str, tail: tuple[tuple[str, str], ...], rules: tuple[Rule, ...], stored: bool) -> CbkLayout:
    return CbkLayout(
        magic=magic,
        fields=(*_INTS, ("eps", "f"), ("rope_base", "f"), *tail),
        derived=_DERIVED,
        inv_freq="half_head",
        stored_inv_freq=stored,
        walk=_LLAMA_WALK,
        rules=(*_LLAMA_RULES, *rules),
        config=_llama_config,
        config_keys=_CONFIG_KEYS,
    )


CBK_LAYOUTS: dict[str, CbkLayout] = {
    layout.magic: layout
    for layout in (
        _llama("CBK1", (), (), stored=False),
        _llama("CBK2", (("rope_scale", "f"),), (), stored=False),
        _llama(
            "CBK3",
            (("rope_scale", "f"), ("has_bias", "i")),
            (Rule("has_bias", "has_bias", "0 or 1", lambda n: n in (0, 1)),),
            stored=True,
        ),
        CbkLayout(
            magic="CBKG",
            fields=(
                *_INTS,
                ("eps", "f"),
                ("rope_base", "f"),
                ("attn_softcap", "f"),
                ("final_softcap", "f"),
            ),
            derived=_DERIVED,
            inv_freq="half_head",
            stored_inv_freq=True,
            walk=_GEMMA_WALK,
            rules=(
                *_LLAMA_RULES,
                not_negative("attn_softcap", "attn_logit_softcapping"),
                not_negative("final_softcap", "final_logit_softcapping"),
            ),
            config=_gemma_config,
            config_keys=_CONFIG_KEYS,
        ),
        *DEEPSEEK_LAYOUTS,
    )
}
