"""What two bits and GGUF types cost a real model: bits a weight, perplexity, distance from the original.

    python benchmarks/ternary.py MODEL TEXT [CHARACTERS]

Every linear layer is quantized without calibration; embedding and head stay as they are. Rows "llama.cpp" hold what its
own quantizer makes of the same layers (``ggml_quantize_chunk`` of the xllamacpp wheel), decoded and run here, so that
the rows differ in the weights alone.
"""

from __future__ import annotations

import ctypes
import math
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from trapetum.blocktypes import BLOCK_TYPES
from trapetum.formats.source import TensorSource, open_source
from trapetum.models.architectures import resolve
from trapetum.quantize.job import quantize_model
from trapetum.runtime.evaluate import compare
from trapetum.runtime.model import Model
from trapetum.tensors import BlockTensor, QuantizedTensor, matrix_shape

LINEAR = ("q", "k", "v", "o", "gate", "up", "down")
TYPES = ("Q4_0", "IQ4_NL", "Q4_K", "Q6_K")
SCHEMES: dict[str, dict[str, Any]] = {
    f"{'4-level' if levels == 4 else 'ternary'} g{group}{' + hadamard' if rotated else ''}": {
        "scheme": "ternary",
        "levels": levels,
        "group_size": group,
        "hadamard": rotated,
    }
    for levels in (3, 4)
    for group in (128, 64)
    for rotated in (False, True)
}


class Blocks:
    """A model whose linear layers are blocks that llama.cpp's quantizer made."""

    def __init__(
        self, inner: TensorSource, kind: str, quantize: Callable[[np.ndarray, str], np.ndarray]
    ) -> None:
        self._inner, self._kind, self._quantize = inner, kind, quantize
        arch = resolve(inner.config)
        self._linear = {n for n in inner.names() if arch.role(n).kind in LINEAR and n.endswith(".weight")}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def layout(self, name: str) -> str:
        """``blocks`` for linear layers."""
        return BlockTensor.layout if name in self._linear else self._inner.layout(name)

    def load(self, name: str, rows: slice | None = None) -> QuantizedTensor:
        """A tensor, quantized if it is a linear layer."""
        tensor = self._inner.load(name, rows)
        if name not in self._linear:
            return tensor
        return BlockTensor(self._kind, self._quantize(tensor.dequantize(slice(None)), self._kind))

    @property
    def bpw(self) -> float:
        """Bits a weight of the linear layers."""
        return BLOCK_TYPES[self._kind].bits_per_weight


def llama_quantize(weight: np.ndarray, kind: str) -> np.ndarray:
    """Rows of blocks by llama.cpp."""
    spec = find_spec("xllamacpp")
    if spec is None or spec.origin is None:
        raise SystemExit("the rows of llama.cpp need its wheel: pip install xllamacpp")
    function = ctypes.CDLL(str(next(Path(spec.origin).parent.glob("*.so")))).ggml_quantize_chunk
    function.restype = ctypes.c_size_t
    function.argtypes = [ctypes.c_int, *2 * [ctypes.c_void_p], *3 * [ctypes.c_int64], ctypes.c_void_p]
    out = np.empty((len(weight), BLOCK_TYPES[kind].row_bytes(weight.shape[1])), np.uint8)
    function(BLOCK_TYPES[kind].id, weight.ctypes.data, out.ctypes.data, 0, *weight.shape, None)
    return out


def candidates(model: str, folder: Path) -> Iterator[tuple[str, float, TensorSource]]:
    """(name, bits a weight, source) of every row of the table."""
    for label, options in SCHEMES.items():
        report = quantize_model(model, folder / label, **options)
        yield label, report.quantized_bpw, open_source(report.out)
    for kind in ("Q2_0", *TYPES):
        found: Any = Blocks(open_source(model), kind, llama_quantize)
        yield f"{kind}, llama.cpp", found.bpw, found
    for kind in TYPES:
        report = quantize_model(model, folder / kind, scheme=f"gguf:{kind}")
        yield f"gguf:{kind}", report.quantized_bpw, open_source(report.out)


def main(model: str, text_file: str, characters: str = "") -> None:
    """Print the table."""
    text = Path(text_file).read_text(encoding="utf-8")[: int(characters) if characters else None]
    reference = Model(open_source(model))
    weights = sum(math.prod(matrix_shape(reference.source.shape(n))) for n in reference.source.names())
    print(f"{model}: {weights:,} weights\n")
    print("| linear layers | bits a weight | perplexity | d ln PPL | KL, nats | top-1 |")
    print("|---|---:|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as folder:
        for label, bpw, source in candidates(model, Path(folder)):
            with Model(source) as other:
                found = compare(reference, other, text)
            print(
                f"| {label} | {bpw:.3f} | {found['ppl_b']:.2f} | {math.log(found['ppl_b'] / found['ppl_a']):+.4f} "
                f"| {found['kl_mean']:.4f} | {found['top1_agreement']:.3f} |",
                flush=True,
            )
    print(f"\nunquantized: perplexity {found['ppl_a']:.2f} on {found['tokens']:,} tokens in windows of 512")


if __name__ == "__main__":
    main(*sys.argv[1:4])
