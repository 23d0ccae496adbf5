"""Decoding on the card, end to end: a random Llama of 7B shape, codebooks, ternary or additive beside float16 (cuBLAS).

    python benchmarks/cuda_decode.py [--layers 32] [--sequences 1,4,8] [--schemes dense,codebook4,ternary]

Prints one JSON line a scheme and number of sequences: tokens a second, microseconds a step, share of the read
bandwidth, joules a token (NVML). One layer is made and its weights copied on the card, so every layer reads its own
memory. All schemes run through the same runtime and one CUDA graph a number of sequences.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from pathlib import Path

import numpy as np

from trapetum.kernels.cpu.pool import Pool
from trapetum.kernels.cuda.module import card, counters, import_cupy
from trapetum.runtime.cuda.model import CardModel
from trapetum.runtime.sampling import Sampling
from trapetum.tensors import AdditiveTensor, CodebookTensor, DenseTensor, TernaryTensor

MLP = ("gate_proj", "up_proj", "down_proj")
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", *MLP)


def random_tensor(scheme: str, rows: int, width: int, rng: np.random.Generator):
    """A matrix of unit gain in the layout of a scheme."""
    scale = width**-0.5
    if scheme == "dense":
        return DenseTensor((rng.standard_normal((rows, width), np.float32) * scale).astype(np.float16))
    if scheme in ("codebook4", "codebook8"):
        size = 16 if scheme == "codebook4" else 256
        codes = rng.integers(0, size, (rows, width), np.uint8)
        return CodebookTensor(codes, (np.sort(rng.standard_normal((rows, size))) * scale).astype(np.float16))
    if scheme == "ternary":
        codes = rng.integers(0, 3, (rows, width), np.uint8)
        return TernaryTensor(codes, np.full((rows, width // 128), scale, np.float16), 3)
    codes = rng.integers(0, 256, (2, width // 8, rows), np.uint8)
    books = (rng.standard_normal((2, 256, 8)) * scale).astype(np.float16)
    return AdditiveTensor(codes, books, np.ones(rows, np.float16))


class RandomSource:
    """One layer of a Llama of 7B shape with random weights, as a ``TensorSource``."""

    path, kind, notes = Path("random-7b"), "memory", ()

    def __init__(self, scheme: str, hidden: int, intermediate: int, vocab: int) -> None:
        rng = np.random.default_rng(0)
        self.config = {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden,
            "intermediate_size": intermediate, "num_hidden_layers": 1, "num_attention_heads": hidden // 128,
            "num_key_value_heads": hidden // 128, "vocab_size": vocab, "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
        }  # fmt: skip
        shapes = {"down_proj": (hidden, intermediate)}
        shapes |= dict.fromkeys(("gate_proj", "up_proj"), (intermediate, hidden))
        prefix = "model.layers.0."
        self._tensors = {
            f"{prefix}{'mlp' if n in MLP else 'self_attn'}.{n}.weight": random_tensor(
                scheme, *shapes.get(n, (hidden, hidden)), rng
            )
            for n in LINEAR
        }
        ones = DenseTensor(np.ones(hidden, np.float16))
        for name in (f"{prefix}input_layernorm", f"{prefix}post_attention_layernorm", "model.norm"):
            self._tensors[f"{name}.weight"] = ones
        self._tensors["model.embed_tokens.weight"] = random_tensor("dense", vocab, hidden, rng)
        self._tensors["lm_head.weight"] = random_tensor(scheme, vocab, hidden, rng)

    def names(self):
        """Tensor names."""
        return list(self._tensors)

    def shape(self, name):
        """Logical shape."""
        return self._tensors[name].shape

    def layout(self, name):
        """Layout of a tensor."""
        return self._tensors[name].layout

    def load(self, name, rows=None):
        """A tensor; never asked for a part."""
        return self._tensors[name]

    def release(self, name, rows=None):
        """Nothing is mapped."""

    def side_files(self):
        """None."""
        return []

    def tokenizer_file(self):
        """None."""

    def close(self):
        """Nothing is open."""


def copied(layer):
    """A layer whose weights lie elsewhere on the card."""
    twin = copy.copy(layer)
    attention = copy.copy(layer.attention)
    ffn = copy.copy(layer.ffn)
    for holder, names in ((attention, ("qkv", "o")), (ffn, ("gate_up", "down"))):
        for name in names:
            product = copy.copy(getattr(holder, name))
            matrices = []
            for matrix in product.matrices:
                matrix = copy.copy(matrix)
                key = "weight" if hasattr(matrix, "weight") else "data"
                setattr(matrix, key, getattr(matrix, key).copy())
                matrices.append(matrix)
            product.matrices = matrices
            object.__setattr__(holder, name, product)
    ffn.products = (ffn.gate_up, ffn.down)
    object.__setattr__(twin, "attention", attention)
    object.__setattr__(twin, "ffn", ffn)
    return twin


def read_bandwidth() -> float:
    """Bytes a second of a sum over 2 GiB."""
    cupy = import_cupy()
    array = cupy.ones(1 << 29, cupy.float32)
    times = []
    for _ in range(8):
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record()
        array.sum()
        end.record()
        end.synchronize()
        times.append(cupy.cuda.get_elapsed_time(begin, end) / 1e3)
    return array.nbytes / float(np.median(times))


def energy() -> float:
    """Joules that the card has used since it started; NaN without NVML."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(card().number)
        return pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3
    except Exception:  # no NVML, no such counter
        return float("nan")


