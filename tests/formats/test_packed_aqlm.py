"""AQLM checkpoints: decoded as their format defines, taken over code by code, other shapes refused by name."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from trapetum.errors import CheckpointError, UnsupportedModelError
from trapetum.formats.artifact import Artifact
from trapetum.formats.packed_aqlm import AqlmCheckpoint
from trapetum.formats.packed_ternary import open_checkpoint
from trapetum.formats.source import open_source
from trapetum.quantize.additive_intake import AdditiveAsIs
from trapetum.quantize.job import quantize_model
from trapetum.quantize.schemes import KMeans
from trapetum.runtime.model import load

safetensors_numpy = pytest.importorskip("safetensors.numpy")

SHARED = Path(os.environ.get("TRAPETUM_SHARED", Path(__file__).resolve().parents[2] / "../shared"))
SAMPLE = SHARED / "models/formats/aqlm-2x8g8"

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
}  # fmt: skip
AQLM = {"quant_method": "aqlm", "in_group_size": 8, "out_group_size": 1, "nbits_per_codebook": 8}
LINEAR = {
    "self_attn.q_proj": (64, 64), "self_attn.k_proj": (32, 64), "self_attn.v_proj": (32, 64),
    "self_attn.o_proj": (64, 64), "mlp.gate_proj": (96, 64), "mlp.up_proj": (96, 64), "mlp.down_proj": (64, 96),
}  # fmt: skip
UP = "model.layers.0.mlp.up_proj"


def write(
    folder: Path,
    count: int = 2,
    dtype: Any = np.float16,
    change: dict[str, np.ndarray] | None = None,
    drop: tuple[str, ...] = (),
    **settings: Any,
) -> Path:
    rng = np.random.default_rng(3)
    tensors: dict[str, np.ndarray] = {"model.embed_tokens.weight": rng.standard_normal((64, 64)) * 0.1}
    for norm in ("layers.0.input_layernorm", "layers.0.post_attention_layernorm", "norm"):
        tensors[f"model.{norm}.weight"] = np.ones(64)
    tensors = {k: v.astype(dtype) for k, v in tensors.items()}
    for part, (rows, width) in LINEAR.items():
        stem = f"model.layers.0.{part}"
        tensors[f"{stem}.codes"] = (
            rng.integers(0, 256, (rows, width // 8, count)).astype(np.uint8).view(np.int8)
        )
        tensors[f"{stem}.codebooks"] = (rng.standard_normal((count, 256, 1, 8)) * 0.1).astype(dtype)
        tensors[f"{stem}.scales"] = (rng.random((rows, 1, 1, 1)) + 0.5).astype(dtype)
    tensors |= change or {}
    folder.mkdir()
    kept = {k: np.ascontiguousarray(v) for k, v in tensors.items() if k not in drop}
    safetensors_numpy.save_file(kept, folder / "model.safetensors")
    (folder / "config.json").write_text(
        json.dumps(CONFIG | {"quantization_config": AQLM | {"num_codebooks": count} | settings})
    )
    return folder


def meant(folder: Path, stem: str) -> np.ndarray:
    """The formula of the format in float64, straight from the file."""
    t = safetensors_numpy.load_file(folder / "model.safetensors")
    codes = t[f"{stem}.codes"].astype(np.int64) % 256
    books, scales = t[f"{stem}.codebooks"].astype(np.float64), t[f"{stem}.scales"].astype(np.float64)
    total = sum(books[m, codes[:, :, m], 0] for m in range(books.shape[0]))
    return (total * scales[:, :, 0]).reshape(codes.shape[0], -1)


@pytest.mark.parametrize(("count", "dtype"), [(1, np.float16), (2, ml_dtypes.bfloat16), (3, np.float32)])
def test_decoded_as_the_format_says(count: int, dtype: Any, tmp_path: Path) -> None:
    folder = write(tmp_path / "m", count, dtype)
    with open_checkpoint(folder) as source:
        assert isinstance(source, AqlmCheckpoint)
        assert f"{UP}.weight" in source.names()
        assert not [n for n in source.names() if n.endswith((".codes", ".codebooks", ".scales"))]
        assert source.shape(f"{UP}.weight") == (96, 64)
        assert "quantization_config" not in source.config
        for part in LINEAR:
            stem = f"model.layers.0.{part}"
            wanted = meant(folder, stem)
            np.testing.assert_allclose(
                source.load(f"{stem}.weight").dequantize(), wanted, rtol=1e-5, atol=1e-6
            )
        whole = source.load(f"{UP}.weight").values
        for rows in (slice(0, 1), slice(5, 40), slice(90, 200), slice(7, 7)):
            np.testing.assert_array_equal(source.load(f"{UP}.weight", rows).values, whole[rows])


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_as_is_keeps_every_code(dtype: Any, tmp_path: Path) -> None:
    folder = write(tmp_path / "m", 2, dtype)
    report = quantize_model(folder, tmp_path / "out", scheme="asis", threads=1)
    stored = safetensors_numpy.load_file(folder / "model.safetensors")
    kept = np.dtype(np.float16 if dtype is np.float16 else np.float32)
    assert {r.scheme for r in report.rows if r.quantized} == {AdditiveAsIs(2, kept.name, kept.name)}
    with Artifact.open(tmp_path / "out") as art, open_source(folder) as source:
        for part in LINEAR:
            stem = f"model.layers.0.{part}"
            arrays = art[f"{stem}.weight"].to_arrays()
            np.testing.assert_array_equal(
                arrays["codes"].reshape(stored[f"{stem}.codes"].shape), stored[f"{stem}.codes"].view(np.uint8)
            )
            for suffix in ("codebooks", "scales"):
                np.testing.assert_array_equal(
                    arrays[suffix].reshape(-1),
                    stored[f"{stem}.{suffix}"].astype(kept).reshape(-1),
                    strict=True,
                )
            name = f"{stem}.weight"
            np.testing.assert_array_equal(art[name].dequantize(), source.load(name).dequantize(), strict=True)


def test_row_blocks_do_not_change_the_bytes(tmp_path: Path) -> None:
    folder = write(tmp_path / "m")
    for threads, memory in ((1, None), (2, 321 << 20)):
        quantize_model(folder, tmp_path / f"out{threads}", scheme="asis", threads=threads, max_memory=memory)
    first, second = (next((tmp_path / f"out{t}").glob("*.safetensors")).read_bytes() for t in (1, 2))
    assert first == second


def test_another_scheme_reads_the_decoded_weights(tmp_path: Path) -> None:
    folder = write(tmp_path / "m")
    report = quantize_model(folder, tmp_path / "out", bits=4, threads=1)
    assert any("aqlm: 7 matrices are decoded exactly" in n for n in report.notes)
    assert {r.scheme for r in report.rows if r.quantized} == {KMeans(16)}
    with Artifact.open(tmp_path / "out") as art:
        wanted = meant(folder, UP)
        lost = np.square(art[f"{UP}.weight"].dequantize() - wanted).sum() / np.square(wanted).sum()
        assert art.records[f"{UP}.weight"].relative_error == pytest.approx(lost, rel=1e-4)


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"nbits_per_codebook": 16}, "nbits_per_codebook 16"), ({"in_group_size": 16}, "in_group_size 16"),
     ({"out_group_size": 2}, "out_group_size 2")],
)  # fmt: skip
def test_other_shapes_are_refused_by_name(settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=said):
        open_checkpoint(write(tmp_path / "m", **settings))


@pytest.mark.parametrize(
    ("change", "drop", "said"),
    [({f"{UP}.codes": np.zeros((96, 8, 2), np.int16)}, (), "int16"),
     ({f"{UP}.codebooks": np.zeros((2, 128, 1, 8), np.float16)}, (), r"\[2, 128, 1, 8\]"),
     ({f"{UP}.scales": np.zeros((95, 1, 1, 1), np.float16)}, (), r"\[95, 1, 1, 1\]"),
     ({}, (f"{UP}.scales",), "without"), ({}, (f"{UP}.codebooks",), "without"),
     ({f"{UP}.codes": np.zeros((96, 8, 9), np.int8), f"{UP}.codebooks": np.zeros((9, 256, 1, 8), np.float16)}, (),
      "9 codebooks")],
)  # fmt: skip
def test_parts_that_do_not_belong_together(
    change: dict[str, np.ndarray], drop: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=said):
        open_checkpoint(write(tmp_path / "m", change=change, drop=drop))


@pytest.mark.skipif(not SAMPLE.is_dir(), reason="the sample checkpoint is not here")
def test_a_real_checkpoint_runs_as_it_is(tmp_path: Path) -> None:
    quantize_model(SAMPLE, tmp_path / "out", scheme="asis", threads=1)
    ids = np.arange(20) * 37 % 8192
    with load(SAMPLE) as dense, load(tmp_path / "out") as taken:
        a, b = dense.logits(ids), taken.logits(ids)
    np.testing.assert_allclose(a, b, atol=1e-4)
    with open_checkpoint(SAMPLE) as source:
        stem = "model.layers.1.mlp.gate_proj"
        np.testing.assert_allclose(
            source.load(f"{stem}.weight").values, meant(SAMPLE, stem), rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize(("part", "value"), [("codebooks", np.inf), ("scales", np.nan)])
@pytest.mark.parametrize("scheme", ["asis", "kmeans"])
def test_what_is_not_finite_is_refused_by_name(tmp_path: Path, part: str, value: float, scheme: str) -> None:
    """Sums of infinities warn, and no warning may come before the refusal."""
    name = f"{UP}.{part}"
    broken = safetensors_numpy.load_file(write(tmp_path / "good") / "model.safetensors")[name].copy()
    broken.reshape(-1)[3] = value
    with pytest.raises(CheckpointError, match=rf"tensor {UP}\.weight holds \d+ NaN and \d+ infinite values"):
        quantize_model(write(tmp_path / "m", change={name: broken}), tmp_path / "out", scheme=scheme)
    assert not (tmp_path / "out").exists()
