"""Products of one token in a program: the forms of an input, and one row of a table for each prepared layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from trapetum.kernels.cpu import (
    activations,
    additive,
    blocks,
    codebook16,
    codebook_table,
    dense,
    layer,
    ternary,
)
from trapetum.kernels.cpu.activations import BYTE_LIMIT, GROUP, SPLIT_LIMIT, WORD_LIMIT, padded
from trapetum.kernels.cpu.prepared import (
    Additive,
    Blocks,
    Codebook16,
    Dense,
    Expanded,
    Prepared,
    Table,
    Ternary,
)
from trapetum.rotation import HadamardRotation
from trapetum.runtime.layers import Linear
from trapetum.runtime.matrix import PreparedMatrix
from trapetum.runtime.program import Call, Program

__all__ = ["add_products", "can_multiply", "product_tile"]

Floats = NDArray[np.float32]

_SERIAL_WEIGHTS = 1 << 18  # a product of so many takes some 25 us: not worth waiting for another thread
# A tile ends four streams of memory, and its successor starts four: tiles of 1 M weights are up to a quarter faster
# than tiles of 256 K (two threads, 2-bit and 4-bit codes), as long as every thread has a few.
_MOST_WEIGHTS, _LEAST_WEIGHTS = 1 << 20, 1 << 16
_TILES_A_THREAD = 8
_LUT_TILE = 32  # groups of eight inputs


def can_multiply(linear: Linear) -> bool:
    """Whether there is a product for this matrix."""
    matrix, rotation = linear.matrix, linear.rotation
    return (
        isinstance(matrix, PreparedMatrix)
        and matrix.fused
        and type(matrix.prepared) in _PRODUCTS
        and matrix.in_features % 8 == 0
        and (rotation is None or rotation.block_size >= 8)
    )


def product_tile(rows: int, in_features: int, threads: int, least: int = 1) -> int:
    """Rows that one call takes: all of them where another thread would not pay."""
    if rows * in_features <= _SERIAL_WEIGHTS:
        return rows
    fair = min(_MOST_WEIGHTS // in_features, rows // (_TILES_A_THREAD * threads))
    return max(least, fair, _LEAST_WEIGHTS // in_features)


def add_products(program: Program, x: Floats, products: Sequence[tuple[Linear, Floats]]) -> None:
    """Products of one input: its forms first, then all matrices side by side, then biases.

    Parameters
    ----------
    program : Program
    x : ndarray of float32, shape (in_features,)
    products : sequence of (Linear, float32 [rows])
        The outputs are written.
    """
    forms: dict[bool, _Forms] = {}
    calls: list[Call] = []
    for linear, y in products:
        turned = linear.rotation is not None
        if turned not in forms:
            given = x if linear.rotation is None else _fold(program, x, linear.rotation)
            forms[turned] = _Forms(program, given, turned)
        prepared = cast(PreparedMatrix, linear.matrix).prepared
        function, arguments = _PRODUCTS[type(prepared)](prepared, forms[turned], y)
        rows, count, threads = prepared.rows, prepared.in_features, program.pool.threads
        calls.append((function, arguments, rows, product_tile(rows, count, threads, prepared.piece_rows)))
    program.add_side_by_side(calls)
    for linear, y in products:
        if linear.bias is not None:
            program.add(layer.add_step, [y, np.ascontiguousarray(linear.bias), y.size])


def _fold(program: Program, x: Floats, rotation: HadamardRotation) -> Floats:
    out = program.buffer("folded", x.size)
    signs = rotation.signs[x.size].astype(np.float32)
    blocks_ = x.size // rotation.block_size
    program.add(
        layer.fold_step, [x, signs, x.size, rotation.block_size, out], blocks_, max(4, -(-blocks_ // 8))
    )
    return out


class _Forms:
    """The forms of one input that its matrices ask for, each made once by operations before the products."""

    def __init__(self, program: Program, x: Floats, turned: bool) -> None:
        self.x = x
        self._program, self._turned = program, turned
        self._made: dict[Any, tuple[NDArray[Any], ...]] = {}
        self._luts = 0

    def words(self) -> tuple[NDArray[Any], ...]:
        """(q int16, scales)."""
        return self._quantized("words", np.int16, WORD_LIMIT, activations.quantize_words_step)

    def bytes(self, size: int, *, precise: bool) -> tuple[NDArray[Any], ...]:
        """(q int8, scales, quads) for weights with a scale for ``size`` inputs; ``precise``: two planes of each."""
        block = min(size, GROUP)
        if (block, precise) not in self._made:
            q, scales = self._planes() if precise else self._bytes()
            rows = 2 if precise else 1
            width, add = q.size // rows, self._program.add
            arranged = q
            if block < GROUP:
                arranged = self._buffer(("arranged", block, precise), q.size, np.int8)
                add(activations.arrange_step, [q, rows, width, block, arranged])
            quads = self._buffer(("quads", block, precise), q.size // GROUP * 8, np.int32)
            add(activations.quad_sums_step, [arranged, rows, width, quads])
            self._made[block, precise] = (arranged, scales, quads)
        return self._made[block, precise]

    def sums(self, size: int) -> NDArray[Any]:
        """Sums of every ``size`` rounded activations."""
        q, scales = self.words()
        if ("sums", size) not in self._made:
            out = self._buffer(("sums", size), -(-q.size // size // 8) * 8)
            self._program.add(activations.block_sums_step, [q, q.size, scales, size, out, out.size])
            self._made["sums", size] = (out,)
        return self._made["sums", size][0]

    def lut(self, turned: Floats, groups: int) -> NDArray[Any]:
        """Products with all codebook vectors of one matrix, float32 [groups, entries]."""
        key = ("lut", id(turned))
        if key not in self._made:
            entries = turned.shape[1]
            out = self._buffer(("lut", self._luts), groups * entries)  # matrices side by side: one for each
            self._luts += 1
            arguments = [turned, entries, self.x, self.x.size, out, groups]
            self._program.add(additive.build_lut_step, arguments, groups, _LUT_TILE)
            self._made[key] = (out,)
        return self._made[key][0]

    def padded(self, size: int) -> NDArray[Any]:
        """The input itself, with zeros up to ``size``."""
        if size == self.x.size:
            return self.x
        if ("padded", size) not in self._made:
            out = self._buffer(("padded", self.x.size), size)
            self._program.add(layer.copy_step, [self.x, out, self.x.size])
            self._made["padded", size] = (out,)
        return self._made["padded", size][0]

    def _bytes(self) -> tuple[NDArray[Any], ...]:
        return self._quantized("bytes", np.int8, BYTE_LIMIT, activations.quantize_bytes_step)

    def _planes(self) -> tuple[NDArray[Any], ...]:
        if "planes" not in self._made:
            q, scales = self._quantized("split", np.int16, SPLIT_LIMIT, activations.quantize_words_step)
            planes, both = self._buffer("planes", 2 * q.size, np.int8), self._buffer("both", 2 * scales.size)
            self._program.add(activations.split_step, [q, scales, q.size, planes, both])
            self._made["planes"] = (planes, both)
        return self._made["planes"]

    def _quantized(
        self, name: str, dtype: Any, limit: int, function: Callable[..., None]
    ) -> tuple[NDArray[Any], ...]:
        if name not in self._made:
            count = padded(self.x.size)
            q, scales = self._buffer(name, count, dtype), self._buffer((name, "scales"), count // GROUP)
            self._program.add(function, [self.x, self.x.size, limit, q, scales])
            self._made[name] = (q, scales)
        return self._made[name]

    def _buffer(self, name: Any, size: int, dtype: Any = np.float32) -> NDArray[Any]:
        return self._program.buffer((name, self._turned), size, dtype)


# ---------------------------------------------------------------------------- one a layout
_Product = tuple[Callable[..., None], list[Any]]


def _codebook16(m: Codebook16, x: _Forms, y: Floats) -> _Product:
    arrays = [m.codes, m.planes, m.scales, m.rows, padded(m.in_features)]
    return codebook16.multiply_step, [*arrays, *x.words(), y]


def _table(m: Table, x: _Forms, y: Floats) -> _Product:
    arrays = [m.codes, m.tables, m.rows, m.in_features, m.tables.shape[1]]
    return codebook_table.multiply_step, [*arrays, x.x, y]


def _expanded(m: Expanded, x: _Forms, y: Floats) -> _Product:
    arrays = [m.words, m.scales, m.rows, padded(m.in_features)]
    return codebook_table.multiply_expanded_step, [*arrays, *x.words(), y]


def _ternary(m: Ternary, x: _Forms, y: Floats) -> _Product:
    arrays = [m.codes, m.scales, m.rows, padded(m.in_features), m.scales.shape[1], m.size]
    both = [np.zeros((2, m.rows), np.float32)] if m.precise else []
    function = ternary.multiply_step(m.scales.dtype, m.size, precise=m.precise)
    return function, [*arrays, *x.bytes(m.size, precise=m.precise), y, *both]


def _blocks(m: Blocks, x: _Forms, y: Floats) -> _Product:
    q, scales = x.words()
    sums = x.sums(blocks.block_size(m.kind)) if m.dmin.shape[1] else np.zeros(8, np.float32)
    columns = [a.shape[1] for a in (m.d, m.steps, m.dmin, m.mins)]
    arrays = [m.table, m.codes, m.d, m.steps, m.dmin, m.mins, m.rows, padded(m.in_features), *columns]
    return blocks.STEP[m.kind], [*arrays, q, scales, sums, sums.size, y]


def _dense(m: Dense, x: _Forms, y: Floats) -> _Product:
    return getattr(dense, f"multiply_{m.dtype.name}_step"), [m.values, m.rows, m.in_features, x.x, y]


def _additive(m: Additive, x: _Forms, y: Floats) -> _Product:
    tiles, rows, width = m.codes.shape
    arrays = [m.codes, tiles, rows, width, m.scales]
    groups = tiles * additive.TILE
    if rows < m.DIRECT_ROWS:
        return additive.multiply_direct_step, [*arrays, m.books, x.padded(groups * 8), y]
    return additive.multiply_lut_step, [*arrays, x.lut(m.turned, groups), y]


_PRODUCTS: dict[type[Prepared], Callable[[Any, _Forms, Floats], _Product]] = {
    Additive: _additive,
    Codebook16: _codebook16,
    Table: _table,
    Expanded: _expanded,
    Ternary: _ternary,
    Blocks: _blocks,
    Dense: _dense,
}
