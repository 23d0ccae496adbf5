"""Artifact -> .cbk, streaming: one record at a time, one packed matrix in memory.

Everything that can be refused is refused before work, in one message (``export.cbk_headers``). What a record holds
comes from the artifact without loss where that is possible (``export.cbk_records`` finds it):

=====================================================  ================================================================
artifact has                                           the record gets
=====================================================  ================================================================
a codebook of at most as many entries                  the same values (a smaller table repeated, float16 -> float32)
as many additive codebooks                             the same codes, codebooks and scales
any other form, or kept weights                        a codebook (or additive codebooks) fitted here, to ``--source``,
                                                       else to the artifact's values
a tied head                                            a codebook fitted to the embedding
embedding, router, DeepSeek's small matrices           float16, rounded to nearest; a value beyond float16 is refused
norms, biases                                          float32
=====================================================  ================================================================

The vocabulary is padded with zero rows to a multiple of 256, DeepSeek's feed-forward widths with zero rows and unused
columns: fits never see padding.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from trapetum.errors import CheckpointError, FormatError, RecipeError, located
from trapetum.export.cbk_folder import FOLDER_FILES, write_manifest, write_side_files
from trapetum.export.cbk_headers import Stored, build_header
from trapetum.export.cbk_records import Job, Piece, record_jobs, stored_forms
from trapetum.export.latents import joined_latents
from trapetum.export.plan import ExportPlan, ExportRequest, ExportRow, new_folder, refuse_existing
from trapetum.formats.atomic import disk_errors, require_space
from trapetum.formats.cbk_additive import record_parts
from trapetum.formats.cbk_manifest import MODEL_FILE, manifest_paths
from trapetum.formats.cbk_matrix import ENTRIES, MatrixBuilder, S16Builder, S256Builder
from trapetum.formats.cbk_records import STORED, CbkHeader
from trapetum.formats.cbk_resume import ResumableCbkWriter
from trapetum.formats.cbk_writer import CbkWriter
from trapetum.formats.source import TensorSource
from trapetum.models.architectures import Role
from trapetum.models.config import ModelConfig, parse_config
from trapetum.progress import Progress
from trapetum.quantize.additive import Additive
from trapetum.quantize.blocks import ordered_map, row_blocks, usable_threads
from trapetum.quantize.kmeans import fit_codebooks, needs_wide_codebook, relative_error
from trapetum.tensors import AdditiveTensor, CodebookTensor

__all__ = ["CbkPlan", "plan_cbk"]

# Fixed, so that no result depends on the number of threads: 2 Mi weights are 8 MiB as float32.
_BLOCK_WEIGHTS = 2 << 20
_FLOAT16_MAX = 65504.0
_WHOLE = 8  # additive matrices in work at once: 60 MB of float32 each in DeepSeek R1
_BUILDERS: dict[str, Callable[[int, int], MatrixBuilder]] = {"S16": S16Builder, "S256": S256Builder}


@dataclass
class CbkPlan(ExportPlan):
    """A checked .cbk export; see :class:`~trapetum.export.plan.ExportPlan`."""

    format: ClassVar[str] = "cbk"
    header: CbkHeader = field(kw_only=True)
    config: ModelConfig = field(kw_only=True)
    jobs: list[Job] = field(kw_only=True)

    def write(self, progress: Progress | None = None) -> Path:
        """Write the file and its manifest, or the folder; see :meth:`ExportPlan.write`."""
        progress = progress or Progress()
        out = self.request.out
        require_space(out.parent, self.size)
        for note in self.notes:
            progress.note(note)
        if _is_file(out):
            if self.request.overwrite:
                for stale in manifest_paths(out)[:1]:
                    stale.unlink(missing_ok=True)
            out.parent.mkdir(parents=True, exist_ok=True)
            self._write_model(out, manifest_paths(out)[0], progress)
            return out
        with new_folder(out) as folder:
            beside = write_side_files(self.request.artifact, folder)
            self._write_model(folder / MODEL_FILE, folder / "manifest.json", progress, beside)
        return out

    def write_resumably(
        self, path: Path, error_of: Callable[[str], float | None], progress: Progress
    ) -> tuple[dict[str, float], int]:
        """Write the folder by way of an unfinished file that outlives a kill.

        Parameters
        ----------
        path : Path
            The unfinished file; it stays until the caller removes it.
        error_of : callable
            Relative error of a tensor, by name, if it was quantized in this run.
        progress : Progress

        Returns
        -------
        (errors, resumed)
            Of all runs; the number of records that earlier runs had written.
        """
        known: dict[str, float] = {}
        require_space(path.parent, self.size - (path.stat().st_size if path.exists() else 0))
        for note in self.notes:
            progress.note(note)
        with ResumableCbkWriter(path, self.header) as writer:
            resumed = len(writer.done)
            for job in self.jobs:
                if (before := writer.done.get(job.record.name)) is not None:
                    job.row.__dict__.update(before["row"])
                    known.update(before["errors"])
                    self.notes += [note for note in before["notes"] if note not in self.notes]
            for job in self._records(writer, progress):
                error = None if job.piece is None else error_of(job.piece.name)
                found = {} if job.piece is None or error is None else {job.piece.name: error}
                writer.note({"row": asdict(job.row), "errors": found, "notes": self.notes})
                known |= found
        with new_folder(self.request.out) as folder:
            _second_name(path, folder / MODEL_FILE)
            beside = write_side_files(self.request.artifact, folder)
            manifest = folder / "manifest.json"
            write_manifest(manifest, MODEL_FILE, self.request.artifact, writer, self.report(), beside)
        return known, resumed

    def _records(self, writer: CbkWriter | ResumableCbkWriter, progress: Progress) -> Iterator[Job]:
        """Write every record that is not there; yields after each."""
        progress.begin("export cbk", self.size)
        threads = usable_threads(self.request.threads)
        begun = len(writer.entries)
        pool = ThreadPoolExecutor(threads)
        try:
            # An additive matrix is one piece of work, so several are in work at once; all others are cut into blocks.
            whole = [job for job in self.jobs[begun:] if job.record.kind not in _PARTS]
            additive = ordered_map(pool, self._additive, whole, min(threads, _WHOLE))
            for number, job in enumerate(self.jobs):
                if number < begun:
                    progress.advance(job.record.nbytes)
                    continue
                make = _PARTS.get(job.record.kind)
                parts = next(additive)[1] if make is None else make(self, job, pool, threads)
                writer.write(job.record.name, parts)
                progress.advance(job.record.nbytes, _line(job.row))
                yield job
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
        progress.end()

    def _write_model(
        self, path: Path, manifest: Path, progress: Progress, beside: Iterable[str] = ()
    ) -> None:
        with CbkWriter(path, self.header, overwrite=self.request.overwrite) as writer:
            for _ in self._records(writer, progress):
                pass
        write_manifest(manifest, path.name, self.request.artifact, writer, self.report(), beside)

    def _dense(
        self, job: Job, pool: ThreadPoolExecutor, threads: int, dtype: type[np.floating[Any]]
    ) -> Iterator[NDArray[Any]]:
        """Blocks of rows in ``dtype``, then zero rows."""
        record, piece = job.record, job.piece
        if piece is None:
            yield np.zeros(record.shape, dtype)
            return
        encode, error, norm = STORED[record.stored].encode, 0.0, 0.0
        for block in row_blocks(piece.rows, piece.inputs, _BLOCK_WEIGHTS):
            values = encode(piece.decoded(block), self.header.sizes)
            with np.errstate(over="ignore"):
                stored = values.astype(dtype)
            back = stored.astype(np.float32)
            if bad := int(np.count_nonzero(~np.isfinite(back))):
                raise FormatError(
                    f"{piece.what}: {bad} values are beyond {_FLOAT16_MAX:.0f} or not finite, and the .cbk record "
                    f"{record.name} is {record.kind}",
                    hint="No .cbk can hold this tensor; export to hf instead.",
                )
            job.row.changed += int(np.count_nonzero(back != values))
            error += float(np.sum(np.square(back - values, dtype=np.float64)))
            norm += float(np.sum(np.square(values, dtype=np.float64)))
            yield stored
            piece.release()
        if job.row.changed:
            job.row.action, job.row.relative_error = "rounded", error / norm
        if padding := record.shape[0] - piece.rows if len(record.shape) == 2 else 0:
            yield np.zeros((padding, record.shape[1]), dtype)

    def _half(self, job: Job, pool: ThreadPoolExecutor, threads: int) -> Iterator[NDArray[Any]]:
        return self._dense(job, pool, threads, np.float16)

    def _single(self, job: Job, pool: ThreadPoolExecutor, threads: int) -> Iterator[NDArray[Any]]:
        return self._dense(job, pool, threads, np.float32)

    def _matrix(self, job: Job, pool: ThreadPoolExecutor, threads: int) -> Iterator[NDArray[Any]]:
        """Codes and codebooks, fitted here where the artifact has none that fits."""
        piece, entries = _piece(job), ENTRIES[job.record.kind]
        blocks = _even_blocks(piece.rows, piece.inputs)
        wide = job.refit and any(_wide(piece, block, entries) for block in blocks)

        def work(block: slice) -> tuple[NDArray[np.uint8], NDArray[Any], NDArray[np.float64]]:
            if not job.refit and isinstance(tensor := piece.load(block), CodebookTensor):
                return tensor.codes, tensor.codebook, np.zeros((2, 0))
            values = piece.values(block)
            codes, codebook = fit_codebooks(values, entries, wide=wide)
            return codes, codebook, np.stack(relative_error(values, codes, codebook))

        builder, errors, beyond = _BUILDERS[job.record.kind](*job.record.shape), [], False
        for block, (codes, codebook, error) in ordered_map(pool, work, blocks, 2 * threads):
            builder.put(block.start, codes, codebook)
            errors.append(error)
            beyond |= bool(np.abs(codebook).max(initial=0.0) > _FLOAT16_MAX)
            piece.release()
        if beyond:
            self.notes.append(
                f"{piece.name}: codebook values beyond float16; GPU runtimes would round them to inf"
            )
        if job.refit:
            error, norm = np.concatenate(errors, axis=1).sum(axis=1).tolist()
            job.row.relative_error = error / norm if norm else 0.0
        return builder.parts()

    def _additive(self, job: Job) -> list[NDArray[Any]]:
        """Codes, codebooks and scales; a matrix of an expert is small enough to be held. Runs on a worker thread."""
        piece = _piece(job)
        whole = slice(0, piece.rows)
        tensor = None if job.refit else piece.load(whole)
        if not isinstance(tensor, AdditiveTensor):
            values = piece.values(whole)
            if bad := int(np.count_nonzero(~np.isfinite(values))):
                raise CheckpointError(f"{piece.what}: {bad} values are not finite")
            scheme = Additive(int(job.record.kind[1:]))
            tensor = scheme.quantize(values)
            error, norm = (float(part.sum()) for part in scheme.errors(values, tensor))
            job.row.relative_error = error / norm if norm else 0.0
        stored = _float16_scales(tensor, piece.what)
        if changed := int(np.count_nonzero(stored.scales != tensor.scales)):
            job.row.changed = changed
            job.row.action = "rounded" if job.row.action == "exact" else job.row.action
        parts = list(record_parts(_padded(stored, job.record.shape)))
        piece.release()
        return parts


def _second_name(path: Path, target: Path) -> None:
    """A hard link, so that a kill at any moment leaves the file somewhere; a move where there are none."""
    with disk_errors(target):
        try:
            os.link(path, target)
        except OSError:
            os.rename(path, target)


def _piece(job: Job) -> Piece:
    if job.piece is None:
        raise ValueError(f"record {job.record.name} has no tensor")
    return job.piece


def _wide(piece: Piece, block: slice, entries: int) -> bool:
    values = piece.values(block)
    if bad := int(np.count_nonzero(~np.isfinite(values))):
        raise CheckpointError(f"{piece.what}: {bad} values are not finite")
    piece.release()
    return needs_wide_codebook(values, entries)


def _float16_scales(tensor: AdditiveTensor, what: str) -> AdditiveTensor:
    """The tensor with the scales that a record can hold."""
    with np.errstate(over="ignore"):
        scales, books = tensor.scales.astype(np.float16), tensor.codebooks.astype(np.float16)
    if not (
        np.isfinite(scales).all()
        and np.array_equal(books.astype(np.float32), tensor.codebooks.astype(np.float32))
    ):
        raise FormatError(
            f"{what}: its scales or codebooks are beyond float16, which an additive record of a .cbk holds",
            hint="Quantize this tensor with another scheme.",
        )
    return AdditiveTensor(tensor.codes, books, scales, tensor.shape)


def _padded(tensor: AdditiveTensor, shape: tuple[int, ...]) -> AdditiveTensor:
    """Rows of scale 0 and codes that meet no input."""
    rows, groups = shape[0] - tensor.rows, shape[1] // 8 - tensor.codes.shape[1]
    if not rows and not groups:
        return tensor
    codes = np.pad(tensor.codes, ((0, 0), (0, groups), (0, rows)))
    return AdditiveTensor(codes, tensor.codebooks, np.pad(tensor.scales, (0, rows)))


_Parts = Callable[[CbkPlan, Job, ThreadPoolExecutor, int], Iterator[NDArray[Any]]]
_PARTS: dict[str, _Parts] = {
    "f16": CbkPlan._half,
    "f32": CbkPlan._single,
    "S16": CbkPlan._matrix,
    "S256": CbkPlan._matrix,
}
"""Kinds of records that are made in blocks; the additive ones are made whole."""


def plan_cbk(request: ExportRequest) -> CbkPlan:
    """Check that a .cbk can hold the model, and say what each record will hold.

    Parameters
    ----------
    request : ExportRequest
        ``out`` ending in ``.cbk`` means one file and its manifest, anything else a folder.

    Raises
    ------
    UnsupportedModelError
        With everything that the format cannot hold.
    CheckpointError
        If a tensor is missing or has another shape than config.json says.
    OutputError
        If the output exists.
    RecipeError
        If the magic is that of a prediction block.
    """
    artifact = request.artifact
    if request.magic == "MTP1":
        raise RecipeError("magic is 'MTP1', which is no model", hint="Export with --format mtp.")
    if _is_file(request.out):
        for path in (request.out, manifest_paths(request.out)[0]):
            refuse_existing(path, (), overwrite=request.overwrite)
    else:
        refuse_existing(request.out, FOLDER_FILES, overwrite=request.overwrite)
    with located(artifact.path):
        config = parse_config(artifact.config)
        artifact = joined_latents(artifact, config)
        request = replace(request, artifact=artifact)
        config.architecture.check_tensors(config, {n: artifact.shape(n) for n in artifact.names()})
        names = config.architecture.index(artifact.names())
        stored = stored_forms(artifact, names)
        header, notes = build_header(config, artifact.names(), names, stored, request.magic)
    jobs = record_jobs(header, request, config, names, stored)
    notes = [*_left_out(artifact, config, names), *notes, *_lost_for_nothing(jobs, names, stored)]
    size = header.file_bytes()
    file = request.out.name if _is_file(request.out) else MODEL_FILE
    rows = [job.row for job in jobs]
    return CbkPlan(request, size, {file: size}, rows, notes, header=header, config=config, jobs=jobs)


def _is_file(out: Path) -> bool:
    return out.suffix == ".cbk" and not out.is_dir()


def _left_out(artifact: TensorSource, config: ModelConfig, names: dict[Role, str]) -> list[str]:
    """What a person should know before the export."""
    used = set(names.values())
    if config.tie_word_embeddings:
        used -= {name for role, name in names.items() if role.kind == "head"}
    left = [n for n in artifact.names() if n not in used and config.architecture.role(n).kind != "buffer"]
    notes = [f"{len(left)} tensors are not part of the .cbk, the first is {left[0]}"] if left else []
    if artifact.tokenizer_file() is None:
        notes.append("there is no tokenizer.json; programs that serve a .cbk want one beside it")
    return notes


def _lost_for_nothing(jobs: list[Job], names: Mapping[Role, str], stored: Mapping[Role, Stored]) -> list[str]:
    """Tensors that were quantized although their records are float16."""
    quantized = {names[role] for role in stored}
    found = [j.piece.name for j in jobs if j.record.kind == "f16" and j.piece and j.piece.name in quantized]
    if not found:
        return []
    return [
        f"{len(found)} tensors are quantized, and the .cbk holds them in float16, the first is {found[0]}: the recipe "
        "cbk-deepseek keeps most of them, and --source gives their values"
    ]


def _even_blocks(rows: int, in_features: int) -> list[slice]:
    """Blocks that start at even rows, because two rows share a byte."""
    step = max(2, _BLOCK_WEIGHTS // max(in_features, 1) // 2 * 2)
    return [slice(r, min(r + step, rows)) for r in range(0, rows, step)]


def _line(row: ExportRow) -> str:
    error = "" if row.relative_error is None else f", relative error {row.relative_error:.3e}"
    return f"{row.name}: {row.action}, {row.detail}{error}"
