"""Qwen3-Next and Qwen3.5: gated delta nets in most layers, gated attention in every fourth, dense or with experts.

Norms of the residual stream and of heads store their weight less one; the norm inside a delta net does not. Queries of
attention come with a gate of the same width, head by head. A quarter of each head is rotated. Qwen3-Next fuses the
projections of a delta net by key heads (``runtime.delta``); Qwen3.5 has one tensor a purpose.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from trapetum.errors import CheckpointError
from trapetum.models.architecture import Architecture
from trapetum.models.experts import (
    SECTION,
    expert_modules,
    expert_routing,
    is_dense,
    is_sparse,
    shared_modules,
)
from trapetum.models.families import (
    ATTENTION,
    LAYER,
    MLP,
    attention_modules,
    mlp_modules,
    norm_modules,
    outer_modules,
)
from trapetum.models.layer_types import FULL, listed_types
from trapetum.models.modules import Module

if TYPE_CHECKING:
    from trapetum.models.config import ModelConfig

__all__ = ["DELTA", "LINEAR", "QWEN_NEXT", "DeltaOptions", "is_delta"]

DELTA = "delta"
"""Name of the options in ``ModelConfig.sections``."""
LINEAR = "linear_attention"
"""The layer type of a delta net."""

_DELTA_NET = LAYER + "linear_attn."


@dataclass(frozen=True)
class DeltaOptions:
    """Sizes of a gated delta net.

    Parameters
    ----------
    key_heads, value_heads : int
        Each key head serves ``value_heads / key_heads`` consecutive value heads.
    key_dim, value_dim : int
        Widths of a head.
    taps : int
        Width of the convolution.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int

    @property
    def dimensions(self) -> Mapping[str, int]:
        """Rows and columns of the projections."""
        return {
            "delta_key": self.key_heads * self.key_dim,
            "delta_value": self.value_heads * self.value_dim,
            "delta_heads": self.value_heads,
            "delta_head": self.value_dim,
            "delta_taps": self.taps,
        }


def _delta_options(given: Mapping[str, Any]) -> DeltaOptions:
    def count(key: str) -> int:
        value = given.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CheckpointError(f"config.json: {key} is {value!r}; a positive integer is expected")
        return value

    keys, values = count("linear_num_key_heads"), count("linear_num_value_heads")
    if values % keys:
        raise CheckpointError(
            f"config.json: linear_num_value_heads is {values}, not a multiple of linear_num_key_heads {keys}"
        )
    dims = count("linear_key_head_dim"), count("linear_value_head_dim")
    return DeltaOptions(keys, values, *dims, taps=count("linear_conv_kernel_dim"))


