"""Every dense family from quantize to the exports: artifact, dense folder and GGUF hold the same model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import trapetum
from trapetum.errors import UnsupportedModelError
from trapetum.export import export_artifact, plan_export
from trapetum.formats.source import open_source
from trapetum.models.architectures import ARCHITECTURES

SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
GEMMA = {
    "num_hidden_layers": 3,
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "sliding_window": 8,
    "sliding_window_pattern": 2,
    "tie_word_embeddings": True,
}
MODELS = {
    "llama": {},
    "mistral": {"sliding_window": None},  # a GGUF of the family llama has no place for it
    "qwen2": {"biases": ("q", "k", "v")},
    "qwen3": {"head_dim": 32},
    "phi3": {"original_max_position_embeddings": 128},
    "gemma2": GEMMA,
    "gemma3_text": GEMMA,
    "granite": {
        "embedding_multiplier": 6.0,
        "residual_multiplier": 0.3,
        "attention_multiplier": 0.05,
        "logits_scaling": 0.5,
    },
    "seed_oss": {"head_dim": 32, "biases": ("q", "k", "v")},
    "smollm3": {"num_hidden_layers": 4, "tie_word_embeddings": True},
    "olmo2": {},
}
SCHEMES = {
    "4 bits": ({"bits": 4}, "codebook"),
    "ternary": ({"scheme": "ternary", "group_size": 64}, "ternary"),
    "Q8_0": ({"scheme": "gguf:Q8_0"}, "blocks"),
}
IDS = list(range(20, 60))


def logits(path: Path) -> np.ndarray:
    with trapetum.load(path) as model:
        return model.logits(IDS)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("family", MODELS)
def test_one_model_in_every_form(family, scheme, tiny_model, tmp_path):
    options, layout = SCHEMES[scheme]
    folder = tiny_model(family, **SMALL | MODELS[family])
    artifact = tmp_path / "artifact"
    trapetum.quantize_model(folder, artifact, **options)
    with trapetum.open_artifact(artifact) as stored:
        linear = [m for m in ARCHITECTURES[family].modules if m.per_layer and m.kind != "norm"]
        for module in linear:
            assert stored.layout(module.name(1)) == layout
    expected = logits(artifact)
    assert expected.std() > 0.1
    dense = export_artifact(artifact, "hf", tmp_path / "dense", dtype="f32")
    np.testing.assert_allclose(logits(dense), expected, rtol=0, atol=2e-5 * np.abs(expected).max())
    file = export_artifact(artifact, "gguf", tmp_path / "m.gguf")
    if layout == "codebook":  # fitted again, to a tenth of the codebooks' own error
        error = np.square(logits(file) - expected).mean()
        assert error < 0.2 * np.square(logits(folder) - expected).mean()
    else:
        np.testing.assert_allclose(logits(file), expected, rtol=0, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize("family", ["phi3", "gemma3_text", "olmo2"])
def test_calibration_reaches_every_matrix(family, tiny_model, tmp_path):
    """The statistics of a layer's inputs belong to the tensors that read them, fused ones too."""
    from trapetum.kernels.cpu.pool import Pool
    from trapetum.runtime.calibrate import collect, distinct_inputs

    folder = tiny_model(family, **SMALL | MODELS[family])
    ids = np.array([IDS, IDS[::-1]], np.intp)
    with open_source(folder) as source:
        promised = distinct_inputs(source)
        found = list(collect(source, ids, Pool(1)))
    assert [(i.weights, i.squares.size) for i in found] == promised
    matrices = {
        module.name(layer)
        for module in ARCHITECTURES[family].modules
        if module.per_layer and module.kind != "norm"
        for layer in range(MODELS[family].get("num_hidden_layers", 2))
    }
    assert {name for i in found for name in i.weights} - {"lm_head.weight"} == matrices
    assert all(i.tokens == ids.size and (i.squares > 0).all() for i in found)


REFUSED = {
    "phi3-head-dim": ("phi3", {"head_dim": 32}, "head_dim is 32"),
    "gemma2-untied": ("gemma2", {"tie_word_embeddings": False}, "take the embedding for the head"),
    "gemma2-no-cap": ("gemma2", {"attn_logit_softcapping": None}, "attn_logit_softcapping is not set"),
    "gemma2-scale": ("gemma2", {"query_pre_attn_scalar": 48}, "query_pre_attn_scalar"),
    "gemma3-cap": ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50"),
    "gemma3-local-scaling": (
        "gemma3_text",
        {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "linear", "factor": 2.0},
                "full_attention": {"rope_type": "default"},
            }
        },
        "another rotary embedding",
    ),
    "smollm3-pattern": ("smollm3", {"no_rope_layers": [1, 1, 0, 1]}, "no rotary embedding"),
    "smollm3-llama3": (
        "smollm3",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
        "rope_freqs.weight",
    ),
    "olmo2-tied": ("olmo2", {"tie_word_embeddings": True}, "need a head tensor"),
    "llama-gelu": ("llama", {"hidden_act": "gelu"}, "hidden_act is gelu"),
    "qwen2-yarn": (
        "qwen2",
        {
            "biases": ("q", "k", "v"),
            "rope_scaling": {
                "type": "yarn",
                "factor": 2.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 8,
            },
        },
        "beta_fast",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_engines_would_compute_otherwise_is_refused_before_work(case, tiny_model, tmp_path):
    family, options, reason = REFUSED[case]
    folder = tiny_model(family, **SMALL | MODELS[family] | options)
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        export_artifact(folder, "gguf", tmp_path / "m.gguf", gguf_type="F32")
    assert caught.value.hint == "Export to hf instead."  # no type of GGUF helps
    assert not (tmp_path / "m.gguf").exists()
    assert logits(folder).shape == (len(IDS), 512)  # it runs here


NOTED = {
    "dynamic": ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "more than 128 tokens"),
    "longrope": (
        "phi3",
        {
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0] * 8,
                "long_factor": [2.0] * 8,
            },
            "original_max_position_embeddings": 64,
        },
        "long rotary factors",
    ),
    "window": ("mistral", {"sliding_window": 8}, "sliding window of 8"),
    "yarn": (
        "qwen2",
        {
            "biases": ("q", "k", "v"),
            "rope_scaling": {
                "type": "yarn",
                "factor": 2.0,
                "original_max_position_embeddings": 64,
                "truncate": False,
            },
        },
        "whole pairs",
    ),
}


@pytest.mark.parametrize("case", NOTED)
def test_what_differs_in_long_texts_only_is_said(case, tiny_model, tmp_path):
    family, options, note = NOTED[case]
    folder = tiny_model(family, **SMALL | MODELS[family] | options)
    with plan_export(folder, "gguf", tmp_path / "m.gguf", gguf_type="F32") as plan:
        assert any(note in n for n in plan.notes)
