"""Packed BitNet and MLX checkpoints against the code that defines them, and what is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from trapetum.errors import CheckpointError, UnsupportedModelError
from trapetum.formats.artifact import Artifact
from trapetum.formats.packed_checkpoint import PackedCheckpoint
from trapetum.formats.packed_ternary import open_checkpoint
from trapetum.formats.source import open_source
from trapetum.packing import pack_bits
from trapetum.quantize.job import quantize_model
from trapetum.quantize.ternary_intake import TernaryAsIs
from trapetum.runtime.inspect import inspect_path
from trapetum.runtime.model import load

safetensors_numpy = pytest.importorskip("safetensors.numpy")

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128, "intermediate_size": 256,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 64,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
}  # fmt: skip
LINEAR = {
    "self_attn.q_proj": (128, 128), "self_attn.k_proj": (64, 128), "self_attn.v_proj": (64, 128),
    "self_attn.o_proj": (128, 128), "mlp.gate_proj": (256, 128), "mlp.up_proj": (256, 128), "mlp.down_proj": (128, 256),
}  # fmt: skip
UP = "model.layers.0.mlp.up_proj.weight"
BITNET = {"quant_method": "bitnet"}


def trits(name: str, shape: tuple[int, int]) -> np.ndarray:
    return np.random.default_rng(len(name)).integers(-1, 2, shape).astype(np.int8)


def write(folder: Path, matrices: dict[str, np.ndarray], **config: Any) -> Path:
    rng = np.random.default_rng(0)
    plain = {"model.embed_tokens.weight": rng.standard_normal((64, 128)), "model.norm.weight": np.ones(128)}
    plain |= {
        f"model.layers.0.{n}.weight": np.ones(128) for n in ("input_layernorm", "post_attention_layernorm")
    }
    folder.mkdir()
    tensors = {k: v.astype(ml_dtypes.bfloat16) for k, v in plain.items() if k not in matrices} | matrices
    safetensors_numpy.save_file(
        {k: np.ascontiguousarray(v) for k, v in tensors.items()}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    return folder


def bitnet(
    folder: Path, scale: float = 1.3, change: dict[str, np.ndarray] | None = None, **settings: Any
) -> Path:
    """Packed by transformers' own packer."""
    torch = pytest.importorskip("torch")
    pack = pytest.importorskip("transformers.integrations.bitnet").pack_weights
    matrices: dict[str, np.ndarray] = {}
    for part, shape in LINEAR.items():
        name = f"model.layers.0.{part}.weight"
        matrices[name] = pack(torch.from_numpy(trits(name, shape)).float()).numpy()
        matrices[f"{name}_scale"] = np.array([scale], ml_dtypes.bfloat16)
    return write(folder, matrices | (change or {}), quantization_config=BITNET | settings)


