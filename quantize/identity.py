"""Which bytes a job read: the sha256 of each source file, hashed in parallel, remembered between runs.

A resumed job must not mix two sources, and an artifact says what it was made from. Hashing 100 GB takes minutes, so the
result is kept in the job's own folder and reused while size, modification time (in nanoseconds), inode and device of a
file are unchanged.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from trapetum.errors import CheckpointError
from trapetum.formats.atomic import write_atomic
from trapetum.formats.manifest import is_plain_name
from trapetum.formats.names import text_name
from trapetum.formats.packed_ternary import AnyCheckpoint
from trapetum.progress import Progress
from trapetum.quantize.blocks import ordered_map

__all__ = ["changed_files", "companions", "hash_files", "hub_identity", "model_name", "tensor_seed"]

_CHUNK = 1 << 20
_LICENCES = ("LICENSE", "LICENCE", "NOTICE", "USE_POLICY")


def tensor_seed(seed: int, name: str) -> int:
    """Seed of one tensor: the first 8 bytes of sha256("SEED:NAME"), whatever else is quantized, and in which order.

    Examples
    --------
    >>> tensor_seed(0, "a") == tensor_seed(0, "a") != tensor_seed(0, "b")
    True
    """
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little")


def hash_files(
    paths: Sequence[Path], cache: Path | None, threads: int, progress: Progress | None = None
) -> dict[str, str]:
    """Hash files.

    Parameters
    ----------
    paths : sequence of Path
        Files of one folder.
    cache : Path, optional
        JSON file with the results of an earlier run; written anew. Content that makes no sense is ignored.
    threads : int
        Files that are read at once.
    progress : Progress, optional

    Returns
    -------
    dict of str
        File name -> sha256 in hex, sorted by name.

    Raises
    ------
    CheckpointError
        If a file cannot be read.
    """
    progress = progress or Progress()
    known = _read_cache(cache)
    stamps = {p: _stamp(p) for p in sorted(paths, key=lambda p: p.name)}
    hashes = {
        p.name: known[p.name]["sha256"] for p, s in stamps.items() if known.get(p.name, {}).get("stamp") == s
    }
    missing = [p for p in stamps if p.name not in hashes]
    progress.begin("hash", sum(stamps[p][0] for p in missing))
    with ThreadPoolExecutor(threads, "trapetum-hash") as executor:
        largest_first = sorted(missing, key=lambda p: -stamps[p][0])
        for path, digest in ordered_map(
            executor, lambda p: _sha256(p, progress), largest_first, len(missing) + 1
        ):
            hashes[path.name] = digest
    progress.end()
    if cache is not None and missing:
        record = {p.name: {"stamp": s, "sha256": hashes[p.name]} for p, s in stamps.items()}
        write_atomic(cache, json.dumps(record, indent=1, sort_keys=True).encode())
    return {text_name(p.name): hashes[p.name] for p in stamps}


def changed_files(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """Names that are not the same file in both, sorted."""
    return sorted(n for n in before.keys() | now.keys() if before.get(n) != now.get(n))


def _stamp(path: Path) -> list[int]:
    try:
        s = os.stat(path)
    except OSError as e:
        raise CheckpointError(f"{path}: cannot be read ({e.strerror})") from e
    return [s.st_size, s.st_mtime_ns, s.st_ino, s.st_dev]


def _read_cache(cache: Path | None) -> dict[str, Any]:
    try:
        data = json.loads(cache.read_bytes()) if cache is not None else {}
        return {k: v for k, v in data.items() if isinstance(v, dict) and len(v["sha256"]) == 64}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _sha256(path: Path, progress: Progress) -> str:
    digest = hashlib.sha256()
    buffer = bytearray(_CHUNK)
    view = memoryview(buffer)
    try:
        with open(path, "rb", buffering=0) as file:
            while count := file.readinto(buffer):
                digest.update(view[:count])
                progress.advance(count)
    except OSError as e:
        raise CheckpointError(f"{path}: cannot be read ({e.strerror})") from e
    return digest.hexdigest()


def model_name(source: AnyCheckpoint) -> str:
    """What a model is called: its repository's name, or its folder's."""
    return str(hub_identity(source.path).get("repo", source.title)).rpartition("/")[2] or "model"


def hub_identity(path: Path) -> dict[str, str]:
    """Repository and commit of a model in a snapshot of a Hub cache (models--ORG--NAME/snapshots/COMMIT)."""
    real = (path if path.is_dir() else path.parent).resolve()
    if real.parent.name != "snapshots" or not real.parent.parent.name.startswith("models--"):
        return {}
    repo = real.parent.parent.name.removeprefix("models--").replace("--", "/")
    return {"repo": text_name(repo), "commit": text_name(real.name)}


def companions(source: AnyCheckpoint) -> list[Path]:
    """Files that travel with the weights: config, tokenizer, licences."""
    licences = [
        p for p in source.folder.iterdir() if p.name.isascii() and p.name.upper().startswith(_LICENCES)
    ]
    return sorted({*source.side_files(), *(p for p in licences if is_plain_name(p.name) and p.is_file())})
