"""MXFP4 blocks and gpt-oss stacks against transformers' own decode and gguf's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trapetum
from trapetum.errors import CheckpointError, UnsupportedModelError
from trapetum.formats.packed_mxfp4 import GptOssCheckpoint, Mxfp4Checkpoint
from trapetum.formats.packed_ternary import open_checkpoint
from trapetum.quantize.job import quantize_model
from trapetum.runtime.matrix import PreparedMatrix
from trapetum.tensors import BlockTensor

safetensors_numpy = pytest.importorskip("safetensors.numpy")

EXPERTS, WIDTH, HIDDEN = 3, 64, 128  # HIDDEN == 2 * WIDTH: shapes do not tell a matrix from its transpose
LAYER = "model.layers.0.mlp.experts."
CONFIG: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": HIDDEN, "intermediate_size": WIDTH,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 60,
    "num_local_experts": EXPERTS, "num_experts_per_tok": 2, "sliding_window": 8, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128, "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
}  # fmt: skip


def packed(rows: int, columns: int, seed: int) -> dict[str, np.ndarray]:
    """Every nibble, and scales from far below to far above 1 (2 ** -27 to 2 ** 6)."""
    rng = np.random.default_rng(seed)
    shape = (EXPERTS, rows, columns // 32)
    return {
        "_blocks": rng.integers(0, 256, (*shape, 16)).astype(np.uint8),
        "_scales": rng.integers(110, 124, shape).astype(np.uint8),
    }


def meant(parts: dict[str, np.ndarray]) -> np.ndarray:
    """transformers' decode, [experts, inputs, outputs]."""
    torch = pytest.importorskip("torch")
    convert = pytest.importorskip("transformers.integrations.mxfp4").convert_moe_packed_tensors
    blocks, scales = (torch.from_numpy(parts[k]) for k in ("_blocks", "_scales"))
    return convert(blocks, scales, dtype=torch.float32).numpy()  # type: ignore[no-any-return]


def outside() -> dict[str, np.ndarray]:
    """What is not in the stacks."""
    rng = np.random.default_rng(9)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (60, HIDDEN), "model.norm.weight": (HIDDEN,), "lm_head.weight": (60, HIDDEN),
    }  # fmt: skip
    layer = "model.layers.0."
    for part in ("input_layernorm", "post_attention_layernorm"):
        shapes[f"{layer}{part}.weight"] = (HIDDEN,)
    for part, rows in (("q", 128), ("k", 64), ("v", 64), ("o", HIDDEN)):
        shapes[f"{layer}self_attn.{part}_proj.weight"] = (rows, HIDDEN)
        shapes[f"{layer}self_attn.{part}_proj.bias"] = (rows,)
    shapes |= {f"{layer}self_attn.sinks": (4,), f"{layer}mlp.router.weight": (EXPERTS, HIDDEN)}
    shapes[f"{layer}mlp.router.bias"] = (EXPERTS,)
    shapes |= {f"{LAYER}gate_up_proj_bias": (EXPERTS, 2 * WIDTH), f"{LAYER}down_proj_bias": (EXPERTS, HIDDEN)}
    return {
        n: (rng.standard_normal(s) / (s[-1] ** 0.5 if len(s) > 1 else 1.0)).astype(np.float32)
        for n, s in shapes.items()
    }


GATE_UP, DOWN = packed(2 * WIDTH, HIDDEN, 1), packed(HIDDEN, WIDTH, 2)


