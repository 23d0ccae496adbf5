"""What views of a source share: everything that a view does not present in another form is the source's own.

A view decodes, turns, stacks, splits or replaces tensors of a source. It overrides what that changes; the rest (and the
files, which are closed with it) is handed on. :class:`CheckpointView` adds the members that a job asks for.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

import numpy as np

from trapetum.errors import CheckpointError
from trapetum.formats.decoded import rotation_of
from trapetum.formats.source import TensorSource
from trapetum.rotation import HadamardRotation
from trapetum.tensors import DenseTensor, QuantizedTensor

if TYPE_CHECKING:
    from trapetum.formats.checkpoint import Checkpoint
    from trapetum.formats.gguf_checkpoint import GgufCheckpoint

__all__ = ["CheckpointView", "ReplacedTensors", "SourceView"]

Inner = TypeVar("Inner", bound=TensorSource)
Stored = TypeVar("Stored", bound="Checkpoint | GgufCheckpoint | CheckpointView[Any]")


class SourceView(Generic[Inner]):
    """A ``TensorSource`` that hands everything on.

    Parameters
    ----------
    inner : TensorSource
        Closed with the view.
    """

    def __init__(self, inner: Inner) -> None:
        self.inner = inner
        self.path: Path = inner.path
        self.kind: str = inner.kind
        self.config: dict[str, Any] = inner.config
        self.notes: list[str] = inner.notes

    def names(self) -> list[str]:
        """Tensor names in a stable order."""
        return self.inner.names()

    def shape(self, name: str) -> tuple[int, ...]:
        """Logical shape."""
        return self.inner.shape(name)

    def dtype(self, name: str) -> np.dtype[Any]:
        """Stored dtype."""
        return self.inner.dtype(name)

    def layout(self, name: str) -> str:
        """Layout of a tensor."""
        return self.inner.layout(name)

    def load(self, name: str, rows: slice | None = None) -> QuantizedTensor:
        """A tensor, or some rows of its matrix form."""
        return self.inner.load(name, rows)

    def release(self, name: str, rows: slice | None = None) -> None:
        """Drop mapped pages."""
        self.inner.release(name, rows)

    def tokenizer_file(self) -> Path | None:
        """tokenizer.json, where there is one."""
        return self.inner.tokenizer_file()

    def side_files(self) -> list[Path]:
        """Config, tokenizer and generation files."""
        return self.inner.side_files()

    def close(self) -> None:
        """Close all files."""
        self.inner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class CheckpointView(SourceView[Stored]):
    """A view that a job can quantize: its tensors are dense, its files are known.

    Parameters
    ----------
    inner : Checkpoint, GgufCheckpoint or CheckpointView
        Closed with the view.
    """

    def __init__(self, inner: Stored) -> None:
        super().__init__(inner)
        self.folder: Path = inner.folder
        self.title: str = inner.title
        self.files: list[Any] = list(inner.files)
        self.notes = list(inner.notes)

    def layout(self, name: str) -> str:
        """Always ``"dense"``."""
        return DenseTensor.layout

    def load(self, name: str, rows: slice | None = None) -> DenseTensor:
        """A tensor, or some rows of its matrix form."""
        return self.inner.load(name, rows)

    def file(self, name: str) -> Path:
        """The file that holds a tensor, for messages."""
        return self.inner.file(name)

    def packed_format(self) -> str | None:
        """None: the weights that are read here are plain."""
        return None

    def is_packed(self, name: str) -> bool:
        """Whether a tensor is decoded from packed codes."""
        return False

    def block_type(self, name: str) -> str | None:
        """The type of the blocks that :meth:`stored` gives; None where the decoded values are all there is."""
        return None

    def stored(self, name: str, rows: slice | None = None) -> QuantizedTensor:
        """The blocks of a tensor that has a :meth:`block_type`, or what else is taken over as it is.

        Raises
        ------
        CheckpointError
            If it has none.
        """
        raise self._bad(name, "is not stored in blocks")

    def _bad(self, name: str, text: str) -> CheckpointError:
        return CheckpointError(f"{self.file(name)}: tensor {name}: {text}")


class ReplacedTensors(SourceView[Inner]):
    """A source some of whose tensors are others, as the model is to see them.

    Parameters
    ----------
    inner : TensorSource
        Closed with the view.

    Attributes
    ----------
    tensors : mapping of str to QuantizedTensor
        What is read instead; may be another mapping at any time.
    """

    def __init__(self, inner: Inner) -> None:
        super().__init__(inner)
        self.tensors: Mapping[str, QuantizedTensor] = {}

    def layout(self, name: str) -> str:
        """Layout of a tensor."""
        return self.tensors[name].layout if name in self.tensors else self.inner.layout(name)

    def load(self, name: str, rows: slice | None = None) -> QuantizedTensor:
        """A tensor, or some rows of its matrix form; rows of what is replaced are decoded."""
        found = self.tensors.get(name)
        if found is None:
            return self.inner.load(name, rows)
        return found if rows is None else DenseTensor(found.dequantize(rows))

    def rotation_of(self, name: str) -> HadamardRotation | None:
        """The rotation folded into a tensor; None of what is replaced."""
        return None if name in self.tensors else rotation_of(self.inner, name)
