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
from trapetum.formats.safetensors_writer import Entry, SafetensorsWriter
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
V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 192,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "q_lora_rank": 96,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 48,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
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


def write(folder: Path, config: dict[str, Any], tokenizer: dict[str, Any]) -> Path:
    parsed = parse_config(config)
    rng = np.random.default_rng(7)
    folder.mkdir(parents=True)
    shapes = parsed.architecture.expected_shapes(parsed)
    with SafetensorsWriter(
        folder / "model.safetensors", [Entry(n, np.dtype("<f4"), s) for n, s in shapes.items()]
    ) as writer:
        for name, shape in shapes.items():
            scale = 0.1 if len(shape) == 1 else 1.0 if "embed" in name else shape[-1] ** -0.5
            values = rng.standard_normal(shape) * scale + ("norm" in name)
            writer.write(name, values.astype(np.float32))
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


@pytest.fixture
def make(tmp_path, spm):
    def one(case: str) -> Path:
        return write(tmp_path / case, MODELS[case], spm)

    return one


def worst(engine, model) -> float:
    """Largest difference of log-probabilities, in units of the spread of our logits."""
    found = []
    for ids in PROMPTS:
        ours = model.logits(ids)[-1].astype(np.float64)
        spread = ours.std()
        ours -= np.log(np.exp(ours - ours.max()).sum()) + ours.max()
        found.append(np.abs(engine.log_probabilities(ids) - ours).max() / spread)
    return max(found)


@pytest.mark.parametrize("case", MODELS)
def test_llama_cpp_computes_the_same(case, make, llama_cpp, tmp_path):
    folder = make(case)
    with trapetum.load(folder) as model:
        exact = export_artifact(folder, "gguf", tmp_path / "f32.gguf", gguf_type="F32")
        assert worst(llama_cpp(exact), model) <= 2e-5
        half = export_artifact(folder, "gguf", tmp_path / "f16.gguf", gguf_type="F16")
    with trapetum.load(
        half
    ) as rounded:  # a rounded weight may choose another expert: compare with what the file says
        # engines round activations too; over 27 layers that adds up
        assert worst(llama_cpp(half), rounded) <= (5e-3 if case != "v2-lite" else 0.5)


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
        assert keys.shape == (4, 64, 32)
        assert np.array_equal(keys, whole[:, :32].transpose(0, 2, 1))
        assert np.array_equal(values, whole[:, 32:])
        rows = view.load("model.layers.1.self_attn.k_b_proj.weight", slice(60, 140)).dequantize()
        assert np.array_equal(rows, keys.reshape(-1, 32)[60:140])
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
        assert np.array_equal(keys, whole[:, :32].transpose(0, 2, 1))
        assert file.metadata["deepseek2.attention.key_length_mla"] == 48
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
def test_what_engines_compute_otherwise_is_refused(change, words, spm, tmp_path):
    folder = write(tmp_path / "m", V3 | change, spm)
    with pytest.raises(UnsupportedModelError, match=words):
        export_artifact(folder, "gguf", tmp_path / "x.gguf")
