"""``trapetum inspect``: what a file or folder holds."""

from __future__ import annotations

import io
import json as jsonlib
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from trapetum.cli.options import Debug, Json
from trapetum.cli.output import emit, fields, human_bytes, table

__all__ = ["inspect"]

# JSON on one line of the human output; the rest is for --json.
_LONGEST_VALUE = 160
_MOST_DRAWN = 5000  # tensors; rich takes 0.4 ms for a row

Page = tuple[list[str], Iterable[Sequence[str]], int]  # header, rows, first column of numbers


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
    """Tables: drawn by rich on a terminal, where long names must fold; plain columns, never cut, elsewhere."""
    lossy = any(t.get("relative_error") is not None for t in found["tensors"])
    header = ["tensor", "type", "shape", "bytes", "bpw", *(["rel. error"] if lossy else [])]
    pages: list[Page] = [
        (["type", "tensors", "weights", "bytes", "bpw"], _type_rows(found["types"]), 1),
        (header, _tensor_rows(found["tensors"], lossy), 3),
    ]
    draw = _drawn if sys.stdout.isatty() and len(found["tensors"]) <= _MOST_DRAWN else _plain
    return draw(_head(found), [f"note: {text}" for text in found["notes"]], pages)


def _plain(head: dict[str, str], notes: list[str], pages: list[Page]) -> str:
    parts = ["\n".join([fields(head), *notes])]
    parts += [table(header, rows, right=range(first, len(header))) for header, rows, first in pages]
    return _printable("\n\n".join(parts))


def _drawn(head: dict[str, str], notes: list[str], pages: list[Page]) -> str:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    out = io.StringIO()
    console = Console(file=out, force_terminal=True, highlight=False)
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style="bold")
    grid.add_column(overflow="fold")
    for key, value in head.items():
        grid.add_row(Text(key), Text(_printable(value)))
    console.print(grid)
    for note in notes:
        console.print(Text(_printable(note), style="yellow"))
    for header, rows, first in pages:
        made = Table(box=SIMPLE_HEAD, pad_edge=False, header_style="bold")
        for i, title in enumerate(header):
            made.add_column(title, justify="right" if i >= first else "left", overflow="fold")
        for row in rows:
            made.add_row(*(Text(_printable(cell)) for cell in row))
        console.print(made)
    return out.getvalue()


def _head(found: dict[str, Any]) -> dict[str, str]:
    totals = found["totals"]
    return {
        "path": found["path"],
        "kind": found["kind"],
        **{k: _short(v) for k, v in found["metadata"].items()},
        "tensors": f"{totals['tensors']:,}",
        "weights": f"{totals['weights']:,}",
        "size": f"{totals['bytes']:,} bytes ({human_bytes(totals['bytes'])})",
        "bpw": f"{totals['bpw']:.3f}",
    }


def _type_rows(types: dict[str, Any]) -> Iterable[list[str]]:
    for name, t in types.items():
        yield [name, f"{t['tensors']:,}", f"{t['weights']:,}", f"{t['bytes']:,}", f"{t['bpw']:.3f}"]


def _tensor_rows(tensors: list[dict[str, Any]], lossy: bool) -> Iterable[list[str]]:
    for t in tensors:
        shape = " x ".join(map(str, t["shape"])) or "scalar"
        row = [t["name"], t["type"], shape, f"{t['bytes']:,}", f"{t['bpw']:.3f}"]
        error = t.get("relative_error")
        yield [*row, "" if error is None else f"{error:.3e}"] if lossy else row


def _printable(text: str) -> str:
    """A name from a file must not steer the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else jsonlib.dumps(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 4]} ..."
