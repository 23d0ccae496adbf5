"""The protocol that everything downstream reads from, and the one table of what a path can be."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np

from trapetum.errors import FormatError, UnsupportedModelError
from trapetum.formats.atomic import WORK_FOLDER
from trapetum.formats.cbk_manifest import MODEL_FILE
from trapetum.formats.manifest import MANIFEST
from trapetum.formats.strict_json import shown
from trapetum.tensors import QuantizedTensor

__all__ = ["KINDS", "TensorSource", "detect", "open_source"]


class TensorSource(Protocol):
    """A readable model: named tensors, a config, a tokenizer. A context manager."""

    @property
    def path(self) -> Path:
        """What the user named."""

    @property
    def kind(self) -> str:
        """Key of the detection table: ``"checkpoint"``, ``"artifact"``, ``"cbk"``."""

    @property
    def config(self) -> dict[str, Any]:
        """Content of config.json; a ``.cbk`` makes one from its header."""

    @property
    def notes(self) -> list[str]:
        """What a person should know: unused files, fall-backs ..."""

    def names(self) -> list[str]:
        """Tensor names in a stable order."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Logical shape."""

    def dtype(self, name: str) -> np.dtype[Any]:
        """Stored dtype; float32 for a quantized tensor."""

    def layout(self, name: str) -> str:
        """Layout, a key of ``trapetum.tensors.LAYOUTS``."""

    def load(self, name: str, rows: slice | None = None) -> QuantizedTensor:
        """A tensor, or some rows of its matrix form as a (selected rows, in_features) tensor."""

    def tokenizer_file(self) -> Path | None:
        """tokenizer.json, where there is one."""

    def side_files(self) -> list[Path]:
        """Config, tokenizer and generation files that travel with the weights."""

    def release(self, name: str, rows: slice | None = None) -> None:
        """Drop the mapped pages of a tensor, or of some of its rows."""

    def close(self) -> None:
        """Close all files."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...


@dataclass(frozen=True)
class Kind:
    """One row of the detection table.

    Parameters
    ----------
    name : str
    text : str
        What it is, for the message that lists what is supported.
    matches : callable
        (path, is_folder, first bytes of a file) -> bool
    open : callable
        (path, mmap) -> TensorSource; imports its reader when called.
    """

    name: str
    text: str
    matches: Callable[[Path, bool, bytes], bool]
    open: Callable[[Path, bool], TensorSource]


def _open_artifact(path: Path, mmap: bool) -> TensorSource:
    from trapetum.formats.artifact import Artifact

    return Artifact.open(path, mmap=mmap)


def _open_checkpoint(path: Path, mmap: bool) -> TensorSource:
    from trapetum.formats.checkpoint import Checkpoint
    from trapetum.formats.packed_ternary import open_checkpoint

    try:
        return open_checkpoint(path, mmap=mmap)
    except UnsupportedModelError as error:  # can be listed; whoever wants weights asks packed_format()
        found = Checkpoint.open(path, mmap=mmap)
        found.notes.append(error.message)
        return found


def _open_cbk(path: Path, mmap: bool) -> TensorSource:
    from trapetum.formats.cbk import CbkFile

    return CbkFile.open(path, mmap=mmap)


def _open_gguf(path: Path, mmap: bool) -> TensorSource:
    from trapetum.formats.gguf_source import GgufSource

    return GgufSource.open(path, mmap=mmap)


def _open_planes(path: Path, mmap: bool) -> TensorSource:
    from trapetum.formats.planes_source import PlanesSource

    return PlanesSource.open(path, mmap=mmap)


def _is_artifact(path: Path, folder: bool, head: bytes) -> bool:
    # An unfinished job is sent here too: Artifact.open says that it is one.
    return folder and ((path / MANIFEST).exists() or (path / WORK_FOLDER).is_dir())


def _is_cbk(path: Path, folder: bool, head: bytes) -> bool:
    if folder:
        return (path / MODEL_FILE).is_file() and not any(path.glob("*.safetensors"))
    return head[:3] == b"CBK" or head[:4] == b"MTP1"


def _is_gguf(path: Path, folder: bool, head: bytes) -> bool:
    if not folder:
        return head[:4] == b"GGUF"
    from trapetum.formats.gguf_source import gguf_file

    return gguf_file(path) is not None


def _is_planes(path: Path, folder: bool, head: bytes) -> bool:
    from trapetum.formats.planes_source import is_planes

    return is_planes(path)


def _is_checkpoint(path: Path, folder: bool, head: bytes) -> bool:
    return folder or path.name.endswith(".safetensors")


KINDS = (
    Kind("artifact", "a folder that `trapetum quantize` wrote", _is_artifact, _open_artifact),
    Kind("cbk", "a .cbk file, or a folder that holds model.cbk", _is_cbk, _open_cbk),
    Kind("gguf", "a .gguf file, or a folder that holds one", _is_gguf, _open_gguf),
    Kind("planes", "a folder that holds planes.json", _is_planes, _open_planes),
    Kind("checkpoint", "a Hugging Face folder or a .safetensors file", _is_checkpoint, _open_checkpoint),
)
"""What a path can be; the first row that matches counts."""


def detect(path: str | os.PathLike[str]) -> Kind:
    """The row of :data:`KINDS` that a path belongs to; files are told by their first bytes.

    Raises
    ------
    FormatError
        If there is nothing at the path, or it is nothing that is known; the message lists what is.
    """
    path = Path(path)
    try:
        folder = path.is_dir()
        head = b""
        if not folder:
            if path.exists() and not path.is_file():
                raise FormatError(f"{path}: neither a regular file nor a folder")
            with open(path, "rb") as file:
                head = file.read(16)
        for kind in KINDS:
            if kind.matches(path, folder, head):
                return kind
    except FileNotFoundError:
        raise FormatError(f"{path}: there is no such file or folder") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise FormatError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    raise FormatError(
        f"{path}: begins with {shown(head)} and is nothing that is known here",
        hint="Supported: " + "; ".join(k.text for k in KINDS) + ".",
    )


def open_source(path: str | os.PathLike[str], *, mmap: bool = True) -> TensorSource:
    """Open whatever model is at a path.

    Parameters
    ----------
    path : path-like
    mmap : bool, default True
        Map files; False reads with pread, which network disks often serve faster.

    Raises
    ------
    TrapetumError
        ``FormatError`` for an unknown path; else what the reader raises.
    """
    return detect(path).open(Path(path), mmap)
