"""Which files of a model folder hold its weights, decided by names alone: no weight file is opened here.

In order: ``model.safetensors.index.json``; the only other ``*.safetensors.index.json``;
``model.safetensors``; a complete set ``PREFIX-00001-of-0000N.safetensors`` without an index; the only
``*.safetensors``. Anything else is refused with the choice spelled out. Every other ``*.safetensors`` in
the folder is reported, never mixed in.
"""

from __future__ import annotations

import os
import re
import stat
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trapetum.errors import CheckpointError, FormatError
from trapetum.formats.safetensors_header import refuse_lfs_pointer
from trapetum.formats.strict_json import parse_json, shown

__all__ = ["JSON_LIMIT", "NUMBERED", "WeightFiles", "find_weight_files", "listed", "read_json"]

JSON_LIMIT = 256 << 20
"""Longest JSON file that is read, in bytes."""

NUMBERED = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")
"""Name of a shard: prefix, number from 1, count."""

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_OTHER_WEIGHTS = (".bin", ".pth", ".pt", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf", ".npz")
_HUB_HINT = "Download or copy the missing files again."


@dataclass(frozen=True)
class WeightFiles:
    """The answer.

    Parameters
    ----------
    files : list of Path
        Sorted by name.
    weight_map : dict of str to str, or None
        Tensor to file name, where an index says so.
    index : Path or None
        The index file.
    total_size : int or None
        The index's own sum of tensor bytes, unchecked.
    notes : list of str
    """

    files: list[Path]
    weight_map: dict[str, str] | None = None
    index: Path | None = None
    total_size: int | None = None
    notes: list[str] = field(default_factory=list)


def find_weight_files(folder: Path) -> WeightFiles:
    """Choose the weight files of a folder.

    Raises
    ------
    CheckpointError
        If the folder has no usable choice, or its index is wrong.
    """
    try:
        present = sorted(p.name for p in folder.iterdir())
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot list the folder: {error.strerror}") from None
    weights = [name for name in present if name.endswith(".safetensors")]
    indexes = [name for name in present if name.endswith(".safetensors.index.json")]
    if _INDEX in indexes or len(indexes) == 1:
        chosen = _INDEX if _INDEX in indexes else indexes[0]
        found = _from_index(folder, chosen, weights)
    elif indexes:
        raise CheckpointError(
            f"{folder}: {len(indexes)} index files and none is {_INDEX}: {listed(indexes)}",
            hint="Keep the index of the model you mean.",
        )
    else:
        found = WeightFiles([folder / name for name in _without_index(folder, weights, present)])
        if len(found.files) > 1:
            found.notes.append(f"no index; the {len(found.files)} shards are a complete set by their names")
    used = {path.name for path in found.files}
    if unused := [name for name in weights if name not in used]:
        which = f"not in {found.index.name}" if found.index else f"beside {listed(sorted(used))}"
        found.notes.append(f"not used ({which}): {listed(unused)}")
    return found


def read_json(path: Path, *, constants: bool = False) -> dict[str, Any]:
    """The JSON object in a file; a byte order mark is skipped.

    Raises
    ------
    CheckpointError
        If the file is missing, unreadable, too long, or not one JSON object with unique keys.
    """
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise CheckpointError(f"{path}: not a regular file")
        if found.st_size > JSON_LIMIT:
            raise CheckpointError(f"{path}: {found.st_size} bytes; at most {JSON_LIMIT} are read")
        data = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    except FileNotFoundError:
        raise CheckpointError(f"{path}: there is no such file") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    if not data.strip():
        raise CheckpointError(f"{path}: the file is empty; a JSON object is expected")
    try:
        refuse_lfs_pointer(data[:512], path)
        value = parse_json(data, f"{path}: content", constants=constants)
    except FormatError as error:
        raise CheckpointError(error.message, hint=error.hint) from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds {shown(value, 40)}; a JSON object is expected")
    return value


def _from_index(folder: Path, name: str, weights: list[str]) -> WeightFiles:
    path = folder / name
    index = read_json(path)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{path}: weight_map is {shown(weight_map, 40)}; an object that gives each tensor a file is due"
        )
    for tensor, value in weight_map.items():
        if fault := _value_fault(value):
            raise CheckpointError(
                f"{path}: weight_map sends {shown(tensor)} to {shown(value)}, {fault}; only the name of a "
                ".safetensors file in the same folder is allowed"
            )
    counts = Counter(weight_map.values())
    files = [folder / file for file in sorted(counts)]
    if missing := [file for file in files if not os.path.exists(file)]:
        parts = [f"{f.name} ({counts[f.name]} tensors{_broken_link(f)})" for f in missing]
        single = (
            f" Or remove the index to use {_SINGLE}." if _SINGLE in weights and _SINGLE not in counts else ""
        )
        raise CheckpointError(
            f"{path}: lists {len(missing)} of {len(files)} files that are missing: {listed(parts)}",
            hint=_HUB_HINT + single,
        )
    metadata = index.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return WeightFiles(files, weight_map, path, total if type(total) is int else None)


