"""``--any-architecture``: a family outside the table goes through quantize and the hf export, and nowhere else."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import trapetum
from trapetum.errors import UnsupportedModelError
from trapetum.export import export_artifact
from trapetum.formats.safetensors_writer import Entry, SafetensorsWriter
from trapetum.formats.source import open_source
from trapetum.models.architectures import ARCHITECTURES

CONFIG = {
    "architectures": ["OctopusForCausalLM"],
    "model_type": "octopus",
    "n_embd": 64,
    "rope_scaling": {"rope_type": "spiral"},
}
SHAPES = {
    "transformer.wte.weight": (40, 64),
    "transformer.h.0.ln_1.weight": (64,),
    "transformer.h.0.arm.query_key_value.weight": (192, 64),
    "transformer.h.0.arm.query_key_value.bias": (192,),
    "transformer.h.0.arm.conv1d.weight": (64, 1, 4),
    "transformer.h.0.mlp.experts.up.weight": (3, 32, 64),
    "transformer.ln_f.weight": (64,),
    "lm_head.weight": (40, 64),
}


# Named as a part of Qwen3-Next that a dense folder has in another form.
SHAPES["transformer.h.0.linear_attn.in_proj_z.weight"] = (64, 64)


@pytest.fixture
def octopus(tmp_path: Path) -> Path:
    folder = tmp_path / "octopus"
    folder.mkdir()
    rng = np.random.default_rng(0)
    # At most eight values a row: a codebook of sixteen holds them exactly.
    tensors = {n: rng.integers(-4, 4, s).astype(np.float32) / 8 for n, s in SHAPES.items()}
    entries = [Entry(n, v.dtype, v.shape) for n, v in tensors.items()]
    with SafetensorsWriter(folder / "model.safetensors", entries) as writer:
        for name, values in tensors.items():
            writer.write(name, values)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def test_refused_with_the_list_of_known_families(octopus: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="OctopusForCausalLM") as caught:
        trapetum.quantize_model(octopus, tmp_path / "out")
    for arch in ARCHITECTURES.values():
        assert arch.classes[0] in caught.value.message
    assert "--any-architecture" in str(caught.value.hint)
    assert not (tmp_path / "out").exists()


def test_artifact_and_dense_folder_hold_the_weights(octopus: Path, tmp_path: Path) -> None:
    artifact, dense = tmp_path / "artifact", tmp_path / "dense"
    trapetum.quantize_model(octopus, artifact, bits=4, any_architecture=True)
    export_artifact(artifact, "hf", dense, dtype="f32")
    with open_source(octopus) as source, open_source(dense) as copy:
        assert sorted(copy.names()) == sorted(SHAPES)
        for name in SHAPES:
            assert copy.shape(name) == SHAPES[name]
            np.testing.assert_array_equal(copy.load(name).dequantize(), source.load(name).dequantize())
    with trapetum.open_artifact(artifact) as stored:
        layouts = {name: stored.layout(name) for name in SHAPES}
    assert layouts["transformer.h.0.arm.query_key_value.weight"] == "codebook"
    assert layouts["transformer.h.0.mlp.experts.up.weight"] == "codebook"
    assert layouts["lm_head.weight"] == "codebook"
    assert layouts["transformer.wte.weight"] == layouts["transformer.h.0.ln_1.weight"] == "dense"
    assert json.loads((dense / "config.json").read_text()) == CONFIG | {"torch_dtype": "float32"}


@pytest.mark.parametrize("format", ["gguf", "cbk"])
def test_other_exports_and_the_runtime_refuse_it_by_name(format: str, octopus: Path, tmp_path: Path) -> None:
    artifact = tmp_path / "artifact"
    trapetum.quantize_model(octopus, artifact, bits=4, any_architecture=True)
    with pytest.raises(UnsupportedModelError, match="OctopusForCausalLM"):
        export_artifact(artifact, format, tmp_path / f"x.{format}")
    with pytest.raises(UnsupportedModelError, match="OctopusForCausalLM"):
        trapetum.load(artifact)
