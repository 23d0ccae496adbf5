"""Quantized matrices in the layouts that the kernels read, made once at load.

A :class:`Prepared` owns everything that a product needs, so the stored tensor can be let go. Several threads use it at
once: :meth:`Prepared.activations` runs once for a call, :meth:`Prepared.multiply` for every block of rows. What makes
one from a stored tensor is ``kernels.cpu.prepare``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trapetum.kernels.cpu import (
    additive,
    blocks,
    codebook,
    codebook16,
    codebook_table,
    dense,
    gemm,
    pages,
    ternary,
)
from trapetum.kernels.cpu.activations import GROUP, byte_form, padded, split_form, sums_form, word_form
from trapetum.kernels.cpu.pool import Pool

__all__ = [
    "Activations",
    "Additive",
    "Blocks",
    "Codebook16",
    "Dense",
    "Expanded",
    "Prepared",
    "Table",
    "Ternary",
]

Floats = NDArray[np.float32]
Form = tuple[Any, ...]


class Activations:
    """The input of a product in every form that kernels take; each is made once, on first use.

    One object serves all matrices that multiply the same input (q, k and v; gate and up).

    Parameters
    ----------
    x : ndarray of float32, shape (tokens, in_features)
    """

    def __init__(self, x: Floats) -> None:
        self.x = np.ascontiguousarray(x, np.float32)
        self._made: dict[Any, Form] = {}

    @cached_property
    def words(self) -> Form:
        """(q int16 [tokens, padded], scales float32 [tokens, groups])."""
        made: Form = word_form(self.x)
        return made

    def bytes(self, size: int, *, precise: bool) -> Form:
        """(q int8, scales, quads) for :func:`ternary.multiply_rows`; ``precise``: two tokens for each."""
        key = (min(size, GROUP), precise)
        if key not in self._made:
            self._made[key] = (split_form if precise else byte_form)(self.x, key[0])
        return self._made[key]

    def sums(self, size: int) -> Floats:
        """Sums of the rounded activations of every ``size`` inputs, float32; columns a multiple of 8."""
        if size not in self._made:
            q, scales = self.words
            self._made[size] = (sums_form(q, scales, size),)
        made: Floats = self._made[size][0]
        return made

    def panels(self, pool: Pool) -> Floats:
        """The input of ``gemm.multiply_panels``, float32 [blocks of tokens, in_features, tokens of a block]."""
        if "panels" not in self._made:
            tokens, count = self.x.shape
            out = np.empty((-(-tokens // gemm.TOKENS), count, gemm.TOKENS), np.float32)
            pool.blocks(lambda part: gemm.pack_panels(self.x, out, part.start, part.stop), len(out), 1)
            self._made["panels"] = (out,)
        made: Floats = self._made["panels"][0]
        return made


class Prepared(ABC):
    """A matrix of ``rows`` x ``in_features`` weights.

    Attributes
    ----------
    rows, in_features : int
    piece_rows : int
        A call of :meth:`multiply` should take at least so many rows.
    """

    rows: int
    in_features: int
    piece_rows = 8

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays held."""
        return sum(v.nbytes for v in vars(self).values() if isinstance(v, np.ndarray))

    @abstractmethod
    def activations(self, x: Activations) -> Form:
        """The form of the input that :meth:`multiply` takes."""

    @abstractmethod
    def multiply(self, form: Form, out: Floats, begin: int, end: int) -> None:
        """``out[:, begin:end] = x @ W[begin:end].T``; ``out`` float32 [tokens, rows]."""

    @abstractmethod
    def decode(self, out: Floats, begin: int) -> None:
        """Rows ``begin .. begin + len(out) - 1`` as float32, exactly as the stored tensor decodes."""


