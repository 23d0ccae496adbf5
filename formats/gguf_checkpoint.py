"""A GGUF model as the source of a quantization: its weights decoded, its config and tokenizer as files.

A job asks a checkpoint for plain values by row blocks, for the files to hash and for the files that travel with the
weights. A GGUF gives all of that: block types are decoded exactly as ggml decodes them, q and k rows come back in the
checkpoint's order, a rotation is undone, and config.json, tokenizer.json and a model card with the licence are written
from the metadata into a temporary folder that lives as long as the source is open. The notes say what was decoded.

What already is a block need not be quantized twice: :meth:`GgufCheckpoint.stored` gives its bytes.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from trapetum.errors import CheckpointError, UnsupportedModelError
from trapetum.formats.decoded import decoded
from trapetum.formats.gguf import GgufFile
from trapetum.formats.gguf_source import GgufSource, gguf_file
from trapetum.formats.strict_json import shown
from trapetum.tensors import BlockTensor, DenseTensor

__all__ = ["GgufCheckpoint", "is_gguf"]

_CARD = {  # metadata -> key of a model card
    "general.license": "license",
    "general.license.name": "license_name",
    "general.license.link": "license_link",
    "general.languages": "language",
}


def is_gguf(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a file that begins as a GGUF does, or a folder that holds one model of that kind alone."""
    return gguf_file(path) is not None


class GgufCheckpoint:
    """An open GGUF model with the members of ``Checkpoint``. Made by :meth:`open`.

    Parameters
    ----------
    source : GgufSource
        Closed with this.

    Attributes
    ----------
    path : Path
        What the user named.
    folder : Path
        Temporary, with the files that were made from the metadata.
    files : list of GgufFile
    config : dict
    notes : list of str
    title : str
        Name of the file, without the number of a part.
    """

    kind = "gguf"

    def __init__(self, source: GgufSource) -> None:
        self.source = source
        self.path: Path = source.path
        self.files: list[GgufFile] = source.files
        self.title: str = source.title
        self.config: dict[str, Any] = source.config
        unknown = [
            f"{shown(info.name)} (type {info.type_name})"
            for info in source.records.values()
            if info.type is None
        ]
        if unknown:
            raise UnsupportedModelError(f"{self.path}: tensors of unknown types: {', '.join(unknown[:8])}")
        self._side_files = source.side_files()
        self.folder = self._side_files[0].parent
        self._rotated = {n for n in source.names() if source.rotation_of(n) is not None}
        self.notes: list[str] = [*source.notes, *self._said()]
        self._write_card()

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, mmap: bool = True) -> Self:
        """Open a model; of a split one, any file names it.

        Raises
        ------
        FormatError
            If a file breaks the rules of its format.
        UnsupportedModelError
            If the family, a tensor or its type is not known here.
        """
        source = GgufSource.open(path, mmap=mmap)
        try:
            return cls(source)
        except BaseException:
            source.close()
            raise

    def names(self) -> list[str]:
        """Tensor names in the order of the files."""
        return self.source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        """Logical shape."""
        return self.source.shape(name)

    def dtype(self, name: str) -> np.dtype[Any]:
        """Stored dtype; float32 for what is decoded."""
        return np.dtype(np.float32) if name in self._rotated else self.source.dtype(name)

    def layout(self, name: str) -> str:
        """Always ``"dense"``."""
        self.source.layout(name)
        return DenseTensor.layout

    def file(self, name: str) -> Path:
        """The file that holds a tensor, for messages."""
        return self.source.file(name)

    def load(self, name: str, rows: slice | None = None) -> DenseTensor:
        """A tensor, or some rows of its matrix form, decoded.

        Raises
        ------
        CheckpointError
            If there is no such tensor.
        """
        if name not in self._rotated:
            stored = self.source.load(name, rows)
            return stored if isinstance(stored, DenseTensor) else DenseTensor(stored.dequantize())
        return DenseTensor(decoded(self.source, name, rows))

    def is_packed(self, name: str) -> bool:
        """Whether a tensor is decoded from codes that could be taken over as they are."""
        return self.source.layout(name) != DenseTensor.layout and name not in self._rotated

    def block_type(self, name: str) -> str | None:
        """The type of the blocks that :meth:`stored` gives; None where the values are all there is."""
        is_blocks = self.source.layout(name) == BlockTensor.layout and name not in self._rotated
        return self.source.records[name].type_name if is_blocks else None

    def stored(self, name: str, rows: slice | None = None) -> BlockTensor:
        """The blocks of a tensor, rows in the checkpoint's order.

        Raises
        ------
        CheckpointError
            If it is not stored in blocks.
        """
        tensor = self.source.load(name, rows)
        if self.block_type(name) is None or not isinstance(tensor, BlockTensor):
            raise CheckpointError(f"{self.file(name)}: tensor {shown(name)} is not stored in blocks")
        return tensor

    def release(self, name: str, rows: slice | None = None) -> None:
        """Drop the mapped pages of a tensor."""
        self.source.release(name, rows)

    def packed_format(self) -> None:
        """None: the weights that are read here are plain."""
        return None

    def tokenizer_file(self) -> Path | None:
        """tokenizer.json, where one could be made."""
        return self.source.tokenizer_file()

    def side_files(self) -> list[Path]:
        """config.json and the tokenizer files that were made from the metadata."""
        return list(self._side_files)

    def close(self) -> None:
        """Close all files and remove the temporary ones."""
        self.source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _said(self) -> list[str]:
        """What happened to the weights on the way from the file, in words."""
        types = Counter(
            info.type_name
            for name, info in self.source.records.items()
            if self.source.layout(name) != DenseTensor.layout
            or name in self._rotated
            or (info.type is not None and info.type.dtype is None)
        )
        said = []
        if types:
            counts = ", ".join(
                f"{kind} ({count} {'tensor' if count == 1 else 'tensors'})"
                for kind, count in types.most_common()
            )
            said.append(f"{self.path.name}: weights come from {counts}; what that lost stays lost")
        if self._rotated:
            said.append(
                f"{self.path.name}: the rotation of {len(self._rotated)} tensors is undone; "
                "their codes cannot be taken over"
            )
        return said

    def _write_card(self) -> None:
        """README.md with what the metadata say of the licence, where a model folder has it too."""
        said = {key: _plain(self.source.metadata.get(name)) for name, key in _CARD.items()}
        lines = [f"{key}: {json.dumps(v, ensure_ascii=False)}" for key, v in said.items() if v]
        text = "\n".join(["---", *lines, "---", ""])
        (self.folder / "README.md").write_bytes(text.encode("utf-8", "replace"))


def _plain(value: object) -> str | list[str] | None:
    """What a model card can say: text, or a list of texts."""
    if isinstance(value, str):
        return value
    texts = list(value) if isinstance(value, Sequence) else []
    return texts if all(isinstance(text, str) for text in texts) else None
