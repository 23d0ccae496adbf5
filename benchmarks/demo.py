"""The main job on the demo model, one command after another, as a person would type them.

``make demo`` runs this. Every command is printed before it runs; the last lines sum up what came out.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def trapetum(*arguments: str, capture: bool = False) -> str:
    """Print and run one command; its standard output when ``capture`` is set."""
    print(f"\n$ trapetum {' '.join(arguments)}", flush=True)
    command = [sys.executable, "-m", "trapetum", *arguments]
    done = subprocess.run(command, check=False, text=True, stdout=subprocess.PIPE if capture else None)
    if done.returncode:
        sys.exit(done.returncode)
    return done.stdout or ""


def measured(*arguments: str) -> dict[str, Any]:
    """Run one command with ``--json`` and return what it printed."""
    result: dict[str, Any] = json.loads(trapetum(*arguments, "--json", capture=True))
    return result


def main(model: str, text: str, out: str) -> None:
    """Press ``model`` into ``out``, measure it on ``text``, export it and let it speak; print what it came to.

    Usage: ``python benchmarks/demo.py MODEL TEXT OUT``.
    """
    start = time.perf_counter()
    artifact, folder = str(Path(out, "artifact")), str(Path(out, "cbk"))
    cbk = str(Path(folder, "model.cbk"))
    trapetum("quantize", model, "--bits", "4", "-o", artifact, "--overwrite")
    trapetum("export", artifact, "--format", "cbk", "-o", folder, "--overwrite")
    trapetum("verify", artifact, "--source", model)
    before = measured("perplexity", model, "--text", text)
    after = measured("perplexity", artifact, "--text", text)
    inspected = measured("inspect", artifact)
    spoken = trapetum("run", cbk, "--prompt", "The old house stood", "-n", "32", capture=True)

    source = sum(f.stat().st_size for f in Path(model).glob("*.safetensors"))
    pressed = sum(f.stat().st_size for f in Path(artifact).glob("*.safetensors"))
    print(
        f"\nweights      {source:,} bytes -> {pressed:,} bytes, {inspected['totals']['bpw']:.2f} bits a weight in all"
    )
    print(f"perplexity   {before['ppl']:.2f} -> {after['ppl']:.2f} on {after['tokens']:,} unseen tokens")
    print(f".cbk         {cbk}, {Path(cbk).stat().st_size:,} bytes")
    print(f"it says      {' '.join(spoken.split())}")
    print(f"             {time.perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main(*sys.argv[1:4])
