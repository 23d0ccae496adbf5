"""``trapetum run``: let a model write."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from trapetum.cli.options import (
    Debug,
    Device,
    Experts,
    Threads,
    choice,
    only_with,
    option,
    real,
    utf8_argument,
    whole,
)
from trapetum.cli.output import note, stream

__all__ = ["run"]


def run(
    context: typer.Context,
    path: Annotated[Path, typer.Argument(help="A model folder, an artifact folder or a .cbk file.")],
    prompt: Annotated[
        str, option("--prompt", parse=utf8_argument, metavar="TEXT", help="What the model continues.")
    ],
    count: Annotated[int, option("-n", parse=whole(1), metavar="N", help="Most tokens to write.")] = 64,
    temperature: Annotated[
        float, option("--temperature", parse=real(0), metavar="T", help="0 takes the likeliest token.")
    ] = 0.0,
    top_p: Annotated[
        float,
        option(
            "--top-p", parse=real(0, 1, above=True), metavar="P", help="Sample from this probability mass."
        ),
    ] = 1.0,
    top_k: Annotated[
        int | None, option("--top-k", parse=whole(1), metavar="K", help="Sample from the K likeliest tokens.")
    ] = None,
    seed: Annotated[int, option("--seed", parse=whole(0), metavar="S", help="Seed of the sampling.")] = 0,
    stop: Annotated[
        list[str] | None,
        option("--stop", parse=utf8_argument, metavar="TEXT", help="End before this text; may be repeated."),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Put the prompt into the model's chat template as the user's turn.")
    ] = False,
    precision: Annotated[
        str,
        option(
            "--precision",
            parse=choice("exact", "precise", "fast"),
            metavar="NAME",
            help="exact (float32), precise (15-bit activations) or fast (8-bit ones where weights have two).",
        ),
    ] = "fast",
    cache_type: Annotated[
        str,
        option(
            "--cache-type",
            parse=choice("f32", "f16"),
            metavar="NAME",
            help="How keys and values are kept: f32, or f16 in half the memory.",
        ),
    ] = "f32",
    device: Device = "cpu",
    experts: Experts = "card",
    threads: Threads = None,
    debug: Debug = False,
) -> None:
    """Generate text: text to stdout as it comes, speed to stderr."""
    only_with(context, temperature > 0, "--temperature above 0", "top_p", "top_k", "seed")
    only_with(context, device == "cuda", "--device cuda", "experts")
    only_with(context, device == "cpu", "--device cpu", "precision", "cache_type")
    from trapetum.errors import RecipeError
    from trapetum.runtime.model import load

    with load(
        path, device=device, threads=threads, precision=precision, cache_type=cache_type, experts=experts
    ) as model:
        if chat:
            text = model.tokenizer.chat([{"role": "user", "content": prompt}])
            ids = model.tokenizer.encode(text)
        else:
            ids = model.tokenizer.encode(prompt, add_special_tokens=True)
        if not ids:
            raise RecipeError(
                "the prompt has no token", hint="Give --prompt a text that the model can continue."
            )
        clock = _Clock()
        model.generate(ids, count, temperature, top_p, top_k, seed, stop=stop or (), on_token=clock.token)
        stream("\n")
        note(clock.summary(len(ids)))


class _Clock:
    """Passes text on to stdout and keeps the time of the first and the last token."""

    def __init__(self) -> None:
        self._start = self._first = self._last = time.perf_counter()
        self._count = 0

    def token(self, token: int, text: str) -> None:
        """Receive a token; id -1 brings only left-over text."""
        if token >= 0:
            self._last = time.perf_counter()
            self._count += 1
            if self._count == 1:
                self._first = self._last
        if text:
            stream(text)

    def summary(self, prompt: int) -> str:
        """Tokens, time to the first one, tokens a second after it."""
        counts = f"{prompt} prompt tokens, {self._count} new tokens"
        if not self._count:
            return counts
        counts += f", first after {self._first - self._start:.3f} s"
        seconds = self._last - self._first
        return f"{counts}, then {(self._count - 1) / seconds:.1f} tokens/s" if seconds > 0 else counts
