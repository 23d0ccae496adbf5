"""Names that are not ASCII, or no text at all: the same bytes in every locale, and never an internal error."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import trapetum
from trapetum.errors import CheckpointError
from trapetum.formats.names import text_name
from trapetum.formats.strict_json import parse_json

STRANGE = ["modèle 你好", os.fsdecode(b"bad\xff\xfename"), "a'b\"c`d"]


def _files(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name != "run.jsonl"}


@pytest.mark.parametrize("name", STRANGE, ids=ascii)
def test_a_folder_of_any_name_is_quantized_and_exported(name: str, model: Any, tmp_path: Path) -> None:
    model.write(model.tensors())
    folder = model.folder.rename(tmp_path / name)
    trapetum.quantize_model(folder, tmp_path / "out" / name)
    with trapetum.open_artifact(tmp_path / "out" / name) as artifact:
        assert artifact.manifest["source"]["name"] == text_name(name)
    exported = trapetum.export_artifact(tmp_path / "out" / name, "hf", tmp_path / "hf" / name)
    assert exported == tmp_path / "hf" / name


def test_the_c_locale_gives_the_same_bytes(model: Any, tmp_path: Path) -> None:
    model.write(model.tensors())
    (model.folder / "LICENSE-é").write_text("none")
    folder = model.folder.rename(tmp_path / STRANGE[0])
    trapetum.quantize_model(folder, tmp_path / "here")
    command = [sys.executable, "-m", "trapetum", "quantize", str(folder), "-o", str(tmp_path / "out é")]
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert _files(tmp_path / "out é") == _files(tmp_path / "here")


def test_half_a_surrogate_pair_in_a_config_is_refused(model: Any, tmp_path: Path) -> None:
    model.write(model.tensors())
    model.write_config('{"model_type": "llama", "_name_or_path": "\\ud83d"}')
    with pytest.raises(CheckpointError, match=r"config\.json.*half a surrogate pair"):
        trapetum.quantize_model(model.folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_whole_surrogate_pair_is_a_character() -> None:
    assert parse_json(b'{"\\ud83d\\ude00": "\\uD83D\\uDE00"}', "x") == {"\U0001f600": "\U0001f600"}
