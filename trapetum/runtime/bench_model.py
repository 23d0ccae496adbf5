"""How fast a whole model runs: time to the first token, and tokens a second after it."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

from trapetum.errors import RecipeError

__all__ = ["bench_model"]


def bench_model(
    path: str | Path,
    *,
    threads: int | None = None,
    precision: str = "fast",
    cache_type: str = "f32",
    prompt: int = 128,
    tokens: int = 64,
    rounds: int = 5,
) -> dict[str, Any]:
    """Load a model and let it continue a prompt of arbitrary ids, several times.

    Parameters
    ----------
    path : path
    threads, precision, cache_type
        See :func:`trapetum.runtime.model.load`.
    prompt, tokens : int
        Tokens given, and generated in every round; tokens at least 2.
    rounds : int

    Returns
    -------
    dict
        JSON: ``path``, ``threads``, ``precision``, ``cache_type``, ``prompt``, ``tokens``, ``load_seconds``;
        ``first_start_seconds``: to the first token of the first round, which compiles what is not cached;
        ``first_token_seconds`` and ``tokens_per_second``: medians of the rounds after it.

    Raises
    ------
    RecipeError
        If the prompt and the tokens do not fit the model, or tokens or rounds are too few.
    TrapetumError
        If the model cannot be loaded.
    """
    from trapetum.runtime.model import load

    if prompt < 1 or tokens < 2 or rounds < 1:
        raise RecipeError(
            f"a prompt of {prompt}, {tokens} tokens and {rounds} rounds; 1, 2 and 1 are the least"
        )
    start = time.perf_counter()
    with load(path, threads=threads, precision=precision, cache_type=cache_type) as model:
        loaded = time.perf_counter() - start
        ids = [(7 * i + 3) % min(model.real_vocab_size, 1000) for i in range(prompt)]
        firsts, rates = [], []
        for _ in range(rounds + 1):
            times: list[float] = []
            start = time.perf_counter()
            model.generate(ids, tokens, stop_ids=(), on_token=lambda *_: times.append(time.perf_counter()))  # noqa: B023
            firsts.append(times[0] - start)
            rates.append((tokens - 1) / (times[tokens - 1] - times[0]))
        return {
            "path": str(path),
            "threads": model.pool.threads,
            "precision": precision,
            "cache_type": cache_type,
            "prompt": prompt,
            "tokens": tokens,
            "load_seconds": loaded,
            "first_start_seconds": firsts[0],
            "first_token_seconds": statistics.median(firsts[1:]),
            "tokens_per_second": statistics.median(rates[1:]),
        }
