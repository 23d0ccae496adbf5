"""``trapetum.json``: what an artifact holds, as one deterministic JSON file (docs/formats/artifact.md).

This module is the one place that knows the schema: the file names of an artifact, the stored arrays of
each layout, the entry of a tensor, the totals, the bytes, and the checks of a reader.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from trapetum.errors import FormatError
from trapetum.formats.dtypes import DTYPES, dtype_code
from trapetum.formats.safetensors_writer import Entry
from trapetum.formats.stored_arrays import Arrays, Rule, array_rule, stored_entries
from trapetum.formats.strict_json import parse_json, shown
from trapetum.rotation import ROTATION_KEY, HadamardRotation

__all__ = [
    "FORMAT_VERSION",
    "INDEX",
    "MANIFEST",
    "RUN_LOG",
    "SUMS",
    "TensorRecord",
    "artifact_config",
    "build_manifest",
    "is_plain_name",
    "manifest_bytes",
    "manifest_rotation",
    "parse_manifest",
    "parse_record",
    "tensor_entry",
]

FORMAT_VERSION = 1
MANIFEST = "trapetum.json"
INDEX = "model.safetensors.index.json"
SUMS = "SHA256SUMS"
RUN_LOG = "run.jsonl"


def is_plain_name(name: object) -> bool:
    """Whether a string from a file may name a file of the same folder: no path, not hidden, printable.

    Examples
    --------
    >>> [is_plain_name(n) for n in ("model.safetensors", "../x", "a/b", ".git", "")]
    [True, False, False, False, False]
    """
    return (
        isinstance(name, str)
        and 0 < len(name) <= 255
        and name[0] not in ".-"
        and name.isprintable()
        and not any(c in name for c in "/\\:")
    )


@dataclass(frozen=True)
class TensorRecord:
    """A checked entry of ``tensors``.

    Parameters
    ----------
    name : str
    layout : str
        A layout that this version reads.
    shape : tuple of int
        Logical shape.
    params : mapping
        What the layout needs beside shape and arrays.
    arrays : dict of suffix to Entry
        Stored arrays, sorted by suffix.
    sha256 : str
        Hex digest over the bytes of the arrays, in that order.
    scheme : mapping
        The search that made it.
    relative_error : float or None
        ``||W - decoded||^2 / ||W||^2``.
    """

    name: str
    layout: str
    shape: tuple[int, ...]
    params: Mapping[str, Any]
    arrays: Mapping[str, Entry]
    sha256: str
    scheme: Mapping[str, Any]
    relative_error: float | None

    @property
    def stored(self) -> Arrays:
        """(dtype, shape) by suffix."""
        return {suffix: (e.dtype, e.shape) for suffix, e in self.arrays.items()}

    @property
    def parameters(self) -> int:
        """Number of weights."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Stored bytes."""
        return sum(e.nbytes for e in self.arrays.values())


def tensor_entry(name: str, draft: Mapping[str, Any], arrays: Arrays, sha256: str) -> dict[str, Any]:
    """Complete and check the manifest entry of one tensor.

    Parameters
    ----------
    name : str
    draft : mapping
        ``layout``, ``shape``, ``scheme`` and, where the layout has any, ``params``; ``relative_error``
        (None: lossless by construction); any further JSON values, which readers ignore.
    arrays : mapping of suffix to (dtype, shape)
    sha256 : str
        See :class:`TensorRecord`.

    Returns
    -------
    dict
        Keys in the order in which they are written.

    Raises
    ------
    FormatError
        If the entry breaks the rules of the format.
    """
    shape = [int(n) for n in draft["shape"]]
    nbytes = sum(e.nbytes for e in stored_entries(name, arrays))
    error = draft.get("relative_error")
    entry: dict[str, Any] = {
        "layout": draft["layout"],
        "shape": shape,
        "params": dict(draft.get("params", {})),
        "scheme": dict(draft["scheme"]),
        "bytes": nbytes,
        "bpw": _bpw(nbytes, math.prod(shape)),
        "relative_error": None if error is None else float(error),
    }
    entry |= {k: v for k, v in draft.items() if k not in entry}
    entry["arrays"] = {
        suffix: {"dtype": dtype_code(np.dtype(dtype)), "shape": list(array_shape)}
        for suffix, (dtype, array_shape) in sorted(arrays.items())
    }
    entry["sha256"] = sha256
    parse_record(name, entry)
    return entry


def _bpw(nbytes: int, count: int) -> float:
    return 8.0 * nbytes / count if count else 0.0


