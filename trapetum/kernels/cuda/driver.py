"""One call of the CUDA driver: launch a kernel that may begin while the one before it is still running.

CuPy launches kernels in order, each after the end of the last: two microseconds of each go into draining and filling
the card (H200). With *programmatic stream serialization* a kernel starts early, loads weights, and waits inside for the
results of its predecessors (``griddepcontrol``, compute capability 9.0); a captured graph keeps that.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from trapetum.errors import KernelUnavailable

__all__ = ["launch"]

_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int * 16))


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


@cache
def _library() -> Any:
    try:
        library = ctypes.CDLL("libcuda.so.1")
        library.cuLaunchKernelEx  # noqa: B018  raises where the driver is older than CUDA 11.8
    except (OSError, AttributeError) as problem:
        raise KernelUnavailable(f"the CUDA driver cannot launch kernels: {problem}") from None
    return library


def _value(argument: Any) -> Any:
    """What the driver copies: an address, the bytes of a NumPy scalar, or a 32-bit number."""
    if argument is None:
        return ctypes.c_void_p(0)
    if isinstance(argument, np.generic):
        return (ctypes.c_char * argument.nbytes).from_buffer_copy(argument.tobytes())
    if isinstance(argument, float):
        return ctypes.c_float(argument)
    if isinstance(argument, int):
        return ctypes.c_int(argument)
    return ctypes.c_void_p(argument.data.ptr)


def launch(
    function: int,
    grid: Sequence[int],
    threads: int,
    arguments: Sequence[Any],
    shared: int,
    stream: int,
    early: bool,
) -> None:
    """Put a kernel on a stream.

    Parameters
    ----------
    function : int
        The driver's handle.
    grid : sequence of int
        Blocks along x, y and z; missing ones are 1.
    threads : int
        A block.
    arguments : sequence
        Arrays of CuPy (their address), None (a null pointer), NumPy scalars, and numbers of Python (32 bits).
    shared : int
        Dynamic shared memory, bytes.
    stream : int
    early : bool
        The kernel waits inside for what it needs of its predecessors.

    Raises
    ------
    KernelUnavailable
        If the driver refuses; with its own words.
    """
    values = [_value(a) for a in arguments]
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
    attribute = _Attribute(_SERIALIZATION, b"", (ctypes.c_int * 16)(1))
    config = _Config(
        (ctypes.c_uint * 3)(*grid, *(1,) * (3 - len(grid))),
        (ctypes.c_uint * 3)(threads, 1, 1),
        shared,
        stream,
        ctypes.pointer(attribute),
        int(early),
    )
    code = _library().cuLaunchKernelEx(ctypes.byref(config), ctypes.c_void_p(function), pointers, None)
    if code:
        text = ctypes.c_char_p()
        _library().cuGetErrorString(code, ctypes.byref(text))
        raise KernelUnavailable(
            f"the driver refused a launch: error {code}, {(text.value or b'unknown').decode()}"
        )
