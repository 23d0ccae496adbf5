"""A rotated model computes what the same model computes without the rotation."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import trapetum
from trapetum.errors import FormatError
from trapetum.formats.artifact import Artifact
from trapetum.kernels.cpu.pool import Pool
from trapetum.quantize.job import quantize_model
from trapetum.rotation import HadamardRotation
from trapetum.runtime.layers import Linear, apply_all
from trapetum.runtime.matrix import build_matrix
from trapetum.runtime.verify import verify_path
from trapetum.tensors import DenseTensor, TernaryTensor

safetensors_numpy = pytest.importorskip("safetensors.numpy")

CONFIG: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 96, "rms_norm_eps": 1e-5,
}  # fmt: skip


def random_model(folder: Path, model_type: str, *, tied: bool) -> Path:
    rng = np.random.default_rng(4)
    hidden, inter, kv = 256, 512, 256
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (96, hidden),
        "model.norm.weight": (hidden,),
    }
    for i in range(2):
        p = f"model.layers.{i}."
        shapes |= {p + n + ".weight": (hidden,) for n in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {
            p + f"self_attn.{n}_proj.weight": (rows, hidden) for n, rows in (("q", 256), ("k", kv), ("v", kv))
        }
        shapes |= {p + "self_attn.o_proj.weight": (hidden, 256), p + "mlp.down_proj.weight": (hidden, inter)}
        shapes |= {p + f"mlp.{n}_proj.weight": (inter, hidden) for n in ("gate", "up")}
        if model_type == "qwen3":
            shapes |= {p + f"self_attn.{n}_norm.weight": (64,) for n in ("q", "k")}
    if not tied:
        shapes["lm_head.weight"] = (96, hidden)
    tensors = {
        n: (np.ones(s) if len(s) == 1 else rng.standard_normal(s) * 0.06).astype(ml_dtypes.bfloat16)
        for n, s in shapes.items()
    }
    folder.mkdir()
    safetensors_numpy.save_file(tensors, folder / "model.safetensors")
    name = {"llama": "Llama", "qwen3": "Qwen3"}[model_type]
    config = CONFIG | {
        "architectures": [f"{name}ForCausalLM"], "model_type": model_type, "tie_word_embeddings": tied,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("model_type", "tied", "recipe"),
    [("llama", False, "ternary"), ("llama", True, "ternary-all"), ("qwen3", False, "ternary-all")],
)
def test_logits_equal_those_of_the_unfolded_export(
    model_type: str, tied: bool, recipe: str, tmp_path: Path
) -> None:
    folder = random_model(tmp_path / "model", model_type, tied=tied)
    quantize_model(folder, tmp_path / "art", recipe=recipe, hadamard=True)
    trapetum.export_artifact(tmp_path / "art", "hf", tmp_path / "hf")
    ids = [3, 1, 4, 1, 5, 9, 2, 6]
    with trapetum.load(tmp_path / "art") as rotated, trapetum.load(tmp_path / "hf") as plain:
        mine, theirs = rotated.logits(ids), plain.logits(ids)
        assert theirs.std() > 0.5
        np.testing.assert_allclose(mine, theirs, atol=1e-4)
        assert rotated.generate(ids, 6) == plain.generate(ids, 6)
    with Artifact.open(tmp_path / "art") as art:
        assert (art.rotation_of("model.embed_tokens.weight") is not None) == (recipe == "ternary-all")
    assert verify_path(tmp_path / "art", source=folder).ok


def test_transformers_loads_the_unfolded_export(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    folder = random_model(tmp_path / "model", "llama", tied=True)
    quantize_model(folder, tmp_path / "art", scheme="ternary", levels=4, hadamard=True)
    trapetum.export_artifact(tmp_path / "art", "hf", tmp_path / "hf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    ids = [7, 8, 9, 10]
    with torch.no_grad(), trapetum.load(tmp_path / "art") as mine:
        np.testing.assert_allclose(mine.logits(ids), theirs(torch.tensor([ids])).logits[0].numpy(), atol=1e-4)


def test_an_input_is_rotated_once_for_all_its_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    rotation = HadamardRotation.for_widths([128])
    weights = [rng.standard_normal((8, 128)).astype(np.float32) for _ in range(3)]
    calls = []
    fold = HadamardRotation.fold
    monkeypatch.setattr(
        HadamardRotation, "fold", lambda self, rows: calls.append(len(rows)) or fold(self, rows)
    )
    pool = Pool(1)
    linears = [
        Linear(build_matrix(DenseTensor(fold(rotation, w)), pool), rotation=rotation) for w in weights[:2]
    ]
    linears.append(Linear(build_matrix(DenseTensor(weights[2]), pool), np.ones(8, np.float32)))
    x = rng.standard_normal((5, 128)).astype(np.float32)
    kept = x.copy()
    with pool.session():
        results = apply_all(x, *linears)
    pool.close()
    assert calls == [5]
    np.testing.assert_array_equal(x, kept)
    for y, w, bias in zip(results, weights, (0, 0, 1), strict=True):
        np.testing.assert_allclose(y, x @ w.T + bias, atol=1e-4)


def test_a_cbk_gets_the_unrotated_weights(tmp_path: Path) -> None:
    """4-bit codebooks fitted to what the model means: a refit of rotated values would be another model."""
    folder = random_model(tmp_path / "model", "llama", tied=True)
    quantize_model(folder, tmp_path / "art", scheme="ternary", hadamard=True)
    trapetum.export_artifact(tmp_path / "art", "hf", tmp_path / "hf")
    trapetum.export_artifact(tmp_path / "art", "cbk", tmp_path / "a.cbk")
    trapetum.export_artifact(tmp_path / "hf", "cbk", tmp_path / "b.cbk")
    assert (tmp_path / "a.cbk").read_bytes() == (tmp_path / "b.cbk").read_bytes()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda m: m.pop("rotation"), "rotation is 'hadamard' and rows have 512 weights; the manifest has"),
        (
            lambda m: m["rotation"].update(transform="fourier"),
            "rotation is not usable: unknown transform 'fourier'",
        ),
        (lambda m: m["rotation"].update(block_size=96), "rotation is not usable: block size 96"),
        (lambda m: m["rotation"]["signs"].pop("512"), r"rows have 512 weights; .* for \[256\]"),
        (lambda m: m["rotation"]["signs"].update({"256": "zz"}), "rotation is not usable"),
        (lambda m: m.update(rotation=[]), "rotation is not usable"),
    ],
)
def test_a_rotation_that_cannot_be_undone_is_refused(
    change: Callable[[dict[str, Any]], object], text: str, tmp_path: Path
) -> None:
    quantize_model(
        random_model(tmp_path / "m", "llama", tied=True), tmp_path / "art", scheme="ternary", hadamard=True
    )
    path = tmp_path / "art" / "trapetum.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))
    with pytest.raises(FormatError, match=text):
        Artifact.open(tmp_path / "art")


@pytest.mark.parametrize("group", [64, 128, 256])
def test_every_code_and_sign_of_scale_multiplies_exactly(group: int) -> None:
    """Codes 0 to 3, scales of zero and below zero; products of small integers are exact in float32."""
    rng = np.random.default_rng(1)
    codes = rng.integers(0, 4, (9, 256), dtype=np.uint8)
    scales = rng.choice(np.array([-2, -0.5, 0, 0.5, 1], np.float16), (9, 256 // group))
    weight = (codes.astype(np.float64) - 1) * np.repeat(scales.astype(np.float64), group, axis=1)
    x = rng.integers(-3, 4, (5, 256)).astype(np.float32)
    pool = Pool(2)
    matrix = build_matrix(TernaryTensor(codes, scales, 4), pool)
    with pool.session():
        np.testing.assert_array_equal(matrix(x), x @ weight.T)
    np.testing.assert_array_equal(matrix.look_up(np.array([8, 0])), weight[[8, 0]])
    pool.close()
