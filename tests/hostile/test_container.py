"""Broken and odd weight files, as users met them: the verdict of opening a model folder, and its words.

Every case is one report from the field: a download that stopped, a pointer instead of weights, a writer with its own
ideas. A refusal comes before any weight is read, and names the file, the tensor where there is one, and what was
found. Whatever is accepted has the right values, bit for bit.
"""

from __future__ import annotations

import json
import os
import struct
import tracemalloc
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from trapetum.errors import FormatError, TrapetumError
from trapetum.formats.checkpoint import Checkpoint

FILE = "model.safetensors"
LAYER = "model.layers.0.self_attn"
Fault = Callable[[Any], list[str]]
REFUSED: dict[str, Fault] = {}


def refused(fault: Fault) -> Fault:
    """Register a case: it breaks the model and returns what the message must mention."""
    REFUSED[fault.__name__] = fault
    return fault


@refused
def lfs_pointer_as_second_shard(model: Any) -> list[str]:
    model.write_shards(model.tensors())
    path = model.folder / "model-00002-of-00002.safetensors"
    size = path.stat().st_size
    path.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize {size}\n")
    return [path.name, "Git LFS pointer", f"{size} bytes"]


@refused
def header_length_of_2_to_62(model: Any) -> list[str]:
    path = model.write(model.tensors(), tail=bytes(1 << 20))
    content = path.read_bytes()
    path.write_bytes(struct.pack("<Q", 1 << 62) + content[8:])
    return [FILE, str(1 << 62), str(len(content))]


@refused
def header_length_past_the_end(model: Any) -> list[str]:
    path = model.write(model.tensors())
    content = path.read_bytes()
    path.write_bytes(struct.pack("<Q", len(content) + 1) + content[8:])
    return [FILE, str(len(content) + 1), str(len(content))]


@refused
def last_shard_lost_its_tail(model: Any) -> list[str]:
    model.write_shards(model.tensors())
    path = model.folder / "model-00002-of-00002.safetensors"
    size = path.stat().st_size
    os.truncate(path, size - 100)
    return [path.name, f"{size} bytes expected", f"{size - 100} found", "lm_head.weight"]


@refused
def last_shard_ends_inside_its_header(model: Any) -> list[str]:
    model.write_shards(model.tensors())
    path = model.folder / "model-00002-of-00002.safetensors"
    os.truncate(path, 40)
    return [path.name, "40 bytes"]


@refused
def trailing_bytes(model: Any) -> list[str]:
    path = model.write(model.tensors(), tail=b"\xaa" * 4096)
    return [FILE, "4096 bytes at the end", str(path.stat().st_size)]


@refused
def hole_between_tensors(model: Any) -> list[str]:
    arrays = model.tensors()
    names = list(arrays)
    arrays = (
        {n: arrays[n] for n in names[:3]}
        | {"hole": np.zeros(64, np.uint8)}
        | {n: arrays[n] for n in names[3:]}
    )
    header = model.header(arrays)
    del header["hole"]
    model.write(arrays, header=header)
    return [FILE, "64 bytes", names[2], names[3]]


@refused
def two_tensors_share_their_bytes(model: Any) -> list[str]:
    arrays = model.tensors()
    header = model.header(arrays)
    header[f"{LAYER}.k_proj.weight"]["data_offsets"] = header[f"{LAYER}.v_proj.weight"]["data_offsets"]
    model.write(arrays, header=header)
    return [FILE, "k_proj", "v_proj"]


@refused
def twice_the_rows_that_the_bytes_hold(model: Any) -> list[str]:
    arrays = model.tensors()
    header = model.header(arrays)
    header["lm_head.weight"]["shape"] = [96, 64]
    model.write(arrays, header=header)
    return [FILE, "lm_head.weight", "12288", "6144"]


@refused
def shape_whose_product_wraps(model: Any) -> list[str]:
    arrays = model.tensors()
    header = model.header(arrays)
    header["lm_head.weight"]["shape"] = [1 << 62, 4]
    model.write(arrays, header=header)
    return [FILE, "lm_head.weight", str(1 << 65)]


@refused
def header_padded_with_nul(model: Any) -> list[str]:
    arrays = model.tensors()
    model.write(arrays, header=json.dumps(model.header(arrays)).encode() + bytes(3))
    return [FILE, "3 NUL bytes"]


