"""The strict safetensors reader refuses by name and value; whatever the bytes are, nothing but a FormatError comes."""

from __future__ import annotations

import errno
import os
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors_bytes import SAMPLE, entry, opened, pack, refusal

from trapetum.errors import FormatError
from trapetum.formats.safetensors import HEADER_LIMIT, SafetensorsFile

FAULTS: dict[str, tuple[bytes, list[str]]] = {
    "empty file": (b"", ["0 bytes"]),
    "seven bytes": (b"\2\0\0\0\0\0\0", ["7 bytes"]),
    "length past the end": (struct.pack("<Q", 100) + b"{}", ["100 bytes", "10 bytes"]),
    "length 2^63": (struct.pack("<Q", 1 << 63) + b"{}", [str(1 << 63)]),
    "web page": (b"<!DOCTYPE html><html><body>Not found", ["a web page"]),
    "zip": (b"PK\3\4" + bytes(60), ["zip archive"]),
    "lfs": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4976698672\n",
        ["Git LFS pointer", "4976698672 bytes"],
    ),
    "no object": (pack(b"[1, 2]"), ["must begin with"]),
    "zero length": (pack(b""), ["must begin with", "b''"]),
    "cut JSON": (pack(b'{"a":'), ["not valid JSON", "character 5"]),
    "two objects": (pack(b"{}{}"), ["not valid JSON", "character 2"]),
    "not UTF-8": (pack(b'{"\xff":1}'), ["not UTF-8", "0xff", "offset 2"]),
    "NUL padding": (pack(b"{}\0\0\0"), ["3 NUL bytes", "spaces"]),
    "NaN": (pack(b'{"a":NaN}'), ["NaN"]),
    "deep": (pack(b'{"a":' + b"[" * 100_000), ["nested too deeply"]),
    "long number": (pack(b'{"a":' + b"9" * 5000 + b"}"), ["4300 digits"]),
    "control character": (pack(b'{"a\n":1}'), ["not valid JSON"]),
    "surrogate": (pack({"a\ud800": entry()}, b"ab"), ["surrogate"]),
    "metadata list": (pack({"__metadata__": []}), ["__metadata__ is []"]),
    "metadata number": (pack({"__metadata__": {"k": 1}}), ["'k'", "is 1", "string"]),
    "metadata twice": (pack(b'{"__metadata__":{},"__metadata__":{}}'), ["'__metadata__' twice"]),
    "tensor twice": (pack(b'{"a":1,"b":2,"a":1}'), ["'a' twice"]),
    "field twice": (pack(b'{"a":{"dtype":"U8","dtype":"I8"}}'), ["'dtype' twice"]),
    "entry no object": (pack({"a": 5}), ["'a'", "says 5"]),
    "entry null": (pack({"a": None}), ["'a'", "None"]),
    "no dtype": (pack({"a": {"shape": [1], "data_offsets": [0, 1]}}, b"a"), ["'a'", "dtype"]),
    "dtype F4": (pack({"a": entry("F4", [4])}, b"ab"), ["'a'", "'F4'", "known: F64, F32", "BOOL"]),
    "dtype list": (pack({"a": entry([])}, b"ab"), ["'a'", "dtype []"]),
    "shape string": (pack({"a": entry(shape="2")}, b"ab"), ["'a'", "shape '2'"]),
    "shape float": (pack({"a": entry(shape=[2.0])}, b"ab"), ["'a'", "[2.0]"]),
    "shape bool": (pack({"a": entry(shape=[True, 2])}, b"ab"), ["'a'", "[True, 2]"]),
    "shape negative": (pack({"a": entry(shape=[-1, -2])}, b"ab"), ["'a'", "[-1, -2]"]),
    "shape wraps": (pack({"a": entry(shape=[1 << 62, 8], offsets=[0, 0])}), ["'a'", str(1 << 65)]),
    "rank 65": (pack({"a": entry(shape=[1] * 64 + [2])}, b"ab"), ["'a'", "65 dimensions", "64"]),
    "too many bytes": (pack({"a": entry(shape=[3])}, b"ab"), ["'a'", "[3] of U8", "needs 3", "hold 2"]),
    "empty but huge": (pack({"a": entry(shape=[0, 1 << 63], offsets=[0, 0])}), ["'a'", str(1 << 63)]),
    "one offset": (pack({"a": entry(offsets=[0])}, b"ab"), ["'a'", "data_offsets [0]"]),
    "offset bool": (pack({"a": entry(offsets=[False, 2])}, b"ab"), ["'a'", "[False, 2]"]),
    "offset float": (pack({"a": entry(offsets=[0, 2.0])}, b"ab"), ["'a'", "[0, 2.0]"]),
    "offset negative": (pack({"a": entry(offsets=[-2, 0])}, b"ab"), ["'a'", "[-2, 0]"]),
    "offsets backwards": (pack({"a": entry(offsets=[2, 0])}, b"ab"), ["'a'", "[2, 0]", "backwards"]),
    "offset 2^64": (pack({"a": entry(offsets=[1 << 64, (1 << 64) + 2])}, b"ab"), ["'a'", str(1 << 64)]),
    "same range": (pack({"k": entry(), "v": entry()}, b"ab"), ["'k'", "'v'", "overlap"]),
    "half overlap": (
        pack({"k": entry(), "v": entry(offsets=[1, 3])}, b"abc"),
        ["'k'", "'v'", "byte 1,", "at 2;"],
    ),
    "empty inside": (pack({"k": entry(), "e": entry(shape=[0], offsets=[1, 1])}, b"ab"), ["'k'", "'e'"]),
    "hole": (pack({"k": entry(), "v": entry(offsets=[5, 7])}, bytes(7)), ["3 bytes after 'k'", "before 'v'"]),
    "hole at 0": (pack({"v": entry(offsets=[5, 7])}, bytes(7)), ["5 bytes at the beginning", "'v'"]),
    "trailing": (pack({"k": entry()}, b"abc"), ["1 bytes at the end"]),
    "only data": (pack({}, b"abc"), ["3 bytes at the end"]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_refused_and_named(fault: str, tmp_path: Path) -> None:
    content, mentions = FAULTS[fault]
    message = refusal(tmp_path, content)
    assert [m for m in mentions if m not in message] == []
    assert len(message.replace(str(tmp_path), "")) < 600


def test_truncation_names_sizes_and_the_first_tensor_hit(tmp_path: Path) -> None:
    content = pack(
        {name: entry("F32", [4], [16 * i, 16 * i + 16]) for i, name in enumerate("zyx")}, bytes(48)
    )
    message = refusal(tmp_path, content[:-20])
    assert f"{len(content)} bytes expected, {len(content) - 20} found" in message
    assert "first tensor hit is 'y'" in message


def test_a_header_over_the_limit_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with path.open("wb") as out:  # sparse
        out.write(struct.pack("<Q", HEADER_LIMIT + 1) + b"{")
        out.truncate(HEADER_LIMIT + 100)
    tracemalloc.start()
    with pytest.raises(FormatError, match=f"{HEADER_LIMIT + 1} bytes; at most {HEADER_LIMIT}"):
        SafetensorsFile.open(path)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


@pytest.mark.parametrize("name", ["absent.safetensors", "folder", "fifo", "no\0name"])
def test_what_is_no_file_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(FormatError, match=name.split("\0")[0]):
        SafetensorsFile.open(tmp_path / name)


def test_a_file_without_permission_is_not_called_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Any, flags: int) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    (tmp_path / "x.safetensors").write_bytes(pack({}))
    monkeypatch.setattr("trapetum.formats.safetensors.os.open", refuse)  # root may open anything
    with pytest.raises(FormatError, match=r"x\.safetensors: permission denied"):
        SafetensorsFile.open(tmp_path / "x.safetensors")


