"""Files of bytes put together by hand, for the tests of the safetensors reader."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from trapetum.errors import FormatError
from trapetum.formats.safetensors import SafetensorsFile


def pack(header: dict[str, Any] | bytes, data: bytes = b"") -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def entry(dtype: Any = "U8", shape: Any = (2,), offsets: Any = (0, 2), **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


def opened(tmp_path: Path, content: bytes, *, mmap: bool = True) -> SafetensorsFile:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    return SafetensorsFile.open(path, mmap=mmap)


def refusal(tmp_path: Path, content: bytes) -> str:
    with pytest.raises(FormatError) as caught:
        opened(tmp_path, content)
    assert "x.safetensors" in caught.value.message
    assert "\n" not in caught.value.message
    return caught.value.message


SAMPLE = pack(
    b'{"__metadata__":{"format":"pt"},"a.weight":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]},'
    b'"b":{"dtype":"F32","shape":[],"data_offsets":[12,16]},'
    b'"c":{"dtype":"BOOL","shape":[2,1],"data_offsets":[16,18]}}  ',
    bytes(range(1, 17)) + b"\0\1",
)
