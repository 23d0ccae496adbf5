"""The figures of docs/benchmarks.md, section "CPU kernels": every shape, one and eight tokens, all schemes.

    python benchmarks/cpu_kernels.py [--quick] [--threads N] [--cpu-time] > figures.json

Takes about four minutes for a shape and 3 GiB of memory (pools of 256 MiB for each kernel); ``--quick`` takes the
first shape only. A table goes to stderr, the whole report to stdout. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import sys

from trapetum.cli.bench import text
from trapetum.runtime.bench import bench_cpu

SHAPES = ((4096, 4096), (11008, 4096), (4096, 11008), (32000, 4096))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="4096 x 4096 only")
    parser.add_argument("--threads", type=int, help="all cores by default")
    parser.add_argument("--cpu-time", action="store_true", help="count CPU time instead of the wall")
    options = parser.parse_args()
    reports = []
    for tokens in (1, 8):
        for shape in SHAPES[: 1 if options.quick else None]:
            report = bench_cpu(
                [shape], tokens=tokens, threads=options.threads, rounds=21, cpu_time=options.cpu_time
            )
            sys.stderr.write(text(report) + "\n\n")
            reports.append(report)
    json.dump(reports, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
