"""A checkpoint whose tensors are decoded, renamed or turned when they are read: what all packed formats share.

A format says which tensors it means (:meth:`PackedCheckpoint._find_packed`), which stored tensors stand behind them,
and how to decode a block of rows. Everything downstream sees plain weights under the names of the model.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trapetum.formats.checkpoint import Checkpoint
from trapetum.formats.view import CheckpointView
from trapetum.tensors import DenseTensor, QuantizedTensor, matrix_shape

__all__ = ["PackedCheckpoint", "PackedRecord"]

_FLOAT32: np.dtype[Any] = np.dtype(np.float32)
_QUANTIZATION_KEYS = ("quantization_config", "quantization", "compression_config")


@dataclass(frozen=True)
class PackedRecord:
    """What the file holds of one packed tensor: its format and bytes, scales counted."""

    kind: str
    nbytes: int


class PackedCheckpoint(CheckpointView[Checkpoint], ABC):
    """A checkpoint that decodes its packed tensors when they are loaded; implements ``TensorSource``.

    Parameters
    ----------
    inner : Checkpoint
        The files; closed with this.
    """

    _format = "bitnet"

    def __init__(self, inner: Checkpoint) -> None:
        super().__init__(inner)
        self.config = {k: v for k, v in inner.config.items() if k not in _QUANTIZATION_KEYS}
        self._packed = self._find_packed()
        # What is stored, for those who list it (``runtime.inspect``).
        self.records = {name: PackedRecord(self._format, self._stored_bytes(name)) for name in self._packed}

    @abstractmethod
    def _find_packed(self) -> dict[str, tuple[int, ...]]:
        """Packed tensors and their logical shapes."""

    @abstractmethod
    def _companions(self, name: str) -> tuple[str, ...]:
        """Stored tensors that belong to a packed one and are no weights of their own."""

    @abstractmethod
    def _decode(self, name: str, rows: slice) -> NDArray[Any]:
        """Weights of some rows, [rows, in_features] of dtype :meth:`dtype`; ``rows`` has start and stop."""

    def _stored_name(self, name: str) -> str:
        """The stored tensor whose place in the file (and bytes, where it is not packed) a name stands for."""
        return name

    def _logical_names(self, stored: str) -> tuple[str, ...]:
        """Undo :meth:`_stored_name`: what a stored tensor is read as."""
        return (stored,)

    def names(self) -> list[str]:
        """Tensor names in the order of the files, without scales."""
        hidden = {c for name in self._packed for c in self._companions(name)}
        return [read for n in self.inner.names() if n not in hidden for read in self._logical_names(n)]

    def shape(self, name: str) -> tuple[int, ...]:
        """Logical shape."""
        return self._packed[name] if name in self._packed else self.inner.shape(self._stored_name(name))

    def dtype(self, name: str) -> np.dtype[Any]:
        """Stored dtype; float32 of a packed tensor."""
        return _FLOAT32 if name in self._packed else self.inner.dtype(self._stored_name(name))

    def is_packed(self, name: str) -> bool:
        """Whether a tensor is decoded from packed codes."""
        return name in self._packed

    def compact(self, name: str, rows: slice | None = None) -> QuantizedTensor:
        """What :meth:`load` gives, in the form that is stored where a layout holds it: for who keeps all of it."""
        return self.load(name, rows)

    def file(self, name: str) -> Path:
        """The file that holds a tensor, for messages."""
        return self.inner.file(self._stored_name(name))

    def load(self, name: str, rows: slice | None = None) -> DenseTensor:
        """A tensor, or some rows of its matrix form, decoded where it is packed.

        Raises
        ------
        CheckpointError
            If there is no such tensor, or its codes or scales are none of the format's.
        """
        if name not in self._packed:
            return self.inner.load(self._stored_name(name), rows)
        shape = self._packed[name]
        start, stop, _ = (rows or slice(None)).indices(matrix_shape(shape)[0])
        values = self._decode(name, slice(start, max(start, stop)))
        return DenseTensor(values if rows is not None else values.reshape(shape))

    def release(self, name: str, rows: slice | None = None) -> None:
        """Drop mapped pages: those of the whole tensor where it is packed."""
        self.inner.release(self._stored_name(name), None if name in self._packed else rows)

    def _stored_bytes(self, name: str) -> int:
        stored = (self._stored_name(name), *self._companions(name))
        return sum(math.prod(self.inner.shape(n)) * self.inner.dtype(n).itemsize for n in stored)
