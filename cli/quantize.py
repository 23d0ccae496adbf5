"""``trapetum quantize``: checkpoint -> artifact."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trapetum.cli.export import default_target, export_lines, format_option
from trapetum.cli.options import (
    Debug,
    DryRun,
    Json,
    MixedCpus,
    Overwrite,
    Revision,
    ShardSize,
    Threads,
    Token,
    choice,
    only_with,
    option,
    parse_bits,
    parse_size,
    real,
    whole,
)
from trapetum.cli.output import emit, note, table
from trapetum.cli.progress import terminal_progress

if TYPE_CHECKING:
    from trapetum.quantize.report import Report
    from trapetum.quantize.share import Share

__all__ = ["quantize"]


def _known_scheme(text: str) -> str:
    """The name of a scheme; raises ``ValueError`` with the list otherwise."""
    from trapetum.quantize.schemes import check_scheme_name

    return check_scheme_name(text)


def _part(text: str) -> Share:
    """``I/N``; raises ``ValueError`` otherwise."""
    from trapetum.errors import RecipeError
    from trapetum.quantize.share import Share

    try:
        return Share.parse(text)
    except RecipeError as error:
        raise ValueError(error.message) from None


def _number(*allowed: int) -> Callable[[str], int]:
    """A parser of one of a few whole numbers."""
    return lambda text: int(choice(*map(str, allowed))(text))


def quantize(
    context: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model folder, a .gguf, or a Hub id.")],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", metavar="DIR", help="The artifact folder; NAME-trapetum-RECIPE by default."
        ),
    ] = None,
    bits: Annotated[
        float | None,
        option(
            "--bits",
            parse=parse_bits,
            metavar="BITS",
            help="Bits a code: 2 (additive), 3, 4, 5, 6, 8, 1.58 (ternary); another fraction is a --target-bpw.",
        ),
    ] = None,
    scheme: Annotated[
        str | None,
        option(
            "--scheme",
            parse=_known_scheme,
            metavar="NAME",
            help="kmeans, additive, ternary, gguf:TYPE, or asis (take over what is ternary or packed, without loss).",
        ),
    ] = None,
    levels: Annotated[
        int | None,
        option(
            "--levels",
            parse=_number(3, 4),
            metavar="N",
            help="Ternary: 3, or 4 with +2d; the same size either way.",
        ),
    ] = None,
    group_size: Annotated[
        int | None,
        option(
            "--group-size", parse=_number(128, 64), metavar="N", help="Ternary: weights a scale, 128 or 64."
        ),
    ] = None,
    target_bpw: Annotated[
        float | None,
        option(
            "--target-bpw",
            parse=real(0, 16, above=True),
            metavar="BITS",
            help="Stored bits a weight, all counted: each tensor takes what is best for the whole.",
        ),
    ] = None,
    candidates: Annotated[
        str | None,
        typer.Option(
            "--candidates",
            metavar="NAMES",
            help="With --target-bpw: schemes to choose from, such as kmeans,additive.",
        ),
    ] = None,
    hadamard: Annotated[
        bool,
        typer.Option("--hadamard", help="Ternary: rotate the weights (and at run time the activations)."),
    ] = False,
    rotate: Annotated[
        str | None,
        option(
            "--rotate",
            parse=choice("residual"),
            metavar="residual",
            help="Turn the whole model into a basis without outliers first; any engine runs the result.",
        ),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option("--recipe", metavar="NAME|FILE", help="A recipe of `trapetum recipes`, or a TOML file."),
    ] = None,
    effort: Annotated[
        str,
        option(
            "--effort",
            parse=choice("fast", "default", "high"),
            metavar="LEVEL",
            help="fast, default or high.",
        ),
    ] = "default",
    calibrate: Annotated[
        Path | None,
        typer.Option(
            "--calibrate", metavar="TEXT", help="Run the model over this text first: far less loss."
        ),
    ] = None,
    calib_tokens: Annotated[
        int | None,
        option("--calib-tokens", parse=whole(1), metavar="N", help="Most tokens of it; 131072 by default."),
    ] = None,
    sequential: Annotated[
        bool,
        typer.Option(
            "--sequential",
            help="With --calibrate: layer after layer, each making up for the ones before it.",
        ),
    ] = False,
    imatrix: Annotated[
        Path | None,
        typer.Option(
            "--imatrix", metavar="FILE", help="An importance matrix, or moments of `imatrix --hessian`."
        ),
    ] = None,
    threads: Threads = None,
    max_memory: Annotated[
        int | None,
        option("--max-memory", parse=parse_size, metavar="SIZE", help="Most memory to use, such as 8G."),
    ] = None,
    seed: Annotated[
        int, option("--seed", parse=whole(0), metavar="S", help="Seed of randomized schemes.")
    ] = 0,
    revision: Revision = None,
    token: Token = None,
    stream_download: Annotated[
        bool,
        typer.Option(
            "--stream-download",
            help="Hub ids: fetch the weight files one by one, keep at most two, remove each when it is done.",
        ),
    ] = False,
    max_shard_size: ShardSize = 5 * 10**9,
    any_architecture: Annotated[
        bool,
        typer.Option("--any-architecture", help="Accept an unknown architecture; roles come from the names."),
    ] = False,
    no_fallback: Annotated[
        bool, typer.Option("--no-fallback", help="Refuse tensors whose rows do not fit their scheme.")
    ] = False,
    overwrite: Overwrite = False,
    export: Annotated[
        str | None, format_option("--export", help="Also export the artifact: cbk, hf, gguf, mtp or planes.")
    ] = None,
    drop_artifact: Annotated[
        bool,
        typer.Option(
            "--drop-artifact", help="With --export: leave no artifact; a .cbk is then written straight away."
        ),
    ] = False,
    dry_run: DryRun = False,
    no_resume: Annotated[
        bool, typer.Option("--no-resume", help="Start anew where an unfinished job lies in DIR.")
    ] = False,
    part: Annotated[
        Any,
        option(
            "--part",
            parse=_part,
            metavar="I/N",
            help="Do this share only, beside other processes; then `trapetum merge DIR`. "
            "Also read from a Slurm array or an indexed Kubernetes Job.",
        ),
    ] = None,
    workers: Annotated[
        int | None,
        option(
            "--workers",
            parse=whole(1),
            metavar="N",
            help="Use N local processes instead of threads (extra cluster).",
        ),
    ] = None,
    scheduler: Annotated[
        str | None,
        typer.Option(
            "--scheduler",
            metavar="ADDRESS",
            help="Use a running Dask cluster, such as tcp://HOST:8786 (extra cluster).",
        ),
    ] = None,
    mixed_cpus: MixedCpus = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Quantize a model into an artifact folder."""
    if part is None and workers is None and scheduler is None:
        part = _environment_part()
    if part is not None and part.count > 1 and export is not None:
        raise typer.BadParameter("--export needs the whole artifact: export after `trapetum merge`")
    if drop_artifact and export is None:
        raise typer.BadParameter("--drop-artifact needs --export: nothing would be left")
    from trapetum.export import FORMATS
    from trapetum.hub import resolve_model
    from trapetum.quantize.job import quantize_model

    split = not drop_artifact or export is None or "max_shard_size" in FORMATS[export].takes
    only_with(context, split, "files that can be split", "max_shard_size")
    progress = terminal_progress()
    direct = None
    if export == "cbk" and drop_artifact and not (workers or scheduler or stream_download or sequential):
        from trapetum.export.direct import DirectCbk

        direct = DirectCbk(overwrite=overwrite, threads=threads)
    elif export not in (None, "planes") and not (stream_download or (dry_run and export == "cbk")):
        # what the format refuses is said before hours of work; what planes hold depends on the scheme alone
        model = str(resolve_model(model, revision=revision, token=token, progress=progress))
        revision = None
        _check_export(model, export, out, overwrite)
    report = quantize_model(
        model,
        out,
        bits=bits,
        scheme=scheme,
        levels=levels,
        group_size=group_size,
        hadamard=hadamard,
        fallback=not no_fallback,
        target_bpw=target_bpw,
        rotate=rotate,
        candidates=None if candidates is None else [c.strip() for c in candidates.split(",")],
        recipe=recipe,
        effort=effort,
        calibrate=calibrate,
        calib_tokens=calib_tokens,
        sequential=sequential,
        imatrix=imatrix,
        threads=threads,
        max_memory=max_memory,
        seed=seed,
        revision=revision,
        token=token,
        overwrite=overwrite,
        resume=not no_resume,
        dry_run=dry_run,
        any_architecture=any_architecture,
        max_shard_size=max_shard_size,
        part=part,
        workers=workers,
        scheduler=scheduler,
        mixed_cpus=mixed_cpus,
        stream_download=stream_download,
        route=direct,
        progress=progress,
    )
    data, lines = report.to_dict(), _lines(report)
    if dry_run:
        for text in report.notes:
            progress.note(text)
        if export == "cbk":
            from trapetum.export.direct import forecast_cbk

            target = default_target(report.out, export)
            forecast = direct.plan if direct is not None else None
            forecast = forecast or forecast_cbk(report, target)
            data["export"] = {"path": str(forecast.request.out), **forecast.report()}
            lines += f"\n\n{export_lines(forecast, forecast.request.out, dry_run=True)}"
    elif direct is not None and direct.plan is not None:
        data["export"] = {"path": str(report.out), **direct.plan.report()}
        lines += f"\n\n{export_lines(direct.plan, report.out, dry_run=False)}"
    elif export is not None:
        from trapetum.export import plan_export, shard_size_for

        options: dict[str, Any] = {
            "max_shard_size": shard_size_for(export, max_shard_size),
            "threads": threads,
            "overwrite": overwrite,
        }
        with plan_export(report.out, export, default_target(report.out, export), **options) as plan:
            path = plan.write(progress)
            data["export"] = {"path": str(path), **plan.report()}
            lines += f"\n\n{export_lines(plan, path, dry_run=False)}"
        if drop_artifact:
            _drop(report.out)
            lines += f"\nremoved {report.out}"
    emit(data, lines, as_json=json)


