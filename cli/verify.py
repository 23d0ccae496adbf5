"""``trapetum verify``: is this output whole, and does it say what its source says."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trapetum.cli.options import (
    Context,
    Debug,
    Device,
    Experts,
    Json,
    Revision,
    Threads,
    Token,
    only_with,
)
from trapetum.cli.output import VERIFY_FAILED, emit, table
from trapetum.cli.progress import terminal_progress

__all__ = ["verify"]

_WORDS = {True: "ok", False: "FAILED", None: "skipped"}


def verify(
    context: typer.Context,
    path: Annotated[Path, typer.Argument(help="An artifact folder, a .cbk file or a model folder.")],
    source: Annotated[
        str | None,
        typer.Option("--source", metavar="MODEL", help="The model that it was made from; a Hub id, too."),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            "--text", metavar="FILE", exists=True, dir_okay=False, help="Compare logits on this text."
        ),
    ] = None,
    ctx: Context = 512,
    revision: Revision = None,
    token: Token = None,
    device: Device = "cpu",
    experts: Experts = "card",
    threads: Threads = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Check an output; exit 3 if it is wrong.

    Integrity (checksums, headers, values), the compiled decoders (with --device cuda the card's, too), the
    reconstruction error against the source, then the logits.
    """
    only_with(context, source is not None, "--source", "text", "revision", "token")
    only_with(context, source is not None and text is not None, "--source and --text", "ctx")
    on_card = device == "cuda" and source is not None and text is not None
    only_with(context, on_card, "--device cuda, --source and --text", "experts")
    from trapetum.hub import resolve_model
    from trapetum.runtime.tokenizer import read_text
    from trapetum.runtime.verify import verify_path

    words = None if text is None else read_text(text)
    progress = terminal_progress()
    origin = (
        None if source is None else resolve_model(source, revision=revision, token=token, progress=progress)
    )
    report = verify_path(
        path,
        source=origin,
        text=words,
        threads=threads,
        ctx=ctx,
        device=device,
        experts=experts,
        progress=progress,
    )
    rows = [[check.name, _WORDS[check.ok], check.detail] for check in report.checks]
    emit(report.to_dict(), lambda: table(["check", "result", "detail"], rows), as_json=json)
    if not report.ok:
        raise typer.Exit(VERIFY_FAILED)
