"""``trapetum report``: an artifact as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trapetum.cli.options import Debug, Json, Overwrite
from trapetum.cli.output import emit

__all__ = ["report"]


def report(
    path: Annotated[Path, typer.Argument(metavar="ARTIFACT", help="The folder that quantize wrote.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The page.")] = Path("report.html"),
    quality: Annotated[
        list[Path] | None,
        typer.Option(
            "--quality",
            metavar="FILE",
            help="Output of perplexity, compare or verify with --json; again and again.",
        ),
    ] = None,
    overwrite: Overwrite = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Write one HTML page about an artifact: sizes, errors, bits, times, quality, the command."""
    from trapetum.export.report_page import write_report

    written = write_report(path, out, quality=quality or (), overwrite=overwrite)
    size = written.stat().st_size
    emit(
        {"out": str(written), "bytes": size},
        f"wrote {written}: {size:,} bytes, no network needed",
        as_json=json,
    )
