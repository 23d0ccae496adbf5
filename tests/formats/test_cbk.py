"""The .cbk reader and writer against bytes written by hand, published sizes, and broken files."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trapetum.errors import FormatError, OutputError, TrapetumError
from trapetum.formats.cbk import CbkFile, padded_vocab
from trapetum.formats.cbk_layouts import CBK_LAYOUTS
from trapetum.formats.cbk_matrix import S16Builder, unpack_s16
from trapetum.formats.cbk_records import CbkHeader
from trapetum.formats.cbk_writer import CbkWriter

GOLDEN = Path(__file__).parents[1] / "golden" / "CBK3.cbk"
HEAD = "lm_head.weight"
EMBED = "model.embed_tokens.weight"


def header(magic="CBK3", **changes):
    values = {
        "n_layers": 1,
        "hidden": 256,
        "n_heads": 4,
        "n_kv": 4,
        "head_dim": 64,
        "inter": 256,
        "vocab": 256,
        "eps": 1e-5,
        "rope_base": 1e4,
        "rope_scale": 1.0,
        "has_bias": 0,
        **changes,
    }
    layout = CBK_LAYOUTS[magic]
    values = {name: values[name] for name, _ in layout.fields}
    return CbkHeader(layout, values, np.ones(values["head_dim"] // 2, np.float32))


def write_random(path, head, rng):
    """A file of random records; returns the matrices by name."""
    kept = {}
    with CbkWriter(path, head) as writer:
        for record in head.records():
            if record.kind == "S16":
                codes = rng.integers(0, 16, record.shape, dtype=np.uint8)
                codebook = rng.standard_normal((record.shape[0], 16)).astype(np.float32)
                builder = S16Builder(*record.shape)
                builder.put(0, codes, codebook)
                parts = list(builder.parts())
                kept[record.name] = np.take_along_axis(codebook, codes.astype(int), 1)
            else:
                dtype = {"f32": np.float32, "f16": np.float16}[record.kind]
                parts = [rng.standard_normal(record.shape).astype(dtype)]
                kept[record.name] = parts[0].astype(np.float32)
            writer.write(record.name, parts)
    return kept


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "x.cbk"
    return path, write_random(path, header(has_bias=1), np.random.default_rng(3))


# Figures of docs that were published with the format; (layers, hidden, heads, kv, head_dim, inter, vocab,
# bias).
PUBLISHED = {
    "Llama-2-7B": ((32, 4096, 32, 32, 128, 11008, 32000, 0), 3_655_827_760, 1),
    "TinyLlama-1.1B, MiB": ((22, 2048, 32, 4, 64, 5632, 32000, 0), 644.6, 2**20),
    "Llama-3.1-8B, MiB": ((32, 4096, 32, 8, 128, 14336, 128256, 0), 4673.3, 2**20),
    "Llama-3.2-1B, MiB": ((16, 2048, 32, 8, 64, 8192, 128256, 0), 1121.3, 2**20),
    "Qwen2.5-7B, MiB": ((28, 3584, 28, 4, 128, 18944, 152064, 1), 4506.3, 2**20),
    "Qwen2.5-1.5B, MiB": ((28, 1536, 12, 2, 128, 8960, 151936, 1), 1230.8, 2**20),
    "Phi-4, MiB": ((40, 5120, 40, 10, 128, 17920, 100352, 0), 7864, 2**20),
}


@pytest.mark.parametrize("model", PUBLISHED)
def test_predicted_size_is_the_published_one(model):
    sizes, published, unit = PUBLISHED[model]
    names = ("n_layers", "hidden", "n_heads", "n_kv", "head_dim", "inter", "vocab", "has_bias")
    values = dict(zip(names, sizes))
    values["vocab"] = padded_vocab(values["vocab"])
    predicted = header(**values).file_bytes()
    if unit == 1:
        assert predicted == published
    else:
        assert predicted / unit == pytest.approx(published, abs=0.5 if published == 7864 else 0.05)


def test_header_bytes_by_hand():
    expected = bytes.fromhex(
        "43 42 4b 33 02 00 00 00 00 02 00 00 08 00 00 00 04 00 00 00 40 00 00 00"
        "00 03 00 00 00 02 00 00 ac c5 27 37 00 40 1c 46 00 00 80 3f 00 00 00 00"
    )
    made = header(n_layers=2, hidden=512, n_heads=8, n_kv=4, head_dim=64, inter=768, vocab=512).to_bytes()
    assert made[:48] == expected
    assert made[48:] == struct.pack("<32f", *[1.0] * 32)


def test_matrix_bytes_by_hand():
    codes = np.array([[1, 15], [2, 14], [3, 0], [4, 8]], np.uint8)
    codebook = np.arange(64, dtype=np.float32).reshape(4, 16)
    codebook[:, 0] = [-4, 96, 196, 296]
    builder = S16Builder(4, 2)
    builder.put(0, codes, codebook)
    raw = b"".join(part.tobytes() for part in builder.parts())
    assert raw[:20] == bytes.fromhex("2143ef80 000080c0 0000c042 00004443 00009443")
    assert len(raw) == 4 + 64 * 4
    assert struct.unpack_from("<f", raw, 4 + 4 * (5 * 4 + 2)) == (codebook[2, 5],)


@settings(deadline=None)
@given(
    rows=st.integers(1, 40).map(lambda n: 2 * n),
    inputs=st.integers(1, 9),
    size=st.integers(2, 16),
    cut=st.integers(0, 40),
    part=st.tuples(st.integers(0, 80), st.integers(0, 80)),
)
def test_matrix_blocks_and_slices(rows, inputs, size, cut, part):
    """Any even cut gives the same bytes, any slice the same rows, any small table the same values."""
    rng = np.random.default_rng(rows * inputs)
    codes = rng.integers(0, size, (rows, inputs), dtype=np.uint8)
    codebook = rng.standard_normal((rows, size)).astype(np.float16)
    whole, blocks = S16Builder(rows, inputs), S16Builder(rows, inputs)
    whole.put(0, codes, codebook)
    cut = min(2 * cut, rows)
    blocks.put(0, codes[:cut], codebook[:cut])
    blocks.put(cut, codes[cut:], codebook[cut:])
    packed, table = whole.parts()
    assert all(np.array_equal(a, b) for a, b in zip(whole.parts(), blocks.parts()))
    got, entries = unpack_s16(packed, table, slice(*part))
    assert np.array_equal(got, codes[slice(*part)])
    expected = np.take_along_axis(codebook.astype(np.float32), codes.astype(int), 1)[slice(*part)]
    assert np.array_equal(np.take_along_axis(entries, got.astype(int), 1), expected)


def test_large_matrix_crosses_tiles():
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 16, (1030, 2050), dtype=np.uint8)
    builder = S16Builder(*codes.shape)
    builder.put(0, codes, np.zeros((1030, 16), np.float32))
    packed, table = builder.parts()
    assert np.array_equal(packed, (codes[0::2] | codes[1::2] << 4).T)
    assert np.array_equal(unpack_s16(packed, table, slice(None))[0], codes)


def test_builder_refuses_what_does_not_fit():
    builder = S16Builder(4, 2)
    book = np.zeros((2, 16), np.float32)
    with pytest.raises(ValueError, match="do not fit"):
        builder.put(1, np.zeros((2, 2), np.uint8), book)
    with pytest.raises(ValueError, match="do not fit"):
        builder.put(0, np.zeros((2, 2), np.uint8), np.zeros((2, 17), np.float32))
    with pytest.raises(ValueError, match="code 9"):
        builder.put(0, np.full((2, 2), 9, np.uint8), book[:, :8])
    with pytest.raises(ValueError, match="two a byte"):
        S16Builder(3, 2)


@pytest.mark.parametrize("mmap", [True, False])
def test_written_file_reads_back(file, mmap):
    path, kept = file
    with CbkFile.open(path, mmap=mmap) as opened:
        assert opened.names() == list(kept)
        for name, values in kept.items():
            tensor = opened.load(name)
            assert np.array_equal(tensor.dequantize(), values)
            if values.ndim == 2:
                part = opened.load(name, slice(3, 77)).dequantize()
                assert np.array_equal(part, values[3:77])
        assert list(opened.faults()) == []
    assert path.stat().st_size == header(has_bias=1).file_bytes()


def test_config_has_the_hugging_face_keys():
    with CbkFile.open(GOLDEN) as opened:
        config = opened.config
        assert config["vocab_size"] == 512
        assert not opened.vocab_known
        assert len(config["trapetum_inv_freq"]) == config["head_dim"] // 2
        assert config["num_hidden_layers"] == 2
        assert opened.layout(HEAD) == "codebook"
        assert opened.dtype(EMBED) == np.float16
        assert "model.layers.1.self_attn.v_proj.bias" in opened.names()


@pytest.mark.parametrize(
    ("magic", "start", "scale"), [("CBK1", 40, 1.0), ("CBK2", 44, 4.0), ("CBK3", 48 + 4 * 32, 1.0)]
)
def test_every_magic(tmp_path, magic, start, scale):
    head = header(magic, rope_scale=scale)
    assert head.nbytes == start
    write_random(tmp_path / "x.cbk", head, np.random.default_rng(1))
    with CbkFile.open(tmp_path / "x.cbk") as opened:
        frequencies = opened.config["trapetum_inv_freq"]
        expected = 1.0 if magic == "CBK3" else 1e4 ** (-2 / 64) / scale
        assert frequencies[1] == pytest.approx(expected, rel=1e-6)


def test_golden_padding_is_hidden_by_a_config(tmp_path):
    copy = tmp_path / "model.cbk"
    copy.write_bytes(GOLDEN.read_bytes())
    (tmp_path / "config.json").write_text(
        json.dumps({"vocab_size": 500, "hidden_size": 256, "eos_token_id": 7})
    )
    with CbkFile.open(tmp_path) as opened:
        assert opened.config["vocab_size"] == 500
        assert opened.config["eos_token_id"] == 7
        assert opened.shape(HEAD) == opened.load(HEAD).shape == (500, 256)
        assert opened.load(EMBED).shape == (500, 256)
        assert list(opened.faults()) == []
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 400, "hidden_size": 64}))
    with CbkFile.open(tmp_path) as opened:
        assert opened.config["vocab_size"] == 512
        assert "another model" in opened.notes[0]


def test_nonzero_padding_is_a_fault(tmp_path):
    path = tmp_path / "model.cbk"
    write_random(path, header(), np.random.default_rng(2))
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 250, "hidden_size": 256}))
    with CbkFile.open(path) as opened:
        assert {name for name, _ in opened.faults()} == {EMBED, HEAD}


def test_length_is_exact(tmp_path):
    data = GOLDEN.read_bytes()
    path = tmp_path / "x.cbk"
    for changed, fault in ((data[:-1], "truncated"), (data + b"\0" * 999, "after the last record")):
        path.write_bytes(changed)
        with pytest.raises(FormatError, match=fault) as caught:
            CbkFile.open(path)
        assert f"{len(changed):,}" in caught.value.message
        assert f"{len(data):,}" in caught.value.message


@pytest.mark.parametrize(
    ("offset", "value", "words"),
    [
        (0, b"GGUF", "known are CBK1, CBK2, CBK3"),
        (4, struct.pack("<i", -1), "num_hidden_layers is -1"),
        (4, struct.pack("<i", 1 << 20), "num_hidden_layers is 1048576"),
        (8, struct.pack("<i", 200), "hidden_size is 200, not a multiple of 256"),
        (16, struct.pack("<i", 3), "num_key_value_heads"),
        (16, struct.pack("<i", 0), "num_key_value_heads is 0"),
        (20, struct.pack("<i", 48), "power of two"),
        (28, struct.pack("<i", 2**31 - 256), "the file has"),
        (32, struct.pack("<f", float("nan")), "eps"),
        (44, struct.pack("<i", 2), "has_bias is 2"),
        (48, struct.pack("<f", float("inf")), "rotary frequencies"),
    ],
)
def test_impossible_headers(tmp_path, offset, value, words):
    data = bytearray(GOLDEN.read_bytes())
    data[offset : offset + 4] = value
    path = tmp_path / "x.cbk"
    path.write_bytes(data)
    with pytest.raises(FormatError, match=words):
        CbkFile.open(path)


@settings(deadline=None, max_examples=50)
@given(length=st.integers(0, 400))
def test_short_files_give_only_format_errors(tmp_path_factory, length):
    path = tmp_path_factory.mktemp("short") / "x.cbk"
    path.write_bytes(GOLDEN.read_bytes()[:length])
    with pytest.raises(FormatError):
        CbkFile.open(path)


@settings(deadline=None, max_examples=100)
@given(offset=st.integers(0, 175), bit=st.integers(0, 7))
def test_flipped_header_bits_give_format_errors_or_open(tmp_path_factory, offset, bit):
    data = bytearray(GOLDEN.read_bytes())
    data[offset] ^= 1 << bit
    path = tmp_path_factory.mktemp("flip") / "x.cbk"
    path.write_bytes(data)
    try:
        CbkFile.open(path).close()
    except FormatError:
        return
    # What can still open is a changed float: every integer decides a length.
    assert 32 <= offset < 44 or offset >= 48


def test_non_finite_values_are_found(file):
    path, _ = file
    name = "model.layers.0.mlp.up_proj.weight"
    with CbkFile.open(path) as opened:
        record = opened.records[name]
    data = bytearray(path.read_bytes())
    at = record.offset + record.shape[0] * record.shape[1] // 2 + 4 * 5
    data[at : at + 4] = struct.pack("<f", float("nan"))
    path.write_bytes(data)
    with CbkFile.open(path) as opened:
        with pytest.raises(FormatError, match="up_proj"):
            opened.load(name)
        assert [n for n, _ in opened.faults()] == [name]


def test_writer_refuses_disorder_and_leaves_nothing(tmp_path):
    path = tmp_path / "x.cbk"
    with pytest.raises(ValueError, match="out of order"), CbkWriter(path, header()) as writer:
        writer.write(HEAD, [])
    with pytest.raises(ValueError, match="bytes; 131072 are due"), CbkWriter(path, header()) as writer:
        writer.write(EMBED, [np.zeros(5, np.float16)])
    with pytest.raises(ValueError, match="was not written"), CbkWriter(path, header()) as writer:
        writer.write(EMBED, [np.zeros((256, 256), np.float16)])
    assert list(tmp_path.iterdir()) == []


def test_writer_keeps_an_existing_file(file):
    path, _ = file
    before = path.read_bytes()
    with pytest.raises(OutputError, match="exists"), CbkWriter(path, header()):
        pass
    assert path.read_bytes() == before


def test_manifest_of_another_file_is_refused(file):
    path, _ = file
    path.with_name("x.cbk.json").write_text(json.dumps({"records": [{"name": "a"}]}))
    with pytest.raises(TrapetumError, match="list of records"):
        CbkFile.open(path)
