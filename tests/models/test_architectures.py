"""Roles, names and promised shapes of the architecture table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trapetum.errors import CheckpointError, UnsupportedModelError
from trapetum.formats.source import open_source
from trapetum.models.architectures import ARCHITECTURES, Role, resolve
from trapetum.models.config import parse_config

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 8,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "vocab_size": 10,
    "tie_word_embeddings": False,
}
# Small sizes under the keys of every family; each reads its own.
SIZES: dict[str, Any] = {
    **{k: v for k, v in CONFIG.items() if k != "architectures"},
    "hidden_size": 16,
    "head_dim": 8,
    "num_hidden_layers": 4,
    "pad_token_id": 0,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 20,
    "num_experts": 6,
    "num_local_experts": 6,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
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
}
OTHER_SIZES: dict[str, dict[str, int]] = {
    "deepseek_v2": {"first_k_dense_replace": 1, "n_group": 2},
    "deepseek_v3": {"first_k_dense_replace": 1, "n_group": 2},
    "olmoe": {"head_dim": 4},  # its norms are as wide as the model
}
LLAMA = resolve({"model_type": "llama", "num_hidden_layers": 2})


@pytest.mark.parametrize("prefix", ["model.", "", "language_model.model.", "model.language_model."])
def test_roles_under_every_prefix(prefix: str) -> None:
    at = prefix + "layers.1."
    for part, name in {
        "q": "self_attn.q_proj",
        "k": "self_attn.k_proj",
        "v": "self_attn.v_proj",
        "o": "self_attn.o_proj",
        "gate": "mlp.gate_proj",
        "up": "mlp.up_proj",
        "down": "mlp.down_proj",
    }.items():
        assert LLAMA.role(f"{at}{name}.weight") == Role(part, 1, None, part)
        assert LLAMA.role(f"{at}{name}.bias") == Role("bias", 1, None, part)
    assert LLAMA.role(prefix + "embed_tokens.weight") == Role("embed", part="embed")
    assert LLAMA.role(prefix + "norm.weight") == Role("norm", part="final_norm")
    assert LLAMA.role(at + "input_layernorm.weight") == Role("norm", 1, None, "attn_norm")


@pytest.mark.parametrize("name", ["lm_head.weight", "language_model.lm_head.weight"])
def test_head(name: str) -> None:
    assert LLAMA.role(name) == Role("head", part="head")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model.layers.0.self_attn.rotary_emb.inv_freq", "buffer"),
        ("model.layers.0.self_attn.masked_bias", "buffer"),
        ("model.position_ids", "buffer"),
        ("model.num_batches_tracked", "buffer"),
        ("vision_tower.layers.0.self_attn.q_proj.weight", "other"),
        ("model.layers.2.self_attn.q_proj.weight", "other"),  # beyond num_hidden_layers
        ("model.layers.2.eh_proj.weight", "other"),
        ("model.layers.0.self_attn.q_norm.weight", "other"),  # not in a llama
        ("model.layers.0.self_attn.q_proj.weight_scale_inv", "other"),
        ("", "other"),
    ],
)
def test_what_is_not_a_weight_of_the_text_model(name: str, kind: str) -> None:
    assert LLAMA.role(name).kind == kind


def test_names_and_roles_are_inverse() -> None:
    for arch in ARCHITECTURES.values():
        for module in arch.modules:
            layer, expert = 11 if module.per_layer else None, 5 if module.per_expert else None
            name = arch.tensor_name(module.part, layer, expert=expert)
            assert arch.role(name) == Role(module.kind, layer, expert, module.part)
            bias = arch.tensor_name(module.part, layer, expert=expert, suffix="bias")
            assert arch.role(bias) == Role("bias", layer, expert, module.part)


def test_expected_shapes_by_hand() -> None:
    config = parse_config(CONFIG)
    shapes = config.architecture.expected_shapes(config)
    assert len(shapes) == 2 * 11 + 3
    assert shapes["model.layers.1.self_attn.q_proj.weight"] == (24, 8)
    assert shapes["model.layers.1.self_attn.k_proj.weight"] == (12, 8)
    assert shapes["model.layers.1.self_attn.o_proj.weight"] == (8, 24)
    assert shapes["model.layers.0.self_attn.k_norm.weight"] == (6,)
    assert shapes["model.layers.0.mlp.down_proj.weight"] == (8, 24)
    assert shapes["lm_head.weight"] == (10, 8)


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_expected_shapes_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers", minversion="5.0")
    theirs = transformers.AutoConfig.for_model(name, **SIZES | OTHER_SIZES.get(name, {}))
    transformers.AutoModelForCausalLM.from_config(theirs).save_pretrained(tmp_path)
    with open_source(tmp_path) as source:
        state = {k: source.shape(k) for k in source.names()}
        ours = parse_config(source.config)
    arch = ours.architecture
    shapes = arch.expected_shapes(ours, state)
    biases = {k for k in state if arch.role(k).kind == "bias"}
    assert shapes == {k: v for k, v in state.items() if k not in biases}
    assert set(arch.expected_biases(ours, state)) == biases
    arch.check_tensors(ours, state)


def test_faults_are_listed_together() -> None:
    config = parse_config(CONFIG)
    shapes = config.architecture.expected_shapes(config)
    shapes["model.layers.0.self_attn.q_proj.bias"] = (8,)
    shapes["model.layers.1.mlp.up_proj.weight"] = (25, 8)
    del shapes["lm_head.weight"]
    assert config.architecture.faults(config, shapes) == [
        "lm_head.weight is missing",
        "model.layers.1.mlp.up_proj.weight is [25, 8], not [24, 8]",
        "model.layers.0.self_attn.q_proj.bias is [8], not [24]",
    ]
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is missing.*\[25, 8\]") as caught:
        config.architecture.check_tensors(config, shapes)
    assert "tie_word_embeddings" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("name", "flags", "parts"),
    [
        ("llama", {}, ""),
        ("llama", {"attention_bias": True}, "q k v o"),
        ("llama", {"mlp_bias": True}, "gate up down"),
        ("mistral", {"attention_bias": True}, ""),
        ("qwen2", {}, "q k v"),
        ("qwen3", {"attention_bias": True}, "q k v o"),
    ],
)
def test_promised_biases_must_be_there(name: str, flags: dict[str, bool], parts: str) -> None:
    config = parse_config({**CONFIG, "architectures": None, "model_type": name, **flags})
    arch = config.architecture
    promised = [arch.tensor_name(p, layer, suffix="bias") for p in parts.split() for layer in range(2)]
    assert arch.expected_biases(config) == promised
    assert arch.faults(config, arch.expected_shapes(config)) == [f"{n} is missing" for n in promised]


def test_many_faults_stay_one_line() -> None:
    config = parse_config(CONFIG)
    with pytest.raises(CheckpointError, match="and 17 more") as caught:
        config.architecture.check_tensors(config, {})
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("tied", [True, None])
def test_a_tied_or_unstated_head_may_be_absent(tied: bool | None) -> None:
    config = parse_config({**CONFIG, "tie_word_embeddings": tied})
    shapes = config.architecture.expected_shapes(config)
    assert "lm_head.weight" not in shapes
    config.architecture.check_tensors(config, shapes)
    config.architecture.check_tensors(config, {**shapes, "lm_head.weight": (10, 8)})


def test_one_part_under_two_names() -> None:
    with pytest.raises(CheckpointError, match="same part"):
        LLAMA.index(["model.norm.weight", "norm.weight"])


def test_unknown_is_refused_with_the_list() -> None:
    with pytest.raises(
        UnsupportedModelError, match=r"MambaForCausalLM.*LlamaForCausalLM, MistralForCausalLM"
    ) as caught:
        resolve({"architectures": ["MambaForCausalLM"], "model_type": "llama"})
    assert "--any-architecture" in str(caught.value.hint)
    with pytest.raises(UnsupportedModelError, match="mamba"):
        resolve({"model_type": "mamba"})


def test_any_architecture_guesses() -> None:
    arch = resolve({"model_type": "mamba"}, any_architecture=True)
    assert arch.any_architecture
    kinds = {
        "backbone.layers.0.mixer.in_proj.weight": "linear",
        "backbone.layers.0.norm.weight": "norm",
        "backbone.embeddings.weight": "embed",
        "lm_head.weight": "head",
        "backbone.layers.0.mixer.conv1d.bias": "bias",
        "model.layers.0.mlp.gate.weight": "router",
        "backbone.layers.0.mixer.A_log": "other",
    }
    assert {name: arch.role(name).kind for name in kinds} == kinds
    arch.check_tensors(None, {})  # type: ignore[arg-type]  # promises nothing


PHI3: dict[str, Any] = {
    "model_type": "phi3",
    "hidden_size": 8,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 10,
}
MIXTRAL: dict[str, Any] = {**PHI3, "model_type": "mixtral", "num_local_experts": 3, "num_experts_per_tok": 2}


def test_parts_of_fused_tensors_are_rows() -> None:
    config = parse_config(PHI3)
    arch = config.architecture
    shapes = arch.expected_shapes(config)
    assert shapes["model.layers.1.self_attn.qkv_proj.weight"] == (8 + 4 + 4, 8)
    assert shapes["model.layers.0.mlp.gate_up_proj.weight"] == (48, 8)
    names = arch.index(shapes)
    found = {part: arch.locate(config, names, part, 1) for part in ("q", "k", "v", "gate", "up", "down", "o")}
    rows = {part: place.rows for part, place in found.items() if place is not None}
    assert rows == {
        "q": slice(0, 8),
        "k": slice(8, 12),
        "v": slice(12, 16),
        "gate": slice(0, 24),
        "up": slice(24, 48),
        "down": None,
        "o": None,
    }
    assert found["v"] is not None
    assert found["v"].name == "model.layers.1.self_attn.qkv_proj.weight"
    assert arch.locate(config, names, "q_norm", 1) is None
    assert arch.locate(config, {}, "q", 1) is None


def test_the_form_that_a_checkpoint_has_is_the_one_that_is_promised() -> None:
    config = parse_config(MIXTRAL)
    arch = config.architecture
    single = arch.expected_shapes(config)
    one = "model.layers.0.block_sparse_moe.experts.2.w3.weight"
    assert single[one] == (24, 8)
    stacked = arch.expected_shapes(config, ["model.layers.0.mlp.experts.gate_proj.weight"])
    whole = "model.layers.1.mlp.experts.up_proj.weight"
    assert stacked[whole] == (3, 24, 8)
    assert one not in stacked
    assert whole not in single
    assert arch.faults(config, single) == arch.faults(config, stacked) == []
    for shapes, rows in ((single, None), (stacked, slice(48, 72))):
        place = arch.locate(config, arch.index(shapes), "expert_up", 1, expert=2)
        assert place is not None
        assert place.rows == rows
    del stacked[whole]
    assert arch.faults(config, stacked) == [f"{whole} is missing"]


def test_a_part_in_a_layer_that_has_none_is_a_fault() -> None:
    config = parse_config(
        {
            **MIXTRAL,
            "model_type": "qwen3_moe",
            "moe_intermediate_size": 16,
            "num_experts": 3,
            "mlp_only_layers": [0],
        }
    )
    arch = config.architecture
    shapes = arch.expected_shapes(config)
    assert "model.layers.0.mlp.gate_proj.weight" in shapes
    assert "model.layers.1.mlp.gate_proj.weight" not in shapes
    assert arch.faults(config, shapes) == []
    shapes["model.layers.0.mlp.gate.weight"] = (3, 8)
    assert arch.faults(config, shapes) == [
        "model.layers.0.mlp.gate.weight is there, and that layer has no such part"
    ]


def test_sums_of_dimensions() -> None:
    config = parse_config(PHI3)
    assert config.size("query+key_value+key_value") == 16
    assert config.size("1") == 1
    with pytest.raises(KeyError):
        config.size("depth")


def test_routed_roles() -> None:
    arch = resolve(MIXTRAL)
    one = arch.role("model.layers.0.block_sparse_moe.experts.2.w1.weight")
    assert one == Role("gate", 0, 2, "expert_gate")
    assert one.routed
    assert arch.role("model.layers.0.mlp.experts.gate_proj.weight").routed
    assert not arch.role("model.layers.0.block_sparse_moe.gate.weight").routed
    assert not LLAMA.role("model.layers.0.mlp.gate_proj.weight").routed
