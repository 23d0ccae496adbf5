"""Quantizing from a GGUF that PyPI gguf wrote: its own decode, transformers and the dense detour are the judges."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

import trapetum
from trapetum.errors import CheckpointError, OutputError, UnsupportedModelError
from trapetum.export import export_artifact
from trapetum.formats.decoded import decoded
from trapetum.formats.gguf_checkpoint import GgufCheckpoint, is_gguf
from trapetum.formats.packed_ternary import open_checkpoint
from trapetum.formats.source import open_source
from trapetum.quantize.shared_job import merge_parts

gguf = pytest.importorskip("gguf")

HIDDEN, HEADS, KV, HEAD, VOCAB = 256, 4, 2, 64, 320
TYPES = {  # a tensor -> its type in the file; the rest is float32
    "token_embd": "Q8_0", "attn_q": "Q4_1", "attn_k": "Q5_0", "attn_v": "F16", "attn_output": "BF16",
    "ffn_gate": "TQ2_0", "ffn_up": "Q4_1", "ffn_down": "TQ1_0",
}  # fmt: skip
AT = "model.layers.0."
NAMES = {
    "token_embd": "model.embed_tokens", "attn_q": AT + "self_attn.q_proj", "attn_k": AT + "self_attn.k_proj",
    "attn_v": AT + "self_attn.v_proj", "attn_output": AT + "self_attn.o_proj", "ffn_gate": AT + "mlp.gate_proj",
    "ffn_up": AT + "mlp.up_proj", "ffn_down": AT + "mlp.down_proj",
}  # fmt: skip
IDS = [1, 9, 200, 31, 7, 100, 3]


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows as llama.cpp's converter stores them."""
    return weight.reshape(heads, 2, -1, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape)


