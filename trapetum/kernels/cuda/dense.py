"""Products with dense weights by cuBLAS, float16 or bfloat16 with float32 sums; they can be captured in a graph.

CuPy's own wrapper refuses to be captured, because cuBLAS may allocate; with a workspace of its own it does not.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from trapetum.errors import KernelUnavailable
from trapetum.kernels.cuda.module import import_cupy

__all__ = ["multiply_dense"]

# cudaDataType and cublasComputeType_t; a dtype of uint16 is bfloat16 bits.
_TYPES = {"float16": 2, "uint16": 14, "bfloat16": 14, "float32": 0}
_NOTHING, _TRANSPOSED = 0, 1
_COMPUTE_32F = 68
_DEFAULT_ALGORITHM = -1
_WORKSPACE_BYTES = 32 << 20  # what NVIDIA recommends for Hopper
_ONE, _ZERO = ctypes.c_float(1), ctypes.c_float(0)


@cache
def _library() -> Any:
    """The library that CuPy has loaded."""
    cupy = import_cupy()
    cupy.cuda.device.get_cublas_handle()
    name = f"libcublas.so.{cupy.cuda.runtime.runtimeGetVersion() // 1000}"
    try:
        return ctypes.CDLL(name)
    except OSError as problem:
        raise KernelUnavailable(f"cuBLAS cannot be loaded: {problem}") from None


@cache
def _workspace(device: int) -> Any:
    cupy = import_cupy()
    return cupy.empty(_WORKSPACE_BYTES, cupy.uint8)


def _checked(code: int) -> None:
    if code:
        raise KernelUnavailable(f"cuBLAS refused a product: status {code}")


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
        If cuBLAS cannot be loaded or refuses.
    """
    cupy, library = import_cupy(), _library()
    tokens, in_features = x.shape
    handle = ctypes.c_void_p(cupy.cuda.device.get_cublas_handle())
    pointer = ctypes.c_void_p((stream or cupy.cuda.get_current_stream()).ptr)
    space = _workspace(cupy.cuda.runtime.getDevice())
    _checked(library.cublasSetStream_v2(handle, pointer))  # takes the workspace away, too
    _checked(
        library.cublasSetWorkspace_v2(
            handle, ctypes.c_void_p(space.data.ptr), ctypes.c_size_t(_WORKSPACE_BYTES)
        )
    )
    kind, to = _TYPES[x.dtype.name], _TYPES[out.dtype.name]
    _checked(
        library.cublasGemmEx(
            handle, _TRANSPOSED, _NOTHING, rows, tokens, in_features,
            ctypes.byref(_ONE), ctypes.c_void_p(weights.data.ptr), kind, in_features,
            ctypes.c_void_p(x.data.ptr), kind, in_features,
            ctypes.byref(_ZERO), ctypes.c_void_p(out.data.ptr + first * out.itemsize), to, out.shape[1],
            _COMPUTE_32F, _DEFAULT_ALGORITHM,
        )
    )  # fmt: skip
