"""FP8 checkpoints: 8-bit floats beside scales, read as the weights that they mean, by row blocks.

A matrix of ``F8_E4M3`` or ``F8_E5M2`` has a companion ``NAME_scale_inv`` or ``NAME_scale``; whichever it is, weight =
value * scale (the "inverse" is that of the scale that made the codes). The number of elements says first what a scale
belongs to, then its shape:

=====================================  =================================================================================
scales                                 one for
=====================================  =================================================================================
one element, of any shape              the tensor
``[rows]`` or ``[rows, 1]``            each row (output channel)
``[ceil(rows / h), ceil(cols / w)]``   each block of ``quantization_config.weight_block_size`` = [h, w], 128 x 128 where
                                       the config does not say; the last blocks of a ragged matrix are smaller
``[experts, ...]``                     the same for each matrix of a stack: no block reaches into the next expert
=====================================  =================================================================================

Scales of activations (``input_scale``) belong to no weight and are left out. A product has up to 28 significant bits;
it is rounded once to float32, as torch does. Where scales are powers of two by their type (``F8_E8M0``) or by
``quantization_config.scale_fmt`` (``ue8m0``), every weight is exact in bfloat16, and that is the tensor's dtype; it is
float32 elsewhere. Opening reads no weights and no scales. Codes 0x7F and 0xFF are NaN, which a job refuses by name as
it does in any checkpoint.

Source: transformers 5 integrations/finegrained_fp8.py; compressed-tensors ``float-quantized``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from trapetum.errors import CheckpointError, UnsupportedModelError, listed
from trapetum.formats.checkpoint import Checkpoint
from trapetum.formats.packed_checkpoint import PackedCheckpoint
from trapetum.tensors import Float8Tensor, QuantizedTensor, matrix_shape
from trapetum.tensors.float8 import FLOAT8

__all__ = ["Fp8Checkpoint"]

_BFLOAT16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
_BLOCK = (128, 128)
_SCALES = ("_scale_inv", "_scale")
_ACTIVATIONS = (".input_scale", ".input_scale_inv", ".input_activation_scale", ".activation_scale")
_PLAIN_FORMATS = ("float-quantized", "naive-quantized")
_MANTISSA = np.uint32(0x007FFFFF)
_SAFE = (2.0**-100, 2.0**100)  # no product leaves bfloat16's normal range


class Fp8Checkpoint(PackedCheckpoint):
    """Matrices of 8-bit floats, each beside its scales."""

    _format = "fp8"

    def __init__(self, inner: Checkpoint) -> None:
        self._block, self._powers = _checked_settings(inner)
        self._stored = set(inner.names())
        super().__init__(inner)
        exact = sum(self.dtype(name) == _BFLOAT16 for name in self._packed)
        self.notes.append(
            f"packed as fp8: {len(self._packed)} matrices are decoded, weight = value * scale: {exact} exactly to "
            f"bfloat16, {len(self._packed) - exact} rounded once to float32; what packing lost "
            "stays lost, and scales of activations are not used"
        )

    def dtype(self, name: str) -> np.dtype[Any]:
        """Stored dtype; of a packed tensor bfloat16 where that holds every weight exactly, else float32."""
        if name not in self._packed:
            return super().dtype(name)
        powers = self._powers or self.inner.dtype(self._scales(name)[0]).name == "float8_e8m0fnu"
        return _BFLOAT16 if powers else np.dtype(np.float32)

    def release(self, name: str, rows: slice | None = None) -> None:
        """Drop mapped pages of these rows: codes lie as the weights do."""
        self.inner.release(name, rows)

    def _find_packed(self) -> dict[str, tuple[int, ...]]:
        found, bare, odd = {}, [], []
        for name in self.inner.names():
            dtype = self.inner.dtype(name).name
            if dtype in FLOAT8 and len(self.inner.shape(name)) >= 2:
                if 0 in self.inner.shape(name):
                    continue
                if not self._scales(name):
                    bare.append(name)
                found[name] = self.inner.shape(name)
            elif self._scales(name):
                odd.append(f"{name} ({dtype})")
        if bare or odd:
            faults = [
                *(f"{n} has no scale" for n in bare),
                *(f"{n} is no fp8 matrix, but has one" for n in odd),
            ]
            raise CheckpointError(
                f"{self.path}: quantization_config says fp8, but {listed(faults)}",
                hint="The checkpoint is incomplete, or its config.json belongs to another one.",
            )
        for name in found:
            self._steps(name)
        return found

    def _companions(self, name: str) -> tuple[str, ...]:
        stem = name.removesuffix(".weight")
        return self._scales(name) + tuple(stem + a for a in _ACTIVATIONS if stem + a in self._stored)

    def _scales(self, name: str) -> tuple[str, ...]:
        """Names of the scales of a tensor; the first one counts."""
        return tuple(name + s for s in _SCALES if name + s in self._stored)

    def _decode(self, name: str, rows: slice) -> NDArray[Any]:
        values = self.stored(name, rows).dequantize(slice(None))
        if self.dtype(name) != _BFLOAT16:
            return values
        return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16).view(_BFLOAT16)

    def stored(self, name: str, rows: slice | None = None) -> Float8Tensor:
        """The codes of a matrix, or of some rows of it, with a scale of each row's own for each group of columns.

        Raises
        ------
        CheckpointError
            If it is not packed, or a scale is not what it should be.
        """
        if name not in self._packed:
            raise self._bad(name, "is not stored in 8-bit floats")
        count, _ = matrix_shape(self._packed[name])
        start, stop, _ = (rows or slice(None)).indices(count)
        part = slice(start, max(start, stop))
        grid, (height, width), each = self._grid(name), self._steps(name), self._packed[name][-2]
        row = np.arange(part.start, part.stop)
        # Where one scale serves all matrices of a stack, row // each is cut to the one that there is.
        matrix = np.minimum(row // each, len(grid) - 1)
        scales = grid[matrix, row % each // height]
        shape = self._packed[name] if rows is None else ()
        return Float8Tensor(self.inner.load(name, part).values, scales, width, shape)

    def compact(self, name: str, rows: slice | None = None) -> QuantizedTensor:
        """See :meth:`PackedCheckpoint.compact`."""
        return self.stored(name, rows) if self.is_packed(name) else self.load(name, rows)

    def _grid(self, name: str) -> NDArray[np.float32]:
        """Scales as float32 [matrices, block rows, block columns]."""
        scales = self.inner.load(self._scales(name)[0]).dequantize()
        if not np.isfinite(scales).all():
            raise self._bad(name, "has a scale that is not finite")
        if self.dtype(name) == _BFLOAT16:
            within = (np.abs(scales) >= _SAFE[0]) & (np.abs(scales) <= _SAFE[1])
            if (scales.view(np.uint32) & _MANTISSA).any() or not within.all():
                raise self._bad(name, "has a scale that is no power of two, as scale_fmt ue8m0 promises")
        return scales.reshape(self._grid_shape(name, scales.shape))

    def _grid_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, int, int]:
        rows, columns = self.inner.shape(name)[-2:]
        count = matrix_shape(self.inner.shape(name))[0] // rows if rows else 0
        tall, wide = -(-rows // self._block[0]), -(-columns // self._block[1])
        size = int(np.prod(shape))
        if size == 1:
            return 1, 1, 1
        for grid in ((count, 1, 1), (count, rows, 1), (count, tall, wide)):
            spelled = tuple(d for d in grid if d != 1)
            if size == int(np.prod(grid)) and tuple(d for d in shape if d != 1) == spelled:
                return grid
        raise self._bad(
            name,
            f"is {list(self.inner.shape(name))} with scales {list(shape)}; one for the tensor, one a row, or "
            f"{[tall, wide]} of blocks {list(self._block)} are read",
        )

    def _steps(self, name: str) -> tuple[int, int]:
        """Rows and columns that one scale covers."""
        rows, columns = self.inner.shape(name)[-2:]
        _, tall, wide = self._grid_shape(name, self.inner.shape(self._scales(name)[0]))
        height = rows if tall == 1 else 1 if tall == rows else self._block[0]
        return max(height, 1), max(columns if wide == 1 else self._block[1], 1)


def _checked_settings(inner: Checkpoint) -> tuple[tuple[int, int], bool]:
    """The block of the config, and whether scales are powers of two; refuses what only looks like plain fp8."""
    old = inner.config.get("compression_config")  # of compressed-tensors, before it had quant_method
    found = inner.config.get("quantization_config") or old
    settings: Mapping[str, Any] = found if isinstance(found, Mapping) else {}
    compressed = "config_groups" in settings or (settings is old and bool(old))
    method = settings.get("quant_method", "compressed-tensors" if compressed else "fp8")
    problem = None
    packed = next((name for name in inner.names() if name.endswith(".weight_packed")), None)
    if packed is not None:
        told = _compressed_problem(settings) if "format" in settings else None
        method, problem = "compressed-tensors", told or f"{packed} holds packed codes"
    elif method == "compressed-tensors":
        problem = _compressed_problem(settings)
    elif method == "modelopt" and settings.get("quant_algo") != "FP8":
        problem = f"quant_algo {settings.get('quant_algo')!r}"
    elif method == "fp8" and settings.get("fmt", "e4m3") not in ("e4m3", "e5m2"):
        problem = f"fmt {settings.get('fmt')!r}"
    if problem is not None:
        raise UnsupportedModelError(
            f"{inner.path}: the weights are already quantized ({method}, {problem}); of this method plain 8-bit floats "
            "with scales can be read",
            hint="Use the original bfloat16, float16 or float32 checkpoint.",
        )
    block = settings.get("weight_block_size") or _compressed_block(settings) or _BLOCK
    if not (
        isinstance(block, list | tuple)
        and len(block) == 2
        and all(isinstance(b, int) and b > 0 for b in block)
    ):
        raise CheckpointError(
            f"{inner.path}: config.json: weight_block_size is {block!r}; two positive integers are expected"
        )
    return (block[0], block[1]), settings.get("scale_fmt") == "ue8m0"


def _weights(settings: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    groups = settings.get("config_groups")
    values = list(groups.values()) if isinstance(groups, Mapping) else []
    return [g["weights"] for g in values if isinstance(g, Mapping) and isinstance(g.get("weights"), Mapping)]


def _compressed_problem(settings: Mapping[str, Any]) -> str | None:
    form = settings.get("format")
    if form not in _PLAIN_FORMATS:
        return f"format {form!r}"
    sparsity = settings.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense":
        return f"sparsity {sparsity.get('format')!r}"
    for weights in _weights(settings):
        if (
            weights.get("num_bits") != 8
            or weights.get("type") != "float"
            or not weights.get("symmetric", True)
        ):
            return f"weights of {weights.get('num_bits')} bits, type {weights.get('type')!r}"
        if weights.get("strategy") not in ("tensor", "channel", "block"):
            return f"strategy {weights.get('strategy')!r}"
    return None


def _compressed_block(settings: Mapping[str, Any]) -> Any:
    return next((w["block_structure"] for w in _weights(settings) if w.get("block_structure")), None)
