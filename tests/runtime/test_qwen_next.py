"""Qwen3-Next and Qwen3.5 against transformers: whole models, delta nets and gated attention mixed."""

from __future__ import annotations

import json

import numpy as np
import pytest

import trapetum
from trapetum.models.config import parse_config

COMMON = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "max_position_embeddings": 512,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000_000,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
FAMILIES = {
    "qwen3.5": ("Qwen3_5", "Qwen3_5TextConfig", COMMON),
    "qwen3.5-moe": ("Qwen3_5Moe", "Qwen3_5MoeTextConfig", COMMON | EXPERTS),
    "qwen3-next": ("Qwen3Next", "Qwen3NextConfig", COMMON | EXPERTS | {"norm_topk_prob": True}),
}


def make_model(folder, family, changes=()):
    """A tiny random model of transformers, saved; (model, folder)."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    prefix, config_class, values = FAMILIES[family]
    values = dict(values) | dict(changes)
    if family == "qwen3-next":
        values["rope_parameters"] = {
            k: v for k, v in values["rope_parameters"].items() if not k.startswith("mrope")
        }
    config = getattr(transformers, config_class)(**values)
    torch.manual_seed(7)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("dt_bias"):
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif parameter.ndim >= 2:
                parameter.mul_(3.0)
    model.save_pretrained(folder)
    return model, folder


def expected_logits(model, ids):
    import torch

    with torch.no_grad():
        return model(torch.tensor([ids.tolist()])).logits[0].float().numpy()


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_agree_with_transformers(tmp_path, family):
    model, folder = make_model(tmp_path, family)
    ids = np.random.default_rng(0).integers(0, 320, 200)
    expected = expected_logits(model, ids)
    with trapetum.load(folder) as ours:
        got = ours.logits(ids)
        assert np.abs(got - expected).max() < 1e-4 * np.abs(expected).max()
        new = ours.generate(ids[:20].tolist(), 8, stop_ids=())
    text = ids[:20].tolist()
    for token in new:
        assert token == int(expected_logits(model, np.array(text))[-1].argmax())
        text.append(token)


def test_nested_config_of_a_multimodal_model(tmp_path):
    model, folder = make_model(tmp_path, "qwen3.5")
    inner = json.loads((folder / "config.json").read_text())
    inner.pop("architectures", None)
    outer = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": inner,
        "vision_config": {"depth": 2},
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(outer))
    ids = np.arange(40) % 320
    with trapetum.load(folder) as ours:
        assert np.abs(ours.logits(ids) - expected_logits(model, ids)).max() < 1e-3


def test_layer_types_without_a_list():
    values = {k: v for k, v in COMMON.items() if k != "rope_parameters"}
    config = parse_config({"model_type": "qwen3_5_text", **values, "full_attention_interval": 2})
    assert config.layer_types == ("linear_attention", "full_attention") * 2
    assert config.rotary_dim == 8


@pytest.mark.parametrize("family", FAMILIES)
def test_quantized_artifact_runs(tmp_path, family):
    _, folder = make_model(tmp_path / "model", family)
    trapetum.quantize_model(folder, tmp_path / "art", bits=4)
    art = trapetum.open_artifact(tmp_path / "art")
    kept = [n for n in art.names() if art.layout(n) == "dense"]
    assert not [n for n in kept if n.endswith(("qkv.weight", "qkvz.weight", "z.weight", "out_proj.weight"))]
    assert [n for n in kept if n.endswith("conv1d.weight")]
    ids = np.arange(60) % 320
    dense = trapetum.export_artifact(tmp_path / "art", "hf", tmp_path / "dense")
    with trapetum.load(folder) as a, trapetum.load(tmp_path / "art") as b, trapetum.load(dense) as c:
        exact, near, decoded = a.logits(ids), b.logits(ids), c.logits(ids)
    assert 0 < np.abs(near - exact).mean() < np.abs(exact).mean()
    assert np.abs(near - decoded).max() < 1e-4 * np.abs(decoded).max()
