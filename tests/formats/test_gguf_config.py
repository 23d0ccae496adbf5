"""config.json out of metadata alone: the families that differ from layer to layer, and values that cannot be."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trapetum.errors import TrapetumError
from trapetum.formats.gguf_config import model_config
from trapetum.formats.gguf_names import FAMILIES, ROPE_LONG, ROPE_SHORT
from trapetum.models.config import parse_config

PATH = Path("model.gguf")
SIZES: dict[str, Any] = {
    "context_length": 4096,
    "embedding_length": 64,
    "block_count": 6,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 16,
    "attention.layer_norm_rms_epsilon": float(np.float32(1e-6)),
    "rope.freq_base": 10000.0,
}
SLIDING, FULL = "sliding_attention", "full_attention"


def read(arch: str, factors: dict[str, np.ndarray] | None = None, **keys: Any) -> dict[str, Any]:
    stated = {**SIZES, **{k.replace("__", "."): v for k, v in keys.items()}}
    metadata = {"general.architecture": arch, **{f"{arch}.{k}": v for k, v in stated.items()}}
    return model_config(
        PATH, FAMILIES[arch], metadata, {"model.embed_tokens.weight": (10, 64)}, factors or {}
    )


def test_gemma2() -> None:
    c = parse_config(read("gemma2", attention__sliding_window=8, attn_logit_softcapping=50.0))
    assert c.windows == (8, None) * 3
    assert (c.attention_softcap, c.logit_softcap) == (50.0, 30.0)  # the second is the engines' default
    assert (c.attention_scale, c.hidden_act) == (0.25, "gelu_pytorch_tanh")
    assert parse_config(read("gemma2")).windows == (4096, None) * 3
    big = parse_config(read("gemma2", block_count=46, attention__key_length=8))
    assert big.attention_scale == (64 // 4) ** -0.5


def test_gemma3() -> None:
    keys = {"rope__scaling__type": "linear", "rope__scaling__factor": 8.0, "rope__freq_base": 1e6}
    c = parse_config(read("gemma3", attention__sliding_window=8, **keys))
    assert c.windows == (8,) * 5 + (None,)
    local, full = c.ropes[0], c.ropes[5]
    assert local is not None
    assert full is not None
    assert (local.type, local.theta) == ("default", 10000.0)
    assert (full.type, full.theta, full.factor) == ("linear", 1e6, 8.0)
    assert c.attention_softcap is c.logit_softcap is None
    flags = [True, False, False, True, True, False]
    c = parse_config(read("gemma3", attention__sliding_window=8, attention__sliding_window_pattern=flags))
    assert [w is not None for w in c.windows] == flags
    assert parse_config(read("gemma3")).windows == (None,) * 6


def test_smollm3_and_olmo() -> None:
    assert [rope is None for rope in parse_config(read("smollm3")).ropes] == [False] * 3 + [True] + [
        False
    ] * 2
    assert parse_config(read("olmo2")).architecture.model_type == "olmo2"
    c = parse_config(read("olmo2", attention__sliding_window=8))
    assert c.architecture.model_type == "olmo3"
    assert c.windows == (8, 8, 8, None, 8, 8)


def test_phi3() -> None:
    factors = {ROPE_LONG: np.arange(2, 8, dtype=np.float32), ROPE_SHORT: np.full(6, 1.1, np.float32)}
    keys = {"rope__dimension_count": 12, "rope__scaling__original_context_length": 1024}
    c = parse_config(read("phi3", factors, **keys, rope__scaling__attn_factor=float(np.float32(1.19))))
    assert (c.head_dim, c.rotary_dim) == (16, 12)
    assert c.rope.type == "longrope"
    assert c.rope.long_factor == (2, 3, 4, 5, 6, 7)
    assert c.rope.short_factor == (1.1,) * 6  # the shortest decimal that float32 holds
    assert (c.rope.magnitude, c.rope.original_max_position_embeddings) == (1.19, 1024)
    with pytest.raises(TrapetumError, match=ROPE_SHORT):
        read("phi3", {ROPE_LONG: factors[ROPE_LONG]}, **keys)


def test_yarn() -> None:
    keys = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}
    rope = parse_config(read("qwen2", **keys, rope__scaling__original_context_length=1024)).rope
    assert (rope.type, rope.factor, rope.original_max_position_embeddings) == ("yarn", 4.0, 1024)
    assert rope.magnitude == 0.1 * np.log(4) + 1
    more = parse_config(read("qwen2", **keys, rope__scaling__attn_factor=1.5)).rope
    assert more.magnitude == pytest.approx(1.5 * rope.magnitude)


KEYS = [*SIZES, "attention.sliding_window", "attention.sliding_window_pattern", "attn_logit_softcapping"]
KEYS += ["final_logit_softcapping", "rope.freq_base_swa", "rope.dimension_count", "rope.scaling.type"]
KEYS += ["rope.scaling.factor", "rope.scaling.attn_factor", "rope.scaling.original_context_length"]
KEYS += ["rope.scaling.yarn_beta_fast", "expert_count", "expert_used_count"]
VALUES = [
    0,
    1,
    -3,
    10**9,
    0.0,
    float("nan"),
    float("inf"),
    True,
    "x\ny",
    "yarn",
    "longrope",
    [],
    [True] * 5,
    [True] * 6,
    None,
]


@pytest.mark.parametrize("arch", FAMILIES)
def test_any_value_of_any_key(arch: str) -> None:
    """A config that can be parsed, or a refusal in one line."""
    for key, value in itertools.product(KEYS, VALUES):
        refusal = ""
        try:
            config = read(arch, **{key.replace(".", "__"): value})
            parse_config(config)
        except TrapetumError as error:
            refusal = error.message
        assert "\n" not in refusal
