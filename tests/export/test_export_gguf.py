"""GGUF export: types, rotation, refusals and what is said, read back by our strict reader."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest

import trapetum
from trapetum.blocktypes import BLOCK_TYPES
from trapetum.errors import CheckpointError, FormatError, RecipeError, UnsupportedModelError
from trapetum.export import export_artifact, plan_export
from trapetum.export.gguf_plan import plan_gguf
from trapetum.export.gguf_ternary import pack_ternary, ternary_fit
from trapetum.export.plan import ExportRequest
from trapetum.formats.gguf import GgufFile
from trapetum.formats.source import open_source
from trapetum.tensors import BlockTensor, CodebookTensor, DenseTensor, TernaryTensor


class MemorySource:
    """A model in memory: tensors by name, files of a folder."""

    kind = "artifact"

    def __init__(self, folder, tensors):
        self.path, self.tensors, self.notes = folder, tensors, []
        self.config = json.loads((folder / "config.json").read_text())

    def names(self):
        return list(self.tensors)

    def shape(self, name):
        return self.tensors[name].shape

    def dtype(self, name):
        tensor = self.tensors[name]
        return tensor.values.dtype if isinstance(tensor, DenseTensor) else np.dtype(np.float32)

    def layout(self, name):
        return self.tensors[name].layout

    def load(self, name, rows=None):
        tensor = self.tensors[name]
        if rows is None:
            return tensor
        match tensor:
            case DenseTensor():
                return DenseTensor(tensor.values.reshape(tensor.rows, -1)[rows])
            case TernaryTensor():
                return TernaryTensor(tensor.codes[rows], tensor.scales[rows], tensor.levels, tensor.rotation)
            case BlockTensor():
                return BlockTensor(tensor.type, tensor.blocks[rows])
            case CodebookTensor():
                return CodebookTensor(tensor.codes[rows], tensor.codebook[rows])

    def release(self, name, rows=None):
        pass

    def side_files(self):
        return sorted(self.path.glob("*.json"))


def with_linears(folder, make):
    """The model of a folder with every matrix of its layers replaced by ``make(shape)``."""
    with open_source(folder) as source:
        tensors = {n: DenseTensor(np.array(source.load(n).values)) for n in source.names()}
    for name, tensor in tensors.items():
        if "_proj.weight" in name:
            tensors[name] = make(tensor.shape)
    return MemorySource(folder, tensors)


def ternary(rng, shape, group=128, levels=3, dtype=np.float16):
    scales = (rng.standard_normal((shape[0], shape[1] // group)) * 0.05).astype(dtype)
    return TernaryTensor(rng.integers(0, levels, shape, dtype=np.uint8), scales, levels)


# ---------------------------------------------------------------------------- types
def test_auto_adds_at_most_a_tenth_of_the_error(artifact, tmp_path):
    with plan_export(artifact, "gguf", tmp_path / "m.gguf") as plan:
        path = plan.write()
    assert any("--scheme gguf:Q4_K" in note for note in plan.notes)
    rows = {r.name: r for r in plan.rows}
    with open_source(path) as stored, trapetum.open_artifact(artifact) as art, GgufFile.open(path) as file:
        for gguf_name, hf in (
            ("blk.1.ffn_up.weight", "mlp.up_proj"),
            ("blk.1.attn_k.weight", "self_attn.k_proj"),
        ):
            name = f"model.layers.1.{hf}.weight"
            wanted = art[name].dequantize().astype(np.float64)
            added = np.square(stored.load(name).dequantize() - wanted).sum() / np.square(wanted).sum()
            own = art.records[name].relative_error
            assert added == pytest.approx(rows[gguf_name].relative_error, rel=1e-6)
            assert added <= 0.1 * own
            assert file.tensors[gguf_name].type_name == "Q6_K"
            # The next smaller type would have added more.
            smaller = trapetum.quantize.block_search.fit_blocks(
                wanted.astype(np.float32), "Q5_K"
            ).dequantize()
            assert np.square(smaller - wanted).sum() / np.square(wanted).sum() > 0.1 * own


def test_source_replaces_decoded_values(artifact, demo_model, tmp_path):
    with plan_export(artifact, "gguf", tmp_path / "m.gguf", source=demo_model) as plan:
        path = plan.write()
    name = "model.layers.0.mlp.up_proj.weight"
    with (
        open_source(path) as stored,
        open_source(demo_model) as source,
        trapetum.open_artifact(artifact) as art,
    ):
        wanted = source.load(name).dequantize().astype(np.float64)
        error = np.square(stored.load(name).dequantize() - wanted).sum() / np.square(wanted).sum()
        assert error <= 1.1 * art.records[name].relative_error
        assert stored.load(name).nbits_per_weight < 5


def test_exact_codebooks_become_float16(tiny_model, tmp_path):
    rng = np.random.default_rng(1)
    palette = rng.standard_normal(8).astype(np.float16).astype(np.float32)

    def edit(name, values):
        return rng.choice(palette, values.shape) if "_proj" in name else values

    folder = tiny_model(edit=edit)
    trapetum.quantize_model(folder, tmp_path / "artifact", bits=4)
    path = export_artifact(tmp_path / "artifact", "gguf", tmp_path / "m.gguf")
    with open_source(path) as stored, open_source(folder) as source:
        for name in source.names():
            if "_proj" in name:
                assert stored.load(name).to_arrays()[""].dtype == np.float16
                assert np.array_equal(stored.load(name).dequantize(), source.load(name).dequantize())


def test_a_type_gives_way_where_rows_do_not_fit(tiny_model, tmp_path):
    folder = tiny_model(hidden_size=96, intermediate_size=160, head_dim=32)
    trapetum.quantize_model(folder, tmp_path / "artifact", bits=4)
    with plan_export(tmp_path / "artifact", "gguf", tmp_path / "m.gguf", gguf_type="q4_k") as plan:
        details = {r.name: r.detail for r in plan.rows}
    assert "Q5_0" in details["blk.0.attn_q.weight"]
    assert "rows of 96 are not whole blocks of Q4_K" in details["blk.0.attn_q.weight"]
    said = [note for note in plan.notes if "whole blocks" in note]
    assert "rows of 96 are not whole blocks of Q4_K; Q5_0 is taken instead: blk.0.attn_q.weight; " in said[0]
    assert all(note.endswith(" more") or note.count(";") < 5 for note in said)


def test_a_type_that_gives_way_to_an_exact_one_is_told(tiny_model, tmp_path):
    """Rows of 100 fit no block: the file is larger than was asked for, and the table shows only what is not exact."""
    trapetum.quantize_model(tiny_model(hidden_size=100, head_dim=20), tmp_path / "a", bits=4)
    with plan_export(tmp_path / "a", "gguf", tmp_path / "m.gguf", gguf_type="Q4_K") as plan:
        assert any("rows of 100 are not whole blocks of Q4_K; F16 is taken instead" in n for n in plan.notes)


def test_blocks_travel_unchanged(tiny_model, tmp_path):
    rng = np.random.default_rng(2)

    def make(shape):
        kind = BLOCK_TYPES["Q4_K"]
        blocks = rng.integers(0, 256, (shape[0], kind.row_bytes(shape[1])), dtype=np.uint8)
        return BlockTensor("Q4_K", blocks)

    source = with_linears(tiny_model("qwen3", head_dim=64), make)
    path = plan_gguf(ExportRequest(source, tmp_path / "m.gguf")).write()
    with GgufFile.open(path) as file:
        for layer in range(2):
            for ours, theirs in (("attn_q", "self_attn.q_proj"), ("ffn_down", "mlp.down_proj")):
                stored = file.raw(f"blk.{layer}.{ours}.weight")
                blocks = source.load(f"model.layers.{layer}.{theirs}.weight").blocks
                assert stored.tobytes() == blocks.tobytes()


@pytest.mark.parametrize("kind", ["Q2_0", "PQ2_0", "PTQ1_0", "TQ2_0", "TQ1_0"])
def test_ternary_types_are_lossless(kind, tiny_model, tmp_path):
    rng = np.random.default_rng(3)
    group = 256 if kind.startswith("TQ") else 128
    source = with_linears(tiny_model(), lambda shape: ternary(rng, shape, group))
    request = ExportRequest(source, tmp_path / "m.gguf", gguf_type=kind)
    plan = plan_gguf(request)
    path = plan.write()
    assert all(r.relative_error is None for r in plan.rows)
    with GgufFile.open(path) as file:
        assert file.metadata["general.file_type"] == {
            "Q2_0": 41, "PQ2_0": 141, "PTQ1_0": 143, "TQ2_0": 37, "TQ1_0": 36,
        }[kind]  # fmt: skip
        assert file.tensors["blk.0.ffn_up.weight"].type_id == BLOCK_TYPES[kind].id
    with open_source(path) as back:
        for name in source.names():
            assert np.array_equal(back.load(name).dequantize(), source.load(name).dequantize())
    if kind.startswith("TQ"):
        gguf = pytest.importorskip("gguf")
        (v,) = (t for t in gguf.GGUFReader(path).tensors if t.name == "blk.1.attn_v.weight")
        wanted = source.load("model.layers.1.self_attn.v_proj.weight").dequantize()
        assert np.array_equal(gguf.quants.dequantize(v.data, v.tensor_type), wanted)
    said = " ".join(plan.notes)
    assert ("stock llama.cpp refuses" in said) == kind.startswith("P")


def test_groups_that_agree_or_are_zero_fit_a_larger_block(tiny_model, tmp_path):
    rng = np.random.default_rng(4)
    tensor = ternary(rng, (4, 512))
    source = with_linears(tiny_model(), lambda shape: tensor)
    kind = BLOCK_TYPES["TQ2_0"]
    assert "different scales" in ternary_fit(source, "model.layers.0.mlp.up_proj.weight", kind).problem
    codes, scales = tensor.codes.copy(), tensor.scales.copy()
    scales[:, 1] = scales[:, 0]
    codes[:, 256:384] = 1  # zeros agree with any scale
    tensor = TernaryTensor(codes, scales)
    source = with_linears(tiny_model(), lambda shape: tensor)
    assert not ternary_fit(source, "model.layers.0.mlp.up_proj.weight", kind).problem
    assert np.array_equal(kind.decode(pack_ternary(tensor, kind)), tensor.dequantize())


@pytest.mark.parametrize(
    ("kind", "levels", "scales", "said"),
    [
        ("PTQ1_0", 4, np.float16, "fourth level"),
        ("TQ2_0", 4, np.float16, "fourth level"),
        ("TQ2_0", 3, np.float16, "different scales"),
        ("Q2_0", 3, np.float32, "float16 cannot hold"),
    ],
)
def test_ternary_with_loss_is_refused_for_all_tensors_at_once(
    kind, levels, scales, said, tiny_model, tmp_path
):
    rng = np.random.default_rng(5)
    source = with_linears(tiny_model(), lambda shape: ternary(rng, shape, 128, levels, scales))
    with pytest.raises(UnsupportedModelError, match=said) as caught:
        plan_gguf(ExportRequest(source, tmp_path / "m.gguf", gguf_type=kind))
    assert caught.value.message.count(f" as {kind}: ") == 8  # one line, whatever the model's size
    assert caught.value.message.endswith("; and 6 more")
    assert not list(tmp_path.glob("*.gguf"))


def test_one_float32_scale_goes_beside_the_codes(tiny_model, llama_cpp, tmp_path):
    rng = np.random.default_rng(6)

    def make(shape):
        scale = np.float32(1 / np.sqrt(shape[1]) * 1.2345678)
        return TernaryTensor(
            rng.integers(0, 3, shape, dtype=np.uint8), np.full((shape[0], shape[1] // 128), scale, np.float32)
        )

    folder = tiny_model("qwen3", head_dim=64)
    source = with_linears(folder, make)
    path = plan_gguf(ExportRequest(source, tmp_path / "m.gguf")).write()
    with GgufFile.open(path) as file:
        scale = file.load("blk.0.attn_q.scale").values
        wanted = source.load("model.layers.0.self_attn.q_proj.weight")
        assert scale.shape == (1,)
        assert scale[0] == wanted.scales[0, 0]
        codes = file.load("blk.0.attn_q.weight").dequantize()
        assert np.array_equal(codes * scale, wanted.dequantize())
    with open_source(path) as back:
        for name in source.names():
            assert np.array_equal(back.load(name).dequantize(), source.load(name).dequantize())
    # Engines multiply: the same model with its scales rounded to float16 answers nearly alike.
    rounded = MemorySource(folder, dict(source.tensors))
    for name, tensor in rounded.tensors.items():
        if isinstance(tensor, TernaryTensor):
            rounded.tensors[name] = TernaryTensor(tensor.codes, tensor.scales.astype(np.float16))
    other = plan_gguf(ExportRequest(rounded, tmp_path / "rounded.gguf")).write()
    a, b = (llama_cpp(file).log_probabilities([1, 9, 77, 140]) for file in (path, other))
    assert 0 < np.abs(a - b).max() < 0.05


# ---------------------------------------------------------------------------- rotation
def test_rotation_travels_and_never_under_a_stock_type(tiny_model, tmp_path):
    artifact = tmp_path / "artifact"
    trapetum.quantize_model(tiny_model(), artifact, scheme="ternary", hadamard=True)
    for kind in ("Q2_0", "F16", "TQ2_0"):
        with pytest.raises(UnsupportedModelError, match=r"rotated.*; and \d+ more") as caught:
            export_artifact(artifact, "gguf", tmp_path / "m.gguf", gguf_type=kind)
        said = caught.value.message.replace(str(tmp_path), "")
        assert len(said) < 1500  # of a model of any size
    path = export_artifact(artifact, "gguf", tmp_path / "m.gguf")
    with GgufFile.open(path) as file, trapetum.open_artifact(artifact) as art:
        kv = {k.removeprefix("prism.hadamard."): v for k, v in file.kv.items() if k.startswith("prism.")}
        assert {k: (v.type.name, v.item_type and v.item_type.name) for k, v in kv.items()} == {
            "version": ("UINT32", None),
            "block_size": ("UINT32", None),
            "transform": ("STRING", None),
            "axis": ("STRING", None),
            "sign_mode": ("STRING", None),
            "sign_widths": ("ARRAY", "INT32"),
            "sign_values": ("ARRAY", "INT32"),
            "weight_names": ("ARRAY", "STRING"),
        }
        assert kv["version"].value == 1
        assert kv["block_size"].value == 256
        assert kv["sign_widths"].value.tolist() == [256, 512]
        assert len(kv["sign_values"].value) == 768
        assert set(np.unique(kv["sign_values"].value)) == {-1, 1}
        folded = list(kv["weight_names"].value)
        rotated = [n for n in art.names() if art.records[n].params.get("rotation")]
        assert len(folded) == len(rotated) == len(set(folded))
        assert all(file.tensors[n].type_name == "PQ2_0" for n in folded)
    ids = [1, 9, 77, 140]
    assert np.array_equal(trapetum.load(path).logits(ids), trapetum.load(artifact).logits(ids))
    pytest.importorskip("xllamacpp")
    from xllamacpp import CommonParams, Server

    params = CommonParams()
    params.model.path = str(path)
    with pytest.raises(RuntimeError):
        Server(params)


# ---------------------------------------------------------------------------- what is refused, and what is said
def test_options_without_effect_are_refused(demo_model, artifact, tmp_path):
    out = tmp_path / "m.gguf"
    with pytest.raises(RecipeError, match="allowed are AUTO"):
        export_artifact(artifact, "gguf", out, gguf_type="Q9_9")
    with pytest.raises(RecipeError, match="no ternary tensors"):
        export_artifact(artifact, "gguf", out, gguf_type="PQ2_0")
    with pytest.raises(RecipeError, match="no codebooks") as caught:
        export_artifact(demo_model, "gguf", out, gguf_type="Q4_K")
    assert "--scheme gguf:Q4_K" in str(caught.value.hint)
    with pytest.raises(RecipeError, match="dtype"):
        export_artifact(artifact, "gguf", out, dtype="f16")
    with pytest.raises(RecipeError, match="source"):
        export_artifact(demo_model, "gguf", out, source=demo_model)


def test_what_a_family_does_not_read_is_refused(tiny_model, tmp_path):
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    folder = tiny_model(
        "qwen2",
        biases=("q", "k", "v", "o"),
        rope_parameters={**llama3, "original_max_position_embeddings": 32},
    )
    with pytest.raises(UnsupportedModelError) as caught:
        export_artifact(folder, "gguf", tmp_path / "m.gguf")
    assert "o_proj.bias" in str(caught.value)
    assert "rope_freqs.weight" in str(caught.value)


def test_values_that_no_engine_survives(tiny_model, tmp_path):
    def spoil(value):
        def edit(name, values):
            if "layers.1.mlp.up_proj" in name:
                values = values.copy()
                values[3, 5] = value
            return values

        return edit

    with pytest.raises(CheckpointError, match=r"up_proj.*not finite"):
        export_artifact(tiny_model(edit=spoil(np.nan)), "gguf", tmp_path / "m.gguf")
    with pytest.raises(FormatError, match=r"up_proj.*F16"):
        export_artifact(tiny_model(edit=spoil(1e6)), "gguf", tmp_path / "m.gguf", gguf_type="F16")
    assert not list(tmp_path.glob("*.gguf"))


def test_kept_weights_keep_their_bits(tiny_model, tmp_path):
    def edit(name, values):
        if name == "model.embed_tokens.weight":
            values = values.astype(ml_dtypes.bfloat16)
            values[0, :4] = np.array([2**-133, -0.0, 3.38e38, 2**-127], ml_dtypes.bfloat16)
        return values

    folder = tiny_model(edit=edit)
    path = export_artifact(folder, "gguf", tmp_path / "m.gguf")
    with GgufFile.open(path) as file, open_source(folder) as source:
        stored = file.load("token_embd.weight").values
        assert stored.tobytes() == source.load("model.embed_tokens.weight").values.tobytes()


def test_card_and_windows(tiny_model, tmp_path):
    folder = tiny_model("mistral", sliding_window=64, eos_token_id=[2, 5])
    (folder / "README.md").write_text(
        "---\nlicense:\n- apache-2.0\n- mit\nlanguage:\n- en\n- no\ntags: []\nbase_model: acme/big\n---\n# Tiny\n",
        encoding="utf-8",
    )
    with plan_export(folder, "gguf", tmp_path / "m.gguf") as plan:
        path = plan.write()
    assert any("sliding window of 64" in note for note in plan.notes)
    with GgufFile.open(path) as file:
        meta = file.metadata
        assert meta["general.license"] == "apache-2.0, mit"
        assert list(meta["general.languages"]) == ["en", "no"]
        assert meta["general.base_model.0.organization"] == "acme"
        assert meta["general.base_model.0.name"] == "big"
        assert meta["tokenizer.ggml.eos_token_id"] == 2
        assert meta["tokenizer.ggml.eot_token_id"] == 5
        assert meta["general.name"] == "tiny-mistral"


def test_buffers_and_foreign_tensors_are_left_out_aloud(tiny_model, tmp_path):
    folder = tiny_model()
    with open_source(folder) as source:
        tensors = {n: DenseTensor(np.array(source.load(n).values)) for n in source.names()}
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = DenseTensor(np.ones(32, np.float32))
    tensors["model.vision." + "x" * 80] = DenseTensor(np.ones((2, 2), np.float32))
    plan = plan_gguf(ExportRequest(MemorySource(folder, tensors), tmp_path / "m.gguf"))
    assert any("2 tensors are not part" in note and "inv_freq" in note for note in plan.notes)
    with GgufFile.open(plan.write()) as file:
        assert len(file.tensors) == len(plan.rows) == len(tensors) - 2