def main() -> None:
    """Print a JSON line a scheme and number of sequences: tokens a second, share of the bandwidth, joules.

    Usage: ``python benchmarks/cuda_decode.py [--layers 32] [--sequences 1,4,8] [--schemes dense,...]``, on a card.
    """
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--intermediate", type=int, default=11008)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--sequences", default="1,4,8")
    parser.add_argument("--schemes", default="dense,codebook4,ternary")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=64)
    arguments = parser.parse_args()
    cupy = import_cupy()
    bandwidth = read_bandwidth()
    versions = {"card": card().name, "cupy": cupy.__version__, "driver": cupy.cuda.runtime.driverGetVersion()}
    print(json.dumps({"read_gb_s": round(bandwidth / 1e9), **versions}), flush=True)
    for scheme in arguments.schemes.split(","):
        begin = time.perf_counter()
        source = RandomSource(scheme, arguments.hidden, arguments.intermediate, arguments.vocab)
        model = CardModel(source, Pool())
        first = model.card_layers[0]
        model.card_layers = [first, *(copied(first) for _ in range(arguments.layers - 1))]
        object.__setattr__(model.config, "num_hidden_layers", arguments.layers)
        made = time.perf_counter() - begin
        for sequences in map(int, arguments.sequences.split(",")):
            prompts = [np.arange(arguments.prompt) + i for i in range(sequences)]
            list(model.decode(prompts, 4, Sampling(), [0] * sequences))
            compiled = dict(counters)
            stamps = []
            joules = energy()
            for _ in model.decode(prompts, arguments.tokens, Sampling(), [0] * sequences):
                stamps.append(time.perf_counter())
            joules = energy() - joules
            # the first token is the prompt's, the next two make buffers and capture the graph
            step = (stamps[-1] - stamps[4]) / (len(stamps) - 5)
            line = {
                "scheme": scheme,
                "sequences": sequences,
                "us_a_step": round(step * 1e6, 1),
                "tokens_s": round(sequences / step, 1),
                "bytes": model.nbytes,
                "of_read_bandwidth": round(model.nbytes / step / bandwidth, 3),
                "joules_a_token": round(joules / sequences / arguments.tokens, 3),
                "compiled": counters["compiled"] - compiled["compiled"],
                "made_s": round(made, 1),
            }
            print(json.dumps(line), flush=True)
        model.close()
        del model, source, first
        cupy.get_default_memory_pool().free_all_blocks()


if __name__ == "__main__":
    main()
