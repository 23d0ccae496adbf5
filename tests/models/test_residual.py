"""A model in another basis: the same logits in a stock engine, row blocks that agree, and what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy as safetensors_numpy

from trapetum.errors import RecipeError, UnsupportedModelError
from trapetum.formats.artifact import Artifact
from trapetum.formats.packed_ternary import open_checkpoint
from trapetum.models.architectures import resolve
from trapetum.models.residual import RotatedCheckpoint
from trapetum.quantize.job import quantize_model
from trapetum.quantize.recipe import resolve_recipe
from trapetum.runtime.model import Model, load
from trapetum.runtime.verify import verify_path

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SHARED = Path(os.environ.get("TRAPETUM_SHARED", Path(__file__).resolve().parents[2] / "../shared"))
SMALL: dict[str, Any] = {
    "hidden_size": 96, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 120, "max_position_embeddings": 64,
}  # fmt: skip
KEEP = {"rotate": "residual", "rules": [{"role": ["linear", "head", "embed"], "keep": True}]}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "llama biases": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": False},
    "phi3": {"tie_word_embeddings": False, "pad_token_id": 0},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "mixtral": {"num_local_experts": 3, "num_experts_per_tok": 2, "tie_word_embeddings": False},
    "granite": {"embedding_multiplier": 6.0, "residual_multiplier": 0.3, "attention_multiplier": 0.05},
    "seed_oss": {"attention_bias": True, "tie_word_embeddings": False},
    "gemma2": {},
    "olmo2": {},
}


def make(folder: Path, family: str) -> Path:
    """A model of transformers' own making, gains and biases far from what they start as."""
    options = SMALL | FAMILIES[family]
    config = transformers.AutoConfig.for_model(family.split()[0], **options)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.add_(torch.rand_like(p) - 0.3)
            elif p.ndim == 1:
                p.normal_(0, 0.2)
            else:
                p.mul_(4)
    model.save_pretrained(folder)
    return folder


