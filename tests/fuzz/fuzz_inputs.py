"""Small valid files of every kind that a reader takes: what the fuzz targets damage."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import trapetum
from trapetum.formats.imatrix import MomentsWriter, write_imatrix
from trapetum.formats.parts import write_part
from trapetum.formats.safetensors_writer import Entry, SafetensorsWriter
from trapetum.packing import pack_bits
from trapetum.progress import Progress
from trapetum.tensors import DenseTensor

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 64,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'][0:3] | trim }}{{ 1 + 1 }}"
    "{% else %}{{ raise_exception('no') }}{% endif %}{% endfor %}"
)
CARD = "---\nlicense: [mit, 'other']\nlanguage:\n- en\nbase_model: a/b\n---\n# Title\n"


def spm_tokenizer(count: int = 64) -> dict[str, Any]:
    """A SentencePiece-style tokenizer of single characters: no token is part of a character, so none is held back."""
    pieces = ["<unk>", "<s>", "</s>", *(chr(0x4E00 + i) for i in range(count - 3))]
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    steps: list[dict[str, Any]] = [
        {"type": "Prepend", "prepend": "\u2581"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": pieces[i], **plain} for i in range(3)],
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": {p: i for i, p in enumerate(pieces)},
            "merges": [],
        },
    }


def make_model(folder: Path) -> Path:
    """A tied Llama of one layer, in two files with an index."""
    rng = np.random.default_rng(0)
    shapes = {"model.embed_tokens.weight": (64, 256), "model.norm.weight": (256,)}
    for part, rows in {"q": 256, "k": 256, "v": 256, "o": 256}.items():
        shapes[f"model.layers.0.self_attn.{part}_proj.weight"] = (rows, 256)
    shapes |= {f"model.layers.0.mlp.{part}_proj.weight": (256, 256) for part in ("gate", "up", "down")}
    shapes |= {f"model.layers.0.{part}_layernorm.weight": (256,) for part in ("input", "post_attention")}
    folder.mkdir(parents=True)
    names = list(shapes)
    weight_map = {}
    for number, part in enumerate((names[:6], names[6:]), 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        with SafetensorsWriter(
            folder / file, [Entry(n, np.dtype(np.float16), shapes[n]) for n in part]
        ) as writer:
            for name in part:
                writer.write(name, (rng.standard_normal(shapes[name]) / 16).astype(np.float16))
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text(json.dumps(spm_tokenizer()))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": {"content": "</s>"}})
    )
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "README.md").write_text(CARD)
    return folder


Arrays = dict[str, np.ndarray[Any, Any]]
_STEM = "model.layers.0.mlp.{}_proj."


def _fp8(rng: np.random.Generator, stem: str) -> Arrays:
    """8-bit floats with a scale for each block of 128 x 128, as DeepSeek's checkpoints are."""
    codes = np.setdiff1d(np.arange(256, dtype=np.uint8), [0x7F, 0xFF])
    return {
        f"{stem}weight": rng.choice(codes, (256, 256)).astype(np.uint8).view(ml_dtypes.float8_e4m3fn),
        f"{stem}weight_scale_inv": rng.uniform(0.1, 0.2, (2, 2)).astype(np.float32),
    }


def _bitnet(rng: np.random.Generator, stem: str) -> Arrays:
    """Four codes 0, 1, 2 a byte, and one scale."""
    codes = rng.integers(0, 3, (4, 64, 256)).astype(np.uint8)
    packed = codes[0] | codes[1] << 2 | codes[2] << 4 | codes[3] << 6
    return {f"{stem}weight": packed, f"{stem}weight_scale": np.array([1.3], ml_dtypes.bfloat16)}


def _mlx(rng: np.random.Generator, stem: str) -> Arrays:
    """Two bits in words of 32, a scale and a bias for 64 weights."""
    codes = pack_bits(rng.integers(0, 3, (256, 256)).astype(np.uint8), 2).view("<u4")
    scales = (rng.random((256, 4)) + 0.5).astype(np.float16)
    return {f"{stem}weight": codes, f"{stem}scales": scales, f"{stem}biases": -scales}


def _aqlm(rng: np.random.Generator, stem: str) -> Arrays:
    """Two codebooks of 256 entries over groups of 8, a scale for each row."""
    return {
        f"{stem}codes": rng.integers(-128, 128, (256, 32, 2)).astype(np.int8),
        f"{stem}codebooks": (rng.standard_normal((2, 256, 1, 8)) * 0.1).astype(np.float16),
        f"{stem}scales": (rng.random((256, 1, 1, 1)) + 0.5).astype(np.float16),
    }


def _mxfp4(rng: np.random.Generator, stem: str) -> Arrays:
    """Two 4-bit floats a byte, an exponent for 32 weights."""
    return {
        f"{stem}weight_blocks": rng.integers(0, 256, (256, 8, 16)).astype(np.uint8),
        f"{stem}weight_scales": rng.integers(110, 124, (256, 8)).astype(np.uint8),
    }