def _value_fault(value: Any) -> str | None:
    """Why a weight_map value may not be opened, or None."""
    if not isinstance(value, str):
        return "which is not a string"
    if "\0" in value or not value.isprintable():
        return "which holds a character that no file name should have"
    if value.startswith("/"):
        return "an absolute path"
    if ".." in value.replace("\\", "/").split("/"):
        return "which leaves the folder"
    if "/" in value or "\\" in value or ":" in value:
        return "which is a path"
    if not value.endswith(".safetensors"):
        return "which is no safetensors file"
    return None


def _broken_link(path: Path) -> str:
    return ", a link to a file that is gone" if path.is_symlink() else ""


def _without_index(folder: Path, weights: list[str], present: list[str]) -> list[str]:
    if _SINGLE in weights:
        return [_SINGLE]
    sets: dict[tuple[str, int], set[int]] = {}
    for name in weights:
        if match := NUMBERED.fullmatch(name):
            sets.setdefault((match[1], int(match[3])), set()).add(int(match[2]))
    complete = [key for key, numbers in sets.items() if numbers == set(range(1, key[1] + 1))]
    if len(complete) == 1:
        prefix, count = complete[0]
        return [f"{prefix}-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    if len(sets) == 1 and not complete:
        ((prefix, count), numbers), *_ = sets.items()
        absent = [
            f"{prefix}-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1) if i not in numbers
        ]
        raise CheckpointError(
            f"{folder}: no index, and {len(absent)} of {count} shards are missing: {listed(absent)}",
            hint=_HUB_HINT,
        )
    if len(weights) == 1 and not sets:
        if weights[0].startswith("adapter_model"):
            raise CheckpointError(
                f"{folder}: {weights[0]} is an adapter, not a model",
                hint="Merge the adapter into its base model and quantize the result.",
            )
        return weights
    if weights:
        raise CheckpointError(
            f"{folder}: {len(weights)} safetensors files, no index and no {_SINGLE}: {listed(weights)}",
            hint=f"Name the one file that you mean, or add its {_INDEX}.",
        )
    if others := [name for name in present if name.endswith(_OTHER_WEIGHTS)]:
        raise CheckpointError(
            f"{folder}: holds {listed(others)}, but no safetensors weights",
            hint=f"Name the file itself: {folder / others[0]}"
            if others[0].endswith(".gguf")
            else "Convert the weights to safetensors (in transformers: save_pretrained) and try again.",
        )
    raise CheckpointError(
        f"{folder}: no {_INDEX}, no {_SINGLE} and no other safetensors file",
        hint="Name a folder that holds a model in Hugging Face form.",
    )


def listed(names: list[str], limit: int = 5) -> str:
    """Names for a message, a long list cut with the number of the rest."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
