"""FP8 checkpoints against the product that defines them, and the real sample against its truth."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import trapetum
from trapetum.errors import CheckpointError, UnsupportedModelError
from trapetum.export import export_artifact
from trapetum.formats.checkpoint import Checkpoint
from trapetum.formats.packed_fp8 import Fp8Checkpoint
from trapetum.formats.packed_ternary import open_checkpoint
from trapetum.formats.safetensors import SafetensorsFile
from trapetum.formats.safetensors_writer import Entry, SafetensorsWriter
from trapetum.formats.source import open_source
from trapetum.quantize.job import quantize_model
from trapetum.runtime.verify import verify_path
from trapetum.tensors import LAYOUTS as LAYOUT_CLASSES
from trapetum.tensors import Float8Tensor

safetensors_numpy = pytest.importorskip("safetensors.numpy")

SHARED = Path(os.environ.get("TRAPETUM_SHARED", Path(__file__).parents[2] / ".." / "shared"))
E4M3 = ml_dtypes.float8_e4m3fn
RNG = np.random.default_rng(5)
COARSE = (2.0 ** -RNG.integers(1, 9, 64)).astype(np.float32)
FINE = RNG.uniform(0.01, 0.2, 64).astype(np.float32)
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128, "intermediate_size": 320,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 64,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
}  # fmt: skip


def codes(*shape: int) -> np.ndarray:
    """Every finite code, in no order."""
    some = np.setdiff1d(np.arange(256, dtype=np.uint8), [0x7F, 0xFF])
    return np.random.default_rng(2).choice(some, shape).astype(np.uint8).view(E4M3)


def write(folder: Path, tensors: dict[str, np.ndarray], settings: Any, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    safetensors_numpy.save_file(
        {k: np.ascontiguousarray(v) for k, v in tensors.items()}, folder / "model.safetensors"
    )
    content = {**config, **({} if settings is None else {"quantization_config": settings})}
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def spread(scales: np.ndarray, shape: tuple[int, ...], block: tuple[int, int]) -> np.ndarray:
    """One scale for each weight of a matrix."""
    return np.repeat(np.repeat(scales, block[0], 0), block[1], 1)[: shape[0], : shape[1]]


FP8 = {"quant_method": "fp8"}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"g": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}},
}
# settings, suffix, shape of the scales, block that one covers
LAYOUTS: dict[str, tuple[Any, str, tuple[int, ...], tuple[int, int]]] = {
    "blocks": ({**FP8, "weight_block_size": [128, 128]}, "_scale_inv", (3, 2), (128, 128)),
    "blocks-64x96": ({**FP8, "weight_block_size": [64, 96]}, "_scale_inv", (5, 3), (64, 96)),
    "blocks-unsaid": (None, "_scale_inv", (3, 2), (128, 128)),
    "scalar": (FP8, "_scale", (), (300, 200)),
    "one": ({"quant_method": "modelopt", "quant_algo": "FP8"}, "_scale", (1, 1), (300, 200)),
    "channel": (COMPRESSED, "_scale", (300, 1), (1, 200)),
    "channel-flat": ({"quant_method": "fbgemm_fp8"}, "_scale", (300,), (1, 200)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["coarse", "fine"])
def test_value_is_code_times_scale(layout: str, kind: str, tmp_path: Path) -> None:
    settings, suffix, shape, block = LAYOUTS[layout]
    if kind == "coarse":
        settings = {**(settings or FP8), "scale_fmt": "ue8m0"}
    count = int(np.prod(shape))
    scales = np.resize(COARSE if kind == "coarse" else FINE, count).astype(np.float32)
    weight = codes(300, 200)
    grid = scales.reshape(-(-300 // block[0]), -(-200 // block[1]))
    expected = weight.astype(np.float32) * spread(grid, (300, 200), block)
    tensors = {
        "a.weight": weight,
        f"a.weight{suffix}": scales.reshape(shape),
        "a.input_scale": np.float32(0.5),
        "norm.weight": np.ones(4, np.float32),
    }
    with open_checkpoint(write(tmp_path / "m", tensors, settings)) as found:
        assert isinstance(found, Fp8Checkpoint)
        assert sorted(found.names()) == ["a.weight", "norm.weight"]
        assert found.is_packed("a.weight")
        assert found.dtype("a.weight").name == ("bfloat16" if kind == "coarse" else "float32")
        whole = found.load("a.weight")
        assert whole.values.dtype == found.dtype("a.weight")
        assert np.array_equal(whole.dequantize(), expected)
        for start in range(0, 300, 77):
            rows = slice(start, start + 77)
            assert np.array_equal(found.load("a.weight", rows).dequantize(), expected[rows])
        assert found.packed_format() is None


def test_blocks_do_not_reach_into_the_next_expert(tmp_path: Path) -> None:
    weight, scales = codes(3, 200, 130), np.resize(FINE, 12).reshape(3, 2, 2)
    tensors = {"x.experts.gate_up_proj": weight, "x.experts.gate_up_proj_scale_inv": scales}
    expected = weight.astype(np.float32) * np.stack([spread(s, (200, 130), (128, 128)) for s in scales])
    with open_checkpoint(write(tmp_path / "m", tensors, {**FP8, "weight_block_size": [128, 128]})) as found:
        assert np.array_equal(found.load("x.experts.gate_up_proj").dequantize(), expected)
        assert found.stored("x.experts.gate_up_proj").shape == (3, 200, 130)
        rows = slice(150, 450)  # over two borders
        got = found.load("x.experts.gate_up_proj", rows).dequantize()
        assert np.array_equal(got, expected.reshape(600, 130)[rows])


@pytest.mark.parametrize("shape", [(), (1, 1, 1), (3, 1, 1), (3, 200, 1)])
def test_scales_of_stacks(shape: tuple[int, ...], tmp_path: Path) -> None:
    weight, scales = (
        codes(3, 200, 130),
        np.resize(FINE, int(np.prod(shape))).reshape(shape).astype(np.float32),
    )
    tensors = {"x.experts.down_proj": weight, "x.experts.down_proj_scale": scales}
    with open_checkpoint(write(tmp_path / "m", tensors, FP8)) as found:
        got = found.load("x.experts.down_proj").dequantize()
        assert np.array_equal(got, weight.astype(np.float32) * scales)
        assert np.array_equal(
            found.load("x.experts.down_proj", slice(390, 410)).dequantize(), got.reshape(600, 130)[390:410]
        )


def test_a_code_without_a_value_is_not_a_number(tmp_path: Path) -> None:
    weight = codes(4, 4)
    weight.view(np.uint8)[1, 2] = 0x7F
    tensors = {"a.weight": weight, "a.weight_scale": np.float32(1)}
    with open_checkpoint(write(tmp_path / "m", tensors, FP8)) as found:
        assert np.argwhere(np.isnan(found.load("a.weight").dequantize())).tolist() == [[1, 2]]


def test_powers_of_two_as_bytes(tmp_path: Path) -> None:
    """Scales of type F8_E8M0."""
    weight, scale = codes(130, 8), np.array([[120], [125]], np.uint8).view(ml_dtypes.float8_e8m0fnu)
    expected = weight.astype(np.float32) * np.repeat(np.float32([2.0**-7, 2.0**-2]), (128, 2))[:, None]
    folder = write(tmp_path / "m", {"a.weight": weight}, FP8)
    both = {"a.weight": weight, "a.weight_scale_inv": scale}
    # safetensors' front end for NumPy has no such type.
    entries = [Entry(k, v.dtype, v.shape) for k, v in both.items()]
    with SafetensorsWriter(folder / "model.safetensors", entries) as writer:
        for name, values in both.items():
            writer.write(name, values)
    with open_checkpoint(folder) as found:
        assert found.dtype("a.weight").name == "bfloat16"
        assert np.array_equal(found.load("a.weight").dequantize(), expected)


def test_a_broken_promise_of_powers_is_refused(tmp_path: Path) -> None:
    tensors = {"a.weight": codes(4, 4), "a.weight_scale": np.float32(0.75)}
    with (
        open_checkpoint(write(tmp_path / "m", tensors, {**FP8, "scale_fmt": "ue8m0"})) as found,
        pytest.raises(CheckpointError, match="no power of two"),
    ):
        found.load("a.weight")


def test_opening_reads_no_scales(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a model is streamed, they are not here yet."""
    folder = write(tmp_path / "m", {"a.weight": codes(4, 4), "a.weight_scale": np.float32(0.75)}, FP8)
    monkeypatch.setattr(SafetensorsFile, "read", lambda *_: pytest.fail("values were read"))
    with open_checkpoint(folder) as found:
        assert found.dtype("a.weight") == np.float32
        assert found.notes