def write(folder: Path, *, dense: bool = False, change: dict[str, np.ndarray | None] | None = None) -> Path:
    tensors: dict[str, np.ndarray | None] = {**outside()}
    for part, parts in (("gate_up_proj", GATE_UP), ("down_proj", DOWN)):
        if dense:
            tensors[LAYER + part] = meant(parts)
        else:
            tensors |= {LAYER + part + suffix: values for suffix, values in parts.items()}
    tensors |= change or {}
    folder.mkdir()
    kept = {k: np.ascontiguousarray(v) for k, v in tensors.items() if v is not None}
    safetensors_numpy.save_file(kept, folder / "model.safetensors")
    extra = {} if dense else {"quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(CONFIG | extra))
    return folder


def truth() -> dict[str, np.ndarray]:
    gate_up, down, rest = meant(GATE_UP).swapaxes(1, 2), meant(DOWN).swapaxes(1, 2), outside()
    biases = rest[f"{LAYER}gate_up_proj_bias"]
    return {
        "gate_proj.weight": gate_up[:, 0::2],
        "up_proj.weight": gate_up[:, 1::2],
        "down_proj.weight": down,
        "gate_proj.bias": biases[:, 0::2],
        "up_proj.bias": biases[:, 1::2],
        "down_proj.bias": rest[f"{LAYER}down_proj_bias"],
    }


@pytest.mark.parametrize("dense", [False, True])
def test_stacks_have_a_row_for_each_output(dense: bool, tmp_path: Path) -> None:
    with open_checkpoint(write(tmp_path / "m", dense=dense)) as found:
        assert isinstance(found, GptOssCheckpoint)
        assert isinstance(found, Mxfp4Checkpoint) is not dense
        assert not any(n.endswith(("_blocks", "_scales", "_proj", "_proj_bias")) for n in found.names())
        assert len(set(found.names())) == len(found.names())
        for part, expected in truth().items():
            name, flat = LAYER + part, expected.reshape(-1, expected.shape[-1])
            assert name in found.names()
            assert found.shape(name) == expected.shape
            assert np.array_equal(found.load(name).dequantize(), expected)
            for start in range(0, len(flat), 37):  # over the borders of experts
                rows = slice(start, start + 37)
                assert np.array_equal(found.load(name, rows).dequantize(), flat[rows])
                found.release(name, rows)
        assert found.is_packed(LAYER + "up_proj.weight") is not dense
        assert any("packed as mxfp4: 3 tensors" in note for note in found.notes) is not dense


def test_blocks_are_those_of_gguf(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    with open_checkpoint(write(tmp_path / "m")) as found:
        assert isinstance(found, Mxfp4Checkpoint)
        stored = found.stored(LAYER + "up_proj.weight", slice(5, 90))
        with pytest.raises(CheckpointError, match="not stored in blocks"):
            found.stored(LAYER + "up_proj.bias")
    decoded = gguf.quants.dequantize(stored.blocks, gguf.GGMLQuantizationType.MXFP4)
    assert np.array_equal(decoded, truth()["up_proj.weight"].reshape(-1, HIDDEN)[5:90])


def test_taken_over_as_it_is(tmp_path: Path) -> None:
    """Blocks in the artifact, the same numbers, and the logits of the dense checkpoint."""
    folder = write(tmp_path / "m")
    quantize_model(folder, tmp_path / "out", scheme="asis")
    with trapetum.open_artifact(tmp_path / "out") as artifact:
        for part in ("gate", "up", "down"):
            tensor = artifact[f"{LAYER}{part}_proj.weight"]
            assert isinstance(tensor, BlockTensor)
            assert tensor.type == "MXFP4"
            assert np.array_equal(tensor.dequantize(), truth()[f"{part}_proj.weight"])
    ids = [3, 1, 4, 1, 5, 9, 2, 6]
    with trapetum.load(tmp_path / "out") as taken, trapetum.load(write(tmp_path / "d", dense=True)) as dense:
        assert np.abs(taken.logits(ids) - dense.logits(ids)).max() < 1e-4 * np.abs(dense.logits(ids)).max()


def test_dense_stacks_equal_transformers(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers", minversion="5.0")
    folder = write(tmp_path / "d", dense=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    ids = np.random.default_rng(3).integers(0, 60, 40).tolist()
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0].numpy()
    with trapetum.load(folder) as ours, trapetum.load(write(tmp_path / "p")) as packs:
        held = packs.layers[0].ffn.experts[1].up.matrix
        assert isinstance(held, PreparedMatrix)  # 4 bits a weight in memory
        for model in (ours, packs):
            assert np.abs(model.logits(ids) - expected).max() < 1e-4 * np.abs(expected).max()


def test_a_scale_that_is_no_number_is_named(tmp_path: Path) -> None:
    scales = DOWN["_scales"].copy()
    scales[1, 2, 0] = 255
    folder = write(tmp_path / "m", change={f"{LAYER}down_proj_scales": scales})
    with open_checkpoint(folder) as found:
        found.load(LAYER + "down_proj.weight", slice(0, HIDDEN))
        with pytest.raises(CheckpointError, match=r"down_proj\.weight: holds the scale 255"):
            found.load(LAYER + "down_proj.weight")


def test_other_matrices_may_be_packed(tmp_path: Path) -> None:
    """Any ``X.weight_blocks`` is ``X.weight``."""
    one = {k: v[0] for k, v in packed(8, 64, 4).items()}
    (tmp_path / "m").mkdir()
    tensors = {f"a.weight{suffix}": values for suffix, values in one.items()}
    safetensors_numpy.save_file(tensors, tmp_path / "m" / "model.safetensors")
    config = {"model_type": "llama", "quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    with open_checkpoint(tmp_path / "m") as found:
        assert found.names() == ["a.weight"]
        expected = meant({k: v[None] for k, v in one.items()})[0].T
        assert np.array_equal(found.load("a.weight").dequantize(), expected)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"down_proj_scales": None}, "down_proj_blocks has no scales"),
        ({"down_proj_scales": np.zeros((EXPERTS, HIDDEN, 5), np.uint8)}, "down_proj_blocks is"),
        (
            {
                "gate_up_proj_blocks": np.zeros((EXPERTS, 3, 4, 16), np.uint8),
                "gate_up_proj_scales": np.zeros((EXPERTS, 3, 4), np.uint8),
            },
            "alternate in pairs",
        ),
        ({"gate_up_proj_bias": np.zeros((EXPERTS, 2, WIDTH), np.float32)}, "gate_up_proj_bias is"),
    ],
)
def test_what_is_no_stack_is_named(change: dict[str, Any], text: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "m", change={LAYER + k: v for k, v in change.items()})
    with pytest.raises(UnsupportedModelError, match=text):
        open_checkpoint(folder)
