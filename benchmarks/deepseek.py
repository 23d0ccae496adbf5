"""Peak memory of a DeepSeek-shaped checkpoint in FP8 blocks going straight to a .cbk.

    python benchmarks/deepseek.py [--gigabytes 4] [--folder DIR] [--keep] [-- OPTIONS OF QUANTIZE]

Makes a checkpoint of random F8_E4M3 weights with scales of 128 x 128 blocks (the last blocks of a row are ragged), as
many layers of 64 experts as fit; runs ``trapetum quantize --export cbk --drop-artifact`` as a child process and prints
one JSON line: peak resident bytes of the child, CPU and wall seconds, sizes, and the machine. The files
are removed at the end unless ``--keep`` is given.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from child import measured

from trapetum.formats.safetensors_writer import (
    Entry,
    SafetensorsWriter,
    index_bytes,
    plan_shards,
    shard_names,
)
from trapetum.models.config import parse_config
from trapetum.runtime.environment import describe_environment

FP8, BF16, F32 = (np.dtype(t) for t in (ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16, np.float32))
BLOCK = 128
CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 32768,
    "hidden_size": 2048,
    "intermediate_size": 5504,
    "moe_intermediate_size": 1472,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]},
}


def entries(layers: int) -> list[Entry]:
    """Tensors in the order of a file: projections and feed-forwards in FP8 with scales, the rest in bfloat16."""
    config = parse_config({**CONFIG, "num_hidden_layers": layers})
    found = []
    for name, shape in config.architecture.expected_shapes(config).items():
        packed = "_proj" in name
        found.append(Entry(name, FP8 if packed else F32 if "correction" in name else BF16, shape))
        if packed:
            found.append(Entry(f"{name}_scale_inv", F32, tuple(-(-n // BLOCK) for n in shape)))
    return found


def make(folder: Path, size: int, *, shard_size: int = 10**9, seed: int = 0) -> dict[str, int]:
    """Write a checkpoint of about ``size`` bytes."""
    one, two = (sum(e.nbytes for e in entries(layers)) for layers in (2, 3))
    layers = 2 + max(0, -(-(size - one) // (two - one)))
    every, rng = entries(layers), np.random.default_rng(seed)
    pool = (rng.standard_normal(16 << 20, np.float32) * 100).clip(-440, 440)
    pools = {FP8: pool.astype(FP8), BF16: (pool * 2e-4).astype(BF16), F32: np.abs(pool) * 2e-6}
    folder.mkdir(parents=True)
    groups = plan_shards([e.nbytes for e in every], shard_size)
    files = {}
    for file, group in zip(shard_names(len(groups), numbered=True), groups, strict=True):
        files[file] = [every[i] for i in group]
        with SafetensorsWriter(folder / file, files[file], {"format": "pt"}) as writer:
            for e in files[file]:
                width, left = e.shape[-1], e.nbytes // e.dtype.itemsize // e.shape[-1]
                while left:
                    rows = min(left, max(1, (4 << 20) // width))
                    start = int(rng.integers(0, pool.size - rows * width))
                    writer.write(e.name, pools[e.dtype][start : start + rows * width].reshape(rows, width))
                    left -= rows
    (folder / "model.safetensors.index.json").write_bytes(index_bytes(files))
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": layers}, indent=1))
    return {"layers": layers, "source_bytes": sum(e.nbytes for e in every), "tensors": len(every)}


def measure(model: Path, out: Path, options: list[str]) -> dict[str, object]:
    """Run the command once."""
    command = [sys.executable, "-m", "trapetum", "quantize", str(model), "-o", str(out), "--json"]
    command += ["--export", "cbk", "--drop-artifact", *options]
    start = time.perf_counter()
    used = measured(*command)
    wall = time.perf_counter() - start
    report = json.loads(used.stdout)
    return {
        "peak_rss_mib": round(used.peak_mib, 1),
        "wall_seconds": round(wall, 1),
        "cpu_seconds": round(used.cpu_seconds, 1),
        "cbk_bytes": report["export"]["size"],
        "mean_relative_error": report["mean_relative_error"],
    }


def main() -> None:
    """Print a JSON line: peak memory, times and sizes of the straight way to a .cbk.

    Usage: ``python benchmarks/deepseek.py [--gigabytes 4] [--folder DIR] [-- OPTIONS OF QUANTIZE]``.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--folder", type=Path, help="where the files go; a temporary folder by default")
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("options", nargs="*", help="after --: options of trapetum quantize")
    args = parser.parse_args()
    root = args.folder or Path(tempfile.mkdtemp(prefix="trapetum-deepseek-"))
    try:
        facts = make(root / "model", int(args.gigabytes * 1e9))
        result = measure(root / "model", root / "artifact", args.options)
        print(json.dumps({**facts, **result, "environment": describe_environment()}))
    finally:
        if not args.keep:
            shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
