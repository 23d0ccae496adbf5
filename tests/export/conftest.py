"""Tiny random models as folders, and llama.cpp itself as the judge of what is written for it."""

from __future__ import annotations

import json
import math
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fuzz_inputs import spm_tokenizer

import trapetum
from trapetum.formats.safetensors_writer import Entry, SafetensorsWriter
from trapetum.models.architectures import ARCHITECTURES
from trapetum.models.config import parse_config

VOCAB = 512
BASE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture(scope="session")
def artifact(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Path:
    """The demo model at 4 bits; tests must not change it."""
    out = tmp_path_factory.mktemp("export") / "artifact"
    trapetum.quantize_model(demo_model, out, bits=4)
    return out


def write_model(
    folder: Path,
    family: str = "llama",
    *,
    biases: tuple[str, ...] = (),
    edit: Callable[[str, np.ndarray], np.ndarray] | None = None,
    tokenizer: dict[str, Any] | None = None,
    seed: int = 0,
    **changes: Any,
) -> Path:
    """A random model whose logits have a spread of about one, in float32.

    What blocks add to the residual stream is small beside it, as in GPT-2's initialisation and in trained models: one
    where every block is as large as the stream turns a rounded activation into another model (docs/architectures.md).
    """
    classes = list(ARCHITECTURES[family].classes[:1])
    config = {"architectures": classes, "model_type": family, **BASE, **changes}
    parsed = parse_config(config)
    shapes = dict(parsed.architecture.expected_shapes(parsed))
    for part in biases:
        for layer in range(parsed.num_hidden_layers):
            stacked = parsed.architecture.module(part).stacked
            rows = shapes[parsed.architecture.tensor_name(part, layer)][: 2 if stacked else 1]
            shapes[parsed.architecture.tensor_name(part, layer, suffix="bias")] = rows
    rng = np.random.default_rng(seed)
    tensors, small = {}, (2 * parsed.num_hidden_layers) ** -0.5
    for name, shape in shapes.items():
        wide = "embed" not in name or parsed.tie_word_embeddings
        scale = 0.1 if len(shape) == 1 else 1 / math.sqrt(shape[-1]) if wide else 1.0
        module = parsed.architecture.module(parsed.architecture.role(name).part)
        if "post_norm" in module.part:
            scale, mean = scale * small, small
        else:
            mean = "norm" in name
            scale *= small if module.kind in ("o", "down") and len(shape) > 1 else 1.0
        values = (rng.standard_normal(shape) * scale + mean - module.offset).astype(np.float32)
        tensors[name] = values if edit is None else edit(name, values)
    folder.mkdir(parents=True, exist_ok=True)
    entries = [Entry(n, v.dtype, v.shape) for n, v in tensors.items()]
    with SafetensorsWriter(folder / "model.safetensors", entries) as writer:
        for name, values in tensors.items():
            writer.write(name, values)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer or spm_tokenizer(parsed.vocab_size)))
    return folder


class Engine:
    """A GGUF file in llama.cpp: one thread, float32 cache, no flash attention."""

    def __init__(self, path: Path, vocab: int, context: int) -> None:
        import xllamacpp as x

        params = x.CommonParams()
        params.model.path = str(path)
        params.n_ctx, params.n_parallel, params.warmup, params.verbosity = context, 1, False, -1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
        params.cache_type_k = params.cache_type_v = x.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = x.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.server, self.vocab = x.Server(params), vocab

    def log_probabilities(self, ids: list[int]) -> np.ndarray:
        """float64 [vocab]: of the token after ``ids``."""
        answer = self.server.handle_completions(
            {
                "prompt": ids,
                "max_tokens": 1,
                "n_predict": 1,
                "temperature": 0,
                "n_probs": self.vocab,
                "logprobs": self.vocab,
                "cache_prompt": False,
                "ignore_eos": True,
            }
        )
        out = np.full(self.vocab, np.nan)
        for entry in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]:
            out[entry["id"]] = entry["logprob"]
        return out

    def differences(self, model: trapetum.Model, prompts: Sequence[list[int]]) -> np.ndarray:
        """Its log-probabilities after each prompt less ours, in units of the spread of our logits; one array."""
        found = []
        for ids in prompts:
            ours = model.logits(ids)[-1].astype(np.float64)
            spread = ours.std()
            ours -= np.log(np.exp(ours - ours.max()).sum()) + ours.max()
            found.append((self.log_probabilities(ids) - ours) / spread)
        return np.concatenate(found)

    def worst(self, model: trapetum.Model, prompts: Sequence[list[int]]) -> float:
        """The largest of :meth:`differences`."""
        return float(np.abs(self.differences(model, prompts)).max())

    def post(self, path: str, **body: Any) -> Any:
        """A request to its server."""
        request = urllib.request.Request(
            self.server.listening_address + path,
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)

    def tokenize(self, text: str, *, special: bool = True, mark: bool = False) -> list[int]:
        return self.post("/tokenize", content=text, parse_special=special, add_special=mark)["tokens"]

    def generate(self, ids: list[int], count: int) -> list[int]:
        answer = self.post(
            "/completion",
            prompt=ids,
            n_predict=count,
            temperature=0,
            top_k=1,
            ignore_eos=True,
            return_tokens=True,
            cache_prompt=False,
        )
        return answer["tokens"]


@pytest.fixture
def llama_cpp() -> Callable[..., Engine]:
    """Open a GGUF file in llama.cpp; the test is skipped without it."""
    pytest.importorskip("xllamacpp")

    def start(path: Path, vocab: int = VOCAB, context: int = 128) -> Engine:
        return Engine(path, vocab, context)

    return start


@pytest.fixture
def tiny_model(tmp_path: Path) -> Callable[..., Path]:
    """Write a tiny random model; see :func:`write_model`."""

    def make(family: str = "llama", **options: Any) -> Path:
        name = family.replace("3", "")  # of a model called phi3, llama.cpp expects certain tokens
        return write_model(tmp_path / f"tiny-{name}", family, **options)

    return make


@pytest.fixture
def spm() -> dict[str, Any]:
    """As many tokens as :data:`BASE` has rows."""
    return spm_tokenizer(VOCAB)
