"""A folder that holds config.json and no weights: enough for a dry run to say every size.

The tensors are those that the config promises, in the family's first form of storage and in the dtype that the config
states; a head is there unless the config ties it to the embedding.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from trapetum.errors import CheckpointError, located
from trapetum.formats.checkpoint import Checkpoint
from trapetum.formats.dtypes import DTYPES
from trapetum.models.config import parse_config
from trapetum.tensors import DenseTensor

__all__ = ["ConfigCheckpoint", "has_only_config"]

_STATED = {"bfloat16": DTYPES["BF16"], "float16": DTYPES["F16"]}


def has_only_config(path: Path) -> bool:
    """Whether a folder has a config.json and no file of weights."""
    weights = ("*.safetensors", "*.safetensors.index.json", "*.gguf", "*.bin", "*.pt", "*.pth")
    return (path / "config.json").is_file() and not any(next(path.glob(p), None) for p in weights)


class ConfigCheckpoint(Checkpoint):
    """The checkpoint that a config describes; nothing can be loaded from it.

    Parameters
    ----------
    folder : Path

    Raises
    ------
    CheckpointError, UnsupportedModelError
        If config.json is not that of a model that is known.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(
            folder, folder, [], {}, ["there are no weights: sizes are what config.json promises"]
        )
        with located(folder):
            config = parse_config(self.config)
            tied = config.tie_word_embeddings is True
            shapes = config.architecture.expected_shapes(replace(config, tie_word_embeddings=tied))
        self._shapes = shapes
        self._dtype = _STATED.get(config.dtype or "", DTYPES["F32"])

    def names(self) -> list[str]:
        """In the order of the architecture's table."""
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """As the config promises."""
        return self._shapes[name]

    def dtype(self, name: str) -> np.dtype[Any]:
        """As the config states."""
        return self._dtype

    def layout(self, name: str) -> str:
        """Always ``"dense"``."""
        return DenseTensor.layout

    def file(self, name: str) -> Path:
        """Of the config."""
        return self.folder / "config.json"

    def load(self, name: str, rows: slice | None = None) -> NoReturn:
        """Raise ``CheckpointError``."""
        raise CheckpointError(
            f"{self.folder}: holds no weights, so tensor {name} cannot be read",
            hint="Only a dry run needs nothing but config.json.",
        )

    def release(self, name: str, rows: slice | None = None) -> None:
        """Nothing is mapped."""

    def packed_format(self) -> None:
        """Plain weights, whatever the published ones are."""
        return None

    def is_packed(self, name: str) -> bool:
        """Never."""
        return False
