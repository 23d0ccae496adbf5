"""What stands beside a .cbk: the manifest (``formats.cbk_manifest``) and the files that serving programs expect."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trapetum import __version__
from trapetum.formats.atomic import disk_errors, write_atomic
from trapetum.formats.cbk_manifest import manifest_bytes
from trapetum.formats.cbk_resume import ResumableCbkWriter
from trapetum.formats.cbk_writer import CbkWriter
from trapetum.formats.checksums import file_sha256
from trapetum.formats.names import text_name
from trapetum.formats.source import TensorSource
from trapetum.formats.strict_json import parse_json
from trapetum.models.architectures import text_config

__all__ = ["FOLDER_FILES", "dense_config", "write_manifest", "write_side_files"]

FOLDER_FILES = (
    "model.cbk",
    "manifest.json",
    "meta.json",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
_COPIED = ("generation_config.json", "tokenizer.json", "tokenizer_config.json")
_CONFIG_KEYS = (
    "hidden_size",
    "vocab_size",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "max_position_embeddings",
)
# What a chat template must contain to be the one that a serving program calls by this name; first match wins.
_TEMPLATES = (
    ("llama3", "<|start_header_id|>"),
    ("chatml", "<|im_start|>"),
    ("deepseek", "<｜User｜>"),  # noqa: RUF001  (full-width bars are part of the token)
    ("zephyr", "<|user|>"),
    ("llama2", "[INST]"),
)


def write_manifest(
    path: Path,
    file: str,
    artifact: TensorSource,
    writer: CbkWriter | ResumableCbkWriter,
    report: dict[str, Any],
    beside: Iterable[str] = (),
) -> None:
    """Write the manifest of a finished .cbk.

    Parameters
    ----------
    path : Path
        The manifest's own name.
    file : str
        Name of the .cbk.
    artifact : TensorSource
    writer : CbkWriter or ResumableCbkWriter
        After its block ended.
    report : dict
        ``ExportPlan.report()``.
    beside : iterable of str
        Names of the files in the manifest's folder that belong to the export.
    """
    text = text_config(artifact.config)
    origin = getattr(artifact, "manifest", None) or {}
    manifest = {
        "format": "cbk",
        "magic": writer.header.layout.magic,
        "file": text_name(file),
        "nbytes": writer.header.file_bytes(),
        "sha256": writer.sha256,
        "header_sha256": writer.header_sha256,
        "config": {key: text[key] for key in _CONFIG_KEYS if text.get(key) is not None},
        "source": {"name": text_name(artifact.path.resolve().name), "of": origin.get("source")},
        "tool": {"name": "trapetum", "version": __version__},
        "records": writer.entries,
        "report": report,
        "files": {name: file_sha256(path.with_name(name)) for name in sorted(beside)},
    }
    write_atomic(path, manifest_bytes(manifest))


def write_side_files(artifact: TensorSource, folder: Path) -> list[str]:
    """Tokenizer, config and meta.json, as programs that serve a .cbk expect them; returns their names."""
    side = {file.name: file for file in artifact.side_files()}
    with disk_errors(folder):
        for name in _COPIED:
            if name in side:
                shutil.copyfile(side[name], folder / name)
    config = dense_config(artifact.config)
    write_atomic(folder / "config.json", _json(config))
    label = str(config.get("_name_or_path") or text_name(artifact.path.resolve().name))
    meta = {"label": label, "template": _template(side.get("tokenizer_config.json"))}
    write_atomic(folder / "meta.json", _json(meta))
    return ["config.json", "meta.json", *(name for name in _COPIED if name in side)]


def dense_config(config: dict[str, Any]) -> dict[str, Any]:
    """config.json without what describes the quantization."""
    return {key: value for key, value in config.items() if key != "quantization_config"}


def _template(tokenizer_config: Path | None) -> str:
    """Name of the chat template; ``plain`` where the model has none that is known."""
    if tokenizer_config is None:
        return "plain"
    found = parse_json(tokenizer_config.read_bytes(), str(tokenizer_config), constants=True)
    text = json.dumps(found.get("chat_template") or "", ensure_ascii=False)
    return next((name for name, mark in _TEMPLATES if mark in text), "plain")


def _json(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
