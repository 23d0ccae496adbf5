"""DeepSeek's latent attention and experts in a GGUF (family ``deepseek2``), as llama.cpp computes them.

Engines keep latents as the keys and values of one head, so the file has ``kv_b_proj`` in two halves by head: the key
half transposed, ``attn_k_b``, and the value half, ``attn_v_b`` (``export.latents`` makes them).

The sizes of heads that the keys state are those of the cache, ``kv_lora + rope`` and ``kv_lora``, with one key-value
head; the model's own are the ones that end in ``_mla``.

Source: llama.cpp, src/models/deepseek2.cpp, src/llama-context.cpp (YaRN) and conversion/deepseek.py.
"""

from __future__ import annotations

import math

from trapetum.formats.gguf_values import KeyValue, ValueType
from trapetum.models.config import ModelConfig
from trapetum.models.deepseek import LATENT, LatentOptions
from trapetum.models.experts import SECTION, Routing

__all__ = ["latent_faults", "latent_pairs"]

_FAMILY = "deepseek2"
# llama.cpp takes models of so many layers as those without a latent of the queries.
_LITE_LAYERS = (26, 27)
_GATING = {"softmax": 1, "softmax_groups": 1, "sigmoid_groups": 2}


def latent_faults(config: ModelConfig) -> list[str]:
    """Why engines would compute another model; empty where they would not."""
    options, routing = config.sections.get(LATENT), config.sections.get(SECTION)
    if not isinstance(options, LatentOptions) or not isinstance(routing, Routing):
        return []
    faults, layers, sparse = [], config.num_hidden_layers, routing.sparse
    if not options.q_lora and layers not in _LITE_LAYERS:
        faults.append(
            f"{layers} layers without q_lora_rank: engines know such models of 26 and 27 layers in the family {_FAMILY}"
        )
    if options.q_lora and layers in _LITE_LAYERS:
        faults.append(
            f"a model of {layers} layers has no q_lora_rank in the family {_FAMILY} as engines compute it"
        )
    if not options.interleaved:
        faults.append(f"rope_interleave is false, and engines rotate neighbours in the family {_FAMILY}")
    if True in sparse and not all(sparse[sparse.index(True) :]):
        faults.append("dense layers after the first with experts have no place in a GGUF")
    if routing.router == "softmax_groups" and routing.chosen_groups < routing.groups:
        faults.append(
            "topk_method is group_limited_greedy, and engines judge a group by its two best experts, not by its best"
        )
    rope = config.rope
    if rope.type == "yarn" and not math.isclose(
        rope.magnitude, _engine_magnitude(rope.factor, rope.mscale_all_dim)
    ):
        faults.append(
            f"mscale is {rope.mscale:g} and mscale_all_dim {rope.mscale_all_dim:g}, and engines expect them to be equal"
        )
    return faults


def _engine_magnitude(factor: float, all_dim: float) -> float:
    """What engines multiply cosine and sine by: ``mscale`` is taken to be ``mscale_all_dim``, or 1 without that."""
    return 1.0 if all_dim or factor <= 1 else 0.1 * math.log(factor) + 1.0


def latent_pairs(config: ModelConfig) -> dict[str, KeyValue]:
    """Keys of the family that others have not or mean otherwise; empty for other models."""
    options, routing = config.sections.get(LATENT), config.sections.get(SECTION)
    if not isinstance(options, LatentOptions) or not isinstance(routing, Routing):
        return {}
    sparse = routing.sparse
    counts: dict[str, int] = {
        "attention.head_count_kv": 1,
        "attention.key_length": options.kv_lora + options.rope,
        "attention.value_length": options.kv_lora,
        "attention.key_length_mla": options.nope + options.rope,
        "attention.value_length_mla": options.value,
        "attention.kv_lora_rank": options.kv_lora,
        "leading_dense_block_count": sparse.index(True) if True in sparse else len(sparse),
        "expert_count": routing.experts,
        "expert_used_count": routing.chosen,
        "expert_feed_forward_length": routing.expert_size,
        "expert_shared_count": routing.shared_size // routing.expert_size,
        "expert_gating_func": _GATING[routing.router],
    }
    if options.q_lora:
        counts["attention.q_lora_rank"] = options.q_lora
    if routing.router == "sigmoid_groups":
        counts |= {"expert_group_count": routing.groups, "expert_group_used_count": routing.chosen_groups}
    pairs = {key: KeyValue.count(value) for key, value in counts.items()}
    pairs["expert_weights_scale"] = KeyValue(routing.scale, ValueType.FLOAT32)
    pairs["expert_weights_norm"] = KeyValue(routing.normalise, ValueType.BOOL)
    if config.rope.type == "yarn" and config.rope.mscale_all_dim:
        pairs["rope.scaling.yarn_log_multiplier"] = KeyValue(
            0.1 * config.rope.mscale_all_dim, ValueType.FLOAT32
        )
    return {f"{_FAMILY}.{key}": value for key, value in pairs.items()}
