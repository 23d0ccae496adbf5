"""Delta nets as GGUF: in llama.cpp itself, back through our reader, and rotated as the Prism fork expects them."""

from __future__ import annotations

import numpy as np
import pytest

import trapetum
from trapetum.formats.gguf import GgufFile
from trapetum.formats.gguf_delta import DeltaSizes
from trapetum.formats.gguf_source import GgufSource
from trapetum.formats.source import open_source

COMMON = {
    "num_hidden_layers": 4,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "partial_rotary_factor": 0.5,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
}
FAMILIES = {
    "qwen3_5_text": COMMON,
    "qwen3_5_moe_text": COMMON | EXPERTS,
    "qwen3_next": COMMON | EXPERTS,
}
IDS = (np.arange(60) * 37 % 500 + 3).tolist()


def rates(name, values):
    """Plausible rates: they must not forget everything at once."""
    return np.log(np.linspace(0.1, 4, values.size)).astype(np.float32) if name.endswith("A_log") else values


@pytest.mark.parametrize("family", FAMILIES)
def test_llama_cpp_computes_the_same(tmp_path, tiny_model, llama_cpp, family):
    model = tiny_model(family, edit=rates, **FAMILIES[family])
    for kind, limit in (("F32", 2e-5), ("F16", 5e-3)):
        path = tmp_path / f"{kind}.gguf"
        trapetum.export_artifact(model, "gguf", path, gguf_type=kind)
        with trapetum.load(model) as ours:
            assert llama_cpp(path).worst(ours, [IDS[:7], IDS]) <= limit


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("heads", [(2, 4), (2, 2), (1, 3)])
def test_a_file_is_read_back_as_the_checkpoint(tmp_path, tiny_model, family, heads):
    sizes = {"linear_num_key_heads": heads[0], "linear_num_value_heads": heads[1]}
    model = tiny_model(family, edit=rates, **FAMILIES[family] | sizes)
    trapetum.export_artifact(model, "gguf", tmp_path / "x.gguf", gguf_type="F32")
    with trapetum.load(model) as a, trapetum.load(tmp_path / "x.gguf") as b:
        expected, got = a.logits(IDS), b.logits(IDS)
    assert np.abs(got - expected).max() < 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize(("family", "heads"), [*((f, (2, 4)) for f in FAMILIES), ("qwen3_next", (1, 3))])
