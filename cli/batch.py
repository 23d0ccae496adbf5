"""``trapetum batch``: many models, one after another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trapetum.cli.options import Debug, Json, Token
from trapetum.cli.output import emit, note, table
from trapetum.cli.progress import terminal_progress

if TYPE_CHECKING:
    from trapetum.batch import Outcome

__all__ = ["batch"]


def batch(
    file: Annotated[Path, typer.Argument(metavar="JOBS.toml", help="A list of jobs; see docs/batch.md.")],
    token: Token = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Quantize many models, one after another; go on after failures."""
    from trapetum.batch import read_jobs, run_batch

    jobs = read_jobs(file)
    done = 0

    def told(outcome: Outcome) -> None:
        nonlocal done
        done += 1
        why = f": {outcome.error}" if outcome.error else ""
        note(f"job {done} of {len(jobs)}: {outcome.model} -> {outcome.out}: {outcome.status}{why}")
        if outcome.hint:
            note(f"hint: {outcome.hint}")

    outcomes = run_batch(jobs, token=token, progress=terminal_progress(), told=told)
    failed = sum(o.status == "failed" for o in outcomes)
    emit({"jobs": [o.to_dict() for o in outcomes], "failed": failed}, _lines(outcomes, failed), as_json=json)
    if failed:
        raise typer.Exit(1)


def _lines(outcomes: Sequence[Outcome], failed: int) -> str:
    rows = [
        [
            o.model,
            o.out,
            o.status,
            "" if o.bpw is None else f"{o.bpw:.3f}",
            "" if o.relative_error is None else f"{o.relative_error:.3e}",
            f"{o.seconds:.1f}",
        ]
        for o in outcomes
    ]
    header = ["model", "out", "status", "bpw", "rel. error", "s"]
    return "\n".join([table(header, rows, right=(3, 4, 5)), "", f"{len(outcomes)} jobs, {failed} failed"])
