"""Every spelling of config.json, and every refusal."""

from __future__ import annotations

from typing import Any

import pytest

from trapetum.errors import CheckpointError, UnsupportedModelError
from trapetum.models.config import parse_config
from trapetum.models.rope import Rope

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
    "torch_dtype": "bfloat16",
}


def changed(**keys: Any) -> dict[str, Any]:
    """BASE with keys set, or removed where the value is ``...``."""
    return {k: v for k, v in {**BASE, **keys}.items() if v is not ...}


def family(name: str, **keys: Any) -> dict[str, Any]:
    return changed(architectures=..., model_type=name, **keys)


def test_plain() -> None:
    c = parse_config(BASE)
    assert (c.hidden_size, c.intermediate_size, c.num_hidden_layers, c.vocab_size) == (128, 256, 3, 96)
    assert (c.num_attention_heads, c.num_key_value_heads, c.head_dim) == (4, 2, 32)
    assert (c.rms_norm_eps, c.max_position_embeddings, c.dtype) == (1e-5, 256, "bfloat16")
    assert c.windows == (None, None, None)
    assert c.dimensions["query"], c.dimensions["key_value"] == (128, 64)


@pytest.mark.parametrize("value", [..., None])
def test_missing_or_null_kv_heads_mean_all_heads(value: Any) -> None:
    assert parse_config(changed(num_key_value_heads=value)).num_key_value_heads == 4


def test_mistral_defaults_follow_transformers() -> None:
    c = parse_config(family("mistral", num_attention_heads=16, num_key_value_heads=...))
    assert c.num_key_value_heads == 8
    assert c.windows == (4096,) * 3
    assert parse_config(family("mistral", sliding_window=None)).windows == (None,) * 3
    assert parse_config(family("mistral", sliding_window=7)).windows == (7,) * 3


def test_qwen_windows() -> None:
    on = {"use_sliding_window": True, "sliding_window": 5}
    assert parse_config(family("qwen2", sliding_window=5)).windows == (None,) * 3
    assert parse_config(family("qwen2", **on)).windows == (None,) * 3  # max_window_layers is 28
    assert parse_config(family("qwen2", **on, max_window_layers=1)).windows == (None, 5, 5)
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    assert parse_config(family("qwen3", **on, layer_types=types)).windows == (5, None, 5)
    with pytest.raises(UnsupportedModelError, match="layer_types"):
        parse_config(family("qwen3", **on, layer_types=["chunked_attention"] * 3))


def test_head_dim() -> None:
    assert parse_config(changed(head_dim=64)).dimensions["query"] == 256
    assert parse_config(changed(head_dim=None)).head_dim == 32
    assert parse_config(family("qwen3", head_dim=...)).head_dim == 128  # its own default, not hidden/heads
    with pytest.raises(CheckpointError, match="head_dim"):
        parse_config(changed(num_attention_heads=6, num_key_value_heads=6))


def test_dtype_in_both_spellings() -> None:
    assert parse_config(changed(torch_dtype=..., dtype="torch.float16")).dtype == "float16"
    assert parse_config(changed(torch_dtype=...)).dtype is None


@pytest.mark.parametrize(("value", "ids"), [(2, (2,)), ([1, 2], (1, 2)), (None, ()), (..., ()), (-1, ())])
def test_eos(value: Any, ids: tuple[int, ...]) -> None:
    assert parse_config(changed(eos_token_id=value)).eos_token_ids == ids


@pytest.mark.parametrize("value", [True, False, ..., None])
def test_tied_is_told_from_unstated(value: Any) -> None:
    expected = value if isinstance(value, bool) else None
    assert parse_config(changed(tie_word_embeddings=value)).tie_word_embeddings is expected


