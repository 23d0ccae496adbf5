"""config.json out of the metadata and tensor shapes of a GGUF model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trapetum.errors import FormatError, UnsupportedModelError
from trapetum.formats.gguf_delta import DELTA_FAMILIES
from trapetum.formats.gguf_names import FAMILIES, ROPE_FACTORS, ROPE_LONG, ROPE_SHORT, Family
from trapetum.formats.strict_json import shown

__all__ = ["ROPE_TRUNCATE", "model_config", "model_family"]

# Families whose layers take turns between a window and full attention: every so many is full.
_FULL_EVERY = {"gemma2": 2, "gemma3_text": 6, "olmo2": 4}
# Numbers of layers for which engines scale attention scores by hidden size over heads (Gemma of 27 B).
_BIG = {"gemma2": 46, "gemma3_text": 62}
_MOST_LAYERS = 10_000
_NO_ROTARY_EVERY = {"smollm3": 4}


ROPE_TRUNCATE = "trapetum.rope.truncate"
"""Whether the ramp of YaRN ends at whole pairs."""


def model_family(path: Path, metadata: Mapping[str, Any]) -> Family:
    """The family of a model.

    Raises
    ------
    UnsupportedModelError
        If it is not in the table.
    """
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or name not in FAMILIES:
        raise UnsupportedModelError(
            f"{path}: general.architecture is {shown(name)}; {', '.join(FAMILIES)} can be read"
        )
    return FAMILIES[name]


def model_config(
    path: Path,
    family: Family,
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    rope_factors: Mapping[str, np.ndarray[Any, Any]],
) -> dict[str, Any]:
    """The config.json that the metadata and shapes amount to.

    Parameters
    ----------
    path : Path
        For messages.
    family : Family
    metadata : mapping
        Of the (first) file.
    shapes : mapping of str to tuple of int
        By the checkpoint's names.
    rope_factors : mapping of str to ndarray
        Divisors of the rotary frequencies, by the names of their tensors.

    Raises
    ------
    FormatError
        If a key is missing or of another type; names it.
    """
    arch = metadata["general.architecture"]

    def value(key: str, kind: type, default: Any = None) -> Any:
        found = metadata.get(f"{arch}.{key}", default)
        if kind is float and isinstance(found, int):
            found = float(found)
        if not isinstance(found, kind) or (isinstance(found, bool) and kind is not bool):
            what = "is missing" if found is None else f"is {shown(found)}"
            raise FormatError(f"{path}: the key {arch}.{key} {what}; one {kind.__name__} is needed")
        return found

    heads, hidden = value("attention.head_count", int), value("embedding_length", int)
    if not 0 < (layers := value("block_count", int)) <= _MOST_LAYERS:
        raise FormatError(
            f"{path}: {arch}.block_count is {layers}; at most {_MOST_LAYERS} layers are expected"
        )
    head_dim = value("attention.key_length", int, hidden // max(heads, 1))
    embed = shapes.get("model.embed_tokens.weight", (0, 0))
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": value("rope.freq_base", float, 10000.0)}
    rope |= _scaling(path, value, metadata.get(f"{arch}.rope.scaling.type", "none"), rope_factors)
    if family.model_type == "gpt_oss" and rope["rope_type"] == "yarn":
        # No key of the format says so. The family's models do not; what we write says it in a key of our own.
        rope["truncate"] = metadata.get(ROPE_TRUNCATE) is True
    config: dict[str, Any] = {
        "architectures": [family.hf_class],
        "model_type": family.model_type,
        "hidden_size": hidden,
        "intermediate_size": value("feed_forward_length", int),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": value("attention.head_count_kv", int, heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "vocab_size": embed[0],
        "max_position_embeddings": value("context_length", int),
        "rms_norm_eps": _decimal(value("attention.layer_norm_rms_epsilon", float)),
        "rope_parameters": rope,
        "tie_word_embeddings": "lm_head.weight" not in shapes,
    }
    if family.model_type == "deepseek_v3":
        config |= _deepseek_config(value, shapes, rope)
    else:
        config |= _expert_config(family, value, config["intermediate_size"])
    rotated = value("rope.dimension_count", int, config["head_dim"])
    head_dim = config["head_dim"]
    if rotated != head_dim:
        rope["partial_rotary_factor"] = rotated / head_dim
    if family.model_type == "granite":
        config |= {
            "embedding_multiplier": _decimal(value("embedding_scale", float, 1.0)),
            "residual_multiplier": _decimal(value("residual_scale", float, 1.0)),
            "attention_multiplier": _decimal(value("attention.scale", float, max(head_dim, 1) ** -0.5)),
            "logits_scaling": _decimal(value("logit_scale", float, 1.0)),
        }
    if family.model_type in ("llama", "granite", "seed_oss"):
        config["attention_bias"] = "model.layers.0.self_attn.q_proj.bias" in shapes
        config["mlp_bias"] = "model.layers.0.mlp.up_proj.bias" in shapes
    if ROPE_FACTORS in rope_factors:
        original = metadata.get(f"{arch}.rope.scaling.original_context_length")
        _apply_factors(config, rope, rope_factors[ROPE_FACTORS], original)
    config |= _layer_config(path, family, value, metadata, config)
    if arch in DELTA_FAMILIES:
        config |= _delta_config(path, value, metadata, config["num_hidden_layers"])
    for ours, theirs in (
        ("bos_token_id", "bos_token_id"),
        ("eos_token_id", "eos_token_id"),
        ("pad_token_id", "padding_token_id"),
    ):
        if isinstance(found := metadata.get(f"tokenizer.ggml.{theirs}"), int):
            config[ours] = found
    return config


def _scaling(
    path: Path, value: Callable[..., Any], kind: Any, factors: Mapping[str, np.ndarray[Any, Any]]
) -> dict[str, Any]:
    """Rotary scaling other than by ``rope_freqs.weight``."""
    original = value("rope.scaling.original_context_length", int, 0)
    said: dict[str, Any] = {"original_max_position_embeddings": original} if original else {}
    if ROPE_LONG in factors or kind == "longrope":
        if not {ROPE_LONG, ROPE_SHORT} <= set(factors):
            raise FormatError(f"{path}: the tensors {ROPE_LONG} and {ROPE_SHORT} are needed")
        lists = {"long_factor": factors[ROPE_LONG], "short_factor": factors[ROPE_SHORT]}
        listed = {key: [_decimal(v) for v in values.tolist()] for key, values in lists.items()}
        magnitude = _decimal(value("rope.scaling.attn_factor", float, 1.0))
        return {"rope_type": "longrope", **listed, **said, "attention_factor": magnitude}
    if kind == "none":
        return {}
    factor = value("rope.scaling.factor", float, 1.0)
    if kind != "yarn":
        return {"rope_type": kind, "factor": factor}
    extra = value("rope.scaling.attn_factor", float, 1.0)
    if extra != 1.0:
        said["attention_factor"] = extra * (1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0)
    for key in ("beta_fast", "beta_slow"):
        if beta := value(f"rope.scaling.yarn_{key}", float, 0.0):
            said[key] = beta
    return {"rope_type": "yarn", "factor": factor, **said}


def _layer_config(
    path: Path,
    family: Family,
    value: Callable[..., Any],
    metadata: Mapping[str, Any],
    config: Mapping[str, Any],
) -> dict[str, Any]:
    """What layers differ in, and the options of the families that have them."""
    layers: int = config["num_hidden_layers"]
    found: dict[str, Any] = {}
    if every := _NO_ROTARY_EVERY.get(family.model_type):
        found["no_rope_layers"] = [int((i + 1) % every != 0) for i in range(layers)]
    if family.model_type == "phi3":
        found["sliding_window"] = value("attention.sliding_window", int, 0) or None
        if original := config["rope_parameters"].get("original_max_position_embeddings"):
            found["original_max_position_embeddings"] = original
    if family.model_type.startswith("gemma"):
        found |= _gemma_config(family, value, config)
    default = 4096 if family.model_type == "gemma2" else 0
    window = value("attention.sliding_window", int, default)
    if family.model_type not in _FULL_EVERY or not window:
        return found
    arch = metadata["general.architecture"]
    stated = metadata.get(f"{arch}.attention.sliding_window_pattern", _FULL_EVERY[family.model_type])
    has = _pattern(path, stated, layers)
    types = ["sliding_attention" if h else "full_attention" for h in has]
    found |= {"sliding_window": window, "layer_types": types}
    full = config["rope_parameters"]
    local = {"rope_type": "default", "rope_theta": full["rope_theta"]}
    if family.model_type == "gemma3_text":
        local["rope_theta"] = value("rope.freq_base_swa", float, 10000.0)
    if family.model_type == "olmo2":  # OLMo-3, which engines keep in the same family
        found |= {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3"}
    if family.model_type != "gemma2":
        by_type = {"full_attention": full, "sliding_attention": local}
        found["rope_parameters"] = {kind: by_type[kind] for kind in dict.fromkeys(types)}
    return found


def _pattern(path: Path, stated: Any, layers: int) -> list[bool]:
    """Which layers have the window: every ``stated``-th one has not, or a list says so."""
    if isinstance(stated, int) and not isinstance(stated, bool) and stated > 0:
        return [(i + 1) % stated != 0 for i in range(layers)]
    listed = list(stated) if isinstance(stated, list | tuple | np.ndarray) else []
    if len(listed) != layers:
        raise FormatError(
            f"{path}: attention.sliding_window_pattern is {shown(stated)}; a positive number or a flag for each of "
            f"{layers} layers is needed"
        )
    return [bool(flag) for flag in listed]


def _gemma_config(family: Family, value: Callable[..., Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Activation, caps and scale of scores."""
    if family.model_type == "gemma":
        return {"hidden_act": "gelu_pytorch_tanh"}
    big = config["num_hidden_layers"] == _BIG[family.model_type]
    scalar = config["hidden_size"] // config["num_attention_heads"] if big else config["head_dim"]
    found: dict[str, Any] = {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": scalar}
    found |= {"sliding_window": None, "layer_types": ["full_attention"] * config["num_hidden_layers"]}
    usual = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    for key, cap in usual.items():
        found[key] = _decimal(value(key, float, cap if family.model_type == "gemma2" else 0.0)) or None
    return found


def _delta_config(
    path: Path, value: Callable[..., Any], metadata: Mapping[str, Any], layers: int
) -> dict[str, Any]:
    """Keys of a model with gated delta nets."""
    arch = metadata["general.architecture"]
    interval = value("full_attention_interval", int, 4)
    linear = metadata.get(f"{arch}.attention.recurrent_layers")
    if linear is None:
        linear = [(i + 1) % interval != 0 for i in range(layers)]
    if len(linear) != layers:
        raise FormatError(f"{path}: {arch}.attention.recurrent_layers names {len(linear)} layers of {layers}")
    heads = value("ssm.time_step_rank", int)
    return {
        "layer_types": ["linear_attention" if one else "full_attention" for one in linear],
        "linear_conv_kernel_dim": value("ssm.conv_kernel", int),
        "linear_num_key_heads": value("ssm.group_count", int),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": value("ssm.state_size", int),
        "linear_value_head_dim": value("ssm.inner_size", int) // max(heads, 1),
    }


def _expert_config(family: Family, value: Callable[..., Any], intermediate: int) -> dict[str, Any]:
    """Keys of a model with routed experts; its class, where a family has models with and without."""
    experts = value("expert_count", int, 0)
    if not experts:
        return {}
    width = value("expert_feed_forward_length", int, intermediate)
    config: dict[str, Any] = {
        "num_experts_per_tok": value("expert_used_count", int),
        "moe_intermediate_size": width,
        "norm_topk_prob": family.model_type in ("qwen3_moe", "qwen3_next"),
    }
    if family.model_type == "llama":
        config |= {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
    if family.model_type == "gpt_oss":
        config |= {
            "intermediate_size": width,
            "attention_bias": True,
            "sliding_window": value("attention.sliding_window", int),
        }
    if shared := value("expert_shared_feed_forward_length", int, 0):
        config["shared_expert_intermediate_size"] = shared
    config["num_experts" if family.model_type.startswith(("qwen", "olmoe")) else "num_local_experts"] = (
        experts
    )
    return config


def _deepseek_config(
    value: Callable[..., Any], shapes: Mapping[str, tuple[int, ...]], rope: dict[str, Any]
) -> dict[str, Any]:
    """Keys of a model with latent attention: V3 where the router is a sigmoid, else V2."""
    rotated, latent = value("rope.dimension_count", int), value("attention.kv_lora_rank", int)
    multiplier = value("rope.scaling.yarn_log_multiplier", float, 0.0)
    if multiplier:
        rope["mscale"] = rope["mscale_all_dim"] = _decimal(10 * multiplier)
    width = value("expert_feed_forward_length", int)
    config: dict[str, Any] = {
        "num_key_value_heads": value("attention.head_count", int),
        "head_dim": rotated,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": value("attention.key_length_mla", int) - rotated,
        "v_head_dim": value("attention.value_length_mla", int),
        "kv_lora_rank": latent,
        "q_lora_rank": value("attention.q_lora_rank", int, 0) or None,
        "moe_intermediate_size": width,
        "n_routed_experts": value("expert_count", int),
        "n_shared_experts": value("expert_shared_count", int, 0),
        "num_experts_per_tok": value("expert_used_count", int),
        "first_k_dense_replace": value("leading_dense_block_count", int, 0),
        "routed_scaling_factor": _decimal(value("expert_weights_scale", float, 1.0)),
        "norm_topk_prob": value("expert_weights_norm", bool, False),
    }
    if value("expert_gating_func", int, 1) == 2:
        groups = {"n_group": "expert_group_count", "topk_group": "expert_group_used_count"}
        return config | {ours: value(theirs, int, 1) for ours, theirs in groups.items()}
    config["topk_method"] = "greedy"
    return config | {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2"}


def _decimal(value: float) -> float:
    """A float32 from the file as the short decimal that it was: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _apply_factors(
    config: dict[str, Any], rope: dict[str, Any], factors: np.ndarray[Any, Any], original: Any
) -> None:
    """Divisors of the rotary frequencies: as a llama3 scaling where one gives them, else as explicit frequencies."""
    half = np.arange(0, config["head_dim"], 2, dtype=np.float64) / config["head_dim"]
    plain = rope["rope_theta"] ** -half
    if len(factors) != len(plain) or not (factors >= 1).all():
        raise FormatError(
            f"{ROPE_FACTORS} holds {len(factors)} values; {len(plain)} of at least 1 are needed"
        )
    factor = round(float(factors.max()), 4)
    for context in (original, 8192):
        if not isinstance(context, int):
            continue
        smooth = np.clip((context * plain / (2 * np.pi) - 1.0) / 3.0, 0.0, 1.0)
        if np.allclose(1.0 / ((1.0 - smooth) / factor + smooth), factors, rtol=1e-5):
            rope |= {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": context,
            }
            return
    config["trapetum_inv_freq"] = (plain / factors).tolist()