def restore(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undo :func:`interleave`."""
    return weight.reshape(heads, -1, 2, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape)


def write(path: Path, arch: str = "llama", types: dict[str, str] = TYPES) -> dict[str, np.ndarray]:
    """Write a model of one layer; its weights under the checkpoint's names, as PyPI gguf decodes them."""
    rng = np.random.default_rng(2)
    shapes = {
        "token_embd": (VOCAB, HIDDEN), "attn_q": (HEADS * HEAD, HIDDEN), "attn_k": (KV * HEAD, HIDDEN),
        "attn_v": (KV * HEAD, HIDDEN), "attn_output": (HIDDEN, HEADS * HEAD), "ffn_gate": (HIDDEN, HIDDEN),
        "ffn_up": (HIDDEN, HIDDEN), "ffn_down": (HIDDEN, HIDDEN),
    }  # fmt: skip
    writer = gguf.GGUFWriter(path, arch)
    writer.add_name("Tiny")
    writer.add_license("apache-2.0")
    writer.add_languages(["en", "no"])
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HEAD)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", *(chr(0x4E00 + i) for i in range(VOCAB - 3))])
    writer.add_token_scores([0.0] * 3 + [-float(i) for i in range(VOCAB - 3)])
    writer.add_token_types([2, 3, 3] + [1] * (VOCAB - 3))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    expected = {}
    for name, shape in shapes.items():
        values = (rng.standard_normal(shape) / np.sqrt(shape[1])).astype(np.float32)
        if types[name].startswith("TQ"):
            values = (rng.integers(-1, 2, shape) * np.float32(0.0625)).astype(np.float32)
        kind = gguf.GGMLQuantizationType[types[name]]
        heads = {"attn_q": HEADS, "attn_k": KV}.get(name)
        raw = gguf.quants.quantize(values if heads is None else interleave(values, heads), kind)
        writer.add_tensor(
            f"{name}.weight" if name == "token_embd" else f"blk.0.{name}.weight", raw, raw_dtype=kind
        )
        decoded = gguf.quants.dequantize(raw, kind)
        expected[NAMES[name] + ".weight"] = decoded if heads is None else restore(decoded, heads)
    norms = {"output_norm": "model.norm", "blk.0.attn_norm": AT + "input_layernorm"}
    norms["blk.0.ffn_norm"] = AT + "post_attention_layernorm"
    for name, theirs in norms.items():
        expected[theirs + ".weight"] = (1 + 0.1 * rng.standard_normal(HIDDEN)).astype(np.float32)
        writer.add_tensor(name + ".weight", expected[theirs + ".weight"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    path = tmp_path_factory.mktemp("gguf") / "Tiny-Q4_1.gguf"
    return path, write(path)


@pytest.fixture(scope="module")
def asis(model: tuple[Path, dict[str, np.ndarray]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("asis") / "out"
    trapetum.quantize_model(model[0], out, scheme="asis")
    return out


def test_a_checkpoint_in_all_but_the_files(model: tuple[Path, dict[str, np.ndarray]]) -> None:
    path, expected = model
    with open_checkpoint(path) as source:
        assert isinstance(source, GgufCheckpoint)
        assert source.title == "Tiny-Q4_1"
        assert source.packed_format() is None
        assert set(source.names()) == set(expected)
        for name, values in expected.items():
            assert source.shape(name) == values.shape
            found = source.load(name)
            assert (found.layout, found.values.dtype) == (source.layout(name), source.dtype(name))
            np.testing.assert_array_equal(found.dequantize(), values, err_msg=name)
            if values.ndim == 2:
                np.testing.assert_array_equal(source.load(name, slice(5, 70)).dequantize(), values[5:70])
        folder = source.folder
        assert {p.name for p in source.side_files()} == {
            "config.json", "tokenizer.json", "tokenizer_config.json",
        }  # fmt: skip
        (note,) = source.notes
        assert "weights come from Q4_1 (2 tensors), Q8_0 (1 tensor)" in note
    assert not folder.exists()


def test_as_it_is_without_loss(asis: Path, model: tuple[Path, dict[str, np.ndarray]]) -> None:
    path, expected = model
    with trapetum.open_artifact(asis) as art, GgufCheckpoint.open(path) as source:
        for name, values in expected.items():
            np.testing.assert_array_equal(art[name].dequantize(), values, err_msg=name)
        layouts = {name: art[NAMES[name] + ".weight"].layout for name in TYPES}
        assert layouts == {
            "token_embd": "blocks", "attn_q": "blocks", "attn_k": "blocks", "attn_v": "dense",
            "attn_output": "dense", "ffn_gate": "ternary", "ffn_up": "blocks", "ffn_down": "ternary",
        }  # fmt: skip
        entries = art.manifest["tensors"]
        query, gate = NAMES["attn_q"] + ".weight", NAMES["ffn_gate"] + ".weight"
        assert entries[query]["scheme"] == {"name": "asis-gguf", "type": "Q4_1"}
        assert entries[query]["relative_error"] == 0
        assert art[query].to_arrays()["blocks"].tobytes() == source.stored(query).blocks.tobytes()
        assert entries[gate]["proof"]["max_difference"] == 0
        with pytest.raises(CheckpointError, match="not stored in blocks"):
            source.stored(NAMES["attn_v"] + ".weight")


def test_what_the_artifact_says_of_its_source(asis: Path, model: tuple[Path, dict[str, np.ndarray]]) -> None:
    path, _ = model
    said = json.loads((asis / "trapetum.json").read_text())["source"]
    assert said["name"] == "Tiny-Q4_1"
    assert said["files"][path.name] == hashlib.sha256(path.read_bytes()).hexdigest()
    card = (asis / "README.md").read_text().splitlines()
    assert 'license: "apache-2.0"' in card
    assert 'language: ["en", "no"]' in card
    vocabulary = json.loads((asis / "tokenizer.json").read_text())["model"]["vocab"]
    assert len(vocabulary) == VOCAB
    config = json.loads((asis / "config.json").read_text())
    assert (config["model_type"], config["hidden_size"], config["tie_word_embeddings"]) == (
        "llama",
        HIDDEN,
        True,
    )


def test_other_schemes_work_on_the_decoded_weights(
    model: tuple[Path, dict[str, np.ndarray]], tmp_path: Path
) -> None:
    """The same parts come out as from the dense folder of the same weights; the kept embedding stays in blocks."""
    path, expected = model
    trapetum.quantize_model(path, tmp_path / "direct", bits=4, effort="fast")
    dense = export_artifact(path, "hf", tmp_path / "dense")
    trapetum.quantize_model(dense, tmp_path / "detour", bits=4, effort="fast")
    direct, detour = (
        json.loads((tmp_path / which / "trapetum.json").read_text())["tensors"]
        for which in ("direct", "detour")
    )
    embed = "model.embed_tokens.weight"
    assert (direct[embed]["layout"], detour[embed]["layout"]) == ("blocks", "dense")
    linear = [n for n in expected if n.endswith("_proj.weight")]
    assert len(linear) == 7
    for name in linear:
        assert direct[name]["layout"] == "codebook"
        # Exactly the same codes, but where the detour widened 16-bit values the sha256 is of the same arrays too.
        assert direct[name]["sha256"] == detour[name]["sha256"], name
    a, b = (trapetum.load(tmp_path / which).logits(IDS) for which in ("direct", "detour"))
    assert np.abs(a - b).max() <= 1e-5 * np.abs(a).max()


def test_parts_of_a_job(model: tuple[Path, dict[str, np.ndarray]], asis: Path, tmp_path: Path) -> None:
    """Each process makes the side files anew: they must come out the same, byte for byte."""
    for part in ("1/2", "2/2"):
        trapetum.quantize_model(model[0], tmp_path / "out", scheme="asis", part=part)
    merge_parts(tmp_path / "out")
    assert (tmp_path / "out" / "SHA256SUMS").read_bytes() == (asis / "SHA256SUMS").read_bytes()


def test_transformers_agrees_with_the_gguf(
    asis: Path, model: tuple[Path, dict[str, np.ndarray]], tmp_path: Path
) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    out = export_artifact(asis, "hf", tmp_path / "hf")
    with torch.inference_mode():
        theirs = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
        expected = theirs(torch.tensor([IDS])).logits[0].numpy()
    text = "".join(chr(0x4E00 + i) for i in (5, 80, 3, 7))
    with trapetum.load(model[0]) as ours:
        found = ours.logits(IDS)
        tokens = ours.tokenizer.encode(text)
    assert np.abs(found - expected).max() <= 1e-4 * np.abs(expected).max()
    assert (
        transformers.AutoTokenizer.from_pretrained(out)(text, add_special_tokens=False)["input_ids"] == tokens
    )


def test_a_rotation_is_undone(model: tuple[Path, dict[str, np.ndarray]], tmp_path: Path) -> None:
    trapetum.quantize_model(model[0], tmp_path / "rotated", scheme="ternary", levels=4, hadamard=True)
    rotated = export_artifact(tmp_path / "rotated", "gguf", tmp_path / "r.gguf", gguf_type="PQ2_0")
    query = NAMES["attn_q"] + ".weight"
    with GgufCheckpoint.open(rotated) as source, trapetum.open_artifact(tmp_path / "rotated") as art:
        assert any("rotation of 7 tensors is undone" in note for note in source.notes)
        assert not source.is_packed(query)
        np.testing.assert_allclose(source.load(query).dequantize(), decoded(art, query), atol=1e-6)
        np.testing.assert_array_equal(
            source.load(query, slice(9, 20)).values, source.load(query).values[9:20]
        )
    trapetum.quantize_model(rotated, tmp_path / "again", scheme="gguf:Q8_0")
    a, b = (trapetum.load(path).logits(IDS) for path in (rotated, tmp_path / "again"))
    assert np.abs(a - b).max() <= 0.05 * np.abs(a).max()
    report = trapetum.quantize_model(rotated, tmp_path / "asis", scheme="asis")
    assert {r.scheme.name for r in report.rows if r.name.endswith("_proj.weight")} == {"keep"}
    assert any("7 of 8 tensors are not ternary and kept as they are" in note for note in report.notes)


def test_plain_numbers_only_are_no_blocks_to_take_over(tmp_path: Path) -> None:
    write(tmp_path / "f16.gguf", types=dict.fromkeys(TYPES, "F16"))
    with pytest.raises(UnsupportedModelError, match="and none of 8 tensors is"):
        trapetum.quantize_model(tmp_path / "f16.gguf", tmp_path / "out", scheme="asis")
    assert not (tmp_path / "out").exists()


def test_an_unknown_family_is_refused_before_any_work(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", arch="mamba")
    with pytest.raises(UnsupportedModelError, match="mamba"):
        trapetum.quantize_model(tmp_path / "m.gguf", tmp_path / "out", bits=4)
    assert not (tmp_path / "out").exists()


def test_the_output_cannot_be_the_input(model: tuple[Path, dict[str, np.ndarray]]) -> None:
    before = model[0].read_bytes()
    with pytest.raises(OutputError):
        trapetum.quantize_model(model[0], model[0], bits=4, overwrite=True)
    assert model[0].read_bytes() == before


def test_told_by_its_first_bytes(model: tuple[Path, dict[str, np.ndarray]], tmp_path: Path) -> None:
    (tmp_path / "other.gguf").write_bytes(b"GGML")
    assert is_gguf(model[0])
    assert [is_gguf(p) for p in (tmp_path, tmp_path / "none", tmp_path / "other.gguf", "a\0b")] == [False] * 4
    with pytest.raises(CheckpointError, match=r"neither a folder nor a \.safetensors or \.gguf file"):
        open_checkpoint(tmp_path / "other.gguf")
    with open_source(model[0]) as source:
        assert source.kind == "gguf"
