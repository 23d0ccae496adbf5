"""What codebooks cost a real model: perplexity, and distance from the original, at 8, 4 and 3 bits.

    python benchmarks/quality.py MODEL TEXT [CHARACTERS]

Every linear layer is quantized without calibration; a tied embedding and head stay as they are. ``trapetum`` rows are
artifacts of ``quantize_model``; ``reference`` rows decode the codebooks of ``reference_kmeans``, rounded to float16 as
its runtime does, at the same K and so at the same size. One JSON line a row; ``ratio`` is KL over the reference's.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from reference_kmeans import reference_codebooks

from trapetum.formats.source import TensorSource, open_source
from trapetum.models.architectures import resolve
from trapetum.quantize.job import quantize_model
from trapetum.runtime.environment import describe_environment
from trapetum.runtime.evaluate import compare
from trapetum.runtime.model import Model
from trapetum.tensors import CodebookTensor, QuantizedTensor

LINEAR = ("q", "k", "v", "o", "gate", "up", "down")


class Reference:
    """A model whose linear layers went through the reference's k-means."""

    def __init__(self, inner: TensorSource, codebook_size: int) -> None:
        self._inner, self._size = inner, codebook_size
        arch = resolve(inner.config)
        self._linear = {n for n in inner.names() if arch.role(n).kind in LINEAR and n.endswith(".weight")}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def layout(self, name: str) -> str:
        """``codebook`` for linear layers."""
        return CodebookTensor.layout if name in self._linear else self._inner.layout(name)

    def load(self, name: str, rows: slice | None = None) -> QuantizedTensor:
        """The tensor, fitted anew where it is a linear layer."""
        tensor = self._inner.load(name, rows)
        if name not in self._linear:
            return tensor
        codes, codebook = reference_codebooks(tensor.dequantize(), self._size)
        return CodebookTensor(codes, codebook.astype(np.float16))


def main(model: str, text_file: str, characters: int | None = None) -> None:
    """Print one JSON line a method."""
    text = Path(text_file).read_text(encoding="utf-8")[:characters]
    facts = describe_environment()
    print(json.dumps({"machine": facts.get("cpu"), "text": Path(text_file).name, "characters": len(text)}))
    with Model(open_source(model)) as original, tempfile.TemporaryDirectory() as scratch:
        for bits in (4, 3, 8):
            losses: dict[str, float] = {}
            for method in ("reference", "trapetum"):
                start = time.perf_counter()
                if method == "reference":
                    pressed = Model(Reference(open_source(model), 2**bits))
                    bpw = None
                else:
                    report = quantize_model(model, Path(scratch, str(bits)), bits=bits)
                    pressed, bpw = Model(open_source(report.out)), report.bpw
                seconds = time.perf_counter() - start
                with pressed:
                    d = compare(original, pressed, text)
                losses[method] = d["kl_mean"]
                row = {
                    "bits": bits,
                    "method": method,
                    "bpw": bpw,
                    "ppl_original": d["ppl_a"],
                    "ppl": d["ppl_b"],
                    "kl": d["kl_mean"],
                    "ratio": losses[method] / losses["reference"],
                    "top1": d["top1_agreement"],
                    "tokens": d["tokens"],
                    "seconds": seconds,
                }
                print(
                    json.dumps({k: round(v, 5) if isinstance(v, float) else v for k, v in row.items()}),
                    flush=True,
                )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else None)