def test_a_disk_error_is_a_format_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    path = tmp_path / "x.safetensors"
    path.write_bytes(pack({"a": entry()}, b"ab"))
    monkeypatch.setattr("trapetum.formats.safetensors.os.preadv", fail)
    with (
        SafetensorsFile.open(path, mmap=False) as file,
        pytest.raises(FormatError, match=r"'a'.*Input/output"),
    ):
        file.read("a")
    monkeypatch.setattr("trapetum.formats.safetensors_header.os.pread", fail)
    with pytest.raises(FormatError, match="Input/output"):
        SafetensorsFile.open(path)


def test_bool_bytes_are_0_or_1(tmp_path: Path) -> None:
    with opened(tmp_path, pack({"mask": entry("BOOL")}, b"\1\0")) as file:
        assert file.read("mask").tolist() == [True, False]
    with (
        opened(tmp_path, pack({"mask": entry("BOOL")}, b"\1\2")) as file,
        pytest.raises(FormatError, match=r"'mask'.*byte 2"),
    ):
        file.read("mask")


def test_unknown_name(tmp_path: Path) -> None:
    with opened(tmp_path, pack({"a": entry()}, b"ab")) as file:
        for ask in (file.read, file.release):
            with pytest.raises(FormatError, match=r"x\.safetensors.*'b'"):
                ask("b")


def outcome(path: Path) -> dict[str, tuple[tuple[int, ...], bytes]] | None:
    """All values, or None for a FormatError; any other exception is the test's failure."""
    try:
        with SafetensorsFile.open(path) as file:
            return {n: (t.shape, file.read(n).tobytes()) for n, t in file.tensors.items()}
    except FormatError:
        return None


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    for length in range(len(SAMPLE)):
        path.write_bytes(SAMPLE[:length])
        assert outcome(path) is None, length
    path.write_bytes(SAMPLE)
    assert outcome(path) is not None


def test_every_flipped_header_bit_is_refused_or_read_as_the_reference_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    accepted = 0
    for at in range(len(SAMPLE) - 18):
        for bit in range(8):
            broken = bytearray(SAMPLE)
            broken[at] ^= 1 << bit
            path.write_bytes(broken)
            ours = outcome(path)
            if ours is not None:
                theirs = {
                    n: (tuple(t["shape"]), bytes(t["data"]))
                    for n, t in safetensors.deserialize(bytes(broken))
                }
                assert ours == theirs, (at, bit)
                accepted += 1
    assert accepted > 50  # changed names and metadata are valid files


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_random_damage(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    broken = bytearray(SAMPLE)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(broken) - 1))
        telling = st.sampled_from([b"9" * 30, b"-1", b"[", b"{}", b"null", b"1e9", b'"'])
        piece = data.draw(st.binary(max_size=6) | telling)
        broken[at : at + data.draw(st.integers(0, 6))] = piece
    if data.draw(st.booleans()):  # keep the declared length right so that the damage reaches the JSON rules
        broken[:8] = struct.pack("<Q", max(0, len(broken) - 26))
    path = tmp_path_factory.mktemp("a") / "x.safetensors"
    path.write_bytes(broken)
    outcome(path)


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.sampled_from(["U8", "F32", "", "x"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets"]), inner)
    ),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(
    header=st.dictionaries(
        st.sampled_from(["a", "b", "__metadata__"]),
        JSON_VALUES
        | st.fixed_dictionaries(
            {"dtype": JSON_VALUES | st.just("U8"), "shape": JSON_VALUES, "data_offsets": JSON_VALUES}
        ),
    )
)
def test_any_json_header(header: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("a") / "x.safetensors"
    path.write_bytes(pack(header, b"ab"))
    outcome(path)
