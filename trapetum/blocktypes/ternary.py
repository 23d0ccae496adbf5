"""Ternary and one- and two-bit blocks: TQ1_0 TQ2_0 Q1_0 Q2_0 PQ2_0 PTQ1_0.

====== ======================= ===================================================== ======================
type   fields                  element j                                             weight
====== ======================= ===================================================== ======================
TQ1_0  qs[48], qh[4], d f16    base 3, five trits a byte (below)                     ``(code - 1) * d``
TQ2_0  qs[64], d f16           bits 2n of byte 32h + m for j = 128h + 32n + m        ``(code - 1) * d``
Q1_0   d f16, qs[16]           bit j%8 of byte j/8                                   ``d`` if set else ``-d``
Q2_0   d f16, qs[16]           bits 2(j%4) of byte j/4                               ``(code - 1) * d``
PQ2_0  d f16, qs[32]           as Q2_0, 128 weights                                  ``(code - 1) * d``
PTQ1_0 qs[24], qh[2], d f16    base 3, five trits a byte, 128 weights                ``(code - 1) * d``
====== ======================= ===================================================== ======================

TQ2_0 is planar where Q2_0 is interleaved; the scale is first in some types and last in others. Code 3
(``+2d``) can be stored in every two-bit type.

Base 3: the first trit of a byte is its most significant; ``v`` in 0..242 is stored as ``ceil(256 v / 243)``,
so that trit n is ``(((b * 3**n) % 256) * 3) >> 8``. A byte of four trits holds ``3 v``. A byte's trits are
not neighbours: in a *stage* of S bytes, trit n of byte m is element ``n*S + m``. Stages: TQ1_0 32, 16, then
four bytes of four trits; PTQ1_0 16, 8, then two.

Source: llama.cpp, ggml/src/ggml-common.h and ggml-quants.c; PQ2_0 and PTQ1_0 are types 142 and 143 of the
Prism fork.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trapetum.blocktypes.base import BlockType, Bytes, Parts, f16, join_bits, split_bits, to_bytes

__all__ = ["TERNARY_TYPES"]

_POWERS = np.array([1, 3, 9, 27, 81], np.uint8)
_STAGES = {48: (32, 16), 24: (16, 8)}  # bytes of ``qs`` -> its stages


def _trits(raw: Bytes, count: int) -> Bytes:
    """``count`` trits of every byte of one stage [n, S] -> [n, count * S]."""
    shifted = raw[:, None, :] * _POWERS[None, :count, None]  # modulo 256 by the type
    return ((shifted.astype(np.uint16) * 3) >> 8).astype(np.uint8).reshape(len(raw), -1)


def _from_trits(trits: Bytes, count: int) -> Bytes:
    """Undo :func:`_trits`."""
    stage = trits.reshape(len(trits), count, -1).astype(np.uint16)
    value = np.zeros_like(stage[:, 0])
    for k in range(5):
        value *= np.uint16(3)
        if k < count:
            value += stage[:, k]
    return ((value * 256 + 242) // 243).astype(np.uint8)


def _unpack_base3(raw: Mapping[str, Bytes]) -> Parts:
    qs, at, codes = raw["qs"], 0, []
    for stage in _STAGES[qs.shape[1]]:
        codes.append(_trits(qs[:, at : at + stage], 5))
        at += stage
    return {"d": f16(raw["d"]), "codes": np.concatenate([*codes, _trits(raw["qh"], 4)], axis=1)}


def _pack_base3(parts: Parts) -> Mapping[str, Bytes]:
    codes = parts["codes"]
    if codes.size and int(codes.max()) > 2:
        raise ValueError(f"code {int(codes.max())} is no trit; 0, 1 and 2 can be stored")
    at, raw = 0, []
    for stage in _STAGES[48 if codes.shape[1] == 256 else 24]:
        raw.append(_from_trits(codes[:, at : at + 5 * stage], 5))
        at += 5 * stage
    return {
        "qs": np.concatenate(raw, axis=1),
        "qh": _from_trits(codes[:, at:], 4),
        "d": to_bytes(parts["d"], "<f2"),
    }


def _unpack_interleaved(raw: Mapping[str, Bytes]) -> Parts:
    return {"d": f16(raw["d"]), "codes": split_bits(raw["qs"], 2, 1)}


def _pack_interleaved(parts: Parts) -> Mapping[str, Bytes]:
    return {"d": to_bytes(parts["d"], "<f2"), "qs": join_bits(parts["codes"], 2, 1)}


def _unpack_planar(raw: Mapping[str, Bytes]) -> Parts:
    return {"d": f16(raw["d"]), "codes": split_bits(raw["qs"], 2, 32)}


def _pack_planar(parts: Parts) -> Mapping[str, Bytes]:
    return {"d": to_bytes(parts["d"], "<f2"), "qs": join_bits(parts["codes"], 2, 32)}


def _unpack_sign(raw: Mapping[str, Bytes]) -> Parts:
    return {"d": f16(raw["d"]), "codes": split_bits(raw["qs"], 1, 1)}


def _pack_sign(parts: Parts) -> Mapping[str, Bytes]:
    return {"d": to_bytes(parts["d"], "<f2"), "qs": join_bits(parts["codes"], 1, 1)}


def _scale(parts: Parts) -> NDArray[np.float32]:
    d: NDArray[Any] = parts["d"]
    return d.astype(np.float32)[:, None]


def _values(parts: Parts) -> NDArray[np.float32]:
    return (parts["codes"].view(np.int8) - np.int8(1)).astype(np.float32) * _scale(parts)


def _values_sign(parts: Parts) -> NDArray[np.float32]:
    scale = _scale(parts)
    return np.where(parts["codes"] != 0, scale, -scale)


TERNARY_TYPES: tuple[BlockType, ...] = (
    BlockType(
        "TQ1_0", 34, 256, (("qs", 48), ("qh", 4), ("d", 2)),
        unpack=_unpack_base3, pack=_pack_base3, values=_values,
    ),
    BlockType(
        "TQ2_0", 35, 256, (("qs", 64), ("d", 2)),
        unpack=_unpack_planar, pack=_pack_planar, values=_values,
    ),
    BlockType(
        "Q1_0", 41, 128, (("d", 2), ("qs", 16)),
        unpack=_unpack_sign, pack=_pack_sign, values=_values_sign,
    ),
    BlockType(
        "Q2_0", 42, 64, (("d", 2), ("qs", 16)),
        unpack=_unpack_interleaved, pack=_pack_interleaved, values=_values,
    ),
    BlockType(
        "PQ2_0", 142, 128, (("d", 2), ("qs", 32)),
        unpack=_unpack_interleaved, pack=_pack_interleaved, values=_values,
    ),
    BlockType(
        "PTQ1_0", 143, 128, (("qs", 24), ("qh", 2), ("d", 2)),
        unpack=_unpack_base3, pack=_pack_base3, values=_values,
    ),
)  # fmt: skip