def parse_record(name: str, entry: Any) -> TensorRecord:
    """Check one entry of ``tensors``.

    Raises
    ------
    FormatError
        The message begins with the tensor's name; the caller prefixes the file.
    """

    def bad(text: str) -> FormatError:
        return FormatError(f"tensor {shown(name)}: {text}")

    if not isinstance(entry, dict):
        raise bad(f"the entry is {shown(entry)}; an object is allowed")
    missing = [
        k for k in ("layout", "shape", "params", "scheme", "bytes", "arrays", "sha256") if k not in entry
    ]
    if missing:
        raise bad(f"the entry lacks {', '.join(missing)}")
    layout, params, scheme = entry["layout"], entry["params"], entry["scheme"]
    shape = _shape(entry["shape"])
    if shape is None:
        raise bad(f"shape {shown(entry['shape'])}; a list of whole numbers from 0 on is allowed")
    if not isinstance(params, dict) or not isinstance(scheme, dict):
        raise bad("params and scheme must be objects")
    digest = entry["sha256"]
    if not isinstance(digest, str) or len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
        raise bad(f"sha256 is {shown(digest)}; 64 lower-case hex digits are allowed")
    error = entry.get("relative_error")
    if error is not None and (type(error) not in (int, float) or not 0 <= error < math.inf):
        raise bad(f"relative_error is {shown(error)}; null or a number from 0 on is allowed")
    try:
        allowed = array_rule(layout, shape, params)
    except FormatError as problem:
        raise bad(problem.message) from None
    arrays = _arrays(entry["arrays"], allowed, bad)
    record = TensorRecord(
        name=name,
        layout=layout,
        shape=shape,
        params=params,
        arrays=dict(zip(sorted(arrays), stored_entries(name, arrays))),
        sha256=digest,
        scheme=scheme,
        relative_error=error,
    )
    if type(entry["bytes"]) is not int or entry["bytes"] != record.nbytes:
        raise bad(f"bytes is {shown(entry['bytes'])}; its arrays hold {record.nbytes}")
    return record


def _shape(value: Any) -> tuple[int, ...] | None:
    ok = (
        isinstance(value, list)
        and len(value) <= 64
        and all(type(n) is int and 0 <= n < 1 << 63 for n in value)
    )
    return tuple(value) if ok else None


def _arrays(found: Any, allowed: Rule, bad: Callable[[str], FormatError]) -> Arrays:
    if not isinstance(found, dict) or found.keys() != allowed.keys():
        have = sorted(found) if isinstance(found, dict) else found
        raise bad(f"arrays are {shown(have)}; this layout has {sorted(allowed)}")
    arrays = {}
    for suffix, (codes, shape) in allowed.items():
        array = found[suffix]
        if not isinstance(array, dict) or array.keys() != {"dtype", "shape"}:
            raise bad(f"array {shown(suffix)} is {shown(array)}; an object of dtype and shape is allowed")
        code = array["dtype"]
        if not isinstance(code, str) or code not in codes:
            raise bad(f"array {shown(suffix)} has dtype {shown(code)}; allowed: {', '.join(codes)}")
        if _shape(array["shape"]) != shape:
            raise bad(f"array {shown(suffix)} has shape {shown(array['shape'])}; {list(shape)} is needed")
        arrays[suffix] = (DTYPES[code], shape)
    return arrays


