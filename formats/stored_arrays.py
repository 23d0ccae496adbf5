"""Which arrays each layout stores, under which names, of which dtype and shape.

A tensor NAME is stored as arrays ``NAME.suffix`` (suffix ``""``: NAME itself). Every array has one row for each row
of the weight's matrix form, so that a block of rows is that block of each array; but for those that serve all rows
(``QuantizedTensor.shared``: additive codebooks).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from trapetum.blocktypes import BLOCK_TYPES
from trapetum.errors import FormatError
from trapetum.formats.dtypes import DTYPES
from trapetum.formats.safetensors_writer import Entry
from trapetum.formats.strict_json import shown
from trapetum.packing import packed_row_bytes
from trapetum.tensors import matrix_shape
from trapetum.tensors.additive import ENTRIES, GROUP, MAX_CODEBOOKS

__all__ = ["Arrays", "Rule", "array_rule", "stored_entries"]

Arrays = Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]
"""suffix -> dtype, shape."""

Rule = dict[str, tuple[tuple[str, ...], tuple[int, ...]]]
"""suffix -> allowed dtype codes, exact shape."""


def stored_entries(name: str, arrays: Arrays) -> list[Entry]:
    """The arrays of tensor NAME under their stored names (``NAME.suffix``, or NAME), sorted by suffix.

    Examples
    --------
    >>> arrays = {"codes": (np.dtype("u1"), (1, 1)), "codebook": (np.dtype("<f2"), (1, 4))}
    >>> [e.name for e in stored_entries("w", arrays)]
    ['w.codebook', 'w.codes']
    """
    return [
        Entry(f"{name}.{suffix}" if suffix else name, np.dtype(dtype), tuple(shape))
        for suffix, (dtype, shape) in sorted(arrays.items())
    ]


def _dense_arrays(shape: tuple[int, ...], params: Mapping[str, Any]) -> Rule:
    return {"": (tuple(DTYPES), shape)}


def _codebook_arrays(shape: tuple[int, ...], params: Mapping[str, Any]) -> Rule:
    size = params.get("codebook_size")
    if type(size) is not int or not 2 <= size <= 256:
        raise FormatError(f"codebook_size is {shown(size)}; 2 to 256 are allowed")
    rows, in_features = matrix_shape(shape)
    return {
        "codes": (("U8",), (rows, packed_row_bytes(in_features, (size - 1).bit_length()))),
        "codebook": (("F16", "F32"), (rows, size)),
    }


def _ternary_arrays(shape: tuple[int, ...], params: Mapping[str, Any]) -> Rule:
    rows, in_features = matrix_shape(shape)
    group = params.get("group_size")
    if type(group) is not int or group < 1 or in_features % group:
        raise FormatError(f"group_size is {shown(group)}; a divisor of {in_features} is allowed")
    if params.get("levels") not in (3, 4):
        raise FormatError(f"levels is {shown(params.get('levels'))}; 3 and 4 are allowed")
    if not isinstance(params.get("rotation"), str | None):
        raise FormatError(f"rotation is {shown(params['rotation'])}; null or a key is allowed")
    return {
        "codes": (("U8",), (rows, packed_row_bytes(in_features, 2))),
        "scales": (("F16", "F32"), (rows, in_features // group)),
    }


def _block_arrays(shape: tuple[int, ...], params: Mapping[str, Any]) -> Rule:
    name = params.get("type")
    block = BLOCK_TYPES.get(name) if isinstance(name, str) else None
    if block is None:
        raise FormatError(f"type is {shown(name)}; allowed: {', '.join(BLOCK_TYPES)}")
    rows, in_features = matrix_shape(shape)
    if in_features % block.block_size:
        raise FormatError(f"rows of {in_features} are not whole blocks of {block.block_size} ({name})")
    return {"blocks": (("U8",), (rows, block.row_bytes(in_features)))}


def _additive_arrays(shape: tuple[int, ...], params: Mapping[str, Any]) -> Rule:
    count = params.get("num_codebooks")
    if type(count) is not int or not 1 <= count <= MAX_CODEBOOKS:
        raise FormatError(f"num_codebooks is {shown(count)}; 1 to {MAX_CODEBOOKS} are allowed")
    rows, in_features = matrix_shape(shape)
    if in_features % GROUP:
        raise FormatError(f"rows of {in_features} are not whole groups of {GROUP}")
    return {
        "codes": (("U8",), (rows, in_features // GROUP * count)),
        "codebooks": (("F16", "F32"), (count, ENTRIES, GROUP)),
        "scales": (("F16", "F32"), (rows, 1)),
    }


def _float8_arrays(shape: tuple[int, ...], params: Mapping[str, Any]) -> Rule:
    rows, in_features = matrix_shape(shape)
    group = params.get("group_size")
    if type(group) is not int or group < 1:
        raise FormatError(f"group_size is {shown(group)}; a positive number is allowed")
    return {
        "codes": (("F8_E4M3", "F8_E5M2"), (rows, in_features)),
        "scales": (("F32",), (rows, -(-in_features // group))),
    }


_LAYOUTS: dict[str, Callable[[tuple[int, ...], Mapping[str, Any]], Rule]] = {
    "dense": _dense_arrays,
    "codebook": _codebook_arrays,
    "ternary": _ternary_arrays,
    "blocks": _block_arrays,
    "additive": _additive_arrays,
    "float8": _float8_arrays,
}


def array_rule(layout: object, shape: tuple[int, ...], params: Mapping[str, Any]) -> Rule:
    """The arrays that a tensor must have.

    Parameters
    ----------
    layout : object
        As found in a file.
    shape : tuple of int
        Logical shape.
    params : mapping
        As found in a file; checked here.

    Raises
    ------
    FormatError
        If the layout is unknown or its params are wrong.
    """
    rule = _LAYOUTS.get(layout) if isinstance(layout, str) else None
    if rule is None:
        raise FormatError(
            f"layout {shown(layout)} is not one that this version reads ({', '.join(_LAYOUTS)})",
            hint="A newer trapetum may know it.",
        )
    return rule(shape, params)
