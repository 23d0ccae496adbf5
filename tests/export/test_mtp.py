"""The multi-token prediction block as MTP1."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import trapetum
from trapetum.errors import CheckpointError, OutputError, RecipeError, UnsupportedModelError
from trapetum.export import export_artifact
from trapetum.export.direct import DirectCbk
from trapetum.formats.cbk import CbkFile
from trapetum.formats.safetensors_writer import Entry, SafetensorsWriter
from trapetum.formats.source import open_source
from trapetum.models.config import parse_config

CONFIG = json.loads(Path(__file__).with_name("deepseek_v3.json").read_text()) | {
    "vocab_size": 300,
    "intermediate_size": 256,
    "num_nextn_predict_layers": 1,
}
BLOCK = "model.layers.2."


def write(folder, *, copies=True, other_head=False, leave=()):
    """A model of two layers with the block as the third."""
    three = parse_config({**CONFIG, "num_hidden_layers": 3})
    shapes = dict(three.architecture.expected_shapes(three))
    shapes |= {BLOCK + "enorm.weight": (256,), BLOCK + "hnorm.weight": (256,)}
    shapes |= {BLOCK + "eh_proj.weight": (256, 512), BLOCK + "shared_head.norm.weight": (256,)}
    if copies:
        shapes |= {BLOCK + "embed_tokens.weight": (300, 256), BLOCK + "shared_head.head.weight": (300, 256)}
    shapes = {n: s for n, s in shapes.items() if n not in leave}
    rng, kept = np.random.default_rng(1), {}
    folder.mkdir()
    entries = [Entry(n, np.dtype(np.float32), s) for n, s in shapes.items()]
    same = {BLOCK + "embed_tokens.weight": "model.embed_tokens.weight"}
    if not other_head:
        same[BLOCK + "shared_head.head.weight"] = "lm_head.weight"
    with SafetensorsWriter(folder / "model.safetensors", entries) as writer:
        for entry in entries:
            values = rng.standard_normal(entry.shape).astype(np.float32)
            kept[entry.name] = kept.get(same.get(entry.name), values)
            writer.write(entry.name, kept[entry.name])
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture
def artifact(tmp_path):
    write(tmp_path / "m")
    trapetum.quantize_model(tmp_path / "m", tmp_path / "a", bits=4)
    return tmp_path / "a"


def test_the_block_is_written_and_read(artifact, tmp_path):
    out = export_artifact(artifact, "mtp", tmp_path / "mtp.cbk")
    raw = out.read_bytes()
    assert raw[:4] == b"MTP1"
    assert struct.unpack_from("<16i", raw, 4) == (256, 4, 64, 48, 16, 32, 96, 256, 4, 1, 2, 2, 1, 1, 1, 1)
    assert struct.unpack_from("<3f", raw, 68)[2] == 2.5
    with CbkFile.open(out) as cbk, trapetum.open_artifact(artifact) as source:
        assert list(cbk.faults()) == []
        for name in cbk.names():
            values = source[BLOCK + name].dequantize()
            found = cbk.load(name).dequantize()
            part = found[tuple(slice(0, n) for n in values.shape)]
            if cbk.records[name].kind == "S16":
                assert np.square(part - values).sum() < 0.02 * np.square(values).sum(), name
            else:
                dtype = {"f16": np.float16, "f32": np.float32}[cbk.records[name].kind]
                assert np.array_equal(part, values.astype(dtype)), name
            assert not found[values.shape[0] :].any(), name
    assert (tmp_path / "mtp.cbk.json").is_file()


def test_a_folder_gets_mtp_cbk(artifact, tmp_path):
    export_artifact(artifact, "mtp", tmp_path / "out")
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"mtp.cbk", "mtp.cbk.json"}
    with pytest.raises(OutputError, match="exists"):
        export_artifact(artifact, "mtp", tmp_path / "out")


def test_a_block_is_no_model(artifact, tmp_path):
    export_artifact(artifact, "mtp", tmp_path / "mtp.cbk")
    with pytest.raises(UnsupportedModelError, match="a prediction block without its model"):
        trapetum.load(tmp_path / "mtp.cbk")
    with pytest.raises(RecipeError, match="no model"):
        export_artifact(artifact, "cbk", tmp_path / "x.cbk", magic="MTP1")


def test_the_model_alone_is_exported_without_it(artifact, tmp_path):
    export_artifact(artifact, "cbk", tmp_path / "x.cbk")
    with CbkFile.open(tmp_path / "x.cbk") as cbk:
        assert cbk.header.layout.magic == "CBKR"
        assert not any(name.startswith(BLOCK) for name in cbk.names())
        assert any("not part of the .cbk" in note for note in cbk.manifest["report"]["notes"])
    with open_source(artifact) as source:
        assert source.layout(BLOCK + "eh_proj.weight") == "dense"


def test_a_block_without_copies_is_fine(tmp_path):
    write(tmp_path / "m", copies=False)
    assert export_artifact(tmp_path / "m", "mtp", tmp_path / "mtp.cbk").stat().st_size > 0


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"other_head": True}, UnsupportedModelError, "shared_head.head.weight differs from lm_head"),
        ({"leave": (BLOCK + "eh_proj.weight",)}, UnsupportedModelError, "no prediction block"),
        (
            {"leave": (BLOCK + "mlp.gate.e_score_correction_bias",)},
            CheckpointError,
            "correction_bias is missing",
        ),
    ],
)
def test_what_cannot_be_exported(tmp_path, options, error, words):
    write(tmp_path / "m", **options)
    with pytest.raises(error, match=words):
        export_artifact(tmp_path / "m", "mtp", tmp_path / "mtp.cbk")
    assert not (tmp_path / "mtp.cbk").exists()


def test_from_fp8_blocks(tmp_path):
    """Ragged 128 x 128 blocks, in the block and in the model: what is kept stays FP8 until it is fitted."""
    write(tmp_path / "m")
    (tmp_path / "f").mkdir()
    fp8, entries, arrays, decoded = np.dtype(ml_dtypes.float8_e4m3fn), [], {}, {}
    with open_source(tmp_path / "m") as source:
        for name in source.names():
            values = source.load(name).dequantize()
            if "_proj" not in name:
                arrays[name] = values
                continue
            rows, inputs = values.shape
            scales = np.full((-(-rows // 128), -(-inputs // 128)), 1 / 64, np.float32)
            scales *= 1 + np.arange(scales.size, dtype=np.float32).reshape(scales.shape) / 7
            spread = np.repeat(np.repeat(scales, 128, 0), 128, 1)[:rows, :inputs]
            arrays[name] = (values / spread).clip(-440, 440).astype(fp8)
            arrays[f"{name}_scale_inv"] = scales
            decoded[name] = arrays[name].astype(np.float32) * spread
    entries = [Entry(n, v.dtype, v.shape) for n, v in arrays.items()]
    with SafetensorsWriter(tmp_path / "f/model.safetensors", entries) as writer:
        for name, values in arrays.items():
            writer.write(name, values)
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    (tmp_path / "f/config.json").write_text(json.dumps({**CONFIG, "quantization_config": quantization}))
    trapetum.quantize_model(tmp_path / "f", tmp_path / "a", recipe="cbk-deepseek")
    export_artifact(tmp_path / "a", "cbk", tmp_path / "a-cbk")
    export_artifact(tmp_path / "a", "mtp", tmp_path / "mtp.cbk")
    trapetum.quantize_model(tmp_path / "f", tmp_path / "b/a", recipe="cbk-deepseek", route=DirectCbk())
    for file in ("model.cbk", "manifest.json"):
        assert (tmp_path / "b/a-cbk" / file).read_bytes() == (tmp_path / "a-cbk" / file).read_bytes()
    with CbkFile.open(tmp_path / "a-cbk") as model, CbkFile.open(tmp_path / "mtp.cbk") as block:
        for name, values in decoded.items():
            own = name.startswith(BLOCK)
            found = (block if own else model).load(name.removeprefix(BLOCK)).dequantize()
            part = found[: values.shape[0], : values.shape[1]]
            kind = (block if own else model).records[name.removeprefix(BLOCK)].kind
            if kind == "f16":
                assert np.array_equal(part, values.astype(np.float16)), name
            else:
                assert np.square(part - values).sum() < 0.02 * np.square(values).sum(), name
