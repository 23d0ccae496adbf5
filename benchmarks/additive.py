"""Additive codebooks: speed of the search on one core, loss on Gaussian weights, memory.

    python benchmarks/additive.py [--rows 4096] [--width 4096] [--efforts fast default high]

CPU time of this thread, BLAS on one thread, best of three; lines of JSON. "search" is the beam search alone, "rows" is
what a block of 256 rows takes under a second moment: error feedback, tables of every group's metric, scales.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from trapetum.quantize.additive import Additive
from trapetum.quantize.additive_feedback import Weighted
from trapetum.quantize.additive_fit import Encoder
from trapetum.quantize.hessian import Hessian
from trapetum.quantize.scheme import EFFORTS
from trapetum.quantize.statistics import one_blas_thread
from trapetum.runtime.environment import describe_environment


def seconds(work: Callable[[], Any], times: int = 3) -> float:
    """Least CPU time of this thread."""
    found = []
    for _ in range(times):
        start = time.thread_time()
        work()
        found.append(time.thread_time() - start)
    return min(found)


def resident() -> float:
    """Largest resident size so far, MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Print JSON lines: the machine, speed of the search and of rows; for each of ``--efforts`` loss and memory."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--efforts", nargs="*", default=["fast", "default"], choices=EFFORTS)
    given = parser.parse_args()
    one_blas_thread()
    rng = np.random.default_rng(0)
    print(json.dumps({"cpu": describe_environment()["cpu"]["model"]}))
    vectors = rng.standard_normal((1 << 14, 8), dtype=np.float32)
    width = min(given.width, 1024)
    x = rng.standard_normal((4 * width, width), dtype=np.float32)
    moment = Hessian(x.T @ x / len(x), len(x))
    block = rng.standard_normal((256 * width // 8, 8), dtype=np.float32)
    for count in (2, 4):
        books = rng.standard_normal((count, 256, 8)).astype(np.float32)
        encoder, metric = Encoder(books), Weighted(books, moment, width)
        encoder.encode(vectors[:8], 8)  # compiles
        for beam in (8, 16):
            search = vectors.size / seconds(lambda e=encoder, b=beam: e.encode(vectors, b))
            rows = block.size / seconds(lambda m=metric, b=beam: m.encode(block, b))
            line = {"codebooks": count, "beam": beam, "search": search, "rows": rows}
            print(json.dumps({k: round(v) for k, v in line.items()} | {"unit": "weights/s"}), flush=True)
    weight = rng.standard_normal((given.rows, given.width), dtype=np.float32)
    for effort in given.efforts:
        scheme, before, start = Additive(2, effort), resident(), time.thread_time()
        fitted = scheme.fit(len(weight), lambda rows: weight[rows], 0)
        fit = time.thread_time() - start
        lost, squares = scheme.errors(weight, fitted.quantize(weight))
        total = time.thread_time() - start
        line = {
            "effort": effort,
            "relative_error": round(float(lost.sum() / squares.sum()), 5),
            "fit_s": round(fit, 1),
            "weights/s": round(weight.size / total),
            "weights_mib": round(weight.nbytes / 2**20),
            "more_mib": round(resident() - before),
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
