"""Routed experts on their way out: as llama.cpp computes them, back again, and as Hugging Face folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trapetum
from trapetum.errors import UnsupportedModelError
from trapetum.export import export_artifact, plan_export
from trapetum.export.stacks import MIXED, stacked
from trapetum.formats.gguf import GgufFile
from trapetum.formats.gguf_writer import GgufWriter
from trapetum.formats.source import open_source
from trapetum.models.config import parse_config
from trapetum.quantize.job import quantize_model
from trapetum.tensors import BlockTensor, TernaryTensor

SMALL = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2}
EIGHT = {**SMALL, "num_experts": 8, "num_experts_per_tok": 3}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {**EIGHT, "moe_intermediate_size": 64, "head_dim": 64, "norm_topk_prob": True},
    "qwen2_moe": {
        **EIGHT, "intermediate_size": 256, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 96,
        "biases": ("q", "k", "v"),
    },
    "olmoe": {**EIGHT, "num_key_value_heads": 4},
    "gpt_oss": {
        **SMALL, "intermediate_size": 64, "num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 64,
        "sliding_window": 9, "rope_theta": 150000.0,
        "seed": 2,  # with 0 a prompt has an expert that wins by 2.4e-4, which F16 turns; here 2.9e-3 is the least
    },
}  # fmt: skip
PROMPTS = [np.random.default_rng(n).integers(3, 512, n).tolist() for n in (1, 6, 40)]


def make(tiny_model: Any, family: str, **changes: Any) -> Path:
    """A random model; gpt-oss with every bias that it promises."""
    options = {**FAMILIES[family], **changes}
    if family == "gpt_oss":
        options["biases"] = ("q", "k", "v", "o", "router", "experts_gate", "experts_up", "experts_down")
    return tiny_model(family, **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_llama_cpp_computes_the_same(family: str, tiny_model: Any, llama_cpp: Any, tmp_path: Path) -> None:
    folder = make(tiny_model, family)
    with trapetum.load(folder) as model:
        whole = export_artifact(folder, "gguf", tmp_path / "f32.gguf", gguf_type="F32")
        assert llama_cpp(whole).worst(model, PROMPTS) <= 2e-5
        half = export_artifact(folder, "gguf", tmp_path / "f16.gguf", gguf_type="F16")
        assert llama_cpp(half).worst(model, PROMPTS) <= 5e-3
        with trapetum.load(whole) as again:
            assert again.config.architecture.model_type == family
            assert np.array_equal(again.logits(PROMPTS[-1]), model.logits(PROMPTS[-1]))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_gguf_goes_back_to_the_checkpoint(family: str, tiny_model: Any, tmp_path: Path) -> None:
    """Names, orders and values, bit for bit; gpt-oss with alternating transposed stacks again."""
    folder = make(tiny_model, family)
    file = export_artifact(folder, "gguf", tmp_path / "f32.gguf", gguf_type="F32")
    back = export_artifact(file, "hf", tmp_path / "back")
    with open_source(back) as ours, open_source(folder) as theirs:
        assert set(ours.names()) == set(theirs.names())
        for name in theirs.names():
            assert np.array_equal(ours.load(name).dequantize(), theirs.load(name).dequantize()), name
    numpy = pytest.importorskip("safetensors.numpy")
    stored = numpy.load_file(back / "model.safetensors")
    if family == "gpt_oss":
        assert stored["model.layers.0.mlp.experts.gate_up_proj"].shape == (8, 128, 128)
        assert stored["model.layers.0.mlp.experts.gate_up_proj_bias"].shape == (8, 128)
    else:
        assert not any(n.endswith(".experts.gate_proj.weight") for n in stored)


def test_blocks_of_experts_lie_one_under_the_other(tiny_model: Any, llama_cpp: Any, tmp_path: Path) -> None:
    """Artifact of GGUF blocks: the same bytes in the file, and the engine's answer within its rounding."""
    folder = make(tiny_model, "qwen3_moe")
    quantize_model(folder, tmp_path / "art", scheme="gguf:Q8_0")
    path = export_artifact(tmp_path / "art", "gguf", tmp_path / "q.gguf")
    with GgufFile.open(path) as file, trapetum.open_artifact(tmp_path / "art") as artifact:
        stack = file.load("blk.1.ffn_down_exps.weight")
        assert isinstance(stack, BlockTensor)
        assert (stack.type, stack.shape) == ("Q8_0", (8, 128, 64))
        singles = [artifact[f"model.layers.1.mlp.experts.{e}.down_proj.weight"] for e in range(8)]
        assert np.array_equal(stack.blocks, np.concatenate([t.blocks for t in singles]))
    with trapetum.load(tmp_path / "art") as model:
        assert llama_cpp(path).worst(model, PROMPTS) <= 0.3


