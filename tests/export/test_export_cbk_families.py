"""DeepSeek, Gemma 2 and fused checkpoints as .cbk: every magic, every trap of the format."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

import trapetum
from trapetum.errors import RecipeError, UnsupportedModelError
from trapetum.export import export_artifact, plan_export
from trapetum.formats.cbk import CbkFile
from trapetum.formats.safetensors_writer import Entry, SafetensorsWriter
from trapetum.models.config import parse_config
from trapetum.quantize.kmeans import fit_codebooks

LAYER1 = "model.layers.1."
V3 = json.loads(Path(__file__).with_name("deepseek_v3.json").read_text())
V2_LITE = {
    **V3,
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "q_lora_rank": None,
    "n_shared_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
}
FEW = {**V3, "n_routed_experts": 2, "n_group": 1, "num_experts_per_tok": 1}
GEMMA = {
    "architectures": ["Gemma2ForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "query_pre_attn_scalar": 128,
    "sliding_window": 16,
    "max_position_embeddings": 64,
    "attn_logit_softcapping": 5.0,
    "final_logit_softcapping": 3.0,
}
PHI3 = {
    "architectures": ["Phi3ForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "tie_word_embeddings": False,
}
HEAD4 = {"bits": 4, "rules": [{"role": ["head"], "bits": 4}]}
EXPERTS2 = {
    "bits": 4,
    "rules": [
        {"glob": ["*.mlp.experts.*"], "scheme": "additive", "bits": 2, "effort": "fast"},
        {"role": ["head"], "bits": 4},
    ],
}
SHARED8 = {"bits": 4, "rules": [{"glob": ["*.shared_experts.*"], "bits": 8}]}


def write(folder: Path, config: dict, extra=()) -> Path:
    """A random checkpoint of the config's shapes."""
    parsed = parse_config(config)
    rng = np.random.default_rng(3)
    shapes = {**parsed.architecture.expected_shapes(parsed), **dict(extra)}
    folder.mkdir(parents=True)
    entries = [Entry(n, np.dtype(np.float32), s) for n, s in shapes.items()]
    with SafetensorsWriter(folder / "model.safetensors", entries) as writer:
        for entry in entries:
            gemma = "Gemma" in config["architectures"][0]
            wide = "embed" in entry.name and not gemma
            scale = 0.1 if len(entry.shape) == 1 else 1 if wide else entry.shape[-1] ** -0.5
            one = "norm" in entry.name and not gemma
            writer.write(entry.name, (rng.standard_normal(entry.shape) * scale + one).astype(np.float32))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def pressed(tmp_path, config, recipe, magic=None):
    """(artifact, open .cbk): quantized, exported."""
    write(tmp_path / "m", config)
    trapetum.quantize_model(tmp_path / "m", tmp_path / "a", recipe=recipe)
    export_artifact(tmp_path / "a", "cbk", tmp_path / "c", magic=magic)
    return trapetum.open_artifact(tmp_path / "a"), CbkFile.open(tmp_path / "c")


@pytest.mark.parametrize(
    ("config", "recipe", "magic", "expected"),
    [
        (V2_LITE, HEAD4, None, "CBKD"),
        (V2_LITE, SHARED8, None, "CBKE"),
        (V3, HEAD4, None, "CBKR"),
        (V3, SHARED8, None, "CBKS"),
        (V3, SHARED8, "CBKR", "CBKR"),
        pytest.param(FEW, EXPERTS2, None, "CBKV", marks=pytest.mark.slow),
    ],
)
def test_records_are_the_artifact(tmp_path, config, recipe, magic, expected):
    artifact, cbk = pressed(tmp_path, config, recipe, magic)
    assert cbk.header.layout.magic == expected
    assert list(cbk.faults()) == []
    report = {row["name"]: row for row in cbk.manifest["report"]["tensors"]}
    exact = 0
    for name in artifact.names():
        values = artifact[name].dequantize()
        record = cbk.records[name]
        whole = cbk.load(name).dequantize()
        part = whole[tuple(slice(0, n) for n in values.shape)]
        if report[name]["action"] == "exact":
            assert np.array_equal(part, values), name
            exact += 1
        elif report[name]["action"] == "rounded":
            assert np.array_equal(part, values.astype(np.float16)), name
        else:
            error = float(np.square(part - values).sum() / np.square(values).sum())
            assert error == pytest.approx(report[name]["relative_error"], rel=1e-3), name
            assert error < 0.02
        assert not whole[values.shape[0] :].any(), name
        assert record.shape >= values.shape
    assert exact > len(artifact.names()) - 8
    sizes = cbk.header.sizes
    assert (sizes["inter_pad"], sizes["moe_inter_pad"], sizes["vocab"]) == (512, 256, 512)


