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
from trapetum.kernels.jit import inline

__all__ = [
    "add_step",
    "append_halves_step",
    "append_step",
    "attend_halves_step",
    "attend_step",
    "cap_step",
    "copy_step",
    "exponentials",
    "fold_step",
    "gelu_tanh_step",
    "norm_step",
    "rotate_step",
    "silu_step",
]

SIMD = "ce3020bb72a775c0"  # simd.fingerprint(): a new one makes numba compile this file again


@inline
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


@inline
def exponentials(x: NDArray[np.float32], begin: int, end: int) -> None:
    """e**x in place, of at most 88, for numbers begin .. end - 1, a multiple of 8."""
    for i in range(begin, end, 8):
        simd.store_floats(x, i, _exp(simd.load_floats(x, i)))


@inline
def _sigmoid(x: Any) -> Any:
    """``1 / (1 + exp(-x))``; zero below -88, within 1e-38."""
    zero, top = simd.zero_floats(), simd.splat_floats(-88.0)
    grown = _exp(simd.subtract_floats(zero, simd.max_floats(x, top)))
    return simd.divide_floats(simd.splat_floats(1.0), simd.add_floats(simd.splat_floats(1.0), grown))


@inline
def _cap(x: NDArray[np.float32], begin: int, end: int, cap: np.float32) -> None:
    """``x <- cap * tanh(x / cap)`` for numbers begin .. end - 1, a multiple of 8; tanh to 1e-7 of 1."""
    twice, size = simd.splat_floats(np.float32(2) / cap), simd.splat_floats(cap)
    top, one = simd.splat_floats(30.0), simd.splat_floats(1.0)
    bottom = simd.splat_floats(-30.0)
    for i in range(begin, end, 8):
        v = simd.multiply_floats(simd.load_floats(x, i), twice)
        v = simd.max_floats(bottom, simd.min_floats(top, v))
        grown = simd.add_floats(_exp(v), one)
        part = simd.divide_floats(simd.splat_floats(2.0), grown)
        simd.store_floats(x, i, simd.multiply_floats(simd.subtract_floats(one, part), size))


@inline
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


def copy_step(a: Any, begin: int, end: int) -> None:
    """x, y, count: ``y <- x``."""
    x, y = array(a[0], np.float32, (a[2],)), array(a[1], np.float32, (a[2],))
    for i in range(a[2]):
        y[i] = x[i]


def silu_step(a: Any, begin: int, end: int) -> None:
    """gate, up, count of them: ``gate <- gate * sigmoid(gate) * up`` for numbers ``8 begin .. 8 end - 1``."""
    gate, up = array(a[0], np.float32, (a[2],)), array(a[1], np.float32, (a[2],))
    for i in range(8 * begin, 8 * end, 8):
        g = simd.load_floats(gate, i)
        value = simd.multiply_floats(g, _sigmoid(g))
        simd.store_floats(gate, i, simd.multiply_floats(value, simd.load_floats(up, i)))


def gelu_tanh_step(a: Any, begin: int, end: int) -> None:
    """The same with ``gate <- gate * (1 + tanh(sqrt(2/pi) (gate + 0.044715 gate^3))) / 2 * up``."""
    gate, up = array(a[0], np.float32, (a[2],)), array(a[1], np.float32, (a[2],))
    slope, cubic = simd.splat_floats(1.5957691216057308), simd.splat_floats(0.044715)
    for i in range(8 * begin, 8 * end, 8):
        g = simd.load_floats(gate, i)
        inner = simd.fma(simd.multiply_floats(g, g), simd.multiply_floats(g, cubic), g)
        value = simd.multiply_floats(
            g, _sigmoid(simd.multiply_floats(inner, slope))
        )  # (1 + tanh x) / 2 = sigmoid(2 x)
        simd.store_floats(gate, i, simd.multiply_floats(value, simd.load_floats(up, i)))


def cap_step(a: Any, begin: int, end: int) -> None:
    """x, count, cap (float32 [1]): ``x <- cap * tanh(x / cap)`` for numbers ``8 begin .. 8 end - 1``."""
    x = array(a[0], np.float32, (a[1],))
    _cap(x, 8 * begin, 8 * end, array(a[2], np.float32, (1,))[0])