PACKED: dict[str, tuple[Callable[[np.random.Generator, str], Arrays], dict[str, Any]]] = {
    "fp8": (_fp8, {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}),
    "bitnet": (_bitnet, {"quantization_config": {"quant_method": "bitnet"}}),
    "mlx": (_mlx, {"quantization": {"group_size": 64, "bits": 2}}),
    "mxfp4": (_mxfp4, {"quantization_config": {"quant_method": "mxfp4"}}),
    "aqlm": (
        _aqlm,
        {
            "quantization_config": {
                "quant_method": "aqlm", "in_group_size": 8, "out_group_size": 1, "nbits_per_codebook": 8,
                "num_codebooks": 2,
            }
        },
    ),
}  # fmt: skip
"""Forms of packed checkpoints: what a matrix is stored as, and what config.json says of it."""


def make_packed(kind: str, folder: Path) -> Path:
    """Two packed matrices beside an embedding."""
    rng = np.random.default_rng(1)
    folder.mkdir(parents=True)
    arrays, settings = PACKED[kind]
    tensors: Arrays = {"model.embed_tokens.weight": np.ones((64, 256), np.float16)}
    for part in ("gate", "up"):
        tensors |= arrays(rng, _STEM.format(part))
    entries = [Entry(n, a.dtype, a.shape) for n, a in tensors.items()]
    with SafetensorsWriter(folder / "model.safetensors", entries) as writer:
        for name, array in tensors.items():
            writer.write(name, array)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **settings}))
    return folder


def make_base(base: Path) -> Path:
    """All valid inputs."""
    model = make_model(base / "model")
    shutil.copyfile(model / "model-00001-of-00002.safetensors", base / "x.safetensors")
    schemes = {"codebook": "kmeans", "ternary": "ternary", "blocks": "gguf:Q4_K", "additive": "additive"}
    for name, scheme in schemes.items():
        trapetum.quantize_model(model, base / name, scheme=scheme, effort="fast", threads=1)
    trapetum.export_artifact(base / "codebook", "cbk", base / "x.cbk")
    trapetum.export_artifact(base / "codebook", "cbk", base / "cbk")
    for name, kind in {"ternary": "x2.gguf", "blocks": "x4.gguf"}.items():
        trapetum.export_artifact(base / name, "gguf", base / kind)
    trapetum.export_artifact(base / "additive", "cbk", base / "additive.cbk")
    for name, made in {"ternary": "planes", "codebook": "tiles", "additive": "tiles-additive"}.items():
        trapetum.export_artifact(base / name, "planes", base / made)
    for kind in PACKED:
        make_packed(kind, base / kind)
    weight = "model.layers.0.self_attn.q_proj.weight"
    write_imatrix(base / "x.imatrix", {weight: (np.ones(256, np.float32), 9)}, datasets=["a"])
    with MomentsWriter(base / "x.moments", [((weight,), 256)]) as writer:
        writer.write((weight,), np.eye(256, dtype=np.float32), 9)
    entry = b"".join(
        [
            len(weight).to_bytes(4, "little"),
            weight.encode(),
            (9).to_bytes(4, "little"),
            (256).to_bytes(4, "little"),
        ]
    )
    (base / "x.dat").write_bytes((1).to_bytes(4, "little") + entry + np.ones(256, np.float32).tobytes())
    (base / "recipe.toml").write_text(
        'name = "mine"\nbits = 4\nscheme = "kmeans"\nfallback = ["gguf:Q8_0"]\n[[rules]]\nrole = ["attention", "mlp"]\n'
        'layers = "0,3-5"\nbits = 8\n[[rules]]\nglob = "*.down_proj.weight"\nkeep = true\n'
    )
    (base / "jobs.toml").write_text(
        '[defaults]\nbits = 3\n[[jobs]]\nmodel = "a"\nout = "b"\nexport = ["cbk"]\n'
    )
    (base / "result.json").write_text(
        json.dumps({"ppl": 3.5, "checks": [{"name": "a", "ok": True, "detail": "b"}]})
    )
    _unfinished_job(base / "job", model)
    return base


def _unfinished_job(folder: Path, model: Path) -> None:
    """A folder whose job was stopped when the first of its tensors was made."""

    class Stop(Progress):
        def advance(self, amount: int, line: str | None = None) -> None:
            if line is not None:
                raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        trapetum.quantize_model(model, folder, effort="fast", threads=1, progress=Stop())
    parts = folder / ".trapetum" / "parts"
    write_part(
        parts, 0, "t0", {"": np.zeros((2, 3), np.float32)}, _draft(DenseTensor(np.zeros((2, 3), np.float32)))
    )
    (folder / ".trapetum" / "commit.json").write_text(json.dumps({"files": ["a"], "remove": ["b"]}))


def _draft(tensor: DenseTensor) -> dict[str, Any]:
    made = {"layout": tensor.layout, "shape": tensor.shape, "params": {}}
    return made | {"scheme": {"name": "keep"}, "relative_error": None}
