"""A planes file with the config and tokenizer beside it, as a ``TensorSource``: what the runtime loads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Self

import numpy as np

from trapetum.errors import CheckpointError, FormatError
from trapetum.formats.checkpoint import SIDE_FILES
from trapetum.formats.planes import MANIFEST, PlanesFile
from trapetum.formats.safetensors import SafetensorsFile
from trapetum.formats.strict_json import shown
from trapetum.formats.weight_files import read_json
from trapetum.tensors import DenseTensor

__all__ = ["PlanesSource", "is_planes"]


def is_planes(path: Path) -> bool:
    """Whether a path is a planes folder, or the file that its manifest names."""
    manifest = (path if path.is_dir() else path.parent) / MANIFEST
    try:
        return manifest.is_file() and (path.is_dir() or read_json(manifest).get("file") == path.name)
    except CheckpointError:
        return path.is_dir()  # then opening says what is wrong with the manifest


class PlanesSource(PlanesFile):
    """An open planes model; made by :meth:`open`.

    Attributes
    ----------
    path : Path
        What the user named.
    """

    kind = "planes"

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, mmap: bool = True) -> Self:
        """Open a folder that holds ``planes.json``, or a planes file.

        Raises
        ------
        CheckpointError
            If the manifest cannot be read or names no file.
        FormatError
            If the file is no planes file.
        """
        path = Path(path)
        if not path.is_dir():
            return super().open(path, mmap=mmap)
        name = read_json(path / MANIFEST).get("file")
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(f"{path / MANIFEST}: file is {shown(name)}; a .safetensors name is needed")
        source = super().open(path / name, mmap=mmap)
        source.path = path
        return source

    @property
    def config(self) -> dict[str, Any]:
        """Content of the config.json beside the file."""
        return read_json(self._folder / "config.json", constants=True)

    @property
    def notes(self) -> list[str]:
        """Notes of the container."""
        return self._file.notes

    def shape(self, name: str) -> tuple[int, ...]:
        """Logical shape."""
        if name in self._where:
            return next(part.shape for part in self._where[name][0].parts if part.name == name)
        return self._stored(name).tensors[name].shape

    def dtype(self, name: str) -> np.dtype[Any]:
        """Stored dtype; float32 for a matrix."""
        return np.dtype(np.float32) if name in self._where else self._stored(name).tensors[name].dtype

    def layout(self, name: str) -> str:
        """``"ternary"``, ``"codebook"``, ``"additive"`` or ``"dense"``."""
        if name in self._where:
            return self._where[name][0].tensor.layout
        self._stored(name)
        return DenseTensor.layout

    def release(self, name: str, rows: slice | None = None) -> None:
        """Drop the mapped pages of a tensor; of a fused one, all of it."""
        self._file.release(self._where[name][0].name if name in self._where else name)

    def tokenizer_file(self) -> Path | None:
        """tokenizer.json, where there is one."""
        path = self._folder / "tokenizer.json"
        return path if path.is_file() else None

    def side_files(self) -> list[Path]:
        """Config, tokenizer and generation files beside the weights."""
        return sorted(p for p in self._folder.iterdir() if SIDE_FILES.fullmatch(p.name) and p.is_file())

    @property
    def _folder(self) -> Path:
        return self._file.path.parent

    def _stored(self, name: str) -> SafetensorsFile:
        if name not in self._dense:
            raise FormatError(f"{self.path}: there is no tensor named {shown(name)}")
        return self._file
