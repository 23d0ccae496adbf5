"""Products with dense weights by cuBLAS, float16 or bfloat16 with float32 sums.

The library is called directly: CuPy's own calls refuse to be captured in a graph, the library does not.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np

from trapetum.errors import KernelUnavailable
from trapetum.kernels.cuda.module import import_cupy

__all__ = ["multiply_dense"]

# cudaDataType and cublasComputeType_t; a dtype of uint16 is bfloat16 bits.
_TYPES = {"float16": 2, "uint16": 14, "bfloat16": 14, "float32": 0}
_COMPUTE_32F = 68
_DEFAULT_ALGORITHM = -1
_PLAIN, _TRANSPOSED = 0, 1
_ONE, _ZERO = np.ones(1, np.float32), np.zeros(1, np.float32)


@cache
def _library() -> Any:
    """Raises ``KernelUnavailable`` if cuBLAS cannot be loaded."""
    import_cupy().cuda.device.get_cublas_handle()  # loads it from wherever CuPy finds it
    for version in (13, 12):
        try:
            return ctypes.CDLL(f"libcublas.so.{version}")
        except OSError:
            continue
    raise KernelUnavailable(
        "libcublas cannot be loaded", hint="Install trapetum[cuda13] or trapetum[cuda12]."
    )


def multiply_dense(x: Any, weights: Any, rows: int, out: Any, first: int = 0, stream: Any = None) -> None:
    """``out[:, first : first + rows] = x W^T``.

    Parameters
    ----------
    x : cupy.ndarray of float16 or uint16 (bfloat16 bits), shape (tokens, in_features)
    weights : cupy.ndarray, at least rows * in_features items of 16 bits
        In the format of ``x``, row after row.
    rows : int
    out : cupy.ndarray of the dtype of ``x`` or float32, shape (tokens, all rows)
    first : int
        Column of ``out`` where the result begins.
    stream : cupy.cuda.Stream, optional

    Raises
    ------
    KernelUnavailable
        If cuBLAS is missing or refuses.
    """
    cupy = import_cupy()
    library, at = _library(), ctypes.c_void_p
    tokens, in_features = x.shape
    handle = at(cupy.cuda.device.get_cublas_handle())
    kind, to = _TYPES[x.dtype.name], _TYPES[out.dtype.name]
    status = library.cublasSetStream_v2(handle, at((stream or cupy.cuda.get_current_stream()).ptr))
    # Row-major matrices are the transposed ones to a library that counts by columns.
    status |= library.cublasGemmEx(
        handle, _TRANSPOSED, _PLAIN, rows, tokens, in_features,
        at(_ONE.ctypes.data), at(weights.data.ptr), kind, in_features, at(x.data.ptr), kind, in_features,
        at(_ZERO.ctypes.data), at(out.data.ptr + first * out.itemsize), to, out.shape[1],
        _COMPUTE_32F, _DEFAULT_ALGORITHM,
    )  # fmt: skip
    if status:
        raise KernelUnavailable(f"cuBLAS cannot multiply {tuple(x.shape)} by {rows} rows: status {status}")
