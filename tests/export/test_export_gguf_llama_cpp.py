"""Exported GGUF files in a real llama.cpp: logits, generated tokens and token ids against our own runtime."""

from __future__ import annotations

import json

import numpy as np
import pytest

import trapetum
from trapetum.export import export_artifact
from trapetum.formats.safetensors_writer import Entry, SafetensorsWriter
from trapetum.formats.source import open_source

PROMPTS = ([7], [1, 40, 3, 400, 99, 8], list(range(20, 60)))
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LONGROPE = {
    "type": "longrope",
    "short_factor": [1.0 + i / 20 for i in range(24)],
    "long_factor": [1.2 + i / 4 for i in range(24)],
}
GEMMA = {
    "num_hidden_layers": 4,
    "head_dim": 64,
    "query_pre_attn_scalar": 64,
    "sliding_window": 16,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
}
GRANITE = {
    "embedding_multiplier": 6.0,
    "residual_multiplier": 0.3,
    "attention_multiplier": 0.05,
    "logits_scaling": 4.0,
}
ALL_BIASES = ("q", "k", "v", "o", "gate", "up", "down")
MODELS = {
    "llama": ("llama", {}),
    "llama-llama3-tied": ("llama", {"tie_word_embeddings": True, "rope_parameters": LLAMA3}),
    "llama-linear": ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True, "biases": ALL_BIASES}),
    "llama-head-dim": ("llama", {"head_dim": 32}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {"biases": ("q", "k", "v"), "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 64}),
    "qwen3-biases": ("qwen3", {"head_dim": 64, "biases": ("q", "k", "v")}),
    "qwen2-yarn": ("qwen2", {"biases": ("q", "k", "v"), "rope_scaling": YARN}),
    "qwen3-yarn-factor": (
        "qwen3",
        {"head_dim": 64, "rope_scaling": YARN | {"attention_factor": 1.3}},
    ),
    "phi3": ("phi3", {"original_max_position_embeddings": 128}),
    "phi3-partial-longrope": (
        "phi3",
        {"partial_rotary_factor": 0.75, "original_max_position_embeddings": 16, "rope_scaling": LONGROPE},
    ),
    "gemma": ("gemma", {"head_dim": 64, "tie_word_embeddings": True}),
    "olmo3": ("olmo3", {"num_hidden_layers": 5, "sliding_window": 16, "rope_scaling": YARN}),
    "olmo3-pattern": (
        "olmo3",
        {"sliding_window": 16, "layer_types": ["full_attention", "sliding_attention"]},
    ),
    "gemma2": ("gemma2", GEMMA | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 7.0}),
    "gemma2-pattern": (
        "gemma2",
        GEMMA | {"layer_types": ["full_attention", "full_attention", "sliding_attention", "full_attention"]},
    ),
    "gemma3": (
        "gemma3_text",
        GEMMA | {"num_hidden_layers": 7, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    ),
    "gemma3-capped-untied": (
        "gemma3_text",
        GEMMA | {"final_logit_softcapping": 6.0, "tie_word_embeddings": False, "sliding_window_pattern": 3},
    ),
    "granite": ("granite", GRANITE),
    "granite-tied-biases": (
        "granite",
        GRANITE
        | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "biases": ALL_BIASES},
    ),
    "granite-llama3": ("granite", GRANITE | {"rope_parameters": LLAMA3, "rms_norm_eps": 1e-3}),
    "seed-oss": ("seed_oss", {"head_dim": 32, "biases": ("q", "k", "v")}),
    "seed-oss-no-bias": ("seed_oss", {"head_dim": 64, "attention_bias": False}),
    "smollm3": ("smollm3", {"num_hidden_layers": 5, "tie_word_embeddings": True}),
    "olmo2": ("olmo2", {"num_key_value_heads": 2}),
}
# ggml's GELU goes through a table of float16.
TOLERANCE = {"gemma": 5e-3, "gemma2": 5e-3, "gemma3_text": 5e-3}


def dense_copy(gguf, folder):
    """The values of a GGUF as a float32 checkpoint, so that our runtime computes with exactly them."""
    folder.mkdir()
    with open_source(gguf) as source:
        values = {n: source.load(n).dequantize() for n in source.names()}
        (folder / "config.json").write_text(json.dumps(source.config))
    with SafetensorsWriter(
        folder / "model.safetensors", [Entry(n, v.dtype, v.shape) for n, v in values.items()]
    ) as writer:
        for name, array in values.items():
            writer.write(name, array)
    return folder


@pytest.mark.parametrize("case", MODELS)
def test_every_family_agrees(case, tiny_model, llama_cpp, tmp_path):
    family, options = MODELS[case]
    folder = tiny_model(family, **options)
    model = trapetum.load(folder)
    prompts = PROMPTS[2:] if "longrope" in case else PROMPTS  # engines take the long factors by their context
    exact = llama_cpp(export_artifact(folder, "gguf", tmp_path / "f32.gguf", gguf_type="F32"))
    assert exact.worst(model, prompts) <= TOLERANCE.get(family, 2e-5)
    half = llama_cpp(export_artifact(folder, "gguf", tmp_path / "f16.gguf", gguf_type="F16"))
    assert half.worst(model, prompts) <= 5e-3
    if family not in TOLERANCE:
        assert half.generate(prompts[-1], 16) == model.generate(prompts[-1], 16, temperature=0, stop_ids=())


