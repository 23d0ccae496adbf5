"""The one table of safetensors dtype codes and the NumPy dtypes that hold them bit for bit.

NumPy has neither bfloat16 nor float8, so those come from ``ml_dtypes``. Everything is little-endian, as the
format demands. The float8 codes mean the variants of the FP8 paper: ``F8_E4M3`` is "fn" (no infinity, 0x7F
and 0xFF are NaN, largest value 448), ``F8_E5M2`` has infinities (largest value 57344); ``F8_E8M0`` are powers of two,
which scales come in.

Source: the safetensors format description (codes); Micikevicius et al. 2022, "FP8 formats for deep learning".
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

__all__ = ["CODES", "DTYPES", "dtype_code"]

DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"),
    "U32": np.dtype("<u4"),
    "U16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
"""safetensors code -> dtype of one element."""

CODES: dict[np.dtype[Any], str] = {dtype: code for code, dtype in DTYPES.items()}
"""dtype of one element -> safetensors code."""


def dtype_code(dtype: np.dtype[Any]) -> str:
    """The safetensors code of a NumPy dtype.

    Raises
    ------
    ValueError
        If safetensors has no code for it that we know.

    Examples
    --------
    >>> dtype_code(np.dtype(np.float16)), dtype_code(np.dtype(ml_dtypes.bfloat16))
    ('F16', 'BF16')
    """
    try:
        return CODES[np.dtype(dtype)]
    except KeyError:
        raise ValueError(f"no safetensors code for dtype {dtype}; known: {', '.join(DTYPES)}") from None
