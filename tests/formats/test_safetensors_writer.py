"""The streaming safetensors writer: golden bytes, the reference reader, sizes before data, misuse, failures."""

from __future__ import annotations

import itertools
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st

from trapetum.errors import FormatError
from trapetum.formats.dtypes import DTYPES
from trapetum.formats.safetensors import SafetensorsFile
from trapetum.formats.safetensors_writer import (
    Entry,
    SafetensorsWriter,
    aligned_order,
    file_size,
    header_bytes,
    index_bytes,
    plan_shards,
    shard_names,
)

GOLDEN = (
    bytes.fromhex("8800000000000000")
    + b'{"__metadata__":{"k":"\xc3\xa4"},'
    + b'"a":{"dtype":"F16","shape":[2,2],"data_offsets":[0,8]},'
    + b'"b":{"dtype":"U8","shape":[3],"data_offsets":[8,11]}}'
    + b" "
    + bytes.fromhex("003c 0040 00c0 0038 010203")
)


def entries_of(arrays: dict[str, np.ndarray[Any, Any]]) -> list[Entry]:
    return [Entry(n, a.dtype, a.shape) for n, a in arrays.items()]


def write(path: Path, arrays: dict[str, np.ndarray[Any, Any]], **options: Any) -> None:
    with SafetensorsWriter(path, entries_of(arrays), **options) as writer:
        for name, array in arrays.items():
            writer.write(name, array)


def test_golden_bytes(tmp_path: Path) -> None:
    arrays = {"a": np.array([[1, 2], [-2, 0.5]], np.float16), "b": np.array([1, 2, 3], np.uint8)}
    write(tmp_path / "x", arrays, metadata={"k": "ä"})
    assert (tmp_path / "x").read_bytes() == GOLDEN
    assert file_size(entries_of(arrays), {"k": "ä"}) == len(GOLDEN)


@given(
    st.lists(st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 4), max_size=3)), max_size=6),
    st.booleans(),
    st.randoms(use_true_random=False),
)
@settings(max_examples=60, deadline=None)
def test_the_reference_reader_agrees(parts: list[tuple[str, list[int]]], order: bool, random: Any) -> None:
    arrays = {}
    for i, (code, shape) in enumerate(parts):
        raw = bytes(random.randrange(2) for _ in range(int(np.prod(shape)) * DTYPES[code].itemsize))
        arrays[f"t{i}.é"] = np.frombuffer(raw, DTYPES[code]).reshape(shape)
    entries = entries_of(arrays)
    if order:
        entries = aligned_order(entries)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.safetensors"
        with SafetensorsWriter(path, entries, {"format": "pt"}) as writer:
            for name in arrays:
                writer.write(name, arrays[name])
        data = path.read_bytes()
        assert len(data) == file_size(entries, {"format": "pt"}) == writer.size
        assert (8 + int.from_bytes(data[:8], "little")) % 8 == 0
        found = dict(safetensors.deserialize(data))
        assert found.keys() == arrays.keys()
        for name, array in arrays.items():
            assert bytes(found[name]["data"]) == array.tobytes()
            assert tuple(found[name]["shape"]) == array.shape
        with SafetensorsFile.open(path, mmap=False) as file:
            assert file.metadata == {"format": "pt"}
            if order:
                assert all(t.start % t.dtype.itemsize == 0 for t in file.tensors.values())


def test_row_blocks_of_several_arrays_interleave(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 255, (7, 3), np.uint8), rng.normal(size=(7, 2)).astype(ml_dtypes.bfloat16)
    write(tmp_path / "whole", {"a": a, "b": b})
    with SafetensorsWriter(tmp_path / "blocks", entries_of({"a": a, "b": b})) as writer:
        for first, last in ((0, 2), (2, 2), (2, 7)):
            writer.write("b", b[first:last])
            writer.write("a", np.asfortranarray(a)[first:last])
    assert (tmp_path / "blocks").read_bytes() == (tmp_path / "whole").read_bytes()


