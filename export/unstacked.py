"""A model whose routed experts are named and stored as its family's own checkpoints have them.

What was read from a GGUF has one stack a part; transformers wants single experts back. gpt-oss is the exception: there
a checkpoint holds ``gate_up_proj`` [experts, inputs, outputs], gate and up alternating, and its transpose is what is
quantized (``formats.packed_mxfp4``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trapetum.formats.decoded import decoded, rotation_of
from trapetum.formats.packed_mxfp4 import is_gpt_oss
from trapetum.formats.source import TensorSource
from trapetum.formats.view import SourceView
from trapetum.models.architectures import resolve
from trapetum.rotation import HadamardRotation
from trapetum.tensors import DenseTensor, QuantizedTensor, matrix_shape

__all__ = ["UnstackedExperts", "unstacked"]


@dataclass(frozen=True)
class _Rows:
    """A single expert: some rows of a stack."""

    name: str
    rows: slice


@dataclass(frozen=True)
class _Turned:
    """A stack of gpt-oss: the transposes of one or two stacks, outputs alternating."""

    names: tuple[str, ...]


class UnstackedExperts(SourceView[TensorSource]):
    """A source with a checkpoint's own tensors in place of stacks; implements ``TensorSource``.

    Parameters
    ----------
    source : TensorSource
    made : mapping of str to (shape, where its values are)
        In the order of the source; a name without an entry is the source's own.
    names : list of str
    """

    def __init__(
        self, source: TensorSource, made: dict[str, tuple[tuple[int, ...], _Rows | _Turned]], names: list[str]
    ) -> None:
        super().__init__(source)
        self._made, self._names = made, names
        self._expert: tuple[tuple[str, int], NDArray[np.float32]] | None = (
            None  # the last one that was turned
        )

    def names(self) -> list[str]:
        """Names in the order of the source."""
        return list(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        """Logical shape."""
        return self._made[name][0] if name in self._made else self.inner.shape(name)

    def dtype(self, name: str) -> np.dtype[Any]:
        """Stored dtype."""
        return self.inner.dtype(self._origin(name))

    def layout(self, name: str) -> str:
        """Layout of what a tensor is made of."""
        return self.inner.layout(self._origin(name))

    def load(self, name: str, rows: slice | None = None) -> QuantizedTensor:
        """A tensor, or some rows of its matrix form; decoded where it is turned."""
        if name not in self._made:
            return self.inner.load(name, rows)
        shape, where = self._made[name]
        start, stop, _ = (rows or slice(None)).indices(matrix_shape(shape)[0])
        stop = max(start, stop)
        if isinstance(where, _Rows):
            return self.inner.load(where.name, slice(where.rows.start + start, where.rows.start + stop))
        values = self._bias(where) if len(shape) == 2 else self._turned(where, shape, start, stop)
        values = values[start:stop] if len(shape) == 2 else values
        return DenseTensor(values if rows is not None else values.reshape(shape))

    def rotation_of(self, name: str) -> HadamardRotation | None:
        """The rotation that is folded into what ``load`` gives; undone where that is turned."""
        turned = name in self._made and isinstance(self._made[name][1], _Turned)
        return None if turned else rotation_of(self.inner, self._origin(name))

    def release(self, name: str, rows: slice | None = None) -> None:
        """Drop the mapped pages of a tensor."""
        if name in self._made:
            self.inner.release(self._origin(name))
        else:
            self.inner.release(name, rows)

    def _origin(self, name: str) -> str:
        if name not in self._made:
            return name
        where = self._made[name][1]
        return where.name if isinstance(where, _Rows) else where.names[0]

    def _bias(self, where: _Turned) -> NDArray[np.float32]:
        return _alternating([self.inner.load(n).dequantize() for n in where.names])

    def _turned(self, where: _Turned, shape: tuple[int, ...], start: int, stop: int) -> NDArray[np.float32]:
        inputs, outputs = shape[1:]
        parts = [np.empty((0, outputs), np.float32)]
        for expert in range(start // inputs, -(-stop // inputs)):
            first, last = max(start - expert * inputs, 0), min(stop - expert * inputs, inputs)
            parts.append(self._whole(where, expert)[:, first:last].T)
        return np.concatenate(parts)

    def _whole(self, where: _Turned, expert: int) -> NDArray[np.float32]:
        """Rows of an expert, one an output; kept until another is asked for, since blocks of rows cut across them."""
        key = where.names[0], expert
        if self._expert is None or self._expert[0] != key:
            height = self.inner.shape(where.names[0])[1]
            rows = slice(expert * height, (expert + 1) * height)
            stacks = [decoded(self.inner, n, rows).T for n in where.names]
            self._expert = key, _alternating(stacks).T
        return self._expert[1]


def _alternating(parts: list[NDArray[np.float32]]) -> NDArray[np.float32]:
    """Columns of the parts in turns."""
    return np.stack(parts, axis=-1).reshape(parts[0].shape[0], -1)


def unstacked(source: TensorSource) -> TensorSource:
    """The same model as a checkpoint of its family; the source itself where it has no stacks of ours."""
    arch = resolve(source.config, any_architecture=True)
    turned = is_gpt_oss(source.config)
    made: dict[str, tuple[tuple[int, ...], _Rows | _Turned]] = {}
    names: list[str] = []
    stored = set(source.names())
    for name in source.names():
        role = arch.role(name)
        stack = role.part.removeprefix("experts_")
        if stack not in ("gate", "up", "down") or stack == role.part:
            names.append(name)
            continue
        shape = source.shape(name)
        if turned:
            stem, _, suffix = name.rpartition(f".experts.{stack}_proj.")
            both = tuple(f"{stem}.experts.{part}_proj.{suffix}" for part in ("gate", "up"))
            if stack == "up" and both[0] in stored:
                continue
            parts = (name,) if stack == "down" else both
            target = f"{stem}.experts.{'down' if stack == 'down' else 'gate_up'}_proj" + (
                "_bias" if suffix == "bias" else ""
            )
            rows = len(parts) * shape[1]
            made[target] = (
                (shape[0], rows) if suffix == "bias" else (shape[0], shape[2], rows),
                _Turned(parts),
            )
            names.append(target)
            continue
        for expert in range(shape[0]):
            single = arch.tensor_name(f"expert_{stack}", role.layer, expert=expert)
            made[single] = shape[1:], _Rows(name, slice(expert * shape[1], (expert + 1) * shape[1]))
            names.append(single)
    return UnstackedExperts(source, made, names) if made else source
