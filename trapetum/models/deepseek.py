"""DeepSeek V2 and V3: multi-head latent attention, routed experts from the best groups, a shared expert.

Tensors of layers beyond ``num_hidden_layers`` (the multi-token prediction block) are no part of the model; the export
of that block (``export.mtp``) names them itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from trapetum.errors import CheckpointError, UnsupportedModelError
from trapetum.models.architecture import Architecture
from trapetum.models.experts import (
    SECTION,
    Routing,
    expert_modules,
    expert_routing,
    is_dense,
    is_sparse,
    shared_modules,
)
from trapetum.models.families import ATTENTION, MLP, PRE_NORMS, mlp_modules, outer_modules
from trapetum.models.modules import Module

if TYPE_CHECKING:
    from trapetum.models.config import ModelConfig

__all__ = ["DEEPSEEK", "LATENT", "LatentOptions"]

LATENT = "latent"
"""Name of the options in ``ModelConfig.sections``."""


@dataclass(frozen=True)
class LatentOptions:
    """Sizes of latent attention.

    Parameters
    ----------
    heads : int
    q_lora : int
        Width of the queries' latent; 0 where queries are projected at once.
    kv_lora : int
        Width of the latent of keys and values.
    nope, rope, value : int
        Widths of a head: key without and with position, value.
    scale : float
        What multiplies scores; YaRN's ``mscale_all_dim`` is part of it.
    interleaved : bool
        Pairs of neighbours are rotated.
    """

    heads: int
    q_lora: int
    kv_lora: int
    nope: int
    rope: int
    value: int
    scale: float
    interleaved: bool = True

    @property
    def dimensions(self) -> Mapping[str, int]:
        """Rows and columns of the projections."""
        return {
            "q_lora": self.q_lora,
            "kv_lora": self.kv_lora,
            "rope": self.rope,
            "nope": self.nope,
            "value": self.value,
            "mla_query": self.heads * (self.nope + self.rope),
            "mla_key_value": self.heads * (self.nope + self.value),
            "mla_value": self.heads * self.value,
        }


def _latent_options(given: Mapping[str, Any]) -> LatentOptions:
    def count(key: str, least: int = 1) -> int:
        value = given.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise CheckpointError(f"config.json: {key} is {value!r}; an integer from {least} on is expected")
        return value

    nope, rope = count("qk_nope_head_dim"), count("qk_rope_head_dim")
    scale = given.get("trapetum_softmax_scale", (nope + rope) ** -0.5 * _mscale(given) ** 2)
    if not isinstance(scale, int | float) or not 0 < scale < math.inf:
        raise CheckpointError(
            f"config.json: trapetum_softmax_scale is {scale!r}; a positive number is expected"
        )
    return LatentOptions(
        heads=count("num_attention_heads"),
        q_lora=0 if given.get("q_lora_rank") is None else count("q_lora_rank"),
        kv_lora=count("kv_lora_rank"),
        nope=nope,
        rope=rope,
        value=count("v_head_dim"),
        scale=float(scale),
        interleaved=given.get("rope_interleave", True) is not False,
    )


def _mscale(given: Mapping[str, Any]) -> float:
    """``0.1 mscale_all_dim ln(factor) + 1``, which DeepSeek's scores have squared under any rope extension."""
    stated = given.get("rope_parameters") or given.get("rope_scaling") or {}
    if not isinstance(stated, Mapping) or stated.get("rope_type", stated.get("type", "default")) == "default":
        return 1.0
    factor, weight = stated.get("factor", 1.0), stated.get("mscale_all_dim", 0)
    numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in (factor, weight))
    if not numbers:
        raise CheckpointError("config.json: factor and mscale_all_dim of the rope must be numbers")
    return 1.0 if factor <= 1 or not weight else 0.1 * weight * math.log(factor) + 1.0


def _routing_v2(given: Mapping[str, Any]) -> Routing:
    method = given.get("topk_method", "greedy")
    routers = {"greedy": "softmax", "group_limited_greedy": "softmax_groups"}
    if method not in routers or given.get("scoring_func", "softmax") != "softmax":
        raise UnsupportedModelError(
            f"config.json: topk_method {method!r} with scoring_func {given.get('scoring_func', 'softmax')!r}; "
            f"{', '.join(routers)} with softmax are supported in the family deepseek_v2"
        )
    groups = {} if method == "group_limited_greedy" else {"n_group": 1, "topk_group": 1}
    routing = expert_routing(router=routers[method], shared="n_shared_experts")({**given, **groups})
    return _checked(routing, 1)


