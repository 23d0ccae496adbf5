"""Matrix products on the card, from weights as they are stored.

Parts that read the same input (q, k, v; gate, up) become one product where their layouts allow it: one launch instead
of three, and shares of rows large enough for every multiprocessor. What has no kernel of its own (dense tensors, GGUF
blocks, tables in float32, ternary groups of 64) is decoded to float16 and multiplied by cuBLAS.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from trapetum.errors import KernelUnavailable
from trapetum.formats import planes
from trapetum.formats.planes import GROUP_SIZE, tensor_planes
from trapetum.formats.planes_entries import MatrixEntry, TilesEntry
from trapetum.formats.planes_source import PlanesSource
from trapetum.formats.tiles import AdditiveTiles, tiles_for
from trapetum.kernels.cuda.dense import multiply_dense
from trapetum.kernels.cuda.linear import cuda_linear
from trapetum.kernels.cuda.module import import_cupy, kernels
from trapetum.kernels.cuda.rotate import rotate
from trapetum.tensors import DenseTensor, QuantizedTensor, TernaryTensor, matrix_shape

if TYPE_CHECKING:
    from trapetum.kernels.cuda.workspace import Workspace
    from trapetum.rotation import HadamardRotation
    from trapetum.runtime.weights import Weights

__all__ = ["CardMatrix", "DenseCardMatrix", "Output", "Product", "build_product", "upload"]


class CardMatrix(Protocol):
    """What multiplies on the card: ``kernels.cuda.linear.CudaLinear``, or :class:`DenseCardMatrix`."""

    rows: int
    in_features: int

    @property
    def nbytes(self) -> int:
        """Bytes that a product reads."""

    def multiply(self, x: Any, out: Any = None, stream: Any = None) -> Any:
        """``x W^T``: float16 [tokens, in_features] -> ``out`` float32 [tokens, rows]."""

    def take(self, ids: Any, out: Any, stream: Any = None) -> Any:
        """Rows ``ids`` (int32) -> ``out`` float32 [count, in_features]."""


class DenseCardMatrix:
    """A dense float16 matrix, multiplied by cuBLAS with float32 sums.

    Parameters
    ----------
    weight : cupy.ndarray of float16, shape (rows, in_features)
    """

    def __init__(self, weight: Any) -> None:
        self.weight = weight
        self.rows, self.in_features = weight.shape

    @property
    def nbytes(self) -> int:
        """Bytes that a product reads."""
        return int(self.weight.nbytes)

    def multiply(self, x: Any, out: Any = None, stream: Any = None) -> Any:
        """See :class:`CardMatrix`."""
        if out is None:
            out = import_cupy().empty((x.shape[0], self.rows), np.float32)
        multiply_dense(x, self.weight, self.rows, out, stream=stream)
        return out

    def take(self, ids: Any, out: Any, stream: Any = None) -> Any:
        """See :class:`CardMatrix`."""
        kernel = kernels("decoder_f16")["embed_dense"]
        arguments = (self.weight, ids, out, np.int32(self.in_features), np.float32(1))
        kernel.launch((ids.shape[0],), 1024, arguments, 0, stream, early=True)
        return out


@dataclass(frozen=True)
class Output:
    """Where a part's result lies: a float32 buffer, the first element, elements from one token to the next."""

    buffer: Any
    start: int
    stride: int

    @property
    def pointer(self) -> Any:
        """Address of the first element, as kernels take it."""
        return self.buffer.reshape(-1)[self.start :]


