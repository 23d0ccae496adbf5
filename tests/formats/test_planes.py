"""planes-v1: the definition spelled out in loops, golden bytes, fused matrices, refusals."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from trapetum.blocktypes import BLOCK_TYPES
from trapetum.errors import CheckpointError, FormatError
from trapetum.formats.planes import (
    PlanesEntry,
    PlanesFile,
    PlanesLayout,
    PlanesPart,
    blocks_to_planes,
    planes_to_blocks,
    tensor_planes,
    write_planes,
)
from trapetum.formats.safetensors_writer import Entry, SafetensorsWriter
from trapetum.formats.source import open_source
from trapetum.tensors import CodebookTensor, DenseTensor, QuantizedTensor, TernaryTensor


def ternary(rows: int, in_features: int, seed: int = 0, levels: int = 4) -> TernaryTensor:
    rng = np.random.default_rng(seed)
    scales = rng.standard_normal((rows, in_features // 128)).astype(np.float16)  # negative ones, too
    scales.reshape(-1)[::7] = 0
    return TernaryTensor(rng.integers(0, levels, (rows, in_features), dtype=np.uint8), scales, levels)


def blocks_of(tensor: TernaryTensor) -> np.ndarray:
    parts = {"d": tensor.scales.reshape(-1), "codes": tensor.codes.reshape(-1, 128)}
    return BLOCK_TYPES["PQ2_0"].from_parts(parts).reshape(tensor.rows, -1)


@pytest.mark.parametrize("in_features", [128, 384, 5120])
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_bytes_are_where_the_definition_says(rows: int, in_features: int) -> None:
    width = in_features // 128 * 34
    blocks = np.random.default_rng(1).integers(0, 256, (rows, width), dtype=np.uint8)
    planes = blocks_to_planes(blocks)
    assert planes.shape == (rows, width)
    flat = planes.reshape(-1)
    halves = rows * in_features // 8
    for row in range(rows):
        for block in range(in_features // 128):
            source = blocks[row, block * 34 : block * 34 + 34]
            at = row * (in_features // 4) + block * 32
            np.testing.assert_array_equal(flat[at : at + 32], source[2:])
            half = halves + row * (in_features // 128) + block
            np.testing.assert_array_equal(flat[2 * half : 2 * half + 2], source[:2])
    np.testing.assert_array_equal(planes_to_blocks(planes), blocks)


def test_strided_blocks() -> None:
    wide = np.random.default_rng(2).integers(0, 256, (6, 100), dtype=np.uint8)
    np.testing.assert_array_equal(blocks_to_planes(wide[::2, 5:73]), blocks_to_planes(wide[::2, 5:73].copy()))
    with pytest.raises(ValueError, match="no whole PQ2_0 blocks"):
        blocks_to_planes(wide)


def test_golden_bytes() -> None:
    j = np.arange(128)
    codes = ((j * j + 3 * j + 7) // 5 % 3).astype(np.uint8)
    tensor = TernaryTensor(np.stack([codes, codes]), np.array([[1.5], [-2.0]], np.float16))
    row = "8901895562406295189058250624568901895562406295189058250624568901"
    assert tensor_planes([tensor]).tobytes().hex() == row + row + "003e" + "00c0"


@pytest.mark.parametrize("seed", range(3))
def test_planes_of_a_tensor_are_those_of_its_blocks(seed: int) -> None:
    tensor = ternary(7, 256, seed)
    np.testing.assert_array_equal(tensor_planes([tensor]), blocks_to_planes(blocks_of(tensor)))


def test_fused_matrices_are_concatenated_before_they_are_laid_out() -> None:
    q, k, v = ternary(8, 256, 1), ternary(4, 256, 2), ternary(4, 256, 3)
    fused = tensor_planes([q, k, v])
    np.testing.assert_array_equal(fused, blocks_to_planes(np.concatenate([blocks_of(t) for t in (q, k, v)])))
    assert not np.array_equal(fused, np.concatenate([tensor_planes([t]) for t in (q, k, v)]))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (ternary(2, 128), "different row lengths"),
        (TernaryTensor(np.zeros((2, 256), np.uint8), np.ones((2, 4), np.float16)), "groups of 64"),
        (TernaryTensor(np.zeros((2, 256), np.uint8), np.ones((2, 2), np.float32)), "float32 scales"),
        (TernaryTensor(np.zeros((2, 256), np.uint8), np.ones((2, 2), np.float16), 3, "r"), "rotations"),
    ],
)
def test_what_the_layout_cannot_hold_is_refused(other: TernaryTensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tensor_planes([ternary(2, 256), other])


WEIGHTS: dict[str, QuantizedTensor] = {
    "l.q.weight": ternary(8, 256, 1),
    "l.k.weight": ternary(4, 256, 2),
    "l.down.weight": ternary(6, 384, 3, levels=3),
    "experts": TernaryTensor(ternary(6, 128, 4).codes, ternary(6, 128, 4).scales, 4, None, (2, 3, 128)),
    "norm.weight": DenseTensor(np.arange(256).astype(ml_dtypes.bfloat16)),
}
ENTRIES = [
    PlanesEntry("l.qk", (PlanesPart("l.q.weight", (8, 256)), PlanesPart("l.k.weight", (4, 256))), 4),
    PlanesEntry("l.down.weight", (PlanesPart("l.down.weight", (6, 384)),), 3),
    PlanesEntry("experts", (PlanesPart("experts", (2, 3, 128)),), 4),
]
DENSE = {"norm.weight": (np.dtype(ml_dtypes.bfloat16), (256,))}


def test_file_and_manifest(tmp_path: Path) -> None:
    path = tmp_path / "planes.safetensors"
    manifest = json.loads(
        write_planes(path, PlanesLayout(tuple(ENTRIES), DENSE), WEIGHTS.__getitem__).read_text()
    )
    assert (manifest["layout"], manifest["version"], manifest["file"]) == ("planes-v1", 1, path.name)
    described = manifest["tensors"]["l.qk"]
    assert (described["N"], described["K"], described["group"]) == (12, 256, 128)
    assert (described["codes_offset"], described["scales_offset"]) == (0, 12 * 256 // 4)
    with PlanesFile.open(path) as file:
        assert file.names() == [*WEIGHTS]
        assert described["sha256"] == hashlib.sha256(file.raw("l.qk").tobytes()).hexdigest()
        for name, expected in WEIGHTS.items():
            found = file.load(name)
            assert (found.layout, found.shape) == (expected.layout, expected.shape)
            np.testing.assert_array_equal(found.dequantize(), expected.dequantize())
            part = file.load(name, slice(1, 3))
            np.testing.assert_array_equal(part.dequantize(), expected.dequantize(slice(1, 3)))
        with pytest.raises(FormatError, match="whole or invalid"):
            file.raw("l.qk", slice(0, 4))


@pytest.mark.parametrize("named", ["", "planes.safetensors"])
def test_a_planes_folder_is_a_model(tmp_path: Path, named: str) -> None:
    write_planes(tmp_path / "planes.safetensors", PlanesLayout(tuple(ENTRIES), DENSE), WEIGHTS.__getitem__)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer.json").write_text("{}")
    with open_source(tmp_path / named) as source:
        assert (source.kind, source.config, source.path) == (
            "planes",
            {"model_type": "llama"},
            tmp_path / named,
        )
        assert source.names() == [*WEIGHTS]
        for name, expected in WEIGHTS.items():
            assert (source.shape(name), source.layout(name)) == (expected.shape, expected.layout)
            dtype = expected.values.dtype if isinstance(expected, DenseTensor) else np.float32
            assert source.dtype(name) == dtype
            np.testing.assert_array_equal(source.load(name).dequantize(), expected.dequantize())
            source.release(name)
        assert source.tokenizer_file() == tmp_path / "tokenizer.json"
        assert [p.name for p in source.side_files()] == ["config.json", "tokenizer.json"]
        with pytest.raises(FormatError, match="no tensor named"):
            source.shape("nothing")
    (tmp_path / "planes.json").write_text('{"file": "../x.safetensors"}')
    with pytest.raises(CheckpointError, match=r"file is '../x.safetensors'"):
        open_source(tmp_path)


def test_the_reference_reader_reads_the_file(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    write_planes(tmp_path / "p.safetensors", PlanesLayout(tuple(ENTRIES)), WEIGHTS.__getitem__)
    with safetensors.safe_open(tmp_path / "p.safetensors", "np") as file:
        assert file.metadata()["layout"] == "planes-v1"
        found = file.get_tensor("l.down.weight")
    assert (found.dtype, found.shape) == (np.uint8, (6, 3 * 34))
    down = WEIGHTS["l.down.weight"]
    assert isinstance(down, TernaryTensor)
    np.testing.assert_array_equal(planes_to_blocks(found), blocks_of(down))


def test_the_writer_names_what_does_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "p.safetensors"
    narrow = PlanesEntry("n", (PlanesPart("n", (4, 192)),))
    with pytest.raises(FormatError, match="'n' has rows of 192 weights; planes-v1 needs a multiple of 128"):
        write_planes(path, PlanesLayout((narrow,)), WEIGHTS.__getitem__)
    entry = PlanesEntry("n", (PlanesPart("n", (4, 128)),))
    codebook = CodebookTensor(np.zeros((4, 128), np.uint8), np.zeros((4, 16), np.float16))
    for tensor, message in [(codebook, "'n' is codebook"), (ternary(5, 128), "has shape")]:
        with pytest.raises(FormatError, match=message):
            write_planes(path, PlanesLayout((entry,)), {"n": tensor}.__getitem__)
    assert list(tmp_path.iterdir()) == []


def damaged(change: dict[str, Any], **head: str) -> tuple[list[Entry], dict[str, str]]:
    item = {**ENTRIES[1].describe(), **change}
    metadata = {"layout": "planes-v1", "version": "1", "planes": json.dumps({"l.down.weight": item}), **head}
    return [Entry("l.down.weight", np.dtype(np.uint8), (6, 102))], metadata


@pytest.mark.parametrize(
    ("change", "head", "message"),
    [
        ({}, {"layout": "planes-v2"}, "layout 'planes-v2'"),
        ({}, {"version": "3"}, "version '3'"),
        ({}, {"version": "2"}, "key tiles is not valid JSON"),
        ({}, {"planes": "{"}, "not valid JSON"),
        ({}, {"planes": "[]"}, "not a table"),
        ({"N": 7}, {}, "contradicts itself"),
        ({"group": 64}, {}, "contradicts itself"),
        ({"scales_offset": 0}, {}, "contradicts itself"),
        ({"levels": "x"}, {}, "incompletely"),
        ({"parts": []}, {}, "incompletely"),
        ({"parts": [{"name": "a", "shape": [6, 384, "x"]}]}, {}, "incompletely"),
        ({"parts": [{"name": "a", "shape": [5, 384]}], "N": 5, "scales_offset": 480}, {}, "is described"),
    ],
)
def test_damaged_descriptions_are_refused(
    tmp_path: Path, change: dict[str, Any], head: dict[str, str], message: str
) -> None:
    entries, metadata = damaged(change, **head)
    with SafetensorsWriter(tmp_path / "p.safetensors", entries, metadata) as writer:
        writer.write("l.down.weight", np.zeros((6, 102), np.uint8))
    with pytest.raises(FormatError, match=message) as caught:
        PlanesFile.open(tmp_path / "p.safetensors")
    assert "p.safetensors" in caught.value.message
