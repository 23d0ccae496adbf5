"""Products with dense weights by cuBLAS, float16 or bfloat16 with float32 sums."""

from __future__ import annotations

from typing import Any

import numpy as np

from trapetum.kernels.cuda.module import import_cupy

__all__ = ["multiply_dense"]

# cudaDataType and cublasComputeType_t; a dtype of uint16 is bfloat16 bits.
_TYPES = {"float16": 2, "uint16": 14, "bfloat16": 14, "float32": 0}
_COMPUTE_32F = 68
_DEFAULT_ALGORITHM = -1


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
    """
    from cupy_backends.cuda.libs import cublas

    cupy = import_cupy()
    tokens, in_features = x.shape
    handle = cupy.cuda.device.get_cublas_handle()
    one, zero = np.ones(1, np.float32), np.zeros(1, np.float32)
    cublas.setStream(handle, (stream or cupy.cuda.get_current_stream()).ptr)
    kind, to = _TYPES[x.dtype.name], _TYPES[out.dtype.name]
    cublas.gemmEx(
        handle, cublas.CUBLAS_OP_T, cublas.CUBLAS_OP_N, rows, tokens, in_features,
        one.ctypes.data, weights.data.ptr, kind, in_features, x.data.ptr, kind, in_features,
        zero.ctypes.data, out.data.ptr + first * out.itemsize, to, out.shape[1],
        _COMPUTE_32F, _DEFAULT_ALGORITHM,
    )  # fmt: skip
