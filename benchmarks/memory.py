"""Peak memory and throughput of ``trapetum quantize`` on a large synthetic checkpoint.

    python benchmarks/memory.py [--gigabytes 6] [--folder DIR] [--keep] [-- OPTIONS OF QUANTIZE]

Makes the checkpoint (``make_checkpoint.py``), runs the command as a child process and prints one JSON line: peak
resident bytes of the child, CPU and wall seconds, source megabytes a second, the bound that the plan
promised, and the machine. The files are removed at the end unless ``--keep`` is given.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from child import measured
from make_checkpoint import make_checkpoint

from trapetum.runtime.environment import describe_environment


def measure(model: Path, out: Path, options: list[str]) -> dict[str, object]:
    """Run the command once."""
    command = [sys.executable, "-m", "trapetum", "quantize", str(model), "-o", str(out), "--json", *options]
    start = time.perf_counter()
    used = measured(*command)
    wall = time.perf_counter() - start
    report = json.loads(used.stdout)
    source = sum(p.stat().st_size for p in model.glob("*.safetensors"))
    return {
        "peak_rss_mib": round(used.peak_mib, 1),
        "promised_mib": round(report["predicted_memory"] / 2**20, 1),
        "wall_seconds": round(wall, 1),
        "cpu_seconds": round(used.cpu_seconds, 1),
        "source_bytes": source,
        "source_mb_per_second": round(source / 1e6 / wall, 1),
        "weights_per_cpu_second": round(report["parameters"] / used.cpu_seconds),
        "artifact_bytes": report["bytes"],
        "bpw": report["bpw"],
        "mean_relative_error": report["mean_relative_error"],
    }


def main() -> None:
    """Print a JSON line: peak memory, the plan's bound, times and throughput of ``trapetum quantize``.

    Usage: ``python benchmarks/memory.py [--gigabytes 6] [--folder DIR] [-- OPTIONS OF QUANTIZE]``.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=6.0)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--folder", type=Path, help="where the files go; a temporary folder by default")
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("options", nargs="*", help="after --: options of trapetum quantize")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        facts = make_checkpoint(folder / "model", int(args.gigabytes * 1e9), hidden=args.hidden)
        result = measure(folder / "model", folder / "out", args.options)
    finally:
        if not args.keep:
            shutil.rmtree(folder)
    here = describe_environment()
    machine = {
        "cpu": here["cpu"]["model"],
        "usable_cpus": here["cpu"]["usable"],
        "load": [round(x, 1) for x in os.getloadavg()],
        "python": here["python"],
        "versions": {k: here["packages"][k] for k in ("numpy", "numba")},
    }
    print(json.dumps({"benchmark": "memory", "options": args.options, **facts, **result, "machine": machine}))


if __name__ == "__main__":
    main()