def test_a_file_goes_back_to_what_transformers_loads(tmp_path, tiny_model, family, heads):
    """Under the names of the checkpoint, fused ones of Qwen3-Next too, from plain numbers and from blocks."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    sizes = {"linear_num_key_heads": heads[0], "linear_num_value_heads": heads[1]}
    model = tiny_model(family, edit=rates, **FAMILIES[family] | sizes)
    trapetum.quantize_model(model, tmp_path / "blocks", scheme="gguf:Q8_0")
    for kind, made in (("F32", model), ("auto", tmp_path / "blocks")):
        file = trapetum.export_artifact(made, "gguf", tmp_path / f"{kind}.gguf", gguf_type=kind)
        back = trapetum.export_artifact(file, "hf", tmp_path / kind)
        with open_source(back) as ours, open_source(model) as theirs:
            assert set(ours.names()) == set(theirs.names())
        loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
            back, dtype=torch.float32, output_loading_info=True
        )
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        with torch.no_grad():
            found = loaded(torch.tensor([IDS])).logits[0].numpy()
        with trapetum.load(file) as read:
            expected = read.logits(IDS)
        assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()


def test_tiled_heads_are_a_permutation_that_the_reader_undoes():
    sizes = DeltaSizes(3, 12, 8, 4, tiled=True)
    assert sorted(sizes.heads) == list(range(12))
    assert sizes.heads[:4].tolist() == [0, 4, 8, 1]  # first value head of each key head, then the second ...
    for part in ("in_proj_qkv", "in_proj_z", "in_proj_a", "conv1d"):
        rows = sizes.rows(part)
        assert sorted(rows) == list(range(rows.size))
    assert sizes.rows("out_proj") is None
    assert DeltaSizes(3, 3, 8, 4, tiled=True).rows("in_proj_z") is None


def trained(name, values):
    """Rates and norms as training leaves them: a norm less one, or the logarithm of a rate, is no float32 number."""
    if "norm" in name:
        return np.geomspace(0.01, 40, values.size).astype(np.float32) - np.float32(1)
    return rates(name, values)


def test_rotated_ternary_file_is_read_run_and_written_again(tmp_path, tiny_model):
    """The shape of Bonsai-2: PQ2_0 with a Hadamard rotation, the columns of ssm_out left where the model has them."""
    sizes = {"hidden_size": 256, "linear_value_head_dim": 128, "linear_key_head_dim": 128, "head_dim": 128}
    model = tiny_model("qwen3_5_text", edit=trained, **COMMON | sizes)
    trapetum.quantize_model(model, tmp_path / "art", scheme="ternary", hadamard=True)
    first = tmp_path / "first.gguf"
    trapetum.export_artifact(tmp_path / "art", "gguf", first)
    file = GgufFile.open(first)
    assert file.metadata["prism.hadamard.gdn_v_grouped"] is True
    folded = file.metadata["prism.hadamard.weight_names"]
    assert {"blk.0.ssm_out.weight", "blk.0.attn_qkv.weight", "blk.3.attn_q.weight"} <= set(folded)
    assert not any("ssm_alpha" in name or "ssm_beta" in name for name in folded)
    assert file.tensors["blk.0.ssm_out.weight"].type_name == "PQ2_0"
    file.close()
    with trapetum.load(tmp_path / "art") as a, trapetum.load(first) as b:
        expected, got = a.logits(IDS), b.logits(IDS)
    assert np.abs(got - expected).max() < 1e-5 * np.abs(expected).max()
    second = tmp_path / "second.gguf"
    trapetum.export_artifact(first, "gguf", second)
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize("scheme", ["gguf:Q8_0", "gguf:Q4_K", None])
@pytest.mark.parametrize("family", FAMILIES)
def test_any_file_is_written_again_byte_for_byte(tmp_path, tiny_model, family, scheme):
    """Blocks that heads cut, too: nothing changes places from file to file."""
    model = tiny_model(family, edit=trained, **FAMILIES[family])
    if scheme is not None:
        trapetum.quantize_model(model, tmp_path / "art", scheme=scheme)
        model = tmp_path / "art"
    first = trapetum.export_artifact(model, "gguf", tmp_path / "first.gguf")
    second = trapetum.export_artifact(first, "gguf", tmp_path / "second.gguf")
    assert first.read_bytes() == second.read_bytes()


def test_a_scale_beside_blocks_is_not_lost(tmp_path, tiny_model, monkeypatch):
    """Blocks that heads cut are taken over as they are, unless the file multiplies them by a number."""
    model = tiny_model("qwen3_5_text", edit=rates, **COMMON)
    trapetum.quantize_model(model, tmp_path / "art", scheme="gguf:Q4_K")
    first = trapetum.export_artifact(tmp_path / "art", "gguf", tmp_path / "first.gguf")
    name, opened = "model.layers.0.linear_attn.out_proj.weight", GgufSource.open

    def scaled(*args, **options):
        source = opened(*args, **options)
        source._scales[name] = np.float32(3)
        return source

    with open_source(first) as source:
        assert source.layout(name) == "dense"
        expected = source.load(name).dequantize() * np.float32(3)
    with monkeypatch.context() as patch:
        patch.setattr(GgufSource, "open", scaled)
        second = trapetum.export_artifact(first, "gguf", tmp_path / "second.gguf")
    with open_source(second) as source:
        np.testing.assert_array_equal(source.load(name).dequantize(), expected)


def test_blocks_wider_than_a_head_are_searched_again_and_read_back(tmp_path, tiny_model, llama_cpp):
    """Value heads of 64 in blocks of 256, as 128 in most files of 4 bits: no order of heads keeps the blocks."""
    model = tiny_model("qwen3_5_text", edit=rates, **COMMON)
    trapetum.quantize_model(model, tmp_path / "art", scheme="gguf:Q4_K")
    name, path = "model.layers.0.linear_attn.out_proj.weight", tmp_path / "x.gguf"
    with trapetum.export.plan_export(tmp_path / "art", "gguf", path) as plan:
        plan.write()
        (row,) = [r for r in plan.rows if r.name == "blk.0.ssm_out.weight"]
    assert row.action == "quantized"
    assert 0 < row.relative_error < 1e-2  # what Q4_K adds to values that were Q4_K in another order
    with GgufFile.open(path) as file:
        assert file.tensors["blk.0.ssm_out.weight"].type_name == "Q4_K"
    with open_source(path) as ours, trapetum.open_artifact(tmp_path / "art") as art:
        assert ours.layout(name) == "dense"
        got, expected = ours.load(name).dequantize(), art[name].dequantize()
        error = ((got - expected) ** 2).sum() / (expected**2).sum()
        assert error == pytest.approx(row.relative_error, rel=1e-3)
        np.testing.assert_array_equal(ours.load(name, slice(3, 5)).dequantize(), got[3:5])
    with trapetum.load(path) as read:
        assert llama_cpp(path).worst(read, [IDS]) <= 0.1  # engines round activations to eight bits
    report = trapetum.quantize_model(path, tmp_path / "again", scheme="asis")
    assert not any(r.name == name and r.quantized for r in report.rows)
    with trapetum.open_artifact(tmp_path / "again") as again, open_source(path) as ours:
        np.testing.assert_array_equal(again[name].dequantize(), ours.load(name).dequantize())


def test_ternary_heads_that_are_no_whole_groups_are_refused(tmp_path, tiny_model):
    model = tiny_model("qwen3_5_text", edit=rates, **COMMON)  # value heads of 64, groups of 128
    trapetum.quantize_model(model, tmp_path / "art", scheme="ternary")
    with pytest.raises(trapetum.errors.TrapetumError, match="no whole"):
        trapetum.export_artifact(tmp_path / "art", "gguf", tmp_path / "x.gguf")
    assert not (tmp_path / "x.gguf").exists()


def test_wrong_sizes_are_refused(tmp_path, tiny_model):
    model = tiny_model("qwen3_5_text", edit=rates, **COMMON)
    path = trapetum.export_artifact(model, "gguf", tmp_path / "x.gguf", gguf_type="F32")
    data = path.read_bytes()
    key = b"qwen35.ssm.time_step_rank"
    at = data.index(key) + len(key) + 4
    path.write_bytes(data[:at] + (3).to_bytes(4, "little") + data[at + 4 :])
    with pytest.raises(trapetum.errors.FormatError, match="value heads"):
        open_source(path).shape("model.layers.0.linear_attn.in_proj_z.weight")
