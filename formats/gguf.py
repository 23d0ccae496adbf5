"""Strict, lazy reader of one GGUF file.

::

    0    4  magic "GGUF"
    4    4  version u32: 3 (2 has the same layout)
    8    8  tensor count u64
    16   8  pair count u64
    24   .  pairs: key, value                                        module gguf_values
    .    .  tensors: name (string, at most 63 bytes), dimension count u32 (at most 4), dimensions u64
                     (fastest first: the reverse of a NumPy shape), type u32, offset u64 into the data
    .    .  padding to a multiple of general.alignment (u32, a power of two; 32 without the key)
    .    .  data: each tensor at a multiple of the alignment

All of it is checked before a tensor is read: counts, lengths, dimensions and their product, names that
occur twice, offsets, overlaps, the end of the file.

Two things are refused unless ``open(..., strict=False)`` asks for them. A tensor of an unknown type then keeps its id
and raw bytes; its extent is what lies before the next tensor. And type 42 has two meanings: upstream it is Q2_0 with
a scale for 64 weights (18 bytes), files of an earlier fork hold 128 weights (34 bytes) under the same number. Nothing
in the header tells them apart, but the distance between tensors does; the legacy form is read as PQ2_0, whose bytes
are the same.

Source: the GGUF specification (ggml, docs/gguf.md).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from trapetum.blocktypes import BLOCK_TYPES
from trapetum.errors import FormatError, UnsupportedModelError
from trapetum.formats.gguf_header import GgufTensor, Header, read_header
from trapetum.formats.mapped import MappedFile
from trapetum.formats.strict_json import shown
from trapetum.tensors import BlockTensor, DenseTensor, QuantizedTensor, matrix_shape

__all__ = ["GgufFile", "GgufTensor"]


class GgufFile:
    """One validated file; made by :meth:`open`. Reads may come from any number of threads.

    Attributes
    ----------
    path : Path
    kv : dict of str to KeyValue
        Metadata with their types, in file order.
    tensors : dict of str to GgufTensor
        In the order of the file's list.
    version, alignment, data_start : int
    notes : list of str
        What a person should know: trailing bytes, gaps, unknown types, the legacy form of Q2_0.
    """

    def __init__(self, file: MappedFile, header: Header) -> None:
        self._file = file
        self.path = file.path
        self.kv, self.tensors, self.notes = header.kv, header.tensors, header.notes
        self.version, self.alignment, self.data_start = header.version, header.alignment, header.data_start

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, mmap: bool = True, strict: bool = True) -> Self:
        """Check a file and open it; no tensor is read.

        Parameters
        ----------
        path : path-like
        mmap : bool, default True
            Map the file; False reads with pread.
        strict : bool, default True
            Refuse types that we do not know and the legacy form of type 42. False keeps the former as raw bytes
            and reads the latter as PQ2_0, each with a note: what a reader of old or foreign files wants.

        Raises
        ------
        FormatError
            Names the file, the tensor or key, what was found and what is allowed.
        """
        file = MappedFile.open(path, mmap=mmap)
        try:
            header = read_header(file, strict)
            if file.note is not None:
                header.notes.append(file.note)
            return cls(file, header)
        except BaseException:
            file.close()
            raise

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Metadata values alone."""
        return {key: entry.value for key, entry in self.kv.items()}

    def raw(self, name: str, rows: slice | None = None) -> NDArray[np.uint8]:
        """Stored bytes of a tensor, or of some of its rows.

        Parameters
        ----------
        name : str
        rows : slice, optional
            Rows of the matrix form, step 1; not for a type that we do not know.

        Returns
        -------
        ndarray of uint8, shape (rows, row bytes), read-only; (bytes,) for an unknown type
        """
        info = self._info(name)
        if info.type is None:
            if rows is not None:
                raise UnsupportedModelError(
                    f"{self.path}: tensor {shown(name)} has {info.type_name}, whose rows are unknown"
                )
            return self._file.read(info.start, info.end)
        count, width = matrix_shape(info.shape)
        first, last, step = (rows or slice(None)).indices(count)
        if step != 1:
            raise ValueError(f"rows must have step 1, not {step}")
        last = max(first, last)
        stride = info.type.row_bytes(width)
        raw = self._file.read(info.start + first * stride, info.start + last * stride)
        return raw.reshape(last - first, stride)

    def load(self, name: str, rows: slice | None = None) -> QuantizedTensor:
        """A tensor, or some of its rows as [selected rows, in_features].

        Returns
        -------
        DenseTensor or BlockTensor

        Raises
        ------
        UnsupportedModelError
            If the type is unknown.
        """
        info = self._info(name)
        if info.type is None:
            raise UnsupportedModelError(
                f"{self.path}: tensor {shown(name)} has {info.type_name}, which cannot be decoded",
                hint="Known types: " + ", ".join(BLOCK_TYPES) + ".",
            )
        raw = self.raw(name, rows)
        shape = info.shape if rows is None else (len(raw), matrix_shape(info.shape)[1])
        if info.type.dtype is not None:
            return DenseTensor(raw.reshape(-1).view(info.type.dtype).reshape(shape))
        return BlockTensor(info.type.name, raw, shape)

    def release(self, name: str) -> None:
        """Drop the mapped pages of a tensor; arrays that were read stay valid."""
        info = self._info(name)
        self._file.release(info.start, info.end)

    def close(self) -> None:
        """Close the file; arrays that were read stay valid."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _info(self, name: str) -> GgufTensor:
        try:
            return self.tensors[name]
        except KeyError:
            raise FormatError(f"{self.path}: there is no tensor named {shown(name)}") from None
