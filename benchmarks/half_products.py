"""Why llama.cpp's logits of an F16 file differ from those of the same numbers in F32: its products, not the file.

    python benchmarks/half_products.py [FAMILY ...]

ggml rounds the activations of a product to float16 where the weights are. The models of ``architectures.py`` have
weights that float16 holds, so both files mean the same numbers. Four columns for each family and each size of its
blocks: llama.cpp's F32 file against this runtime; its F16 file against its F32 file; the F16 file against this runtime
where that rounds the same activations (``RoundedModel``); and how many of the routers' choices that rounding turns.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import transformers
from architectures import CASES, PROMPTS, Floats, engine_answers, largest, log_softmax, make, prompt
from numpy.typing import NDArray

from trapetum.export import export_artifact
from trapetum.formats.source import open_source
from trapetum.kernels.cpu.pool import Pool
from trapetum.kernels.cpu.prepared import Activations
from trapetum.runtime.attention import attend
from trapetum.runtime.layers import Layer
from trapetum.runtime.matrix import Matrix
from trapetum.runtime.mla import LatentAttention
from trapetum.runtime.model import Model
from trapetum.runtime.routers import ROUTERS, Router
from trapetum.runtime.weights import Weights

SHOWN = ("Llama", "Qwen3-MoE", "DeepSeek-V3", "DeepSeek-V2-Lite", "Qwen3-Next", "Qwen3.5", "Qwen3.5-MoE")


def rounded(x: Floats) -> Floats:
    """To float16 and back."""
    return x.astype(np.float16).astype(np.float32)


class RoundedMatrix(Matrix):
    """A float16 matrix that rounds what it multiplies, as ggml does."""

    def __init__(self, matrix: Matrix) -> None:
        self.matrix, self.pool = matrix, matrix.pool
        self.rows, self.in_features = matrix.rows, matrix.in_features

    def tile(self, rows: slice, buffer: Floats | None = None) -> Floats:
        return self.matrix.tile(rows, buffer)

    def __call__(self, given: Floats | Activations) -> Floats:
        return self.matrix(rounded(given.x if isinstance(given, Activations) else given))


class RoundedWeights(Weights):
    """Weights whose float16 matrices round."""

    def matrix(self, part: str, layer: int | None = None, *, expert: int | None = None) -> Matrix:
        found = super().matrix(part, layer, expert=expert)
        half = self.source.dtype(self.place(part, layer, expert=expert).name) == np.float16
        return RoundedMatrix(found) if half else found


class RoundedLatents(LatentAttention):
    """Latent attention in llama.cpp's order: always absorbed, with both halves of ``kv_b`` as products of their own."""

    def _absorbs(self, total: int, new: int) -> bool:
        return True

    def _absorbed(self, q: Floats, seen: Floats, pool: Pool) -> Floats:
        dims = self.options
        halves = self.kv_b.matrix.tile(slice(0, self.kv_b.matrix.rows)).reshape(dims.heads, -1, dims.kv_lora)
        inner = np.einsum("bphn,hnl->bphl", rounded(q[..., : dims.nope]), halves[:, : dims.nope])
        wide = np.concatenate([inner, q[..., dims.nope :]], axis=-1)
        keys = seen[:, None]
        means = attend(wide, keys, keys[..., : dims.kv_lora], None, pool, scale=dims.scale)
        return np.einsum("bphl,hvl->bphv", rounded(means), halves[:, dims.nope :])


class RoundedModel(Model):
    """A model of an F16 file that computes as ggml does."""

    def _build(self) -> None:
        self.weights = RoundedWeights(self.source, self.config, self.pool, self.precision)
        super()._build()

    def _layer(self, number: int) -> Layer:
        layer = super()._layer(number)
        if isinstance(layer.mixer, LatentAttention):
            return replace(layer, mixer=RoundedLatents(**vars(layer.mixer)))
        return layer


def recording(router: Router, into: list[NDArray[np.intp]]) -> Router:
    """A router whose choices, in the order of experts, are put into a list."""

    def route(logits: Floats, *options: Any) -> tuple[NDArray[np.intp], Floats]:
        chosen, weights = router(logits, *options)
        into.append(np.sort(chosen))
        return chosen, weights

    return route


def answers(model: Model, ids: list[int]) -> tuple[list[Floats], list[NDArray[np.intp]]]:
    """Last logits after each prompt, and every choice of the routers on the way."""
    routes: list[NDArray[np.intp]] = []
    with patch.dict(ROUTERS, {name: recording(router, routes) for name, router in ROUTERS.items()}):
        return [model.logits(ids[:length])[-1] for length in PROMPTS], routes


def measure(name: str, seed: int, *, grown: bool) -> str:
    """One row of the table."""
    family, options = CASES[name]
    ids = prompt()
    with tempfile.TemporaryDirectory(prefix="tiny-") as place:
        folder = Path(place) / "tiny"
        make(folder, family, options, seed=seed, grown=grown)
        files = [
            export_artifact(folder, "gguf", Path(place) / f"{t}.gguf", gguf_type=t) for t in ("F32", "F16")
        ]
        whole, half = (engine_answers(file, ids) for file in files)
        with (
            Model(open_source(files[0]), Pool(1)) as exact,
            RoundedModel(open_source(files[1]), Pool(1)) as other,
        ):
            (logits, routes), (rounded_logits, rounded_routes) = answers(exact, ids), answers(other, ids)
    ours, theirs = ([log_softmax(x) for x in found] for found in (logits, rounded_logits))
    pairs = ((whole, ours), (half, whole), (theirs, ours), (half, theirs))
    figures = [f"{largest(a, b, logits):.1e}" for a, b in pairs]
    turned = sum(int((a != b).any(axis=-1).sum()) for a, b in zip(routes, rounded_routes, strict=True))
    choices = sum(len(a) for a in routes)
    size = "as large as the stream" if grown else "small"
    return f"| {name} | {size} | {seed} | " + " | ".join(figures) + f" | {turned} of {choices} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("family", nargs="*", default=list(SHOWN), help="names of the first column")
    parser.add_argument("--seeds", type=int, default=1, help="random models of each kind")
    given = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    print(
        "| family | blocks | seed | llama.cpp, F32 | its F16 - its F32 | rounded - ours | its F16 - rounded | turned |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name in given.family:
        for grown in (False, True):
            for seed in range(7, 7 + given.seeds):
                print(measure(name, seed, grown=grown), flush=True)


if __name__ == "__main__":
    main()
