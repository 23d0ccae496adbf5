"""Blocks of 32 with one scale (and an offset): Q4_0 Q4_1 Q5_0 Q5_1 Q8_0, and the table-valued IQ4_NL and
MXFP4.

====== ======================================= ==========================
type   fields                                  weight
====== ======================================= ==========================
Q4_0   d f16, qs[16]                           ``(code - 8) * d``
Q4_1   d f16, m f16, qs[16]                    ``code * d + m``
Q5_0   d f16, qh[4], qs[16]                    ``(code - 16) * d``
Q5_1   d f16, m f16, qh[4], qs[16]             ``code * d + m``
Q8_0   d f16, qs[32] i8                        ``code * d``
IQ4_NL d f16, qs[16]                           ``d * IQ4_VALUES[code]``
MXFP4  e u8, qs[16]                            ``2**(e-128) * MXFP4_VALUES[code]``
NVFP4  d[4] unsigned e4m3, qs[32] (64 weights) ``d/2 * MXFP4_VALUES[code]``, one d for 16 weights
====== ======================================= ==========================

``qs``: element j < 16 is the low nibble of byte j, element 16 + j the high one. ``qh``: bit j is bit 4 of
code j.

Source: llama.cpp, ggml/src/ggml-common.h and ggml-quants.c.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trapetum.blocktypes.base import BlockType, Bytes, Parts, f16, join_bits, split_bits, to_bytes

__all__ = ["IQ4_VALUES", "MXFP4_VALUES", "SIMPLE_TYPES"]

IQ4_VALUES = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.float32
)
# Twice the values of FP4 e2m1, so that they are integers; the scale carries the half.
MXFP4_VALUES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=np.float32)


def _nvfp4_scales() -> NDArray[np.float32]:
    """Half the value of each unsigned e4m3 byte; the sign bit is ignored and 0x7f, NaN elsewhere, counts as
    zero."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    value = np.where(exponent == 0, mantissa / 512, (8 + mantissa) / 8 * 2.0 ** (exponent - 7))
    value[0x7F] = 0
    return (value / 2).astype(np.float32)


_NVFP4_SCALES = _nvfp4_scales()


def _scale(d: NDArray[Any]) -> NDArray[np.float32]:
    return d.astype(np.float32)[:, None]


def _unpack_nibbles(raw: Mapping[str, Bytes]) -> Parts:
    parts: dict[str, NDArray[Any]] = {k: f16(raw[k]) for k in ("d", "m") if k in raw}
    codes = split_bits(raw["qs"], 4, 16)
    if "qh" in raw:
        codes |= np.unpackbits(np.ascontiguousarray(raw["qh"]), axis=1, bitorder="little") << np.uint8(4)
    return {**parts, "codes": codes}


def _pack_nibbles(parts: Parts) -> Mapping[str, Bytes]:
    raw = {k: to_bytes(parts[k], "<f2") for k in ("d", "m") if k in parts}
    return {**raw, "qs": join_bits(parts["codes"], 4, 16)}


def _pack_five_bits(parts: Parts) -> Mapping[str, Bytes]:
    codes = parts["codes"]
    if codes.size and int(codes.max()) > 31:
        raise ValueError(f"code {int(codes.max())} does not fit in 5 bits")
    low = _pack_nibbles({**parts, "codes": codes & np.uint8(15)})
    return {**low, "qh": np.packbits(codes >> np.uint8(4), axis=1, bitorder="little")}


def _unpack_q8(raw: Mapping[str, Bytes]) -> Parts:
    return {"d": f16(raw["d"]), "codes": raw["qs"].view(np.int8)}


def _pack_q8(parts: Parts) -> Mapping[str, Bytes]:
    return {"d": to_bytes(parts["d"], "<f2"), "qs": to_bytes(parts["codes"], "i1")}


def _values_q4_0(parts: Parts) -> NDArray[np.float32]:
    return (parts["codes"].view(np.int8) - np.int8(8)).astype(np.float32) * _scale(parts["d"])


