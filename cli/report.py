"""``trapetum report``: an artifact as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trapetum.cli.options import Artifact, Debug, Json, Overwrite, Quality
from trapetum.cli.output import emit

__all__ = ["report"]


def report(
    path: Artifact,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The page.")] = Path("report.html"),
    quality: Quality = None,
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
