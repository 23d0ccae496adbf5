"""From a stored tensor to the layout that a kernel reads: one table by layout, one by GGUF block type.

Everything is translated a few rows at a time, so that the peak is the stored tensor, the prepared one and a few MiB.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trapetum.blocktypes import Parts
from trapetum.blocktypes.simple import IQ4_VALUES, MXFP4_VALUES
from trapetum.kernels.cpu import blocks, codebook16, pages
from trapetum.kernels.cpu.activations import GROUP, padded
from trapetum.kernels.cpu.prepared import (
    Additive,
    Blocks,
    Codebook16,
    Dense,
    Expanded,
    Prepared,
    Table,
    Ternary,
)
from trapetum.tensors import (
    AdditiveTensor,
    BlockTensor,
    CodebookTensor,
    DenseTensor,
    QuantizedTensor,
    TernaryTensor,
)

__all__ = ["every_form", "prepare"]

_CHUNK_WEIGHTS = 1 << 20
_PLAIN = ("float32", "float16", "bfloat16")


def prepare(tensor: QuantizedTensor, *, precise: bool = False, expand: bool = False) -> Prepared | None:
    """Bring a tensor into the layout of its kernel.

    Parameters
    ----------
    tensor : QuantizedTensor
    precise : bool
        15-bit instead of 8-bit activations for two-bit weights.
    expand : bool
        Hold codebooks of more than 16 entries also as int16: twice the speed at three bytes a weight.

    Returns
    -------
    Prepared or None
        None where no kernel takes this layout, block type or group size.
    """
    if isinstance(tensor, DenseTensor):
        if tensor.values.dtype.name in _PLAIN and tensor.in_features % 8 == 0:
            return Dense(tensor.values.reshape(tensor.rows, tensor.in_features))
    elif isinstance(tensor, CodebookTensor):
        if tensor.codebook_size <= 16:
            return Codebook16(tensor.codes, tensor.codebook)
        return (Expanded if expand else Table)(tensor.codes, tensor.codebook)
    elif isinstance(tensor, TernaryTensor):
        if _fits(tensor.group_size):
            return Ternary(tensor.codes, tensor.scales, precise=precise)
    elif isinstance(tensor, AdditiveTensor):
        return Additive(tensor.codes, tensor.codebooks, tensor.scales)
    elif isinstance(tensor, BlockTensor):
        if tensor.type in _TWO_BITS:
            return _two_bits(tensor, precise)
        if tensor.type in _FORMS and (tensor.type != "MXFP4" or _halves_hold(tensor)):
            return _blocks(tensor, _FORMS[tensor.type])
    return None


def every_form(tensor: QuantizedTensor) -> list[Prepared]:
    """All forms that :func:`prepare` can give a tensor, each once."""
    found: dict[tuple[type[Prepared], bool], Prepared] = {}
    for precise, expand in ((False, False), (True, False), (False, True)):
        one = prepare(tensor, precise=precise, expand=expand)
        if one is not None:
            found.setdefault((type(one), getattr(one, "precise", False)), one)
    return list(found.values())


def _fits(group_size: int) -> bool:
    return group_size in (32, 64) or group_size % GROUP == 0


# ---------------------------------------------------------------------------- two-bit block types
# Code of the type -> code of the kernel, whose weight is (code - 1) * d.
_TWO_BITS = {
    name: np.array([0, 1, 2, 3], np.uint8) for name in ("TQ1_0", "TQ2_0", "Q2_0", "PQ2_0", "PTQ1_0")
} | {"Q1_0": np.array([0, 2], np.uint8)}


def _two_bits(tensor: BlockTensor, precise: bool) -> Prepared:
    codes = np.empty((tensor.rows, tensor.in_features), np.uint8)
    d = np.empty((tensor.rows, tensor.in_features // tensor.block_type.block_size), np.float16)
    for rows, parts in _chunks(tensor):
        codes[rows] = _TWO_BITS[tensor.type][parts["codes"]].reshape(codes[rows].shape)
        d[rows] = parts["d"].reshape(d[rows].shape)
    return Ternary(codes, d, precise=precise)


# ---------------------------------------------------------------------------- other block types
def _nothing(parts: Parts) -> None:
    return None


@dataclass(frozen=True)
class _Form:
    """How a type's parts become the arrays of ``kernels.cpu.blocks``.

    ``codes`` gives codes that ``kind`` takes; ``scale`` the float16 of a block; ``offset`` the float16 that is taken
    off (times ``mins``, if any).
    """

    kind: int
    codes: Callable[[Parts], NDArray[Any]] = lambda parts: parts["codes"]
    values: NDArray[Any] | None = None
    offset: Callable[[Parts], NDArray[Any] | None] = _nothing
    scale: Callable[[Parts], NDArray[Any]] = lambda parts: parts["d"]


def _minus(shift: int) -> Callable[[Parts], NDArray[Any]]:
    return lambda parts: (parts["codes"].view(np.int8) - np.int8(shift)).view(np.uint8)


def _minus_m(parts: Parts) -> NDArray[Any]:
    return -parts["m"]  # the weight is code * d + m, and subtracting -m is exactly adding m


def _dmin(parts: Parts) -> NDArray[Any]:
    return parts["dmin"]


def _power(parts: Parts) -> NDArray[Any]:
    """2 ** (e - 128); 0 for what float16 does not hold, where :func:`_halves_hold` found zeros only."""
    e = parts["e"].astype(np.int32)
    found: NDArray[Any] = np.ldexp(np.float32(1), np.where(e <= _LARGEST_HALF, e, 0) - 128)
    return found.astype(np.float16)


def _halves_hold(tensor: BlockTensor) -> bool:
    """Whether every scale of MXFP4, a power of two, is a float16; of blocks of zeros it does not matter."""
    for _, parts in _chunks(tensor):
        e = parts["e"]
        inside = (e >= _LEAST_HALF) & (e <= _LARGEST_HALF)
        if not inside.all() and (parts["codes"][~inside] & np.uint8(7)).any():
            return False
    return True


_LEAST_HALF, _LARGEST_HALF = 128 - 24, 128 + 15  # exponents with their bias
_FORMS: dict[str, _Form] = {
    "Q4_0": _Form(blocks.TABLE, values=np.arange(-8, 8)),
    "Q4_1": _Form(blocks.NIBBLE, offset=_minus_m),
    "Q5_0": _Form(blocks.BYTE, _minus(16)),
    "Q5_1": _Form(blocks.BYTE, offset=_minus_m),
    "Q8_0": _Form(blocks.BYTE),
    "IQ4_NL": _Form(blocks.TABLE, values=IQ4_VALUES),
    "IQ4_XS": _Form(blocks.TABLE, values=IQ4_VALUES),
    "MXFP4": _Form(blocks.TABLE, values=MXFP4_VALUES, scale=_power),
    "Q2_K": _Form(blocks.BYTE16, offset=_dmin),
    "Q3_K": _Form(blocks.BYTE16, _minus(4)),
    "Q4_K": _Form(blocks.NIBBLE, offset=_dmin),
    "Q5_K": _Form(blocks.BYTE, offset=_dmin),
    "Q6_K": _Form(blocks.SIX),
}


def _blocks(tensor: BlockTensor, form: _Form) -> Prepared:
    rows, count = tensor.rows, tensor.in_features
    groups = padded(count) // GROUP
    codes = pages.empty((rows, groups * blocks.group_bytes(form.kind)), np.uint8)
    arrays: dict[str, NDArray[Any]] = {}
    for part, parts in _chunks(tensor):
        lines = part.stop - part.start
        plain = np.zeros((lines, padded(count)), np.uint8)
        plain[:, :count] = np.ascontiguousarray(form.codes(parts)).view(np.uint8).reshape(lines, count)
        _pack(form.kind, plain, codes[part].reshape(lines, groups, -1))
        found: dict[str, NDArray[Any]] = {
            "d": _bits(form.scale(parts)),
            "steps": _signed(parts.get("scales")),
            "dmin": _bits(form.offset(parts)),
            "mins": _signed(parts.get("mins")),
        }
        for key, array in found.items():
            array = array.reshape(lines, -1)
            if key not in arrays:
                arrays[key] = pages.empty((rows, _width(array.shape[1], count)), array.dtype)
                arrays[key][...] = 0
            arrays[key][part, : array.shape[1]] = array
    table = np.zeros(32, np.uint8)
    if form.values is not None:
        words = form.values.astype("<i2")
        table[:16], table[16:] = words.view(np.uint8)[0::2], words.view(np.uint8)[1::2]
    return Blocks(form.kind, count, table, codes, **arrays)


def _width(columns: int, count: int) -> int:
    """Columns for whole groups: only rows of small blocks can end inside one."""
    return columns * padded(count) // count


def _bits(halves: NDArray[Any] | None) -> NDArray[np.uint16]:
    return np.empty(0, np.uint16) if halves is None else halves.astype(np.float16).view(np.uint16)


def _signed(steps: NDArray[Any] | None) -> NDArray[np.int8]:
    return np.empty(0, np.int8) if steps is None else steps.astype(np.int8)


def _pack(kind: int, codes: NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
    """Codes [rows, padded] into [rows, groups, group bytes]."""
    if kind in (blocks.BYTE, blocks.BYTE16):
        out[...] = codes.reshape(out.shape)
        return
    nibbles = np.empty((codes.shape[0], codes.shape[1] // 2), np.uint8)
    codebook16.pack_codes(codes & np.uint8(15), nibbles)
    out[:, :, :64] = nibbles.reshape(codes.shape[0], -1, 64)
    if kind == blocks.SIX:
        blocks.pack_top_bits(codes, out)


def _chunks(tensor: BlockTensor) -> Any:
    """(rows, parts of those rows) in order."""
    step = max(1, _CHUNK_WEIGHTS // max(1, tensor.in_features))
    kind = tensor.block_type
    for start in range(0, tensor.rows, step):
        rows = slice(start, min(start + step, tensor.rows))
        flat = np.ascontiguousarray(tensor.blocks[rows]).reshape(-1, kind.type_size)
        yield rows, kind.to_parts(flat)
