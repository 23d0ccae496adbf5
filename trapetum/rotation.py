"""A Hadamard rotation of activations that is folded into weights.

Rotating the input of a linear layer spreads outliers over a block of inputs, which is what a ternary group with one
scale needs. With s a vector of signs for each input width and H the normalized Sylvester Walsh-Hadamard matrix of
``block_size`` on the diagonal, R = H diag(s), and

====================================  ================================  =====================================
where                                 operation                         method
====================================  ================================  =====================================
a weight row w, before quantizing     w_stored = H (s * w)              :meth:`HadamardRotation.fold`
a stored row, back to the original    w = s * (H w_stored)              :meth:`HadamardRotation.unfold`
an activation, before a folded layer  y = W_stored . (H (s * x))        :meth:`HadamardRotation.fold`
a row looked up in a folded embedding e = s * (H z)                     :meth:`HadamardRotation.unfold`
====================================  ================================  =====================================

Weights and activations take the same two operations because H is symmetric. Signs belong to a width, not to a tensor:
layers that read one activation share one transform of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

__all__ = ["BLOCK_SIZES", "ROTATION_KEY", "HadamardRotation", "random_signs"]

ROTATION_KEY = "hadamard"
"""What a rotated tensor calls the one rotation that its model has."""

# The largest that divides every folded width; readers of such files in the field are fixed at 1024 first.
BLOCK_SIZES = (1024, 512, 256, 128)

# Rows transformed at a time, in float64: bounds the scratch memory at 32 MiB.
_CHUNK = 1 << 22


def random_signs(text: str, width: int) -> NDArray[np.int8]:
    """+1 and -1, a pure function of the text and the width.

    Returns
    -------
    ndarray of int8, shape (width,)
    """
    stream = hashlib.shake_256(f"{text} {width}".encode()).digest((width + 7) // 8)
    bits = np.unpackbits(np.frombuffer(stream, np.uint8), count=width)
    return (1 - 2 * bits.astype(np.int8)).astype(np.int8)


@dataclass(frozen=True)
class HadamardRotation:
    """Block size and signs of one rotated model.

    Parameters
    ----------
    block_size : int
        Power of two that divides every width.
    signs : mapping of int to ndarray of int8, shape (width,)
        +1 and -1 for each input width.

    Raises
    ------
    ValueError
        If a width, a sign or the block size breaks these rules.

    Examples
    --------
    >>> s = np.array([1, -1, 1, 1, -1, -1, 1, -1], np.int8)
    >>> rotation = HadamardRotation(8, {8: s})
    >>> np.round(rotation.fold(np.arange(1.0, 9.0)[None]) * np.sqrt(8)).astype(int).tolist()
    [[-6, 18, -18, -10, 18, -14, 2, 18]]
    """

    block_size: int
    signs: Mapping[int, NDArray[np.int8]]

    def __post_init__(self) -> None:
        if self.block_size < 2 or self.block_size & (self.block_size - 1):
            raise ValueError(f"block size {self.block_size} is not a power of two")
        for width, values in self.signs.items():
            if width <= 0 or width % self.block_size:
                raise ValueError(f"width {width} is not a multiple of the block size {self.block_size}")
            if values.shape != (width,) or not np.isin(values, (-1, 1)).all():
                raise ValueError(f"width {width} needs {width} signs of +1 or -1")

    @classmethod
    def for_widths(cls, widths: Iterable[int], seed: int = 0) -> Self:
        """Random signs, a pure function of seed and width, and the largest block that divides every width.

        Raises
        ------
        ValueError
            If no block size fits every width.
        """
        distinct = sorted(set(widths))
        fitting = [b for b in BLOCK_SIZES if all(width % b == 0 for width in distinct)]
        if not fitting or not distinct:
            raise ValueError(f"widths {distinct} are not all multiples of {BLOCK_SIZES[-1]}")
        signs = {}
        for width in distinct:
            signs[width] = random_signs(f"hadamard signs {seed}", width)
        return cls(fitting[0], signs)

    def fold(self, rows: NDArray[Any]) -> NDArray[np.float32]:
        """H (s * row) for every row.

        Parameters
        ----------
        rows : ndarray of a float dtype, shape (..., width)

        Returns
        -------
        ndarray of float32, same shape

        Raises
        ------
        ValueError
            If there are no signs for this width.
        """
        return self._apply(rows, before=True)

    def unfold(self, rows: NDArray[Any]) -> NDArray[np.float32]:
        """s * (H row) for every row: undoes :meth:`fold`; same parameters, result and errors."""
        return self._apply(rows, before=False)

    def _apply(self, rows: NDArray[Any], *, before: bool) -> NDArray[np.float32]:
        from trapetum.kernels.cpu.hadamard import transform_rows

        width = rows.shape[-1]
        if width not in self.signs:
            raise ValueError(f"the rotation has signs for widths {sorted(self.signs)}, not for {width}")
        signs = self.signs[width].astype(np.float64)
        flat = rows.reshape(-1, width)
        out = np.empty(flat.shape, np.float32)
        step = max(1, _CHUNK // width)
        for r in range(0, flat.shape[0], step):
            part = flat[r : r + step].astype(np.float64)
            if before:
                part *= signs
            transform_rows(part, self.block_size)
            if not before:
                part *= signs
            with np.errstate(over="ignore"):  # beyond float32 is infinite, which who reads the rows refuses
                out[r : r + step] = part
        return out.reshape(rows.shape)

    def to_json(self) -> dict[str, Any]:
        """JSON values: block size and, for each width, the signs as hexadecimal bits (1 is -1, first sign first)."""
        return {
            "transform": "normalized-sylvester-walsh-hadamard",
            "block_size": self.block_size,
            "signs": {str(w): np.packbits(s < 0).tobytes().hex() for w, s in sorted(self.signs.items())},
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Undo :meth:`to_json`; raises ``ValueError`` where the value breaks its rules."""
        if value.get("transform") != "normalized-sylvester-walsh-hadamard":
            raise ValueError(f"unknown transform {value.get('transform')!r}")
        signs = {}
        for key, text in value["signs"].items():
            width = int(key)
            bits = np.unpackbits(np.frombuffer(bytes.fromhex(text), np.uint8))
            if bits.size != (width + 7) // 8 * 8:
                raise ValueError(f"width {width} has {bits.size} sign bits")
            signs[width] = (1 - 2 * bits[:width].astype(np.int8)).astype(np.int8)
        return cls(int(value["block_size"]), signs)
