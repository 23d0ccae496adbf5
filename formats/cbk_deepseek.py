"""The DeepSeek magics of .cbk files as data: CBKD, CBKE, CBKR, CBKS, CBKV and MTP1.

They share one walk: attention over latents, then a dense feed-forward block or a router, experts and a shared expert.
What sets them apart: whether queries pass through a latent (``q_lora``: R, S, V), whether a header field chooses 8-bit
matrices for the shared expert and the head (``prec_flags``: E, S) or additive codebooks for the routed experts
(``experts_avq``: V). MTP1 is one such layer and what joins it to a model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trapetum.formats.cbk_records import Block, CbkLayout, Item, Rule
from trapetum.formats.cbk_rules import (
    above_zero,
    between,
    even,
    multiple_of_256,
    positive,
    power_of_two,
    small,
)

__all__ = ["DEEPSEEK_LAYOUTS", "HEAD_8BIT", "SHARED_8BIT"]

Sizes = Mapping[str, int]
Fields = tuple[tuple[str, str], ...]

SHARED_8BIT, HEAD_8BIT = 1, 2
"""Bits of ``prec_flags``."""


def _ints(*names: str) -> Fields:
    return tuple((name, "i") for name in names)


_FLOATS: Fields = (("eps", "f"), ("softmax_scale", "f"), ("routed_scale", "f"))
_HEADS = ("hidden", "n_heads", "kv_lora", "nope", "rope", "v_head_dim")
_BASE = _ints(
    "n_layers",
    *_HEADS,
    "inter_pad",
    "moe_inter_pad",
    "n_routed",
    "n_shared",
    "top_k",
    "vocab",
    "first_k_dense",
)
_GROUPS = _ints("q_lora", "n_group", "topk_group", "sigmoid")
_MTP = _ints(
    *_HEADS,
    "q_lora",
    "moe_inter_pad",
    "n_routed",
    "n_shared",
    "top_k",
    "n_group",
    "topk_group",
    "sigmoid",
    "tied_embed",
    "tied_head",
)

_DERIVED: dict[str, Callable[[Sizes], int]] = {
    "half_rope": lambda s: s["rope"] // 2,
    "query": lambda s: s["n_heads"] * (s["nope"] + s["rope"]),
    "latent": lambda s: s["kv_lora"] + s["rope"],
    "key_value": lambda s: s["n_heads"] * (s["nope"] + s["v_head_dim"]),
    "values": lambda s: s["n_heads"] * s["v_head_dim"],
    "shared_inter": lambda s: -(-s["n_shared"] * s["moe_inter_pad"] // 256) * 256,
    "hidden_twice": lambda s: 2 * s["hidden"],
    "n_routed % n_group": lambda s: s["n_routed"] % s.get("n_group", 1) if s.get("n_group", 1) > 0 else 1,
}


def _is_dense(sizes: Sizes) -> bool:
    return sizes["layer"] < sizes["first_k_dense"]


def _is_sparse(sizes: Sizes) -> bool:
    return not _is_dense(sizes)


def _expert_kind(sizes: Sizes) -> str:
    return f"A{sizes['experts_avq']}" if "experts_avq" in sizes else "S16"


def _by_flag(bit: int) -> Callable[[Sizes], str]:
    return lambda sizes: "S256" if sizes.get("prec_flags", 0) & bit else "S16"


def _gated(prefix: str, inter: str, kind: str | Callable[[Sizes], str] = "S16") -> tuple[Item, ...]:
    return (
        Item(prefix + "gate_proj.weight", kind, (inter, "hidden")),
        Item(prefix + "up_proj.weight", kind, (inter, "hidden")),
        Item(prefix + "down_proj.weight", kind, ("hidden", inter)),
    )


def _attention(layer: str, q_lora: bool) -> tuple[Item, ...]:
    """Dense matrices where queries are projected at once; 4-bit q_b and o where they pass through a latent."""
    part = layer + "self_attn."
    queries = (
        (
            Item(part + "q_a_proj.weight", "f16", ("q_lora", "hidden")),
            Item(part + "q_a_layernorm.weight", "f32", ("q_lora",)),
            Item(part + "q_b_proj.weight", "S16", ("query", "q_lora")),
        )
        if q_lora
        else (Item(part + "q_proj.weight", "f16", ("query", "hidden")),)
    )
    return (
        Item(layer + "input_layernorm.weight", "f32", ("hidden",)),
        *queries,
        Item(part + "kv_a_proj_with_mqa.weight", "f16", ("latent", "hidden")),
        Item(part + "kv_a_layernorm.weight", "f32", ("kv_lora",)),
        Item(part + "kv_b_proj.weight", "f16", ("key_value", "kv_lora")),
        Item(part + "o_proj.weight", "S16" if q_lora else "f16", ("hidden", "values")),
        Item(layer + "post_attention_layernorm.weight", "f32", ("hidden",)),
    )


def _experts(layer: str, q_lora: bool) -> tuple[Item | Block, ...]:
    """Router (with its score bias, which a reader of the q_lora magics always expects), experts, shared expert."""
    mlp = layer + "mlp."
    bias = (Item(mlp + "gate.e_score_correction_bias", "f32", ("n_routed",)),) if q_lora else ()
    return (
        *bias,
        Item(mlp + "gate.weight", "f16", ("n_routed", "hidden")),
        Block("expert", "n_routed", _gated(mlp + "experts.{expert}.", "moe_inter_pad", _expert_kind)),
        *_gated(mlp + "shared_experts.", "shared_inter", _by_flag(SHARED_8BIT)),
    )


def _walk(q_lora: bool) -> tuple[Item | Block, ...]:
    layer = "model.layers.{layer}."
    return (
        Item("model.embed_tokens.weight", "f16", ("vocab", "hidden")),
        Block(
            "layer",
            "n_layers",
            (
                *_attention(layer, q_lora),
                Block("", "one", _gated(layer + "mlp.", "inter_pad"), _is_dense),
                Block("", "one", _experts(layer, q_lora), _is_sparse),
            ),
        ),
        Item("model.norm.weight", "f32", ("hidden",)),
        Item("lm_head.weight", _by_flag(HEAD_8BIT), ("vocab", "hidden")),
    )


_MTP_WALK = (
    Item("enorm.weight", "f32", ("hidden",)),
    Item("hnorm.weight", "f32", ("hidden",)),
    Item("eh_proj.weight", "S16", ("hidden", "hidden_twice")),
    *_attention("", True),
    *_experts("", True),
    Item("shared_head.norm.weight", "f32", ("hidden",)),
)

_SHARED_RULES = (
    multiple_of_256("hidden", "hidden_size"),
    positive("n_heads", "num_attention_heads"),
    power_of_two("kv_lora", "kv_lora_rank"),
    positive("nope", "qk_nope_head_dim"),
    even("rope", "qk_rope_head_dim"),
    positive("v_head_dim", "v_head_dim"),
    multiple_of_256("moe_inter_pad", "the padded moe_intermediate_size"),
    between("n_routed", "n_routed_experts", 1, 65536),
    between("top_k", "num_experts_per_tok", 1, 65536),
    Rule("top_k - n_routed", "num_experts_per_tok - n_routed_experts", "0 or less", lambda n: n <= 0),
    small("eps", "rms_norm_eps"),
    above_zero("softmax_scale", "the softmax scale"),
    above_zero("routed_scale", "routed_scaling_factor"),
)
_MODEL_RULES = (
    between("n_layers", "num_hidden_layers", 1, 4096),
    multiple_of_256("vocab", "the padded vocabulary"),
    multiple_of_256("dense_inter_pad", "the padded intermediate_size"),
    between("first_k_dense", "first_k_dense_replace", 0, 4096),
    Rule(
        "first_k_dense - n_layers",
        "first_k_dense_replace - num_hidden_layers",
        "0 or less",
        lambda n: n <= 0,
    ),
)
# A reader of these magics gives the shared expert the width of one routed expert, whatever n_shared says.
_QUERY_RULES = (
    even("q_lora", "q_lora_rank"),
    multiple_of_256("query", "num_attention_heads * (qk_nope_head_dim + qk_rope_head_dim)"),
    even("values", "num_attention_heads * v_head_dim"),
    between("n_shared", "n_shared_experts", 1, 1),
    between("n_group", "n_group", 1, 65536),
    between("topk_group", "topk_group", 1, 65536),
    Rule("n_routed % n_group", "n_routed_experts % n_group", "0", lambda n: n == 0),
    Rule("topk_group - n_group", "topk_group - n_group", "0 or less", lambda n: n <= 0),
    between("sigmoid", "sigmoid", 0, 1),
)
_DERIVED |= {
    "one": lambda s: 1,
    "dense_inter_pad": lambda s: (
        s["inter_pad"] if s.get("first_k_dense") else 256
    ),  # unused without dense layers
    "top_k - n_routed": lambda s: s["top_k"] - s["n_routed"],
    "first_k_dense - n_layers": lambda s: s.get("first_k_dense", 0) - s.get("n_layers", 0),
    "topk_group - n_group": lambda s: s.get("topk_group", 0) - s.get("n_group", 0),
}

_CONFIG_KEYS = {
    "num_hidden_layers": "n_layers",
    "hidden_size": "hidden",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_heads",
    "kv_lora_rank": "kv_lora",
    "qk_nope_head_dim": "nope",
    "qk_rope_head_dim": "rope",
    "v_head_dim": "v_head_dim",
    "intermediate_size": "inter_pad",
    "moe_intermediate_size": "moe_inter_pad",
    "n_routed_experts": "n_routed",
    "n_shared_experts": "n_shared",
    "num_experts_per_tok": "top_k",
    "vocab_size": "vocab",
    "first_k_dense_replace": "first_k_dense",
    "rms_norm_eps": "eps",
    "routed_scaling_factor": "routed_scale",
    "trapetum_softmax_scale": "softmax_scale",
}


def _config(values: Mapping[str, int | float]) -> dict[str, Any]:
    """What the runtimes of the format compute: weights always renormalised, groups with the sigmoid router only."""
    common: dict[str, Any] = {
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "norm_topk_prob": True,
        "q_lora_rank": values.get("q_lora"),
    }
    if values.get("sigmoid"):
        groups = {"n_group": values["n_group"], "topk_group": values["topk_group"]}
        return {**common, **groups, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    return {
        **common,
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "topk_method": "greedy",
    }


def _mtp_config(values: Mapping[str, int | float]) -> dict[str, Any]:
    return {"architectures": ["MTP1, a prediction block without its model"], "model_type": "mtp1"}


def _layout(magic: str, q_lora: bool, choice: Fields = (), rules: tuple[Rule, ...] = ()) -> CbkLayout:
    return CbkLayout(
        magic=magic,
        fields=(*_BASE, *(_GROUPS if q_lora else ()), *choice, *_FLOATS),
        derived=_DERIVED,
        inv_freq="half_rope",
        stored_inv_freq=True,
        walk=_walk(q_lora),
        rules=(
            *_MODEL_RULES,
            *_SHARED_RULES,
            *(_QUERY_RULES if q_lora else (between("n_shared", "n_shared_experts", 1, 4096),)),
            *rules,
        ),
        config=_config,
        config_keys=_CONFIG_KEYS,
    )


_FLAGS = (between("prec_flags", "prec_flags", 0, SHARED_8BIT | HEAD_8BIT),)
DEEPSEEK_LAYOUTS = (
    _layout("CBKD", False),
    _layout("CBKE", False, _ints("prec_flags"), _FLAGS),
    _layout("CBKR", True),
    _layout("CBKS", True, _ints("prec_flags"), _FLAGS),
    _layout("CBKV", True, _ints("experts_avq"), (between("experts_avq", "experts_avq", 2, 3),)),
    CbkLayout(
        magic="MTP1",
        fields=(*_MTP, *_FLOATS),
        derived=_DERIVED,
        inv_freq="half_rope",
        stored_inv_freq=True,
        walk=_MTP_WALK,
        rules=(
            *_SHARED_RULES,
            *_QUERY_RULES,
            # nothing that reads the format takes an embedding or a head of its own
            between("tied_embed", "tied_embed", 1, 1),
            between("tied_head", "tied_head", 1, 1),
        ),
        config=_mtp_config,
        config_keys={},
    ),
)
"""One entry a magic, for ``formats.cbk_layouts.CBK_LAYOUTS``."""
