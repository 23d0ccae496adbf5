"""How long the kernels of each layout take to compile: the section "First start" of docs/benchmarks.md.

    python benchmarks/first_start.py [MODEL] [--work FOLDER] [LABEL ...]

MODEL (a Hugging Face folder; a small random Llama when left out) is quantized to each layout. For each, two child
processes load it, read a prompt and write four tokens: the first with an empty cache of compiled kernels, the second
with what that one left. CPU seconds and wall seconds of each whole process, imports included.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from child import measured

import trapetum

FILES: dict[str, dict[str, Any] | None] = {
    "as it is": None,
    "codebook K=16": {"bits": 4},
    "codebook K=256": {"bits": 8},
    "ternary": {"scheme": "ternary"},
    "additive": {"scheme": "additive"},
    "Q4_0": {"scheme": "gguf:Q4_0"},
    "Q4_K": {"scheme": "gguf:Q4_K"},
    "Q6_K": {"scheme": "gguf:Q6_K"},
    "Q8_0": {"scheme": "gguf:Q8_0"},
}
CODE = """
import sys
import trapetum
with trapetum.load(sys.argv[1], precision="fast") as model:
    model.generate([(7 * i + 3) % 1000 for i in range(39)], 4, stop_ids=())
"""


def start(path: Path, cache: Path) -> tuple[float, float]:
    """(CPU seconds, wall seconds) of a child."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(cache)}
    begin = time.perf_counter()
    used = measured(sys.executable, "-c", CODE, str(path), env=environment)
    return used.cpu_seconds, time.perf_counter() - begin


def main() -> None:
    """Print a row a layout: seconds of a first process, which compiles, and of a second one.

    Usage: ``python benchmarks/first_start.py [MODEL] [--work FOLDER] [LABEL ...]``.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("labels", nargs="*", metavar="LABEL")
    parser.add_argument("--work", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = options.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        model = options.model
        if model is None:
            sys.path.insert(0, str(Path(__file__).parent))
            from make_checkpoint import make_checkpoint

            model = work / "random"
            if not model.exists():
                make_checkpoint(model, 90_000_000, hidden=512)
        print(
            "| layout | cold, CPU s | cold, wall s | warm, CPU s | warm, wall s |\n|---|---:|---:|---:|---:|"
        )
        for label in options.labels or FILES:
            given, path = FILES[label], model
            if given is not None:
                path = work / label.replace(" ", "-")
                if not path.exists():
                    trapetum.quantize_model(model, path, **given)
            with tempfile.TemporaryDirectory() as cache:
                times = [*start(path, Path(cache)), *start(path, Path(cache))]
            print(f"| {label} | " + " | ".join(f"{t:.1f}" for t in times) + " |", flush=True)


if __name__ == "__main__":
    main()