def _routing_v3(given: Mapping[str, Any]) -> Routing:
    scoring, method = given.get("scoring_func", "sigmoid"), given.get("topk_method", "noaux_tc")
    if (scoring, method) != ("sigmoid", "noaux_tc"):
        raise UnsupportedModelError(
            f"config.json: topk_method {method!r} with scoring_func {scoring!r}; noaux_tc with sigmoid is supported "
            "in the family deepseek_v3"
        )
    return _checked(expert_routing(router="sigmoid_groups", shared="n_shared_experts")(given), 2)


def _checked(routing: Routing, least: int) -> Routing:
    """Whether enough experts can be chosen from the groups."""
    size = routing.experts // routing.groups
    if routing.chosen_groups > routing.groups or routing.chosen > routing.chosen_groups * size:
        raise CheckpointError(
            f"config.json: topk_group is {routing.chosen_groups} of {routing.groups} groups of {size}, which must hold "
            f"the {routing.chosen} experts of a token"
        )
    if size < least:
        raise CheckpointError(
            f"config.json: n_group makes groups of {size} experts; they are judged by {least}"
        )
    return routing


def _blocks(config: ModelConfig, layer: int) -> tuple[str, str]:
    return "latent_attention", "experts" if is_sparse(config, layer) else "mlp"


def _has_query_latent(config: ModelConfig, layer: int) -> bool:
    section = config.sections[LATENT]
    return isinstance(section, LatentOptions) and section.q_lora > 0


def _no_query_latent(config: ModelConfig, layer: int) -> bool:
    return not _has_query_latent(config, layer)


_BIAS = "attention_bias"
_LATENT_MODULES = (
    Module("q", "q", ATTENTION + "q_proj", ("mla_query", "hidden"), where=_no_query_latent),
    Module(
        "q_a", "q", ATTENTION + "q_a_proj", ("q_lora", "hidden"), _BIAS, where=_has_query_latent, reads="q"
    ),
    Module("q_a_norm", "norm", ATTENTION + "q_a_layernorm", ("q_lora",), where=_has_query_latent),
    Module("q_b", "q", ATTENTION + "q_b_proj", ("mla_query", "q_lora"), where=_has_query_latent),
    Module("kv_a", "kv", ATTENTION + "kv_a_proj_with_mqa", ("kv_lora+rope", "hidden"), _BIAS, reads="q"),
    Module("kv_a_norm", "norm", ATTENTION + "kv_a_layernorm", ("kv_lora",)),
    Module("kv_b", "kv", ATTENTION + "kv_b_proj", ("mla_key_value", "kv_lora"), form="latent=whole"),
    # what a GGUF holds: the key half of each head transposed, and the value half
    Module("k_b", "kv", ATTENTION + "k_b_proj", ("heads", "kv_lora", "nope"), form="latent=halves"),
    Module("v_b", "kv", ATTENTION + "v_b_proj", ("heads", "value", "kv_lora"), form="latent=halves"),
    Module("o", "o", ATTENTION + "o_proj", ("hidden", "mla_value"), _BIAS),
)


def _modules(*, correction: bool) -> tuple[Module, ...]:
    embed, final_norm, head = outer_modules()
    attn_norm, ffn_norm = PRE_NORMS
    router = [Module("router", "router", MLP + "gate", ("experts", "hidden"), where=is_sparse)]
    if correction:
        name = MLP + "gate.e_score_correction_bias"
        router.append(Module("correction", "vector", name, ("experts",), where=is_sparse, suffix=""))
    return (
        embed,
        attn_norm,
        *_LATENT_MODULES,
        ffn_norm,
        *(replace(m, where=is_dense) for m in mlp_modules()),
        *router,
        *expert_modules(MLP),
        *shared_modules(MLP + "shared_experts."),
        final_norm,
        head,
    )


DEEPSEEK: tuple[Architecture, ...] = (
    Architecture(
        "deepseek_v2",
        ("DeepseekV2ForCausalLM",),
        _modules(correction=False),
        {
            "kv_lora_rank": 512,
            "q_lora_rank": 1536,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
        },
        blocks=_blocks,
        sections={LATENT: _latent_options, SECTION: _routing_v2},
        rotary_key="qk_rope_head_dim",
        cbk="CBKD",
        gguf="deepseek2",
    ),
    Architecture(
        "deepseek_v3",
        ("DeepseekV3ForCausalLM",),
        _modules(correction=True),
        {
            "kv_lora_rank": 512,
            "q_lora_rank": 1536,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "n_group": 8,
            "topk_group": 4,
            "first_k_dense_replace": 3,
            "moe_intermediate_size": 2048,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
        },
        blocks=_blocks,
        sections={LATENT: _latent_options, SECTION: _routing_v3},
        rotary_key="qk_rope_head_dim",
        cbk="CBKR",
        gguf="deepseek2",
    ),
)
