"""Per-row codebooks by near-exact one-dimensional k-means.

A codebook belongs to one output row of a weight matrix; the search minimises the row's squared error, optionally
weighted by the importance of each input. See ``kmeans_search`` for the method and ``kmeans_exact`` for the oracle;
docs/benchmarks.md has error and speed of the three efforts.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from trapetum.errors import RecipeError
from trapetum.quantize.kmeans_exact import optimal_codebook
from trapetum.quantize.scheme import EFFORTS

__all__ = ["fit_codebooks", "needs_wide_codebook", "optimal_codebook", "relative_error"]


# (groups, subgroups, window, stride, rounds, steps) by codebook size (up to and including) and effort: intervals solved
# exactly (0: none, start from the companding law), intervals that borders move on, candidates a border, their
# distance in the first round (halved each round), rounds of joint refinement, Lloyd steps at most.
_Settings = tuple[int, int, int, int, int, int]
_SETTINGS: dict[str, tuple[tuple[int, _Settings], ...]] = {
    "fast": ((32, (64, 512, 8, 2, 1, 4)), (64, (128, 1024, 8, 1, 1, 4)), (256, (0, 2048, 4, 1, 0, 3))),
    "default": (
        (16, (80, 512, 6, 2, 1, 2)),  # (96, 768, 8, 2, 1, 4): 8 % slower, 0.10 for 0.13 % excess
        (32, (160, 1280, 8, 2, 1, 8)),
        (64, (192, 1536, 8, 1, 1, 8)),
        (128, (256, 2048, 8, 1, 1, 3)),
        (256, (0, 2048, 4, 1, 1, 3)),
    ),
    "high": ((64, (320, 4096, 16, 4, 3, 20)), (256, (768, 4096, 16, 2, 3, 20))),
}

_IMPORTANCE_FLOOR = 0.01

# Magnitude pattern p is worth float32_from_bits(p << shift) * power: float16's exponent bias is 112 less.
_HALF_DECODING = {"bfloat16": (16, 1.0), "float16": (13, 2.0**112)}


def _settings(codebook_size: int, effort: str) -> _Settings:
    if not 2 <= codebook_size <= 256:
        raise RecipeError(f"codebook_size is {codebook_size}; 2 to 256 are allowed")
    if effort not in _SETTINGS:
        raise RecipeError(f"effort is {effort!r}; one of {', '.join(EFFORTS)} is allowed")
    return next(s for limit, s in _SETTINGS[effort] if codebook_size <= limit)


def _matrix(weight: NDArray[Any]) -> NDArray[Any]:
    if weight.ndim != 2:
        raise ValueError(f"weight has shape {weight.shape}; [rows, in_features] is allowed")
    return np.ascontiguousarray(weight)


def _half_words(weight: NDArray[Any]) -> tuple[NDArray[np.uint16], int, float] | None:
    """The 16-bit patterns of a matrix and their decoding (shift, power); None where values need 32 bits."""
    if weight.dtype != np.float32:
        return weight.view(np.uint16), *_HALF_DECODING[weight.dtype.name]
    words = weight.view(np.uint32)
    if not words.size or (words[:1] & 0xFFFF).any() or (words & 0xFFFF).any():
        return None
    return (words >> 16).astype(np.uint16), *_HALF_DECODING["bfloat16"]


def _supported(weight: NDArray[Any]) -> NDArray[Any]:
    weight = _matrix(weight)
    if weight.dtype in (ml_dtypes.bfloat16, np.float16, np.float32):
        return weight
    raise ValueError(f"weight is {weight.dtype}; bfloat16, float16 and float32 are allowed")


def _importance(importance: NDArray[Any] | None, in_features: int) -> NDArray[np.float64]:
    """Positive weights of mean 1, or an empty array for "all alike"."""
    nothing = np.empty(0, np.float64)
    if importance is None:
        return nothing
    h = np.asarray(importance, dtype=np.float64)
    if h.shape != (in_features,):
        raise RecipeError(
            f"importance has shape {h.shape}; one value for each of {in_features} inputs is needed"
        )
    if not np.isfinite(h).all():
        raise RecipeError(
            f"importance holds {int((~np.isfinite(h)).sum())} NaN or infinite values; finite ones are needed"
        )
    if (h < 0).any():
        raise RecipeError(
            f"importance holds {int((h < 0).sum())} negative values; zero and above are allowed"
        )
    peak = h.max(initial=0.0)
    if peak == 0.0:
        return nothing
    h = h / peak
    scaled: NDArray[np.float64] = np.maximum(h / h.mean(), _IMPORTANCE_FLOOR)
    return scaled


def fit_codebooks(
    weight: NDArray[Any],
    codebook_size: int,
    importance: NDArray[Any] | None = None,
    effort: str = "default",
    wide: bool = False,
) -> tuple[NDArray[np.uint8], NDArray[Any]]:
    """Fit one codebook a row and code every weight with its row's nearest entry.

    Runs on the calling thread without the GIL: callers split rows over threads. A row's result depends on
    nothing but the row and the options, so any split into blocks gives the same bytes.

    Parameters
    ----------
    weight : ndarray of bfloat16, float16 or float32, shape (rows, in_features)
        Finite values (see ``scan.count_nonfinite``).
    codebook_size : int
        2 to 256.
    importance : ndarray, shape (in_features,), optional
        Weight of each input's squared error, for example the mean squared activation. Values below 1 % of the
        mean count as 1 % of the mean, for an input that calibration never saw still matters; all zero means
        uniform.
    effort : {"fast", "default", "high"}
        How near the optimum to go; figures in docs/benchmarks.md.
    wide : bool
        Store the codebook as float32; see :func:`needs_wide_codebook`.

    Returns
    -------
    codes : ndarray of uint8, shape (rows, in_features)
        Nearest entry; of two equally near ones the lower index.
    codebook : ndarray of float16 or float32, shape (rows, codebook_size)
        Ascending; unused entries at the end repeat the last used one. A row of at most ``codebook_size``
        distinct values is reproduced exactly (by float16 where :func:`needs_wide_codebook` says False). Zeros
        are +0.0.

    Raises
    ------
    RecipeError
        For a codebook_size, effort or importance that is not allowed.
    ValueError
        For another dtype or rank, or a value beyond float16's range without ``wide``.

    Examples
    --------
    >>> codes, codebook = fit_codebooks(np.array([[1.0, 2.0, 2.0, -1.0]], np.float32), 4)
    >>> codes.tolist(), codebook.tolist()
    ([[1, 2, 2, 0]], [[-1.0, 1.0, 2.0, 2.0]])
    """
    from trapetum.quantize.kmeans_rows import fit_rows_16, fit_rows_32

    settings = _settings(codebook_size, effort)
    weight = _supported(weight)
    h = _importance(importance, weight.shape[1])
    codebook = np.zeros((weight.shape[0], codebook_size), np.float64)
    codes = np.zeros(weight.shape, np.uint8)
    if weight.size:
        halves = _half_words(weight)
        if halves is not None:
            bits, shift, power = halves
            fit_rows_16(bits, h, shift, power, settings, not wide, codebook, codes)
        else:
            ordered, order = _sorted_rows(weight, with_order=h.size > 0)
            fit_rows_32(weight, ordered, order, h, settings, not wide, codebook, codes)
    if not wide and codebook.size and np.abs(codebook).max() > 65504.0:
        raise ValueError("a codebook value is beyond float16; fit with wide=True")
    return codes, codebook.astype(np.float32 if wide else np.float16)


def _sorted_rows(
    weight: NDArray[np.float32], with_order: bool
) -> tuple[NDArray[np.float32], NDArray[np.uint32]]:
    """Each row ascending and, if wanted, where each value came from (equal values in order of place)."""
    if not with_order:
        return np.sort(weight, axis=1), np.empty((weight.shape[0], 0), np.uint32)
    words = weight.view(np.uint32).astype(np.uint64)
    # Order-preserving bits above, place below: one SIMD sort of integers, and equal on every machine.
    keys = np.where(words >> np.uint64(31), ~words & np.uint64(0xFFFFFFFF), words | np.uint64(1 << 31))
    packed = (keys << np.uint64(32)) | np.arange(weight.shape[1], dtype=np.uint64)
    packed.sort(axis=1)
    order = packed.astype(np.uint32)
    return np.take_along_axis(weight, order.astype(np.intp), axis=1), order


def needs_wide_codebook(weight: NDArray[Any], codebook_size: int) -> bool:
    """Whether any row needs a float32 codebook, a pure function of the rows.

    A row does when a value overflows float16 (above 65504); when it has at most ``codebook_size`` distinct values
    and float16 cannot hold one of them exactly; when its largest magnitude is below 2**-14, the smallest normal
    float16, and not zero; or when all its values have one sign and spread over less than ``codebook_size / 256``
    of the largest magnitude (entries would then lie closer than about four float16 steps).

    Parameters
    ----------
    weight : ndarray of bfloat16, float16 or float32, shape (rows, in_features)
    codebook_size : int
        2 to 256.

    Returns
    -------
    bool

    Examples
    --------
    >>> needs_wide_codebook(np.full((1, 4), 70000.0, np.float32), 16)
    True
    >>> needs_wide_codebook(np.full((1, 4), 0.5, np.float32), 16)
    False
    """
    from trapetum.quantize.kmeans_stored import rows_need_wide

    _settings(codebook_size, "default")
    weight = _supported(weight)
    if not weight.size:
        return False
    if weight.dtype == np.float32:
        return bool(rows_need_wide(weight.view(np.uint32), 0, 1.0, codebook_size))
    shift, power = _HALF_DECODING[weight.dtype.name]
    return bool(rows_need_wide(weight.view(np.uint16), shift, power, codebook_size))


def relative_error(
    weight: NDArray[Any], codes: NDArray[np.uint8], codebook: NDArray[Any]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Squared error and sum of squares of each row; the relative error is ``sum(sse) / sum(squares)``.

    Kept by row, so that the sum over a tensor, taken in row order, does not depend on the split into blocks.

    Parameters
    ----------
    weight : ndarray of bfloat16, float16 or float32, shape (rows, in_features)
    codes : ndarray of uint8, shape (rows, in_features)
    codebook : ndarray of float16 or float32, shape (rows, codebook_size)

    Returns
    -------
    sse : ndarray of float64, shape (rows,)
    squares : ndarray of float64, shape (rows,)

    Examples
    --------
    >>> sse, squares = relative_error(np.array([[3.0, 4.0]], np.float32), np.array([[0, 1]], np.uint8),
    ...                               np.array([[3.0, 5.0]], np.float16))
    >>> sse.tolist(), squares.tolist()
    ([1.0], [25.0])
    """
    from trapetum.quantize.kmeans_stored import row_errors

    weight = _supported(weight)
    if weight.dtype == ml_dtypes.bfloat16:
        values = (weight.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    else:
        values = weight.astype(np.float32, copy=False)
    out = np.empty((2, weight.shape[0]), np.float64)
    row_errors(values, np.ascontiguousarray(codes), np.ascontiguousarray(codebook, dtype=np.float32), out)
    return out[0], out[1]
