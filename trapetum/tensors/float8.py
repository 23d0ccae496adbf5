"""8-bit floats and a float32 scale for each group of a row's weights (FP8)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Self

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from trapetum.tensors.base import QuantizedTensor

__all__ = ["FLOAT8", "Float8Tensor"]

_CHUNK_WEIGHTS = 1 << 16  # stays in the second-level cache: 700 instead of 450 million weights a second

FLOAT8: dict[str, np.dtype[Any]] = {
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
}
"""Types of codes."""


@cache
def _values(name: str) -> NDArray[np.float32]:
    return np.arange(256, dtype=np.uint8).view(FLOAT8[name]).astype(np.float32)


@cache
def _pairs(name: str) -> NDArray[np.complex64]:
    """Two values for each two bytes, as the halves of a complex number: 890 instead of 490 million weights a second."""
    both = np.arange(1 << 16)
    found = np.stack([_values(name)[both & 255], _values(name)[both >> 8]], axis=1)
    return found.view(np.complex64)[:, 0]


def _widened(codes: NDArray[Any]) -> NDArray[np.float32]:
    """Values of codes [rows, in_features]."""
    raw = np.ascontiguousarray(codes).view(np.uint8)
    if raw.shape[1] % 2:
        return np.take(_values(codes.dtype.name), raw)
    return np.take(_pairs(codes.dtype.name), raw.view(np.uint16)).view(np.float32)


def _scaled(
    values: NDArray[np.float32], scales: NDArray[np.float32], group: int, out: NDArray[np.float32]
) -> None:
    """Write values times the scale of their group."""
    rows, width = values.shape
    if width % group == 0:
        np.multiply(values.reshape(rows, -1, group), scales[:, :, None], out=out.reshape(rows, -1, group))
        return
    for number, start in enumerate(range(0, width, group)):
        part = slice(start, start + group)
        np.multiply(values[:, part], scales[:, number : number + 1], out=out[:, part])


@dataclass(frozen=True, eq=False)
class Float8Tensor(QuantizedTensor):
    """8-bit floats and one float32 scale for each group of a row's weights.

    Checkpoints have one scale for a tensor, a row or a block of rows and columns; here every row has its own, so that
    it can be read alone: 0.25 bits a weight at 128 columns.

    Parameters
    ----------
    codes : ndarray of float8_e4m3fn or float8_e5m2, shape (rows, in_features)
    scales : ndarray of float32, shape (rows, ceil(in_features / group_size))
    group_size : int
        The last group of a row may be shorter.
    shape : tuple of int, optional
        Logical shape when it is not (rows, in_features).

    Raises
    ------
    ValueError
        If the arrays do not belong together.

    Examples
    --------
    >>> codes = np.array([[1.5, -2, 448]], FLOAT8["float8_e4m3fn"])
    >>> Float8Tensor(codes, np.array([[0.5, 2]], np.float32), 2).dequantize().tolist()
    [[0.75, -1.0, 896.0]]
    """

    codes: NDArray[Any]
    scales: NDArray[np.float32]
    group_size: int
    shape: tuple[int, ...] = ()
    layout: ClassVar[str] = "float8"

    def __post_init__(self) -> None:
        if self.codes.ndim != 2 or self.codes.dtype.name not in FLOAT8 or self.scales.dtype != np.float32:
            raise ValueError(f"codes must be {' or '.join(FLOAT8)} [rows, in_features], scales float32")
        rows, width = self.codes.shape
        if self.group_size < 1 or self.scales.shape != (rows, -(-width // self.group_size)):
            raise ValueError(
                f"scales are {self.scales.shape}, not one a group of {self.group_size} of {self.codes.shape}"
            )
        self._settle_shape(rows, width)

    def dequantize(self, rows: slice | None = None) -> NDArray[np.float32]:
        """``value(code) * scale``, rounded once to float32; see :meth:`QuantizedTensor.dequantize`."""
        part = slice(None) if rows is None else rows
        codes, scales = self.codes[part], self.scales[part]
        values = np.empty(codes.shape, np.float32)
        width = max(codes.shape[1], 1)
        step = max(1, _CHUNK_WEIGHTS // width)
        with np.errstate(over="ignore", invalid="ignore"):  # for a finite check to say, not for a warning
            for start in range(0, len(codes), step):
                chunk = slice(start, start + step)
                _scaled(_widened(codes[chunk]), scales[chunk], self.group_size, values[chunk])
        return values.reshape(self.shape) if rows is None else values

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """``codes`` float8 [rows, in_features], ``scales`` float32 [rows, groups]."""
        return {"codes": self.codes, "scales": self.scales}

    def params(self) -> dict[str, Any]:
        """Columns of a group."""
        return {"group_size": self.group_size}

    @classmethod
    def from_arrays(
        cls, arrays: Mapping[str, NDArray[Any]], shape: tuple[int, ...], params: Mapping[str, Any]
    ) -> Self:
        """Take the arrays as they are."""
        return cls(arrays["codes"], arrays["scales"], params["group_size"], tuple(shape))