def engine(folder: Path, ids: np.ndarray) -> np.ndarray:
    """Logits by transformers, float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return np.asarray(model(torch.from_numpy(ids)[None]).logits[0].numpy())


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in ("gemma2", "olmo2")])
def test_a_stock_engine_gives_the_same_logits(family: str, tmp_path: Path) -> None:
    from trapetum.export import export_artifact

    folder = make(tmp_path / "model", family)
    ids = np.arange(40) * 7 % 120
    before = engine(folder, ids)
    with open_checkpoint(folder) as source:
        rotated = RotatedCheckpoint(source, resolve(source.config), 5)
        names = {n: rotated.dtype(n) for n in rotated.names()}
        assert names[rotated.architecture.tensor_name("head")] == np.float32
    quantize_model(folder, tmp_path / "art", recipe=KEEP, seed=5, threads=1)
    export_artifact(tmp_path / "art", "hf", tmp_path / "hf", dtype="f32")
    assert json.loads((tmp_path / "hf/config.json").read_text())["tie_word_embeddings"] is False
    after = engine(tmp_path / "hf", ids)
    np.testing.assert_allclose(after, before, atol=1e-4)
    with load(tmp_path / "art") as model:
        np.testing.assert_allclose(model.logits(ids), before, atol=1e-3)
    with Artifact.open(tmp_path / "art") as art, open_checkpoint(folder) as source:
        moved = [
            n for n in source.names()
            if len(source.shape(n)) > 1 and np.allclose(art[n].dequantize(), source.load(n).dequantize(), atol=1e-3)
        ]  # fmt: skip
        assert not [n for n in moved if "_proj" in n or "embed" in n]


@pytest.mark.parametrize(
    ("family", "said"), [("gemma2", "attn_post_norm, a norm behind"), ("olmo2", "no norm in front")]
)
def test_norms_behind_a_block_are_refused(family: str, said: str, tmp_path: Path) -> None:
    with open_checkpoint(make(tmp_path / "model", family)) as source:
        with pytest.raises(UnsupportedModelError, match=said):
            RotatedCheckpoint(source, resolve(source.config), 0)


def test_row_blocks_agree(tmp_path: Path) -> None:
    with open_checkpoint(make(tmp_path / "model", "llama biases")) as source:
        rotated = RotatedCheckpoint(source, resolve(source.config), 1)
        for name in rotated.names():
            whole = rotated.load(name).values
            matrix = whole.reshape(-1, whole.shape[-1])
            for rows in (slice(0, 1), slice(3, 37), slice(31, 33), slice(0, 1000), slice(4, 4)):
                np.testing.assert_array_equal(rotated.load(name, rows).values, matrix[rows])


def test_the_rotation_is_orthogonal_and_spreads(tmp_path: Path) -> None:
    """Norms of embedding rows stay; one large channel of the stream becomes many small ones."""
    with open_checkpoint(make(tmp_path / "model", "llama")) as source:
        rotated = RotatedCheckpoint(source, resolve(source.config), 1)
        name = "model.embed_tokens.weight"
        a, b = source.load(name).dequantize(), rotated.load(name).values
        np.testing.assert_allclose(np.linalg.norm(a, axis=1), np.linalg.norm(b, axis=1), rtol=1e-5)
        np.testing.assert_allclose(a @ a.T, b @ b.T, atol=1e-3)
        down = "model.layers.0.mlp.down_proj.weight"
        np.testing.assert_allclose(
            source.load(down).dequantize().T @ source.load(down).dequantize(),
            rotated.load(down).values.T @ rotated.load(down).values,
            atol=1e-3,
        )


def test_seed_and_parts(tmp_path: Path) -> None:
    folder = make(tmp_path / "model", "qwen3")
    runs = {"a": {"seed": 1}, "b": {"seed": 2}}
    for name, options in runs.items():
        quantize_model(folder, tmp_path / name, bits=4, rotate="residual", threads=1, **options)
    for part in ("1/2", "2/2"):
        quantize_model(folder, tmp_path / "c", bits=4, rotate="residual", part=part, threads=1, seed=1)
    from trapetum.quantize.shared_job import merge_parts

    merge_parts(tmp_path / "c")
    weights = [next((tmp_path / n).glob("*.safetensors")).read_bytes() for n in "abc"]
    assert weights[0] == weights[2] != weights[1]


def test_verify_reads_the_source_in_the_same_basis(tmp_path: Path) -> None:
    folder = make(tmp_path / "model", "qwen2")
    quantize_model(folder, tmp_path / "art", bits=4, rotate="residual", threads=1, seed=3)
    checks = {c.name: c for c in verify_path(tmp_path / "art", source=folder, threads=1).checks}
    assert checks["reconstruction"].ok, checks["reconstruction"].detail


def test_verify_turns_packed_sources_too(tmp_path: Path) -> None:
    folder = make(tmp_path / "model", "qwen2")
    file = next(folder.glob("*.safetensors"))
    tensors = dict(safetensors_numpy.load_file(file))
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        tensors[name] = tensors[name].astype(ml_dtypes.float8_e4m3fn)
        tensors[f"{name}_scale"] = np.float32(0.5).reshape(1)
    safetensors_numpy.save_file(tensors, file)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "quantization_config": {"quant_method": "fp8"}})
    )
    quantize_model(folder, tmp_path / "art", bits=4, rotate="residual", threads=1, seed=3)
    checks = {c.name: c for c in verify_path(tmp_path / "art", source=folder, threads=1).checks}
    assert checks["reconstruction"].ok, checks["reconstruction"].detail


def test_what_excludes_it(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="exclude each other"):
        resolve_recipe(scheme="ternary", hadamard=True, rotate="residual")
    with pytest.raises(RecipeError, match="rotate: 'x' is not allowed; allowed: residual"):
        resolve_recipe({"rotate": "x"})
    with pytest.raises(RecipeError, match="knows the inputs before the rotation"):
        quantize_model(tmp_path, tmp_path / "o", bits=4, rotate="residual", imatrix=tmp_path / "im.gguf")


@pytest.mark.slow
@pytest.mark.skipif(not (SHARED / "models/books-18m").is_dir(), reason="the sample model is not here")
def test_a_trained_model_keeps_its_logits() -> None:
    folder = SHARED / "models/books-18m"
    ids = np.arange(300) * 131 % 8192
    with load(folder) as model:
        before = model.logits(ids)
    source = open_checkpoint(folder)
    with Model(RotatedCheckpoint(source, resolve(source.config), 0)) as model:
        np.testing.assert_allclose(model.logits(ids), before, atol=1e-4)