@refused
def unknown_dtype(model: Any) -> list[str]:
    arrays = model.tensors()
    header = model.header(arrays)
    header["lm_head.weight"]["dtype"] = "F6_E2M3"
    model.write(arrays, header=header)
    return [FILE, "lm_head.weight", "F6_E2M3", "BF16"]


@refused
def the_same_tensor_twice_in_a_header(model: Any) -> list[str]:
    arrays = model.tensors()
    text = json.dumps(model.header(arrays))
    model.write(arrays, header=(text[:-1] + "," + text[1:]).encode())
    return [FILE, "model.embed_tokens.weight", "twice"]


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("mapped", [True, False])
def test_refused(case: str, mapped: bool, model: Any) -> None:
    mentions = REFUSED[case](model)
    tracemalloc.start()
    with pytest.raises(TrapetumError) as caught:
        Checkpoint.open(model.folder, mmap=mapped)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    message = caught.value.message
    assert [m for m in mentions if m not in message] == []
    assert "\n" not in message
    assert peak < 8 << 20  # whatever size is declared, nothing of it is allocated


def test_valid_oddities_are_accepted(model: Any) -> None:
    """Header in reverse order, empty metadata, an empty fp8 tensor, a 0-d scalar, three dtypes."""
    arrays = model.tensors()
    arrays["model.embed_tokens.weight"] = arrays["model.embed_tokens.weight"].astype(np.float32)
    arrays["model.norm.weight"] = arrays["model.norm.weight"].astype(np.float16)
    arrays["scaled_fp8"] = np.zeros(0, ml_dtypes.float8_e4m3fn)
    arrays["model.logit_scale"] = np.array(0.0625, np.float32)
    model.write(arrays, header={"__metadata__": {}} | dict(reversed(model.header(arrays).items())))
    with Checkpoint.open(model.folder) as source:
        assert source.names() == list(arrays)
        assert source.notes == []
        assert source.packed_format() is None
        for name, expected in arrays.items():
            found = source.load(name)
            assert (found.shape, source.dtype(name)) == (expected.shape, expected.dtype)
            assert found.values.tobytes() == expected.tobytes()


def test_many_dimensions_and_leading_ones_survive(model: Any) -> None:
    arrays = model.tensors()
    arrays["model.visual.patch_embed.proj.weight"] = model.palette(32, 3, 2, 4, 4)
    arrays["model.visual.pos_embed"] = model.palette(1, 16, 32)
    model.write(arrays)
    with Checkpoint.open(model.folder) as source:
        for name in list(arrays)[-2:]:
            assert source.shape(name) == source.load(name).shape == arrays[name].shape
            rows = source.load(name, slice(3, 9)).values
            assert rows.tobytes() == arrays[name].reshape(-1, arrays[name].shape[-1])[3:9].tobytes()


def test_bfloat16_bits_pass_through(model: Any) -> None:
    """Subnormals, signed zero, the largest value, NaN payloads: the reader changes no bit."""
    bits = np.array([1, 0x40, 0x8000, 0x7F7F, 0x3F81, 0x7F81, 0xFFFF, 0x7F80], "<u2")
    model.write({"model.norm.weight": bits.view(ml_dtypes.bfloat16)})
    with Checkpoint.open(model.folder) as source:
        np.testing.assert_array_equal(source.load("model.norm.weight").values.view("<u2"), bits)


def test_buffers_and_unknown_tensors_are_listed_not_dropped(model: Any) -> None:
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32),
        "model.layers.0.self_attn.masked_bias": np.array(-1e9, np.float32),
        "model.position_ids": np.arange(16)[None],
        "model.num_batches_tracked": np.array(5),
    }
    model.write(model.tensors() | extra)
    with Checkpoint.open(model.folder) as source:
        for name, expected in extra.items():
            found = source.load(name).values
            assert found.dtype == expected.dtype
            np.testing.assert_array_equal(found, expected)


def test_a_good_first_shard_is_not_enough(model: Any) -> None:
    """All headers are checked before the first read: the fault of the last shard surfaces at opening."""
    model.write_shards(model.tensors(), 5)
    path = model.folder / "model-00005-of-00005.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(FormatError, match=path.name):
        Checkpoint.open(model.folder)
