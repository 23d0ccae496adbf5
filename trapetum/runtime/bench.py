"""How fast the decoders are on this machine, against its memory and against float32 BLAS, in one interleaved run.

Every case multiplies the same number of tokens; its weights are copied until they fill a pool larger than the last
cache, and every run takes another copy: an 8 MiB matrix used twice would be read from the cache, at an impossible
70 GB/s. Round by round all cases run one after the other (A B C A B C ...), so that a slow phase of the machine hits
all of them; ratios are medians over the rounds. A product of one token is timed behind others of its kind that went on
for 5 ms (:data:`LEAD`), BLAS and llama.cpp too, as products follow each other when a model decodes: after a pause,
waking a thread takes some 0.1 ms, and the next six or seven products are up to half as slow again.

``share_of_bandwidth`` is bytes a second over those of the plain read; ``share_of_arithmetic`` compares with the same
kernel on weights that stay in the cache, which is what its instructions alone would take.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from trapetum.errors import KernelUnavailable, RecipeError
from trapetum.kernels.cpu.pool import Pool
from trapetum.progress import Progress
from trapetum.runtime.bench_cases import (
    BLAS,
    POOL_BYTES,
    READ,
    SCHEMES,
    Case,
    blas_case,
    matrix_cases,
    read_case,
)

__all__ = ["LEAD", "MOST_TOKENS", "bench_cpu", "interleave"]

MOST_TOKENS = 1024
# A token is some two hundred products in a row. Behind other work the first ones are slower, whatever the kernel:
# Q2_0 of 4096 x 4096 takes 0.47, 0.41, 0.41, 0.40, 0.40, 0.38 and from then on 0.30 ms.
LEAD = 5e-3


def interleave(
    cases: Sequence[Case], rounds: int, clock: Callable[[], float] = time.perf_counter, *, lead: float = 0.0
) -> dict[str, list[float]]:
    """Seconds of every round of every case, run in turn after one untimed round.

    Before each timed run a case runs untimed until ``lead`` seconds have passed, every time on other weights; then at
    least once. On a busy machine ``time.process_time`` tells more than the wall.
    """
    seconds: dict[str, list[float]] = {case.name: [] for case in cases}
    turns = dict.fromkeys(seconds, 0)

    def run(case: Case) -> None:
        case.run(turns[case.name])
        turns[case.name] += 1

    for case in cases:
        run(case)
    for _ in range(rounds):
        for case in cases:
            begun = time.perf_counter()
            while time.perf_counter() - begun < lead:
                run(case)
            start = clock()
            run(case)
            seconds[case.name].append(clock() - start)
    return seconds


def bench_cpu(
    shapes: Sequence[tuple[int, int]] = ((4096, 4096),),
    *,
    tokens: int = 1,
    threads: int | None = None,
    rounds: int = 15,
    schemes: Sequence[str] = tuple(SCHEMES),
    pool_bytes: int = POOL_BYTES,
    llama: Sequence[str] | None = None,
    cpu_time: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Time kernels.

    Parameters
    ----------
    shapes : sequence of (rows, in_features)
        ``in_features`` a multiple of 256.
    tokens : int
        1 to ``MOST_TOKENS``; more than 16 go the way of a prompt, decoded tile by tile.
    threads : int, optional
    rounds : int
    schemes : sequence of str
        Of ``SCHEMES``.
    pool_bytes : int
        Of every case's weights; more than the last-level cache.
    llama : sequence of str, optional
        Types of llama.cpp whose row products are timed too, for one token, where PyPI ``xllamacpp`` is installed; all
        of ``bench_llama.LLAMA_TYPES`` when omitted.
    cpu_time : bool
        Time of the process instead of the wall: for a busy machine, and one thread.
    progress : Progress, optional

    Returns
    -------
    dict
        JSON: ``machine`` and ``shapes``, each with a list ``kernels`` of ``name``, ``seconds`` (median),
        ``weights_per_second`` (times tokens), ``bytes_per_second``, ``share_of_bandwidth``,
        ``share_of_arithmetic``, ``ratio_to_blas``, and ``rounds``: the seconds of each.

    Raises
    ------
    RecipeError
        For an unknown scheme or a shape that no kernel takes.
    """
    from threadpoolctl import threadpool_limits

    from trapetum.runtime.environment import describe_environment

    unknown = [name for name in schemes if name not in SCHEMES]
    if unknown:
        raise RecipeError(f"scheme {unknown[0]!r} is unknown; known are {', '.join(SCHEMES)}")
    for rows, count in shapes:
        if rows < 1 or count < 1 or count % 256:
            raise RecipeError(f"shape {rows}x{count} is not allowed; inputs must be a multiple of 256")
    if not 1 <= tokens <= MOST_TOKENS:
        raise RecipeError(f"tokens is {tokens}; 1 to {MOST_TOKENS} are allowed")
    pool, progress = Pool(threads), progress or Progress()
    environment = describe_environment()
    clock = time.process_time if cpu_time else time.perf_counter
    report: dict[str, Any] = {
        "machine": {key: environment[key] for key in ("cpu", "packages")},
        "threads": pool.threads,
        "tokens": tokens,
        "rounds": rounds,
        "pool_bytes": pool_bytes,
        "shapes": [],
    }
    progress.begin("timing kernels", len(shapes), "shapes")
    with threadpool_limits(pool.threads, "blas"):
        for rows, count in shapes:
            cases = [read_case(pool, pool_bytes), blas_case(rows, count, tokens, pool_bytes)]
            for name in schemes:
                cases += matrix_cases(name, rows, count, tokens, pool, pool_bytes)
            if tokens == 1:
                cases += _llama(llama, rows, count, pool, pool_bytes, report)
            found = _summary(
                cases, interleave(cases, rounds, clock, lead=LEAD if tokens == 1 else 0.0), tokens
            )
            report["shapes"].append({"rows": rows, "in_features": count, "kernels": found})
            progress.advance(1)
    progress.end()
    return report


def _llama(
    types: Sequence[str] | None, rows: int, count: int, pool: Pool, pool_bytes: int, report: dict[str, Any]
) -> list[Case]:
    from trapetum.runtime.bench_llama import LLAMA_TYPES, llama_cases

    try:
        return llama_cases(LLAMA_TYPES if types is None else types, rows, count, pool, pool_bytes)
    except KernelUnavailable as error:
        report["llama"] = error.message
        return []


def _summary(cases: Sequence[Case], seconds: dict[str, list[float]], tokens: int) -> list[dict[str, Any]]:
    median = {name: statistics.median(times) for name, times in seconds.items()}
    sizes = {case.name: case for case in cases}
    bandwidth = sizes[READ].nbytes / median[READ]
    rows = []
    for case in cases:
        if case.name.endswith(" cached"):
            continue
        rate = case.nbytes / median[case.name]
        row: dict[str, Any] = {"name": case.name, "seconds": median[case.name], "bytes_per_second": rate}
        row["rounds"] = seconds[case.name]
        if case.weights:
            row["weights_per_second"] = case.weights * tokens / median[case.name]
            row["share_of_bandwidth"] = rate / bandwidth
            ratios = [a / b for a, b in zip(seconds[BLAS], seconds[case.name])]
            row["ratio_to_blas"] = statistics.median(ratios)
        cached = f"{case.name} cached"
        if cached in median:
            best = sizes[cached].weights / median[cached]
            row["share_of_arithmetic"] = case.weights / median[case.name] / best
        rows.append(row)
    return rows
