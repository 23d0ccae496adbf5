"""What a path can be is decided in one place, and what it cannot be is said with the list of what it can."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from trapetum.errors import FormatError, TrapetumError
from trapetum.formats.assemble import assemble
from trapetum.formats.manifest import build_manifest
from trapetum.formats.parts import write_part
from trapetum.formats.safetensors_writer import Entry, SafetensorsWriter
from trapetum.formats.source import KINDS, detect, open_source


def weights(path: Path) -> Path:
    with SafetensorsWriter(path, [Entry("w", np.dtype("<f4"), (2, 3))]) as writer:
        writer.write("w", np.arange(6, dtype=np.float32).reshape(2, 3))
    return path


def artifact(folder: Path) -> Path:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    draft = {"layout": "dense", "scheme": {"name": "keep"}, "shape": (2, 3)}
    entry = write_part(folder / ".trapetum" / "parts", 0, "w", {"": array}, draft)
    manifest = build_manifest({"source": {}, "recipe": {}}, {"w": entry})
    return assemble(folder, manifest, {"config.json": b"{}"}, max_shard_bytes=100)


@pytest.mark.parametrize("mmap", [True, False])
def test_folders_and_files_open_as_what_they_are(tmp_path: Path, mmap: bool) -> None:
    (tmp_path / "hf").mkdir()
    weights(tmp_path / "hf" / "model.safetensors")
    (tmp_path / "hf" / "config.json").write_text('{"a": 1}')
    for path, kind, config in (
        (tmp_path / "hf", "checkpoint", {"a": 1}),
        (tmp_path / "hf" / "model.safetensors", "checkpoint", {"a": 1}),
        (artifact(tmp_path / "art"), "artifact", {}),
    ):
        assert detect(path).name == kind
        with open_source(path, mmap=mmap) as source:
            assert source.kind == kind
            assert source.path == path
            assert source.config == config
            assert source.names() == ["w"]
            assert source.shape("w") == (2, 3)
            assert source.dtype("w") == np.float32
            assert source.layout("w") == "dense"
            assert source.load("w", slice(1, 2)).dequantize().tolist() == [[3, 4, 5]]
            source.release("w")
            source.release("w", slice(0, 1))
            assert [p.name for p in source.side_files()] == ["config.json"]
            assert source.tokenizer_file() is None
            assert source.notes == []


def test_a_cbk_is_told_by_its_first_bytes(tmp_path: Path) -> None:
    for magic in (b"CBK3", b"CBKG", b"CBKR", b"MTP1"):
        (tmp_path / "anything").write_bytes(magic + bytes(64))
        assert detect(tmp_path / "anything").name == "cbk"
    with pytest.raises(FormatError):
        open_source(tmp_path / "anything")
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "model.cbk").write_bytes(b"CBK3")
    assert detect(tmp_path / "export").name == "cbk"


def test_an_unfinished_job_says_so(tmp_path: Path) -> None:
    (tmp_path / ".trapetum").mkdir()
    with pytest.raises(FormatError, match="not finished"):
        open_source(tmp_path)


def test_everything_else_is_refused_with_what_is_supported(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(b"\x80\x02 something")
    (tmp_path / "empty").write_bytes(b"")
    os.mkfifo(tmp_path / "fifo")
    for name in ("x.bin", "empty"):
        with pytest.raises(FormatError, match="nothing that is known") as caught:
            open_source(tmp_path / name)
        assert all(kind.text in (caught.value.hint or "") for kind in KINDS)
    with pytest.raises(FormatError, match="neither a regular file nor a folder"):
        open_source(tmp_path / "fifo")
    for path in (tmp_path / "absent", tmp_path / "x.bin" / "inside", "bad\0name", "x" * 5000):
        with pytest.raises(FormatError):
            open_source(path)
    (tmp_path / "nothing").mkdir()
    with pytest.raises(TrapetumError):
        open_source(tmp_path / "nothing")
