"""A weight matrix that the forward pass can multiply with, whatever its stored layout.

Two ways to multiply a quantized matrix, neither of which ever holds it in float32 as a whole:

* **tiles**: rows are decoded exactly, a few at a time, into a buffer that stays in the cache, and multiplied in
  float32: by BLAS for a few tokens, by ``kernels.cpu.gemm`` for more.
* **fused**: up to ``FUSED_TOKENS`` tokens are multiplied by a kernel that decodes in registers, with activations
  rounded to integers (``kernels.cpu.prepared``): three to six times as fast as float32 BLAS.

``PRECISIONS`` says which one is used:

=========== ======================================================================== ==============================
precision   few tokens                                                               relative error of a product
=========== ======================================================================== ==============================
``exact``   tiles                                                                    1e-6: float32 rounding
``precise`` fused, 15-bit activations                                                1e-4
``fast``    fused, 15-bit activations; 8-bit where weights have two bits             1e-4; 6e-3 at two bits
=========== ======================================================================== ==============================
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from trapetum.errors import RecipeError
from trapetum.kernels.cpu.pool import Pool
from trapetum.kernels.cpu.prepared import Activations, Prepared
from trapetum.tensors import DenseTensor, Float8Tensor, QuantizedTensor

__all__ = ["FUSED_TOKENS", "PRECISIONS", "DenseMatrix", "Matrix", "PreparedMatrix", "build_matrix"]

Floats = NDArray[np.float32]

PRECISIONS = ("exact", "precise", "fast")

FUSED_TOKENS = 16  # beyond them, decoding a tile costs less than float32 products gain
# Products of a weight and an activation: 60 us or more, of which the call from Python is 4.
_FUSED_PIECE = 1 << 21

# Up to here a product is bound by reading weights: taken from the second-level cache it is twice as fast
# (4096 x 4096, 4 tokens: 8 ms in tiles against 16 ms in one product).
_FEW_TOKENS = 8
_FEW_TILE_WEIGHTS = 1 << 16  # 256 KiB of float32: such a tile
_FEW_PIECE_WEIGHTS = 1 << 20  # worth waking a thread (40 us): 0.3 to 0.6 ms
# Beyond, a piece of work is some rows of the matrix times some tokens, cut into tiles that stay in that cache.
_MANY_ROWS = 480
_MANY_PANELS = 16  # 512 tokens
_TILE_WEIGHTS = 1 << 18  # 1 MiB of float32 where rows are short enough
_LEAST_TILE_ROWS, _MOST_TILE_ROWS = 48, 96  # all activations are read once a tile


class Matrix:
    """``y = x W^T`` and row look-up for one stored tensor.

    Parameters
    ----------
    tensor : QuantizedTensor
    pool : Pool
    """

    def __init__(self, tensor: QuantizedTensor, pool: Pool) -> None:
        self.tensor = tensor
        self.pool = pool
        self.rows, self.in_features = tensor.rows, tensor.in_features

    def tile(self, rows: slice, buffer: Floats | None = None) -> Floats:
        """Decoded rows.

        Parameters
        ----------
        rows : slice
        buffer : ndarray of float32, shape (at least as many rows, in_features), optional
            Where to decode to, if anything has to be decoded.

        Returns
        -------
        ndarray of float32, shape (rows, in_features)
        """
        return self.tensor.dequantize(rows)

    def tile_rows(self, tokens: int) -> int:
        """Rows that one product of few tokens takes."""
        return max(1, _FEW_TILE_WEIGHTS // self.in_features)

    def __call__(self, given: Floats | Activations) -> Floats:
        """Multiply.

        Parameters
        ----------
        given : ndarray of float32, shape (tokens, in_features), or Activations
            The latter where several matrices multiply the same input.

        Returns
        -------
        ndarray of float32, shape (tokens, rows)
        """
        x = given if isinstance(given, Activations) else Activations(given)
        out = np.empty((x.x.shape[0], self.rows), np.float32)
        if x.x.shape[0] <= _FEW_TOKENS:
            height = -(-_FEW_PIECE_WEIGHTS // self.in_features)
            self.pool.blocks(lambda rows: self._few(x.x, rows, out), self.rows, height)
        else:
            self._many(x.panels(self.pool), out)
        return out

    def _few(self, x: Floats, rows: slice, out: Floats) -> None:
        """Write ``x @ W[rows].T`` into columns ``rows`` of ``out`` [tokens, all rows], tile by tile."""
        step = self.tile_rows(x.shape[0])
        buffer = np.empty((min(step, rows.stop - rows.start), self.in_features), np.float32)
        for start in range(rows.start, rows.stop, step):
            part = slice(start, min(start + step, rows.stop))
            np.matmul(x, self.tile(part, buffer).T, out=out[:, part])

    def _many(self, panels: Floats, out: Floats) -> None:
        """Write ``x @ W.T`` into ``out``; panels of ``Activations``."""
        from trapetum.kernels.cpu.gemm import ROWS, multiply_panels

        fitting = _TILE_WEIGHTS // self.in_features // ROWS * ROWS
        step = min(max(fitting, _LEAST_TILE_ROWS), _MOST_TILE_ROWS)
        height = max(step, _MANY_ROWS // step * step)
        across = -(-len(panels) // _MANY_PANELS)

        def piece(number: int) -> None:
            down, block = divmod(number, across)
            begin, end = block * _MANY_PANELS, min((block + 1) * _MANY_PANELS, len(panels))
            stop = min((down + 1) * height, self.rows)
            buffer = np.empty((min(step, stop - down * height), self.in_features), np.float32)
            for first in range(down * height, stop, step):
                tile = self.tile(slice(first, min(first + step, stop)), buffer)
                multiply_panels(np.ascontiguousarray(tile), panels, out, first, begin, end)

        self.pool.run(piece, -(-self.rows // height) * across)

    def look_up(self, ids: NDArray[np.intp]) -> Floats:
        """Decoded rows by number, float32 [len(ids), in_features]."""
        return np.concatenate([self.tile(slice(i, i + 1)) for i in ids.tolist()])


class DenseMatrix(Matrix):
    """Values as stored; float32 ones are used in place, others are widened tile by tile.

    Parameters
    ----------
    tensor : DenseTensor
    pool : Pool
    expand : bool
        Widen once, at construction: four bytes a weight for speed.
    """

    def __init__(self, tensor: DenseTensor, pool: Pool, *, expand: bool = True) -> None:
        super().__init__(tensor, pool)
        values = tensor.values.reshape(self.rows, self.in_features)
        self.values: NDArray[Any] = widen(values) if expand else values

    def tile(self, rows: slice, buffer: Floats | None = None) -> Floats:
        """Rows as float32; a view where they already are."""
        values = self.values[rows]
        if values.dtype == np.float32:
            return values
        return widen(values, None if buffer is None else buffer[: values.shape[0]])

    def tile_rows(self, tokens: int) -> int:
        """As many as there are for one token where nothing is decoded: a plain matrix-vector product."""
        plain = tokens == 1 and self.values.dtype == np.float32
        return self.rows if plain else super().tile_rows(tokens)

    def look_up(self, ids: NDArray[np.intp]) -> Floats:
        """Rows by number, float32 [len(ids), in_features]."""
        return widen(self.values[ids])


class PreparedMatrix(Matrix):
    """A quantized matrix in the layout of its kernel; the stored tensor is let go.

    Parameters
    ----------
    prepared : Prepared
    pool : Pool
    fused : bool
        Multiply few tokens by the kernel; otherwise always tile by tile.
    """

    def __init__(self, prepared: Prepared, pool: Pool, *, fused: bool) -> None:
        self.prepared, self.pool, self.fused = prepared, pool, fused
        self.rows, self.in_features = prepared.rows, prepared.in_features

    def tile(self, rows: slice, buffer: Floats | None = None) -> Floats:
        """Decoded rows."""
        count = rows.stop - rows.start
        out = np.empty((count, self.in_features), np.float32) if buffer is None else buffer[:count]
        self.prepared.decode(out, rows.start)
        return out

    def __call__(self, given: Floats | Activations) -> Floats:
        """Multiply; see :class:`Matrix`."""
        x = given if isinstance(given, Activations) else Activations(given)
        tokens = x.x.shape[0]
        if not self.fused or tokens > FUSED_TOKENS:
            return super().__call__(x)
        out = np.empty((tokens, self.rows), np.float32)
        form, multiply = self.prepared.activations(x), self.prepared.multiply
        height = max(self.prepared.piece_rows, _FUSED_PIECE // (self.in_features * tokens))
        self.pool.blocks(lambda rows: multiply(form, out, rows.start, rows.stop), self.rows, height)
        return out


def widen(values: NDArray[Any], out: Floats | None = None) -> Floats:
    """Exact float32 of any stored float dtype; float32 itself is returned as it is.

    bfloat16 is the upper half of float32: a shift, which NumPy does at several times the speed of a cast.
    """
    if values.dtype == np.float32:
        return values
    if out is None:
        out = np.empty(values.shape, np.float32)
    if values.dtype.name == "bfloat16":
        bits = out.view(np.uint32)
        bits[...] = values.view(np.uint16)
        bits <<= np.uint32(16)
    else:
        out[...] = values
    return out


def build_matrix(
    tensor: QuantizedTensor,
    pool: Pool,
    *,
    expand: bool = True,
    precision: str = "exact",
    expand_codes: bool = False,
) -> Matrix:
    """The matrix of a stored tensor.

    Parameters
    ----------
    tensor : QuantizedTensor
    pool : Pool
    expand : bool
        Hold dense values and 8-bit floats as float32.
    precision : str
        One of ``PRECISIONS``.
    expand_codes : bool
        Hold codebooks of more than 16 entries also as int16; see ``kernels.cpu.prepare``.

    Raises
    ------
    RecipeError
        If the precision is unknown.
    """
    from trapetum.kernels.cpu.prepare import prepare

    if precision not in PRECISIONS:
        raise RecipeError(f"precision is {precision!r}; {', '.join(PRECISIONS)} are allowed")
    if isinstance(tensor, Float8Tensor) and expand:
        tensor = DenseTensor(tensor.dequantize())
    fused = precision != "exact"
    if isinstance(tensor, DenseTensor) and not fused:
        return DenseMatrix(tensor, pool, expand=expand)
    prepared = prepare(tensor, precise=precision == "precise", expand=expand_codes and fused)
    if prepared is not None:
        return PreparedMatrix(prepared, pool, fused=fused)
    if isinstance(tensor, DenseTensor):
        return DenseMatrix(tensor, pool, expand=expand)
    return Matrix(tensor, pool)
