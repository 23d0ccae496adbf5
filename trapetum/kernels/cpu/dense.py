"""Plain matrices as stored: two bytes a weight are widened in registers, half the memory of float32 and as exact."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from trapetum.kernels.cpu import simd
from trapetum.kernels.cpu.memory import array
from trapetum.kernels.jit import inline, jit

__all__ = ["multiply_bfloat16_step", "multiply_float16_step", "multiply_float32_step", "multiply_rows"]

SIMD = "ce3020bb72a775c0"  # simd.fingerprint(): a new one makes numba compile this file again


@inline
def _multiply(
    weights: NDArray[Any], x: NDArray[np.float32], out: NDArray[np.float32], begin: int, end: int
) -> None:
    """``out[:, begin:end] = x @ W[begin:end].T``.

    Parameters
    ----------
    weights : ndarray of uint16 (float16 bits), int16 (bfloat16 bits) or float32, shape (rows, in_features)
        ``in_features`` a multiple of 8.
    x : ndarray of float32, shape (tokens, in_features)
    out : ndarray of float32, shape (tokens, rows)
        Written in these columns only.
    begin, end : int
    """
    tokens, count = x.shape
    whole = count // 32 * 32
    for o in range(begin, end):
        row = o * count
        for m in range(tokens):
            at = m * count
            a, b, c, d = simd.zero_floats(), simd.zero_floats(), simd.zero_floats(), simd.zero_floats()
            for i in range(0, whole, 32):
                simd.stream(weights, row + i)
                a = simd.fma(simd.load_floats(weights, row + i), simd.load_floats(x, at + i), a)
                b = simd.fma(simd.load_floats(weights, row + i + 8), simd.load_floats(x, at + i + 8), b)
                c = simd.fma(simd.load_floats(weights, row + i + 16), simd.load_floats(x, at + i + 16), c)
                d = simd.fma(simd.load_floats(weights, row + i + 24), simd.load_floats(x, at + i + 24), d)
            for i in range(whole, count, 8):
                a = simd.fma(simd.load_floats(weights, row + i), simd.load_floats(x, at + i), a)
            out[m, o] = simd.sum_floats(simd.add_floats(simd.add_floats(a, b), simd.add_floats(c, d)))


multiply_rows = jit()(_multiply)


def multiply_float16_step(a: Any, begin: int, end: int) -> None:
    """For ``kernels.cpu.program``: weights, rows, in_features, x, out."""
    x, out = array(a[3], np.float32, (1, a[2])), array(a[4], np.float32, (1, a[1]))
    _multiply(array(a[0], np.uint16, (a[1], a[2])), x, out, begin, end)


def multiply_bfloat16_step(a: Any, begin: int, end: int) -> None:
    """For ``kernels.cpu.program``: weights, rows, in_features, x, out."""
    x, out = array(a[3], np.float32, (1, a[2])), array(a[4], np.float32, (1, a[1]))
    _multiply(array(a[0], np.int16, (a[1], a[2])), x, out, begin, end)


def multiply_float32_step(a: Any, begin: int, end: int) -> None:
    """For ``kernels.cpu.program``: weights, rows, in_features, x, out."""
    x, out = array(a[3], np.float32, (1, a[2])), array(a[4], np.float32, (1, a[1]))
    _multiply(array(a[0], np.float32, (a[1], a[2])), x, out, begin, end)
