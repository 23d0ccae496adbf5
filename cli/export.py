"""``trapetum export``: write an artifact in another format."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trapetum.cli.options import (
    Artifact,
    Debug,
    DryRun,
    Json,
    Overwrite,
    ShardSize,
    Threads,
    choice,
    option,
)
from trapetum.cli.output import emit, table
from trapetum.cli.progress import terminal_progress

if TYPE_CHECKING:
    from trapetum.export.plan import ExportPlan

__all__ = ["default_target", "export", "export_lines", "format_option"]


def known_format(text: str) -> str:
    """A key of the library's table of formats; raises ``ValueError`` with the list otherwise."""
    from trapetum.export import FORMATS

    return choice(*FORMATS)(text)


def known_gguf_type(text: str) -> str:
    """A type that the gguf export takes, in any case; raises ``ValueError`` with the list otherwise."""
    from trapetum.export.gguf_types import TYPE_NAMES

    return choice(*TYPE_NAMES)(text.upper())


def format_option(*names: str, help: str) -> Any:
    """An option that names an export format; the table is only read when the option is given."""
    return option(*names, parse=known_format, help=help, metavar="FORMAT")


def default_target(artifact: Path, format: str) -> Path:
    """Where an export goes when nothing is said: beside the artifact, as ``ARTIFACT-FORMAT``."""
    return artifact.with_name(f"{artifact.resolve().name}-{format}")


def export_lines(plan: ExportPlan, path: Path, *, dry_run: bool) -> str:
    """A plan, or what was written, for people: tensors that changed, then the size."""
    rows = [
        [r.name, r.action, r.detail, "" if r.relative_error is None else f"{r.relative_error:.3e}"]
        for r in plan.rows
        if r.action not in ("exact", "zeros")
    ]
    parts = [table(["tensor", "action", "detail", "added error"], rows, right=(3,))] if rows else []
    files = f"{len(plan.files)} weight file{'s' if len(plan.files) != 1 else ''}"
    if not dry_run:  # whether rounding changes a tensor shows when it is written
        parts.append(f"{len(plan.rows) - len(rows)} of {len(plan.rows)} tensors exact")
    parts.append(f"{'would write' if dry_run else 'wrote'} {path}: {plan.size:,} bytes in {files}")
    return "\n".join(parts)


def export(
    artifact: Artifact,
    format: Annotated[
        str,
        format_option(
            "--format",
            help="cbk: a .cbk file; hf: a dense Hugging Face folder; gguf: for llama.cpp; planes: for GPU kernels; "
            "mtp: the prediction block of a DeepSeek model.",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="PATH", help="What to write; ARTIFACT-FORMAT by default."),
    ] = None,
    dtype: Annotated[
        str | None,
        option(
            "--dtype",
            parse=choice("f32", "bf16", "f16"),
            metavar="NAME",
            help="hf: f32 (exact, the default), bf16 or f16.",
        ),
    ] = None,
    gguf_type: Annotated[
        str | None,
        option(
            "--gguf-type",
            parse=known_gguf_type,
            metavar="TYPE",
            help="gguf: auto (the default), Q2_0 PQ2_0 PTQ1_0 TQ2_0 TQ1_0 for ternary tensors, Q2_K ... Q8_0 for "
            "codebooks, F16 BF16 F32 for all.",
        ),
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option(
            "--source", metavar="MODEL", help="Requantize from this model, not from decoded values."
        ),
    ] = None,
    max_shard_size: ShardSize = 5 * 10**9,
    magic: Annotated[
        str | None,
        option(
            "--magic",
            parse=choice("CBK3", "CBKG", "CBKD", "CBKE", "CBKR", "CBKS", "CBKV"),
            metavar="MAGIC",
            help="cbk: the layout, where a family has several; what is stored chooses by default.",
        ),
    ] = None,
    fuse: Annotated[
        bool, typer.Option("--fuse", help="planes: q, k, v and gate, up as one matrix each.")
    ] = False,
    threads: Threads = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Write an artifact in another format."""
    from trapetum.export import plan_export

    out = out or default_target(artifact, format)
    progress = terminal_progress()
    with plan_export(
        artifact,
        format,
        out,
        source=source,
        dtype=dtype,
        gguf_type=gguf_type,
        max_shard_size=max_shard_size,
        fuse=fuse,
        overwrite=overwrite,
        threads=threads,
        magic=magic,
    ) as plan:
        known = 0 if dry_run else len(plan.notes)  # writing says those itself
        path = out if dry_run else plan.write(progress)
        for text in plan.notes[known:]:
            progress.note(text)
        data = {"path": str(path), "dry_run": dry_run, **plan.report()}
        emit(data, lambda: export_lines(plan, path, dry_run=dry_run), as_json=json)
