"""NaN and infinity counts against NumPy, for every float dtype."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from trapetum.quantize.scan import count_nonfinite

FLOATS = (
    np.float64,
    np.float32,
    np.float16,
    ml_dtypes.bfloat16,
    ml_dtypes.float8_e5m2,
    ml_dtypes.float8_e4m3fn,
)


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_pattern_of_the_upper_bits(dtype: Any) -> None:
    size = np.dtype(dtype).itemsize
    patterns = np.arange(1 << min(8 * size, 16), dtype=np.uint64) << np.uint64(max(0, 8 * size - 16))
    values = patterns.astype(f"u{size}").view(dtype).reshape(-1, 16)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        as_wide = values.astype(np.float64).reshape(-1)
    nan, inf = int(np.isnan(as_wide).sum()), int(np.isinf(as_wide).sum())
    first = int(np.flatnonzero(~np.isfinite(as_wide))[0])
    assert count_nonfinite(values) == (nan, inf, first)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("place", [0, 4095, 4096, 9999])
def test_one_bad_value(dtype: Any, place: int) -> None:
    values = np.ones((10, 1000), dtype)
    assert count_nonfinite(values) == (0, 0, -1)
    values.reshape(-1)[place] = np.nan
    assert count_nonfinite(values) == (1, 0, place)


def test_shapes_and_strides() -> None:
    assert count_nonfinite(np.float32(np.inf).reshape(())) == (0, 1, 0)
    assert count_nonfinite(np.zeros((3, 0), np.float16)) == (0, 0, -1)
    assert count_nonfinite(np.array([[0, np.nan], [np.inf, 0]], np.float32).T) == (1, 1, 1)
    assert count_nonfinite(np.ones(4, np.int8)) == (0, 0, -1)


def test_unknown_dtype_is_refused() -> None:
    with pytest.raises(TypeError, match="complex64"):
        count_nonfinite(np.ones(2, np.complex64))
