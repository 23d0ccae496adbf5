"""``trapetum imatrix``: what the linear layers of a model see on a text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trapetum.cli.options import Debug, Json, Overwrite, Revision, Threads, Token, option, whole
from trapetum.cli.output import emit
from trapetum.cli.progress import terminal_progress

__all__ = ["imatrix"]


def imatrix(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model that can be run, or a Hub id.")],
    text: Annotated[
        Path, typer.Option("--text", metavar="FILE", help="UTF-8 text, a few hundred kilobytes.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The file to write.")],
    hessian: Annotated[
        bool, typer.Option("--hessian", help="Whole second moments (safetensors), not only their diagonals.")
    ] = False,
    tokens: Annotated[
        int | None,
        option("--tokens", parse=whole(1), metavar="N", help="Most tokens to take; 131072 by default."),
    ] = None,
    revision: Revision = None,
    token: Token = None,
    threads: Threads = None,
    overwrite: Overwrite = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure the importance of a model's inputs; GGUF's importance matrix, or second moments."""
    from trapetum.hub import resolve_model
    from trapetum.quantize.statistics import collect_importance, collect_moments
    from trapetum.runtime.calibrate import TOKENS

    progress = terminal_progress()
    path = resolve_model(model, revision=revision, token=token, progress=progress)
    work = collect_moments if hessian else collect_importance
    most = tokens or TOKENS
    work(path, text, out, tokens=most, overwrite=overwrite, threads=threads, progress=progress)
    size = out.stat().st_size
    emit({"path": str(out), "bytes": size}, f"{out}: {size:,} bytes", as_json=json)
