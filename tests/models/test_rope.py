"""Inverse frequencies against transformers, and every spelling and refusal."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from trapetum.errors import CheckpointError, UnsupportedModelError
from trapetum.models.rope import Rope, parse_rope

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_default_by_hand() -> None:
    inv = Rope(theta=10000.0).inverse_frequencies(8)
    assert inv.dtype == np.float32
    np.testing.assert_allclose(inv, [1, 1e-1, 1e-2, 1e-3], rtol=1e-7)


@pytest.mark.parametrize(
    "scaling", [{"rope_type": "linear", "factor": 4.0}, LLAMA3, {"rope_type": "default"}]
)
def test_equal_to_transformers(scaling: dict[str, Any]) -> None:
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers", minversion="5.0")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    stated = {"rope_theta": 500000.0, **scaling}
    config = transformers.LlamaConfig(
        hidden_size=512, num_attention_heads=4, max_position_embeddings=131072, rope_parameters=dict(stated)
    )
    expected = LlamaRotaryEmbedding(config).inv_freq.numpy()
    ours = parse_rope({"rope_parameters": stated}, 128).inverse_frequencies(128)
    np.testing.assert_allclose(ours, expected, rtol=3e-7)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + i / 100 for i in range(64)],
    "long_factor": [2.0 + i for i in range(64)],
    "original_max_position_embeddings": 4096,
}


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "dynamic", "factor": 3.0},
        YARN,
        YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
        YARN | {"attention_factor": 1.5},
        YARN | {"mscale": 0.707, "mscale_all_dim": 1.2},
        LONGROPE | {"factor": 8.0},
        LONGROPE,
        LONGROPE | {"attention_factor": 1.25},
    ],
)
@pytest.mark.parametrize("length", [100, 5000, 40000])
def test_types_and_lengths_equal_to_transformers(scaling: dict[str, Any], length: int) -> None:
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers", minversion="5.0")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    stated = {"rope_theta": 500000.0, **scaling}
    config = transformers.LlamaConfig(
        hidden_size=512, num_attention_heads=4, max_position_embeddings=32768, rope_parameters=dict(stated)
    )
    theirs, factor = ROPE_INIT_FUNCTIONS[str(scaling["rope_type"])](config, "cpu", seq_len=length)
    ours = parse_rope({"rope_parameters": stated, "max_position_embeddings": 32768}, 128)
    np.testing.assert_allclose(ours.inverse_frequencies(128, length), theirs.numpy(), rtol=1e-6)
    assert ours.magnitude == pytest.approx(factor, rel=1e-12)


def test_regimes() -> None:
    longrope = parse_rope({"rope_scaling": LONGROPE | {"factor": 8.0}}, 128)
    assert [longrope.regime(n) for n in (1, 4096, 4097, 9000)] == [0, 0, 1, 1]
    dynamic = parse_rope(
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": 10}, 8
    )
    assert [dynamic.regime(n) for n in (1, 10, 11, 12)] == [0, 0, 11, 12]
    assert {Rope("linear", factor=2.0).regime(n) for n in (1, 10**6)} == {0}


@pytest.mark.parametrize("kind", ["su", "yarn", "longrope"])
def test_spellings_of_longrope(kind: str) -> None:
    stated = {k: v for k, v in LONGROPE.items() if k != "rope_type"} | {"type": kind, "factor": 8.0}
    assert parse_rope({"rope_scaling": stated}, 128).type == "longrope"


def test_the_original_length_outside_wins() -> None:
    """Phi-3 says it beside the other sizes."""
    config = {
        "rope_scaling": {k: v for k, v in LONGROPE.items() if "original" not in k},
        "original_max_position_embeddings": 2048,
        "max_position_embeddings": 32768,
    }
    rope = parse_rope(config, 128)
    assert (rope.original_max_position_embeddings, rope.factor) == (2048, 16.0)


@pytest.mark.parametrize("key", ["short_factor", "long_factor"])
@pytest.mark.parametrize("value", [None, [1.0] * 63, [1.0] * 63 + [float("nan")], ["1"] * 64, 2.0])
def test_lists_of_factors_are_checked(key: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=key):
        parse_rope({"rope_scaling": LONGROPE | {"factor": 8.0, key: value}}, 128)


def test_llama3_has_all_three_ranges() -> None:
    inv = Rope().inverse_frequencies(128)
    scaled = parse_rope({"rope_theta": 10000.0, "rope_scaling": LLAMA3}, 128).inverse_frequencies(128)
    ratio = inv / scaled
    assert ratio[0] == 1.0
    np.testing.assert_allclose(ratio[-1], 8.0, rtol=1e-6)
    assert np.any((ratio > 1.01) & (ratio < 7.9))
    assert np.all(np.diff(ratio) >= -1e-5)


@pytest.mark.parametrize(
    "config",
    [
        {"rope_theta": 5e5},
        {"rope_parameters": {"rope_theta": 5e5}},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
        {"rope_theta": 5e5, "rope_scaling": None},
        {"rope_theta": 1e4, "rope_scaling": {"type": "default", "rope_theta": 5e5}},
    ],
)
def test_theta_in_every_place(config: dict[str, Any]) -> None:
    assert parse_rope(config, 8) == Rope(theta=5e5)


def test_defaults_to_ten_thousand() -> None:
    assert parse_rope({}, 8).theta == 10000.0


def test_old_spelling_type() -> None:
    assert parse_rope({"rope_scaling": {"type": "linear", "factor": 2}}, 8) == Rope("linear", factor=2.0)


@pytest.mark.parametrize("kind", ["mrope", "axial", "proportional", "ntk", "explicit"])
def test_unknown_types_are_refused_by_name(kind: str) -> None:
    with pytest.raises(UnsupportedModelError, match=kind):
        parse_rope({"rope_scaling": {"type": kind, "factor": 2.0}}, 8)


def test_parameters_by_layer_type_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="rope_parameters"):
        parse_rope({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, 8)


@pytest.mark.parametrize(
    "key", ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]
)
def test_a_missing_key_is_named(key: str) -> None:
    stated = {k: v for k, v in LLAMA3.items() if k != key}
    with pytest.raises(CheckpointError, match=rf"config\.json.*{key}"):
        parse_rope({"rope_scaling": stated}, 8)


@pytest.mark.parametrize("value", [0, -1.0, "2", True, float("nan"), float("inf")])
def test_values_must_be_positive_numbers(value: Any) -> None:
    with pytest.raises(CheckpointError, match="factor"):
        parse_rope({"rope_scaling": {"type": "linear", "factor": value}}, 8)


def test_explicit_list_rules() -> None:
    rope = parse_rope({"trapetum_inv_freq": [0.5, 0.25], "rope_theta": 3.0}, 4)
    assert rope.inverse_frequencies(4).tolist() == [0.5, 0.25]
    with pytest.raises(CheckpointError, match="trapetum_inv_freq"):
        parse_rope({"trapetum_inv_freq": [0.5]}, 4)


def test_odd_head() -> None:
    with pytest.raises(CheckpointError, match="head_dim"):
        parse_rope({}, 5)
