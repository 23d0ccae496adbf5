"""Tiles of codebook and additive matrices: the formulas of docs/formats/planes.md in loops, files, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from trapetum.errors import FormatError
from trapetum.formats.planes import PlanesFile, PlanesLayout, PlanesPart, TilesEntry, write_planes
from trapetum.formats.safetensors_writer import Entry, SafetensorsWriter
from trapetum.formats.tiles import AdditiveTiles, Codebook4Tiles, Codebook8Tiles, Tiles, tiles_for
from trapetum.tensors import AdditiveTensor, CodebookTensor, DenseTensor, QuantizedTensor


def codebook(rows: int, count: int, size: int, seed: int = 0) -> CodebookTensor:
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, size, (rows, count), dtype=np.uint8)
    return CodebookTensor(codes, rng.standard_normal((rows, size)).astype(np.float16))


def additive(rows: int, count: int, books: int, seed: int = 0) -> AdditiveTensor:
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, (books, count // 8, rows), dtype=np.uint8)
    vectors = rng.standard_normal((books, 256, 8)).astype(np.float16)
    return AdditiveTensor(codes, vectors, rng.standard_normal(rows).astype(np.float16))


def up(count: int, of: int) -> int:
    return (count + of - 1) // of


@pytest.mark.parametrize(("rows", "count", "size"), [(1, 1, 2), (64, 16, 16), (70, 37, 5), (130, 50, 16)])
def test_four_bits(rows: int, count: int, size: int) -> None:
    tensor = codebook(rows, count, size)
    form = Codebook4Tiles.of([tensor])
    data = form.pack([tensor])
    end = 512 * up(rows, 64) * up(count, 16)
    assert (form.tables_offset, data.size) == (end, end + 2048 * up(rows, 64)) == (end, form.nbytes)
    halves = data[end:].view("<f2")
    for r in range(rows):
        for k in range(count):
            at = 512 * (r // 64 * up(count, 16) + k // 16) + 16 * (r % 32) + 4 * (k % 16 // 4)
            byte = int(data[at + 2 * (r // 32 % 2) + k // 2 % 2])
            assert (byte >> 4 if k % 2 else byte & 15) == tensor.codes[r, k]
        assert halves[16 * r : 16 * r + size].tolist() == tensor.codebook[r].tolist()
        assert not halves[16 * r + size : 16 * r + 16].any()
    assert not halves[16 * rows :].any()


@pytest.mark.parametrize(("rows", "count", "size"), [(1, 1, 17), (128, 8, 256), (150, 21, 200)])
def test_eight_bits(rows: int, count: int, size: int) -> None:
    tensor = codebook(rows, count, size)
    form = Codebook8Tiles.of([tensor])
    data = form.pack([tensor])
    end = 1024 * up(rows, 128) * up(count, 8)
    assert (form.tables_offset, data.size) == (end, end + 65536 * up(rows, 128)) == (end, form.nbytes)
    halves = data[end:].view("<f2")
    for r in range(rows):
        for k in range(count):
            at = 1024 * (r // 128 * up(count, 8) + k // 8) + 512 * (r // 64 % 2) + 16 * (r % 32)
            assert data[at + 8 * (k // 4 % 2) + 4 * (r // 32 % 2) + k % 4] == tensor.codes[r, k]
        column = 32768 * (r // 128) + 64 * (r // 64 % 2) + 2 * (r % 32) + r // 32 % 2
        assert halves[column::128][:size].tolist() == tensor.codebook[r].tolist()


@pytest.mark.parametrize("books", [1, 2, 3, 4])
@pytest.mark.parametrize(("rows", "count"), [(1, 8), (16, 256), (35, 328)])
def test_additive(rows: int, count: int, books: int) -> None:
    tensor = additive(rows, count, books)
    form = AdditiveTiles.of([tensor])
    data = form.pack([tensor])
    loads = 3 if books == 3 else 1
    groups = 8 * loads // books
    across = up(count, 32 * groups)
    end = 512 * loads * up(rows, 16) * across
    assert (
        (form.tables_offset, data.size) == (end, end + 4096 * books + 32 * up(rows, 16)) == (end, form.nbytes)
    )
    for r in range(rows):
        for g in range(count // 8):
            for m in range(books):
                j = books * (2 * (g // 4 % groups) + r // 8 % 2) + m
                at = 512 * (loads * (r // 16 * across + g // (4 * groups)) + j // 16)
                assert data[at + 16 * (4 * (r % 8) + g % 4) + j % 16] == tensor.codes[m, g, r]
    vectors = data[end : end + 4096 * books].view("<f2").reshape(books, 256, 8)
    np.testing.assert_array_equal(vectors, tensor.codebooks)
    np.testing.assert_array_equal(data[end + 4096 * books :].view("<f2")[:rows], tensor.scales)


def test_golden_bytes() -> None:
    """One row: codes 0..15 pair by pair, low nibble first, each four inputs to a word of the first lane."""
    tensor = CodebookTensor(np.arange(16, dtype=np.uint8)[None], np.arange(16).astype(np.float16)[None])
    data = Codebook4Tiles.of([tensor]).pack([tensor])
    assert data[:16].tobytes().hex() == "10320000" + "54760000" + "98ba0000" + "dcfe0000"
    assert data[512:516].tobytes().hex() == "0000003c"


@pytest.mark.parametrize(
    "tensor",
    [codebook(70, 37, 5), codebook(150, 21, 200), *(additive(35, 328, m) for m in (1, 2, 3, 4))],
    ids=lambda t: f"{t.layout} {t.shape}",
)
def test_unpack(tensor: QuantizedTensor) -> None:
    made = tiles_for(tensor)
    assert made is not None
    form = made.of([tensor])
    data = form.pack([tensor])
    found = form.unpack(data)
    for name, array in tensor.to_arrays().items():
        np.testing.assert_array_equal(found.to_arrays()[name], array)
    some = form.unpack(data, slice(3, 20))
    np.testing.assert_array_equal(some.dequantize(), tensor.dequantize(slice(3, 20)))


def test_rows_of_several_matrices_are_joined_first() -> None:
    parts = [codebook(10, 37, 5, 1), codebook(70, 37, 16, 2)]
    form = Codebook4Tiles.of(parts)
    data = form.pack(parts)
    assert (form.rows, form.entries) == (80, 16)
    np.testing.assert_array_equal(form.unpack(data, slice(0, 10)).dequantize(), parts[0].dequantize())
    np.testing.assert_array_equal(form.unpack(data, slice(10, 80)).dequantize(), parts[1].dequantize())


def test_what_no_tile_holds() -> None:
    wide = codebook(4, 8, 16)
    assert tiles_for(CodebookTensor(wide.codes, wide.codebook.astype(np.float32))) is None
    assert tiles_for(additive(4, 8, 5)) is None
    assert tiles_for(DenseTensor(np.zeros((2, 2), np.float32))) is None
    with pytest.raises(ValueError, match="code 9 has no entry"):
        Codebook4Tiles(4, 8, 5).unpack(
            Codebook4Tiles.of([wide]).pack([CodebookTensor(wide.codes * 0 + 9, wide.codebook)])
        )


def entry(name: str, tensors: list[QuantizedTensor]) -> TilesEntry:
    made = tiles_for(tensors[0])
    assert made is not None
    parts = tuple(PlanesPart(f"{name}.{i}", t.shape) for i, t in enumerate(tensors))
    return TilesEntry(name, parts, made.of(tensors))


def test_file(tmp_path: Path) -> None:
    tensors = {
        "a": [codebook(10, 37, 5, 1), codebook(70, 37, 16, 2)],
        "b": [codebook(9, 8, 200)],
        "c": [additive(20, 64, 2)],
    }
    entries = tuple(entry(name, list(of)) for name, of in tensors.items())
    by_name = {f"{name}.{i}": t for name, of in tensors.items() for i, t in enumerate(of)}
    norm = DenseTensor(np.arange(4, dtype=np.float32))
    layout = PlanesLayout(entries, {"norm": (np.dtype(np.float32), (4,))})
    manifest = write_planes(tmp_path / "p.safetensors", layout, lambda n: by_name.get(n, norm))
    assert (tmp_path / "p.safetensors").stat().st_size == layout.size
    assert json.loads(manifest.read_text())["version"] == 2
    with PlanesFile.open(tmp_path / "p.safetensors") as file:
        assert file.names() == [*by_name, "norm"]
        for name, tensor in by_name.items():
            np.testing.assert_array_equal(file.load(name).dequantize(), tensor.dequantize())
            np.testing.assert_array_equal(
                file.load(name, slice(2, 7)).dequantize(), tensor.dequantize(slice(2, 7))
            )
        with pytest.raises(FormatError, match="whole or invalid"):
            file.raw("a", slice(0, 1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layout": "codebook5-v1"}, "incompletely"),
        ({"entries": 17}, "contradicts itself"),
        ({"N": 11}, "contradicts itself"),
        ({"tables_offset": 0}, "contradicts itself"),
        ({"parts": [{"name": "a.0", "shape": [10, 38]}]}, "contradicts itself"),
        ({"layout": "codebook8-v1", "tables_offset": 1024 * 5}, "is described"),
    ],
)
def test_damaged_descriptions_are_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    tensor = codebook(10, 37, 5)
    made = entry("a", [tensor])
    layout = PlanesLayout((made,))
    head = {**layout.metadata, "tiles": json.dumps({"a": {**made.describe(), **change}})}
    with SafetensorsWriter(tmp_path / "p.safetensors", layout.stored, head) as writer:
        writer.write("a", made.pack([tensor]))
    with pytest.raises(FormatError, match=message) as caught:
        PlanesFile.open(tmp_path / "p.safetensors")
    assert "p.safetensors" in caught.value.message


def test_a_code_without_an_entry_is_a_damaged_file(tmp_path: Path) -> None:
    made = entry("a", [codebook(10, 37, 5)])
    layout = PlanesLayout((made,))
    with SafetensorsWriter(
        tmp_path / "p.safetensors", [Entry("a", np.dtype(np.uint8), made.stored_shape)], layout.metadata
    ) as writer:
        writer.write("a", np.full(made.stored_shape, 0xFF, np.uint8))
    with (
        PlanesFile.open(tmp_path / "p.safetensors") as file,
        pytest.raises(FormatError, match="code 15 has no entry"),
    ):
        file.load("a.0")


def test_sizes_are_those_of_packing() -> None:
    for form in (Codebook4Tiles(65, 17, 16), Codebook8Tiles(129, 9, 256), AdditiveTiles(17, 264, 3)):
        assert isinstance(form, Tiles)
        assert form.tables_offset % 512 == 0