@pytest.mark.parametrize(
    ("outer", "inner", "found"),
    [(True, False, None), (False, True, None), (True, ..., True), (..., False, False), (False, False, False)],
)
def test_a_wrapper_and_its_text_model_may_contradict_each_other_about_the_head(
    outer: Any, inner: Any, found: bool | None
) -> None:
    """Mistral 3 as transformers saves it says both; then a head tensor tells."""
    stated = {key: value for key, value in (("outer", outer), ("inner", inner)) if value is not ...}
    text = {k: v for k, v in BASE.items() if k not in ("architectures", "tie_word_embeddings")}
    text |= {"model_type": "llama"} | ({"tie_word_embeddings": inner} if "inner" in stated else {})
    config = {"architectures": ["WrapperForConditionalGeneration"], "text_config": text}
    config |= {"tie_word_embeddings": outer} if "outer" in stated else {}
    assert parse_config(config).tie_word_embeddings is found


def test_nested_text_config() -> None:
    c = parse_config(
        {
            "architectures": ["LlavaForConditionalGeneration"],
            "model_type": "llava",
            "tie_word_embeddings": True,
            "vision_config": {"hidden_size": 32},
            "text_config": BASE,
        }
    )
    assert c.hidden_size == 128
    assert c.tie_word_embeddings is True
    assert c.architecture.model_type == "llama"


@pytest.mark.parametrize(
    "key", ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"]
)
@pytest.mark.parametrize("value", [..., None, 0, -4, 1.5, "128", True])
def test_required_integers(key: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=rf"config\.json.*{key}"):
        parse_config(changed(**{key: value}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rms_norm_eps", -1e-5),
        ("rms_norm_eps", "small"),
        ("tie_word_embeddings", "yes"),
        ("eos_token_id", ["</s>"]),
        ("num_key_value_heads", 3),
        ("max_position_embeddings", 0),
    ],
)
def test_impossible_values(key: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=key):
        parse_config(changed(**{key: value}))


def test_bad_window() -> None:
    with pytest.raises(CheckpointError, match="sliding_window"):
        parse_config(family("mistral", sliding_window=0))


def test_other_activation_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="relu2"):
        parse_config(changed(hidden_act="relu2"))


@pytest.mark.parametrize(
    "keys", [{"partial_rotary_factor": 0.5}, {"rope_scaling": {"partial_rotary_factor": 0.5}}]
)
def test_partial_rotation_is_refused_where_a_family_has_none(keys: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match="partial_rotary_factor"):
        parse_config(changed(**keys))


def test_no_architecture_names_file_and_keys() -> None:
    with pytest.raises(CheckpointError, match=r"config\.json.*architectures.*model_type"):
        parse_config(changed(architectures=..., model_type=...))


def test_defaults_equal_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers", minversion="5.0")
    for name in ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "smollm3", "olmo2"):
        theirs = transformers.AutoConfig.for_model(name)
        keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
        ours = parse_config({"model_type": name, **{k: getattr(theirs, k) for k in keys}})
        head = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
        assert ours.num_key_value_heads == theirs.num_key_value_heads
        assert ours.head_dim == head
        assert ours.rms_norm_eps == theirs.rms_norm_eps
        assert ours.windows[0] == getattr(theirs, "sliding_window", None)
        assert ours.rope.theta == theirs.rope_parameters["rope_theta"]


GEMMA3 = {
    "model_type": "gemma3_text",
    "num_hidden_layers": 4,
    "sliding_window": 512,
    "sliding_window_pattern": 3,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}
SLIDING, FULL = "sliding_attention", "full_attention"


def test_gemma3_in_both_spellings() -> None:
    old = parse_config(GEMMA3)
    new = parse_config(
        {
            "model_type": "gemma3_text",
            "num_hidden_layers": 4,
            "sliding_window": 512,
            "layer_types": [SLIDING, SLIDING, FULL, SLIDING],
            "rope_parameters": {
                SLIDING: {"rope_type": "default", "rope_theta": 1e4},
                FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            },
        }
    )
    assert old.layer_types == new.layer_types == (SLIDING, SLIDING, FULL, SLIDING)
    assert old.windows == new.windows == (512, 512, None, 512)
    assert old.ropes == new.ropes
    local, full = Rope(theta=1e4), Rope("linear", theta=1e6, factor=8.0)
    assert new.ropes == (local, local, full, local)
    assert new.rope == full


