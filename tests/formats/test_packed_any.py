"""Packed checkpoints of random names, shapes, dtypes and settings: read as they say, or refused in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from trapetum.errors import TrapetumError
from trapetum.formats.dtypes import dtype_code
from trapetum.formats.packed_ternary import open_checkpoint

DTYPES = (
    np.uint8, np.int8, np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2,
    ml_dtypes.float8_e8m0fnu,
)  # fmt: skip
STACK = "x.experts.gate_up_proj"
USUAL: dict[str, tuple[tuple[int, ...], Any]] = {
    "a.weight": ((130, 32), ml_dtypes.float8_e4m3fn),
    "a.weight_scale": ((130, 1), np.float32),
    "a.weight_scale_inv": ((2, 1), np.float32),
    "a.input_scale": ((), np.float32),
    "a.weight_blocks": ((4, 2, 16), np.uint8),
    "a.weight_scales": ((4, 2), np.uint8),
    STACK: ((2, 4, 6), np.float32),
    f"{STACK}_bias": ((2, 4), np.float32),
    f"{STACK}_scale_inv": ((2, 1, 1), np.float32),
    f"{STACK}_blocks": ((2, 4, 2, 16), np.uint8),
    f"{STACK}_scales": ((2, 4, 2), np.uint8),
}
METHODS = (None, "fp8", "mxfp4", 3, [], {}, "compressed-tensors", "modelopt", "fbgemm_fp8")
ODD: dict[str, tuple[Any, ...]] = {
    "weight_block_size": ([128, 128], [1, 1], [0, 1], "x", [1], None, [2.5, 1]),
    "format": ("float-quantized", 3, None),
    "config_groups": ({}, {"g": 3}, [], {"g": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}}),
    "scale_fmt": ("ue8m0", 3),
}  # fmt: skip


def write(folder: Path, rng: np.random.Generator) -> None:
    """A few of the usual tensors, half of them with other shapes or dtypes."""
    tensors = {}
    for name in rng.choice(list(USUAL), rng.integers(1, 6), replace=False).tolist():
        shape, dtype = USUAL[name]
        if rng.random() < 0.1:
            shape = tuple(rng.choice([0, 1, 2, 3, 16, 32, 130], rng.integers(0, 4)).tolist())
        if rng.random() < 0.1:
            dtype = DTYPES[rng.integers(len(DTYPES))]
        raw = rng.integers(0, 254, shape, dtype=np.uint8)
        with np.errstate(all="ignore"):
            tensors[name] = raw if dtype == np.uint8 else np.asarray(raw, np.float32).astype(dtype)
    header: dict[str, Any] = {}
    data = b""
    for name, values in tensors.items():
        end = len(data) + values.nbytes
        code = dtype_code(values.dtype)
        header[name] = {"dtype": code, "shape": list(values.shape), "data_offsets": [len(data), end]}
        data += values.tobytes()
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    usual = "mxfp4" if any("blocks" in n for n in tensors) else "fp8"
    settings: Any = {"quant_method": METHODS[rng.integers(len(METHODS))] if rng.random() < 0.4 else usual}
    for key, values in ODD.items():
        if rng.random() < 0.1:
            settings[key] = values[rng.integers(len(values))]
    if rng.random() < 0.1:
        settings = (3, "x", [], None)[rng.integers(4)]
    classes = (["GptOssForCausalLM"], ["LlamaForCausalLM"])[rng.integers(2)]
    (folder / "config.json").write_text(
        json.dumps({"architectures": classes, "quantization_config": settings})
    )


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # products of random scales overflow
def test_read_as_said_or_refused(tmp_path: Path) -> None:
    rng, read, unnamed = np.random.default_rng(0), 0, 0
    for _ in range(600):
        write(tmp_path, rng)
        try:
            with open_checkpoint(tmp_path) as found:
                for name in found.names():
                    values = found.load(name).values
                    assert (values.shape, values.dtype) == (found.shape(name), found.dtype(name))
                    if values.ndim > 1 and values.size:
                        rows = found.load(name, slice(1, 3)).values
                        expected = values.reshape(-1, values.shape[-1])[1:3]
                        assert rows.tobytes() == np.ascontiguousarray(expected).tobytes()
                        found.release(name, slice(1, 3))
                    read += found.is_packed(name)
        except TrapetumError as error:
            unnamed += str(tmp_path) not in error.message
    assert read > 50
    assert unnamed == 0
