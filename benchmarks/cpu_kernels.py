"""The figures of docs/benchmarks.md, section "CPU kernels": what the kernels must reach, on four shapes.

    python benchmarks/cpu_kernels.py [--tokens 1|8|128] [--threads 2] [--shapes 4096x4096 ...] [--rounds N]
        [--all] [--cpu-time] [--json FILE]

One token: the kernels of ``GOALS`` against fp32 BLAS and llama.cpp's; 8 tokens and 128: against sgemm on decoded
weights. Every kernel runs once a round on weights of its own in a pool of 256 MiB; a ratio is the median of the rounds'
ratios. Less than four minutes for all shapes on two cores, and 6 GB of memory. ``--all`` takes every kernel. A table
goes to stdout, the whole report to ``--json``. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")  # before NumPy: see cli/bench.py

from trapetum.cli.bench import text
from trapetum.runtime.bench import bench_cpu
from trapetum.runtime.bench_cases import BLAS, SCHEMES
from trapetum.runtime.bench_llama import LLAMA_TYPES

SHAPES = ("4096x4096", "11008x4096", "4096x11008", "32000x4096")
# tokens -> (ours, against, least ratio)
GOALS: dict[int, tuple[tuple[str, str, float], ...]] = {
    1: (
        ("codebook K=16", BLAS, 3.3),
        ("ternary", BLAS, 5.5),
        ("additive 2x8", BLAS, 2.5),
        ("codebook K=256 expanded", BLAS, 1.5),
        ("codebook K=16", "llama.cpp IQ4_NL", 1.3),
        ("codebook K=16", "llama.cpp Q4_K", 1.0),
        ("ternary", "llama.cpp TQ2_0", 0.9),
        ("Q2_0", "llama.cpp Q2_0", 10.0),
    ),
    8: (("codebook K=16", BLAS, 1.0), ("ternary", BLAS, 1.0)),
    128: tuple((scheme, BLAS, 0.9) for scheme in SCHEMES),
}


def ratios(shape: Mapping[str, Any], tokens: int) -> list[str]:
    """One cell a goal: the median ratio, marked where it misses."""
    rounds = {kernel["name"]: kernel["rounds"] for kernel in shape["kernels"]}
    cells = []
    for ours, against, least in GOALS[tokens]:
        if against not in rounds:
            cells.append("")
            continue
        found = statistics.median(b / a for a, b in zip(rounds[ours], rounds[against]))
        cells.append(f"{found:.2f}" + (" (misses)" if found < least else ""))
    return cells


def main() -> None:
    """Print a table of ratios, one row a goal and one column a shape; each shape's kernels go to stderr.

    Usage: ``python benchmarks/cpu_kernels.py [--tokens 1|8|128] [--threads 2] [--shapes 4096x4096 ...]``.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=1, choices=sorted(GOALS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="ROWSxINPUTS")
    parser.add_argument("--rounds", type=int, help="61 for one token, 9 for more")
    parser.add_argument("--all", action="store_true", help="every kernel, not those with a goal")
    parser.add_argument("--cpu-time", action="store_true", help="count CPU time instead of the wall")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    goals = GOALS[options.tokens]
    schemes = list(SCHEMES) if options.all else list(dict.fromkeys(ours for ours, _, _ in goals))
    asked = [against.removeprefix("llama.cpp ") for _, against, _ in goals if against != BLAS]
    reports, columns = [], []
    for name in options.shapes:
        rows, _, count = name.partition("x")
        report = bench_cpu(
            [(int(rows), int(count))], tokens=options.tokens, threads=options.threads, schemes=schemes,
            rounds=options.rounds or (61 if options.tokens == 1 else 9),
            llama=LLAMA_TYPES if options.all else asked, cpu_time=options.cpu_time,
        )  # fmt: skip
        sys.stderr.write(text(report) + "\n\n")
        reports.append(report)
        columns.append(ratios(report["shapes"][0], options.tokens))
    print(f"| tokens {options.tokens} | against | asked | " + " | ".join(options.shapes) + " |")
    print("|---|---|---:|" + "---:|" * len(columns))
    for i, (ours, against, least) in enumerate(goals):
        print(f"| {ours} | {against} | {least} | " + " | ".join(column[i] for column in columns) + " |")
    if options.json:
        options.json.write_text(json.dumps(reports, indent=1))


if __name__ == "__main__":
    main()
