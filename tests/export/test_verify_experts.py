"""Verify compares a file's stacks of experts with the single experts of the source, rows with rows."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from trapetum.export import export_artifact
from trapetum.formats.source import open_source
from trapetum.quantize.job import quantize_model
from trapetum.runtime.checks import VerifyReport
from trapetum.runtime.verify import verify_path

SIZES = {
    "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 64, "head_dim": 64, "norm_topk_prob": True,
}  # fmt: skip


def compared(report: VerifyReport) -> tuple[bool | None, str]:
    check = next(c for c in report.checks if c.name == "reconstruction")
    return check.ok, check.detail


def test_stacks_and_single_experts_are_compared(tiny_model: Any, tmp_path: Path) -> None:
    folder = tiny_model("qwen3_moe", **SIZES)
    quantize_model(folder, tmp_path / "art", bits=4)
    file = export_artifact(tmp_path / "art", "gguf", tmp_path / "q.gguf", gguf_type="Q8_0")
    for source in (folder, tmp_path / "art"):
        ok, detail = compared(verify_path(file, source=source))
        assert ok, detail
        assert "another form" not in detail
    with open_source(file) as ours:
        assert detail.startswith(f"{len(ours.names())} tensors")
    turned_about = compared(verify_path(folder, source=file))  # single experts here, stacks there
    assert turned_about[0], turned_about[1]

    numpy = pytest.importorskip("safetensors.numpy")
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    stored = numpy.load_file(other / "model.safetensors")
    a, b = (f"model.layers.0.mlp.experts.{e}.up_proj.weight" for e in (1, 2))
    stored[a], stored[b] = stored[b], stored[a]
    numpy.save_file(stored, other / "model.safetensors")
    ok, detail = compared(verify_path(file, source=other))
    assert not ok
    assert detail.startswith("model.layers.0.mlp.experts.up_proj.weight: relative error 1.0"), detail
    assert "down_proj" not in detail

    stored.pop(a)
    numpy.save_file(stored, other / "model.safetensors")
    ok, detail = compared(verify_path(file, source=other))
    assert not ok
    assert "experts.up_proj.weight: is not in the source" in detail


def test_what_rows_cannot_tell_is_said(tiny_model: Any, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.0")
    torch = pytest.importorskip("torch")
    torch.manual_seed(3)
    config = transformers.Qwen3NextConfig(
        vocab_size=512, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=32,
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32,
        intermediate_size=64,
    )  # fmt: skip
    transformers.Qwen3NextForCausalLM(config).save_pretrained(tmp_path / "m")
    shutil.copy(tiny_model("qwen3_moe", **SIZES) / "tokenizer.json", tmp_path / "m")
    file = export_artifact(tmp_path / "m", "gguf", tmp_path / "m.gguf", gguf_type="F32")
    ok, detail = compared(verify_path(file, source=tmp_path / "m"))
    assert ok
    assert "not compared, for the source stores them in another form: model.layers.0.linear_attn" in detail
    assert detail.count("linear_attn") == 6
