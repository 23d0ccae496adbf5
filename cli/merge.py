"""``trapetum merge``: the tensors that several processes made -> one artifact."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trapetum.cli.options import Debug, Json, MixedCpus
from trapetum.cli.output import emit
from trapetum.cli.progress import terminal_progress

__all__ = ["merge"]


def merge(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The output folder of the parts.")],
    source: Annotated[
        Path | None,
        typer.Option("--source", metavar="MODEL", help="The model's folder, where it has moved since."),
    ] = None,
    mixed_cpus: MixedCpus = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Finish a job that was run in parts."""
    from trapetum.formats.artifact import Artifact
    from trapetum.quantize.shared_job import merge_parts

    path = merge_parts(folder, source=source, mixed_cpus=mixed_cpus, progress=terminal_progress())
    with Artifact.open(path) as artifact:
        count = len(artifact.records)
    emit({"out": str(path), "tensors": count}, f"{path}: {count:,} tensors, finished", as_json=json)
