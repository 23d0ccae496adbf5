"""One large synthetic model by one process, by parts, and on a Dask cluster that loses a worker: one sha256.

    python benchmarks/spread.py [--gigabytes 6] [--folder DIR] [--parts 4] [--routes one,parts,cluster]

Prints a JSON line for each route: wall and CPU seconds, the SHA-256 of SHA256SUMS (which lists every file), and what
was killed. Parts run at the same time, one thread each; the cluster has two workers of one thread each on addresses of
the loopback, and the first is killed (SIGKILL) when a third of the tensors are there. Exits with 1 if the sums differ.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from make_checkpoint import make_checkpoint

PROGRAM = [sys.executable, "-m", "trapetum"]
DASK = "distributed.cli.dask_"


def start(command: list[str]) -> subprocess.Popen[bytes]:
    """A silent child."""
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def end(children: list[subprocess.Popen[bytes]]) -> None:
    """Wait for all; a failure ends this program."""
    for child in children:
        if child.wait():
            sys.exit(f"{child.args} ended with {child.returncode}")


def one(model: Path, out: Path, options: list[str], count: int) -> dict[str, object]:
    """A single process with all its threads."""
    end([start([*PROGRAM, "quantize", str(model), "-o", str(out), *options])])
    return {}


def parts(model: Path, out: Path, options: list[str], count: int) -> dict[str, object]:
    """Several processes, then the merge."""
    command = [*PROGRAM, "quantize", str(model), "-o", str(out), *options, "--threads", "1", "--part"]
    end([start([*command, f"{i}/{count}"]) for i in range(1, count + 1)])
    begun = time.perf_counter()
    end([start([*PROGRAM, "merge", str(out)])])
    return {"parts": count, "merge_seconds": round(time.perf_counter() - begun, 1)}


def cluster(model: Path, out: Path, options: list[str], count: int) -> dict[str, object]:
    """A scheduler and two workers, one of which dies at its work."""
    with tempfile.TemporaryDirectory(prefix="trapetum-spread-") as scratch:
        file = Path(scratch) / "scheduler.json"
        where = ["--scheduler-file", str(file), "--no-dashboard"]
        running = [
            start([sys.executable, "-m", f"{DASK}scheduler", "--host", "127.0.0.1", "--port", "0", *where])
        ]
        for address in ("127.0.0.2", "127.0.0.3"):
            options_of = ["--host", address, "--nthreads", "1", "--no-nanny", "--local-directory", scratch]
            running.append(start([sys.executable, "-m", f"{DASK}worker", *options_of, *where]))
        try:
            deadline = time.monotonic() + 60
            while not file.exists():
                if time.monotonic() > deadline:
                    sys.exit("the scheduler did not start")
                time.sleep(0.1)
            address = json.loads(file.read_text())["address"]
            job = start([*PROGRAM, "quantize", str(model), "-o", str(out), *options, "--scheduler", address])
            done = out / ".trapetum" / "parts"
            total = sum(len(header(p)) for p in model.glob("*.safetensors"))
            while job.poll() is None and len(list(done.glob("*.safetensors"))) < total // 3:
                time.sleep(0.05)
            before = len(list(done.glob("*.safetensors")))
            running[1].kill()
            end([job])
        finally:
            for process in running:
                process.kill()
                process.wait()
    return {"workers": 2, "killed_after_tensors": before, "tensors": total}


def header(path: Path) -> dict[str, object]:
    """Tensors of a weight file."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return {k: v for k, v in json.loads(file.read(length)).items() if k != "__metadata__"}


ROUTES = {"one": one, "parts": parts, "cluster": cluster}


def main() -> None:
    """Print a JSON line a route: seconds, the sum of sums, what was killed; exit with 1 if sums differ.

    Usage: ``python benchmarks/spread.py [--gigabytes 6] [--parts 4] [--routes one,parts,cluster]``.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=6.0)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--folder", type=Path, help="where the files go; a temporary folder by default")
    parser.add_argument("--parts", type=int, default=4)
    parser.add_argument("--routes", default=",".join(ROUTES))
    parser.add_argument("options", nargs="*", help="after --: options of trapetum quantize")
    args = parser.parse_args()
    sums = set()
    with tempfile.TemporaryDirectory(prefix="trapetum-spread-", dir=args.folder) as root:
        model = Path(root) / "model"
        make_checkpoint(model, int(args.gigabytes * 1e9), hidden=args.hidden)
        source = sum(p.stat().st_size for p in model.glob("*.safetensors"))
        for route in args.routes.split(","):
            out = Path(root) / route
            load, before = os.getloadavg()[0], resource.getrusage(resource.RUSAGE_CHILDREN)
            begun = time.perf_counter()
            facts = ROUTES[route](model, out, args.options, args.parts)
            wall = time.perf_counter() - begun
            used = resource.getrusage(resource.RUSAGE_CHILDREN)
            digest = hashlib.sha256((out / "SHA256SUMS").read_bytes()).hexdigest()
            sums.add(digest)
            cpu = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
            line = {
                "route": route,
                "wall_seconds": round(wall, 1),
                "cpu_seconds": round(cpu, 1),
                "load": round(load, 1),
            }
            line |= {"source_bytes": source, "sha256_of_sums": digest, **facts}
            print(json.dumps(line), flush=True)
            shutil.rmtree(out)
    if len(sums) > 1:
        sys.exit("the bytes differ")


if __name__ == "__main__":
    main()
