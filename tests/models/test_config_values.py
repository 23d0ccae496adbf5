"""Any value under any key of config.json is used, or refused by name: no other exception, no number that is none."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from trapetum.errors import TrapetumError
from trapetum.models.architectures import ARCHITECTURES
from trapetum.models.config import parse_config

SIZES: dict[str, Any] = {
    "vocab_size": 10,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 20,
    "num_experts": 6,
    "num_local_experts": 6,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 10,
    "kv_lora_rank": 14,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 4,
}
KEYS = [
    *SIZES,
    "architectures",
    "attention_bias",
    "attention_multiplier",
    "attn_logit_softcapping",
    "embedding_multiplier",
    "final_logit_softcapping",
    "hidden_act",
    "hidden_activation",
    "layer_types",
    "logits_scaling",
    "max_window_layers",
    "no_rope_layer_interval",
    "no_rope_layers",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "query_pre_attn_scalar",
    "residual_multiplier",
    "rms_norm_eps",
    "rope_local_base_freq",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
    "sliding_window_pattern",
    "tie_word_embeddings",
    "torch_dtype",
    "use_sliding_window",
]
VALUES: list[Any] = [
    0,
    1,
    -1,
    3,
    0.5,
    10**9,
    10**30,
    1e-200,
    float("nan"),
    float("inf"),
    True,
    "x",
    "",
    [],
    [0, 1],
    ["x\ny"],
    {},
    {"x": {}},
]
TYPES = ("linear", "dynamic", "llama3", "yarn", "longrope", "default", "x", 5, None, [])
PARTS = (0, 1, -2.0, 1.0, 1e-300, 1e300, float("nan"), "x", None, [1.0, 2.0, 3.0, 4.0], [0.0] * 4, {})


def check(config: dict[str, Any]) -> None:
    """Parsed to numbers that are finite, or refused in one line."""
    refusal = ""
    try:
        parsed = parse_config(config)
        for rope in {r for r in parsed.ropes if r is not None}:
            for length in (1, 10**6):
                assert np.isfinite(rope.inverse_frequencies(parsed.rotary_dim, length)).all(), config
            assert np.isfinite(rope.magnitude)
        assert all(isinstance(n, int) and 0 <= n for n in parsed.dimensions.values())
        assert len(parsed.windows) == len(parsed.ropes) == len(parsed.layer_types) == parsed.num_hidden_layers
        for cap in (parsed.attention_softcap, parsed.logit_softcap, parsed.attention_scale):
            assert cap is None or 0 < cap < np.inf
        scales = parsed.embedding_scale, parsed.logit_scale, parsed.rms_norm_eps
        assert all(0 <= scale < np.inf for scale in scales)
        for layer in range(parsed.num_hidden_layers):
            parsed.architecture.blocks(parsed, layer)
        assert parsed.architecture.faults(parsed, {})  # nothing is there, however much is promised
    except TrapetumError as error:
        refusal = error.message
    assert "\n" not in refusal


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_any_value_of_any_key(family: str) -> None:
    parse_config({"model_type": family, **SIZES})  # what is varied is a good config
    for key, value in itertools.product(KEYS, VALUES):
        check({"model_type": family, **SIZES, "use_sliding_window": True, key: value})


@pytest.mark.parametrize("kind", TYPES)
def test_any_rotary_parameters(kind: Any) -> None:
    keys = (
        "factor",
        "rope_theta",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
        "short_factor",
        "long_factor",
        "partial_rotary_factor",
    )
    good: dict[str, Any] = {
        "rope_type": kind,
        "factor": 2.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
    }
    for family, key, value in itertools.product(("llama", "phi3", "gemma3_text"), keys, PARTS):
        check({"model_type": family, **SIZES, "rope_parameters": {**good, key: value}})