def rotate_step(a: Any, begin: int, end: int) -> None:
    """x [heads, dim], cos [half], sin [half], heads, dim, half: the pairs (d, d + half) of every head, in place."""
    heads, dim, half = a[3], a[4], a[5]
    x = array(a[0], np.float32, (heads, dim))
    cos, sin = array(a[1], np.float32, (half,)), array(a[2], np.float32, (half,))
    for h in range(heads):
        for d in range(half):
            u, v = x[h, d], x[h, d + half]
            x[h, d] = u * cos[d] - v * sin[d]
            x[h, d + half] = v * cos[d] + u * sin[d]


def fold_step(a: Any, begin: int, end: int) -> None:
    """x, signs (float32), width, block (a power of two from 8 on), out: ``H (signs * x)`` of blocks begin .. end - 1.

    H is the normalized Walsh-Hadamard matrix; see ``kernels.cpu.hadamard``.
    """
    width, block = a[2], a[3]
    x, signs = array(a[0], np.float32, (width,)), array(a[1], np.float32, (width,))
    out = array(a[4], np.float32, (width,))
    scale = np.float32(1.0 / np.sqrt(np.float64(block)))
    for i in range(begin * block, end * block, 8):
        x0, x1 = x[i] * signs[i], x[i + 1] * signs[i + 1]
        x2, x3 = x[i + 2] * signs[i + 2], x[i + 3] * signs[i + 3]
        x4, x5 = x[i + 4] * signs[i + 4], x[i + 5] * signs[i + 5]
        x6, x7 = x[i + 6] * signs[i + 6], x[i + 7] * signs[i + 7]
        x0, x1, x2, x3, x4, x5, x6, x7 = (
            x0 + x1,
            x0 - x1,
            x2 + x3,
            x2 - x3,
            x4 + x5,
            x4 - x5,
            x6 + x7,
            x6 - x7,
        )
        x0, x2, x1, x3, x4, x6, x5, x7 = (
            x0 + x2,
            x0 - x2,
            x1 + x3,
            x1 - x3,
            x4 + x6,
            x4 - x6,
            x5 + x7,
            x5 - x7,
        )
        x0, x4, x1, x5, x2, x6, x3, x7 = (
            x0 + x4,
            x0 - x4,
            x1 + x5,
            x1 - x5,
            x2 + x6,
            x2 - x6,
            x3 + x7,
            x3 - x7,
        )
        out[i], out[i + 1], out[i + 2], out[i + 3] = x0 * scale, x1 * scale, x2 * scale, x3 * scale
        out[i + 4], out[i + 5], out[i + 6], out[i + 7] = x4 * scale, x5 * scale, x6 * scale, x7 * scale
    half = 8
    while half < block:
        for i in range(begin * block, end * block, 2 * half):
            for j in range(i, i + half, 8):
                u, v = simd.load_floats(out, j), simd.load_floats(out, j + half)
                simd.store_floats(out, j, simd.add_floats(u, v))
                simd.store_floats(out, j + half, simd.subtract_floats(u, v))
        half *= 2


def append_step(a: Any, begin: int, end: int) -> None:
    """x [heads, dim], store [heads, capacity, dim], heads, dim, capacity, position (int64 [1])."""
    heads, dim, capacity = a[2], a[3], a[4]
    position = array(a[5], np.int64, (1,))[0]
    x, store = array(a[0], np.float32, (heads * dim,)), array(a[1], np.float32, (heads * capacity * dim,))
    for h in range(heads):
        for d in range(0, dim, 8):
            simd.store_floats(store, (h * capacity + position) * dim + d, simd.load_floats(x, h * dim + d))


def append_halves_step(a: Any, begin: int, end: int) -> None:
    """The same with a store of float16; larger numbers are cut to its largest."""
    heads, dim, capacity = a[2], a[3], a[4]
    position = array(a[5], np.int64, (1,))[0]
    x, store = array(a[0], np.float32, (heads * dim,)), array(a[1], np.uint16, (heads * capacity * dim,))
    top, bottom = simd.splat_floats(65504.0), simd.splat_floats(-65504.0)
    for h in range(heads):
        for d in range(0, dim, 8):
            v = simd.max_floats(bottom, simd.min_floats(top, simd.load_floats(x, h * dim + d)))  # a NaN stays
            simd.store_halves(store, (h * capacity + position) * dim + d, v)


