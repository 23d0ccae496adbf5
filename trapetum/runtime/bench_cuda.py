"""How fast the card multiplies by quantized weights, against its own memory and against cuBLAS, in one run.

Every case is captured as one CUDA graph of launches that go round over copies of its weights, more than the
second-level cache holds, so that all of them come from memory; a figure is the median over replays, divided by the
launches. It counts everything that a product needs: for ternary weights the quantization of activations, too.
``ratio_to_cublas`` compares with a float16 product of the same shape (float32 sums) in the same run,
``share_of_bandwidth`` the weights' bytes a second with a plain read of memory. Products of more than 16 tokens are
compared with the bfloat16 one.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from trapetum.errors import RecipeError
from trapetum.formats import planes, tiles
from trapetum.kernels.cuda.dense import multiply_dense
from trapetum.kernels.cuda.linear import LAYOUTS, MOST_TOKENS, CudaLinear
from trapetum.kernels.cuda.module import card, counters, import_cupy
from trapetum.kernels.cuda.workspace import Workspace
from trapetum.progress import Progress

__all__ = ["SCHEMES", "SHAPES", "bench_cuda"]

SCHEMES: dict[str, tuple[str, int]] = {
    "codebook4": (tiles.Codebook4Tiles.layout, 16),
    "codebook8": (tiles.Codebook8Tiles.layout, 256),
    "additive 1x8": (tiles.AdditiveTiles.layout, 1),
    "additive 2x8": (tiles.AdditiveTiles.layout, 2),
    "ternary": (planes.LAYOUT, 0),
}
"""Name -> layout and entries."""
SHAPES = ((4096, 4096), (17408, 5120), (5120, 17408), (28672, 8192))
POOL_BYTES = 400 << 20
"""Of every case's weights: seven times the second-level cache of an H200."""


