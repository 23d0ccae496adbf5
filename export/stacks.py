"""A model whose routed experts are stacks, however they are stored: what GGUF files hold.

Single experts, halves of fused stacks and whole stacks become ``...experts.gate_proj.weight`` [experts, rows, inputs],
up and down, with biases [experts, rows]. Stored codes are put one under the other as they are: nothing is quantized
again. Only where the experts of a layer do not share a layout are they decoded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from trapetum.errors import CheckpointError
from trapetum.formats.artifact import Artifact
from trapetum.formats.decoded import rotation_of
from trapetum.formats.source import TensorSource
from trapetum.formats.view import SourceView
from trapetum.models.config import ModelConfig
from trapetum.models.experts import SECTION, is_sparse
from trapetum.rotation import HadamardRotation
from trapetum.tensors import BlockTensor, DenseTensor, QuantizedTensor, TernaryTensor, matrix_shape

__all__ = ["MIXED", "Piece", "StackedExperts", "stacked"]

MIXED = "mixed"
"""Layout of a stack whose experts have several."""


@dataclass(frozen=True)
class Piece:
    """Rows of a stored tensor, in its matrix form."""

    name: str
    rows: slice

    @property
    def count(self) -> int:
        """Number of rows."""
        return int(self.rows.stop - self.rows.start)


@dataclass(frozen=True)
class StackRecord:
    """What the artifact says of the experts of a stack, taken together."""

    layout: str
    shape: tuple[int, ...]
    nbytes: int
    relative_error: float | None

    @property
    def parameters(self) -> int:
        """Number of weights."""
        return math.prod(self.shape)


class StackedExperts(SourceView[TensorSource]):
    """A source with stacks in place of experts; implements ``TensorSource``.

    Parameters
    ----------
    source : TensorSource
    stacks : mapping of str to (shape, pieces)
        New names, and the rows that they are made of, in order.

    Attributes
    ----------
    records : dict
        Of an artifact, by the names here.
    """

    def __init__(
        self, source: TensorSource, stacks: dict[str, tuple[tuple[int, ...], tuple[Piece, ...]]]
    ) -> None:
        super().__init__(source)
        self._stacks = stacks
        self._within = {p.name: name for name, (_, pieces) in stacks.items() for p in pieces}
        self._layouts: dict[str, str] = {}
        self.records: dict[str, Any] = (
            self._records(source) if isinstance(source, Artifact | StackedExperts) and source.records else {}
        )

    def names(self) -> list[str]:
        """Names of the stacks after those of all other tensors."""
        return [*(n for n in self.inner.names() if n not in self._within), *self._stacks]

    def shape(self, name: str) -> tuple[int, ...]:
        """Logical shape."""
        return self._stacks[name][0] if name in self._stacks else self.inner.shape(name)

    def dtype(self, name: str) -> np.dtype[Any]:
        """Stored dtype; float32 where experts differ."""
        if name not in self._stacks:
            return self.inner.dtype(name)
        found = {self.inner.dtype(p.name) for p in self._stacks[name][1]}
        return found.pop() if len(found) == 1 else np.dtype(np.float32)

    def layout(self, name: str) -> str:
        """Layout of the tensor, of all experts of a stack, or ``mixed``."""
        if name not in self._stacks:
            return self.inner.layout(name)
        if name not in self._layouts:
            pieces = self._stacks[name][1]
            layouts = {self.inner.layout(p.name) for p in pieces}
            if layouts <= {BlockTensor.layout, TernaryTensor.layout}:
                rows = (self.inner.load(p.name, slice(p.rows.start, p.rows.start + 1)) for p in pieces)
                layouts = {_form(tensor) for tensor in rows}
            layout = layouts.pop().partition(" ")[0]
            self._layouts[name] = MIXED if layouts else layout
        return self._layouts[name]

    def load(self, name: str, rows: slice | None = None) -> QuantizedTensor:
        """A tensor, or some rows of its matrix form; codes of experts one under the other, or their values."""
        if name not in self._stacks:
            return self.inner.load(name, rows)
        shape, _ = self._stacks[name]
        start, stop, _ = (rows or slice(None)).indices(matrix_shape(shape)[0])
        parts = [self.inner.load(p.name, p.rows) for p in self._cut(name, start, stop)]
        joined = _joined(parts, self.layout(name), (max(stop - start, 0), shape[-1]))
        if rows is not None or not isinstance(joined, DenseTensor):
            return joined
        return DenseTensor(joined.values.reshape(shape))

    def rotation_of(self, name: str) -> HadamardRotation | None:
        """The rotation that is folded into a tensor."""
        return rotation_of(self.inner, self._stacks[name][1][0].name if name in self._stacks else name)

    def release(self, name: str, rows: slice | None = None) -> None:
        """Drop the mapped pages of a tensor."""
        for piece in self._stacks[name][1] if name in self._stacks else ():
            self.inner.release(piece.name)
        if name not in self._stacks:
            self.inner.release(name, rows)

    def _cut(self, name: str, start: int, stop: int) -> Iterator[Piece]:
        """The stored rows behind rows ``start`` to ``stop`` of a stack."""
        at = 0
        for piece in self._stacks[name][1]:
            first, last = max(start - at, 0), min(stop - at, piece.count)
            if first < last:
                yield Piece(piece.name, slice(piece.rows.start + first, piece.rows.start + last))
            at += piece.count

    def _records(self, artifact: Artifact | StackedExperts) -> dict[str, Any]:
        found: dict[str, Any] = {n: r for n, r in artifact.records.items() if n not in self._within}
        for name, (shape, pieces) in self._stacks.items():
            own = [artifact.records[p.name] for p in pieces]
            share = [p.count / matrix_shape(r.shape)[0] for p, r in zip(pieces, own)]
            errors = [r.relative_error for r in own if r.relative_error is not None]
            found[name] = StackRecord(
                self.layout(name),
                shape,
                round(sum(r.nbytes * s for r, s in zip(own, share))),
                sum(errors) / len(own) if errors else None,
            )
        return found


def stacked(source: TensorSource, config: ModelConfig) -> TensorSource:
    """The same model with stacks of experts; the source itself where that is what it has.

    Raises
    ------
    CheckpointError
        If an expert is missing.
    """
    arch = config.architecture
    if SECTION not in config.sections:
        return source
    stored = set(source.names())
    names = arch.index(source.names())
    stacks: dict[str, tuple[tuple[int, ...], tuple[Piece, ...]]] = {}
    for layer in filter(lambda i: is_sparse(config, i), range(config.num_hidden_layers)):
        for part in ("gate", "up", "down"):
            module = arch.module(f"experts_{part}")
            shape = tuple(config.size(d) for d in module.shape)
            for bias in (False, True):
                target = module.name(layer, bias=bias)
                if target in stored:
                    continue
                pieces = []
                for expert in range(shape[0]):
                    place = arch.locate(config, names, f"expert_{part}", layer, expert=expert, bias=bias)
                    if place is None:
                        break
                    pieces.append(_piece(source, place.name, place.rows, shape[1], bias=bias))
                if bias and not pieces:
                    continue
                if len(pieces) < shape[0]:
                    missing = arch.tensor_name(f"expert_{part}", layer, expert=len(pieces))
                    raise CheckpointError(f"{source.path}: tensor {missing} is missing")
                stacks[target] = shape[:2] if bias else shape, tuple(pieces)
    return StackedExperts(source, stacks) if stacks else source


def _piece(source: TensorSource, name: str, rows: slice | None, outputs: int, *, bias: bool) -> Piece:
    """The rows of an expert: its matrix, or its bias as one row."""
    if not bias:
        return Piece(name, rows or slice(0, outputs))
    if len(source.shape(name)) > 1:
        raise CheckpointError(
            f"{source.path}: tensor {name} is {list(source.shape(name))}; single biases are stacked"
        )
    return Piece(name, slice(0, 1))


def _form(tensor: QuantizedTensor) -> str:
    """What must agree for codes to lie one under the other."""
    if isinstance(tensor, TernaryTensor):
        return f"{tensor.layout} {tensor.scales.shape[1]}"
    return f"{tensor.layout} {tensor.type if isinstance(tensor, BlockTensor) else ''}"


def _joined(parts: list[QuantizedTensor], layout: str, shape: tuple[int, int]) -> QuantizedTensor:
    if layout == BlockTensor.layout and all(isinstance(p, BlockTensor) for p in parts):
        blocks = [p for p in parts if isinstance(p, BlockTensor)]
        return BlockTensor(blocks[0].type, np.concatenate([p.blocks for p in blocks]))
    if layout == TernaryTensor.layout and all(isinstance(p, TernaryTensor) for p in parts):
        trits = [p for p in parts if isinstance(p, TernaryTensor)]
        codes, scales = (np.concatenate([getattr(p, k) for p in trits]) for k in ("codes", "scales"))
        return TernaryTensor(codes, scales, max(p.levels for p in trits), trits[0].rotation)
    if layout == DenseTensor.layout and all(isinstance(p, DenseTensor) for p in parts):
        return DenseTensor(
            np.concatenate([p.values.reshape(-1, shape[1]) for p in parts if isinstance(p, DenseTensor)])
        )
    return DenseTensor(np.concatenate([p.dequantize().reshape(-1, shape[1]) for p in parts]))
