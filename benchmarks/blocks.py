"""Encoders of GGUF block types against llama.cpp's: squared error and speed, as a Markdown table.

    python benchmarks/blocks.py [--rows 256] [--columns 4096] [TYPE ...]

Needs the package ``xllamacpp``, which carries ggml. Both run on one thread, in turns, timed by CPU time; the best of
three counts. Errors are relative to the (importance-weighted) sum of squares.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from trapetum.blocktypes import BLOCK_TYPES
from trapetum.quantize.block_search import SEARCHES, fit_blocks

FOREIGN = 100  # type ids from here on are not llama.cpp's


def ggml() -> ctypes.CDLL:
    """The shared library inside the xllamacpp wheel."""
    spec = find_spec("xllamacpp")
    if spec is None or spec.origin is None:
        raise SystemExit("pip install xllamacpp")
    return ctypes.CDLL(str(next(Path(spec.origin).parent.glob("*.so"))))


def llama_quantize(library: ctypes.CDLL, weight: np.ndarray, name: str, h: np.ndarray | None) -> np.ndarray:
    """Blocks of ggml_quantize_chunk, uint8 [rows, row bytes]."""
    entry = BLOCK_TYPES[name]
    out = np.empty((len(weight), entry.row_bytes(weight.shape[1])), np.uint8)
    matrix = None if h is None else h.astype(np.float32)
    function = library.ggml_quantize_chunk
    function.argtypes = [ctypes.c_int, *2 * [ctypes.c_void_p], *3 * [ctypes.c_int64], ctypes.c_void_p]
    pointer = None if matrix is None else matrix.ctypes.data
    function(entry.id, weight.ctypes.data, out.ctypes.data, 0, *weight.shape, pointer)
    return out


def best_seconds(runs: list[Callable[[], np.ndarray]]) -> list[tuple[float, np.ndarray]]:
    """Least CPU seconds of three turns, and the result, of each run."""
    best = [(np.inf, np.empty(0))] * len(runs)
    for _ in range(3):
        for i, run in enumerate(runs):
            start = time.process_time()
            result = run()
            best[i] = (min(best[i][0], time.process_time() - start), result)
    return best


def main() -> None:
    """Print a Markdown table, one row a block type: errors and speeds, ours and llama.cpp's.

    Usage: ``python benchmarks/blocks.py [--rows 256] [--columns 4096] [TYPE ...]``.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("types", nargs="*")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--columns", type=int, default=4096)
    options = parser.parse_args()
    library = ggml()
    rng = np.random.default_rng(0)
    weight = (0.02 * rng.standard_normal((options.rows, options.columns))).astype(np.float32)
    importance = np.exp(1.5 * rng.standard_normal(options.columns))
    print(
        "| type | error | llama.cpp | weighted error | llama.cpp | Mw/s | llama.cpp | weighted Mw/s | llama.cpp |"
    )
    print("|" + 9 * "---|")
    for name in options.types or [n for n in SEARCHES if BLOCK_TYPES[n].id < FOREIGN]:
        cells: list[list[str]] = [[], []]
        for h in (None, importance):
            fit_blocks(weight[:1], name, h)  # compile
            w = np.ones(options.columns) if h is None else h
            total = (w * weight.astype(np.float64) ** 2).sum()
            for seconds, blocks in best_seconds(
                [
                    lambda name=name, h=h: fit_blocks(weight, name, h).blocks,
                    lambda name=name, h=h: llama_quantize(library, weight, name, h),
                ]
            ):
                decoded = BLOCK_TYPES[name].decode(blocks)
                error = (w * (weight.astype(np.float64) - decoded) ** 2).sum() / total
                cells[0].append(f"{error:.3g}")
                cells[1].append(f"{weight.size / seconds / 1e6:.0f}")
        print(f"| {name} | " + " | ".join(cells[0] + cells[1]) + " |", flush=True)


if __name__ == "__main__":
    main()
