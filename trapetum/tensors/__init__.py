"""The QuantizedTensor family: what a stored tensor is, and the exact NumPy decode of each layout.

Every quantizer returns one of these, every file format stores one of these, every decoder is tested against
``dequantize`` of one of these. A *layout* names how numbers are laid out (``dense``, ``codebook``, ...); a
*scheme* (package ``quantize``) names the search that chose them. Adding a layout is one class here and one
line in ``LAYOUTS``.

====================  ==========================================================================================
layout                value of weight [o, i]
====================  ==========================================================================================
``dense``             ``values[o, i]`` as stored
``codebook``          ``codebook[o, codes[o, i]]``
``ternary``           ``(codes[o, i] - 1) * scales[o, i // group_size]``, codes 0 .. 2, or 0 .. 3 (``+2 * scale``)
``blocks``            element ``i`` of row ``o`` of a GGUF block type (``trapetum.blocktypes``)
``additive``          ``scales[o] * sum over m of codebooks[m, codes[m, i // 8, o], i % 8]``
``float8``            ``value(codes[o, i]) * scales[o, i // group_size]``, codes 8-bit floats
====================  ==========================================================================================

A tensor of any rank is a matrix of ``rows = prod(shape[:-1])`` by ``in_features = shape[-1]``; ``shape``
keeps the logical form (stacked experts [E, out, in], a leading 1, ...). Vectors and scalars have one row.
"""

from __future__ import annotations

from trapetum.tensors.additive import AdditiveTensor
from trapetum.tensors.base import QuantizedTensor, matrix_shape
from trapetum.tensors.blocks import BlockTensor
from trapetum.tensors.codebook import CodebookTensor
from trapetum.tensors.dense import DenseTensor
from trapetum.tensors.float8 import Float8Tensor
from trapetum.tensors.ternary import TernaryTensor

__all__ = [
    "LAYOUTS",
    "AdditiveTensor",
    "BlockTensor",
    "CodebookTensor",
    "DenseTensor",
    "Float8Tensor",
    "QuantizedTensor",
    "TernaryTensor",
    "matrix_shape",
]

LAYOUTS: dict[str, type[QuantizedTensor]] = {
    c.layout: c
    for c in (DenseTensor, CodebookTensor, TernaryTensor, BlockTensor, AdditiveTensor, Float8Tensor)
}
