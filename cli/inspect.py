"""``trapetum inspect``: what a file or folder holds."""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import Annotated, Any

import typer

from trapetum.cli.options import Debug, Json
from trapetum.cli.output import emit, fields, human_bytes, table

__all__ = ["inspect"]

# JSON on one line of the human output; the rest is for --json.
_LONGEST_VALUE = 160


def inspect(
    path: Annotated[
        Path, typer.Argument(help="A model folder, an artifact, an unfinished job, .safetensors or .cbk.")
    ],
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Show tensors, types, sizes and metadata."""
    from trapetum.runtime.inspect import inspect_path

    found = inspect_path(path)
    emit(found, lambda: _text(found), as_json=json)


def _text(found: dict[str, Any]) -> str:
    totals = found["totals"]
    head = {
        "path": found["path"],
        "kind": found["kind"],
        **{k: _short(v) for k, v in found["metadata"].items()},
        "tensors": f"{totals['tensors']:,}",
        "weights": f"{totals['weights']:,}",
        "size": f"{totals['bytes']:,} bytes ({human_bytes(totals['bytes'])})",
        "bpw": f"{totals['bpw']:.3f}",
    }
    types = table(
        ["type", "tensors", "weights", "bytes", "bpw"],
        [
            [k, f"{t['tensors']:,}", f"{t['weights']:,}", f"{t['bytes']:,}", f"{t['bpw']:.3f}"]
            for k, t in found["types"].items()
        ],
        right=(1, 2, 3, 4),
    )
    header = ["tensor", "type", "shape", "bytes", "bpw"]
    if any(t.get("relative_error") is not None for t in found["tensors"]):
        header.append("rel. error")
    tensors = table(
        header,
        [
            [
                t["name"],
                t["type"],
                " x ".join(map(str, t["shape"])) or "scalar",
                f"{t['bytes']:,}",
                f"{t['bpw']:.3f}",
                "" if t.get("relative_error") is None else f"{t['relative_error']:.3e}",
            ]
            for t in found["tensors"]
        ],
        right=range(3, 6),
    )
    notes = "".join(f"note: {text}\n" for text in found["notes"])
    return f"{fields(head)}\n{notes}\n{types}\n\n{tensors}"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else jsonlib.dumps(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 4]} ..."
