"""A view of a model with delta nets as GGUF files hold them: value heads tiled, projections apart, rates as numbers.

Rows change places as they are stored (``export.stacks`` puts pieces one under the other); columns of ``out_proj`` are
moved inside rows, whole groups or blocks at a time. ``A_log`` becomes ``-exp(A_log)``, the convolution loses its middle
dimension. See ``formats.gguf_delta``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trapetum.export.stacks import Piece, StackedExperts
from trapetum.formats.decoded import rotation_of
from trapetum.formats.gguf_delta import DELTA_FAMILIES, DeltaSizes, delta_part, take_columns
from trapetum.formats.gguf_values import KeyValue, ValueType
from trapetum.formats.source import TensorSource
from trapetum.models.config import ModelConfig
from trapetum.models.qwen_next import DELTA, LINEAR, DeltaOptions
from trapetum.runtime.delta import DeltaHeads
from trapetum.tensors import BlockTensor, DenseTensor, QuantizedTensor

__all__ = ["DeltaView", "delta_pairs", "delta_sizes", "fused_deltas", "stored_deltas"]

_SECTIONS = [11, 11, 10, 0]  # of the rotary embedding of images and text; engines insist on the key


def delta_sizes(config: ModelConfig, source: TensorSource) -> DeltaSizes | None:
    """Heads of a model's delta nets and their order in a file; None where it has none."""
    options = config.sections.get(DELTA)
    if not isinstance(options, DeltaOptions):
        return None
    outputs = [n for n in source.names() if delta_part(n) == "out_proj" and n.endswith("weight")]
    return DeltaSizes(
        options.key_heads,
        options.value_heads,
        options.key_dim,
        options.value_dim,
        DELTA_FAMILIES[str(config.architecture.gguf)],
        any(rotation_of(source, name) is not None for name in outputs),
    )


class DeltaView(StackedExperts):
    """See the module; implements ``TensorSource``.

    Parameters
    ----------
    source : TensorSource
    stacks : mapping
        Tensors whose rows change places; see :class:`~trapetum.export.stacks.StackedExperts`.
    sizes : DeltaSizes
    """

    def __init__(
        self,
        source: TensorSource,
        stacks: dict[str, tuple[tuple[int, ...], tuple[Piece, ...]]],
        sizes: DeltaSizes,
    ) -> None:
        self.sizes = sizes
        super().__init__(source, stacks)

    def shape(self, name: str) -> tuple[int, ...]:
        """Logical shape; of a convolution without the middle dimension."""
        shape = super().shape(name)
        return (shape[0], shape[-1]) if delta_part(name) == "conv1d" else shape

    def load(self, name: str, rows: slice | None = None) -> QuantizedTensor:
        """A tensor as the file has it, or some rows of its matrix form."""
        tensor, part = super().load(name, rows), delta_part(name)
        columns = self.sizes.columns(part)
        if columns is not None:
            if isinstance(tensor, BlockTensor) and self.sizes.cuts(part, tensor.block_type.block_size):
                tensor = DenseTensor(tensor.dequantize())
            tensor = take_columns(tensor, columns)
        if part in ("A_log", "dt_bias") and isinstance(tensor, DenseTensor):
            order = self.sizes.rows(part)
            values = tensor.values.reshape(-1)
            values = values if order is None else values[order]
            tensor = DenseTensor(-np.exp(values.astype(np.float32)) if part == "A_log" else values)
        if part == "conv1d" and isinstance(tensor, DenseTensor):
            tensor = DenseTensor(tensor.values.reshape(-1, tensor.values.shape[-1]))
        return tensor

    def cut_type(self, name: str) -> str | None:
        """Type of the blocks that are cut where heads change places, so that values alone are left; None for others."""
        part = delta_part(name)
        if self.sizes.columns(part) is None or super().layout(name) != BlockTensor.layout:
            return None
        first = super().load(name, slice(0, 1))
        is_cut = isinstance(first, BlockTensor) and self.sizes.cuts(part, first.block_type.block_size)
        return first.type if isinstance(first, BlockTensor) and is_cut else None

    def layout(self, name: str) -> str:
        """Layout of what :meth:`load` gives."""
        return super().layout(name) if self.cut_type(name) is None else DenseTensor.layout

    def dtype(self, name: str) -> np.dtype[Any]:
        """Stored dtype; float32 of rates."""
        return np.dtype(np.float32) if delta_part(name) == "A_log" else super().dtype(name)


