"""Gated delta nets in GGUF files: what lies elsewhere than in a checkpoint, and what is stored otherwise.

===================  ==========================================  ====================================================
checkpoint           file                                        difference
===================  ==========================================  ====================================================
in_proj_qkv          attn_qkv                                    rows of the values by tiled heads
in_proj_z            attn_gate                                   rows by tiled heads
in_proj_a, _b        ssm_alpha, ssm_beta                         rows by tiled heads
conv1d [n, 1, taps]  ssm_conv1d [n, taps]                        channels of the values by tiled heads
A_log                ssm_a                                       -exp(A_log), by tiled heads
dt_bias              ssm_dt.bias                                 by tiled heads
norm                 ssm_norm                                    not more by one, as all other norms of the family
out_proj             ssm_out                                     columns by tiled heads; not where a rotation is folded
                                                                 in and ``prism.hadamard.gdn_v_grouped`` is set
===================  ==========================================  ====================================================

A key head serves ``rep`` consecutive value heads in a checkpoint (grouped: head ``k rep + r``). llama.cpp repeats key
heads as a whole, so its files of the families ``qwen35`` and ``qwen35moe`` have value head ``r keys + k`` there
(tiled). ``qwen3next`` keeps the grouped order.

Source: llama.cpp, conversion/qwen.py; the Prism fork for ``gdn_v_grouped``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trapetum.errors import FormatError
from trapetum.tensors import (
    AdditiveTensor,
    BlockTensor,
    CodebookTensor,
    DenseTensor,
    QuantizedTensor,
    TernaryTensor,
)

__all__ = ["DELTA_FAMILIES", "DeltaSizes", "delta_part", "take_columns"]

DELTA_FAMILIES: Mapping[str, bool] = {"qwen35": True, "qwen35moe": True, "qwen3next": False}
"""Family -> whether value heads are tiled in its files."""

_MARK = ".linear_attn."


def delta_part(name: str) -> str:
    """The part of a delta net that a checkpoint's tensor is; empty for any other tensor.

    Examples
    --------
    >>> delta_part("model.layers.0.linear_attn.in_proj_z.weight"), delta_part("model.layers.0.linear_attn.A_log")
    ('in_proj_z', 'A_log')
    """
    _, mark, rest = name.partition(_MARK)
    return rest.partition(".")[0] if mark else ""


@dataclass(frozen=True)
class DeltaSizes:
    """Heads of the delta nets of a file.

    Parameters
    ----------
    keys, values : int
        Heads.
    key_dim, value_dim : int
        Their widths.
    tiled : bool
        Whether the file has value heads tiled.
    grouped_output : bool
        Whether the columns of ``out_proj`` are grouped nevertheless.
    """

    keys: int
    values: int
    key_dim: int
    value_dim: int
    tiled: bool
    grouped_output: bool = False

    @classmethod
    def read(cls, metadata: Mapping[str, Any], *, grouped_output: bool) -> DeltaSizes | None:
        """Of a file; None where its family has no delta nets.

        Raises
        ------
        FormatError
            If a key is missing or impossible.
        """
        family = str(metadata.get("general.architecture"))
        if family not in DELTA_FAMILIES:
            return None
        keys = ("ssm.group_count", "ssm.time_step_rank", "ssm.state_size", "ssm.inner_size")
        found = [metadata.get(f"{family}.{key}") for key in keys]
        for key, value in zip(keys, found, strict=True):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise FormatError(f"the key {family}.{key} is {value!r}; a positive integer is needed")
        heads, values, key_dim, inner = (int(value) for value in found if value is not None)
        if values % heads or inner % values:
            raise FormatError(f"{values} value heads of {inner} in all do not fit {heads} key heads")
        return cls(heads, values, key_dim, inner // values, DELTA_FAMILIES[family], grouped_output)

    @property
    def moved(self) -> bool:
        """Whether anything changes places."""
        return self.tiled and self.values != self.keys

    @property
    def heads(self) -> NDArray[np.intp]:
        """The checkpoint's head at each place of the file.

        Examples
        --------
        >>> DeltaSizes(2, 6, 4, 4, True).heads.tolist()
        [0, 3, 1, 4, 2, 5]
        """
        if not self.moved:
            return np.arange(self.values)
        return np.arange(self.values).reshape(self.keys, -1).T.reshape(-1)

    def rows(self, part: str) -> NDArray[np.intp] | None:
        """The checkpoint's row (or element) at each place of the file; None where all stay."""
        if not self.moved:
            return None
        wide = (self.heads[:, None] * self.value_dim + np.arange(self.value_dim)).reshape(-1)
        before = 2 * self.keys * self.key_dim
        return {
            "in_proj_qkv": np.concatenate([np.arange(before), before + wide]),
            "conv1d": np.concatenate([np.arange(before), before + wide]),
            "in_proj_z": wide,
            "in_proj_a": self.heads,
            "in_proj_b": self.heads,
            "A_log": self.heads,
            "dt_bias": self.heads,
        }.get(part)

    def columns(self, part: str) -> NDArray[np.intp] | None:
        """The checkpoint's column at each place of the file; None where all stay."""
        if part != "out_proj" or not self.moved or self.grouped_output:
            return None
        return (self.heads[:, None] * self.value_dim + np.arange(self.value_dim)).reshape(-1)

    def cuts(self, part: str, unit: int) -> bool:
        """Whether columns that are stored in units of so many would have to part to change places.

        Examples
        --------
        >>> DeltaSizes(2, 4, 64, 128, True).cuts("out_proj", 256), DeltaSizes(2, 4, 64, 128, True).cuts("out_proj", 128)
        (True, False)
        """
        columns = self.columns(part)
        return columns is not None and _units(columns, unit) is None

    def shape(self, part: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The checkpoint's shape of a file's tensor."""
        return (shape[0], 1, shape[1]) if part == "conv1d" and len(shape) == 2 else shape

    def restored(self, part: str, stored: QuantizedTensor) -> QuantizedTensor:
        """The checkpoint's tensor from a file's, whole.

        Raises
        ------
        FormatError
            If the tensor has other sizes than the keys say, or its blocks cannot change places.
        """
        shape = self.shape(part, stored.shape)
        rows, columns = self.rows(part), self.columns(part)
        if part == "A_log":
            with np.errstate(invalid="ignore", divide="ignore"):
                stored = DenseTensor(np.log(-stored.dequantize()))
        for order, axis in ((rows, 0), (columns, -1)):
            if order is not None and shape[axis] != order.size:
                raise FormatError(
                    f"{part} of a delta net is {list(shape)}, and the keys say {order.size} in that place"
                )
        if rows is not None:
            back = np.argsort(rows)
            if isinstance(stored, BlockTensor):
                stored = BlockTensor(stored.type, stored.blocks[back], stored.shape)
            elif isinstance(stored, DenseTensor):
                stored = DenseTensor(stored.values[back])
        if columns is not None:
            if isinstance(stored, BlockTensor) and self.cuts(part, stored.block_type.block_size):
                stored = DenseTensor(stored.dequantize())
            stored = take_columns(stored, np.argsort(columns))
        if isinstance(stored, DenseTensor) and stored.values.shape != shape:
            stored = DenseTensor(stored.values.reshape(shape))
        return stored


def take_columns(tensor: QuantizedTensor, order: NDArray[np.intp]) -> QuantizedTensor:
    """A tensor with its columns in another order, stored as before.

    Parameters
    ----------
    tensor : QuantizedTensor
    order : ndarray of intp, shape (in_features,)
        Which column comes at each place.

    Raises
    ------
    FormatError
        If columns that are stored as one would have to part.
    """
    if isinstance(tensor, DenseTensor):
        return DenseTensor(np.ascontiguousarray(tensor.values[..., order]))
    mover = _MOVERS.get(tensor.layout)
    if mover is None:
        raise FormatError(f"columns of {tensor.layout} tensors cannot change places")
    return mover(tensor, order)


def _units(order: NDArray[np.intp], size: int) -> NDArray[np.intp] | None:
    """The order of units of ``size`` columns; None where units would be cut."""
    units = order.reshape(-1, size) if order.size % size == 0 else order[:, None]
    if (
        units.shape[1] != size
        or (units != units[:, :1] + np.arange(size)).any()
        or (units[:, 0] % size).any()
    ):
        return None
    return units[:, 0] // size


def _whole_units(order: NDArray[np.intp], size: int, what: str) -> NDArray[np.intp]:
    units = _units(order, size)
    if units is None:
        raise FormatError(
            f"heads are no whole {what} of {size} columns, and would have to be cut to change places"
        )
    return units


def _codebook(tensor: CodebookTensor, order: NDArray[np.intp]) -> QuantizedTensor:
    return CodebookTensor(np.ascontiguousarray(tensor.codes[:, order]), tensor.codebook, tensor.shape)


def _ternary(tensor: TernaryTensor, order: NDArray[np.intp]) -> QuantizedTensor:
    groups = _whole_units(order, tensor.group_size, "groups")
    codes, scales = (np.ascontiguousarray(a) for a in (tensor.codes[:, order], tensor.scales[:, groups]))
    return TernaryTensor(codes, scales, tensor.levels, tensor.rotation, tensor.shape)


def _blocks(tensor: BlockTensor, order: NDArray[np.intp]) -> QuantizedTensor:
    units = _whole_units(order, tensor.block_type.block_size, f"blocks of {tensor.type}")
    size = tensor.block_type.type_size
    moved = tensor.blocks.reshape(tensor.rows, -1, size)[:, units]
    return BlockTensor(tensor.type, np.ascontiguousarray(moved.reshape(tensor.rows, -1)), tensor.shape)


def _additive(tensor: AdditiveTensor, order: NDArray[np.intp]) -> QuantizedTensor:
    groups = _whole_units(order, 8, "groups")
    codes = np.ascontiguousarray(tensor.codes[:, groups])
    return AdditiveTensor(codes, tensor.codebooks, tensor.scales, tensor.shape)


_MOVERS: dict[str, Callable[[Any, NDArray[np.intp]], QuantizedTensor]] = {
    "codebook": _codebook,
    "ternary": _ternary,
    "blocks": _blocks,
    "additive": _additive,
}
