"""``trapetum compare``: how far two models differ on a text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from trapetum.cli.options import (
    Context,
    Debug,
    Device,
    Experts,
    Json,
    Revision,
    TextFile,
    Threads,
    Token,
    only_with,
)
from trapetum.cli.output import emit, fields
from trapetum.cli.progress import terminal_progress

__all__ = ["compare"]


def compare(
    context: typer.Context,
    a: Annotated[
        str, typer.Argument(metavar="A", help="The reference: a model folder, artifact, .cbk or Hub id.")
    ],
    b: Annotated[Path, typer.Argument(metavar="B", help="The model under test.")],
    text: TextFile,
    ctx: Context = 512,
    revision: Revision = None,
    token: Token = None,
    device: Device = "cpu",
    experts: Experts = "card",
    threads: Threads = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Compare the predictions of two models."""
    only_with(context, device == "cuda", "--device cuda", "experts")
    from trapetum.hub import resolve_model
    from trapetum.runtime.evaluate import compare as measure
    from trapetum.runtime.model import load
    from trapetum.runtime.tokenizer import read_text

    words = read_text(text)
    progress = terminal_progress()
    reference = resolve_model(a, revision=revision, token=token, progress=progress)
    with (
        load(reference, device=device, threads=threads, experts=experts) as first,
        load(b, device=device, threads=threads, experts=experts) as second,
    ):
        result = measure(first, second, words, ctx=ctx, progress=progress)
    emit(result, lambda: _text(result), as_json=json)


def _text(r: dict[str, Any]) -> str:
    changes = f"{r['argmax_changes']:,} ({r['argmax_ties']:,} of them ties)"
    if r["argmax_changes"]:
        margins = f"{r['change_margin_mean']:.3f} in the mean, {r['change_margin_max']:.3f} at most"
        changes += f"; A's top-2 margin there {margins}"
    return fields(
        {
            "tokens": f"{r['tokens']:,} (windows of {r['ctx']})",
            "KL(A||B)": f"{r['kl_mean']:.6g} nats in the mean, {r['kl_max']:.6g} at most",
            "total variation": f"{r['tv_mean']:.6g} in the mean, {r['tv_max']:.6g} at most",
            "top-1 agreement": f"{100 * r['top1_agreement']:.3f} %",
            "argmax changes": changes,
            "perplexity A": f"{r['ppl_a']:.4f}",
            "perplexity B": f"{r['ppl_b']:.4f}",
        }
    )
