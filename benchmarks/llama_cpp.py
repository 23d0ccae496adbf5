"""Perplexity of exported GGUF files in llama.cpp against our own, window by window.

    python benchmarks/llama_cpp.py MODEL TEXT [WINDOWS [CASE ...]] [--calibrate OTHER_TEXT]

MODEL (a Hugging Face folder or a GGUF) is exported as it is and after several quantizations, all of them unless cases
are named; cases "calibrated" need the second text. Each file runs in llama.cpp (package ``xllamacpp``, one thread,
float32 cache) and in our runtime, over the same windows of 512 tokens, of which the second halves are scored.
llama.cpp's server gives log-probabilities of generated tokens only, so each token of the text is made the generated one
by a bias on its logit; what is reported is the probability before that bias. A token that is no whole character is
withheld by the server, and looked up among all probabilities instead.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import xllamacpp

import trapetum
from trapetum.export import export_artifact, plan_export
from trapetum.runtime.evaluate import perplexity

WINDOW = 512
_FOUR: dict[str, Any] = {"scheme": "ternary", "levels": 4, "group_size": 64, "effort": "high"}
_KNOWN: dict[str, Any] = {"calibrate": None, "calib_tokens": 32768, "sequential": True}
CASES: dict[str, tuple[dict[str, Any] | None, str | None]] = {  # quantize options, --gguf-type
    "as it is": (None, None),
    "F16": (None, "F16"),
    "ternary, 3 levels": ({"scheme": "ternary", "levels": 3}, "Q2_0"),
    "ternary, 4 levels": ({"scheme": "ternary", "levels": 4}, "Q2_0"),
    "k-means 4 bits, auto": ({"bits": 4}, None),
    "k-means 4 bits, auto with --source": ({"bits": 4}, None),
    "k-means 4 bits, Q4_K": ({"bits": 4}, "Q4_K"),
    "gguf:Q4_K": ({"scheme": "gguf:Q4_K"}, None),
    "gguf:IQ4_NL": ({"scheme": "gguf:IQ4_NL"}, None),
    "gguf:Q6_K": ({"scheme": "gguf:Q6_K"}, None),
    "4 levels g64, calibrated": ({**_FOUR, **_KNOWN}, "Q2_0"),
    "4 levels g128 + hadamard, calibrated, unfolded": (
        {**_FOUR, "group_size": 128, "hadamard": True, **_KNOWN},
        "F32",
    ),
}


class Server:
    """One file in llama.cpp."""

    def __init__(self, path: Path, vocab: int) -> None:
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx, params.n_parallel, params.warmup, params.verbosity = WINDOW + 8, 1, False, -1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self._server, self._vocab = xllamacpp.Server(params), vocab

    def _ask(self, ids: list[int], probabilities: int, bias: list[list[float]]) -> list[dict[str, Any]]:
        body = {
            "prompt": ids,
            "n_predict": 1,
            "temperature": 0,
            "n_probs": probabilities,
            "logit_bias": bias,
            "ignore_eos": False,
            "cache_prompt": True,
        }
        request = urllib.request.Request(
            self._server.listening_address + "/completion",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as answer:
            found: list[dict[str, Any]] = json.load(answer).get("completion_probabilities", [])
        return found

    def log_probability(self, ids: list[int], target: int) -> float:
        """Of ``target`` after ``ids``."""
        found = self._ask(ids, 1, [[target, 1000.0]])
        if found and found[0]["id"] == target:
            return float(found[0]["logprob"])
        # Forced towards some ordinary token, which is not withheld, and looked up in the full list.
        for other in range(300, 400):
            found = self._ask(ids, self._vocab, [[other, 1000.0]])
            if found:
                return next(float(e["logprob"]) for e in found[0]["top_logprobs"] if e["id"] == target)
        raise RuntimeError(f"llama.cpp gave no probabilities after {len(ids)} tokens")


def engine_perplexity(path: Path, vocab: int, windows: np.ndarray[Any, Any]) -> float:
    """Over the second halves of the windows, as llama-perplexity scores."""
    server = Server(path, vocab)
    losses = [
        -server.log_probability(window[:at].tolist(), int(window[at]))
        for window in windows
        for at in range(WINDOW // 2 + 1, WINDOW)
    ]
    return math.exp(float(np.mean(losses)))


def main(model: str, text: str, count: int, chosen: list[str], calibrate: str | None) -> None:
    """Print a Markdown table, one row a case: size, perplexities of both engines, their difference.

    Usage: ``python benchmarks/llama_cpp.py MODEL TEXT [WINDOWS [CASE ...]] [--calibrate OTHER_TEXT]``.
    """
    unknown = [label for label in chosen if label not in CASES]
    if unknown:
        sys.exit(f"case {unknown[0]!r} is unknown; known: {', '.join(CASES)}")
    with trapetum.load(model) as original:
        ids = np.array(original.tokenizer.encode(Path(text).read_text(encoding="utf-8")))
        vocab = original.config.vocab_size
    windows = ids[: count * WINDOW].reshape(count, WINDOW)
    print(
        "| file | bytes | bits a weight | ppl, ours | ppl, llama.cpp | difference |\n|---|---:|---:|---:|---:|---:|"
    )
    for label in chosen or CASES:
        options, kind = CASES[label]
        original_weights = model if label.endswith("--source") else None
        with tempfile.TemporaryDirectory() as folder:
            source = Path(model)
            if options is not None:
                if "calibrate" in options:
                    if calibrate is None:
                        continue
                    options = {**options, "calibrate": calibrate}
                source = Path(folder, "artifact")
                trapetum.quantize_model(model, source, **options)
                if kind == "F32":  # a stock engine cannot turn inputs: the rotation is undone in the weights
                    source = export_artifact(source, "hf", Path(folder, "dense"))
            target = Path(folder, "m.gguf")
            with plan_export(source, "gguf", target, gguf_type=kind, source=original_weights) as plan:
                path, size = plan.write(), plan.size
                weights = sum(math.prod(job.shape) for job in plan.jobs)
                stored = sum(job.nbytes for job in plan.jobs)
            with trapetum.load(path) as ours:
                expected = perplexity(ours, windows.reshape(-1), ctx=WINDOW, score="second-half")["ppl"]
            found = engine_perplexity(path, vocab, windows)
        print(
            f"| {label} | {size:,} | {8 * stored / weights:.2f} | {expected:.3f} | {found:.3f} | "
            f"{100 * (found / expected - 1):+.3f} % |",
            flush=True,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("windows", type=int, nargs="?", default=8)
    parser.add_argument("case", nargs="*")
    parser.add_argument("--calibrate")
    given = parser.parse_args()
    main(given.model, given.text, given.windows, given.case, given.calibrate)
