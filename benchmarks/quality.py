"""What quantization costs a real model: bits a weight, perplexity, distance from the original, CPU time and memory.

    python benchmarks/quality.py MODEL --calibrate TEXT --text OTHER [--tokens N] [--characters N] [--only PATTERN ...]

Every linear layer is quantized; embedding and head stay as they are. Each row is one run of ``trapetum quantize`` as a
process of its own: its CPU seconds and its largest resident size are the system's figures for that process. Rows "im"
and "moments" read what ``trapetum imatrix`` made of the calibration text before (its own lines say at what cost), rows
"sequential" calibrate by themselves. Rows "llama.cpp" hold what its quantizer makes of the same layers
(``ggml_quantize_chunk`` of the xllamacpp wheel; "im": with the same importance), decoded and run here, so that rows
differ in the weights alone; they are left out without the wheel. "reference" decodes the codebooks of
``reference_kmeans``, rounded to float16; "x ref" is KL over the reference's at 4 bits.

The text for evaluation is never the one for calibration: equal texts are refused.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from child import measured
from reference_kmeans import reference_codebooks

import trapetum
from trapetum.blocktypes import BLOCK_TYPES
from trapetum.formats.imatrix import InputStatistics, open_statistics
from trapetum.formats.source import TensorSource, open_source
from trapetum.models.architectures import resolve
from trapetum.runtime.calibrate import TOKENS
from trapetum.runtime.environment import describe_environment
from trapetum.runtime.evaluate import compare
from trapetum.runtime.model import Model
from trapetum.tensors import BlockTensor, CodebookTensor, QuantizedTensor

LINEAR = ("q", "k", "v", "o", "gate", "up", "down")
_FREE, _IM, _MOMENTS, _SEQUENTIAL = "", ", im", ", moments", ", sequential"


@dataclass(frozen=True)
class Row:
    """A run of ``trapetum quantize``: name, its options, what it knows of the inputs."""

    name: str
    options: tuple[str, ...]
    known: str = _FREE


def _rows() -> list[Row]:
    high = ("--effort", "high")
    scalar = {
        "codebooks 4 bits": (("--bits", "4"), (_FREE, _IM, _MOMENTS, _SEQUENTIAL)),
        "codebooks 3 bits": (("--bits", "3"), (_FREE, _IM, _MOMENTS, _SEQUENTIAL)),
        "4-level g64": (
            ("--scheme", "ternary", "--levels", "4", "--group-size", "64"),
            (_FREE, _IM, _MOMENTS, _SEQUENTIAL),
        ),
        "4-level g128": (("--scheme", "ternary", "--levels", "4"), (_FREE, _MOMENTS, _SEQUENTIAL)),
        "4-level g128 + hadamard": (
            ("--scheme", "ternary", "--levels", "4", "--hadamard"),
            (_FREE, _MOMENTS, _SEQUENTIAL),
        ),
        "ternary g128": (("--scheme", "ternary"), (_FREE, _MOMENTS, _SEQUENTIAL)),
    }
    others = {
        "additive 2x8": (("--bits", "2"), (_FREE, _IM, _MOMENTS, _SEQUENTIAL)),
        "additive 4x8": (("--scheme", "additive", "--bits", "4"), (_FREE, _MOMENTS, _SEQUENTIAL)),
        **{
            f"gguf:{kind}": (("--scheme", f"gguf:{kind}"), (_FREE, _IM))
            for kind in ("Q4_0", "IQ4_NL", "Q4_K", "Q6_K")
        },
    }
    found = []
    for name, (options, kinds) in (scalar | others).items():
        for known in kinds:
            found.append(Row(f"{name}{known}", options, known))
            if known in (_MOMENTS, _SEQUENTIAL) and name in scalar:
                found.append(Row(f"{name}{known}, high", (*options, *high), known))
    return found


ROWS = _rows()
TYPES = ("Q6_K", "Q4_K", "Q4_0", "IQ4_NL", "IQ4_XS", "Q3_K", "Q2_K", "IQ2_S", "Q2_0")


class Changed:
    """A model whose linear layers went through another quantizer.

    Parameters
    ----------
    inner : TensorSource
    change : callable
        (name, weights float32) -> tensor.
    """

    def __init__(self, inner: TensorSource, change: Callable[[str, np.ndarray], QuantizedTensor]) -> None:
        self._inner, self._change = inner, change
        arch = resolve(inner.config)
        names = [n for n in inner.names() if arch.role(n).kind in LINEAR and n.endswith(".weight")]
        self._stored = {n: change(n, inner.load(n).dequantize()) for n in names}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def layout(self, name: str) -> str:
        """As the quantizer stored it."""
        return self._stored[name].layout if name in self._stored else self._inner.layout(name)

    def load(self, name: str, rows: slice | None = None) -> QuantizedTensor:
        """A tensor; all rows at once of what was changed."""
        return self._stored.get(name) or self._inner.load(name, rows)


class Remembered:
    """The original, which runs over each window once for all rows."""

    def __init__(self, model: Model) -> None:
        self._model, self._seen = model, dict[bytes, np.ndarray]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def hidden(self, ids: np.ndarray) -> np.ndarray:
        """See :meth:`Model.hidden`."""
        key = ids.tobytes()
        if key not in self._seen:
            self._seen[key] = self._model.hidden(ids)
        return self._seen[key]


def ggml() -> Any:
    """``ggml_quantize_chunk`` of the xllamacpp wheel; None without it."""
    spec = find_spec("xllamacpp")
    if spec is None or spec.origin is None:
        return None
    function = ctypes.CDLL(str(next(Path(spec.origin).parent.glob("*.so")))).ggml_quantize_chunk
    function.restype = ctypes.c_size_t
    function.argtypes = [ctypes.c_int, *2 * [ctypes.c_void_p], *3 * [ctypes.c_int64], ctypes.c_void_p]
    return function


def llama_cpp(function: Any, kind: str, known: InputStatistics | None) -> Any:
    """The change that llama.cpp makes of a layer."""

    def change(name: str, weight: np.ndarray) -> QuantizedTensor:
        weight = np.ascontiguousarray(weight, np.float32)
        importance = None if known is None else known.diagonal(name, weight.shape[1])
        out = np.empty((len(weight), BLOCK_TYPES[kind].row_bytes(weight.shape[1])), np.uint8)
        pointer = None if importance is None else np.ascontiguousarray(importance, np.float32).ctypes.data
        function(BLOCK_TYPES[kind].id, weight.ctypes.data, out.ctypes.data, 0, *weight.shape, pointer)
        return BlockTensor(kind, out)

    return change


def reference(name: str, weight: np.ndarray) -> QuantizedTensor:
    """The reference's 4-bit codebooks."""
    codes, codebook = reference_codebooks(weight, 16)
    return CodebookTensor(codes, codebook.astype(np.float16))