def test_gemma3_in_its_multimodal_wrapper_with_hardly_any_keys() -> None:
    """As gemma-3-4b was published: sizes that are the family's own are left out."""
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    c = parse_config(
        {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text}
    )
    assert (c.vocab_size, c.num_attention_heads, c.num_key_value_heads, c.head_dim) == (262_208, 8, 4, 256)
    assert c.windows[:6] == (1024,) * 5 + (None,)
    assert c.attention_scale == 256**-0.5
    assert (c.hidden_act, c.embedding_scale) == ("gelu_pytorch_tanh", 2560**0.5)


@pytest.mark.parametrize("text", [GEMMA3, GEMMA3 | {"rope_scaling": None}])
def test_gemma3_is_read_as_transformers_reads_it(text: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.0")
    theirs = transformers.AutoConfig.for_model(**{k: v for k, v in text.items() if v is not None})
    ours, again = parse_config(text), parse_config(theirs.to_dict())
    assert ours.layer_types == again.layer_types == tuple(theirs.layer_types)
    assert ours.ropes == again.ropes
    for kind, rope in zip(ours.layer_types, ours.ropes):
        stated = theirs.rope_parameters[kind]
        assert rope is not None
        assert (rope.type, rope.theta) == (stated["rope_type"], stated["rope_theta"])
        assert rope.factor == stated.get("factor", 1.0)


def test_a_layer_type_without_rotary_parameters_is_refused() -> None:
    with pytest.raises(CheckpointError, match="full_attention"):
        parse_config(GEMMA3 | {"rope_parameters": {SLIDING: {"rope_type": "default"}}})


def test_a_layer_type_whose_rotary_parameters_are_null_has_none() -> None:
    c = parse_config(GEMMA3 | {"rope_parameters": {SLIDING: {"rope_theta": 1e4}, FULL: None}})
    assert [rope is None for rope in c.ropes] == [False, False, True, False]


def test_smollm3_layers_without_rotary_embedding() -> None:
    c = parse_config(family("smollm3", num_hidden_layers=8))
    assert [i for i, rope in enumerate(c.ropes) if rope is None] == [3, 7]
    c = parse_config(family("smollm3", no_rope_layers=[0, 1, 1], use_sliding_window=True, sliding_window=9))
    assert [rope is None for rope in c.ropes] == [True, False, False]
    assert c.windows == (9, None, None)
    with pytest.raises(CheckpointError, match="no_rope_layers"):
        parse_config(family("smollm3", no_rope_layers=[0, 1]))


def test_phi3_partial_rotation() -> None:
    c = parse_config(family("phi3", hidden_size=96, num_attention_heads=2, partial_rotary_factor=0.75))
    assert (c.head_dim, c.rotary_dim) == (48, 36)
    inner = {"rope_type": "default", "partial_rotary_factor": 0.5}
    c = parse_config(family("phi3", hidden_size=96, num_attention_heads=2, rope_parameters=inner))
    assert c.rotary_dim == 24


def test_options_of_other_families_are_ignored_as_in_transformers() -> None:
    c = parse_config(changed(attn_logit_softcapping=50.0, query_pre_attn_scalar=7, no_rope_layers=[0, 0, 0]))
    assert c.attention_softcap is None
    assert c.attention_scale is None
    assert None not in c.ropes


def test_models_that_see_the_future_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="use_bidirectional_attention"):
        parse_config(GEMMA3 | {"use_bidirectional_attention": True})


def test_dynamic_scaling_reaches_beyond_the_trained_length() -> None:
    c = parse_config(changed(rope_scaling={"type": "dynamic", "factor": 4.0}))
    assert (c.max_position_embeddings, c.max_length) == (256, 1024)
    assert parse_config(BASE).max_length == 256
