"""The one table of GGUF tensor types: ids, sizes, and the exact translation bytes <-> scales and codes <->
weights.

It stands below ``tensors`` (a ``BlockTensor`` decodes through it), knows no file and no search, and is NumPy
only. Types whose grids we do not carry (IQ1_S ... IQ3_S) are listed with their sizes; they decode through the
``gguf`` package where that is installed.
"""

from __future__ import annotations

from trapetum.blocktypes.base import BlockType, Parts
from trapetum.blocktypes.table import BLOCK_TYPES, BLOCK_TYPES_BY_ID, PLAIN_TYPES, plain_type

__all__ = ["BLOCK_TYPES", "BLOCK_TYPES_BY_ID", "PLAIN_TYPES", "BlockType", "Parts", "plain_type"]
