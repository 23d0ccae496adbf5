"""MXFP4 checkpoints and gpt-oss experts: blocks of four-bit floats decoded exactly, stacks turned to rows of outputs.

A packed tensor is stored as ``X_blocks`` uint8 [..., rows, groups, 16] and ``X_scales`` uint8 [..., rows, groups]. Byte
j of a group holds element 2 j in its low nibble and 2 j + 1 in the high one; an element is an FP4 (e2m1) number, sign
in bit 3, and weight = element * 2 ** (scale - 127). Rows are outputs. The same numbers, nibbles in another order, are
GGUF's type MXFP4: :meth:`Mxfp4Checkpoint.stored` gives them without loss.

The stacked experts of gpt-oss have two spellings of one matrix. Packed, ``gate_up_proj_blocks`` has a row for each
output; in bfloat16, ``gate_up_proj`` is stored [experts, inputs, outputs], the transpose. Shapes do not tell which
(outputs may equal inputs), the architecture does. In both, outputs of gate and up alternate: output 2 i is gate i,
output 2 i + 1 is up i. They are read as stacks that mean the same in every family:

====================================================  ==================================================================
read                                                  stored, with or without ``_blocks``
====================================================  ==================================================================
``gate_proj.weight`` [experts, rows, in], up          every other output of ``gate_up_proj``
``down_proj.weight``                                  ``down_proj``
``gate_proj.bias`` [experts, rows], up                every other element of ``gate_up_proj_bias``
``down_proj.bias``                                    ``down_proj_bias``
====================================================  ==================================================================

Source: OCP Microscaling Formats v1.0; transformers 5 integrations/mxfp4.py and models/gpt_oss.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trapetum.blocktypes import BLOCK_TYPES
from trapetum.errors import UnsupportedModelError, listed
from trapetum.formats.checkpoint import Checkpoint
from trapetum.formats.packed_checkpoint import PackedCheckpoint
from trapetum.tensors import BlockTensor, QuantizedTensor, matrix_shape

__all__ = ["GptOssCheckpoint", "Mxfp4Checkpoint", "is_gpt_oss"]

_BLOCKS, _SCALES = "_blocks", "_scales"
_GROUP = 32
_NO_SCALE = 255  # NaN of E8M0
_MXFP4 = BLOCK_TYPES["MXFP4"]
_STACK = re.compile(r"(?P<stem>.*\.experts\.)(?P<part>gate_up|down)_proj(?P<bias>_bias)?$")


class _Origin(NamedTuple):
    """Where a tensor comes from: its stored name, and which of two alternating halves it is."""

    stored: str
    half: int | None
    bias: bool

    @property
    def columns(self) -> slice:
        """Of the outputs."""
        return slice(None) if self.half is None else slice(self.half, None, 2)

    @property
    def parts(self) -> int:
        """How many tensors share the stored one."""
        return 1 if self.half is None else 2


def is_gpt_oss(config: dict[str, Any]) -> bool:
    """Whether a config is of the family whose stacks of experts alternate gate and up."""
    classes = config.get("architectures") or ()
    return "GptOssForCausalLM" in classes if classes else config.get("model_type") == "gpt_oss"


def _read_as(stored: str) -> dict[str, _Origin]:
    """What a stored stack (without ``_blocks``) is read as."""
    found = _STACK.fullmatch(stored)
    if found is None:
        return {}
    suffix, bias = ("bias", True) if found["bias"] else ("weight", False)
    if found["part"] == "down":
        return {f"{found['stem']}down_proj.{suffix}": _Origin(stored, None, bias)}
    return {
        f"{found['stem']}{part}_proj.{suffix}": _Origin(stored, half, bias)
        for half, part in enumerate(("gate", "up"))
    }


class GptOssCheckpoint(PackedCheckpoint):
    """Stacks of experts of gpt-oss, read with a row for each output; also what MXFP4 ones add to.

    Parameters
    ----------
    inner : Checkpoint
    """

    def __init__(self, inner: Checkpoint) -> None:
        self._origins: dict[str, _Origin] = {}
        self._read: dict[str, tuple[str, ...]] = {}
        super().__init__(inner)
        self.records = {k: v for k, v in self.records.items() if self.is_packed(k)}

    def _find_packed(self) -> dict[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {}
        for name in self.inner.names():
            for logical, origin in _read_as(name).items():
                shape = self.inner.shape(name)
                if len(shape) != (2 if origin.bias else 3) or shape[-1] % origin.parts:
                    raise UnsupportedModelError(
                        f"{self.inner.file(name)}: tensor {name} is {list(shape)}; a stack [experts, inputs, outputs] "
                        "with biases [experts, outputs] is read"
                    )
                outputs = shape[-1] // origin.parts
                self._add(logical, origin)
                found[logical] = (shape[0], outputs) if origin.bias else (shape[0], outputs, shape[1])
        return found

    def _add(self, logical: str, origin: _Origin) -> None:
        self._origins[logical] = origin
        self._read[origin.stored] = (*self._read.get(origin.stored, ()), logical)

    def _companions(self, name: str) -> tuple[str, ...]:
        return ()

    def _stored_name(self, name: str) -> str:
        return self._origins[name].stored if name in self._origins else name

    def _logical_names(self, stored: str) -> tuple[str, ...]:
        return self._read.get(stored, (stored,))

    def dtype(self, name: str) -> np.dtype[Any]:
        """Stored dtype: only places change."""
        return self.inner.dtype(self._stored_name(name))

    def is_packed(self, name: str) -> bool:
        """False: the values are stored as they are."""
        self.file(name)
        return False

    def _decode(self, name: str, rows: slice) -> NDArray[Any]:
        origin = self._origins[name]
        if origin.bias:
            return np.ascontiguousarray(self.inner.load(origin.stored, rows).values[:, origin.columns])
        _, outputs, inputs = self._packed[name]
        parts = [np.empty((0, inputs), self.dtype(name))]
        for expert in range(rows.start // outputs, -(-rows.stop // outputs)):
            first, last = max(rows.start - expert * outputs, 0), min(rows.stop - expert * outputs, outputs)
            stored = self.inner.load(origin.stored, slice(expert * inputs, (expert + 1) * inputs)).values
            parts.append(stored[:, origin.columns][:, first:last].T)
        return np.concatenate(parts)


class Mxfp4Checkpoint(GptOssCheckpoint):
    """Tensors of ``X_blocks`` and ``X_scales``."""

    _format = "mxfp4"

    def __init__(self, inner: Checkpoint) -> None:
        super().__init__(inner)
        count = sum(self.is_packed(name) for name in self._packed)
        self.notes.append(
            f"packed as mxfp4: {count} tensors are decoded exactly, weight = fp4 * 2 ** (scale - 127); what "
            "packing lost stays lost"
        )

    def _find_packed(self) -> dict[str, tuple[int, ...]]:
        found = super()._find_packed() if is_gpt_oss(self.inner.config) else {}
        stored = set(self.inner.names())
        faults, packed = [], 0
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
                meant = _read_as(stem) or {_weight(stem): _Origin(stem, None, False)}
                if shape[-3] % len(meant):
                    faults.append(f"{name} is {list(shape)}, whose rows do not alternate in pairs")
                    continue
                for logical, (_, half, bias) in meant.items():
                    origin = _Origin(name, half, bias)
                    self._add(logical, origin)
                    found[logical] = (*shape[:-3], shape[-3] // origin.parts, shape[-2] * _GROUP)
                    packed += 1
        if faults or not packed:
            raise UnsupportedModelError(
                f"{self.path}: quantized as mxfp4, but {listed(faults) if faults else 'no tensor ends in _blocks'}; "
                "uint8 blocks [rows, groups, 16] with scales [rows, groups] are read",
                hint="Use the original bfloat16, float16 or float32 checkpoint.",
            )
        return found

    def _companions(self, name: str) -> tuple[str, ...]:
        return (self._scales(name),) if self.is_packed(name) else ()

    def _scales(self, name: str) -> str:
        return self._origins[name].stored.removesuffix(_BLOCKS) + _SCALES

    def _stored_bytes(self, name: str) -> int:
        return super()._stored_bytes(name) // self._origins[name].parts

    def dtype(self, name: str) -> np.dtype[Any]:
        """Stored dtype; float32 of a packed tensor."""
        return np.dtype(np.float32) if self.is_packed(name) else super().dtype(name)

    def is_packed(self, name: str) -> bool:
        """Whether a tensor is decoded from blocks."""
        return name in self._origins and self._origins[name].stored.endswith(_BLOCKS)

    def block_type(self, name: str) -> str | None:
        """``MXFP4``, of a packed tensor."""
        return _MXFP4.name if self.is_packed(name) else None

    def stored(self, name: str, rows: slice | None = None) -> BlockTensor:
        """The blocks of a tensor in GGUF's order of nibbles.

        Raises
        ------
        CheckpointError
            If it is not packed.
        """
        if not self.is_packed(name):
            raise self._bad(name, "is not stored in blocks")
        origin, shape = self._origins[name], self._packed[name]
        count, width = matrix_shape(shape)
        start, stop, _ = (rows or slice(None)).indices(count)
        stop, groups = max(start, stop), width // _GROUP
        there, part = self._rows(name, slice(start, stop))
        packed = self.inner.load(origin.stored, part).values.reshape(-1, groups, _GROUP // 2)[origin.columns]
        scales = self.inner.load(self._scales(name), there).values[origin.columns]
        if (scales == _NO_SCALE).any():
            raise self._bad(name, f"holds the scale {_NO_SCALE}, which stands for no number")
        codes = np.empty((*packed.shape[:-1], _GROUP), np.uint8)
        codes[..., 0::2], codes[..., 1::2] = packed & np.uint8(15), packed >> np.uint8(4)
        blocks = _MXFP4.from_parts({"e": scales.reshape(-1), "codes": codes.reshape(-1, _GROUP)})
        return BlockTensor(
            _MXFP4.name, blocks.reshape(stop - start, -1), shape if rows is None else (stop - start, width)
        )

    def compact(self, name: str, rows: slice | None = None) -> QuantizedTensor:
        """See :meth:`PackedCheckpoint.compact`."""
        return self.stored(name, rows) if self.is_packed(name) else self.load(name, rows)

    def _rows(self, name: str, rows: slice) -> tuple[slice, slice]:
        """The same rows in the scales, and in the blocks, whose matrix form has a row for each group."""
        parts, groups = self._origins[name].parts, self._packed[name][-1] // _GROUP
        there = slice(rows.start * parts, rows.stop * parts)
        return there, slice(there.start * groups, there.stop * groups)

    def release(self, name: str, rows: slice | None = None) -> None:
        """Drop mapped pages of these rows."""
        if rows is not None and self.is_packed(name):
            start, stop, _ = rows.indices(matrix_shape(self._packed[name])[0])
            rows = self._rows(name, slice(start, max(start, stop)))[1]
            self.inner.release(self._origins[name].stored, rows)
        else:
            super().release(name, rows)

    def _decode(self, name: str, rows: slice) -> NDArray[Any]:
        if not self.is_packed(name):
            return super()._decode(name, rows)
        return self.stored(name, rows).dequantize(slice(None))


def _weight(stem: str) -> str:
    return stem if stem.endswith(".weight") else f"{stem}.weight"
