"""The strict safetensors reader reads right: golden bytes, and the reference package as the oracle."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors_bytes import entry, opened, pack, refusal

from trapetum.formats.dtypes import CODES, DTYPES, dtype_code


@st.composite
def tensor_sets(draw: st.DrawFn) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Names to (code, shape, bytes); all dtypes, ranks 0 to 4, empty tensors too."""
    names = draw(
        st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), unique=True, max_size=5)
    )
    made = {}
    for name in names:
        if name == "__metadata__":
            continue
        code = draw(st.sampled_from(list(DTYPES)))
        shape = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
        count = int(np.prod(shape, dtype=int)) * DTYPES[code].itemsize
        seed = draw(st.integers(0, 2**32 - 1))
        raw = np.random.default_rng(seed).integers(0, 2 if code == "BOOL" else 256, count, np.uint8)
        made[name] = (code, shape, raw.tobytes())
    return made


def written_by_reference(tensors: dict[str, tuple[str, tuple[int, ...], bytes]]) -> bytes:
    arrays = {
        name: np.frombuffer(raw, np.uint8).view(DTYPES[code]).reshape(shape)
        for name, (code, shape, raw) in tensors.items()
    }
    return bytes(safetensors.numpy.save(arrays, {"by": "reference"}))


def test_golden_bytes(tmp_path: Path) -> None:
    """A file written out by hand: bf16 1.5 and -2, e4m3 448 and its NaN, a float32 scalar."""
    header = (
        b'{"w":{"dtype":"BF16","shape":[1,2],"data_offsets":[0,4]},'
        b'"s":{"dtype":"F32","shape":[],"data_offsets":[4,8]},'
        b'"f":{"dtype":"F8_E4M3","shape":[2],"data_offsets":[8,10]},"__metadata__":{"format":"pt"}}   '
    )
    data = bytes.fromhex("c03f 00c0 0000803d 7e 7f")
    with opened(tmp_path, pack(header, data)) as file:
        assert file.metadata == {"format": "pt"}
        assert list(file.tensors) == ["w", "s", "f"]
        assert file.tensors["w"].start == 8 + len(header)
        assert file.read("w").astype(np.float64).tolist() == [[1.5, -2.0]]
        assert file.read("s").shape == ()
        assert float(file.read("s")) == 0.0625
        eight = file.read("f").astype(np.float32)
        assert eight[0] == 448
        assert np.isnan(eight[1])


def test_every_16_bit_and_8_bit_value_decodes_as_defined(tmp_path: Path) -> None:
    """bf16 is the upper half of a float32; e5m2 is the upper half of a float16; e4m3fn by its formula."""
    two, one = np.arange(65536, dtype="<u2"), np.arange(256, dtype=np.uint8)
    header = {
        "bf16": entry("BF16", [65536], [0, 131072]),
        "e5m2": entry("F8_E5M2", [256], [131072, 131328]),
        "e4m3": entry("F8_E4M3", [256], [131328, 131584]),
    }
    with opened(tmp_path, pack(header, two.tobytes() + one.tobytes() * 2)) as file:
        bf16, e5m2, e4m3 = (file.read(name).astype(np.float32) for name in header)
    np.testing.assert_array_equal(bf16, (two.astype(np.uint32) << 16).view(np.float32))
    np.testing.assert_array_equal(e5m2, (one.astype(np.uint16) << 8).view(np.float16).astype(np.float32))
    exponent, mantissa = ((one >> 3) & 15).astype(int), (one & 7) / 8.0
    value = np.where(exponent == 0, mantissa * 2.0**-6, (1 + mantissa) * 2.0 ** (exponent - 7))
    value[(one & 127) == 127] = np.nan
    np.testing.assert_array_equal(e4m3, np.where(one >> 7, -value, value).astype(np.float32))


def test_dtype_table_is_a_bijection() -> None:
    assert len(CODES) == len(DTYPES)
    assert all(dtype_code(dtype) == code for code, dtype in DTYPES.items())
    with pytest.raises(ValueError, match="complex64"):
        dtype_code(np.dtype(np.complex64))