def _values_q5_0(parts: Parts) -> NDArray[np.float32]:
    return (parts["codes"].view(np.int8) - np.int8(16)).astype(np.float32) * _scale(parts["d"])


def _values_offset(parts: Parts) -> NDArray[np.float32]:
    return parts["codes"].astype(np.float32) * _scale(parts["d"]) + _scale(parts["m"])


def _values_q8(parts: Parts) -> NDArray[np.float32]:
    return parts["codes"].astype(np.float32) * _scale(parts["d"])


def _values_iq4_nl(parts: Parts) -> NDArray[np.float32]:
    return _scale(parts["d"]) * IQ4_VALUES[parts["codes"]]


def _unpack_mxfp4(raw: Mapping[str, Bytes]) -> Parts:
    return {"e": raw["e"][:, 0], "codes": split_bits(raw["qs"], 4, 16)}


def _pack_mxfp4(parts: Parts) -> Mapping[str, Bytes]:
    return {"e": to_bytes(parts["e"], "u1"), "qs": join_bits(parts["codes"], 4, 16)}


def _values_mxfp4(parts: Parts) -> NDArray[np.float32]:
    # 2**(e-128); the two smallest are subnormal float32, which ldexp gives exactly.
    scale = np.ldexp(np.float32(1), parts["e"].astype(np.int32) - 128)
    return scale.astype(np.float32)[:, None] * MXFP4_VALUES[parts["codes"]]


def _unpack_nvfp4(raw: Mapping[str, Bytes]) -> Parts:
    return {"scales": raw["d"], "codes": split_bits(raw["qs"], 4, 8)}


def _pack_nvfp4(parts: Parts) -> Mapping[str, Bytes]:
    return {"d": to_bytes(parts["scales"], "u1"), "qs": join_bits(parts["codes"], 4, 8)}


def _values_nvfp4(parts: Parts) -> NDArray[np.float32]:
    half = _NVFP4_SCALES[parts["scales"]]
    weights = half[:, :, None] * MXFP4_VALUES[parts["codes"]].reshape(len(half), 4, 16)
    return weights.reshape(len(half), 64)


SIMPLE_TYPES: tuple[BlockType, ...] = (
    BlockType(
        "Q4_0", 2, 32, (("d", 2), ("qs", 16)),
        unpack=_unpack_nibbles, pack=_pack_nibbles, values=_values_q4_0,
    ),
    BlockType(
        "Q4_1", 3, 32, (("d", 2), ("m", 2), ("qs", 16)),
        unpack=_unpack_nibbles, pack=_pack_nibbles, values=_values_offset,
    ),
    BlockType(
        "Q5_0", 6, 32, (("d", 2), ("qh", 4), ("qs", 16)),
        unpack=_unpack_nibbles, pack=_pack_five_bits, values=_values_q5_0,
    ),
    BlockType(
        "Q5_1", 7, 32, (("d", 2), ("m", 2), ("qh", 4), ("qs", 16)),
        unpack=_unpack_nibbles, pack=_pack_five_bits, values=_values_offset,
    ),
    BlockType("Q8_0", 8, 32, (("d", 2), ("qs", 32)), unpack=_unpack_q8, pack=_pack_q8, values=_values_q8),
    BlockType(
        "IQ4_NL", 20, 32, (("d", 2), ("qs", 16)),
        unpack=_unpack_nibbles, pack=_pack_nibbles, values=_values_iq4_nl,
    ),
    BlockType(
        "MXFP4", 39, 32, (("e", 1), ("qs", 16)),
        unpack=_unpack_mxfp4, pack=_pack_mxfp4, values=_values_mxfp4,
    ),
    BlockType(
        "NVFP4", 40, 64, (("d", 4), ("qs", 32)),
        unpack=_unpack_nvfp4, pack=_pack_nvfp4, values=_values_nvfp4,
    ),
)  # fmt: skip
