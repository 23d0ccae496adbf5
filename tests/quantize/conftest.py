"""Small checkpoints, written through the reference safetensors package so that our own writer is not what is tested."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

safetensors_numpy = pytest.importorskip("safetensors.numpy")

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 80,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def palette(rng: np.random.Generator, rows: int, columns: int, size: int = 8) -> np.ndarray:
    """Rows of at most ``size`` distinct values that bfloat16 and float16 hold exactly."""
    values = rng.choice(np.arange(-31, 32), (rows, size)) / 64.0
    return np.take_along_axis(values, rng.integers(0, size, (rows, columns)), axis=1).astype(np.float32)


def llama_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of an untied Llama model."""
    hidden, inter, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    query = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for i in range(config["num_hidden_layers"]):
        p = f"model.layers.{i}."
        shapes |= {
            p + "input_layernorm.weight": (hidden,),
            p + "self_attn.q_proj.weight": (query, hidden),
            p + "self_attn.k_proj.weight": (kv, hidden),
            p + "self_attn.v_proj.weight": (kv, hidden),
            p + "self_attn.o_proj.weight": (hidden, query),
            p + "post_attention_layernorm.weight": (hidden,),
            p + "mlp.gate_proj.weight": (inter, hidden),
            p + "mlp.up_proj.weight": (inter, hidden),
            p + "mlp.down_proj.weight": (hidden, inter),
        }
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}


@pytest.fixture
def make_model(tmp_path: Path) -> Callable[..., Path]:
    """Write a Llama-shaped checkpoint and return its folder.

    ``make_model(fill=..., change=..., drop=..., name=..., shards=..., **config)``: ``fill(rng, shape)`` makes the
    matrices (Gaussian by default), ``change`` replaces or adds tensors, ``drop`` leaves some out.
    """

    def make(
        *,
        fill: Callable[..., np.ndarray] | None = None,
        change: dict[str, np.ndarray] | None = None,
        drop: tuple[str, ...] = (),
        name: str = "model",
        shards: int = 1,
        dtype: Any = ml_dtypes.bfloat16,
        **config: Any,
    ) -> Path:
        full = {k: v for k, v in {**CONFIG, **config}.items() if v is not ...}
        rng = np.random.default_rng(7)
        tensors = {}
        for key, shape in llama_shapes(
            {**CONFIG, **{k: v for k, v in config.items() if v is not ...}}
        ).items():
            matrix = fill(rng, *shape) if fill and len(shape) == 2 else rng.standard_normal(shape) * 0.05
            tensors[key] = np.asarray(matrix).astype(dtype)
        tensors |= change or {}
        tensors = {k: np.array(v, order="C") for k, v in tensors.items() if k not in drop}
        folder = tmp_path / name
        folder.mkdir()
        names = list(tensors)
        if shards == 1:
            safetensors_numpy.save_file(tensors, folder / "model.safetensors")
        else:
            weight_map = {}
            for s in range(shards):
                file = f"model-{s + 1:05d}-of-{shards:05d}.safetensors"
                safetensors_numpy.save_file({n: tensors[n] for n in names[s::shards]}, folder / file)
                weight_map |= dict.fromkeys(names[s::shards], file)
            index = {"metadata": {}, "weight_map": weight_map}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        (folder / "config.json").write_text(json.dumps(full))
        return folder

    return make


def folder_bytes(folder: Path) -> dict[str, bytes]:
    """Everything in an artifact that is part of its identity."""
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir()) if p.is_file() and p.name != "run.jsonl"}


@pytest.fixture
def identity() -> Callable[[Path], dict[str, bytes]]:
    """File name -> bytes of an artifact, without the log of the run."""
    return folder_bytes


@pytest.fixture
def palette_rows() -> Callable[..., np.ndarray]:
    """Matrices that 4 bits hold exactly."""
    return palette
