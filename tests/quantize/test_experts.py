"""Models with routed experts under every scheme: the artifact answers as transformers does with its decoded weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trapetum
from trapetum.export import export_artifact
from trapetum.quantize.job import quantize_model

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 64, "max_position_embeddings": 256, "num_local_experts": 4, "num_experts_per_tok": 2,
    "tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"intermediate_size": 128},
    "gpt_oss": {
        "intermediate_size": 64,  # half of hidden: a stack and its transpose have one shape
        "sliding_window": 9,
        "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
    },
}
SCHEMES: dict[str, dict[str, Any]] = {
    "kmeans": {"bits": 4},
    "ternary": {"scheme": "ternary", "group_size": 64},
    "blocks": {"scheme": "gguf:Q5_0"},
}
IDS = np.random.default_rng(0).integers(3, 64, 40).tolist()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A random model of each family."""
    made = {}
    for family, options in FAMILIES.items():
        torch.manual_seed(3)
        config = transformers.AutoConfig.for_model(family, **SIZES, **options)
        model = transformers.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for name, values in model.named_parameters():
                plain = values.ndim == 1 or "bias" in name
                scale = 0.3 if plain else values.shape[-1] ** -0.5
                values.copy_(torch.randn_like(values) * scale + (1.0 if "norm" in name else 0.0))
        made[family] = tmp_path_factory.mktemp(family)
        model.save_pretrained(made[family])
    return made


def check(folder: Path, out: Path, options: dict[str, Any]) -> None:
    report = quantize_model(folder, out / "artifact", **options)
    assert report.bpw < 12
    dense = export_artifact(out / "artifact", "hf", out / "dense")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        dense, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        expected = theirs(torch.tensor([IDS])).logits[0].numpy()
    with trapetum.load(out / "artifact") as model, trapetum.load(folder) as source:
        ours = model.logits(IDS)
        assert np.abs(ours - expected).max() <= 1e-4 * np.abs(expected).max()
        assert not np.array_equal(ours, source.logits(IDS))
    with trapetum.load(out / "artifact", precision="fast") as model:
        assert np.abs(model.logits(IDS[:8]) - expected[:8]).max() <= 0.05 * np.abs(expected).max()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme(family: str, scheme: str, folders: dict[str, Path], tmp_path: Path) -> None:
    check(folders[family], tmp_path, SCHEMES[scheme])


@pytest.mark.slow
def test_additive_codebooks(folders: dict[str, Path], tmp_path: Path) -> None:
    """The experts of a stack share theirs. (Fitting codebooks to each of many small tensors takes minutes.)"""
    check(folders["gpt_oss"], tmp_path, {"bits": 2, "effort": "fast"})
