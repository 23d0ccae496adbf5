"""A weight matrix that the forward pass can multiply with, whatever its stored layout.

Many tokens: decode a tile of rows to float32 and let BLAS multiply, tile by tile over the pool, so that a
quantized matrix is never float32 as a whole. Few tokens: a fused kernel where the layout has one. A layout
without an entry in ``MATRICES`` still works through its exact decode.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trapetum.kernels.cpu.pool import Pool
from trapetum.tensors import CodebookTensor, DenseTensor, QuantizedTensor

__all__ = ["MATRICES", "CodebookMatrix", "DenseMatrix", "Matrix", "build_matrix"]

Floats = NDArray[np.float32]

_TILE_WEIGHTS = 1 << 20  # of a decoded tile: 4 MiB of float32, which a last-level cache holds
_TILE_ROWS = 64  # BLAS packs the activations again for every tile: fewer rows would show
_PIECE_MACS = 8 << 20  # multiply-adds worth waking a thread (40 us): about 0.3 ms where there are many tokens
_FEW_TOKENS = 8  # up to here the fused codebook kernel beats decode + BLAS


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

    def tile(self, rows: slice) -> Floats:
        """Decoded rows, float32 [rows, in_features]."""
        return self.tensor.dequantize(rows)

    def multiply_tile(self, x: Floats, rows: slice, out: Floats) -> None:
        """Write ``x @ W[rows].T`` into columns ``rows`` of ``out`` [tokens, all rows]."""
        np.matmul(x, self.tile(rows).T, out=out[:, rows])

    def __call__(self, x: Floats) -> Floats:
        """Multiply.

        Parameters
        ----------
        x : ndarray of float32, shape (tokens, in_features)

        Returns
        -------
        ndarray of float32, shape (tokens, rows)
        """
        out = np.empty((x.shape[0], self.rows), np.float32)
        weights = self.rows * self.in_features
        pieces = max(1, weights // _TILE_WEIGHTS, weights * x.shape[0] // _PIECE_MACS)
        size = -(-self.rows // pieces // _TILE_ROWS) * _TILE_ROWS
        self.pool.blocks(lambda r: self.multiply_tile(x, r, out), self.rows, size)
        return out

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
        self.values = widen(values) if expand else values

    def tile(self, rows: slice) -> Floats:
        """Rows as float32; no copy where they already are."""
        return widen(self.values[rows])

    def look_up(self, ids: NDArray[np.intp]) -> Floats:
        """Rows by number, float32 [len(ids), in_features]."""
        return widen(self.values[ids])


class CodebookMatrix(Matrix):
    """Codes stay one byte a weight; tables are float32.

    Parameters
    ----------
    tensor : CodebookTensor
    pool : Pool
    """

    def __init__(self, tensor: CodebookTensor, pool: Pool) -> None:
        super().__init__(tensor, pool)
        self.codes = np.ascontiguousarray(tensor.codes)
        self.table = np.ascontiguousarray(tensor.codebook, dtype=np.float32)

    def tile(self, rows: slice) -> Floats:
        """Decoded rows."""
        from trapetum.kernels.cpu.codebook import decode_rows

        codes = self.codes[rows]
        out = np.empty(codes.shape, np.float32)
        decode_rows(codes, self.table[rows], out)
        return out

    def multiply_tile(self, x: Floats, rows: slice, out: Floats) -> None:
        """Fused for few tokens, decode + BLAS for many."""
        if x.shape[0] > _FEW_TOKENS:
            super().multiply_tile(x, rows, out)
            return
        from trapetum.kernels.cpu.codebook import multiply_rows

        multiply_rows(self.codes, self.table, x, out, rows.start, rows.stop)

    def look_up(self, ids: NDArray[np.intp]) -> Floats:
        """Decoded rows by number."""
        return np.take_along_axis(self.table[ids], self.codes[ids].astype(np.intp), axis=1)


def widen(values: NDArray[np.generic]) -> Floats:
    """Exact float32 of any stored float dtype; float32 itself is returned as it is.

    bfloat16 is the upper half of float32: a shift, which NumPy does at several times the speed of a cast.
    """
    if values.dtype == np.float32:
        return values  # type: ignore[return-value]
    if values.dtype.name == "bfloat16":
        wide = values.view(np.uint16).astype(np.uint32)
        wide <<= np.uint32(16)
        return wide.view(np.float32)
    return values.astype(np.float32)


MATRICES: dict[str, type[Matrix]] = {"codebook": CodebookMatrix, "dense": DenseMatrix}


def build_matrix(tensor: QuantizedTensor, pool: Pool, *, expand: bool = True) -> Matrix:
    """The matrix class of a tensor's layout.

    Parameters
    ----------
    tensor : QuantizedTensor
    pool : Pool
    expand : bool
        Hold dense values as float32.
    """
    if isinstance(tensor, DenseTensor):
        return DenseMatrix(tensor, pool, expand=expand)
    return MATRICES.get(tensor.layout, Matrix)(tensor, pool)