class Codebook16(Prepared):
    """See ``kernels.cpu.codebook16``; error 1e-4.

    Parameters
    ----------
    codes : ndarray of uint8, shape (rows, in_features)
        Each below K.
    tables : ndarray of float16 or float32, shape (rows, K), K at most 16
    """

    def __init__(self, codes: NDArray[np.uint8], tables: NDArray[Any]) -> None:
        self.rows, self.in_features = codes.shape
        self.codes = pages.empty((self.rows, padded(self.in_features) // 2), np.uint8)
        codebook16.pack_codes(codes, self.codes)
        self.planes, self.scales = codebook16.quantize_tables(tables)
        self.wide = tables.dtype == np.float32
        self.tables: NDArray[Any] = np.array(tables) if self.wide else codebook16.half_tables(tables)

    def activations(self, x: Activations) -> Form:
        """int16."""
        return x.words

    def multiply(self, form: Form, out: Floats, begin: int, end: int) -> None:
        """See :class:`Prepared`."""
        q, x_scales = form
        codebook16.multiply_rows(self.codes, self.planes, self.scales, q, x_scales, out, begin, end)

    def decode(self, out: Floats, begin: int) -> None:
        """See :class:`Prepared`."""
        if self.wide:
            codebook16.decode_wide(self.codes, self.tables, out, begin)
        else:
            codebook16.decode_rows(self.codes, self.tables, out, begin)


class Table(Prepared):
    """See ``kernels.cpu.codebook_table``; error 1e-6.

    Parameters
    ----------
    codes : ndarray of uint8, shape (rows, in_features)
    tables : ndarray of float16 or float32, shape (rows, K)
    """

    def __init__(self, codes: NDArray[np.uint8], tables: NDArray[Any]) -> None:
        self.rows, self.in_features = codes.shape
        self.codes = np.require(codes, requirements=["C", "W"])
        self.tables = np.array(tables, np.float32)

    def activations(self, x: Activations) -> Form:
        """float32."""
        return (x.x,)

    def multiply(self, form: Form, out: Floats, begin: int, end: int) -> None:
        """See :class:`Prepared`."""
        codebook_table.multiply_rows(self.codes, self.tables, form[0], out, begin, end)

    def decode(self, out: Floats, begin: int) -> None:
        """See :class:`Prepared`."""
        end = begin + out.shape[0]
        codebook.decode_rows(self.codes[begin:end], self.tables[begin:end], out)


class Expanded(Table):
    """Also the weights as int16, three bytes a weight in all; error 1e-4."""

    def __init__(self, codes: NDArray[np.uint8], tables: NDArray[Any]) -> None:
        super().__init__(codes, tables)
        self.words = pages.empty((self.rows, padded(self.in_features)), np.int16)
        self.scales = np.empty(self.rows, np.float32)
        codebook_table.expand_rows(self.codes, self.tables, codebook16.TABLE_LIMIT, self.words, self.scales)

    def activations(self, x: Activations) -> Form:
        """int16."""
        return x.words

    def multiply(self, form: Form, out: Floats, begin: int, end: int) -> None:
        """See :class:`Prepared`."""
        q, x_scales = form
        codebook_table.multiply_expanded(self.words, self.scales, q, x_scales, out, begin, end)


class Ternary(Prepared):
    """See ``kernels.cpu.ternary``; error 6e-3 with int8 activations, 5e-5 with precise ones.

    Parameters
    ----------
    codes : ndarray of uint8, shape (rows, in_features)
        Each below 4.
    scales : ndarray of float16 or float32, shape (rows, groups)
        A group of 32, 64 or a multiple of 128 inputs.
    precise : bool
        15-bit activations, at 1.8 times the cost.
    """

    def __init__(self, codes: NDArray[np.uint8], scales: NDArray[Any], *, precise: bool) -> None:
        self.rows, self.in_features = codes.shape
        self.size = self.in_features // scales.shape[1]
        self.precise = precise
        self.codes = pages.empty((self.rows, padded(self.in_features) // 4), np.uint8)
        ternary.pack_codes(codes, self.size, self.codes)
        held = scales.view(np.uint16) if scales.dtype == np.float16 else scales
        extra = padded(self.in_features) // min(self.size, GROUP) if self.size < GROUP else scales.shape[1]
        self.scales = pages.empty((self.rows, extra), held.dtype)
        self.scales[:, : scales.shape[1]] = held
        self.scales[:, scales.shape[1] :] = 0

    def activations(self, x: Activations) -> Form:
        """int8, or twice as many tokens of int8."""
        return x.bytes(self.size, precise=self.precise)

    def multiply(self, form: Form, out: Floats, begin: int, end: int) -> None:
        """See :class:`Prepared`."""
        q, x_scales, quads = form
        if not self.precise:
            ternary.multiply_rows(self.codes, self.scales, self.size, q, x_scales, quads, out, begin, end)
            return
        both = np.empty((2 * out.shape[0], end - begin), np.float32)
        part = slice(begin, end)
        ternary.multiply_rows(
            self.codes[part], self.scales[part], self.size, q, x_scales, quads, both, 0, end - begin
        )
        np.add(both[: out.shape[0]], both[out.shape[0] :], out=out[:, part])

    def decode(self, out: Floats, begin: int) -> None:
        """See :class:`Prepared`."""
        ternary.decode_rows(self.codes, self.scales, self.size, out, begin)


class Blocks(Prepared):
    """See ``kernels.cpu.blocks``; error 5e-5.

    Parameters
    ----------
    kind : int
    in_features : int
    table : ndarray of uint8, shape (32,)
    codes, d, steps, dmin, mins
        The arrays of that module.
    """

    def __init__(
        self,
        kind: int,
        in_features: int,
        table: NDArray[np.uint8],
        codes: NDArray[np.uint8],
        d: NDArray[np.uint16],
        steps: NDArray[np.int8],
        dmin: NDArray[np.uint16],
        mins: NDArray[np.int8],
    ) -> None:
        self.rows, self.in_features = codes.shape[0], in_features
        self.kind, self.table, self.codes = kind, table, codes
        self.d, self.steps, self.dmin, self.mins = d, steps, dmin, mins

    def activations(self, x: Activations) -> Form:
        """int16, and their sums where weights have an offset."""
        q, scales = x.words
        sums = x.sums(blocks.block_size(self.kind)) if self.dmin.shape[1] else np.empty((0, 0), np.float32)
        return q, scales, sums

    def multiply(self, form: Form, out: Floats, begin: int, end: int) -> None:
        """See :class:`Prepared`."""
        q, x_scales, sums = form
        blocks.MULTIPLY[self.kind](
            self.table, self.codes, self.d, self.steps, self.dmin, self.mins,
            q, x_scales, sums, out, begin, end,
        )  # fmt: skip

    def decode(self, out: Floats, begin: int) -> None:
        """See :class:`Prepared`."""
        blocks.DECODE[self.kind](self.table, self.codes, self.d, self.steps, self.dmin, self.mins, out, begin)


class Dense(Prepared):
    """See ``kernels.cpu.dense``; error 1e-6.

    Parameters
    ----------
    values : ndarray of float32, float16 or bfloat16, shape (rows, in_features)
        ``in_features`` a multiple of 8.
    """

    def __init__(self, values: NDArray[Any]) -> None:
        self.rows, self.in_features = values.shape
        self.dtype = values.dtype
        held = {"float16": np.uint16, "bfloat16": np.int16}.get(values.dtype.name, np.float32)
        self.values: NDArray[Any] = np.require(values.view(held), requirements=["C", "W"])

    def activations(self, x: Activations) -> Form:
        """float32."""
        return (x.x,)

    def multiply(self, form: Form, out: Floats, begin: int, end: int) -> None:
        """See :class:`Prepared`."""
        dense.multiply_rows(self.values, form[0], out, begin, end)

    def decode(self, out: Floats, begin: int) -> None:
        """See :class:`Prepared`."""
        out[...] = self.values[begin : begin + out.shape[0]].view(self.dtype)


class Additive(Prepared):
    """See ``kernels.cpu.additive``; error 1e-6.

    Parameters
    ----------
    codes : ndarray of uint8, shape (M, groups, rows)
    books : ndarray of float16 or float32, shape (M, 256, 8)
    scales : ndarray of float16 or float32, shape (rows,)
    """

    # Below so many outputs a token's LUT costs more than it saves.
    DIRECT_ROWS = 700
    # Every call reads the whole LUT anew, 32 KiB a tile: 64 rows at a time, that took a third of the product.
    piece_rows = 384

    def __init__(self, codes: NDArray[np.uint8], books: NDArray[Any], scales: NDArray[Any]) -> None:
        _, groups, self.rows = codes.shape
        self.in_features = groups * 8
        self.codes = additive.pack_codes(codes)
        self.books = np.ascontiguousarray(books.reshape(-1, 8), np.float32)
        self.turned = np.ascontiguousarray(self.books.T)
        self.scales = np.array(scales, np.float32)

    def activations(self, x: Activations) -> Form:
        """LUTs of all tokens: eight at a time, then one by one; or padded float32 where there are few rows."""
        tokens = x.x.shape[0]
        groups = self.codes.shape[0] * additive.TILE
        if self.rows < self.DIRECT_ROWS:
            wide = np.zeros((tokens, groups * 8), np.float32)
            wide[:, : self.in_features] = x.x
            return (wide,)
        entries = self.books.shape[0]
        luts: list[Floats] = []
        for m in range(0, tokens if tokens > 2 else 0, 8):
            some = np.zeros((self.in_features, 8), np.float32)
            part = x.x[m : m + 8]
            some[:, : part.shape[0]] = part.T
            luts.append(np.empty((groups, entries, 8), np.float32))
            additive.build_lut8(self.books, some, luts[-1], 0, groups)
        for m in range(tokens if tokens <= 2 else 0):
            luts.append(np.empty((groups, entries), np.float32))
            additive.build_lut(self.turned, x.x[m], luts[-1], 0, groups)
        return tuple(luts)

    def multiply(self, form: Form, out: Floats, begin: int, end: int) -> None:
        """See :class:`Prepared`."""
        if self.rows < self.DIRECT_ROWS:
            additive.multiply_direct(self.codes, self.books, self.scales, form[0], out, begin, end)
            return
        at = 0
        for lut in form:
            if lut.ndim == 2:
                additive.multiply_lut(self.codes, self.scales, lut, out[at], begin, end)
                at += 1
            else:
                some = np.empty((self.rows, 8), np.float32)
                additive.multiply_lut8(self.codes, self.scales, lut, some, begin, end)
                count = min(8, out.shape[0] - at)
                out[at : at + count, begin:end] = some[begin:end, :count].T
                at += count

    def decode(self, out: Floats, begin: int) -> None:
        """See :class:`Prepared`."""
        additive.decode_rows(self.codes, self.books, self.scales, out, begin)
