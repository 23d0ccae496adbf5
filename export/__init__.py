"""Artifact -> other formats: one table of exporters, one function.

==========  ===================================================================================
format      output
==========  ===================================================================================
``cbk``     a .cbk with 4-bit codebooks: a folder ready to serve, or one file and its manifest
``hf``      a folder with dense weights that transformers loads
``gguf``    a GGUF that llama.cpp loads, in one file or split
``planes``  planes and tiles that GPU kernels read
``mtp``     the multi-token prediction block of a DeepSeek model, as ``mtp.cbk``
==========  ===================================================================================
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from trapetum.errors import OutputError, RecipeError

if TYPE_CHECKING:
    from trapetum.export.plan import ExportPlan
    from trapetum.progress import Progress

__all__ = ["FORMATS", "SHARD_SIZE", "ExportFormat", "export_artifact", "plan_export", "shard_size_for"]


SHARD_SIZE = 5_000_000_000
"""Bytes of the largest weight file where nothing is said."""


@dataclass(frozen=True)
class ExportFormat:
    """One line of the table: ``module.function`` makes the plan, imported when it is asked for.

    ``takes`` names the options of :func:`plan_export` that mean something to this format; the others are refused.
    """

    module: str
    function: str
    summary: str
    takes: frozenset[str]


FORMATS: dict[str, ExportFormat] = {
    "cbk": ExportFormat(
        "trapetum.export.cbk", "plan_cbk", "a .cbk file with 4-bit codebooks", frozenset({"source", "magic"})
    ),
    "hf": ExportFormat(
        "trapetum.export.hf", "plan_hf", "a dense Hugging Face folder", frozenset({"dtype", "max_shard_size"})
    ),
    "gguf": ExportFormat(
        "trapetum.export.gguf_plan",
        "plan_gguf",
        "a GGUF file that llama.cpp loads",
        frozenset({"source", "gguf_type", "max_shard_size"}),
    ),
    "mtp": ExportFormat(
        "trapetum.export.mtp", "plan_mtp", "DeepSeek's prediction block as mtp.cbk", frozenset({"source"})
    ),
    "planes": ExportFormat(
        "trapetum.export.planes", "plan_planes", "planes and tiles for GPU kernels", frozenset({"fuse"})
    ),
}


def shard_size_for(format: str, size: int) -> int:
    """The shard size that was meant for an artifact, for an export of it: the default where it is one file anyway."""
    return size if "max_shard_size" in FORMATS[format].takes else SHARD_SIZE


@contextlib.contextmanager
def plan_export(
    artifact: str | PathLike[str],
    format: str,
    out: str | PathLike[str],
    *,
    source: str | PathLike[str] | None = None,
    dtype: str | None = None,
    gguf_type: str | None = None,
    max_shard_size: int = SHARD_SIZE,
    fuse: bool = False,
    overwrite: bool = False,
    threads: int | None = None,
    magic: str | None = None,
) -> Iterator[ExportPlan]:
    """Check an export and predict its outcome; nothing is written until ``plan.write()``.

    A context manager, because the plan reads from open files. Parameters are those of
    :func:`export_artifact`.

    Yields
    ------
    ExportPlan
        ``size`` and ``files`` (exact bytes), ``rows`` (what happens to each tensor), ``notes``, ``report()``.
    """
    from trapetum.export.plan import ExportRequest
    from trapetum.formats.atomic import refuse_overlap
    from trapetum.formats.source import open_source

    chosen = FORMATS.get(format)
    if chosen is None:
        raise RecipeError(f"export format is {format!r}; known are {', '.join(FORMATS)}")
    given = {
        "source": source is not None,
        "dtype": dtype is not None,
        "gguf_type": gguf_type is not None,
        "max_shard_size": max_shard_size != SHARD_SIZE,
        "fuse": fuse,
        "magic": magic is not None,
    }
    for option in (o for o, was_given in given.items() if was_given and o not in chosen.takes):
        takers = [name for name, row in FORMATS.items() if option in row.takes]
        raise RecipeError(
            f"{option} changes nothing in the {format} export; it goes with: {', '.join(takers)}",
            hint=f"Give --gguf-type {dtype.upper()}."
            if option == "dtype" and dtype is not None and "gguf_type" in chosen.takes
            else f"Leave --{option.replace('_', '-')} out.",
        )
    refuse_overlap(Path(out), [Path(p) for p in (artifact, source) if p is not None])
    with contextlib.ExitStack() as stack:
        opened = stack.enter_context(open_source(artifact))
        if opened.kind not in ("artifact", "checkpoint", "gguf"):
            raise OutputError(
                f"{artifact}: is of kind {opened.kind}; exports are made from artifacts, model folders and GGUF files",
                hint="Export from the folder that trapetum quantize wrote.",
            )
        values = stack.enter_context(open_source(source)) if source is not None else None
        request = ExportRequest(
            opened, Path(out), values, dtype, gguf_type, max_shard_size, fuse, overwrite, threads, magic
        )
        yield getattr(import_module(chosen.module), chosen.function)(request)


def export_artifact(
    artifact: str | PathLike[str],
    format: str,
    out: str | PathLike[str],
    *,
    source: str | PathLike[str] | None = None,
    dtype: str | None = None,
    gguf_type: str | None = None,
    max_shard_size: int = SHARD_SIZE,
    fuse: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    threads: int | None = None,
    magic: str | None = None,
    progress: Progress | None = None,
) -> Path:
    """Write an artifact in another format.

    Parameters
    ----------
    artifact : path
        Folder that ``quantize_model`` wrote (a checkpoint folder and a GGUF file work too).
    format : str
        A key of :data:`FORMATS`.
    out : path
        Folder, or for ``cbk`` and ``gguf`` a name that ends in ``.cbk`` or ``.gguf``.
    source : path, optional
        The unquantized model: tensors that the format demands in another form are made from its values.
    dtype : {"f32", "bf16", "f16"}, optional
        ``hf``: type of all floating-point weights; float32 by default, which is exact.
    gguf_type : str, optional
        ``gguf``: a type such as ``PQ2_0``, ``Q4_K`` or ``F16``; ``auto`` by default (see ``export.gguf_types``).
    max_shard_size : int
        ``hf``, ``gguf``: most data bytes a file.
    fuse : bool
        ``planes``: lay q, k, v and gate, up out as one matrix each, concatenated by rows.
    overwrite : bool
        Replace an earlier export.
    dry_run : bool
        Check and report through ``progress.note``, write nothing. :func:`plan_export` gives the report as
        data.
    threads : int, optional
    magic : str, optional
        ``cbk``: one of the layouts of a DeepSeek model (docs/formats/cbk.md); what is stored chooses by default.
    progress : Progress, optional

    Returns
    -------
    Path
        The output, written or (``dry_run``) not.

    Raises
    ------
    OutputError
        If the output exists, is the input, or cannot be written.
    UnsupportedModelError
        If the format cannot hold the model; all reasons in one message.
    RecipeError
        If ``format`` or ``dtype`` is unknown, or an option was given that the format does not take.
    """
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
        if not dry_run:
            return plan.write(progress)
        if progress is not None:
            progress.note(f"{out}: {plan.size:,} bytes in {len(plan.files)} weight file(s)")
            for row in plan.rows:
                if row.action not in ("exact", "zeros"):
                    progress.note(f"{row.name}: {row.action}, {row.detail}")
            for note in plan.notes:
                progress.note(note)
        return plan.request.out