BAD: dict[str, tuple[dict[str, np.ndarray], Any, str]] = {
    "no scale": ({"a.weight": codes(4, 4)}, FP8, "a.weight has no scale"),
    "scale of a plain tensor": (
        {"a.weight": np.ones((4, 4), np.float32), "a.weight_scale": np.float32(1)}, FP8, "no fp8 matrix",
    ),
    "wrong grid": (
        {"a.weight": codes(300, 200), "a.weight_scale_inv": np.ones((2, 3), np.float32)}, FP8, r"\[2, 3\]",
    ),
    "block": (
        {"a.weight": codes(4, 4), "a.weight_scale": np.float32(1)}, {**FP8, "weight_block_size": [0, 128]},
        "weight_block_size",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_is_no_fp8_checkpoint_is_named(case: str, tmp_path: Path) -> None:
    tensors, settings, text = BAD[case]
    with pytest.raises(CheckpointError, match=text):
        open_checkpoint(write(tmp_path / "m", tensors, settings))


def test_an_infinite_scale_is_named(tmp_path: Path) -> None:
    tensors = {"a.weight": codes(4, 4), "a.weight_scale": np.float32(np.inf)}
    with (
        open_checkpoint(write(tmp_path / "m", tensors, FP8)) as found,
        pytest.raises(CheckpointError, match=r"a\.weight: has a scale that is not finite"),
    ):
        found.load("a.weight")


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "pack-quantized"),
        ({**COMPRESSED, "sparsity_config": {"format": "sparse-bitmask"}}, "sparse-bitmask"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "NVFP4"),
        ({"quant_method": "fp8", "fmt": "e3m4"}, "e3m4"),
    ],
)
def test_relatives_are_refused_by_name(settings: dict[str, Any], text: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "m", {"a.weight": codes(4, 4), "a.weight_scale": np.float32(1)}, settings)
    with pytest.raises(UnsupportedModelError, match=f"{settings['quant_method']}.*{text}"):
        open_checkpoint(folder)
    with open_source(folder) as listed:  # can still be inspected
        assert isinstance(listed, Checkpoint)
        assert any(text in note for note in listed.notes)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({}, r"a\.weight_packed holds packed codes"),
        ({"quantization_config": COMPRESSED}, r"a\.weight_packed holds packed codes"),
        ({"compression_config": {"format": "pack-quantized"}}, "format 'pack-quantized'"),
        (
            {"quantization_config": {**COMPRESSED, "format": "nvfp4-pack-quantized"}},
            "format 'nvfp4-pack-quantized'",
        ),
    ],
)
def test_packed_codes_are_refused_by_name_whatever_the_config_says(
    config: dict[str, Any], text: str, tmp_path: Path
) -> None:
    """Not as a checkpoint that lacks weights."""
    tensors = {"a.weight_packed": np.zeros((4, 2), np.int32), "a.weight_scale": np.ones((4, 1), np.float32)}
    folder = write(tmp_path / "m", tensors, None, **config)
    with pytest.raises(UnsupportedModelError, match=f"compressed-tensors, {text}"):
        open_checkpoint(folder)