def mlx(
    folder: Path, group: int = 64, change: Callable[..., None] | None = None
) -> tuple[Path, dict[str, np.ndarray]]:
    matrices: dict[str, np.ndarray] = {}
    meant: dict[str, np.ndarray] = {}
    rng = np.random.default_rng(1)
    for part, (rows, columns) in LINEAR.items():
        stem = f"model.layers.0.{part}"
        codes = trits(stem, (rows, columns)).astype(np.uint8) + np.uint8(1)
        scales = (rng.random((rows, columns // group)) + 0.5).astype(np.float16)
        meant[f"{stem}.weight"] = (codes.reshape(rows, -1, group) - 1.0) * scales[:, :, None]
        matrices[f"{stem}.weight"] = pack_bits(codes, 2).view("<u4")
        matrices[f"{stem}.scales"], matrices[f"{stem}.biases"] = scales, -scales
    if change:
        change(matrices)
    return write(folder, matrices, quantization={"group_size": group, "bits": 2}), meant


@pytest.mark.parametrize(
    ("settings", "divides"),
    [({}, True), ({"linear_class": "bitlinear", "quantization_mode": "offline"}, True),
     ({"linear_class": "autobitlinear"}, False)],
)  # fmt: skip
def test_bitnet_chunks_and_scale_rules(settings: dict[str, Any], divides: bool, tmp_path: Path) -> None:
    scale = np.float32(ml_dtypes.bfloat16(1.3))
    with open_checkpoint(bitnet(tmp_path / "m", **settings)) as source:
        assert isinstance(source, PackedCheckpoint)
        assert source.packed_format() is None
        assert f"{UP}_scale" not in source.names()
        assert "quantization_config" not in source.config
        t = trits(UP, (256, 128)).astype(np.float32)
        expected = t / scale if divides else t * scale
        np.testing.assert_array_equal(source.load(UP).dequantize(), expected, strict=True)
        for rows in (slice(0, 1), slice(63, 66), slice(10, 250), slice(255, 300), slice(5, 5)):
            np.testing.assert_array_equal(source.load(UP, rows).values, expected[rows])
        assert any(("t / weight_scale" if divides else "t * weight_scale") in n for n in source.notes)


@pytest.mark.parametrize("divides", [True, False])
def test_bitnet_comes_over_as_is(divides: bool, tmp_path: Path) -> None:
    folder = bitnet(tmp_path / "m", **({} if divides else {"linear_class": "autobitlinear"}))
    report = quantize_model(folder, tmp_path / "out", scheme="asis")
    with Artifact.open(tmp_path / "out") as art, open_checkpoint(folder) as source:
        assert art.records[UP].scheme == TernaryAsIs(128).spec()  # one scale a row
        # A bfloat16 scale is exact in float16, its reciprocal is not: codes exact, the scale kept in float32.
        assert art[UP].to_arrays()["scales"].dtype == (np.float32 if divides else np.float16)
        proof = art.manifest["tensors"][UP]["proof"]
        assert (proof["groups"], proof["code_3"], proof["max_difference"]) == (256, 0, 0)
        assert proof["scales_exact_in_float16"] == (0 if divides else 256)
        np.testing.assert_array_equal(art[UP].dequantize(), source.load(UP).dequantize())
        assert "quantization_config" in art.config
        assert art.config["quantization_config"]["quant_method"] == "trapetum"
    assert any("activations" in n for n in report.notes)
    with load(folder) as packed, load(tmp_path / "out") as taken:
        np.testing.assert_allclose(packed.logits([1, 2, 3]), taken.logits([1, 2, 3]), atol=2e-5)


def test_packed_codes_are_not_blown_up_by_other_schemes(tmp_path: Path) -> None:
    folder = bitnet(tmp_path / "m")
    report = quantize_model(folder, tmp_path / "out", recipe={"rules": [{"role": "up", "keep": True}]})
    by_role = {r.role.kind: r.scheme.label for r in report.rows}
    assert by_role["q"] == "kmeans K=16"
    assert by_role["up"] == "asis ternary g128"
    assert report.errors[UP] == 0


def test_latents_become_what_the_model_computes(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    quantizer = pytest.importorskip("transformers.integrations.bitnet").WeightQuant
    rng = np.random.default_rng(2)
    matrices = {
        f"model.layers.0.{part}.weight": (rng.standard_normal(shape) * 0.02).astype(ml_dtypes.bfloat16)
        for part, shape in LINEAR.items()
    }
    mode = {"linear_class": "autobitlinear", "quantization_mode": "online"}
    with open_checkpoint(write(tmp_path / "m", matrices, quantization_config=BITNET | mode)) as source:
        for name, latent in matrices.items():
            with torch.compiler.set_stance("force_eager"):
                theirs = (
                    quantizer.apply(torch.from_numpy(latent.astype(np.float32)).bfloat16()).float().numpy()
                )
            np.testing.assert_array_equal(source.load(name).dequantize(), theirs)
            np.testing.assert_array_equal(source.load(name, slice(9, 30)).dequantize(), theirs[9:30])
        assert source.load("model.embed_tokens.weight").values.dtype == ml_dtypes.bfloat16
    report = quantize_model(tmp_path / "m", tmp_path / "out", scheme="asis")
    assert {r.scheme.label for r in report.rows if r.role.kind == "up"} == {"asis ternary g128"}


@pytest.mark.parametrize(
    ("settings", "change", "text"),
    [
        ({}, {UP: np.full((64, 128), 3, np.uint8)}, f"{UP}: holds code 3; bitnet packs 0, 1 and 2"),
        ({}, {f"{UP}_scale": np.zeros(1, np.float32)}, r"weight_scale is \[0.0\]; one positive number"),
        ({}, {f"{UP}_scale": np.full(1, np.nan, np.float32)}, r"weight_scale is \[nan\]"),
        ({}, {f"{UP}_scale": np.ones(3, np.float32)}, "one positive number is needed"),
        ({}, {"lm_head.weight": np.zeros((16, 128), np.uint8)}, "without lm_head.weight_scale beside it"),
        ({}, {UP: np.zeros((63, 128), np.uint8)}, r"up_proj.weight is \[252, 128\], not \[256, 128\]"),
        ({"use_rms_norm": True}, {}, "use_rms_norm, a norm in front"),
        ({"linear_class": "bitlinear", "quantization_mode": "online"}, {}, "linear_class 'bitlinear' and"),
        ({"linear_class": "other"}, {}, "bitnet with linear_class 'other'"),
    ],
)
def test_bad_bitnet_is_refused_by_name(
    settings: dict[str, Any], change: dict[str, np.ndarray], text: str, tmp_path: Path
) -> None:
    with pytest.raises((CheckpointError, UnsupportedModelError), match=text):
        quantize_model(bitnet(tmp_path / "m", change=change, **settings), tmp_path / "out", scheme="asis")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("group", [64, 128])
def test_mlx_two_bit_packs_come_over(group: int, tmp_path: Path) -> None:
    folder, meant = mlx(tmp_path / "m", group)
    with open_checkpoint(folder) as source:
        for name, values in meant.items():
            np.testing.assert_array_equal(source.load(name).dequantize().reshape(values.shape), values)
        np.testing.assert_array_equal(source.load(UP, slice(3, 9)).values, meant[UP].reshape(256, 128)[3:9])
    report = quantize_model(folder, tmp_path / "out", scheme="asis")
    assert {r.scheme.label for r in report.rows if r.role.kind == "down"} == {f"asis ternary g{group}"}
    with Artifact.open(tmp_path / "out") as art:
        tensor = art[UP]
        np.testing.assert_array_equal(tensor.dequantize(), meant[UP].reshape(256, 128))
        assert tensor.to_arrays()["scales"].dtype == np.float16


def test_mlx_that_is_not_ternary_is_refused_by_name(tmp_path: Path) -> None:
    def affine(
        matrices: dict[str, np.ndarray],
    ) -> None:  # what mx.quantize makes of {-d, 0, d}: scale -d/2, bias +d
        matrices["model.layers.0.mlp.up_proj.scales"][5, 0] *= np.float16(-0.5)

    with pytest.raises(CheckpointError, match=rf"{UP}: 1 of .* a bias that is not minus the scale"):
        quantize_model(mlx(tmp_path / "a", change=affine)[0], tmp_path / "out", scheme="asis")

    def orphan(matrices: dict[str, np.ndarray]) -> None:
        del matrices["model.layers.0.mlp.up_proj.biases"]

    with pytest.raises(UnsupportedModelError, match=f"only 2-bit .* {UP} has no scales and biases"):
        open_checkpoint(mlx(tmp_path / "b", change=orphan)[0])
    folder, _ = mlx(tmp_path / "c")
    config = json.loads((folder / "config.json").read_text())
    config["quantization"]["model.layers.0.mlp.up_proj"] = {"bits": 4, "group_size": 32}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=f"{UP} has 4 bits in groups of 32"):
        open_checkpoint(folder)

    def turned(matrices: dict[str, np.ndarray]) -> None:
        matrices["model.layers.0.mlp.up_proj.signs"] = np.ones(128, np.float32)

    with pytest.raises(UnsupportedModelError, match=r"up_proj\.signs belongs to a rotation"):
        open_checkpoint(mlx(tmp_path / "d", change=turned)[0])


def test_what_cannot_be_decoded_can_still_be_listed(tmp_path: Path) -> None:
    folder = write(
        tmp_path / "m",
        {UP: np.zeros((256, 16), np.uint32), UP.replace("weight", "scales"): np.ones((256, 2), np.float16),
         UP.replace("weight", "biases"): np.ones((256, 2), np.float16)},
        quantization={"group_size": 64, "bits": 4},
    )  # fmt: skip
    with open_source(folder) as source:
        assert source.dtype(UP) == np.uint32
        assert any("only 2-bit weights" in n for n in source.notes)
    with pytest.raises(UnsupportedModelError, match="packed as mlx"):
        load(folder)


def test_inspect_counts_the_bytes_of_the_file(tmp_path: Path) -> None:
    found = {t["name"]: t for t in inspect_path(bitnet(tmp_path / "m"))["tensors"]}
    assert (found[UP]["type"], found[UP]["shape"], found[UP]["bytes"]) == ("bitnet", [256, 128], 64 * 128 + 2)


def test_the_real_packed_model(shared: Path, tmp_path: Path) -> None:
    folder = shared / "models" / "formats" / "bitnet-packed"
    if not folder.is_dir():
        pytest.skip("no packed model")
    report = quantize_model(folder, tmp_path / "out", scheme="asis")
    taken = [r for r in report.rows if isinstance(r.scheme, TernaryAsIs)]
    assert len(taken) == 28
    assert all(report.errors[r.name] == 0 for r in taken)
