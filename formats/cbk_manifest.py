"""The JSON manifest beside a .cbk, which says what the format cannot: names, digests, the real vocabulary.

::

    format, magic, file, nbytes, sha256, header_sha256
    config            vocab_size (the real one), hidden_size, token ids, max_position_embeddings
    source            folder name of the artifact, and what the artifact says about its own source
    tool              name and version
    records           [{name, kind, shape, offset, nbytes, sha256}, ...] in file order
    report            what the export did with each tensor, and the errors it added
    files             SHA-256 of the files that were written beside it
    manifest_sha256   of this text with an empty string here

Nothing in it depends on the time, the host or a path, so equal artifacts give equal files.
"""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

__all__ = ["MODEL_FILE", "is_intact", "manifest_bytes", "manifest_paths"]

MODEL_FILE = "model.cbk"
_SELF = "manifest_sha256"


def manifest_paths(path: Path) -> list[Path]:
    """Where the manifest of a .cbk may lie: ``X.cbk.json``, and ``manifest.json`` beside ``model.cbk``."""
    beside = [path.with_name(path.name + ".json")]
    return [*beside, path.with_name("manifest.json")] if path.name == MODEL_FILE else beside


def manifest_bytes(content: dict[str, Any]) -> bytes:
    """The file: indented JSON with its own digest as the last key.

    Examples
    --------
    >>> is_intact(manifest_bytes({"a": 1})), is_intact(manifest_bytes({"a": 1}).replace(b"1", b"2", 1))
    (True, False)
    """
    content = {key: value for key, value in content.items() if key != _SELF}
    digest = sha256(_text({**content, _SELF: ""})).hexdigest()
    return _text({**content, _SELF: digest})


def is_intact(raw: bytes) -> bool:
    """Whether these are, byte for byte, what :func:`manifest_bytes` made."""
    try:
        content = json.loads(raw)
        return isinstance(content, dict) and manifest_bytes(content) == raw
    except (ValueError, RecursionError):
        return False


def _text(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
