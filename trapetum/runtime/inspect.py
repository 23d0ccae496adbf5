"""What a file or folder holds: header, tensors, sizes, bits a weight. Nothing but headers is read.

``inspect_path`` serves every kind of model that ``formats.source`` detects, and the folder of an unfinished job,
whose finished parts are listed. Sizes are what the file stores, padding and codebooks included; bits a weight
are those bytes over the weights that the model really has.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from trapetum.errors import CheckpointError, FormatError, UnsupportedModelError
from trapetum.formats.atomic import WORK_FOLDER
from trapetum.formats.manifest import MANIFEST, TensorRecord, parse_record
from trapetum.formats.output_folder import PARTS
from trapetum.formats.safetensors import SafetensorsFile
from trapetum.formats.source import TensorSource, open_source
from trapetum.formats.strict_json import parse_json
from trapetum.tensors import DenseTensor

__all__ = ["inspect_path"]

_CONFIG_KEYS = (
    "model_type",
    "architectures",
    "num_hidden_layers",
    "hidden_size",
    "vocab_size",
    "torch_dtype",
)


def inspect_path(path: str | Path) -> dict[str, Any]:
    """Describe a model folder, a weight file, an artifact, an unfinished job or a ``.cbk``.

    Parameters
    ----------
    path : path

    Returns
    -------
    dict
        JSON values: ``path``; ``kind`` (``checkpoint``, ``artifact``, ``cbk``, ``unfinished job``);
        ``metadata`` (what the header or manifest says beside the tensors); ``tensors``, each with ``name``,
        ``type``, ``layout``, ``shape``, ``bytes``, ``bpw`` and, in an artifact, ``scheme`` and
        ``relative_error``; ``types`` (type -> tensors, weights, bytes, bpw); ``totals`` (``tensors``,
        ``weights``, ``bytes``, ``bpw``); ``notes``.

    Raises
    ------
    FormatError, CheckpointError
        If there is nothing at the path, or it is nothing that is known, or its headers are faulty.

    Examples
    --------
    ::

        inspect_path("model.cbk")["totals"]["bpw"]
    """
    path = Path(path)
    if (path / WORK_FOLDER).is_dir() and not (path / MANIFEST).is_file():
        return _unfinished(path)
    with open_source(path) as source:
        return _report(
            path, source.kind, _metadata(source), [_tensor(source, n) for n in source.names()], source.notes
        )


def _report(
    path: Path, kind: str, metadata: dict[str, Any], tensors: list[dict[str, Any]], notes: list[str]
) -> dict[str, Any]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for tensor in tensors:
        groups.setdefault(tensor["type"], []).append(tensor)
    return {
        "path": str(path),
        "kind": kind,
        "metadata": metadata,
        "totals": _sum(tensors),
        "types": {name: _sum(members) for name, members in groups.items()},
        "notes": list(notes),
        "tensors": tensors,
    }


def _sum(tensors: list[dict[str, Any]]) -> dict[str, Any]:
    weights = sum(math.prod(t["shape"]) for t in tensors)
    nbytes = sum(t["bytes"] for t in tensors)
    return {"tensors": len(tensors), "weights": weights, "bytes": nbytes, "bpw": _bpw(nbytes, weights)}


def _bpw(nbytes: int, weights: int) -> float:
    return round(8.0 * nbytes / weights, 6) if weights else 0.0


def _tensor(source: TensorSource, name: str) -> dict[str, Any]:
    # Sources with anything but plain arrays keep a record of each tensor; its bytes are those in the file.
    record = getattr(source, "records", {}).get(name)
    if isinstance(record, TensorRecord):
        return _from_record(record)
    shape, layout = source.shape(name), source.layout(name)
    nbytes = record.nbytes if record is not None else math.prod(shape) * source.dtype(name).itemsize
    return {
        "name": name,
        "type": str(record.kind).lower() if record is not None else source.dtype(name).name,
        "layout": layout,
        "shape": list(shape),
        "bytes": nbytes,
        "bpw": _bpw(nbytes, math.prod(shape)),
    }


def _from_record(record: TensorRecord) -> dict[str, Any]:
    """A tensor of an artifact, or of a job's finished part."""
    if record.layout == DenseTensor.layout:
        kind = record.arrays[""].dtype.name
    else:  # such as "codebook size=16"
        prefix = f"{record.layout}_"
        kind = " ".join([record.layout, *(f"{k.removeprefix(prefix)}={v}" for k, v in record.params.items())])
    return {
        "name": record.name,
        "type": kind,
        "layout": record.layout,
        "shape": list(record.shape),
        "bytes": record.nbytes,
        "bpw": _bpw(record.nbytes, record.parameters),
        "scheme": dict(record.scheme),
        "relative_error": record.relative_error,
    }


def _metadata(source: TensorSource) -> dict[str, Any]:
    """What a person wants to see of config, header and manifest: scalar values by name."""
    try:
        config = source.config
    except (
        CheckpointError,
        UnsupportedModelError,
    ):  # a bare weight file, or a GGUF that is not a language model
        config = {}
    found: dict[str, Any] = {k: config[k] for k in _CONFIG_KEYS if k in config}
    packed = getattr(source, "packed_format", lambda: None)()
    if packed is not None:
        found["packed"] = packed
    header = getattr(source, "header", None)
    if header is not None:
        found |= {"magic": header.layout.magic, **header.values}
    manifest = getattr(source, "manifest", None) or {}
    for key in ("format_version", "tool_version", "architecture", "source", "recipe", "tool"):
        if key in manifest:
            found[key] = manifest[key]
    for file in getattr(source, "files", []):
        if isinstance(file, SafetensorsFile) and file.metadata:
            found.setdefault("header", {})[file.path.name] = dict(file.metadata)
    return found


def _unfinished(path: Path) -> dict[str, Any]:
    """The finished parts of a job that was stopped, or is still running."""
    tensors, notes = [], ["unfinished: run the same `trapetum quantize` command again to go on"]
    for file in sorted((path / WORK_FOLDER / PARTS).glob("*.safetensors")):
        try:
            with SafetensorsFile.open(file, mmap=False) as part:
                entry = parse_json(part.metadata.get("entry", "null").encode(), str(file))
                tensors.append(_from_record(parse_record(part.metadata.get("name", ""), entry)))
        except FormatError as error:
            notes.append(f"this part will be made again: {error.message}")
    return _report(path, "unfinished job", {}, tensors, notes)
