"""The parts of a decoder layer that are not matrices, for one token: norm, rotary embedding, attention, gate.

Each is a function for ``kernels.cpu.program``: its docstring lists its arguments, addresses of arrays and integers.
All arithmetic is float32, in an order that does not depend on threads. Sizes are multiples of 8.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from trapetum.kernels.cpu import simd
from trapetum.kernels.cpu.memory import array
from trapetum.kernels.jit import jit

__all__ = ["add_step", "append_step", "attend_step", "exponentials", "gate_step", "norm_step", "rotate_step"]

SIMD = "9a260fd7d164c726"  # simd.fingerprint(): a new one makes numba compile this file again


@jit()
def _exp(x: Any) -> Any:
    """e**x to 2e-7, of numbers up to 88; below -87 the smallest normal number's neighbourhood.

    Two steps of Cody and Waite, then the polynomial of degree 6 that Cephes uses (``expf``).
    """
    x = simd.max_floats(x, simd.splat_floats(-87.0))
    n = simd.round_floats(simd.multiply_floats(x, simd.splat_floats(1.4426950408889634)))
    r = simd.fma(n, simd.splat_floats(-0.693359375), x)
    r = simd.fma(n, simd.splat_floats(2.12194440e-4), r)
    p = simd.splat_floats(1.9875691500e-4)
    p = simd.fma(p, r, simd.splat_floats(1.3981999507e-3))
    p = simd.fma(p, r, simd.splat_floats(8.3334519073e-3))
    p = simd.fma(p, r, simd.splat_floats(4.1665795894e-2))
    p = simd.fma(p, r, simd.splat_floats(1.6666665459e-1))
    p = simd.fma(p, r, simd.splat_floats(5.0000001201e-1))
    p = simd.fma(simd.multiply_floats(r, r), p, simd.add_floats(r, simd.splat_floats(1.0)))
    return simd.multiply_floats(p, simd.exp2_floats(n))


@jit()
def exponentials(x: NDArray[np.float32]) -> None:
    """e**x in place, of at most 88; ``x`` float32 of a multiple of 8 numbers."""
    for i in range(0, x.shape[0], 8):
        simd.store_floats(x, i, _exp(simd.load_floats(x, i)))


@jit()
def _norm(
    x: NDArray[np.float32], at: int, count: int, weight: NDArray[np.float32], eps: float, out: Any
) -> None:
    a, b = simd.zero_floats(), simd.zero_floats()
    for i in range(at, at + count - 8, 16):
        v = simd.load_floats(x, i)
        a = simd.fma(v, v, a)
        v = simd.load_floats(x, i + 8)
        b = simd.fma(v, v, b)
    if count % 16:
        v = simd.load_floats(x, at + count - 8)
        a = simd.fma(v, v, a)
    mean = simd.sum_floats(simd.add_floats(a, b)) / np.float32(count)
    scale = simd.splat_floats(np.float32(1) / np.sqrt(mean + np.float32(eps)))
    for i in range(0, count, 8):
        v = simd.multiply_floats(simd.load_floats(x, at + i), scale)
        simd.store_floats(out, at + i, simd.multiply_floats(v, simd.load_floats(weight, i)))


def norm_step(a: Any, begin: int, end: int) -> None:
    """x, weight, eps (float64 [1]), out, width, heads: every head of x [heads, width] by itself."""
    width, heads = a[4], a[5]
    x, out = (
        array(a[0], np.float32, (heads * width,)),
        array(a[3], np.float32, (heads * width,)),
    )
    weight, eps = array(a[1], np.float32, (width,)), array(a[2], np.float64, (1,))[0]
    for h in range(heads):
        _norm(x, h * width, width, weight, eps, out)


def add_step(a: Any, begin: int, end: int) -> None:
    """x, y, count: ``x += y``."""
    x, y = array(a[0], np.float32, (a[2],)), array(a[1], np.float32, (a[2],))
    for i in range(a[2]):
        x[i] += y[i]


def gate_step(a: Any, begin: int, end: int) -> None:
    """gate, up: ``gate <- gate * sigmoid(gate) * up`` for numbers ``8 begin .. 8 end - 1``; count of them in all."""
    gate, up = array(a[0], np.float32, (a[2],)), array(a[1], np.float32, (a[2],))
    one, zero, top = simd.splat_floats(1.0), simd.zero_floats(), simd.splat_floats(-88.0)
    for i in range(8 * begin, 8 * end, 8):
        g = simd.load_floats(gate, i)
        # exp(-g), at most e**88: beyond, the sigmoid of a number below -88 is zero all the same
        grown = _exp(simd.subtract_floats(zero, simd.max_floats(g, top)))
        value = simd.divide_floats(g, simd.add_floats(one, grown))
        simd.store_floats(gate, i, simd.multiply_floats(value, simd.load_floats(up, i)))


def rotate_step(a: Any, begin: int, end: int) -> None:
    """x [heads, dim], cos [dim/2], sin [dim/2], heads, dim: the pairs (d, d + dim/2) of every head, in place."""
    heads, dim = a[3], a[4]
    half = dim // 2
    x = array(a[0], np.float32, (heads, dim))
    cos, sin = array(a[1], np.float32, (half,)), array(a[2], np.float32, (half,))
    for h in range(heads):
        for d in range(half):
            u, v = x[h, d], x[h, d + half]
            x[h, d] = u * cos[d] - v * sin[d]
            x[h, d + half] = v * cos[d] + u * sin[d]


def append_step(a: Any, begin: int, end: int) -> None:
    """x [heads, dim], store [heads, capacity, dim], heads, dim, capacity, position (int64 [1])."""
    heads, dim, capacity = a[2], a[3], a[4]
    position = array(a[5], np.int64, (1,))[0]
    x = array(a[0], np.float32, (heads, dim))
    store = array(a[1], np.float32, (heads, capacity, dim))
    for h in range(heads):
        for d in range(dim):
            store[h, position, d] = x[h, d]


@jit()
def _attend(
    q: NDArray[np.float32],
    keys: NDArray[np.float32],
    values: NDArray[np.float32],
    scores: NDArray[np.float32],
    out: NDArray[np.float32],
    low: int,
    high: int,
    dim: int,
) -> None:
    """One head: ``softmax(q keys^T / sqrt(dim)) values`` over positions low .. high - 1."""
    count = high - low
    scale = np.float32(1.0 / np.sqrt(np.float64(dim)))
    top = np.float32(-np.inf)
    for p in range(count):
        at = (low + p) * dim
        a = simd.zero_floats()
        for d in range(0, dim, 8):
            a = simd.fma(simd.load_floats(q, d), simd.load_floats(keys, at + d), a)
        score = simd.sum_floats(a) * scale
        scores[p] = score
        top = max(top, score)
    for p in range(count):
        scores[p] -= top
    whole = -(-count // 8) * 8
    scores[count:whole] = np.float32(-100)
    exponentials(scores[:whole])
    scores[count:whole] = 0
    total = simd.zero_floats()
    for p in range(0, whole, 8):
        total = simd.add_floats(total, simd.load_floats(scores, p))
    inverse = simd.splat_floats(np.float32(1) / simd.sum_floats(total))
    for d in range(0, dim, 8):
        a, b = simd.zero_floats(), simd.zero_floats()
        for p in range(0, count - 1, 2):
            at = (low + p) * dim + d
            a = simd.fma(simd.splat_floats(scores[p]), simd.load_floats(values, at), a)
            b = simd.fma(simd.splat_floats(scores[p + 1]), simd.load_floats(values, at + dim), b)
        if count % 2:
            at = (high - 1) * dim + d
            a = simd.fma(simd.splat_floats(scores[count - 1]), simd.load_floats(values, at), a)
        simd.store_floats(out, d, simd.multiply_floats(simd.add_floats(a, b), inverse))


def attend_step(a: Any, begin: int, end: int) -> None:
    """q [heads, dim], keys and values [kv_heads, capacity, dim], scores [heads, room], out [heads, dim], heads,
    kv_heads, dim, capacity, room, window (0: none), position (int64 [1]); works on heads begin .. end - 1."""
    heads, kv_heads, dim, capacity, room, window = a[5], a[6], a[7], a[8], a[9], a[10]
    position = array(a[11], np.int64, (1,))[0]
    q, out = array(a[0], np.float32, (heads, dim)), array(a[4], np.float32, (heads, dim))
    keys = array(a[1], np.float32, (kv_heads, capacity * dim))
    values = array(a[2], np.float32, (kv_heads, capacity * dim))
    scores = array(a[3], np.float32, (heads, room))
    low = 0 if window == 0 else max(0, position + 1 - window)
    for h in range(begin, end):
        k = h * kv_heads // heads
        _attend(q[h], keys[k], values[k], scores[h], out[h], low, position + 1, dim)
