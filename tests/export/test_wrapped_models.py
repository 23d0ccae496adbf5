"""Text models inside multimodal ones: other names and a nested config, and every output as of the text model alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import trapetum
from trapetum.export import export_artifact
from trapetum.formats.safetensors_writer import Entry, SafetensorsWriter
from trapetum.formats.source import open_source

SMALL = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2}
DELTA = {
    **SMALL,
    "num_hidden_layers": 4,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}
MODELS = {
    "llama": SMALL,
    "phi3": SMALL | {"original_max_position_embeddings": 128},
    "gemma3_text": SMALL | {"head_dim": 32, "query_pre_attn_scalar": 32, "tie_word_embeddings": True},
    "mixtral": SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_next": DELTA | EXPERTS,
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": DELTA | EXPERTS,
}
IDS = (np.arange(30) * 37 % 500 + 3).tolist()


def wrapped(folder: Path, out: Path, prefix: str) -> Path:
    """The same weights under the names of a wrapper, beside a tensor of another model."""
    config = json.loads((folder / "config.json").read_text())
    with open_source(folder) as source:
        renamed = {
            n if n == "lm_head.weight" else prefix + n.removeprefix("model."): source.load(n).to_arrays()[""]
            for n in source.names()
        }
    renamed["model.visual.patch_embed.weight"] = np.zeros((4, 4), np.float32)
    out.mkdir(parents=True)
    entries = [Entry(n, v.dtype, v.shape) for n, v in renamed.items()]
    with SafetensorsWriter(out / "model.safetensors", entries) as writer:
        for name, values in renamed.items():
            writer.write(name, values)
    outer = {"architectures": ["WrapperForConditionalGeneration"], "model_type": "wrapper"}
    config = outer | {"text_config": {k: v for k, v in config.items() if k != "architectures"}}
    (out / "config.json").write_text(json.dumps(config))
    (out / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    return out


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
@pytest.mark.parametrize("family", MODELS)
def test_every_output_is_that_of_the_text_model(family, prefix, tiny_model, tmp_path):
    plain = tiny_model(family, **MODELS[family])
    other = wrapped(plain, tmp_path / "wrapped" / plain.name, prefix)
    with trapetum.load(plain) as one, trapetum.load(other) as two:
        np.testing.assert_array_equal(one.logits(IDS), two.logits(IDS))
    for scheme in (None, "gguf:Q8_0", "ternary"):
        models = [plain, other]
        if scheme is not None:
            options = {"group_size": 64} if scheme == "ternary" else {}
            models = [m.parent / f"{scheme[:4]}" / m.name for m in models]
            for model, made in zip((plain, other), models):
                trapetum.quantize_model(model, made, scheme=scheme, **options)
        files = [
            export_artifact(
                m, "gguf", m.parent / f"{scheme}.gguf", gguf_type="F32" if scheme is None else "auto"
            )
            for m in models
        ]
        assert files[0].read_bytes() == files[1].read_bytes(), scheme


@pytest.mark.parametrize("family", ["llama", "phi3", "gemma2", "deepseek_v3"])
def test_a_cbk_is_that_of_the_text_model(family, tiny_model, tmp_path):
    options = {"intermediate_size": 256, "num_key_value_heads": 4, "max_position_embeddings": 64}
    if family == "gemma2":
        options |= {"head_dim": 64, "query_pre_attn_scalar": 64, "tie_word_embeddings": True}
    if family == "deepseek_v3":
        options |= json.loads(Path(__file__).with_name("deepseek_v3.json").read_text())
    plain = tiny_model(family, **options)
    other = wrapped(plain, tmp_path / "wrapped" / plain.name, "language_model.model.")
    files = [export_artifact(m, "cbk", m.parent / "model.cbk") for m in (plain, other)]
    assert files[0].read_bytes() == files[1].read_bytes()
