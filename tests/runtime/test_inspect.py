"""What ``inspect`` shows of files that are no model."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from trapetum.runtime.inspect import inspect_path


def test_a_gguf_of_other_tensors_is_listed(tmp_path: Path) -> None:
    def text(value: bytes) -> bytes:
        return struct.pack("<Q", len(value)) + value

    data = np.arange(32, dtype="<f4")
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 1)
    head += text(b"general.architecture") + struct.pack("<I", 8) + text(b"vocoder")
    head += text(b"a.weight") + struct.pack("<IQIQ", 1, 32, 0, 0)
    path = tmp_path / "other.gguf"
    path.write_bytes(head + bytes(-len(head) % 32) + data.tobytes())
    found = inspect_path(path)
    assert found["kind"] == "gguf"
    (tensor,) = found["tensors"]
    assert tensor["name"] == "a.weight"
    assert tensor["bytes"] == 128
    assert tensor["shape"] == [32]
