"""Make a large Llama-shaped checkpoint of random bfloat16 weights, in shards, without ever holding one.

    python benchmarks/make_checkpoint.py FOLDER [--gigabytes 6] [--hidden 4096] [--shard-gigabytes 2] [--seed 0]

The head is untied, the vocabulary 32,000; as many layers as fit into the size are written. Values are Gaussian, 0.02
wide: rows of one 64 MiB pool of random weights, begun at a random place for each block, so that a disk and not the
generator sets the pace. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import ml_dtypes
import numpy as np

from trapetum.formats.safetensors_writer import (
    Entry,
    SafetensorsWriter,
    index_bytes,
    plan_shards,
    shard_names,
)

BLOCK = 4 << 20  # weights written at once


def shapes(hidden: int, layers: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a Llama model with 11/4 of the hidden size between the two halves of its MLP."""
    inter, kv, vocab = hidden * 11 // 4, hidden // 4, 32_000
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for i in range(layers):
        p = f"model.layers.{i}."
        out |= {
            p + "input_layernorm.weight": (hidden,),
            p + "self_attn.q_proj.weight": (hidden, hidden),
            p + "self_attn.k_proj.weight": (kv, hidden),
            p + "self_attn.v_proj.weight": (kv, hidden),
            p + "self_attn.o_proj.weight": (hidden, hidden),
            p + "post_attention_layernorm.weight": (hidden,),
            p + "mlp.gate_proj.weight": (inter, hidden),
            p + "mlp.up_proj.weight": (inter, hidden),
            p + "mlp.down_proj.weight": (hidden, inter),
        }
    return out | {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}


def make_checkpoint(
    folder: Path, size: int, *, hidden: int = 4096, shard_size: int = 2 * 10**9, seed: int = 0
) -> dict[str, int]:
    """Write the checkpoint.

    Parameters
    ----------
    folder : Path
        Created; must not exist.
    size : int
        Bytes of weights at most (one layer at least).
    hidden : int
        A multiple of 256.
    shard_size : int
        Data bytes a file.
    seed : int

    Returns
    -------
    dict
        ``bytes``, ``parameters``, ``layers``, ``tensors``, ``files``.
    """
    dtype = np.dtype(ml_dtypes.bfloat16)
    weigh = [sum(Entry(n, dtype, s).nbytes for n, s in shapes(hidden, k).items()) for k in (0, 1)]
    layers = max(1, (size - weigh[0]) // (weigh[1] - weigh[0]))
    entries = [Entry(n, dtype, s) for n, s in shapes(hidden, layers).items()]
    rng = np.random.default_rng(seed)
    pool = (rng.standard_normal(32 << 20, np.float32) * 0.02).astype(dtype)
    folder.mkdir(parents=True)
    groups = plan_shards([e.nbytes for e in entries], shard_size)
    files = {}
    for file, group in zip(shard_names(len(groups), numbered=True), groups, strict=True):
        files[file] = [entries[i] for i in group]
        with SafetensorsWriter(folder / file, files[file], {"format": "pt"}) as writer:
            for e in files[file]:
                width = e.shape[-1]
                left = e.nbytes // dtype.itemsize // width
                while left:
                    rows = min(left, max(1, BLOCK // width))
                    start = int(rng.integers(0, pool.size - rows * width))
                    writer.write(e.name, pool[start : start + rows * width].reshape(rows, width))
                    left -= rows
    (folder / "model.safetensors.index.json").write_bytes(index_bytes(files))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": hidden * 11 // 4,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 128,
        "num_key_value_heads": hidden // 512,
        "head_dim": 128,
        "vocab_size": 32_000,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    count = sum(e.nbytes for e in entries)
    return {
        "bytes": count,
        "parameters": count // 2,
        "layers": layers,
        "tensors": len(entries),
        "files": len(files),
    }


def main() -> None:
    """Write the checkpoint and print a JSON line: what it holds, and the seconds that it took.

    Usage: ``python benchmarks/make_checkpoint.py FOLDER [--gigabytes 6] [--hidden 4096]``.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gigabytes", type=float, default=6.0)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--shard-gigabytes", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    start = time.perf_counter()
    facts: dict[str, float] = {
        **make_checkpoint(
            args.folder,
            int(args.gigabytes * 1e9),
            hidden=args.hidden,
            shard_size=int(args.shard_gigabytes * 1e9),
            seed=args.seed,
        )
    }
    print(json.dumps({**facts, "seconds": round(time.perf_counter() - start, 1)}))


if __name__ == "__main__":
    main()