@settings(max_examples=60, deadline=None)
@given(tensors=tensor_sets(), mapped=st.booleans())
def test_agrees_with_the_reference_writer(
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]],
    mapped: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    content = written_by_reference(tensors)
    expected = dict(safetensors.deserialize(content))
    with opened(tmp_path_factory.mktemp("a"), content, mmap=mapped) as file:
        assert file.tensors.keys() == expected.keys() == tensors.keys()
        assert file.metadata == {"by": "reference"}
        for name, (code, shape, raw) in tensors.items():
            values = file.read(name)
            assert values.dtype == DTYPES[code] == file.tensors[name].dtype
            assert values.shape == shape == tuple(expected[name]["shape"])
            assert values.tobytes() == raw == bytes(expected[name]["data"])
            assert not values.flags.writeable
            assert values.flags.aligned


@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.integers(0, 5), max_size=4),
    code=st.sampled_from(["BF16", "F8_E5M2", "F32", "I64"]),
    bounds=st.tuples(*[st.one_of(st.none(), st.integers(-7, 30))] * 2),
    pad=st.integers(0, 7),
    mapped=st.booleans(),
)
def test_rows_are_rows_of_the_matrix_form(
    shape: list[int],
    code: str,
    bounds: tuple[int | None, int | None],
    pad: int,
    mapped: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    size = int(np.prod(shape, dtype=int)) * DTYPES[code].itemsize
    raw = np.random.default_rng(size).integers(0, 256, size, np.uint8).tobytes()
    header = json.dumps({"t": entry(code, shape, [0, size])}).encode() + b" " * pad
    with opened(tmp_path_factory.mktemp("a"), pack(header, raw), mmap=mapped) as file:
        whole = file.read("t")
        rows = int(np.prod(shape[:-1], dtype=int)) if shape else 1
        matrix = np.frombuffer(raw, np.uint8).view(DTYPES[code]).reshape(rows, shape[-1] if shape else 1)
        part = file.read("t", slice(*bounds))
        file.release("t", slice(*bounds))
    assert whole.tobytes() == raw
    assert part.shape == matrix[slice(*bounds)].shape
    assert part.tobytes() == matrix[slice(*bounds)].tobytes()
    assert part.flags.aligned


def test_valid_oddities(tmp_path: Path) -> None:
    """Header order is free, metadata may be empty or null, an unknown field of an entry is noted, empty tensors
    may stand anywhere between others, and any JSON white space may follow."""
    header = {
        "b": entry("F32", [1], [2, 6]),
        "empty": entry("F16", [3, 0], [2, 2]),
        "a": entry("I8", [2], [0, 2], purpose="none"),
        "end": entry("U8", [0], [6, 6]),
        "__metadata__": {},
    }
    with opened(
        tmp_path, pack(json.dumps(header).encode() + b" \n", b"\1\xff" + struct.pack("<f", 3))
    ) as file:
        assert list(file.tensors) == ["a", "empty", "b", "end"]
        assert file.read("a").tolist() == [1, -1]
        assert file.read("b").tolist() == [3.0]
        assert file.read("empty").shape == (3, 0)
        assert file.read("end", slice(0, 1)).shape == (1, 0)
        assert file.metadata == {}
        assert any("'purpose'" in note for note in file.notes)
    with opened(tmp_path, pack({"__metadata__": None})) as file:
        assert file.tensors == {}


def test_header_lists_of_the_reference_are_the_same(tmp_path: Path) -> None:
    """What we accept beyond the plain case, the reference accepts; what only we refuse is this list."""
    entries = json.dumps(entry()).encode()
    stricter = {
        "duplicate": pack(b'{"a":' + entries + b',"a":' + entries + b"}", b"ab"),
        "leading space": pack(b' {"a":' + entries + b"}", b"ab"),
        "rank 65": pack({"a": entry(shape=[1] * 64 + [2])}, b"ab"),
        "sub-byte type": pack({"a": entry("F4", [4])}, b"ab"),
        "empty of 2^65 bytes": pack({"a": entry(shape=[0, 1 << 62, 8], offsets=[0, 0])}),
        "entry as array": pack(b'{"a":["U8",[2],[0,2]]}', b"ab"),
    }
    for content in stricter.values():
        safetensors.deserialize(content)
        refusal(tmp_path, content)
