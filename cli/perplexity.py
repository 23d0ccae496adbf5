"""``trapetum perplexity``: how well a model predicts a text."""

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
    TextFile,
    Threads,
    choice,
    only_with,
    option,
)
from trapetum.cli.output import emit
from trapetum.cli.progress import terminal_progress

__all__ = ["perplexity"]


def perplexity(
    context: typer.Context,
    path: Annotated[Path, typer.Argument(help="A model folder, an artifact folder or a .cbk file.")],
    text: TextFile,
    ctx: Context = 512,
    score: Annotated[
        str,
        option(
            "--score",
            parse=choice("all", "second-half"),
            help="all: every token but a window's first; second-half: llama.cpp's convention.",
            metavar="RULE",
        ),
    ] = "all",
    device: Device = "cpu",
    experts: Experts = "card",
    threads: Threads = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure the perplexity of a text."""
    only_with(context, device == "cuda", "--device cuda", "experts")
    from trapetum.runtime.evaluate import perplexity as measure
    from trapetum.runtime.model import load
    from trapetum.runtime.tokenizer import read_text

    words = read_text(text)
    with load(path, device=device, threads=threads, experts=experts) as model:
        result = measure(model, words, ctx=ctx, score=score, progress=terminal_progress())
    line = "perplexity {ppl:.4f}, nll {nll:.6f} nats a token, {tokens:,} tokens (ctx {ctx}, score {score})"
    emit(result, lambda: line.format(**result), as_json=json)