@inline
def _attend(
    q: NDArray[np.float32],
    keys: NDArray[Any],
    values: NDArray[Any],
    scores: NDArray[np.float32],
    out: NDArray[np.float32],
    begins: Any,
    dim: int,
    count: int,
    factors: NDArray[np.float32],
    sink: np.float32,
) -> None:
    """One head over ``count`` positions; see ``runtime.attention.attend``.

    All arrays are those of all heads; ``begins``: where this head's numbers begin in q and out, in keys and values (of
    the first position), and in scores.
    """
    at, first, begin = begins
    whole = (count + 7) // 8 * 8
    for p in range(count):
        a = simd.zero_floats()
        for d in range(0, dim, 8):
            a = simd.fma(simd.load_floats(q, at + d), simd.load_floats(keys, first + p * dim + d), a)
        scores[begin + p] = simd.sum_floats(a) * factors[0]
    if factors[1] > 0:
        for p in range(count, whole):
            scores[begin + p] = 0
        _cap(scores, begin, begin + whole, factors[1])
    top = sink
    for p in range(count):
        score = scores[begin + p]
        top = score if score > top else top
    for p in range(count):
        scores[begin + p] -= top
    for p in range(count, whole):
        scores[begin + p] = np.float32(-100)
    exponentials(scores, begin, begin + whole)
    for p in range(count, whole):
        scores[begin + p] = 0
    total = simd.zero_floats()
    for p in range(begin, begin + whole, 8):
        total = simd.add_floats(total, simd.load_floats(scores, p))
    weight = simd.sum_floats(total)
    if sink > -np.inf:
        weight += np.exp(sink - top)
    inverse = simd.splat_floats(np.float32(1) / weight)
    for d in range(0, dim, 8):
        a, b = simd.zero_floats(), simd.zero_floats()
        for p in range(0, count - 1, 2):
            to = first + p * dim + d
            a = simd.fma(simd.splat_floats(scores[begin + p]), simd.load_floats(values, to), a)
            b = simd.fma(simd.splat_floats(scores[begin + p + 1]), simd.load_floats(values, to + dim), b)
        if count % 2:
            to = first + (count - 1) * dim + d
            a = simd.fma(simd.splat_floats(scores[begin + count - 1]), simd.load_floats(values, to), a)
        simd.store_floats(out, at + d, simd.multiply_floats(simd.add_floats(a, b), inverse))


@inline
def _attend_heads(kind: Any, a: Any, begin: int, end: int) -> None:
    heads, kv_heads, dim, capacity, room, window = a[5], a[6], a[7], a[8], a[9], a[10]
    position = array(a[11], np.int64, (1,))[0]
    q, out = array(a[0], np.float32, (heads * dim,)), array(a[4], np.float32, (heads * dim,))
    kept = kv_heads * capacity * dim
    keys, values = array(a[1], kind, (kept,)), array(a[2], kind, (kept,))
    scores = array(a[3], np.float32, (heads * room,))
    factors, sinks = array(a[12], np.float32, (2,)), array(a[13], np.float32, (heads,))
    low = 0 if window == 0 or position < window else position + 1 - window
    for h in range(begin, end):
        first = (h * kv_heads // heads * capacity + low) * dim
        begins = (h * dim, first, h * room)
        _attend(q, keys, values, scores, out, begins, dim, position + 1 - low, factors, sinks[h])


def attend_step(a: Any, begin: int, end: int) -> None:
    """q [heads, dim], keys and values [kv_heads, capacity, dim], scores [heads, room], out [heads, dim], heads,
    kv_heads, dim, capacity, room, window (0: none), position (int64 [1]), scale and cap (float32 [2]; cap 0: none),
    sinks (float32 [heads]; -inf: none); works on heads begin .. end - 1."""
    _attend_heads(np.float32, a, begin, end)


def attend_halves_step(a: Any, begin: int, end: int) -> None:
    """The same with float16 keys and values."""
    _attend_heads(np.uint16, a, begin, end)
