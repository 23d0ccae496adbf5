"""MXFP4 checkpoints and gpt-oss experts: blocks of 32 four-bit floats decoded exactly, stacks turned to rows of outputs.

A packed tensor is stored as ``X_blocks`` uint8 [..., rows, groups, 16] and ``X_scales`` uint8 [..., rows, groups]. Byte
j of a group holds element 2 j in its low nibble and 2 j + 1 in the high one; an element is an FP4 (e2m1) number, sign
in bit 3, and weight = element * 2 ** (scale - 127). Rows are outputs. The same numbers, nibbles in another order, are
GGUF's type MXFP4: :meth:`Mxfp4Checkpoint.stored` gives them without loss.

In gpt-oss the stacked experts have two spellings of one matrix. Packed, ``gate_up_proj_blocks`` has a row for each
output; in bfloat16, ``gate_up_proj`` is stored [experts, inputs, outputs], the transpose. Shapes do not tell which
(outputs may equal inputs), the architecture does. Both are read as ``gate_up_proj.weight`` [experts, outputs, inputs],
a name that no checkpoint has for the transposed form, and their biases as ``gate_up_proj.bias`` [experts, outputs].
Rows of gate and up alternate: output 2 i is gate i, output 2 i + 1 is up i.

Source: OCP Microscaling Formats v1.0; transformers 5 integrations/mxfp4.py and models/gpt_oss.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trapetum.blocktypes import BLOCK_TYPES
from trapetum.errors import UnsupportedModelError, listed
from trapetum.formats.checkpoint import Checkpoint
from trapetum.formats.packed_checkpoint import PackedCheckpoint
from trapetum.tensors import BlockTensor, matrix_shape

__all__ = ["GptOssCheckpoint", "Mxfp4Checkpoint", "is_gpt_oss", "stacked_name"]

_BLOCKS, _SCALES = "_blocks", "_scales"
_GROUP = 32
_MXFP4 = BLOCK_TYPES["MXFP4"]
_STACK = re.compile(r"(?P<stem>.*\.experts\.(?:gate_up_proj|down_proj))(?P<bias>_bias)?$")


def is_gpt_oss(config: dict[str, Any]) -> bool:
    """Whether a config is of the family whose expert stacks are stored transposed."""
    classes = config.get("architectures") or ()
    return "GptOssForCausalLM" in classes if classes else config.get("model_type") == "gpt_oss"


def stacked_name(name: str) -> str:
    """How gpt-oss itself spells what is read as ``...proj.weight`` or ``...proj.bias``; other names as they are.

    Examples
    --------
    >>> stacked_name("model.layers.0.mlp.experts.gate_up_proj.bias")
    'model.layers.0.mlp.experts.gate_up_proj_bias'
    """
    stem, _, suffix = name.rpartition(".")
    if _STACK.match(stem) is None or suffix not in ("weight", "bias"):
        return name
    return stem if suffix == "weight" else f"{stem}_bias"


class GptOssCheckpoint(PackedCheckpoint):
    """Experts stored [experts, inputs, outputs], read with a row for each output."""

    def __init__(self, inner: Checkpoint) -> None:
        super().__init__(inner)
        self.records = {}  # plain numbers, whatever their order

    def _find_packed(self) -> dict[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {}
        for name in self.inner.names():
            match, shape = _STACK.fullmatch(name), self.inner.shape(name)
            if match is None or match["bias"]:
                continue
            if len(shape) != 3:
                raise UnsupportedModelError(
                    f"{self.inner.file(name)}: tensor {name} is {list(shape)}; a stack [experts, inputs, outputs] is read"
                )
            found[f"{name}.weight"] = (shape[0], shape[2], shape[1])
        return found

    def _companions(self, name: str) -> tuple[str, ...]:
        return ()

    def _stored_name(self, name: str) -> str:
        return stacked_name(name)

    def _logical_name(self, stored: str) -> str:
        match = _STACK.fullmatch(stored)
        if match is None:
            return stored
        return f"{match['stem']}.bias" if match["bias"] else f"{stored}.weight"

    def dtype(self, name: str) -> np.dtype[Any]:
        """Stored dtype: only places change."""
        return self.inner.dtype(self._stored_name(name))

    def is_packed(self, name: str) -> bool:
        """False: the values are stored as they are."""
        self.inner.file(self._stored_name(name))
        return False

    def _decode(self, name: str, rows: slice) -> NDArray[Any]:
        _, outputs, inputs = self._packed[name]
        parts = [np.empty((0, inputs), self.dtype(name))]
        for expert in range(rows.start // outputs, -(-rows.stop // outputs)):
            first, last = max(rows.start - expert * outputs, 0), min(rows.stop - expert * outputs, outputs)
            stored = self.inner.load(self._stored_name(name), slice(expert * inputs, (expert + 1) * inputs)).values
            parts.append(stored[:, first:last].T)
        return np.ascontiguousarray(np.concatenate(parts))


class Mxfp4Checkpoint(PackedCheckpoint):
    """Tensors of ``X_blocks`` and ``X_scales``."""

    _format = "mxfp4"

    def __init__(self, inner: Checkpoint) -> None:
        self._stems: dict[str, str] = {}
        super().__init__(inner)
        self.notes.append(
            f"packed as mxfp4: {len(self._packed)} tensors are decoded exactly, weight = fp4 * 2 ** (scale - 127)"
        )

    def _find_packed(self) -> dict[str, tuple[int, ...]]:
        stored = set(self.inner.names())
        found: dict[str, tuple[int, ...]] = {}
        faults = []
        for name in self.inner.names():
            if not name.endswith(_BLOCKS) or self.inner.dtype(name) != np.uint8:
                continue
            stem, shape = name.removesuffix(_BLOCKS), self.inner.shape(name)
            scales = stem + _SCALES
            if scales not in stored or self.inner.dtype(scales) != np.uint8:
                faults.append(f"{name} has no {_SCALES[1:]} of uint8 beside it")
            elif len(shape) < 3 or shape[-1] != _GROUP // 2 or self.inner.shape(scales) != shape[:-1]:
                faults.append(f"{name} is {list(shape)} with scales {list(self.inner.shape(scales))}")
            else:
                logical = stem if stem.endswith(".weight") else f"{stem}.weight"
                self._stems[logical] = stem
                found[logical] = (*shape[:-2], shape[-2] * _GROUP)
        if faults or not found:
            raise UnsupportedModelError(
                f"{self.path}: quantized as mxfp4, but {listed(faults) if faults else 'no tensor ends in _blocks'}; "
                "uint8 blocks [rows, groups, 16] with scales [rows, groups] are read",
                hint="Use the original bfloat16, float16 or float32 checkpoint.",
            )
        return found

    def _companions(self, name: str) -> tuple[str, ...]:
        return (self._stems[name] + _SCALES,)

    def _stored_name(self, name: str) -> str:
        return self._stems[name] + _BLOCKS if name in self._stems else stacked_name(name)

    def _logical_name(self, stored: str) -> str:
        stem = stored.removesuffix(_BLOCKS)
        if stem != stored and (logical := stem if stem.endswith(".weight") else f"{stem}.weight") in self._stems:
            return logical
        match = _STACK.fullmatch(stored)
        return f"{match['stem']}.bias" if match is not None and match["bias"] else stored

    def block_type(self, name: str) -> str | None:
        """``MXFP4``, of a packed tensor."""
        return _MXFP4.name if name in self._packed else None

    def stored(self, name: str, rows: slice | None = None) -> BlockTensor:
        """The blocks of a tensor in GGUF's order of nibbles."""
        shape = self._packed[name]
        count, width = matrix_shape(shape)
        start, stop, _ = (rows or slice(None)).indices(count)
        stop, groups = max(start, stop), width // _GROUP
        part = slice(start * groups, stop * groups)  # the matrix form of the blocks has a row for each group
        packed = self.inner.load(self._stems[name] + _BLOCKS, part).values
        scales = self.inner.load(self._stems[name] + _SCALES, slice(start, stop)).values
        codes = np.empty((len(packed), _GROUP), np.uint8)
        codes[:, 0::2], codes[:, 1::2] = packed & np.uint8(15), packed >> np.uint8(4)
        blocks = _MXFP4.from_parts({"e": scales.reshape(-1), "codes": codes})
        return BlockTensor(
            _MXFP4.name, blocks.reshape(stop - start, -1), shape if rows is None else (stop - start, width)
        )

    def release(self, name: str, rows: slice | None = None) -> None:
        """Drop mapped pages of these rows."""
        if name in self._packed and rows is not None:
            groups = self._packed[name][-1] // _GROUP
            start, stop, _ = rows.indices(matrix_shape(self._packed[name])[0])
            rows = slice(start * groups, stop * groups)
        self.inner.release(self._stored_name(name), rows)

    def _decode(self, name: str, rows: slice) -> NDArray[Any]:
        return self.stored(name, rows).dequantize(slice(None))