def stored_deltas(source: TensorSource, config: ModelConfig) -> TensorSource:
    """The same model as a GGUF of its family holds it; the source itself where it has no delta nets."""
    sizes = delta_sizes(config, source)
    if sizes is None:
        return source
    arch = config.architecture
    names = arch.index(source.names())
    stacks: dict[str, tuple[tuple[int, ...], tuple[Piece, ...]]] = {}
    for layer in (i for i, kind in enumerate(config.layer_types) if kind == LINEAR):
        if (fused := arch.locate(config, names, "delta_qkvz", layer)) is not None:
            heads = DeltaHeads(sizes.keys, sizes.values, sizes.key_dim, sizes.value_dim)
            order, _ = heads.fused_order()
            parts = {"delta_qkv": order[: heads.channels], "delta_z": order[heads.channels :]}
            for part, rows in parts.items():
                made = arch.tensor_name(part, layer)
                stacks[made] = (rows.size, source.shape(fused.name)[-1]), _pieces(fused.name, rows)
        for part in ("delta_qkv", "delta_z", "delta_a", "delta_b", "delta_conv"):
            place = arch.locate(config, names, part, layer)
            if place is not None and (moved := sizes.rows(delta_part(place.name))) is not None:
                stacks[place.name] = source.shape(place.name), _pieces(place.name, moved)
    return DeltaView(source, stacks, sizes)


def fused_deltas(source: TensorSource, config: ModelConfig) -> TensorSource:
    """The same model with ``in_proj_qkvz`` as its family's checkpoints have it; the source itself where it needs none.

    The projections that a GGUF has apart are put together by key heads, row by row as they are stored.
    """
    options, arch = config.sections.get(DELTA), config.architecture
    if not isinstance(options, DeltaOptions) or "delta_qkvz" not in {m.part for m in arch.modules}:
        return source
    keys, width = options.key_heads, options.key_dim
    values = options.value_heads // keys * options.value_dim  # rows of the value heads that a key head serves
    names = arch.index(source.names())
    stacks: dict[str, tuple[tuple[int, ...], tuple[Piece, ...]]] = {}
    for layer in (i for i, kind in enumerate(config.layer_types) if kind == LINEAR):
        apart = [arch.locate(config, names, part, layer) for part in ("delta_qkv", "delta_z")]
        qkv, z = (None if place is None else place.name for place in apart)
        if qkv is None or z is None:
            continue
        pieces: list[Piece] = []
        for head in range(keys):
            key, value = head * width, head * values
            pieces += [
                Piece(qkv, slice(key, key + width)),
                Piece(qkv, slice(keys * width + key, keys * width + key + width)),
                Piece(qkv, slice(2 * keys * width + value, 2 * keys * width + value + values)),
                Piece(z, slice(value, value + values)),
            ]
        shape = sum(piece.count for piece in pieces), source.shape(qkv)[-1]
        stacks[arch.tensor_name("delta_qkvz", layer)] = shape, tuple(pieces)
    return StackedExperts(source, stacks) if stacks else source


def _pieces(name: str, order: NDArray[np.intp]) -> tuple[Piece, ...]:
    """Runs of consecutive rows."""
    breaks = np.flatnonzero(np.diff(order) != 1) + 1
    return tuple(Piece(name, slice(int(run[0]), int(run[-1]) + 1)) for run in np.split(order, breaks))


def delta_pairs(config: ModelConfig, source: TensorSource) -> Mapping[str, KeyValue]:
    """Keys of a model with delta nets."""
    sizes, options = delta_sizes(config, source), config.sections.get(DELTA)
    if sizes is None or not isinstance(options, DeltaOptions):
        return {}
    counts = {
        "ssm.conv_kernel": options.taps,
        "ssm.state_size": sizes.key_dim,
        "ssm.group_count": sizes.keys,
        "ssm.time_step_rank": sizes.values,
        "ssm.inner_size": sizes.values * sizes.value_dim,
    }
    linear = [kind == LINEAR for kind in config.layer_types]
    interval = next((i + 1 for i, one in enumerate(linear) if not one), len(linear))
    pairs = {key: KeyValue.count(value) for key, value in counts.items()}
    pairs["full_attention_interval"] = KeyValue.count(interval)
    pairs["attention.recurrent_layers"] = KeyValue(linear, ValueType.ARRAY, ValueType.BOOL)
    if DELTA_FAMILIES[str(config.architecture.gguf)]:
        pairs["rope.dimension_sections"] = KeyValue(_SECTIONS, ValueType.ARRAY, ValueType.INT32)
    return {f"{config.architecture.gguf}.{key}": pair for key, pair in pairs.items()}