class Product:
    """One or several matrices that read the same input.

    Parameters
    ----------
    matrices : sequence of CardMatrix
    parts : sequence of (int, int)
        Of each part: which matrix, and its first row there.
    biases : sequence of cupy.ndarray of float32 or None
        One a matrix.
    rotation : HadamardRotation, optional
        Folded into all of them.
    """

    def __init__(
        self,
        matrices: Sequence[CardMatrix],
        parts: Sequence[tuple[int, int]],
        biases: Sequence[Any],
        rotation: HadamardRotation | None = None,
    ) -> None:
        self.matrices, self.parts, self.biases, self.rotation = matrices, parts, biases, rotation
        self.rows = sum(m.rows for m in matrices)
        self.in_features = matrices[0].in_features
        self._signs: Any = None
        if rotation is not None:
            self._signs = import_cupy().asarray(rotation.signs[self.in_features].astype(np.int8))

    @property
    def nbytes(self) -> int:
        """Bytes of weights that a step reads."""
        return sum(m.nbytes for m in self.matrices)

    def buffers(self, tokens: int) -> list[Any]:
        """Fresh float32 results of so many tokens, one a matrix."""
        cupy = import_cupy()
        return [cupy.empty((tokens, m.rows), cupy.float32) for m in self.matrices]

    def outputs(self, buffers: Sequence[Any]) -> list[Output]:
        """Where each part lies in :meth:`buffers`."""
        return [Output(buffers[i], row, self.matrices[i].rows) for i, row in self.parts]

    def take(self, ids: Any, out: Any, stream: Any = None) -> None:
        """Rows ``ids`` (int32) of the only matrix -> ``out`` float32 [count, in_features], turned back if rotated."""
        self.matrices[0].take(ids, out, stream)
        if self.rotation is not None:
            rotate(out, self._signs, self.rotation.block_size, after=True, stream=stream)

    def __call__(self, x: Any, buffers: Sequence[Any], stream: Any = None) -> None:
        """Multiply float16 [tokens, in_features] into ``buffers``; ``x`` is rotated in place where weights are."""
        if self.rotation is not None:
            rotate(x, self._signs, self.rotation.block_size, stream=stream)
        for matrix, bias, out in zip(self.matrices, self.biases, buffers, strict=True):
            matrix.multiply(x, out, stream)
            if bias is not None:
                kernel = kernels("decoder_f16")["add_bias"]
                grid = (-(-matrix.rows // 256), x.shape[0])
                kernel.launch(grid, 256, (out, bias, np.int32(matrix.rows)), 0, stream, early=True)


def build_product(weights: Weights, parts: Sequence[str], layer: int | None, workspace: Workspace) -> Product:
    """Upload parts of a model that read the same input.

    Parameters
    ----------
    weights : Weights
    parts : sequence of str
        In the order in which their rows follow one another.
    layer : int, optional
    workspace : Workspace

    Raises
    ------
    KernelUnavailable
        If there is no card, or the parts are rotated by different rotations.
    CheckpointError
        If a part is missing.
    """
    from trapetum.formats.decoded import rotation_of

    cupy = import_cupy()
    places = [weights.place(part, layer) for part in parts]
    rotations = [rotation_of(weights.source, place.name) for place in places]
    if any(rotation != rotations[0] for rotation in rotations):
        raise KernelUnavailable(
            f"{places[0].name} and {places[-1].name} read one input and are rotated differently"
        )
    biases = [weights.bias(part, layer) for part in parts]
    source, entry = weights.source, None
    if isinstance(source, PlanesSource) and all(place.rows is None for place in places):
        entry = source.whole([place.name for place in places])
    if isinstance(source, PlanesSource) and entry is not None:  # bytes as they are
        counts = [matrix_shape(part.shape)[0] for part in entry.parts]
        groups, matrices = [list(range(len(parts)))], [_stored(source, entry, workspace)]
    else:
        tensors = [weights.source.load(place.name, place.rows) for place in places]
        counts, groups = [tensor.rows for tensor in tensors], _groups(tensors)
        matrices = [upload([tensors[i] for i in group], workspace) for group in groups]
    for place in places:
        weights.source.release(place.name, place.rows)
    where: dict[int, tuple[int, int]] = {}
    joined: list[Any] = []
    for number, group in enumerate(groups):
        start = 0
        for i in group:
            where[i] = number, start
            start += counts[i]
        if all(biases[i] is None for i in group):
            joined.append(None)
        else:
            zeros = [np.zeros(counts[i], np.float32) for i in group]
            known = [z if (b := biases[i]) is None else b for z, i in zip(zeros, group, strict=True)]
            joined.append(cupy.asarray(np.concatenate(known)))
    return Product(matrices, [where[i] for i in range(len(parts))], joined, rotations[0])


def _stored(source: PlanesSource, entry: MatrixEntry, workspace: Workspace) -> CardMatrix:
    """A matrix of a planes file, without another layout in between."""
    count = entry.tiles.entries if isinstance(entry, TilesEntry) else 0
    data = np.asarray(source.raw(entry.name)).reshape(-1)
    return cuda_linear(entry.layout, data, entry.rows, entry.in_features, count, workspace)


def _layout(tensor: QuantizedTensor) -> str:
    """The layout on the card; ``dense`` where there is no kernel."""
    if isinstance(tensor, TernaryTensor):
        fits = tensor.group_size == GROUP_SIZE and tensor.scales.dtype == np.float16
        return planes.LAYOUT if fits else DenseTensor.layout
    kind = tiles_for(tensor)
    return DenseTensor.layout if kind is None else kind.layout


def _groups(tensors: Sequence[QuantizedTensor]) -> list[list[int]]:
    """Which tensors become one matrix: those of one layout, except additive ones, whose codebooks are their own."""
    groups: dict[object, list[int]] = {}
    for i, tensor in enumerate(tensors):
        layout = _layout(tensor)
        groups.setdefault(i if layout == AdditiveTiles.layout else layout, []).append(i)
    return list(groups.values())


def upload(tensors: Sequence[QuantizedTensor], workspace: Workspace) -> CardMatrix:
    """Tensors of one layout, concatenated by rows, as a matrix on the card.

    Raises
    ------
    KernelUnavailable
        If there is no card, or a layout without kernels holds weights beyond float16.
    """
    cupy = import_cupy()
    layout = _layout(tensors[0])
    rows, width = sum(t.rows for t in tensors), tensors[0].in_features
    if layout == DenseTensor.layout:
        weight = cupy.empty((rows, width), cupy.float16)
        start = 0
        for tensor in tensors:
            step = max(1, (1 << 25) // width)
            for first in range(0, tensor.rows, step):
                block = tensor.dequantize(slice(first, first + step)).reshape(-1, width)
                with np.errstate(over="ignore"):
                    half = block.astype(np.float16)
                if not np.isfinite(half).all():
                    raise KernelUnavailable("weights beyond the range of float16 do not run on the card")
                weight[start + first : start + first + half.shape[0]] = cupy.asarray(half)
            start += tensor.rows
        return DenseCardMatrix(weight)
    if layout == planes.LAYOUT:
        data = tensor_planes([t for t in tensors if isinstance(t, TernaryTensor)])
        return cuda_linear(layout, data, rows, width, 0, workspace)
    kind = tiles_for(tensors[0])
    assert kind is not None
    sizes = kind.of(tensors)
    return cuda_linear(layout, sizes.pack(tensors), rows, width, sizes.entries, workspace)
