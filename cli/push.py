"""``trapetum push``: an artifact -> a repository on the Hub."""

from __future__ import annotations

from typing import Annotated

import typer

from trapetum.cli.options import Artifact, Debug, DryRun, Json, Quality, Token
from trapetum.cli.output import emit, table
from trapetum.cli.progress import terminal_progress

__all__ = ["push"]


def push(
    path: Artifact,
    repo: Annotated[str, typer.Argument(metavar="REPO", help="Where to push: org/name.")],
    private: Annotated[
        bool, typer.Option("--private", help="Create the repository as a private one.")
    ] = False,
    create_pr: Annotated[
        bool, typer.Option("--create-pr", help="Open a pull request on a repository that exists.")
    ] = False,
    base_model: Annotated[
        str | None,
        typer.Option("--base-model", metavar="ID", help="Hub id of the source, where it was a local folder."),
    ] = None,
    quality: Quality = None,
    token: Token = None,
    dry_run: DryRun = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Upload an artifact, with its model card, to the Hub."""
    if private and create_pr:
        raise typer.BadParameter(
            "--private and --create-pr exclude each other: a pull request goes to a repository that exists"
        )
    from trapetum.push import push_artifact

    progress = terminal_progress()
    report = push_artifact(
        path,
        repo,
        private=private,
        create_pr=create_pr,
        dry_run=dry_run,
        base_model=base_model,
        quality=quality or (),
        token=token,
        progress=progress,
    )
    for text in report.notes:
        progress.note(text)
    rows = [[name, f"{size:,}"] for name, size in report.files.items()]
    rows += [[name, "removed"] for name in report.removed]
    total = f"{len(report.files)} files, {sum(report.files.values()):,} bytes"
    last = f"would push {total} to {report.repo}" if dry_run else f"pushed {total}: {report.url}"
    emit(report.to_dict(), "\n".join([table(["file", "bytes"], rows, right=(1,)), "", last]), as_json=json)