@pytest.mark.parametrize(
    ("config", "recipe"),
    [
        (V2_LITE, HEAD4),
        (V3, HEAD4),
        pytest.param(FEW, EXPERTS2, marks=pytest.mark.slow),
        (GEMMA, HEAD4),
    ],
)
def test_the_file_runs_as_the_artifact(tmp_path, config, recipe):
    """But for float16 of embedding and small matrices (and of Gemma's head, which is fitted)."""
    artifact, cbk = pressed(tmp_path, config, recipe)
    artifact.close(), cbk.close()
    ids = np.random.default_rng(1).integers(0, 500, 16)
    with trapetum.load(tmp_path / "a") as one, trapetum.load(tmp_path / "c") as two:
        a, b = one.logits(ids), two.logits(ids)
    tied = config is GEMMA
    assert np.abs(a - b[:, : a.shape[1]]).max() / np.abs(a).max() < (0.2 if tied else 2e-3)
    assert np.mean(a.argmax(1) == b.argmax(1)) > (0.6 if tied else 0.99)


def test_a_softmax_router_with_query_latent_has_a_bias_of_zeros(tmp_path):
    """A reader of CBKR takes a score bias whatever the router; without it every later byte would be shifted."""
    config = {
        **V3,
        "architectures": ["DeepseekV2ForCausalLM"],
        "topk_method": "group_limited_greedy",
        "norm_topk_prob": False,
    }
    artifact, cbk = pressed(tmp_path, config, HEAD4)
    assert cbk.header.layout.magic == "CBKR"
    assert cbk.header.sizes["sigmoid"] == 0
    bias = cbk.load(LAYER1 + "mlp.gate.e_score_correction_bias").dequantize()
    assert bias.shape == (4,)
    assert not bias.any()
    notes = " ".join(cbk.manifest["report"]["notes"])
    assert "norm_topk_prob" in notes
    assert "group_limited_greedy" in notes
    with trapetum.load(tmp_path / "c") as model:
        assert model.config.sections["experts"].router == "softmax"
        assert np.isfinite(model.logits([1, 2, 3])).all()
    artifact.close(), cbk.close()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({**V3, "n_shared_experts": 2}, "n_shared_experts is 2, not 1"),
        ({**V3, "kv_lora_rank": 96}, "kv_lora_rank is 96, not a power of two"),
        (
            {**V3, "hidden_size": 384, "num_attention_heads": 3, "num_key_value_heads": 3},
            "hidden_size is 384.*is 192, not a multiple of 256",
        ),
        ({**V3, "q_lora_rank": None}, "a sigmoid router without q_lora_rank"),
        ({**V3, "rope_interleave": False}, "pairs of neighbours"),
        (
            {**V3, "moe_layer_freq": 2, "num_hidden_layers": 4, "first_k_dense_replace": 0},
            "dense layers after",
        ),
        (
            {
                **V2_LITE,
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 16,
                    "mscale": 1.0,
                    "mscale_all_dim": 0.5,
                },
            },
            "scales cosine and sine",
        ),
        ({**GEMMA, "query_pre_attn_scalar": 144}, "query_pre_attn_scalar is 144, not head_dim 128"),
        ({**GEMMA, "intermediate_size": 320}, "intermediate_size is 320"),
    ],
)
def test_what_no_field_can_say_is_refused(tmp_path, config, words):
    write(tmp_path / "m", config)
    with pytest.raises(UnsupportedModelError, match=words):
        export_artifact(tmp_path / "m", "cbk", tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_a_bias_of_o_is_refused(tmp_path):
    extra = [(f"model.layers.{i}.self_attn.o_proj.bias", (256,)) for i in range(2)]
    extra += [(f"model.layers.{i}.self_attn.q_a_proj.bias", (96,)) for i in range(2)]
    extra += [(f"model.layers.{i}.self_attn.kv_a_proj_with_mqa.bias", (80,)) for i in range(2)]
    write(tmp_path / "m", {**V3, "attention_bias": True}, extra)
    with pytest.raises(UnsupportedModelError, match=r"bias of kv_a.*bias of o.*bias of q_a"):
        export_artifact(tmp_path / "m", "cbk", tmp_path / "c")


def test_padding_takes_no_part_in_a_fit(tmp_path):
    """down_proj has 96 real inputs of 256: a fit over the padded row would pull a value to 0."""
    write(tmp_path / "m", V3)
    export_artifact(tmp_path / "m", "cbk", tmp_path / "c")
    name = LAYER1 + "mlp.experts.2.down_proj.weight"
    with trapetum.formats.source.open_source(tmp_path / "m") as source, CbkFile.open(tmp_path / "c") as cbk:
        values = source.load(name).dequantize()
        codes, codebook = fit_codebooks(values, 16)
        stored = cbk.load(name)
    assert np.array_equal(stored.codebook, codebook.astype(np.float32))
    assert np.array_equal(stored.codes[:, :96], codes)


def test_a_wanted_magic(tmp_path):
    write(tmp_path / "m", V3)
    for magic, kind in (("CBKS", "S256"), ("CBKV", "A2"), ("CBKR", "S16")):
        with plan_export(tmp_path / "m", "cbk", tmp_path / "c", magic=magic) as plan:
            kinds = {record.kind for record in plan.header.records()}
            assert plan.header.layout.magic == magic
            assert kind in kinds
    for magic in ("CBKD", "CBK3"):
        with pytest.raises(RecipeError, match="CBKR, CBKS, CBKV"):
            export_artifact(tmp_path / "m", "cbk", tmp_path / "c", magic=magic)


@pytest.mark.slow
def test_additive_experts_are_fitted_where_they_are_asked_for(tmp_path):
    write(tmp_path / "m", FEW)
    with plan_export(tmp_path / "m", "cbk", tmp_path / "c", magic="CBKV") as plan:
        plan.write()
        rows = {row.name: row for row in plan.rows}
    row = rows[LAYER1 + "mlp.experts.1.up_proj.weight"]
    assert row.detail.endswith("additive 2x8, fitted to the artifact")
    assert 0 < row.relative_error < 0.15
    with CbkFile.open(tmp_path / "c") as cbk:
        tensor = cbk.load(row.name)
        assert tensor.shape == (256, 256)
        assert not tensor.scales[96:].any()


def test_float16_records_of_quantized_tensors(tmp_path):
    """They are said aloud; a recipe keeps those tensors, and a source gives their values."""
    write(tmp_path / "m", V3)
    trapetum.quantize_model(tmp_path / "m", tmp_path / "a", bits=4)
    name = LAYER1 + "self_attn.kv_b_proj.weight"
    with trapetum.formats.source.open_source(tmp_path / "m") as source:
        values = source.load(name).dequantize()
    with plan_export(tmp_path / "a", "cbk", tmp_path / "x.cbk", source=tmp_path / "m") as plan:
        assert any("6 tensors are quantized" in note for note in plan.notes)
        plan.write()
    with CbkFile.open(tmp_path / "x.cbk") as cbk:
        assert np.array_equal(cbk.load(name).dequantize(), values.astype(np.float16))
    trapetum.quantize_model(tmp_path / "m", tmp_path / "b", recipe="cbk-deepseek")
    with plan_export(tmp_path / "b", "cbk", tmp_path / "y.cbk") as plan:
        assert not any("tensors are quantized" in note for note in plan.notes)
        plan.write()
    with CbkFile.open(tmp_path / "y.cbk") as cbk:
        assert np.array_equal(cbk.load(name).dequantize(), values.astype(np.float16))


def test_from_a_gguf(tmp_path, spm):
    """Halves of latents are joined, stacks of experts cut."""
    write(tmp_path / "m", {**V3, "vocab_size": 512})
    (tmp_path / "m/tokenizer.json").write_text(json.dumps(spm))
    file = export_artifact(tmp_path / "m", "gguf", tmp_path / "m.gguf", gguf_type="F32")
    export_artifact(file, "cbk", tmp_path / "x.cbk")
    export_artifact(tmp_path / "m", "cbk", tmp_path / "y.cbk")
    assert (tmp_path / "x.cbk").read_bytes() == (tmp_path / "y.cbk").read_bytes()


def test_gemma_by_hand(tmp_path):
    """Embedding times 16 = sqrt(256), norms plus one, the head from the unscaled embedding; windows are a note."""
    write(tmp_path / "m", GEMMA)
    with plan_export(tmp_path / "m", "cbk", tmp_path / "x.cbk") as plan:
        plan.write()
        assert any("up to 16 tokens" in note for note in plan.notes)
    raw = (tmp_path / "x.cbk").read_bytes()
    with trapetum.formats.source.open_source(tmp_path / "m") as source:
        embed = source.load("model.embed_tokens.weight").dequantize()
        norm = source.load("model.layers.0.input_layernorm.weight").dequantize()
    assert raw[:4] == b"CBKG"
    assert np.frombuffer(raw, "<f4", 4, 32)[2:].tolist() == [5.0, 3.0]
    start = 48 + 4 * 64
    stored = np.frombuffer(raw, "<f2", 512 * 256, start).reshape(512, 256)
    assert np.array_equal(stored, (embed * 16).astype(np.float16))
    assert np.array_equal(np.frombuffer(raw, "<f4", 256, start + 2 * 512 * 256), norm + np.float32(1))
    with CbkFile.open(tmp_path / "x.cbk") as cbk:
        decoded = cbk.load("model.layers.0.input_layernorm.weight").dequantize()
        assert np.array_equal(decoded + np.float32(1), norm + np.float32(1))
        assert np.abs(decoded - norm).max() < 1e-7
        head = cbk.load("lm_head.weight").dequantize()
    assert np.square(head - embed).sum() / np.square(embed).sum() < 0.02


def test_fused_rows_are_split(tmp_path):
    artifact, cbk = pressed(tmp_path, PHI3, HEAD4)
    assert cbk.header.layout.magic == "CBK3"
    attention, mlp = "model.layers.0.self_attn.", "model.layers.0.mlp."
    qkv = artifact[attention + "qkv_proj.weight"].dequantize()
    both = artifact[mlp + "gate_up_proj.weight"].dequantize()
    parts = {
        attention + "q_proj.weight": qkv[:512],
        attention + "k_proj.weight": qkv[512:768],
        attention + "v_proj.weight": qkv[768:],
        mlp + "gate_proj.weight": both[:512],
        mlp + "up_proj.weight": both[512:],
    }
    for name, values in parts.items():
        assert np.array_equal(cbk.load(name).dequantize(), values), name
    artifact.close(), cbk.close()


SHARED = Path(os.environ.get("TRAPETUM_SHARED", Path(__file__).parents[2] / "../shared")) / "golden/cbk"


@pytest.mark.skipif(not SHARED.is_dir(), reason="golden files are not here")
@pytest.mark.parametrize("name", ["CBK3", "CBKG", "CBKV2"])
def test_golden_logits(name):
    """Files and logits of the reference runtime, which rounds codebooks to float16: 2e-2 and every argmax."""
    expected = np.fromfile(SHARED / f"{name}.logits.f32", "<f4").reshape(5, 512)
    with trapetum.load(SHARED / f"{name}.cbk") as model:
        logits = model.logits([1, 7, 3, 9, 2])
    assert np.array_equal(logits.argmax(1), expected.argmax(1))
    assert np.abs(logits - expected).max() / np.abs(expected).max() < 2e-2