def run(*words: str) -> tuple[dict[str, Any], float, float]:
    """A command's JSON, its CPU seconds and its largest resident size in MiB."""
    used = measured(sys.executable, "-m", "trapetum", *words, "--json")
    return json.loads(used.stdout), used.cpu_seconds, used.peak_mib


def candidates(given: argparse.Namespace, work: Path) -> Iterator[tuple[str, Any]]:
    """(name, callable that gives source, bits a weight, CPU seconds and MiB) of every row."""
    model = str(given.model)
    files = {_IM: work / "imatrix.gguf", _MOMENTS: work / "moments.safetensors"}
    yield "reference, codebooks 4 bits", lambda: _timed(open_source(model), reference)
    function = ggml()
    for kind in TYPES if function is not None else ():
        for label in (_FREE, _IM):
            name = f"llama.cpp {kind}{label}"
            if not label and kind.startswith("IQ2"):  # not without importance
                continue

            def quantized(kind: str = kind, label: str = label) -> tuple[Any, float, float, float]:
                known = open_statistics(files[_IM]) if label else None
                return _timed(open_source(model), llama_cpp(function, kind, known))

            yield name, quantized
    for row in ROWS:

        def made(row: Row = row) -> tuple[Any, float, float, float]:
            extra: tuple[str, ...] = ()
            if row.known in files:
                extra = ("--imatrix", str(files[row.known]))
            elif row.known:
                extra = (
                    "--calibrate",
                    str(given.calibrate),
                    "--calib-tokens",
                    str(given.tokens),
                    "--sequential",
                )
            options = ("--overwrite", "--threads", "2", *row.options, *extra)
            found, seconds, size = run("quantize", model, "-o", str(work / "out"), *options)
            return open_source(work / "out"), found["quantized_bpw"], seconds, size

        yield row.name, made