def _random_weights(layout: str, entries: int, rows: int, in_features: int) -> Any:
    """Bytes of a matrix: random codes, tables and scales of normal numbers."""
    cupy = import_cupy()
    if layout == planes.LAYOUT:
        size, tables = rows * in_features // 128 * 34, rows * in_features // 4
    else:
        form = tiles.TILES[layout](rows, in_features, entries)
        size, tables = form.nbytes, form.tables_offset
    data = cupy.random.randint(0, 256, size, dtype=cupy.uint8)
    values = cupy.random.standard_normal((size - tables) // 2, dtype=cupy.float32) / 50
    data[tables:] = values.astype(cupy.float16).view(cupy.uint8)
    return data


def _copies(nbytes: int) -> int:
    return max(2, -(-POOL_BYTES // nbytes))


def _graph(calls: Sequence[Callable[[], object]], rounds: int) -> float:
    """Seconds of one call: the median replay of a graph of all."""
    cupy = import_cupy()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        calls[0]()
        stream.synchronize()
        stream.begin_capture()
        for call in calls:
            call()
        graph = stream.end_capture()
        graph.launch(stream)
        found = _timed(lambda: graph.launch(stream), stream, rounds)
    return found / len(calls)


def _timed(run: Callable[[], object], stream: Any, rounds: int) -> float:
    cupy = import_cupy()
    seconds = []
    for _ in range(rounds):
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record(stream)
        run()
        end.record(stream)
        end.synchronize()
        seconds.append(float(cupy.cuda.get_elapsed_time(begin, end)) / 1e3)
    return statistics.median(seconds)


def _cublas(rows: int, in_features: int, tokens: int, bfloat: bool, rounds: int) -> float:
    """Seconds of a dense product with float32 sums."""
    cupy = import_cupy()
    kind = cupy.uint16 if bfloat else cupy.float16
    count = _copies(2 * rows * in_features)

    def made(*shape: int) -> Any:
        values = cupy.random.standard_normal(shape, dtype=cupy.float32) / 50
        return (values.view(cupy.uint32) >> 16).astype(cupy.uint16) if bfloat else values.astype(kind)

    x, out = made(tokens, in_features), cupy.empty((tokens, rows), kind)
    calls = [partial(multiply_dense, x, made(rows, in_features), rows, out) for _ in range(count)]
    return _graph(calls * max(1, -(-16 // count)), rounds)


def _bandwidth(rounds: int) -> float:
    """Bytes a second of a plain read: the sum of a gigabyte."""
    cupy = import_cupy()
    data = cupy.ones(1 << 28, cupy.float32)
    total = cupy.empty((), cupy.float32)
    return float(data.nbytes) / _graph([lambda: data.sum(out=total)], rounds)


def bench_cuda(
    shapes: Sequence[tuple[int, int]] = SHAPES,
    *,
    tokens: Sequence[int] = (1,),
    rounds: int = 20,
    schemes: Sequence[str] = tuple(SCHEMES),
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Time the products of the card.

    Parameters
    ----------
    shapes : sequence of (rows, in_features)
        ``in_features`` a multiple of 128.
    tokens : sequence of int
        Numbers of tokens multiplied at once.
    rounds : int
        Replays whose median counts.
    schemes : sequence of str
        Of ``SCHEMES``.
    progress : Progress, optional

    Returns
    -------
    dict
        JSON: ``machine`` (device, driver, versions), ``bandwidth`` (bytes a second of a plain read), ``compiled``
        (kernels compiled after each source was first used: 0), and ``shapes``, each with ``cublas`` (tokens -> seconds)
        and a list ``kernels`` of ``name``, ``tokens``, ``seconds``, ``bytes``, ``bytes_per_second``,
        ``share_of_bandwidth``, ``ratio_to_cublas``.

    Raises
    ------
    KernelUnavailable
        If there is no card.
    RecipeError
        For an unknown scheme or a shape that no kernel takes.
    """
    unknown = [name for name in schemes if name not in SCHEMES]
    if unknown:
        raise RecipeError(f"scheme {unknown[0]!r} is unknown; known are {', '.join(SCHEMES)}")
    for rows, count in shapes:
        if rows < 1 or count < 1 or count % 128:
            raise RecipeError(f"shape {rows}x{count} is not allowed; inputs must be a multiple of 128")
    cupy, progress = import_cupy(), progress or Progress()
    device = card()
    for name in schemes:  # every source is compiled and loaded before anything is timed
        _case(name, 256, 256, 1, 1)
        _case(name, 256, 256, 64, 1)
    before = counters["compiled"]
    bandwidth = _bandwidth(rounds)
    report: dict[str, Any] = {
        "machine": {
            "device": device.name,
            "capability": device.capability / 10,
            "driver": cupy.cuda.runtime.driverGetVersion(),
            "runtime": cupy.cuda.runtime.runtimeGetVersion(),
            "cupy": cupy.__version__,
            "l2": device.l2,
        },
        "rounds": rounds,
        "bandwidth": bandwidth,
        "shapes": [],
    }
    progress.begin("timing kernels", len(shapes) * len(tokens), "cases")
    for rows, count in shapes:
        found: dict[str, Any] = {"rows": rows, "in_features": count, "cublas": {}, "kernels": []}
        for many in tokens:
            reference = _cublas(rows, count, many, many > MOST_TOKENS, rounds)
            found["cublas"][str(many)] = reference
            for name in schemes:
                seconds, nbytes = _case(name, rows, count, many, rounds)
                found["kernels"].append(
                    {
                        "name": name,
                        "tokens": many,
                        "seconds": seconds,
                        "bytes": nbytes,
                        "bytes_per_second": nbytes / seconds,
                        "share_of_bandwidth": nbytes / seconds / bandwidth,
                        "ratio_to_cublas": reference / seconds,
                    }
                )
            progress.advance(1)
        report["shapes"].append(found)
    progress.end()
    report["compiled"] = counters["compiled"] - before
    return report


def _case(name: str, rows: int, in_features: int, tokens: int, rounds: int) -> tuple[float, int]:
    """Seconds of a product, and the bytes of its weights."""
    cupy = import_cupy()
    layout, entries = SCHEMES[name]
    data, workspace = _random_weights(layout, entries, rows, in_features), Workspace()
    count = _copies(data.nbytes) if rounds > 1 else 1
    copies: list[CudaLinear] = [
        LAYOUTS[layout](data.copy() if i else data, rows, in_features, entries, workspace)
        for i in range(count)
    ]
    x = cupy.random.standard_normal((tokens, in_features), dtype=cupy.float32).astype(cupy.float16)
    out = cupy.empty((tokens, rows), cupy.float16)
    calls = [partial(linear.multiply, x, out) for linear in copies]
    return _graph(calls * max(1, -(-16 // count)), rounds), data.nbytes
