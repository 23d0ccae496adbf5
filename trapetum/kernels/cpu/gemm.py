"""Products of many tokens with decoded rows, in float32: what BLAS would do, without packing the activations each time.

BLAS copies both factors into its own order for every product. Here a tile of weights is decoded just before it is
used, so a product is small, and that copy cost 8 to 20 % of it. Activations are brought into panels once for all
matrices that read them; weights stay as they decode, row by row, in the second-level cache:

====== ============================= ======================================================================
array  shape                         content
====== ============================= ======================================================================
panels f32 [blocks, K, TOKENS]       x transposed, ``TOKENS`` tokens side by side; zeros where there are none
rows   f32 [any, K]                  decoded weights
====== ============================= ======================================================================

The sum over K runs in runs of ``RUN`` inputs, each from zero: as exact as pairwise sums (3e-7 at 4096 inputs, where
one long chain would have 1.5e-6), in an order that nothing but K decides.

Panels are larger than the second-level cache, and each is used for one tile of rows, then not for long: the next one is
asked for while this one is multiplied. Without that, 11008 inputs ran at 104 GFLOPS instead of 147, 4096 at 122
instead of 135 (one core with AVX-512, tiles of 48 rows, 128 tokens; ``sgemm`` 100).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numpy.typing import NDArray

from trapetum.kernels.cpu.emit import I8, I32, Emit, operation
from trapetum.kernels.cpu.simd import least
from trapetum.kernels.jit import jit

__all__ = ["ROWS", "TOKENS", "multiply_panels", "pack_panels"]

SIMD = "ce3020bb72a775c0"  # simd.fingerprint(): a new one makes numba compile this file again

ROWS, TOKENS = 12, 32  # of C that one call of :func:`_outer` adds to
RUN = 128  # inputs: a panel of them is 16 KiB and half of the first-level cache; 64 to 512 differ by 3 %
_LANES = 16
_LINE = 16  # numbers of a cache line


@operation(
    types.void,
    None,
    types.intp,
    types.intp,
    types.intp,
    None,
    types.intp,
    types.intp,
    types.intp,
    None,
    types.intp,
)
def _outer(
    e: Emit,
    w: Any,
    at: Any,
    stride: Any,
    last: Any,
    x: Any,
    x_at: Any,
    ahead: Any,
    count: Any,
    c: Any,
    c_at: Any,
) -> Any:
    """``c[r, t] += sum over k < count of w[r, k] * x[k, t]`` for ROWS rows and TOKENS tokens, c [ROWS, TOKENS].

    Row r begins at ``at + min(r, last) * stride``. As many sums as fit the registers are made in one loop over k:
    all of them with 32 of 512 bits (24 sums), a quarter with 16 of 256 (12 sums). ``count`` cache lines from number
    ``ahead`` of x on are asked for, into the second-level cache.
    """
    b, integer = e.builder, ir.IntType(64)
    alloca: Any = cgutils.alloca_once_value
    kind = ir.VectorType(ir.FloatType(), _LANES)
    rows, vectors = (ROWS, TOKENS // _LANES) if "avx512f" in e.has else (6, 1)
    panel, far, sums = e.address(x, x_at, 4), e.address(x, ahead, 4), e.address(c, c_at, 8)
    lines = []
    for r in range(ROWS):
        number = b.select(b.icmp_signed("<", last, integer(r)), last, integer(r))
        lines.append(e.address(w, b.add(at, b.mul(number, stride))))
    for r0 in range(0, ROWS, rows):
        for v0 in range(0, TOKENS // _LANES, vectors):
            made = {}
            for r in range(r0, r0 + rows):
                for v in range(v0, v0 + vectors):
                    made[r, v] = alloca(b, ir.Constant(kind, [0.0] * _LANES))
            with cgutils.for_range(b, count) as loop:
                k = loop.index
                if r0 == v0 == 0:
                    line = b.bitcast(b.gep(far, [b.mul(k, integer(_LINE))]), I8.as_pointer())
                    e.call("llvm.prefetch.p0", ir.VoidType(), line, I32(0), I32(2), I32(1))
                start = b.gep(panel, [b.mul(k, integer(TOKENS))])
                tokens = [e.load(b.gep(start, [integer(v * _LANES)]), kind) for v in range(v0, v0 + vectors)]
                for r in range(r0, r0 + rows):
                    weight = e.splat(b.load(b.gep(lines[r], [k])), _LANES)
                    for v, token in enumerate(tokens, v0):
                        b.store(e.fused(weight, token, b.load(made[r, v])), made[r, v])
            for (r, v), total in made.items():
                target = b.gep(sums, [integer(r * TOKENS + v * _LANES)])
                added = b.fadd(e.load(target, kind), b.load(total))
                b.store(added, b.bitcast(target, kind.as_pointer())).align = 1
    return e.context.get_dummy_value()


@jit()
def pack_panels(x: NDArray[np.float32], panels: NDArray[np.float32], begin: int, end: int) -> None:
    """Panels ``begin .. end - 1`` of activations.

    Parameters
    ----------
    x : ndarray of float32, shape (tokens, K)
    panels : ndarray of float32, shape (ceil(tokens / TOKENS), K, TOKENS)
        Written in these blocks only.
    begin, end : int
    """
    tokens, count = x.shape
    for t in range(begin, end):
        for k in range(0, count, 16):  # 2 KiB of a panel, and one line of each token
            stop = least(k + 16, count)
            for m in range(TOKENS):
                token = t * TOKENS + m
                if token < tokens:
                    for i in range(k, stop):
                        panels[t, i, m] = x[token, i]
                else:
                    for i in range(k, stop):
                        panels[t, i, m] = 0


def multiply_panels(
    rows: NDArray[np.float32],
    panels: NDArray[np.float32],
    out: NDArray[np.float32],
    first: int,
    begin: int,
    end: int,
) -> None:
    """``out[m, first + r] = rows[r] . x[m]`` for the tokens of panels ``begin .. end - 1``.

    Parameters
    ----------
    rows : ndarray of float32, shape (some rows, K)
        Decoded weights.
    panels : ndarray of float32, shape (blocks, K, TOKENS)
    out : ndarray of float32, shape (tokens, all rows)
        Written for these rows and tokens only.
    first : int
        Row of the matrix that ``rows[0]`` is.
    begin, end : int
    """
    groups = -(-rows.shape[0] // ROWS)
    sums = np.empty(groups * (end - begin) * ROWS * TOKENS, np.float32)
    _multiply(rows, panels, sums, out, first, begin, end)


@jit()
def _multiply(
    rows: NDArray[np.float32],
    panels: NDArray[np.float32],
    sums: NDArray[np.float32],
    out: NDArray[np.float32],
    first: int,
    begin: int,
    end: int,
) -> None:
    height, count = rows.shape
    tokens = out.shape[0]
    blocks, groups = end - begin, (height + ROWS - 1) // ROWS
    for i in range(sums.shape[0]):
        sums[i] = 0
    for k in range(0, count, RUN):
        for t in range(blocks):
            # the panel after this one: of the next tokens, or of the next inputs of the first ones
            ahead = (begin + t + 1) * count + k if t + 1 < blocks else begin * count + k + RUN
            for g in range(groups):
                r = g * ROWS
                to = (g * blocks + t) * ROWS * TOKENS
                _outer(
                    rows, r * count + k, count, height - 1 - r,
                    panels, ((begin + t) * count + k) * TOKENS, ahead * TOKENS + g % 2 * RUN * _LINE,
                    least(RUN, count - k), sums, to,
                )  # fmt: skip
    for g in range(groups):
        some = least(ROWS, height - g * ROWS)
        for t in range(blocks):
            at = (g * blocks + t) * ROWS * TOKENS
            for m in range(least(TOKENS, tokens - (begin + t) * TOKENS)):
                for r in range(some):
                    out[(begin + t) * TOKENS + m, first + g * ROWS + r] = sums[at + r * TOKENS + m]
