"""A small random model in memory, in any layout: what runtime tests need when no file is the point."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trapetum.errors import CheckpointError
from trapetum.models.config import parse_config
from trapetum.tensors import CodebookTensor, DenseTensor, QuantizedTensor

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 60,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "eos_token_id": 59,
}


class MemorySource:
    """A ``TensorSource`` over a dictionary of tensors."""

    kind = "memory"

    def __init__(self, config: dict[str, Any], tensors: dict[str, QuantizedTensor], path: Path) -> None:
        self.config, self.tensors, self.path = config, tensors, path
        self.notes: list[str] = []
        self.closed = False

    def names(self) -> list[str]:
        return list(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].shape

    def dtype(self, name: str) -> np.dtype[Any]:
        tensor = self.tensors[name]
        return tensor.values.dtype if isinstance(tensor, DenseTensor) else np.dtype(np.float32)

    def layout(self, name: str) -> str:
        return self.tensors[name].layout

    def load(self, name: str, rows: slice | None = None) -> QuantizedTensor:
        if rows is not None:
            raise CheckpointError("the runtime is not expected to load parts")
        return self.tensors[name]

    def tokenizer_file(self) -> Path | None:
        file = self.path / "tokenizer.json"
        return file if file.is_file() else None

    def side_files(self) -> list[Path]:
        return sorted(self.path.glob("*.json"))

    def release(self, name: str, rows: slice | None = None) -> None:
        pass

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def memory_source(tmp_path: Path) -> Callable[..., MemorySource]:
    """Make a source; matrices named by a word of ``quantized`` are codebooks of 16 entries."""

    def make(quantized: tuple[str, ...] = (), seed: int = 0, **changes: Any) -> MemorySource:
        config = {**CONFIG, **changes}
        parsed = parse_config(config)
        rng = np.random.default_rng(seed)
        tensors: dict[str, QuantizedTensor] = {}
        for name, shape in parsed.architecture.expected_shapes(parsed).items():
            if len(shape) != 2:
                tensors[name] = DenseTensor((1 + 0.1 * rng.standard_normal(shape)).astype(np.float32))
                continue
            table = np.sort(rng.standard_normal((shape[0], 16)) * 0.3).astype(np.float16)
            tensor = CodebookTensor(rng.integers(0, 16, shape, dtype=np.uint8), table)
            if any(word in name for word in quantized):
                tensors[name] = tensor
            else:
                tensors[name] = DenseTensor(tensor.dequantize())
        return MemorySource(config, tensors, tmp_path)

    return make
