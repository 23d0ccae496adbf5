"""Writers of small models, whole and broken, for the tests of this folder. Nothing here uses the package itself.

A weight matrix holds at most 8 distinct values a row, multiples of 1/64 that bfloat16 and float16 hold exactly:
4-bit codebooks reproduce it without error, so any difference after a round trip is a fault and never noise.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

Arrays = dict[str, NDArray[Any]]
CODES = {
    "bfloat16": "BF16",
    "float16": "F16",
    "float32": "F32",
    "float8_e4m3fn": "F8_E4M3",
    "uint8": "U8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint32": "U32",
}


class Model:
    """A folder that grows into a (broken) model."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rng = np.random.default_rng(1)
        self.config: dict[str, Any] = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 48,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
        }
        folder.mkdir(parents=True)

    def palette(self, *shape: int) -> NDArray[Any]:
        """Exactly representable weights, bfloat16."""
        rows = int(np.prod(shape[:-1]))
        values = np.stack([self.rng.choice(np.arange(-31, 32), 8, replace=False) for _ in range(rows)]) / 64
        picks = self.rng.integers(0, 8, (rows, shape[-1]))
        return np.take_along_axis(values, picks, axis=1).reshape(shape).astype(ml_dtypes.bfloat16)

    def tensors(self) -> Arrays:
        """All tensors of the healthy model."""
        hidden, inter, vocab = (self.config[k] for k in ("hidden_size", "intermediate_size", "vocab_size"))
        made = {"model.embed_tokens.weight": self.palette(vocab, hidden)}
        for i in range(self.config["num_hidden_layers"]):
            sizes = {
                "self_attn.q_proj": (hidden, hidden),
                "self_attn.k_proj": (hidden // 2, hidden),
                "self_attn.v_proj": (hidden // 2, hidden),
                "self_attn.o_proj": (hidden, hidden),
                "mlp.gate_proj": (inter, hidden),
                "mlp.up_proj": (inter, hidden),
                "mlp.down_proj": (hidden, inter),
                "input_layernorm": (1, hidden),
                "post_attention_layernorm": (1, hidden),
            }
            for name, shape in sizes.items():
                weight = self.palette(*shape)
                made[f"model.layers.{i}.{name}.weight"] = weight[0] if shape[0] == 1 else weight
        return made | {
            "model.norm.weight": self.palette(hidden),
            "lm_head.weight": self.palette(vocab, hidden),
        }

    @staticmethod
    def header(arrays: Arrays) -> dict[str, Any]:
        """Entries of a healthy header, data in the order of the names."""
        entries, at = {}, 0
        for name, a in arrays.items():
            offsets = [at, at := at + a.nbytes]
            entries[name] = {"dtype": CODES[a.dtype.name], "shape": list(a.shape), "data_offsets": offsets}
        return entries

    def write(
        self, arrays: Arrays, file: str = "model.safetensors", header: Any = None, tail: bytes = b""
    ) -> Path:
        """One weight file; ``header`` (object or bytes) replaces the right one, ``tail`` follows the data."""
        header = self.header(arrays) if header is None else header
        raw = header if isinstance(header, bytes) else json.dumps(header).encode()
        path = self.folder / file
        path.write_bytes(
            struct.pack("<Q", len(raw)) + raw + b"".join(a.tobytes() for a in arrays.values()) + tail
        )
        return path

    def write_shards(self, arrays: Arrays, count: int = 2, *, index: bool = True) -> dict[str, str]:
        """``count`` shards of about equally many tensors, and their index; returns the weight map."""
        names = list(arrays)
        where = {
            n: f"model-{i * count // len(names) + 1:05d}-of-{count:05d}.safetensors"
            for i, n in enumerate(names)
        }
        for file in set(where.values()):
            self.write({n: a for n, a in arrays.items() if where[n] == file}, file)
        if index:
            self.write_index(where)
        return where

    def write_index(self, weight_map: Any, metadata: Any = None) -> Path:
        """The index file; ``weight_map`` may be anything."""
        path = self.folder / "model.safetensors.index.json"
        path.write_text(json.dumps({"metadata": metadata or {}, "weight_map": weight_map}), encoding="utf-8")
        return path

    def write_config(self, text: str | None = None, **changes: Any) -> None:
        """config.json: the healthy one with changes, or any text."""
        content = json.dumps(self.config | changes) if text is None else text
        (self.folder / "config.json").write_text(content, encoding="utf-8")


@pytest.fixture
def model(tmp_path: Path) -> Model:
    """An empty folder with a config.json; the test writes the weights."""
    made = Model(tmp_path / "outside" / "model")
    made.write_config()
    return made


@pytest.fixture(scope="session")
def new_model() -> Callable[[Path], Model]:
    """The class itself, for tests that need more than one model."""
    return Model
