"""Artifact -> dense folder, read by the safetensors package and by transformers."""

from __future__ import annotations

import json
import shutil

import ml_dtypes
import numpy as np
import pytest

import trapetum
from trapetum.errors import FormatError, OutputError, RecipeError
from trapetum.export import export_artifact, plan_export
from trapetum.formats.source import open_source

IDS = [5, 9, 200, 31, 7, 1000, 3]


def arrays(folder):
    numpy = pytest.importorskip("safetensors.numpy")
    return {k: v for f in sorted(folder.glob("*.safetensors")) for k, v in numpy.load_file(f).items()}


def test_float32_is_exact_and_the_default(artifact, tmp_path):
    out = export_artifact(artifact, "hf", tmp_path / "out")
    found = arrays(out)
    with trapetum.open_artifact(artifact) as art:
        assert set(found) == set(art.names())
        for name in art.names():
            assert found[name].dtype == np.float32
            assert np.array_equal(found[name], art[name].dequantize())
    config = json.loads((out / "config.json").read_text())
    assert config["torch_dtype"] == "float32"
    assert "quantization_config" not in config
    assert {"tokenizer.json", "tokenizer_config.json"} <= {p.name for p in out.iterdir()}
    a, b = (trapetum.load(path).logits(IDS) for path in (artifact, out))
    assert np.abs(a - b).max() <= 1e-4 * np.abs(a).max()


@pytest.mark.parametrize(("dtype", "kind"), [("bf16", ml_dtypes.bfloat16), ("f16", np.float16)])
def test_rounding_is_counted(artifact, tmp_path, dtype, kind):
    with plan_export(artifact, "hf", tmp_path / "out", dtype=dtype) as plan:
        out = plan.write()
    with open_source(out) as dense, trapetum.open_artifact(artifact) as art:
        for row in plan.rows:
            decoded = art[row.name].dequantize()
            rounded = decoded.astype(kind)
            assert dense.load(row.name).values.tobytes() == rounded.tobytes()
            assert row.changed == np.count_nonzero(rounded.astype(np.float32) != decoded)
            assert (row.action == "rounded") == (row.changed > 0)
    assert any(row.changed for row in plan.rows)


def test_shards_sizes_and_index(artifact, tmp_path):
    with plan_export(artifact, "hf", tmp_path / "out", max_shard_size=2 << 20) as plan:
        predicted = dict(plan.files)
        out = plan.write()
    written = {p.name: p.stat().st_size for p in out.glob("*.safetensors")}
    assert written == predicted
    assert sum(written.values()) == plan.size
    assert len(written) > 2
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(written)
    export_artifact(artifact, "hf", out, overwrite=True)
    assert [p.name for p in out.glob("*.safetensors*")] == ["model.safetensors"]


def test_outputs_are_protected(artifact, tmp_path, demo_model):
    out = tmp_path / "out"
    export_artifact(artifact, "hf", out, dry_run=True)
    assert not out.exists()
    out.mkdir()
    (out / "photo.png").write_bytes(b"x")
    for overwrite in (False, True):
        with pytest.raises(OutputError):
            export_artifact(artifact, "hf", out, overwrite=overwrite)
    assert [p.name for p in out.iterdir()] == ["photo.png"]
    model = tmp_path / "model"  # somebody's own, whose files are named as those of an export
    shutil.copytree(demo_model, model)
    before = {p.name: p.read_bytes() for p in model.iterdir()}
    with pytest.raises(OutputError, match="no export wrote it"):
        export_artifact(artifact, "hf", model, overwrite=True)
    assert {p.name: p.read_bytes() for p in model.iterdir()} == before
    with pytest.raises(RecipeError, match="dtype is 'f64'"):
        export_artifact(artifact, "hf", tmp_path / "y", dtype="f64")


def test_a_value_beyond_float16_is_refused(tmp_path, demo_model):
    big = tmp_path / "big"
    export_artifact(demo_model, "hf", big)
    file = big / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-4:] = np.float32(1e9).tobytes()
    file.write_bytes(data)
    with pytest.raises(FormatError, match="beyond the range of float16"):
        export_artifact(big, "hf", tmp_path / "half", dtype="f16")
    assert not (tmp_path / "half").exists()


@pytest.mark.slow
def test_transformers_loads_it(artifact, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    out = export_artifact(artifact, "hf", tmp_path / "out", max_shard_size=4 << 20)
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == torch.float32
    with torch.no_grad():
        expected = model(torch.tensor([IDS])).logits[0].numpy()
    logits = trapetum.load(artifact).logits(IDS)
    assert np.abs(logits - expected).max() <= 1e-4 * np.abs(expected).max()
