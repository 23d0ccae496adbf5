"""The magics beside CBK3: published sizes, headers by hand, every kind of record, and hostile headers."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trapetum.errors import FormatError
from trapetum.formats.cbk import CbkFile
from trapetum.formats.cbk_additive import record_parts
from trapetum.formats.cbk_layouts import CBK_LAYOUTS
from trapetum.formats.cbk_matrix import S16Builder, S256Builder
from trapetum.formats.cbk_records import CbkHeader
from trapetum.formats.cbk_writer import CbkWriter
from trapetum.tensors import AdditiveTensor

SHARED = Path(os.environ.get("TRAPETUM_SHARED", Path(__file__).parents[2] / "../shared"))

R1 = {
    "n_layers": 61,
    "hidden": 7168,
    "n_heads": 128,
    "kv_lora": 512,
    "nope": 128,
    "rope": 64,
    "v_head_dim": 128,
    "inter_pad": 18432,
    "moe_inter_pad": 2048,
    "n_routed": 256,
    "n_shared": 1,
    "top_k": 8,
    "vocab": 129280,
    "first_k_dense": 3,
    "q_lora": 1536,
    "n_group": 8,
    "topk_group": 4,
    "sigmoid": 1,
    "eps": 1e-6,
    "softmax_scale": 192**-0.5 * (0.1 * np.log(40) + 1) ** 2,
    "routed_scale": 2.5,
    "prec_flags": 3,
    "experts_avq": 2,
    "tied_embed": 1,
    "tied_head": 1,
}
V2_LITE = {
    **R1,
    "n_layers": 27,
    "hidden": 2048,
    "n_heads": 16,
    "inter_pad": 11008,
    "moe_inter_pad": 1536,
    "n_routed": 64,
    "n_shared": 2,
    "top_k": 6,
    "vocab": 102400,
    "first_k_dense": 1,
    "routed_scale": 1.0,
}
GEMMA_9B = {
    "n_layers": 42,
    "hidden": 3584,
    "n_heads": 16,
    "n_kv": 8,
    "head_dim": 256,
    "inter": 14336,
    "vocab": 256000,
    "eps": 1e-6,
    "rope_base": 1e4,
    "attn_softcap": 50.0,
    "final_softcap": 30.0,
}
TINY = {
    **R1,
    "n_layers": 3,
    "hidden": 256,
    "n_heads": 4,
    "kv_lora": 64,
    "nope": 96,
    "rope": 32,
    "v_head_dim": 64,
    "inter_pad": 512,
    "moe_inter_pad": 256,
    "n_routed": 8,
    "top_k": 2,
    "vocab": 512,
    "first_k_dense": 1,
    "q_lora": 256,
    "n_group": 4,
    "topk_group": 2,
}
DEEPSEEK = ("CBKD", "CBKE", "CBKR", "CBKS", "CBKV", "MTP1")


def header(magic: str, values: dict, **changes) -> CbkHeader:
    layout = CBK_LAYOUTS[magic]
    chosen = {name: {**values, **changes}[name] for name, _ in layout.fields}
    assert layout.violations(chosen) == []
    return CbkHeader(layout, chosen, np.ones(layout.sizes(chosen)[layout.inv_freq], np.float32))


@pytest.mark.parametrize(
    ("magic", "values", "published", "unit"),
    [
        ("CBKR", R1, 350_873_098_456, 1),
        ("CBKD", V2_LITE, 9510.7, 2**20),
        ("CBKE", V2_LITE, 10133.5, 2**20),
        ("CBKS", R1, 353.4, 1e9),
        ("CBKV", R1, 177.4, 1e9),
        ("CBKV", {**R1, "experts_avq": 3}, 259.3, 1e9),
        ("CBKG", GEMMA_9B, 6.59, 1e9),
    ],
)
def test_predicted_size_is_the_published_one(magic, values, published, unit):
    predicted = header(magic, values).file_bytes()
    if unit == 1:
        assert predicted == published
    else:
        assert predicted / unit == pytest.approx(published, abs=0.006 if published < 7 else 0.06)


def test_header_bytes_by_hand():
    made = header("CBKS", R1).to_bytes()
    assert made[:92] == bytes.fromhex(
        "43 42 4b 53 3d 00 00 00 00 1c 00 00 80 00 00 00 00 02 00 00 80 00 00 00 40 00 00 00 80 00 00 00 00 48 00 00"
        "00 08 00 00 00 01 00 00 01 00 00 00 08 00 00 00 00 f9 01 00 03 00 00 00 00 06 00 00 08 00 00 00 04 00 00 00"
        "01 00 00 00 03 00 00 00 bd 37 86 35 b9 7a 0a 3e 00 00 20 40"
    )
    assert len(made) == 92 + 4 * 32
    block = header("MTP1", R1).to_bytes()
    assert block[:12] == bytes.fromhex("4d 54 50 31 00 1c 00 00 80 00 00 00")
    assert struct.unpack_from("<3f", block, 68)[2] == 2.5
    assert len(block) == 80 + 4 * 32


def random_parts(record, rng):
    """Arrays of a record and the weight that they mean."""
    if record.kind in ("f32", "f16"):
        values = rng.standard_normal(record.shape).astype({"f32": np.float32, "f16": np.float16}[record.kind])
        return [values], values.astype(np.float32)
    if record.kind in ("S16", "S256"):
        builder = (S16Builder if record.kind == "S16" else S256Builder)(*record.shape)
        codes = rng.integers(0, builder.entries, record.shape, dtype=np.uint8)
        codebook = rng.standard_normal((record.shape[0], builder.entries)).astype(np.float32)
        builder.put(0, codes, codebook)
        return list(builder.parts()), np.take_along_axis(codebook, codes.astype(int), 1)
    rows, inputs = record.shape
    count = int(record.kind[1:])
    tensor = AdditiveTensor(
        rng.integers(0, 256, (count, inputs // 8, rows), dtype=np.uint8),
        rng.standard_normal((count, 256, 8)).astype(np.float16),
        rng.standard_normal(rows).astype(np.float16),
    )
    return list(record_parts(tensor)), tensor.dequantize()


def write_random(path, head, seed=0):
    rng, kept = np.random.default_rng(seed), {}
    with CbkWriter(path, head) as writer:
        for record in head.records():
            parts, kept[record.name] = random_parts(record, rng)
            writer.write(record.name, parts)
    return kept


@pytest.mark.parametrize("magic", DEEPSEEK)
def test_every_record_reads_back(tmp_path, magic):
    head = header(magic, TINY, experts_avq=3)
    kept = write_random(tmp_path / "x.cbk", head)
    assert (tmp_path / "x.cbk").stat().st_size == head.file_bytes()
    with CbkFile.open(tmp_path / "x.cbk") as opened:
        assert opened.names() == list(kept)
        for name, values in kept.items():
            assert np.array_equal(opened.load(name).dequantize(), values), name
            if values.ndim == 2:
                assert np.array_equal(opened.load(name, slice(3, 77)).dequantize(), values[3:77]), name
        assert list(opened.faults()) == []
        kinds = {r.kind for r in opened.records.values()}
    expected = {"CBKE": {"S256"}, "CBKS": {"S256"}, "CBKV": {"A3"}}.get(magic, set())
    assert kinds == {"f32", "f16", "S16"} | expected


def test_walk_of_a_sparse_layer():
    names = [r.name.removeprefix("model.layers.1.") for r in header("CBKR", TINY).records()]
    at = names.index("post_attention_layernorm.weight")
    assert names[at + 1 : at + 6] == [
        "mlp.gate.e_score_correction_bias",
        "mlp.gate.weight",
        "mlp.experts.0.gate_proj.weight",
        "mlp.experts.0.up_proj.weight",
        "mlp.experts.0.down_proj.weight",
    ]
    assert "model.layers.0.mlp.gate_proj.weight" in names
    lite = [r.name for r in header("CBKD", TINY, n_shared=2).records()]
    assert not any("score" in n or "q_a" in n for n in lite)


def test_flags_are_read_one_by_one():
    for flags, shared, last in ((1, "S256", "S16"), (2, "S16", "S256"), (0, "S16", "S16")):
        kinds = {r.name: r.kind for r in header("CBKS", TINY, prec_flags=flags).records()}
        assert kinds["model.layers.1.mlp.shared_experts.up_proj.weight"] == shared
        assert kinds["lm_head.weight"] == last


def test_synthesized_config(tmp_path):
    write_random(tmp_path / "x.cbk", header("CBKV", TINY))
    with CbkFile.open(tmp_path / "x.cbk") as opened:
        config = opened.config
    assert config["model_type"] == "deepseek_v3"
    assert (config["n_group"], config["topk_group"], config["q_lora_rank"]) == (4, 2, 256)
    assert config["trapetum_softmax_scale"] == pytest.approx(0.1352338)
    assert len(config["trapetum_inv_freq"]) == 16
    write_random(tmp_path / "y.cbk", header("CBKR", TINY, sigmoid=0))
    with CbkFile.open(tmp_path / "y.cbk") as opened:
        assert opened.config["model_type"] == "deepseek_v2"
        assert opened.config["topk_method"] == "greedy"
        assert opened.config["norm_topk_prob"] is True


@pytest.mark.parametrize(
    ("magic", "field", "value", "words"),
    [
        ("CBKR", "n_layers", 1 << 24, "num_hidden_layers"),
        ("CBKR", "n_layers", -1, "num_hidden_layers"),
        ("CBKR", "hidden", 200, "hidden_size is 200"),
        ("CBKR", "kv_lora", 96, "kv_lora_rank is 96, not a power of two"),
        ("CBKR", "n_routed", 1 << 30, "n_routed_experts"),
        ("CBKR", "n_routed", 65536, "truncated"),
        ("CBKR", "n_shared", 2, "n_shared_experts is 2, not 1"),
        ("CBKR", "n_group", 3, "n_routed_experts % n_group"),
        ("CBKR", "n_group", 0, "n_group is 0"),
        ("CBKR", "topk_group", 5, "topk_group"),
        ("CBKR", "top_k", 9, "num_experts_per_tok - n_routed_experts"),
        ("CBKR", "sigmoid", 2, "sigmoid is 2"),
        ("CBKR", "first_k_dense", 4, "first_k_dense_replace"),
        ("CBKR", "softmax_scale", float("nan"), "softmax scale"),
        ("CBKR", "routed_scale", 0.0, "routed_scaling_factor is 0"),
        ("CBKS", "prec_flags", 4, "prec_flags is 4"),
        ("CBKV", "experts_avq", 4, "experts_avq is 4"),
        ("CBKD", "rope", 31, "qk_rope_head_dim is 31"),
        ("CBKE", "vocab", 500, "vocabulary is 500"),
        ("MTP1", "tied_head", 0, "tied_head is 0"),
    ],
)
def test_impossible_headers(tmp_path, magic, field, value, words):
    head = header(magic, TINY)
    path = tmp_path / "x.cbk"
    write_random(path, head)
    names = [name for name, _ in head.layout.fields]
    code = dict(head.layout.fields)[field]
    data = bytearray(path.read_bytes())
    struct.pack_into("<" + code, data, 4 + 4 * names.index(field), value)
    path.write_bytes(data)
    with pytest.raises(FormatError, match=words):
        CbkFile.open(path)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    path = tmp_path_factory.mktemp("small") / "x.cbk"
    write_random(path, header("CBKV", TINY))
    return path.read_bytes()


@settings(deadline=None, max_examples=60)
@given(at=st.integers(0, 91), bit=st.integers(0, 7))
def test_flipped_header_bits_give_format_errors_or_open(small, tmp_path_factory, at, bit):
    data = bytearray(small)
    data[at] ^= 1 << bit
    path = tmp_path_factory.mktemp("flip") / "x.cbk"
    path.write_bytes(data)
    try:
        CbkFile.open(path).close()
    except FormatError:
        return
    # floats, and the integers that decide how the model runs but no length: top_k, topk_group, n_group, sigmoid
    integer = (at - 4) // 4
    assert at >= 80 or integer in (11, 15, 16, 17)


def test_length_is_exact(small, tmp_path):
    path = tmp_path / "x.cbk"
    for data, fault in (
        (small[:-1], "truncated"),
        (small + b"\0" * 999, "after the last"),
        (small[:90], "short"),
    ):
        path.write_bytes(data)
        with pytest.raises(FormatError, match=fault):
            CbkFile.open(path)


def test_an_additive_record_must_be_what_the_header_says(small, tmp_path):
    path = tmp_path / "x.cbk"
    head, name = header("CBKV", TINY), "model.layers.1.mlp.experts.3.up_proj.weight"
    at = next(r.offset for r in head.records() if r.name == name)
    for offset, value, words in ((0, b"XXXX", "begins with"), (16, struct.pack("<i", 128), "up_proj")):
        data = bytearray(small)
        data[at + offset : at + offset + 4] = value
        path.write_bytes(data)
        with CbkFile.open(path) as opened, pytest.raises(FormatError, match=words):
            opened.load(name)
    data = bytearray(small)
    data[at + 24 : at + 26] = b"\x00\x7e"  # NaN in a codebook
    path.write_bytes(data)
    with CbkFile.open(path) as opened:
        with pytest.raises(FormatError, match="not finite"):
            opened.load(name)
        assert [n for n, _ in opened.faults()] == [name]


@pytest.mark.skipif(not (SHARED / "golden/cbk").is_dir(), reason="golden files are not here")
@pytest.mark.parametrize("name", ["CBKG", "CBKV2"])
def test_golden_files_open_without_fault(name):
    with CbkFile.open(SHARED / "golden/cbk" / f"{name}.cbk") as opened:
        assert list(opened.faults()) == []
        assert opened.header.to_bytes() == opened.path.read_bytes()[: opened.header.nbytes]
