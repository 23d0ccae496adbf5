"""``trapetum bench``: how fast this machine decodes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from trapetum.cli.options import Debug, Device, Json, Threads, only_with, option, whole
from trapetum.cli.output import emit, table
from trapetum.cli.progress import terminal_progress

__all__ = ["bench", "card_text", "text"]


def _shape(text: str) -> tuple[int, int]:
    rows, _, inputs = text.partition("x")
    if not (rows.isdecimal() and inputs.isdecimal()):
        raise ValueError(f"{text!r} is not a shape; write outputs and inputs, such as 4096x11008")
    return int(rows), int(inputs)


def bench(
    context: typer.Context,
    shapes: Annotated[
        list[Any] | None,
        option(
            "--shape",
            parse=_shape,
            metavar="ROWSxINPUTS",
            help="A matrix; may be repeated. 4096x4096 by default, on a card four.",
        ),
    ] = None,
    tokens: Annotated[
        int, option("--tokens", parse=whole(1), metavar="M", help="Tokens multiplied at once, 1 to 1024.")
    ] = 1,
    rounds: Annotated[
        int, option("--rounds", parse=whole(1), metavar="N", help="Rounds; medians are printed.")
    ] = 15,
    schemes: Annotated[
        list[str] | None,
        option("--scheme", metavar="NAME", help="Only this scheme; may be repeated. All by default."),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option("--model", metavar="PATH", help="Also run this model: first token, tokens a second."),
    ] = None,
    pool: Annotated[
        int, option("--pool", parse=whole(1), metavar="MIB", help="MiB of weights for each kernel.")
    ] = 256,
    cpu_time: Annotated[
        bool, typer.Option("--cpu-time", help="Count CPU time, not the wall: for a busy machine.")
    ] = False,
    device: Device = "cpu",
    threads: Threads = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Time the decoders against memory, float32 BLAS and llama.cpp's kernels; on the card, against cuBLAS."""
    only_with(context, device == "cpu", "--device cpu", "model", "pool", "cpu_time", "threads")
    if device == "cuda":
        from trapetum.runtime import bench_cuda

        found = bench_cuda.bench_cuda(
            shapes or bench_cuda.SHAPES,
            tokens=(tokens,),
            rounds=rounds,
            schemes=schemes or tuple(bench_cuda.SCHEMES),
            progress=terminal_progress(),
        )
        emit(found, lambda: card_text(found), as_json=json)
        return
    # OpenBLAS's threads spin for 25 ms after a product, on the core that the next kernel wants: its second thread gains
    # nothing then (K = 16 on 32000 x 4096 at 2 threads: 6.7 ms, else 4.6). Read when NumPy is loaded.
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")
    from trapetum.runtime.bench import bench_cpu
    from trapetum.runtime.bench_cases import SCHEMES
    from trapetum.runtime.bench_model import bench_model

    report = bench_cpu(
        shapes or [(4096, 4096)],
        tokens=tokens,
        threads=threads,
        rounds=rounds,
        schemes=schemes or tuple(SCHEMES),
        pool_bytes=pool << 20,
        cpu_time=cpu_time,
        progress=terminal_progress(),
    )
    if model is not None:
        report["model"] = bench_model(model, threads=threads)
    emit(report, lambda: text(report), as_json=json)


def text(report: dict[str, Any]) -> str:
    """The report as a table for people."""
    lines = []
    for shape in report["shapes"]:
        lines.append(
            f"{shape['rows']} x {shape['in_features']}, tokens {report['tokens']}, threads {report['threads']}, "
            f"median of {report['rounds']}"
        )
        header = ("kernel", "ms", "Gw/s", "GB/s", "of bandwidth", "of arithmetic", "of fp32 BLAS")
        lines.append(table(header, [_row(kernel) for kernel in shape["kernels"]], right=range(1, 7)))
    if "llama" in report:
        lines.append(report["llama"])
    if "model" in report:
        m = report["model"]
        lines.append(
            f"{m['path']}: first token of a prompt of {m['prompt']} after {m['first_token_seconds']:.3f} s "
            f"({m['first_start_seconds']:.1f} s at first start), then {m['tokens_per_second']:.1f} tokens/s"
        )
    return "\n".join(lines)


def card_text(report: dict[str, Any]) -> str:
    """The card's report as a table for people."""
    machine = report["machine"]
    lines = [
        f"{machine['device']}, driver {machine['driver']}, CuPy {machine['cupy']}; memory reads "
        f"{report['bandwidth'] / 1e9:.0f} GB/s; median of {report['rounds']}"
    ]
    for shape in report["shapes"]:
        for tokens, seconds in shape["cublas"].items():
            lines.append(
                f"{shape['rows']} x {shape['in_features']}, tokens {tokens}, cuBLAS {seconds * 1e6:.1f} us"
            )
            rows = [
                (
                    k["name"],
                    f"{k['seconds'] * 1e6:.1f}",
                    f"{k['bytes_per_second'] / 1e9:.0f}",
                    f"{k['share_of_bandwidth']:.2f}",
                    f"{k['ratio_to_cublas']:.2f}",
                )
                for k in shape["kernels"]
                if str(k["tokens"]) == tokens
            ]
            header = ("kernel", "us", "GB/s", "of bandwidth", "times cuBLAS")
            lines.append(table(header, rows, right=range(1, 5)))
    return "\n".join(lines)


def _row(kernel: dict[str, Any]) -> Sequence[str]:
    def number(key: str, scale: float = 1.0, places: int = 2) -> str:
        return f"{kernel[key] * scale:.{places}f}" if key in kernel else ""

    return (
        kernel["name"],
        number("seconds", 1e3, 3),
        number("weights_per_second", 1e-9, 1),
        number("bytes_per_second", 1e-9, 1),
        number("share_of_bandwidth"),
        number("share_of_arithmetic"),
        number("ratio_to_blas"),
    )
