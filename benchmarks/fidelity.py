"""What calibration is worth: mean KL of one model quantized with and without knowledge of its inputs.

    python benchmarks/fidelity.py MODEL --calibrate TEXT --text OTHER_TEXT [--characters 60000]

Prints one JSON line a method. The text for evaluation must not be the one for calibration.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from trapetum.progress import Progress
from trapetum.quantize.job import quantize_model
from trapetum.quantize.statistics import collect_importance, collect_moments
from trapetum.runtime.calibrate import TOKENS
from trapetum.runtime.evaluate import compare
from trapetum.runtime.model import load

_FOUR: dict[str, Any] = {"scheme": "ternary", "levels": 4, "group_size": 64}
METHODS: dict[str, tuple[str | None, dict[str, Any]]] = {
    "4 bits": (None, {"bits": 4}),
    "4 bits, imatrix": ("imatrix", {"bits": 4}),
    "4 bits, moments": ("moments", {"bits": 4}),
    "4 bits, moments, high": ("moments", {"bits": 4, "effort": "high"}),
    "3 bits": (None, {"bits": 3}),
    "3 bits, moments, high": ("moments", {"bits": 3, "effort": "high"}),
    "4-level g64": (None, _FOUR),
    "4-level g64, moments, high": ("moments", {**_FOUR, "effort": "high"}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--calibrate", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--characters", type=int, default=None)
    given = parser.parse_args()
    text = given.text.read_text("utf-8")
    if text == given.calibrate.read_text("utf-8"):
        parser.error("calibration and evaluation must not see the same text")
    text = text[: given.characters]
    with tempfile.TemporaryDirectory() as work, load(given.model) as original:
        files = {"imatrix": Path(work) / "imatrix.gguf", "moments": Path(work) / "moments"}
        collect_importance(given.model, given.calibrate, files["imatrix"], tokens=TOKENS, progress=Progress())
        collect_moments(given.model, given.calibrate, files["moments"], tokens=TOKENS, progress=Progress())
        for name, (known, options) in METHODS.items():
            start = time.process_time()
            report = quantize_model(
                given.model,
                Path(work) / "out",
                imatrix=None if known is None else files[known],
                overwrite=True,
                **options,
            )
            seconds = time.process_time() - start
            with load(Path(work) / "out") as stored:
                result = compare(original, stored, text)
            found = {"kl": result["kl_mean"], "ppl": result["ppl_b"], "top1": result["top1_agreement"]}
            print(
                json.dumps({"method": name, "bpw": report.plan.quantized_bpw, "cpu_s": seconds, **found}),
                flush=True,
            )


if __name__ == "__main__":
    main()