def _environment_part() -> Share | None:
    """What the batch system says, said aloud."""
    from trapetum.quantize.share import share_from_environment

    share, text = share_from_environment(os.environ)
    if text is not None:
        note(f"note: {text}")
    return share


def _check_export(model: str, format: str, out: Path | None, overwrite: bool) -> None:
    """Plan the export on the source, which has the artifact's names, shapes and config."""
    from trapetum.export import plan_export

    # Without -o the library names the artifact; a name that cannot exist leaves out only the check of the output.
    target = default_target(out, format) if out is not None else Path(f".{uuid.uuid4().hex}")
    with plan_export(model, format, target, overwrite=overwrite):
        pass


def _drop(artifact: Path) -> None:
    """Remove an artifact by its own lists, and its folder if nothing else is in it."""
    from trapetum.formats.output_folder import old_files

    for name in old_files(artifact):
        (artifact / name).unlink()
    if not any(artifact.iterdir()):
        artifact.rmdir()


def _lines(report: Report) -> str:
    """The plan as a table: every tensor in a dry run, else a line a role."""
    if report.dry_run:
        header = ["tensor", "role", "scheme", "shape", "bytes", "bpw"]
        rows = [
            [
                r.name,
                r.role.kind,
                r.scheme.label,
                " x ".join(map(str, r.shape)) or "scalar",
                f"{r.nbytes:,}",
                f"{r.bpw:.3f}",
            ]
            for r in report.rows
        ]
        return "\n".join([table(header, rows, right=(4, 5)), "", *report.lines()])
    header = ["role", "scheme", "blocks", "tensors", "weights", "bytes", "bpw", "rel. error"]
    rows = [
        [
            r.role,
            r.scheme,
            r.blocks,
            f"{r.tensors:,}",
            f"{r.parameters:,}",
            f"{r.nbytes:,}",
            f"{r.bpw:.3f}",
            "" if r.relative_error is None else f"{r.relative_error:.3e}",
        ]
        for r in report.roles()
    ]
    return "\n".join([table(header, rows, right=(3, 4, 5, 6, 7)), "", *report.lines()])
