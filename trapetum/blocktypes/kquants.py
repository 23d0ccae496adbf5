"""Super-blocks of 256 with small integer scales for 16 or 32 weights: Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_XS.

====== ================================================== ====================================================
type   fields                                             weight (s: index of the sub-block)
====== ================================================== ====================================================
Q2_K   scales[16], qs[64], d f16, dmin f16                ``d*scale[s]*code - dmin*min[s]``, 16 a sub-block
Q3_K   hmask[32], qs[64], scales[12], d f16               ``d*scale[s]*(code-4)``, 16 a sub-block
Q4_K   d f16, dmin f16, scales[12], qs[128]               ``d*scale[s]*code - dmin*min[s]``, 32 a sub-block
Q5_K   d f16, dmin f16, scales[12], qh[32], qs[128]       as Q4_K
Q6_K   ql[128], qh[64], scales[16] i8, d f16              ``d*scale[s]*(code-32)``, 16 a sub-block
IQ4_XS d f16, scales_h u16, scales_l[4], qs[128]          ``d*scale[s]*IQ4_VALUES[code]``, 32 a sub-block
====== ================================================== ====================================================

Parts: ``d`` (and ``dmin``) float16 [n]; ``scales`` (and ``mins``) [n, sub-blocks], unsigned 4 bits (Q2_K),
unsigned 6 bits (Q4_K, Q5_K), signed -32..31 (Q3_K, IQ4_XS), int8 (Q6_K); ``codes`` uint8 [n, 256].

Source: llama.cpp, ggml/src/ggml-common.h and ggml-quants.c.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trapetum.blocktypes.base import BlockType, Bytes, Parts, f16, join_bits, split_bits, to_bytes
from trapetum.blocktypes.simple import IQ4_VALUES

__all__ = ["KQUANT_TYPES"]

_4 = np.uint8(4)
_6 = np.uint8(6)
_15 = np.uint8(15)
_63 = np.uint8(63)


def _check(values: NDArray[Any], low: int, high: int, what: str) -> None:
    if values.size and (int(values.min()) < low or int(values.max()) > high):
        raise ValueError(f"{what} {int(values.min())}..{int(values.max())} outside {low}..{high}")


def _per_weight(scales: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.repeat(scales, 256 // scales.shape[1], axis=1)


def _scaled(parts: Parts, key: str, d: str) -> NDArray[np.float32]:
    return _per_weight(parts[d].astype(np.float32)[:, None] * parts[key].astype(np.float32))


def _values_offset(parts: Parts) -> NDArray[np.float32]:
    return _scaled(parts, "scales", "d") * parts["codes"].astype(np.float32) - _scaled(parts, "mins", "dmin")


# ---------------------------------------------------------------------------- Q2_K
def _unpack_q2(raw: Mapping[str, Bytes]) -> Parts:
    scales = raw["scales"]
    return {
        "d": f16(raw["d"]),
        "dmin": f16(raw["dmin"]),
        "scales": scales & _15,
        "mins": scales >> _4,
        "codes": split_bits(raw["qs"], 2, 32),
    }


def _pack_q2(parts: Parts) -> Mapping[str, Bytes]:
    _check(parts["scales"], 0, 15, "scales")
    _check(parts["mins"], 0, 15, "mins")
    return {
        "scales": parts["scales"].astype(np.uint8) | parts["mins"].astype(np.uint8) << _4,
        "qs": join_bits(parts["codes"], 2, 32),
        "d": to_bytes(parts["d"], "<f2"),
        "dmin": to_bytes(parts["dmin"], "<f2"),
    }


# ---------------------------------------------------------------------------- Q3_K
def _unpack_q3(raw: Mapping[str, Bytes]) -> Parts:
    s = raw["scales"]
    low = np.concatenate([s[:, :8] & _15, s[:, :8] >> _4], axis=1)
    high = split_bits(s[:, 8:], 2, 4)  # scale i: bits 2*(i/4) of byte 8 + i%4
    return {
        "d": f16(raw["d"]),
        "scales": (low | high << _4).view(np.int8) - np.int8(32),
        "codes": split_bits(raw["qs"], 2, 32) | split_bits(raw["hmask"], 1, 32) << np.uint8(2),
    }


def _pack_q3(parts: Parts) -> Mapping[str, Bytes]:
    _check(parts["scales"], -32, 31, "scales")
    _check(parts["codes"], 0, 7, "codes")
    s = (parts["scales"].astype(np.int8) + np.int8(32)).view(np.uint8)
    low = s & _15
    return {
        "hmask": join_bits(parts["codes"] >> np.uint8(2), 1, 32),
        "qs": join_bits(parts["codes"] & np.uint8(3), 2, 32),
        "scales": np.concatenate([low[:, :8] | low[:, 8:] << _4, join_bits(s >> _4, 2, 4)], axis=1),
        "d": to_bytes(parts["d"], "<f2"),
    }


def _values_q3(parts: Parts) -> NDArray[np.float32]:
    return _scaled(parts, "scales", "d") * (parts["codes"].view(np.int8) - np.int8(4)).astype(np.float32)


# ---------------------------------------------------------------------------- Q4_K, Q5_K
def _unpack_six_bits(s: Bytes) -> tuple[Bytes, Bytes]:
    """Eight scales and eight mins of 6 bits from 12 bytes: the last four lend their top bits to the first
    eight."""
    top = s[:, :8] >> _6 << _4
    scales = np.concatenate([s[:, :4] & _63, s[:, 8:] & _15 | top[:, :4]], axis=1)
    mins = np.concatenate([s[:, 4:8] & _63, s[:, 8:] >> _4 | top[:, 4:]], axis=1)
    return scales, mins


def _pack_six_bits(parts: Parts) -> Bytes:
    _check(parts["scales"], 0, 63, "scales")
    _check(parts["mins"], 0, 63, "mins")
    scales, mins = parts["scales"].astype(np.uint8), parts["mins"].astype(np.uint8)
    return np.concatenate(
        [
            scales[:, :4] | scales[:, 4:] >> _4 << _6,
            mins[:, :4] | mins[:, 4:] >> _4 << _6,
            scales[:, 4:] & _15 | (mins[:, 4:] & _15) << _4,
        ],
        axis=1,
    )


def _unpack_q45(raw: Mapping[str, Bytes]) -> Parts:
    scales, mins = _unpack_six_bits(raw["scales"])
    codes = split_bits(raw["qs"], 4, 32)
    if "qh" in raw:
        codes |= split_bits(raw["qh"], 1, 32) << _4
    return {"d": f16(raw["d"]), "dmin": f16(raw["dmin"]), "scales": scales, "mins": mins, "codes": codes}


def _pack_q4(parts: Parts) -> Mapping[str, Bytes]:
    return {
        "d": to_bytes(parts["d"], "<f2"),
        "dmin": to_bytes(parts["dmin"], "<f2"),
        "scales": _pack_six_bits(parts),
        "qs": join_bits(parts["codes"], 4, 32),
    }


def _pack_q5(parts: Parts) -> Mapping[str, Bytes]:
    _check(parts["codes"], 0, 31, "codes")
    low = _pack_q4({**parts, "codes": parts["codes"] & _15})
    return {**low, "qh": join_bits(parts["codes"] >> _4, 1, 32)}


# ---------------------------------------------------------------------------- Q6_K
def _unpack_q6(raw: Mapping[str, Bytes]) -> Parts:
    return {
        "d": f16(raw["d"]),
        "scales": raw["scales"].view(np.int8),
        "codes": split_bits(raw["ql"], 4, 64) | split_bits(raw["qh"], 2, 32) << _4,
    }


def _pack_q6(parts: Parts) -> Mapping[str, Bytes]:
    _check(parts["codes"], 0, 63, "codes")
    return {
        "ql": join_bits(parts["codes"] & _15, 4, 64),
        "qh": join_bits(parts["codes"] >> _4, 2, 32),
        "scales": to_bytes(parts["scales"], "i1"),
        "d": to_bytes(parts["d"], "<f2"),
    }


def _values_q6(parts: Parts) -> NDArray[np.float32]:
    return _scaled(parts, "scales", "d") * (parts["codes"].view(np.int8) - np.int8(32)).astype(np.float32)


# ---------------------------------------------------------------------------- IQ4_XS
def _unpack_xs(raw: Mapping[str, Bytes]) -> Parts:
    scales = split_bits(raw["scales_l"], 4, 1) | split_bits(raw["scales_h"], 2, 1) << _4
    return {
        "d": f16(raw["d"]),
        "scales": scales.view(np.int8) - np.int8(32),
        "codes": split_bits(raw["qs"], 4, 16),
    }


def _pack_xs(parts: Parts) -> Mapping[str, Bytes]:
    _check(parts["scales"], -32, 31, "scales")
    s = (parts["scales"].astype(np.int8) + np.int8(32)).view(np.uint8)
    return {
        "d": to_bytes(parts["d"], "<f2"),
        "scales_h": join_bits(s >> _4, 2, 1),
        "scales_l": join_bits(s & _15, 4, 1),
        "qs": join_bits(parts["codes"], 4, 16),
    }


def _values_xs(parts: Parts) -> NDArray[np.float32]:
    return _scaled(parts, "scales", "d") * IQ4_VALUES[parts["codes"]]


KQUANT_TYPES: tuple[BlockType, ...] = (
    BlockType(
        "Q2_K", 10, 256, (("scales", 16), ("qs", 64), ("d", 2), ("dmin", 2)),
        unpack=_unpack_q2, pack=_pack_q2, values=_values_offset,
    ),
    BlockType(
        "Q3_K", 11, 256, (("hmask", 32), ("qs", 64), ("scales", 12), ("d", 2)),
        unpack=_unpack_q3, pack=_pack_q3, values=_values_q3,
    ),
    BlockType(
        "Q4_K", 12, 256, (("d", 2), ("dmin", 2), ("scales", 12), ("qs", 128)),
        unpack=_unpack_q45, pack=_pack_q4, values=_values_offset,
    ),
    BlockType(
        "Q5_K", 13, 256, (("d", 2), ("dmin", 2), ("scales", 12), ("qh", 32), ("qs", 128)),
        unpack=_unpack_q45, pack=_pack_q5, values=_values_offset,
    ),
    BlockType(
        "Q6_K", 14, 256, (("ql", 128), ("qh", 64), ("scales", 16), ("d", 2)),
        unpack=_unpack_q6, pack=_pack_q6, values=_values_q6,
    ),
    BlockType(
        "IQ4_XS", 23, 256, (("d", 2), ("scales_h", 2), ("scales_l", 4), ("qs", 128)),
        unpack=_unpack_xs, pack=_pack_xs, values=_values_xs,
    ),
)  # fmt: skip
