"""Speed and error of the codebook search. Prints JSON lines.

    python benchmarks/kmeans.py [--k 4,8,16,32,64,256] [--n 4096] [--rounds 5] [--effort default] [--dtype bfloat16]
                                [--no-reference]

Speed is weights a second a core by thread CPU time (other work on the machine does not count), median over rounds; the
reference's way (``reference_kmeans.py``) runs in the same process between our runs (A B A B ...), on fewer rows, and
the ratio is the median of the rounds' ratios. Error is the stored error (codebook rounded to its dtype, codes nearest
to the rounded entries) over the exact optimum by dynamic programming, in percent: mean and maximum over rows.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numba
import numpy as np
from reference_kmeans import reference_codebooks

from trapetum.quantize.kmeans import fit_codebooks, optimal_codebook, relative_error

DTYPES: dict[str, Any] = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}


def rows_of(kind: str, rows: int, n: int, seed: int = 0) -> np.ndarray:
    """Rows of one distribution, scaled to a standard deviation of about 0.02."""
    rng = np.random.default_rng([seed, n])
    if kind == "laplace":
        x = rng.laplace(size=(rows, n))
    elif kind in ("t5", "t3"):
        x = rng.standard_t(int(kind[1]), (rows, n))
    else:
        x = rng.standard_normal((rows, n))
    if kind == "outlier":
        x[:, n // 3] = 20.0
    return x * 0.02


def cpu_seconds(call: Callable[[], object]) -> float:
    """Thread CPU time of one call."""
    start = time.thread_time()
    call()
    return time.thread_time() - start


def speed(k: int, n: int, dtype: str, effort: str, rounds: int, reference: bool) -> dict[str, Any]:
    """Weights a second a core and the ratio to the reference's way."""
    rows = 256
    weight = rows_of("gauss", rows, n).astype(DTYPES[dtype])
    # The reference needs K * n * block * 4 bytes and seconds: few rows are enough, its time is proportional.
    reference_rows = max(1, min(16, 256 // k))
    plain = weight[:reference_rows].astype(np.float32)
    fit_codebooks(weight[:2], k, effort=effort)  # compile
    ours, ratios = [], []
    for _ in range(rounds):
        seconds = cpu_seconds(lambda: fit_codebooks(weight, k, effort=effort)) / rows
        ours.append(n / seconds)
        if reference:
            ratios.append(cpu_seconds(lambda: reference_codebooks(plain, k)) / reference_rows / seconds)
    return {
        "weights_per_second_core": round(statistics.median(ours)),
        "ratio_to_reference": round(statistics.median(ratios), 1) if ratios else None,
    }


def excess(k: int, n: int, dtype: str, effort: str, rows: int, reference: bool) -> dict[str, Any]:
    """Percent above the optimum, [mean, maximum], by distribution."""
    out: dict[str, Any] = {}
    for kind in ("gauss", "laplace", "t5", "t3", "outlier"):
        weight = rows_of(kind, rows, n, seed=1).astype(DTYPES[dtype])
        best = np.array([optimal_codebook(row, k)[1] for row in weight])
        percent = 100.0 * (relative_error(weight, *fit_codebooks(weight, k, effort=effort))[0] / best - 1.0)
        out[kind] = [round(float(percent.mean()), 3), round(float(percent.max()), 2)]
        if reference:
            theirs = relative_error(weight, *reference_codebooks(weight.astype(np.float32), k, block=4))[0]
            out[f"reference_{kind}"] = [round(float(100 * (theirs / best - 1).mean()), 1)]
    return out


def machine() -> str:
    """Processor name, where the system tells it."""
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else []:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def main() -> None:
    """Print JSON lines: the machine, then speed and error of each size of codebook.

    Usage: ``python benchmarks/kmeans.py [--k 4,8,...] [--n 4096] [--rounds 5] [--no-reference]``.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--k", default="4,8,16,32,64,256")
    parser.add_argument("--n", default="4096")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=8, help="rows a distribution for the error")
    parser.add_argument("--effort", default="default")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES)
    parser.add_argument("--no-reference", action="store_true")
    args = parser.parse_args()
    versions = {"python": platform.python_version(), "numpy": np.__version__, "numba": numba.__version__}
    print(json.dumps({"machine": machine(), **versions}), flush=True)
    for n in map(int, args.n.split(",")):
        for k in map(int, args.k.split(",")):
            line = {"benchmark": "kmeans", "k": k, "n": n, "dtype": args.dtype, "effort": args.effort}
            line |= speed(k, n, args.dtype, args.effort, args.rounds, not args.no_reference)
            # The reference's error only where its broadcast is affordable.
            line["excess_percent"] = excess(
                k, n, args.dtype, args.effort, args.rows, not args.no_reference and k <= 16
            )
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