@pytest.mark.parametrize("case", MODELS)
def test_every_family_is_read_back(case, tiny_model, tmp_path):
    """The same logits, and the same file when it is written again."""
    family, options = MODELS[case]
    folder = tiny_model(family, **options)
    file = export_artifact(folder, "gguf", tmp_path / "f32.gguf", gguf_type="F32")
    ids = PROMPTS[2]
    with trapetum.load(folder) as source, trapetum.load(file) as read:
        expected = source.logits(ids)
        assert np.abs(read.logits(ids) - expected).max() <= 1e-6 * np.abs(expected).max()
    again = export_artifact(file, "gguf", tmp_path / "again.gguf", gguf_type="F32")
    assert again.read_bytes() == file.read_bytes()


def test_row_order_is_what_the_agreement_rests_on(tiny_model, llama_cpp, tmp_path, monkeypatch):
    folder = tiny_model()
    monkeypatch.setattr("trapetum.export.gguf.stored_row_order", lambda rows, heads: np.arange(rows))
    engine = llama_cpp(export_artifact(folder, "gguf", tmp_path / "f32.gguf", gguf_type="F32"))
    assert engine.worst(trapetum.load(folder), PROMPTS) > 0.1


@pytest.mark.parametrize("kind", ["auto", "Q4_K", "Q8_0", "IQ4_NL", "Q2_K"])
def test_codebooks_stay_within_the_noise_of_quantized_activations(kind, tiny_model, llama_cpp, tmp_path):
    artifact = tmp_path / "artifact"
    trapetum.quantize_model(tiny_model(), artifact, bits=4)
    file = export_artifact(artifact, "gguf", tmp_path / "m.gguf", gguf_type=kind)
    found = llama_cpp(file).differences(trapetum.load(dense_copy(file, tmp_path / "dense")), PROMPTS)
    assert np.sqrt(np.mean(found**2)) <= 4e-2


@pytest.mark.parametrize("levels", [3, 4])
def test_ternary_runs_without_loss(levels, tiny_model, llama_cpp, tmp_path):
    artifact = tmp_path / "artifact"
    trapetum.quantize_model(
        tiny_model("qwen2", biases=("q", "k", "v")), artifact, scheme="ternary", levels=levels
    )
    file = export_artifact(artifact, "gguf", tmp_path / "m.gguf")
    with open_source(file) as stored, trapetum.open_artifact(artifact) as art:
        for name in art.names():
            assert np.array_equal(stored.load(name).dequantize(), art[name].dequantize())
    found = llama_cpp(file).differences(trapetum.load(artifact), PROMPTS)
    assert np.sqrt(np.mean(found**2)) <= 4e-2


def test_split_files_load_from_the_first(tiny_model, llama_cpp, tmp_path):
    folder = tiny_model()
    first = export_artifact(folder, "gguf", tmp_path / "m.gguf", gguf_type="F32", max_shard_size=2 << 20)
    assert first.name.startswith("m-00001-of-0")
    assert llama_cpp(first).worst(trapetum.load(folder), PROMPTS[1:2]) <= 2e-5


def test_demo_model_and_its_tokenizer(demo_model, demo_text, llama_cpp, tmp_path):
    model = trapetum.load(demo_model)
    file = export_artifact(demo_model, "gguf", tmp_path / "m.gguf", gguf_type="F16")
    engine = llama_cpp(file, vocab=2048, context=512)
    text = demo_text.read_text(encoding="utf-8")[:20000]
    text += "\n\n\t  Tabs, 12345 and 'quotes' isn't it\r\n naïve café 你好 🙂 <|im_start|>user\n"
    assert engine.tokenize(text) == model.tokenizer.encode(text)
    ids = model.tokenizer.encode("It was a dark and stormy night")
    assert engine.worst(model, [ids]) <= 5e-3
    assert engine.generate(ids, 24) == model.generate(ids, 24, temperature=0, stop_ids=())


def test_sentencepiece_tokens(tiny_model, demo_text, llama_cpp, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    text = demo_text.read_text(encoding="utf-8")[:30000]
    base = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    normal = tokenizers.normalizers
    backend.normalizer = normal.Sequence([normal.Prepend("\u2581"), normal.Replace(" ", "\u2581")])
    # Real tokenizers of this kind never join two words; the trainer is kept from it the same way.
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split("\u2581", "merged_with_next")
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=900, special_tokens=base, show_progress=False)
    backend.train_from_iterator(text.splitlines(), trainer)
    content = json.loads(backend.to_str())
    content["pre_tokenizer"] = None
    content["added_tokens"] = [t for t in content["added_tokens"] if t["id"] < 3]
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    }
    vocab = len(content["model"]["vocab"])
    folder = tiny_model(tokenizer=content, vocab_size=vocab + 4, num_hidden_layers=1)
    engine = llama_cpp(export_artifact(folder, "gguf", tmp_path / "m.gguf"), vocab=vocab + 4)
    ours = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    for sample in (text, "  two  spaces ", "héllo 你好 🙂", "a</s>b"):
        assert engine.tokenize(sample, mark=True) == ours.encode(sample).ids