def _layer_types(given: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    """Every ``full_attention_interval``-th layer has attention."""
    interval = given.get("full_attention_interval", 4)
    return listed_types(given, layers, (LINEAR, FULL)) or tuple(
        LINEAR if (i + 1) % interval else FULL for i in range(layers)
    )


def is_delta(config: ModelConfig, layer: int) -> bool:
    """Whether a layer is a delta net."""
    return config.layer_types[layer] == LINEAR


def _is_attention(config: ModelConfig, layer: int) -> bool:
    return not is_delta(config, layer)


def _blocks(config: ModelConfig, layer: int) -> tuple[str, str]:
    sparse = SECTION in config.sections and is_sparse(config, layer)
    return "delta_net" if is_delta(config, layer) else "gated_attention", "experts" if sparse else "mlp"


_CHANNELS = "delta_key+delta_key+delta_value"
# part, kind, name, rows, form of storage
_QKV_Z = (
    ("delta_qkv", "qkv", "in_proj_qkv", _CHANNELS, "delta=separate"),
    ("delta_z", "gate", "in_proj_z", "delta_value", "delta=separate"),
)
_SEPARATE = (
    *_QKV_Z,
    ("delta_b", "vector", "in_proj_b", "delta_heads", ""),
    ("delta_a", "vector", "in_proj_a", "delta_heads", ""),
)
_FUSED = (
    ("delta_qkvz", "qkv", "in_proj_qkvz", _CHANNELS + "+delta_value", "delta=fused"),
    *_QKV_Z,  # what a GGUF is read as
    ("delta_ba", "vector", "in_proj_ba", "delta_heads+delta_heads", ""),
)


def _modules(
    projections: tuple[tuple[str, str, str, str, str], ...], feed_forward: tuple[Module, ...]
) -> tuple[Module, ...]:
    embed, final_norm, head = outer_modules(offset=1.0)
    attn_norm, ffn_norm = norm_modules(
        offset=1.0, attn_norm="input_layernorm", ffn_norm="post_attention_layernorm"
    )
    delta = (
        *(
            Module(part, kind, _DELTA_NET + name, (rows, "hidden"), reads="delta_qkv", form=form)
            for part, kind, name, rows, form in projections
        ),
        Module("delta_conv", "vector", _DELTA_NET + "conv1d", (_CHANNELS, "1", "delta_taps")),
        Module("delta_rate", "vector", _DELTA_NET + "A_log", ("delta_heads",), suffix=""),
        Module("delta_dt", "vector", _DELTA_NET + "dt_bias", ("delta_heads",), suffix=""),
        Module("delta_norm", "norm", _DELTA_NET + "norm", ("delta_head",)),
        Module("delta_out", "o", _DELTA_NET + "out_proj", ("hidden", "delta_value")),
    )
    bias = "attention_bias"
    _, *rest = attention_modules(qkv_bias=bias, o_bias=bias, qk_norm=True, offset=1.0)
    attention = (
        Module("q", "q", ATTENTION + "q_proj", ("query+query", "hidden"), bias, reads="q"),
        *rest,
    )
    return (
        embed,
        attn_norm,
        *(replace(m, where=is_delta) for m in delta),
        *(replace(m, where=_is_attention) for m in attention),
        ffn_norm,
        *feed_forward,
        final_norm,
        head,
    )


_EXPERTS = (
    Module("router", "router", MLP + "gate", ("experts", "hidden"), where=is_sparse),
    *expert_modules(MLP),
    Module("shared_router", "router", MLP + "shared_expert_gate", ("1", "hidden"), where=is_sparse),
    *shared_modules(MLP + "shared_expert."),
)
_DEFAULTS = {
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "max_position_embeddings": 32768,
}
_PARTIAL = frozenset({"partial_rotary_factor"})

QWEN_NEXT: tuple[Architecture, ...] = (
    Architecture(
        "qwen3_next",
        ("Qwen3NextForCausalLM",),
        _modules(_FUSED, (*(replace(m, where=is_dense) for m in mlp_modules()), *_EXPERTS)),
        _DEFAULTS
        | {
            "num_key_value_heads": 2,
            "intermediate_size": 5632,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_experts_per_tok": 10,
            "num_experts": 512,
            "norm_topk_prob": True,
        },
        options=_PARTIAL,
        layer_types=_layer_types,
        blocks=_blocks,
        sections={
            DELTA: _delta_options,
            SECTION: expert_routing(shared="shared_expert_intermediate_size"),
        },
        gguf="qwen3next",
    ),
    Architecture(
        "qwen3_5_text",
        ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
        _modules(_SEPARATE, mlp_modules()),
        _DEFAULTS | {"num_key_value_heads": 4},
        options=_PARTIAL,
        layer_types=_layer_types,
        blocks=_blocks,
        sections={DELTA: _delta_options},
        gguf="qwen35",
    ),
    Architecture(
        "qwen3_5_moe_text",
        ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
        _modules(_SEPARATE, _EXPERTS),
        _DEFAULTS
        | {
            "num_key_value_heads": 2,
            "intermediate_size": 512,  # no layer has a plain feed-forward
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_experts_per_tok": 8,
            "num_experts": 256,
        },
        options=_PARTIAL,
        layer_types=_layer_types,
        blocks=_blocks,
        sections={
            DELTA: _delta_options,
            SECTION: expert_routing(shared="shared_expert_intermediate_size", normalise=True),
        },
        gguf="qwen35moe",
    ),
)