def model(folder: Path, scales: np.ndarray, **said: str) -> Path:
    """A Llama of one layer in blocks of 128, whose feed-forward has ragged last blocks."""
    rng = np.random.default_rng(0)
    shapes = {
        "self_attn.q_proj": (128, 128), "self_attn.k_proj": (64, 128), "self_attn.v_proj": (64, 128),
        "self_attn.o_proj": (128, 128), "mlp.gate_proj": (320, 128), "mlp.up_proj": (320, 128),
        "mlp.down_proj": (128, 320),
    }  # fmt: skip
    tensors: dict[str, np.ndarray] = {
        "model.embed_tokens.weight": rng.standard_normal((64, 128)).astype(np.float32),
        "model.norm.weight": np.ones(128, np.float32),
    }
    for part in ("input_layernorm", "post_attention_layernorm"):
        tensors[f"model.layers.0.{part}.weight"] = np.ones(128, np.float32)
    for part, (rows, columns) in shapes.items():
        name, grid = f"model.layers.0.{part}.weight", (-(-rows // 128), -(-columns // 128))
        tensors[name] = rng.standard_normal((rows, columns)).astype(E4M3)
        tensors[f"{name}_scale_inv"] = np.resize(scales, grid)
    return write(folder, tensors, {**FP8, "weight_block_size": [128, 128], **said}, **CONFIG)


@pytest.mark.parametrize("kind", ["coarse", "fine"])
def test_taken_over_as_it_is(kind: str, tmp_path: Path) -> None:
    coarse = kind == "coarse"
    folder = model(tmp_path / "m", COARSE, scale_fmt="ue8m0") if coarse else model(tmp_path / "m", FINE)
    report = quantize_model(folder, tmp_path / "out", scheme="asis")
    assert any("packed as fp8" in note for note in report.notes)
    ids = [1, 2, 3]
    with trapetum.open_artifact(tmp_path / "out") as artifact, open_checkpoint(folder) as source:
        for name in source.names():
            tensor = artifact[name]
            assert np.array_equal(tensor.dequantize(), source.load(name).dequantize())
            assert isinstance(tensor, Float8Tensor) is source.is_packed(name)
        down = artifact["model.layers.0.mlp.down_proj.weight"]
        assert (down.params(), down.to_arrays()["scales"].shape) == ({"group_size": 128}, (128, 3))
        assert down.nbits_per_weight == pytest.approx(8 + 3 * 32 / 320)
    checks = {c.name: c.ok for c in verify_path(tmp_path / "out", source=folder).checks}
    assert (checks["integrity"], checks["decoder"], checks["reconstruction"]) == (True, True, True)
    with trapetum.load(folder) as ours, trapetum.load(tmp_path / "out") as taken:
        assert np.array_equal(ours.logits(ids), taken.logits(ids))
    export_artifact(tmp_path / "out", "hf", tmp_path / "hf")
    with trapetum.load(folder) as ours, trapetum.load(tmp_path / "hf") as dense:
        assert np.array_equal(ours.logits(ids), dense.logits(ids))


def test_parts_of_another_shape_are_refused() -> None:
    two, scales = codes(2, 6), np.ones((2, 2), np.float32)
    assert Float8Tensor(two, scales, 4).shape == (2, 6)
    for wrong in (
        (two, scales, 2),
        (two, scales[:1], 4),
        (two.astype(np.float32), scales, 4),
        (two, scales, 0),
    ):
        with pytest.raises(ValueError, match=r"scales|codes"):
            Float8Tensor(*wrong)
    with pytest.raises(ValueError, match="shape"):
        Float8Tensor(two, scales, 4, (3, 4))
    again = LAYOUT_CLASSES["float8"].from_arrays(
        {"codes": two, "scales": scales}, (1, 2, 6), {"group_size": 4}
    )
    assert again.dequantize().shape == (1, 2, 6)


def test_quantized_from_what_it_means(tmp_path: Path) -> None:
    """4-bit codebooks of the decoded rows, never of raw codes or scales."""
    folder = model(tmp_path / "m", FINE)
    quantize_model(folder, tmp_path / "out", bits=4)
    with trapetum.open_artifact(tmp_path / "out") as artifact, open_checkpoint(folder) as source:
        assert not any("scale" in name for name in artifact.names())
        for name in source.names():
            want, got = source.load(name).dequantize(), artifact[name].dequantize()
            assert np.square(got - want).sum() <= 0.02 * np.square(want).sum()


def test_real_sample_equals_transformers(tmp_path: Path) -> None:
    folder = SHARED / "models" / "formats" / "fp8-block128"
    if not folder.is_dir():
        pytest.skip("the sample is not at hand")
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    with trapetum.load(folder) as model, open_checkpoint(folder) as source:
        ids = list(range(5, 45))
        ours = model.logits(ids)
        state = {n: torch.from_numpy(source.load(n).dequantize()) for n in source.names()}
    config = transformers.AutoConfig.from_pretrained(folder)
    del config.quantization_config
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    theirs.load_state_dict({**state, "lm_head.weight": state["model.embed_tokens.weight"]})
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0].numpy()
    assert np.abs(ours - expected).max() < 1e-4 * np.abs(expected).max()
    with SafetensorsFile.open(folder / "model.safetensors") as raw:
        names = [n for n in raw.tensors if f"{n}_scale_inv" in raw.tensors]
        assert len(names) == 28
        for name in names:
            weight, scales = raw.read(name), raw.read(f"{name}_scale_inv")
            truth = weight.astype(np.float32) * spread(scales, weight.shape, (128, 128))
            assert np.array_equal(state[name].numpy(), truth)