def _timed(source: TensorSource, change: Any) -> tuple[Any, float, float, float]:
    start = time.process_time()
    changed = Changed(source, change)
    seconds = time.process_time() - start
    stored = changed._stored.values()
    size = sum(a.nbytes for t in stored for a in t.to_arrays().values())
    return changed, 8 * size / sum(math.prod(t.shape) for t in stored), seconds, math.nan


def extrapolate() -> list[str]:
    """Lines on 7 billion parameters: products at the speed of this core's float32, everything else not counted."""
    size, layers, hidden, ffn = 1024, 32, 4096, 11008
    a = np.ones((size, size), np.float32)
    start, count = time.process_time(), 0
    while time.process_time() - start < 1.0:
        a @ a
        count += 1
    speed = count * 2 * size**3 / (time.process_time() - start)
    inputs = (hidden, hidden, hidden, ffn)  # of q k v, o, gate up, down
    weights = layers * (4 * hidden**2 + 3 * hidden * ffn)
    squares = layers * sum(i * i for i in inputs)
    pairs = layers * (4 * hidden * hidden**2 + 2 * ffn * hidden**2 + hidden * ffn**2)  # rows x in_features^2
    cubes = layers * sum(i**3 for i in inputs)
    rounds = 3 * (4 + 10 + 1)  # products of refinement: sweeps, conjugate gradients, the error
    flops = {
        f"forward pass over {TOKENS:,} tokens": 2 * weights * TOKENS,
        "second moments": squares * TOKENS,
        "factors": cubes / 3,
        "error feedback": pairs,
        "refinement (effort high)": 2 * rounds * pairs,
        "sequential: three more passes, drift and cross": (3 * 2 * weights + 2 * squares) * TOKENS,
    }
    lines = [
        f"7B (Llama-2: 32 layers, 4096, 11008), {speed / 1e9:.0f} GFLOP/s of float32 a CPU second here; products alone:"
    ]
    return lines + [f"* {name}: {f:.1e} FLOP, {f / speed / 3600:.1f} core hours" for name, f in flops.items()]


def main() -> None:
    """Print a Markdown table, one row a way to quantize, and what importance and moments cost.

    Usage: ``python benchmarks/quality.py MODEL --calibrate TEXT --text OTHER [--only PATTERN ...]``.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--calibrate", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--characters", type=int)
    parser.add_argument(
        "--only", nargs="*", help="rows with these names, such as 'codebooks 4*'; the reference always"
    )
    given = parser.parse_args()
    text = given.text.read_text("utf-8")
    if text == given.calibrate.read_text("utf-8"):
        parser.error("calibration and evaluation must not see the same text")
    text = text[: given.characters]
    cpu = describe_environment()["cpu"]
    print(
        f"{cpu['model']}, {cpu['usable']} cores, trapetum {trapetum.__version__}, {len(text):,} characters\n"
    )
    with tempfile.TemporaryDirectory() as folder, Model(open_source(given.model)) as model:
        work, original = Path(folder), Remembered(model)
        for name, extra in (("imatrix.gguf", ()), ("moments.safetensors", ("--hessian",))):
            words = ("--text", str(given.calibrate), "--tokens", str(given.tokens), "-o", str(work / name))
            _, seconds, size = run("imatrix", str(given.model), *words, *extra)
            print(f"{name}: {seconds:.0f} CPU seconds, {size:.0f} MiB", flush=True)
        print("\n| linear layers | bpw | perplexity | d ln PPL | KL | x ref | top-1 | CPU s | MiB |")
        print("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
        unit = math.nan
        for name, make in candidates(given, work):
            if given.only and unit == unit and not any(fnmatchcase(name, p) for p in given.only):
                continue
            source, bpw, seconds, size = make()
            with Model(source) as other:
                d = compare(original, other, text)  # type: ignore[arg-type]
            unit = d["kl_mean"] if unit != unit else unit
            print(
                f"| {name} | {bpw:.3f} | {d['ppl_b']:.3f} | {math.log(d['ppl_b'] / d['ppl_a']):+.4f} | "
                f"{d['kl_mean']:.4f} | {d['kl_mean'] / unit:.2f} | {d['top1_agreement']:.3f} | {seconds:.0f} | "
                f"{'' if math.isnan(size) else f'{size:.0f}'} |",
                flush=True,
            )
        print(f"\nunquantized: perplexity {d['ppl_a']:.3f} over {d['tokens']:,} tokens in windows of 512")
    print("\n".join(["", *extrapolate()]))


if __name__ == "__main__":
    main()
