"""GGUF: golden bytes, PyPI ``gguf`` in both directions, hostile files, splits, laziness."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trapetum.blocktypes import BLOCK_TYPES
from trapetum.errors import FormatError, TrapetumError, UnsupportedModelError
from trapetum.formats.gguf import GgufFile
from trapetum.formats.gguf_values import KeyValue, StringArray, ValueType
from trapetum.formats.gguf_writer import GgufWriter, split_names

T = ValueType


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def pair(key: str, kind: int, raw: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + raw


ARCH = pair("general.architecture", 8, text("llama"))
TWO = [("a.weight", [256], 0, 0), ("b.weight", [256], 0, 1024)]
DATA = np.arange(512, dtype="<f4").tobytes()


def header(
    infos: list[tuple[str, list[int], int, int]] = TWO,
    pairs: tuple[bytes, ...] = (),
    *,
    align: int = 32,
    version: int = 3,
    count: int | None = None,
    pair_count: int | None = None,
) -> bytes:
    """A file built from nothing but ``struct``."""
    out = b"GGUF" + struct.pack(
        "<IQQ", version, len(infos) if count is None else count, pair_count or 1 + len(pairs)
    )
    out += ARCH + b"".join(pairs)
    for name, dims, kind, offset in infos:
        out += (
            text(name) + struct.pack(f"<I{len(dims)}Q", len(dims), *dims) + struct.pack("<IQ", kind, offset)
        )
    return out + bytes(-len(out) % align)


def u32(key: str, value: int) -> bytes:
    return pair(key, 4, struct.pack("<I", value))


def nested(depth: int) -> bytes:
    raw = struct.pack("<IQ", 4, 0)
    for _ in range(depth):
        raw = struct.pack("<IQ", 9, 1) + raw
    return pair("deep", 9, raw)


LEGACY = (np.float16(0.5).tobytes() + b"\x24" * 32) * 128

HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "fixed part of the header"),
    "magic": (b"GGML" + header()[4:] + DATA, "begins with"),
    "version 1": (header(version=1) + DATA, "version 1"),
    "big-endian": (b"GGUF" + struct.pack(">I", 3) + header()[8:] + DATA, "big-endian"),
    "alignment 0": (header(pairs=(u32("general.alignment", 0),)) + DATA, "general.alignment is 0"),
    "alignment 3": (header(pairs=(u32("general.alignment", 3),)) + DATA, "general.alignment is 3"),
    "alignment i32": (header(pairs=(pair("general.alignment", 5, struct.pack("<i", 32)),)) + DATA, "INT32"),
    "dimensions": (header([("a", [1] * 5, 0, 0)]) + DATA, "5 dimensions"),
    "overflow": (header([("a", [1 << 62, 8], 0, 0)]) + DATA, "no file holds"),
    "wrap to zero": (header([("a", [1 << 32, 1 << 32], 0, 0)]) + DATA, "no file holds"),
    "same name": (header([("a", [256], 0, 0), ("a", [256], 0, 1024)]) + DATA, "'a' occurs twice"),
    "same key": (header(pairs=(u32("k", 1), u32("k", 1))) + DATA, "'k' occurs twice"),
    "long name": (header([("n" * 64, [256], 0, 0)]) + DATA, "64 bytes; 63 are allowed"),
    "empty name": (header([("", [256], 0, 0)]) + DATA, "empty"),
    "unknown type": (header([("a", [256], 250, 0), ("b", [256], 0, 1024)]) + DATA, "unknown type 250"),
    "legacy Q2_0": (header([("a", [256, 64], 42, 0), ("b", [256], 0, 4352)]) + LEGACY + DATA[:1024], "group 128"),
    "count": (header(TWO[:1], count=2) + DATA, "tensor 1 is empty"),
    "count 2**60": (header(count=1 << 60) + DATA, "tensors; at most"),
    "pairs 2**60": (header(pair_count=1 << 60) + DATA, "pairs; at most"),
    "cut": (header() + DATA[:2000], "'b.weight' .* the file has"),
    "cut header": (header()[:100], "bytes"),
    "overlap": (header([("a", [256], 0, 0), ("b", [256], 0, 992)]) + DATA, "'b' overlaps"),
    "same place": (header([("a", [256], 0, 0), ("b", [256], 0, 0)]) + DATA, "overlaps"),
    "offset": (header([("a", [256], 0, 4)]) + DATA, "offset 4; a multiple of the alignment 32"),
    "offset 2**63": (header([("a", [256], 0, 1 << 63)]) + DATA, "reaches to byte"),
    "row": (header([("a", [320], 35, 0)]) + DATA, "320 weights is not a multiple of TQ2_0's block of 256"),
    "string": (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 40) + b"x" * 64, "1099511627776 bytes"),
    "array": (header(pairs=(pair("k", 9, struct.pack("<IQ", 4, 1 << 61)),)) + DATA, "'k'"),
    "strings": (header(pairs=(pair("k", 9, struct.pack("<IQ", 8, 1 << 61)),)) + DATA, "'k'"),
    "string in array": (header(pairs=(pair("k", 9, struct.pack("<IQQ", 8, 1, (1 << 64) - 1)),)) + DATA, "'k'"),
    "nested": (header(pairs=(nested(40),)) + DATA, "'deep' nests"),
    "value type": (header(pairs=(pair("k", 13, b"1234"),)) + DATA, "value type 13"),
    "bool": (header(pairs=(pair("k", 7, b"\x02"),)) + DATA, "bool with the byte 2"),
    "bools": (header(pairs=(pair("k", 9, struct.pack("<IQ", 7, 2) + b"\x01\x02"),)) + DATA, "neither 0 nor 1"),
    "key": (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2) + b"\xff\xfe" + b"\0" * 64, "not UTF-8"),
}  # fmt: skip


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_are_refused_by_name(tmp_path: Path, case: str, mmap: bool) -> None:
    raw, message = HOSTILE[case]
    (tmp_path / "bad.gguf").write_bytes(raw)
    with pytest.raises(FormatError, match=message) as caught:
        GgufFile.open(tmp_path / "bad.gguf", mmap=mmap)
    assert "bad.gguf" in caught.value.message


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("align", [32, 64, 4096])
def test_good_files(tmp_path: Path, align: int, mmap: bool) -> None:
    pairs = () if align == 32 else (u32("general.alignment", align),)
    second = max(1024, align)
    raw = header([TWO[0], ("b.weight", [4, 64], 0, second)], pairs, align=align)
    (tmp_path / "good.gguf").write_bytes(raw + DATA[:1024] + bytes(second - 1024) + DATA[1024:])
    with GgufFile.open(tmp_path / "good.gguf", mmap=mmap) as file:
        assert list(file.tensors) == ["a.weight", "b.weight"]
        np.testing.assert_array_equal(file.load("a.weight").dequantize(), np.arange(256))
        b = file.load("b.weight")
        assert b.shape == (64, 4)
        np.testing.assert_array_equal(b.dequantize(), np.arange(256, 512).reshape(64, 4))
        np.testing.assert_array_equal(file.load("b.weight", slice(3, 5)).dequantize(), b.dequantize()[3:5])
        assert file.notes == []
        with pytest.raises(FormatError, match="no tensor named 'c'"):
            file.load("c")


def test_sparse_file_of_zeros_is_refused_at_once(tmp_path: Path, cpu_limit: Any) -> None:
    path = tmp_path / "sparse.gguf"
    endless = pair("k", 9, struct.pack("<IQ", 8, 1 << 30))
    for raw in (header(pairs=(endless,)), header(pairs=(pair("k", 9, struct.pack("<IQ", 7, 1 << 35)),))):
        with open(path, "wb") as file:
            file.write(raw)
            file.truncate(1 << 40)
        for mmap in (True, False):
            with cpu_limit(1), pytest.raises(FormatError, match="'k'"):
                GgufFile.open(path, mmap=mmap)


def test_the_largest_headers_stay_cheap(tmp_path: Path, cpu_limit: Any) -> None:
    path = tmp_path / "m.gguf"
    count = 1 << 16
    names = b"".join(text(f"t{i}") + struct.pack("<IQIQ", 1, 8, 0, 32 * i) for i in range(count))
    arrays = pair("k", 9, struct.pack("<IQ", 9, 1_000_000)) + struct.pack("<IQ", 0, 0) * 1_000_000
    strings = pair("k", 9, struct.pack("<IQ", 8, 2_999_999))
    for raw, refused in [
        (b"GGUF" + struct.pack("<IQQ", 3, count, 0) + names, None),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + arrays, "brings"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + strings, None),
    ]:
        with open(path, "wb") as file:
            file.write(raw)
            file.truncate(1 << 28)
        with cpu_limit(3):  # 0.4 to 0.7 s
            try:
                GgufFile.open(path).close()
                assert refused is None
            except FormatError as error:
                assert refused is not None and "'k' brings" in error.message  # noqa: PT017, PT018


def test_lenient_reading_of_unknown_types_and_legacy_q2(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(HOSTILE["unknown type"][0])
    with GgufFile.open(path, strict=False) as file:
        info = file.tensors["a"]
        assert (info.type_id, info.type_name, info.end - info.start) == (250, "type 250", 1024)
        assert file.raw("a").tobytes() == DATA[:1024]
        assert "unknown type 250" in file.notes[0]
        with pytest.raises(UnsupportedModelError, match="type 250"):
            file.load("a")
    path.write_bytes(HOSTILE["legacy Q2_0"][0])
    with GgufFile.open(path, strict=False) as file:
        assert (file.tensors["a"].type_id, file.tensors["a"].type_name) == (42, "PQ2_0")
        # 0x24 is the codes 0, 1, 2, 0
        np.testing.assert_array_equal(file.load("a").dequantize()[5, :4], [-0.5, 0, 0.5, -0.5])
        assert "read as PQ2_0" in file.notes[0]


def test_upstream_q2_is_not_taken_for_legacy(tmp_path: Path) -> None:
    block = np.float16(0.5).tobytes() + b"\x24" * 16
    raw = header([("a", [256, 64], 42, 0), ("b", [256], 0, 4608)]) + block * 256 + DATA[:1024]
    (tmp_path / "m.gguf").write_bytes(raw)
    with GgufFile.open(tmp_path / "m.gguf") as file:
        assert file.tensors["a"].type_name == "Q2_0"
        assert file.notes == []


def test_gaps_and_trailing_bytes_are_noted(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(header([TWO[0], ("b", [64], 0, 1024 + 64)]) + DATA)
    with GgufFile.open(tmp_path / "m.gguf") as file:
        assert any("1 gaps" in note for note in file.notes)
        assert any("belong to none" in note for note in file.notes)


VALUES: dict[str, KeyValue] = {
    "u8": KeyValue(255, T.UINT8), "i8": KeyValue(-128, T.INT8), "u16": KeyValue(65535, T.UINT16),
    "i16": KeyValue(-5, T.INT16), "u32": KeyValue(2**32 - 1, T.UINT32), "i32": KeyValue(-(2**31), T.INT32),
    "f32": KeyValue(0.5, T.FLOAT32), "yes": KeyValue(True, T.BOOL), "text": KeyValue("a b\u2581\n", T.STRING),
    "u64": KeyValue(2**64 - 1, T.UINT64), "i64": KeyValue(-(2**63), T.INT64), "f64": KeyValue(1e300, T.FLOAT64),
    "texts": KeyValue(["", "a", "\u2581b"], T.ARRAY, T.STRING), "none": KeyValue([], T.ARRAY, T.STRING),
    "floats": KeyValue([0.5, -1.0], T.ARRAY, T.FLOAT32), "flags": KeyValue([True, False], T.ARRAY, T.BOOL),
    "ints": KeyValue([1, -1], T.ARRAY, T.INT32), "bytes": KeyValue("\udcff", T.STRING),
    "table": KeyValue([KeyValue([1, 2], T.ARRAY, T.INT32), KeyValue([], T.ARRAY, T.INT32)], T.ARRAY, T.ARRAY),
}  # fmt: skip


def plain(value: Any) -> Any:
    if isinstance(value, KeyValue):
        return plain(value.value)
    return [plain(v) for v in value] if isinstance(value, list | np.ndarray | StringArray) else value


@pytest.mark.parametrize("mmap", [True, False])
def test_every_value_type_survives(tmp_path: Path, mmap: bool) -> None:
    with GgufWriter(tmp_path / "m.gguf") as writer:
        for key, entry in VALUES.items():
            writer.add(key, entry.value, entry.type, entry.item_type)
        writer.begin()
    with GgufFile.open(tmp_path / "m.gguf", mmap=mmap) as file:
        assert list(file.kv) == list(VALUES)
        for key, entry in VALUES.items():
            found = file.kv[key]
            assert (found.type, found.item_type) == (entry.type, entry.item_type)
            assert plain(found.value) == plain(entry.value), key
        words = file.metadata["texts"]
        assert (words[-1], words[0:2], len(words)) == ("\u2581b", ["", "a"], 3)
        with pytest.raises(IndexError):
            words[3]


def test_golden_file(tmp_path: Path) -> None:
    with GgufWriter(tmp_path / "m.gguf") as writer:
        writer.add("general.architecture", "llama")
        for name, dims, _, _ in TWO:
            writer.add_tensor(name, "F32", tuple(dims[::-1]))
        writer.begin()
        writer.write("a.weight", np.arange(100, dtype=np.float32))  # in pieces
        writer.write("a.weight", np.arange(100, 256, dtype=np.float32))
        writer.write("b.weight", DATA[1024:])
    assert (tmp_path / "m.gguf").read_bytes() == header() + DATA
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]


def write_model(path: Path, seed: int = 0, **options: Any) -> dict[str, np.ndarray]:
    """Tensors of many types, one empty, one bfloat16; returns their bytes."""
    rng = np.random.default_rng(seed)
    stored = {}
    with GgufWriter(path, **options) as writer:
        writer.add("general.architecture", "llama")
        writer.add("x.list", ["a", "b"], item_type=T.STRING)
        for name in ("F32", "F16", "BF16", "I32", "Q4_0", "Q8_0", "Q4_K", "Q6_K", "Q2_0", "PTQ1_0", "IQ3_S"):
            size = 3 * BLOCK_TYPES[name].row_bytes(512)
            stored[name.lower()] = rng.integers(0, 60, size, dtype=np.uint8)  # no NaN in floats
            writer.add_tensor(name.lower(), name, (3, 512))
        writer.add_tensor("empty", "F32", (0, 4))
        writer.add_tensor("strange", 250, (7,), 33)
        stored["strange"] = rng.integers(0, 256, 33, dtype=np.uint8)
        writer.begin()
        for name, data in stored.items():
            writer.write(name, data)
    return stored


@pytest.mark.parametrize("alignment", [32, 64])
def test_pypi_gguf_reads_what_we_write(tmp_path: Path, alignment: int) -> None:
    gguf = pytest.importorskip("gguf")
    with GgufWriter(tmp_path / "m.gguf", alignment=alignment) as writer:
        writer.add("general.architecture", "llama")
        for key, entry in VALUES.items():
            if key not in ("table", "none", "bytes"):
                writer.add(key, entry.value, entry.type, entry.item_type)
        blocks = np.random.default_rng(0).integers(0, 256, (4, 144), dtype=np.uint8)
        writer.add_tensor("n", "F32", (5,))
        writer.add_tensor("w", "Q4_K", (2, 2, 256))
        writer.begin()
        writer.write("n", np.arange(5, dtype=np.float32))
        writer.write("w", blocks)
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    assert reader.alignment == alignment
    for key, entry in VALUES.items():
        if key not in ("table", "none", "bytes"):
            assert reader.fields[key].contents() == plain(entry.value), key
            assert int(reader.fields[key].types[0]) == entry.type
    n, w = reader.tensors
    np.testing.assert_array_equal(n.data, np.arange(5))
    assert (list(map(int, w.shape)), w.tensor_type.name) == ([256, 2, 2], "Q4_K")
    np.testing.assert_array_equal(w.data.reshape(4, 144), blocks)


def test_we_read_what_pypi_gguf_writes(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_uint32("llama.block_count", 2)
    writer.add_array("tokenizer.ggml.tokens", ["a", "\u2581b", ""])
    writer.add_array("tokenizer.ggml.scores", [0.5, -1.0, 2.0])
    weight = np.random.default_rng(0).standard_normal((4, 256)).astype(np.float32)
    quantized = gguf.quants.quantize(weight, gguf.GGMLQuantizationType.Q8_0)
    half = weight.astype(ml_dtypes.bfloat16)
    writer.add_tensor("w", quantized, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("h", half.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GgufFile.open(tmp_path / "m.gguf") as file:
        assert file.metadata["llama.block_count"] == 2
        assert list(file.metadata["tokenizer.ggml.tokens"]) == ["a", "\u2581b", ""]
        assert file.metadata["tokenizer.ggml.scores"].tolist() == [0.5, -1.0, 2.0]
        expected = gguf.quants.dequantize(quantized, gguf.GGMLQuantizationType.Q8_0)
        np.testing.assert_array_equal(file.load("w").dequantize(), expected)
        assert file.load("h").dequantize().tolist() == half.astype(np.float32).tolist()


def test_splits(tmp_path: Path) -> None:
    whole = write_model(tmp_path / "one.gguf")
    parts = write_model(tmp_path / "m.gguf", max_shard_bytes=3000)
    with GgufFile.open(tmp_path / "one.gguf", strict=False) as one:
        names = list(one.tensors)
        assert "split.no" not in one.kv
    paths = sorted(tmp_path.glob("m-*.gguf"))
    assert paths == split_names(tmp_path / "m.gguf", len(paths))
    assert len(paths) > 2
    assert not (tmp_path / "m.gguf").exists()
    found = []
    for number, path in enumerate(paths):
        with GgufFile.open(path, strict=False) as file:
            assert file.kv["split.no"] == KeyValue(number, T.UINT16)
            assert file.kv["split.count"] == KeyValue(len(paths), T.UINT16)
            assert file.kv["split.tensors.count"] == KeyValue(len(names), T.INT32)
            assert ("general.architecture" in file.kv) == (number == 0)
            for name, info in file.tensors.items():
                found.append(name)
                size = info.end - info.start
                data = parts.get(name, np.empty(0, np.uint8))
                assert (
                    file.raw(name).tobytes()[: data.size] == data.tobytes() == whole.get(name, data).tobytes()
                )
                assert size - data.size < 32
    assert found == names


def test_the_writer_refuses_what_no_file_may_hold(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = GgufWriter(path)
    writer.add_tensor("n" * 63, "F32", (1,))
    for name, kind, shape, message in [
        ("n" * 64, "F32", (1,), "64 bytes; GGUF allows 63"),
        ("\u2581" * 22, "F32", (1,), "66 bytes"),
        ("a", "F32", (1, 1, 1, 1, 1), "5 dimensions"),
        ("n" * 63, "F32", (1,), "occurs twice"),
        ("a", "TQ2_0", (4, 320), "320 weights is not a multiple of TQ2_0's block of 256"),
    ]:
        with pytest.raises(FormatError, match=message):
            writer.add_tensor(name, kind, shape)
    writer.add("k", 1, T.UINT8)
    for key, value, kind, item, message in [
        ("k", 1, T.UINT8, None, "occurs twice"),
        ("i", 256, T.UINT8, None, "256 does not fit UINT8"),
        ("i", -1, T.UINT64, None, "-1 does not fit UINT64"),
        ("i", 0.5, T.UINT8, None, "'i' must hold UINT8"),
        ("i", 1, T.BOOL, None, "'i' must hold BOOL"),
        ("license", ["apache-2.0", "mit"], T.STRING, None, "'license' must hold strings, not list"),
        ("tags", ["a", 1], T.ARRAY, T.STRING, "'tags' must hold strings, not int, str"),
        ("tags", "abc", T.ARRAY, T.STRING, "'tags' must hold strings"),
        ("tags", ["a"], T.ARRAY, None, "without an item type"),
        ("split.count", 2, T.UINT16, None, "cannot be a GGUF key"),
        ("general.alignment", 64, T.UINT32, None, "aligns to 32"),
    ]:
        with pytest.raises(FormatError, match=message):
            writer.add(key, value, kind, item)
    with pytest.raises(ValueError, match="power of two"):
        GgufWriter(path, alignment=24)


def test_the_writer_is_a_state_machine(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    with pytest.raises(ValueError, match="came where 'a'"), GgufWriter(path) as writer:  # noqa: PT012
        writer.add_tensor("a", "F32", (2,))
        writer.add_tensor("b", "F32", (2,))
        with pytest.raises(ValueError, match="announcing"):
            writer.write("a", b"")
        writer.begin()
        with pytest.raises(ValueError, match="writing data"):
            writer.add("k", "v")
        with pytest.raises(ValueError, match="more than its 8 bytes"):
            writer.write("a", bytes(9))
        writer.write("b", bytes(8))
    with pytest.raises(ValueError, match="data are missing: 'b'"), GgufWriter(path) as writer:  # noqa: PT012
        writer.add_tensor("a", "F32", (2,))
        writer.add_tensor("b", "F32", (2,))
        writer.begin()
        writer.write("a", bytes(8))
    assert list(tmp_path.iterdir()) == []


def test_a_large_vocabulary_opens_fast(tmp_path: Path, cpu_limit: Any) -> None:
    tokens = [f"token{i}" for i in range(128_256)]
    merges = [f"to ken{i}" for i in range(280_147)]
    with GgufWriter(tmp_path / "m.gguf") as writer:
        writer.add("tokenizer.ggml.tokens", tokens, item_type=T.STRING)
        writer.add("tokenizer.ggml.merges", merges, item_type=T.STRING)
        writer.begin()
    with cpu_limit(3 * 0.5):
        for _ in range(3):
            with GgufFile.open(tmp_path / "m.gguf") as file:
                assert file.metadata["tokenizer.ggml.tokens"][-1] == "token128255"
    assert list(file.metadata["tokenizer.ggml.tokens"]) == tokens


BASE = (
    header(pairs=(u32("a.b", 7), pair("list", 9, struct.pack("<IQ", 8, 2) + text("x") + text("yz")))) + DATA
)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damage_gives_our_error_or_a_valid_file(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    raw = bytearray(BASE)
    if data.draw(st.booleans()):
        del raw[data.draw(st.integers(0, len(raw) - 1)) :]
    else:
        for _ in range(data.draw(st.integers(1, 3))):
            raw[data.draw(st.integers(0, len(header()) + 80))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("d") / "m.gguf"
    path.write_bytes(bytes(raw))
    for mmap in (True, False):
        try:
            with GgufFile.open(path, mmap=mmap, strict=False) as file:
                for name, info in file.tensors.items():
                    assert len(file.raw(name).tobytes()) == info.end - info.start
        except TrapetumError as error:
            assert str(path) in error.message  # noqa: PT017
