"""Tokens a second of whole models, ours and llama.cpp's in turns: the section "Whole models" of docs/benchmarks.md.

    python benchmarks/decode.py [MODEL] [--threads N] [--tokens 96] [--rounds 5] [--cpu-time] [--work FOLDER]

MODEL is a Hugging Face folder with a tokenizer; left out, a random Llama of 300 M parameters is made (hidden 1024). It
is quantized to each file of ``FILES``; every file runs in our runtime and, where it is a GGUF, in llama.cpp (package
``xllamacpp``), each generating the same number of tokens after the same prompt, one after the other in every round (A B
C A B C ...). Medians of tokens a second after the first token; the prompt is not counted. ``--cpu-time`` counts CPU
time of the process instead of the wall, for a busy machine, with one thread. Needs 3 GB of memory; with ``--work`` the
files stay there and are used again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import trapetum
from trapetum.export import plan_export
from trapetum.runtime.model import Model

PROMPT = 32
# label -> options of quantize_model, options of the export (None: the artifact itself)
FILES: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "4 bits": ({"bits": 4}, None),
    "IQ4_NL": ({"scheme": "gguf:IQ4_NL"}, {}),
    "Q4_0": ({"scheme": "gguf:Q4_0"}, {}),
    "Q4_K": ({"scheme": "gguf:Q4_K"}, {}),
    "ternary": ({"scheme": "ternary"}, None),
    "Q2_0": ({"scheme": "ternary"}, {"gguf_type": "Q2_0"}),
    "additive 2 bits": ({"bits": 2, "scheme": "additive"}, None),
}
# what is held against what: ours, llama.cpp's
PAIRS = (
    ("4 bits", "IQ4_NL"),
    ("4 bits", "Q4_0"),
    ("4 bits", "Q4_K"),
    ("Q4_0", "Q4_0"),
    ("Q4_K", "Q4_K"),
    ("Q2_0", "Q2_0"),
)


def make_model(folder: Path) -> Path:
    """A random Llama of 300 M parameters, with a tokenizer that is trained on this repository's pages."""
    from tokenizers import ByteLevelBPETokenizer

    sys.path.insert(0, str(Path(__file__).parent))
    from make_checkpoint import make_checkpoint

    make_checkpoint(folder, 600_000_000, hidden=1024)
    tokenizer = ByteLevelBPETokenizer()
    pages = sorted(str(page) for page in Path(__file__).parents[1].glob("docs/*.md"))
    tokenizer.train(pages, vocab_size=2000, special_tokens=["<|end|>"], show_progress=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def make_file(model: Path, label: str, work: Path) -> Path:
    """The artifact or GGUF of a label."""
    options, export = FILES[label]
    artifact = work / ("artifact " + "-".join(str(value).replace(":", "-") for value in options.values()))
    if not artifact.exists():
        trapetum.quantize_model(model, artifact, **options)
    if export is None:
        return artifact
    target = work / f"{label}.gguf"
    if not target.exists():
        with plan_export(artifact, "gguf", target, **export) as plan:
            plan.write()
    return target


class Ours:
    """A file in our runtime."""

    def __init__(self, path: Path, threads: int, cache_type: str) -> None:
        self._model: Model = trapetum.load(path, threads=threads, precision="fast", cache_type=cache_type)

    def __call__(self, prompt: list[int], count: int, clock: Callable[[], float]) -> float:
        """Seconds a token after the first."""
        times: list[float] = []
        self._model.generate(prompt, count, stop_ids=(), on_token=lambda token, text: times.append(clock()))
        return (times[count - 1] - times[0]) / (count - 1)


class Llama:
    """A file in llama.cpp's server, which runs in this process."""

    def __init__(self, path: Path, threads: int, cache_type: str) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx, params.n_parallel, params.warmup, params.verbosity = 512, 1, True, -1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        kind = {"f16": xllamacpp.ggml_type.GGML_TYPE_F16, "f32": xllamacpp.ggml_type.GGML_TYPE_F32}[
            cache_type
        ]
        params.cache_type_k = params.cache_type_v = kind
        self._server = xllamacpp.Server(params)

    def __call__(self, prompt: list[int], count: int, clock: Callable[[], float]) -> float:
        """Seconds a token: as the server counts them, or by the clock the difference of two lengths."""
        if clock is time.perf_counter:
            found = self._ask(prompt, count)["timings"]
            return float(found["predicted_ms"]) / 1e3 / float(found["predicted_n"])
        start = clock()
        self._ask(prompt, 1)
        first = clock()
        self._ask(prompt, count)
        return ((clock() - first) - (first - start)) / (count - 1)

    def _ask(self, prompt: list[int], count: int) -> dict[str, Any]:
        body = {
            "prompt": prompt,
            "n_predict": count,
            "temperature": 0,
            "ignore_eos": True,
            "cache_prompt": False,
        }
        request = urllib.request.Request(
            self._server.listening_address + "/completion",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as answer:
            found: dict[str, Any] = json.load(answer)
        return found


def measure(runs: dict[str, Any], options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds a token of every round of every run, in turns; the first round is not counted."""
    clock = time.process_time if options.cpu_time else time.perf_counter
    prompt = [(7 * i + 3) % 1000 for i in range(PROMPT)]
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(options.rounds + 1):
        for name, run in runs.items():
            found = run(prompt, options.tokens, clock)
            if number:
                seconds[name].append(found)
    return seconds


def report(seconds: dict[str, list[float]], sizes: dict[str, int]) -> None:
    """Two tables in Markdown."""
    print("| file | MB | tokens/s, ours | tokens/s, llama.cpp |\n|---|---:|---:|---:|")
    for label in FILES:
        cells = [f"{sizes[label] / 1e6:.0f}"] if label in sizes else [""]
        for engine in ("ours", "llama.cpp"):
            found = seconds.get(f"{engine} {label}")
            cells.append("" if found is None else f"{1 / statistics.median(found):.1f}")
        print(f"| {label} | " + " | ".join(cells) + " |")
    print("\n| ours | against llama.cpp's | ratio of the rounds, median |\n|---|---|---:|")
    for mine, theirs in PAIRS:
        pair = zip(seconds.get(f"llama.cpp {theirs}", []), seconds.get(f"ours {mine}", []))
        ratios = [b / a for b, a in pair]
        if ratios:
            print(f"| {mine} | {theirs} | {statistics.median(ratios):.2f} |")


def _bytes(path: Path) -> int:
    files = [path] if path.is_file() else [f for f in path.rglob("*") if f.suffix == ".safetensors"]
    return sum(file.stat().st_size for file in files)


def main() -> None:
    """Print two tables: tokens a second of each file in both engines, and the ratios of pairs.

    Usage: ``python benchmarks/decode.py [MODEL] [--threads N] [--tokens 96] [--rounds 5] [--work FOLDER]``.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cache-type", choices=("f16", "f32"), default="f16")
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--work", type=Path)
    parser.add_argument(
        "--files", nargs="*", default=[label for label in FILES if label != "additive 2 bits"]
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = options.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        model = options.model or work / "random"
        if not model.exists():
            make_model(model)
        runs: dict[str, Any] = {}
        sizes = {}
        for label in options.files:
            path = make_file(model, label, work)
            sizes[label] = _bytes(path)
            runs[f"ours {label}"] = Ours(path, options.threads, options.cache_type)
            if path.suffix == ".gguf":
                runs[f"llama.cpp {label}"] = Llama(path, options.threads, options.cache_type)
        report(measure(runs, options), sizes)


if __name__ == "__main__":
    main()
