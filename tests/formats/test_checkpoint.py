"""A model folder as a source of tensors: rows, files that travel along, lone files, what is already quantized.

Broken folders and their verdicts are in tests/hostile.
"""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from trapetum.errors import CheckpointError, FormatError
from trapetum.formats.checkpoint import Checkpoint
from trapetum.formats.dtypes import DTYPES
from trapetum.formats.packed import packed_format
from trapetum.tensors import DenseTensor

BF16 = ml_dtypes.bfloat16


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two shards written by the reference package: a matrix, a vector, stacked experts, a scalar, an empty tensor."""
    rng = np.random.default_rng(0)
    parts = {
        "model-00001-of-00002.safetensors": {
            "m": rng.standard_normal((6, 8)).astype(BF16),
            "v": rng.standard_normal(8).astype(np.float32),
        },
        "model-00002-of-00002.safetensors": {
            "e": rng.standard_normal((3, 4, 8)).astype(np.float16),
            "s": np.array(2.5, np.float32),
            "z": np.zeros((0, 8), BF16),
        },
    }
    for file, arrays in parts.items():
        safetensors.numpy.save_file(arrays, tmp_path / file)
    where = {name: file for file, arrays in parts.items() for name in arrays}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    return tmp_path


@pytest.mark.parametrize("mapped", [True, False])
def test_a_source_of_tensors(folder: Path, mapped: bool) -> None:
    with Checkpoint.open(folder, mmap=mapped) as source:
        assert (source.path, source.kind, source.notes) == (folder, "checkpoint", [])
        assert source.config == {"model_type": "llama"}
        expected: dict[str, Any] = {}
        for file in sorted(folder.glob("*.safetensors")):
            expected |= safetensors.numpy.load_file(file)
        assert sorted(source.names()) == sorted(expected)
        for name, values in expected.items():
            assert source.layout(name) == "dense"
            assert source.shape(name) == values.shape
            assert source.dtype(name) == values.dtype
            tensor = source.load(name)
            assert isinstance(tensor, DenseTensor)
            assert tensor.values.tobytes() == values.tobytes()
            matrix = values.reshape(tensor.rows, tensor.in_features)
            for rows in (slice(0, 1), slice(1, 4), slice(2, None), slice(5, 5)):
                block = source.load(name, rows)
                assert block.shape == matrix[rows].shape
                assert block.values.tobytes() == matrix[rows].tobytes()
                source.release(name, rows)
            source.release(name)
        assert source.file("e") == folder / "model-00002-of-00002.safetensors"


def test_names_come_in_the_order_of_files_and_bytes(folder: Path) -> None:
    with Checkpoint.open(folder) as source:
        starts = [
            (source.file(n), f.tensors[n].start)
            for n in source.names()
            for f in source.files
            if n in f.tensors
        ]
        assert starts == sorted(starts)


def test_unknown_tensor(folder: Path) -> None:
    with Checkpoint.open(folder) as source:
        for ask in (source.load, source.shape, source.dtype, source.layout, source.release, source.file):
            with pytest.raises(CheckpointError, match="'nothing'"):
                ask("nothing")


def test_a_lone_file_takes_config_and_tokenizer_from_its_folder(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    path = folder / "model-00002-of-00002.safetensors"
    with Checkpoint.open(path) as source:
        assert sorted(source.names()) == ["e", "s", "z"]
        assert source.config == {"model_type": "llama"}
        assert source.tokenizer_file() == folder / "tokenizer.json"
        assert source.path == path
        assert [path.name in note and "1 of 2" in note for note in source.notes] == [True]


@pytest.mark.parametrize("name", ["absent", "absent.safetensors", "no\0name", "config.json"])
def test_what_is_no_model(folder: Path, name: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder / name)
    assert name in caught.value.message


def test_a_failed_opening_closes_what_it_opened(folder: Path) -> None:
    last = folder / "model-00002-of-00002.safetensors"
    last.write_bytes(last.read_bytes()[:-1])
    gc.collect()  # files that other tests left are closed now, not while these are counted
    before = len(os.listdir("/proc/self/fd"))
    for mapped in (True, False):
        with pytest.raises(FormatError, match="cut off"):
            Checkpoint.open(folder, mmap=mapped)
    assert len(os.listdir("/proc/self/fd")) == before


def test_side_files(folder: Path) -> None:
    travels = """config.json generation_config.json tokenizer.json tokenizer_config.json special_tokens_map.json
        added_tokens.json vocab.json vocab.txt merges.txt tokenizer.model spiece.model chat_template.jinja
        chat_template.json preprocessor_config.json qwen.tiktoken""".split()
    stays = "README.md LICENSE training_args.bin modeling_x.py optimizer.json my_tokenizer.json.bak".split()
    for name in travels + stays:
        (folder / name).write_text("{}")
    (folder / "added_tokens.json").unlink()
    (folder / "added_tokens.json").mkdir()
    with Checkpoint.open(folder) as source:
        assert [p.name for p in source.side_files()] == sorted(set(travels) - {"added_tokens.json"})
        assert source.tokenizer_file() == folder / "tokenizer.json"
    (folder / "tokenizer.json").unlink()
    with Checkpoint.open(folder) as source:
        assert source.tokenizer_file() is None


# ---------------------------------------------------------------- already quantized

Q = "model.layers.0.self_attn.q_proj"
BY_TENSORS = {
    "gptq": {f"{Q}.qweight": "I32", f"{Q}.qzeros": "I32", f"{Q}.scales": "F16", f"{Q}.g_idx": "I32"},
    "awq": {f"{Q}.qweight": "I32", f"{Q}.qzeros": "I32", f"{Q}.scales": "F16"},
    "bitsandbytes": {f"{Q}.weight": "U8", f"{Q}.weight.absmax": "F32", f"{Q}.weight.quant_map": "F32"},
    "aqlm": {f"{Q}.codes": "I16", f"{Q}.codebooks": "F16", f"{Q}.scales": "F16"},
    "mlx": {f"{Q}.weight": "U32", f"{Q}.scales": "BF16", f"{Q}.biases": "BF16"},
    "bitnet": {f"{Q}.weight": "U8", f"{Q}.weight_scale": "BF16"},
    "mxfp4": {"mlp.experts.down_proj_blocks": "U8", "mlp.experts.down_proj_scales": "U8"},
    "compressed-tensors": {
        f"{Q}.weight_packed": "I32",
        f"{Q}.weight_scale": "BF16",
        f"{Q}.weight_shape": "I64",
    },
    "fp8": {f"{Q}.weight": "F8_E4M3", f"{Q}.weight_scale": "F32"},
    "hqq": {f"{Q}.W_q": "U8"},
    "exl2": {f"{Q}.q_weight": "I32", f"{Q}.q_scale": "I32"},
}


@pytest.mark.parametrize("format", BY_TENSORS)
def test_packed_tensors_give_themselves_away(format: str) -> None:
    plain = {"model.embed_tokens.weight": "BF16", "model.norm.weight": "BF16", "lm_head.weight": "BF16"}
    tensors = {name: DTYPES[code] for name, code in (plain | BY_TENSORS[format]).items()}
    assert packed_format({}, tensors) == format
    for name in list(BY_TENSORS[format]):
        del tensors[name]
    assert packed_format({}, tensors) is None


def test_block_scaled_and_int8_variants() -> None:
    assert packed_format({}, {"e.w13_scale_inv": DTYPES["F32"], "e.w13": DTYPES["F8_E4M3"]}) == "fp8"
    assert packed_format({}, {f"{Q}.weight": DTYPES["I8"], f"{Q}.SCB": DTYPES["F32"]}) == "bitsandbytes"


@pytest.mark.parametrize(
    ("config", "format"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "bitsandbytes"),
        ({"quantization_config": {"bits": 4}}, "unknown"),
        ({"quantization": {"group_size": 64, "bits": 4}}, "mlx"),
        ({"compression_config": {"format": "pack-quantized"}}, "compressed-tensors"),
        ({"text_config": {"quantization_config": {"quant_method": "fp8"}}}, "fp8"),
        ({"quantization_config": None}, None),
        ({"quantization_config": {}}, None),
        ({"text_config": None}, None),
        ({}, None),
    ],
)
def test_packed_config(config: dict[str, Any], format: str | None, folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    with Checkpoint.open(folder) as source:
        assert source.packed_format() == format


@pytest.mark.parametrize(
    "tensors",
    [
        {"w.weight": "F8_E4M3"},  # plain casts to float8 are weights
        {"scaled_fp8": "F8_E4M3", "w.weight": "F8_E4M3"},  # an empty marker tensor of some tools
        {"ln.scales": "F32", "w.weight": "BF16"},
        {"x.codes": "I16"},
        {"decoder.weight_scale": "F32", "decoder.weight": "BF16"},
        {"blocks": "U8"},
    ],
)
def test_plain_weights_are_not_mistaken(tensors: dict[str, str]) -> None:
    assert packed_format({}, {name: DTYPES[code] for name, code in tensors.items()}) is None


def test_many_shards_open_fast(tmp_path: Path, cpu_limit: Any) -> None:
    """62 shards of 12 tensors: at most 5 ms of CPU time each."""
    where = {}
    for i in range(62):
        file = f"model-{i + 1:05d}-of-00062.safetensors"
        arrays = {f"layers.{i}.{j}.weight": np.zeros((2, 2), BF16) for j in range(12)}
        safetensors.numpy.save_file(arrays, tmp_path / file)
        where |= dict.fromkeys(arrays, file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    with cpu_limit(62 * 0.005), Checkpoint.open(tmp_path) as source:
        assert len(source.names()) == 62 * 12
