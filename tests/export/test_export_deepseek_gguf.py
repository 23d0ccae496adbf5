"""DeepSeek models as GGUF: in a real llama.cpp, and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trapetum
from trapetum.errors import UnsupportedModelError
from trapetum.export import export_artifact
from trapetum.export.latents import joined_latents, split_latents
from trapetum.formats.gguf import GgufFile
from trapetum.formats.source import open_source
from trapetum.models.config import parse_config
from trapetum.quantize.job import quantize_model

VOCAB = 512
PROMPTS = ([7], [1, 40, 3, 400, 99, 8], list(range(20, 60)))
YARN = {
    "type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32,
    "beta_slow": 1,
}
V3: dict[str, Any] = json.loads(Path(__file__).with_name("deepseek_v3.json").read_text()) | {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "max_position_embeddings": 128,
}
LITE = {
    **V3,
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "num_hidden_layers": 27,
    "q_lora_rank": None,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
}
MODELS = {
    "v3": V3,
    "v3-yarn": V3 | {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    "v3-one-group": V3 | {"n_group": 1, "topk_group": 1, "norm_topk_prob": False, "n_shared_experts": 2},
    "v2-lite": LITE | {"rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}},
    "v2-latent-queries": V3
    | {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "routed_scaling_factor": 4.0},
}


@pytest.fixture
def make(tiny_model):
    def one(case: str) -> Path:
        return tiny_model(MODELS[case]["model_type"], **MODELS[case])

    return one


@pytest.mark.parametrize("case", MODELS)
def test_llama_cpp_computes_the_same(case, make, llama_cpp, tmp_path):
    folder = make(case)
    with trapetum.load(folder) as model:
        exact = export_artifact(folder, "gguf", tmp_path / "f32.gguf", gguf_type="F32")
        assert llama_cpp(exact).worst(model, PROMPTS) <= 2e-5
        half = export_artifact(folder, "gguf", tmp_path / "f16.gguf", gguf_type="F16")
        assert llama_cpp(half).worst(model, PROMPTS) <= 5e-3


@pytest.mark.parametrize("case", MODELS)
def test_a_gguf_is_read_back(case, make, tmp_path):
    folder = make(case)
    file = export_artifact(folder, "gguf", tmp_path / "f32.gguf", gguf_type="F32")
    ids = PROMPTS[2]
    with trapetum.load(folder) as source, trapetum.load(file) as read:
        expected = source.logits(ids)
        assert np.abs(read.logits(ids) - expected).max() <= 1e-5 * np.abs(expected).max()
    again = export_artifact(file, "gguf", tmp_path / "again.gguf", gguf_type="F32")
    assert again.read_bytes() == file.read_bytes()


@pytest.mark.parametrize("case", ["v3-yarn", "v2-latent-queries"])
def test_a_gguf_goes_back_to_the_checkpoint(case, make, tmp_path):
    """kv_b whole, experts single, every value bit for bit."""
    folder = make(case)
    file = export_artifact(folder, "gguf", tmp_path / "f32.gguf", gguf_type="F32")
    back = export_artifact(file, "hf", tmp_path / "back")
    with open_source(back) as ours, open_source(folder) as theirs:
        assert set(ours.names()) == set(theirs.names())
        for name in theirs.names():
            assert np.array_equal(ours.load(name).dequantize(), theirs.load(name).dequantize()), name


def test_halves_by_hand(make):
    folder = make("v3")
    with open_source(folder) as source:
        view = split_latents(source, parse_config(source.config))
        whole = source.load("model.layers.1.self_attn.kv_b_proj.weight").dequantize().reshape(4, 80, 64)
        keys = view.load("model.layers.1.self_attn.k_b_proj.weight").dequantize()
        values = view.load("model.layers.1.self_attn.v_b_proj.weight").dequantize()
        assert keys.shape == (4, 64, 48)
        assert np.array_equal(keys, whole[:, :48].transpose(0, 2, 1))
        assert np.array_equal(values, whole[:, 48:])
        rows = view.load("model.layers.1.self_attn.k_b_proj.weight", slice(60, 140)).dequantize()
        assert np.array_equal(rows, keys.reshape(-1, 48)[60:140])
        assert "model.layers.1.self_attn.kv_b_proj.weight" not in view.names()
        again = joined_latents(view, parse_config(source.config))
        assert set(again.names()) == set(source.names())
        joined = again.load("model.layers.1.self_attn.kv_b_proj.weight", slice(70, 170)).dequantize()
        assert np.array_equal(joined, whole.reshape(-1, 64)[70:170])


def test_codebooks_give_exact_halves_in_float16(make, tmp_path):
    folder = make("v3")
    quantize_model(folder, tmp_path / "a", bits=4)
    path = export_artifact(tmp_path / "a", "gguf", tmp_path / "x.gguf")
    with GgufFile.open(path) as file, trapetum.open_artifact(tmp_path / "a") as artifact:
        whole = artifact["model.layers.2.self_attn.kv_b_proj.weight"].dequantize().reshape(4, 80, 64)
        assert file.tensors["blk.2.attn_k_b.weight"].type_name == "F16"
        keys = file.load("blk.2.attn_k_b.weight").dequantize()
        assert np.array_equal(keys, whole[:, :48].transpose(0, 2, 1))
        assert file.metadata["deepseek2.attention.key_length_mla"] == 64
        assert file.metadata["deepseek2.expert_gating_func"] == 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"q_lora_rank": None}, "without q_lora_rank"),
        ({"num_hidden_layers": 27}, "of 27 layers has no q_lora_rank"),
        ({"rope_interleave": False}, "neighbours"),
        ({"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}}, "expect them to be equal"),
        (
            {
                "architectures": ["DeepseekV2ForCausalLM"],
                "model_type": "deepseek_v2",
                "topk_method": "group_limited_greedy",
            },
            "group_limited_greedy",
        ),
    ],
)
def test_what_engines_compute_otherwise_is_refused(change, words, tiny_model, tmp_path):
    config = V3 | change
    folder = tiny_model(config["model_type"], **config)
    with pytest.raises(UnsupportedModelError, match=words):
        export_artifact(folder, "gguf", tmp_path / "x.gguf")