def build_manifest(header: Mapping[str, Any], entries: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The whole manifest.

    Parameters
    ----------
    header : mapping
        ``tool_version``, ``source``, ``architecture``, ``recipe``, ``rotation`` where tensors are rotated
        (``HadamardRotation.to_json``), and any further JSON values that are a
        pure function of the job's input (no times, no host, no paths).
    entries : mapping of tensor name to entry
        As :func:`tensor_entry` returned them, in the order of the plan.

    Returns
    -------
    dict
    """
    return {
        "format_version": FORMAT_VERSION,
        **header,
        "totals": _totals(entries),
        "tensors": {name: dict(entry) for name, entry in entries.items()},
    }


def _totals(entries: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    def count(chosen: list[Mapping[str, Any]]) -> dict[str, Any]:
        parameters = sum(math.prod(e["shape"]) for e in chosen)
        nbytes = sum(e["bytes"] for e in chosen)
        return {
            "tensors": len(chosen),
            "parameters": parameters,
            "bytes": nbytes,
            "bpw": _bpw(nbytes, parameters),
        }

    quantized = [e for e in entries.values() if e["layout"] != "dense"]
    return count(list(entries.values())) | {"quantized": count(quantized)}


def manifest_bytes(manifest: Mapping[str, Any]) -> bytes:
    """UTF-8 JSON, indented by two spaces, one line a tensor, keys in insertion order."""

    def dump(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False)

    fields = [
        f"  {dump(k)}: " + dump(v, 2).replace("\n", "\n  ") for k, v in manifest.items() if k != "tensors"
    ]
    tensors = ",\n".join(f"    {dump(name)}: {dump(entry)}" for name, entry in manifest["tensors"].items())
    fields.append('  "tensors": {\n' + tensors + "\n  }")
    return ("{\n" + ",\n".join(fields) + "\n}\n").encode()


def artifact_config(config: Mapping[str, Any], manifest: Mapping[str, Any]) -> bytes:
    """``config.json``: the source's, with the ``quantization_config`` by which others know the artifact.

    Parameters
    ----------
    config : mapping
        The source's config.json; its own ``quantization_config`` is replaced.
    manifest : mapping
        From :func:`build_manifest`.
    """
    bits = round(float(manifest["totals"]["bpw"]), 4)
    ours = {"quant_method": "trapetum", "version": FORMAT_VERSION, "bits": bits}
    return (json.dumps({**config, "quantization_config": ours}, indent=2, ensure_ascii=False) + "\n").encode()


def manifest_rotation(manifest: Mapping[str, Any], what: str) -> HadamardRotation | None:
    """The rotation that the artifact's rotated tensors share, or None.

    Raises
    ------
    FormatError
        If the manifest states one that breaks the rules of ``trapetum.rotation``.
    """
    stated = manifest.get("rotation")
    if stated is None:
        return None
    try:
        return HadamardRotation.from_json(stated)
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        raise FormatError(f"{what}: rotation is not usable: {problem}") from None


def _check_rotation(manifest: Mapping[str, Any], records: Mapping[str, TensorRecord], what: str) -> None:
    """Every rotated tensor must have signs for its row length: weights taken for unrotated ones talk nonsense."""
    rotation = manifest_rotation(manifest, what)
    for name, record in records.items():
        key = record.params.get("rotation")
        if key is None:
            continue
        if key != ROTATION_KEY or rotation is None or record.shape[-1] not in rotation.signs:
            widths = sorted(rotation.signs) if rotation is not None else []
            raise FormatError(
                f"{what}: tensor {shown(name)}: rotation is {shown(key)} and rows have {record.shape[-1]} weights; "
                f"the manifest has a rotation {shown(ROTATION_KEY)} for {widths}"
            )


def parse_manifest(data: bytes, what: str) -> tuple[dict[str, Any], dict[str, TensorRecord]]:
    """Read and check ``trapetum.json``.

    Parameters
    ----------
    data : bytes
    what : str
        The file, as messages name it.

    Returns
    -------
    (dict, dict of str to TensorRecord)
        The manifest as it stands, and its checked tensors in order.

    Raises
    ------
    FormatError
    """
    manifest = parse_json(data, what)
    if not isinstance(manifest, dict):
        raise FormatError(f"{what}: {shown(manifest)} is not an object")
    version = manifest.get("format_version")
    if type(version) is not int or version < 1:
        raise FormatError(f"{what}: format_version is {shown(version)}; 1 is allowed")
    if version > FORMAT_VERSION:
        raise FormatError(
            f"{what}: format_version is {version}; this trapetum reads up to {FORMAT_VERSION}",
            hint="Install a newer trapetum.",
        )
    tensors = manifest.get("tensors")
    if not isinstance(tensors, dict):
        raise FormatError(f"{what}: tensors is {shown(tensors)}; an object is allowed")
    for key in ("source", "recipe", "totals"):
        if not isinstance(manifest.get(key), dict):
            raise FormatError(f"{what}: {key} is {shown(manifest.get(key))}; an object is allowed")
    records: dict[str, TensorRecord] = {}
    owner: dict[str, str] = {}
    for name, entry in tensors.items():
        try:
            records[name] = parse_record(name, entry)
        except FormatError as problem:
            raise FormatError(f"{what}: {problem.message}") from None
        for array in records[name].arrays.values():
            if owner.setdefault(array.name, name) != name:
                raise FormatError(
                    f"{what}: tensors {shown(owner[array.name])} and {shown(name)} "
                    f"both store {shown(array.name)}"
                )
    _check_rotation(manifest, records, what)
    found = manifest["totals"]
    expected = {"tensors": len(records), "bytes": sum(r.nbytes for r in records.values())}
    for key, value in expected.items():
        if found.get(key) != value:
            raise FormatError(f"{what}: totals.{key} is {shown(found.get(key))}; its tensors make {value}")
    return manifest, records