def test_a_region_of_another_file_is_taken_over(tmp_path: Path) -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    (tmp_path / "raw").write_bytes(b"..." + array.tobytes())
    write(tmp_path / "expected", {"a": array})
    with open(tmp_path / "raw", "rb") as raw:
        with SafetensorsWriter(tmp_path / "x", entries_of({"a": array})) as writer:
            writer.copy("a", raw.fileno(), 3)
        with (
            pytest.raises(FormatError, match="4 bytes early"),
            SafetensorsWriter(tmp_path / "y", entries_of({"a": array})) as writer,
        ):
            writer.copy("a", raw.fileno(), 7)
    assert (tmp_path / "x").read_bytes() == (tmp_path / "expected").read_bytes()
    assert not (tmp_path / "y").exists()


F4 = np.dtype("<f4")


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ([np.zeros((1, 2), np.float64)], "float64"),
        ([np.zeros((1, 2), ">f4")], ">f4"),
        ([np.zeros((1, 3), F4)], "rows of 3"),
        ([np.zeros((1, 2), F4)], "8 of 16 bytes"),
        ([np.zeros((2, 2), F4), np.zeros((1, 2), F4)], "24 bytes for an array of 16"),
        ([], "0 of 16 bytes"),
    ],
)
def test_data_that_do_not_fit_publish_nothing(
    tmp_path: Path, blocks: list[np.ndarray[Any, Any]], message: str
) -> None:
    def attempt() -> None:
        with SafetensorsWriter(tmp_path / "x", [Entry("a", F4, (2, 2))]) as writer:
            for block in blocks:
                writer.write("a", block)

    with pytest.raises(ValueError, match=message):
        attempt()
    assert os.listdir(tmp_path) == []


def test_names_that_cannot_be_stored() -> None:
    one = Entry("a", F4, ())
    for entries, message in (
        ([one, one], "'a' occurs twice"),
        ([Entry("__metadata__", F4, ())], "__metadata__"),
        ([Entry("\ud800", F4, ())], "Unicode"),
    ):
        with pytest.raises(FormatError, match=message):
            header_bytes(entries)
    with pytest.raises(ValueError, match="complex64"):
        header_bytes([Entry("a", np.dtype("c8"), ())])


def test_metadata_may_come_last_where_room_was_kept(tmp_path: Path) -> None:
    def attempt(name: str, late: str) -> None:
        with SafetensorsWriter(tmp_path / name, [Entry("a", F4, ())], reserve=400) as writer:
            writer.write("a", np.float32(7).reshape(()))
            writer.metadata = {"late": late}

    attempt("x", "y" * 300)
    with SafetensorsFile.open(tmp_path / "x") as file:
        assert file.metadata == {"late": "y" * 300}
        assert file.read("a") == 7
    with pytest.raises(ValueError, match="outgrew"):
        attempt("y", "y" * 400)
    assert os.listdir(tmp_path) == ["x"]


@given(st.lists(st.integers(0, 20)), st.integers(1, 30))
def test_shards_hold_all_tensors_in_order(sizes: list[int], limit: int) -> None:
    shards = plan_shards(sizes, limit)
    assert [i for s in shards for i in s] == list(range(len(sizes)))
    for shard in shards:
        assert len(shard) <= 1 or sum(sizes[i] for i in shard) <= limit
    for before, after in itertools.pairwise(shards):  # greedy: the next tensor would not have fitted
        assert sum(sizes[i] for i in before) + sizes[after[0]] > limit


def test_names_and_index() -> None:
    assert shard_names(1) == ["model.safetensors"]
    assert shard_names(1, numbered=True) == ["model-00001-of-00001.safetensors"]
    files = {"f1": [Entry("b", F4, (2,)), Entry("c", F4, ())], "f2": [Entry("a", F4, (3,))]}
    assert json.loads(index_bytes(files)) == {
        "metadata": {"total_size": 24},
        "weight_map": {"a": "f2", "b": "f1", "c": "f1"},
    }
    assert list(json.loads(index_bytes(files))["weight_map"]) == ["a", "b", "c"]