def test_ternary_experts_lose_nothing(tiny_model: Any, tmp_path: Path) -> None:
    folder = make(tiny_model, "mixtral")
    quantize_model(folder, tmp_path / "art", scheme="ternary")
    path = export_artifact(tmp_path / "art", "gguf", tmp_path / "t.gguf", gguf_type="Q2_0")
    with GgufFile.open(path) as file, trapetum.open_artifact(tmp_path / "art") as artifact:
        stack = file.load("blk.0.ffn_up_exps.weight").dequantize()
        for e in range(4):
            single = artifact[f"model.layers.0.block_sparse_moe.experts.{e}.w3.weight"]
            assert isinstance(single, TernaryTensor)
            assert np.array_equal(stack[e], single.dequantize())


def test_codebooks_and_mixtures_are_fitted(tiny_model: Any, tmp_path: Path) -> None:
    folder = make(tiny_model, "mixtral")
    recipe = {"bits": 4, "rules": [{"glob": "*experts.2.*", "keep": True}]}
    quantize_model(folder, tmp_path / "art", recipe=recipe)
    with trapetum.open_artifact(tmp_path / "art") as artifact:
        view = stacked(artifact, parse_config(artifact.config))
        name = "model.layers.0.mlp.experts.gate_proj.weight"
        assert view.layout(name) == MIXED
        assert view.shape(name) == (4, 128, 128)
        values = view.load(name).dequantize().reshape(4, 128, 128)
        kept = artifact["model.layers.0.block_sparse_moe.experts.2.w1.weight"].dequantize()
        assert np.array_equal(values[2], kept)
        across = view.load(name, slice(200, 300)).dequantize()
        assert np.array_equal(across, values.reshape(-1, 128)[200:300])
    path = export_artifact(tmp_path / "art", "gguf", tmp_path / "k.gguf", gguf_type="Q8_0")
    with GgufFile.open(path) as file:
        assert file.tensors["blk.0.ffn_gate_exps.weight"].type_name == "Q8_0"
        error = np.square(file.load("blk.0.ffn_gate_exps.weight").dequantize() - values).sum()
        assert error < 1e-3 * np.square(values).sum()


FAULTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "not normalised": ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob is false"),
    "normalised": ("olmoe", {"norm_topk_prob": True}, "norm_topk_prob is true"),
    "plain layer": ("qwen3_moe", {"mlp_only_layers": [1]}, "layer 1 has no experts"),
    "pattern": ("gpt_oss", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    "limit": ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_engines_would_compute_otherwise_is_refused(fault: str, tiny_model: Any, tmp_path: Path) -> None:
    family, changes, text = FAULTS[fault]
    folder = make(tiny_model, family, **changes)
    with (
        pytest.raises(UnsupportedModelError, match=text),
        plan_export(folder, "gguf", tmp_path / "x.gguf", gguf_type="F32"),
    ):
        pass


def test_mxfp4_stays_mxfp4(tiny_model: Any, llama_cpp: Any, tmp_path: Path) -> None:
    """A packed gpt-oss folder -> artifact -> GGUF: the same numbers in the type that engines have for them."""
    numpy = pytest.importorskip("safetensors.numpy")
    gguf = pytest.importorskip("gguf")
    folder = make(tiny_model, "gpt_oss")
    tensors = {k: v for k, v in numpy.load_file(folder / "model.safetensors").items() if ".experts." not in k}
    rng = np.random.default_rng(8)
    for layer in range(2):
        for part, rows, groups in (("gate_up", 128, 4), ("down", 128, 2)):
            stem = f"model.layers.{layer}.mlp.experts.{part}_proj"
            tensors[f"{stem}_blocks"] = rng.integers(0, 256, (8, rows, groups, 16)).astype(np.uint8)
            tensors[f"{stem}_scales"] = rng.integers(121, 125, (8, rows, groups)).astype(np.uint8)
            tensors[f"{stem}_bias"] = (rng.standard_normal((8, rows)) * 0.1).astype(np.float32)
    numpy.save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.embed_tokens"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    quantize_model(folder, tmp_path / "art", scheme="asis")
    path = export_artifact(tmp_path / "art", "gguf", tmp_path / "m.gguf")
    with GgufFile.open(path) as file, open_source(folder) as source:
        for part in ("gate", "up", "down"):
            stack = file.load(f"blk.1.ffn_{part}_exps.weight")
            assert isinstance(stack, BlockTensor)
            assert stack.type == "MXFP4"
            meant = source.load(f"model.layers.1.mlp.experts.{part}_proj.weight").dequantize()
            theirs = gguf.quants.dequantize(stack.blocks, gguf.GGMLQuantizationType.MXFP4)
            assert np.array_equal(theirs.reshape(meant.shape), meant)
    with trapetum.load(folder) as model, trapetum.load(path) as again:
        assert np.array_equal(again.logits(PROMPTS[-1]), model.logits(PROMPTS[-1]))
        assert llama_cpp(path).worst(model, PROMPTS) <= 0.3  # engines round activations to eight bits


def test_a_squeezed_router_is_a_map_to_one_value(tiny_model: Any, tmp_path: Path) -> None:
    """Old converters store the router of a shared expert as a vector."""
    whole = export_artifact(make(tiny_model, "qwen2_moe"), "gguf", tmp_path / "a.gguf", gguf_type="F32")
    flat = tmp_path / "b.gguf"
    with GgufFile.open(whole) as file, GgufWriter(flat) as writer:
        for key, entry in file.kv.items():
            writer.add(key, entry.value, entry.type, entry.item_type)
        for name, info in file.tensors.items():
            writer.add_tensor(name, info.type_name, info.shape[-1:] if "inp_shexp" in name else info.shape)
        writer.begin()
        for name in file.tensors:
            writer.write(name, file.load(name).dequantize())
    with trapetum.load(whole) as one, trapetum.load(flat) as other:
        assert np.array_equal(one.logits(PROMPTS[1]), other.logits(PROMPTS[1]))


def test_blocks_of_a_gguf_are_taken_over(tiny_model: Any, tmp_path: Path) -> None:
    """GGUF with stacks of Q8_0 -> artifact -> GGUF: the same bytes of every stack."""
    folder = make(tiny_model, "mixtral")
    quantize_model(folder, tmp_path / "art", scheme="gguf:Q8_0")
    first = export_artifact(tmp_path / "art", "gguf", tmp_path / "one.gguf")
    quantize_model(first, tmp_path / "again", scheme="asis")
    second = export_artifact(tmp_path / "again", "gguf", tmp_path / "two.gguf")
    with GgufFile.open(first) as one, GgufFile.open(second) as two:
        assert set(one.tensors) == set(two.tensors)
        for name in one.tensors:
            assert one.tensors[name].type_name == two.tensors[name].type_name
            assert np.array_equal(one.raw(name), two.raw(name)), name


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_of_gpt_oss(truncate: bool, tiny_model: Any, llama_cpp: Any, tmp_path: Path) -> None:
    """Engines end the ramp at whole pairs; the family's own models do not, and a file read here says which."""
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "truncate": truncate}
    folder = make(tiny_model, "gpt_oss", rope_scaling=rope)
    with plan_export(folder, "gguf", tmp_path / "y.gguf", gguf_type="F32") as plan:
        assert any("whole pairs" in note for note in plan.notes) is not truncate
        path = plan.write()
    with trapetum.load(folder) as model, trapetum.load(path) as again:
        assert np.array_equal(again.logits(PROMPTS[-1]), model.logits(PROMPTS[-1]))
        assert (llama_cpp(path).worst(model, PROMPTS) <= 2e-5) is truncate


def test_one_scale_beside_a_stack_is_refused(tiny_model: Any, tmp_path: Path) -> None:
    """Engines read a scale for each expert there."""

    def edit(name: str, values: np.ndarray) -> np.ndarray:
        return np.sign(values) * np.float32(0.1) if ".experts." in name else values

    quantize_model(make(tiny_model, "mixtral", edit=edit), tmp_path / "art", scheme="asis")
    with (
        pytest.raises(
            UnsupportedModelError, match=r"experts\.gate_proj\.weight as Q2_0: its scale is no float16"
        ),
        plan_export(tmp_path / "art", "gguf", tmp_path / "x.gguf"),
    ):
        pass
