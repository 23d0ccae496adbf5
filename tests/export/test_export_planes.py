"""planes-v1 exports: bytes gathered from the artifact's own codes, fused or not, rotated or not, run and read back."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import trapetum
from trapetum.errors import OutputError, UnsupportedModelError
from trapetum.export import export_artifact, plan_export
from trapetum.formats.source import open_source
from trapetum.tensors import TernaryTensor

LAYER = "model.layers.1."


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "hadamard"])
def artifact(
    request: pytest.FixtureRequest, demo_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    out = tmp_path_factory.mktemp("planes") / "artifact"
    trapetum.quantize_model(demo_model, out, scheme="ternary", levels=4, hadamard=request.param)
    return out


@pytest.mark.parametrize("fuse", [False, True])
def test_planes_are_the_artifact(artifact: Path, tmp_path: Path, fuse: bool) -> None:
    with plan_export(artifact, "planes", tmp_path / "p", fuse=fuse) as plan:
        plan.write()
        assert (tmp_path / "p" / "model.safetensors").stat().st_size == plan.size
    with open_source(artifact) as old, open_source(tmp_path / "p") as new:
        assert sorted(old.names()) == sorted(new.names())
        for name in old.names():
            assert np.array_equal(old.load(name).dequantize(), new.load(name).dequantize()), name
    ids = list(range(5, 40))
    with trapetum.load(artifact) as a, trapetum.load(tmp_path / "p") as b:
        expected = a.logits(ids)
        assert np.abs(b.logits(ids) - expected).max() <= 1e-5 * np.abs(expected).max()
        assert b.tokenizer.encode("The old house") == a.tokenizer.encode("The old house")


def test_bytes_by_hand(artifact: Path, tmp_path: Path) -> None:
    """The first plane is the rows' packed codes one after the other, the second their scales."""
    safetensors = pytest.importorskip("safetensors")
    export_artifact(artifact, "planes", tmp_path / "p", fuse=True)
    names = [f"{LAYER}self_attn.{x}_proj.weight" for x in "qkv"]
    codes, scales = b"", b""
    with open_source(artifact) as source:
        for name in names:
            tensor = source.load(name)
            assert isinstance(tensor, TernaryTensor)
            for row in tensor.codes.reshape(-1, 4):
                codes += bytes([int(row[0]) | int(row[1]) << 2 | int(row[2]) << 4 | int(row[3]) << 6])
            scales += tensor.scales.astype("<f2").tobytes()
    with safetensors.safe_open(tmp_path / "p" / "model.safetensors", "np") as file:
        found = file.get_tensor(f"{LAYER}self_attn.qkv_proj.weight")
    assert found.shape == (3 * 256, 256 // 128 * 34)
    assert found.tobytes() == codes + scales
    manifest = json.loads((tmp_path / "p" / "planes.json").read_text())
    described = manifest["tensors"][f"{LAYER}self_attn.qkv_proj.weight"]
    assert [part["name"] for part in described["parts"]] == names
    assert (described["N"], described["K"], described["scales_offset"]) == (768, 256, 768 * 64)


def test_what_the_layout_cannot_hold_is_refused(demo_model: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="no ternary, codebook or additive matrix"):
        export_artifact(demo_model, "planes", tmp_path / "p")
    trapetum.quantize_model(demo_model, tmp_path / "g64", scheme="ternary", group_size=64)
    with pytest.raises(UnsupportedModelError, match=r"21 matrices do not fit planes-v1.*groups of 64"):
        export_artifact(tmp_path / "g64", "planes", tmp_path / "p")
    assert not (tmp_path / "p").exists()


def test_an_existing_output_is_refused(artifact: Path, tmp_path: Path) -> None:
    export_artifact(artifact, "planes", tmp_path / "p")
    with pytest.raises(OutputError, match="exists"):
        export_artifact(artifact, "planes", tmp_path / "p")
    export_artifact(artifact, "planes", tmp_path / "p", overwrite=True)


@pytest.mark.parametrize(("bits", "layout"), [(4, "codebook4-v1"), (6, "codebook8-v1")])
@pytest.mark.parametrize("fuse", [False, True])
def test_tiles_are_the_artifact(demo_model: Path, tmp_path: Path, layout: str, bits: int, fuse: bool) -> None:
    """Codebooks in the kernels' order of bytes, read back to what the artifact means."""
    trapetum.quantize_model(demo_model, tmp_path / "a", bits=bits)
    export_artifact(tmp_path / "a", "planes", tmp_path / "p", fuse=fuse)
    manifest = json.loads((tmp_path / "p" / "planes.json").read_text())
    assert manifest["version"] == 2
    described = manifest["tensors"]
    assert {item["layout"] for item in described.values()} == {layout}
    assert (f"{LAYER}self_attn.qkv_proj.weight" in described) == fuse
    with open_source(tmp_path / "a") as old, open_source(tmp_path / "p") as new:
        assert sorted(old.names()) == sorted(new.names())
        for name in old.names():
            assert old.layout(name) == new.layout(name)
            assert np.array_equal(old.load(name).dequantize(), new.load(name).dequantize()), name
            part = new.load(name, slice(1, 3))
            assert np.array_equal(part.dequantize(), old.load(name, slice(1, 3)).dequantize()), name
    with trapetum.load(tmp_path / "a") as a, trapetum.load(tmp_path / "p") as b:
        assert np.array_equal(a.logits([5, 6, 7]), b.logits([5, 6, 7]))
