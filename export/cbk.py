"""Artifact -> .cbk, streaming: one record at a time, one packed matrix in memory.

Everything that can be refused is refused before work: what the runtimes of the format do not compute
(biases other than of q, k, v; normed queries and keys; sliding windows; rotary types) and the sizes that
their kernels demand, all in one message. What a record holds comes from the artifact without loss where
that is possible:

====================================
========================================================================== artifact has
the record gets ====================================
========================================================================== codebook of at most 16 entries
the same values (a smaller table repeated, float16 -> float32) a wider codebook, or kept weights     a
codebook of 16 fitted here, to ``--source``, else to the artifact's values a tied head
a codebook of 16 fitted to the embedding embedding                             float16, rounded to nearest;
a value beyond float16 is refused norms, q/k/v biases                   float32
====================================
==========================================================================

The vocabulary is padded with zero rows to a multiple of 256.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from trapetum.errors import CheckpointError, FormatError, RecipeError, UnsupportedModelError, located
from trapetum.export.cbk_folder import FOLDER_FILES, write_manifest, write_side_files
from trapetum.export.plan import (
    ExportPlan,
    ExportRequest,
    ExportRow,
    new_folder,
    refuse_existing,
    same_tensor,
)
from trapetum.formats.atomic import require_space
from trapetum.formats.cbk import padded_vocab
from trapetum.formats.cbk_manifest import MODEL_FILE, manifest_paths
from trapetum.formats.cbk_matrix import S16Builder
from trapetum.formats.cbk_layouts import CBK_LAYOUTS
from trapetum.formats.cbk_records import CbkHeader, Record
from trapetum.formats.cbk_writer import CbkWriter
from trapetum.formats.decoded import decoded
from trapetum.formats.source import TensorSource
from trapetum.models.architectures import Role
from trapetum.models.config import ModelConfig, parse_config
from trapetum.progress import Progress
from trapetum.quantize.blocks import ordered_map, row_blocks, usable_threads
from trapetum.quantize.kmeans import fit_codebooks, needs_wide_codebook, relative_error
from trapetum.quantize.plan import as_float
from trapetum.tensors import CodebookTensor, DenseTensor, matrix_shape

__all__ = ["CbkPlan", "plan_cbk"]

ENTRIES = 16
# Fixed, so that no result depends on the number of threads: 2 Mi weights are 8 MiB as float32.
_BLOCK_WEIGHTS = 2 << 20
_FLOAT16_MAX = 65504.0
_STORED_BIASES = ("q", "k", "v")


@dataclass(frozen=True)
class _Job:
    """One record and where its values come from; ``tensor`` is None for a bias that the model does not have."""

    record: Record
    tensor: str | None
    row: ExportRow
    refit: tuple[TensorSource, str] | None = None


@dataclass
class CbkPlan(ExportPlan):
    """A checked .cbk export; see :class:`~trapetum.export.plan.ExportPlan`."""

    format: ClassVar[str] = "cbk"
    header: CbkHeader = field(kw_only=True)
    config: ModelConfig = field(kw_only=True)
    jobs: list[_Job] = field(kw_only=True)

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

    def _write_model(
        self, path: Path, manifest: Path, progress: Progress, beside: Iterable[str] = ()
    ) -> None:
        progress.begin("export cbk", self.size)
        threads = usable_threads(self.request.threads)
        with (
            ThreadPoolExecutor(threads) as pool,
            CbkWriter(path, self.header, overwrite=self.request.overwrite) as writer,
        ):
            for job in self.jobs:
                writer.write(job.record.name, _PARTS[job.record.kind](self, job, pool, threads))
                progress.advance(job.record.nbytes, _line(job.row))
        write_manifest(manifest, path.name, self.request.artifact, writer, self.report(), beside)
        progress.end()

    def _dense(
        self, job: _Job, pool: ThreadPoolExecutor, threads: int, dtype: type[np.floating[Any]]
    ) -> Iterator[NDArray[Any]]:
        """Blocks of rows in ``dtype``, then zero rows."""
        shape = job.record.shape
        if job.tensor is None:
            yield np.zeros(shape, dtype)
            return
        source, error, norm = self.request.artifact, 0.0, 0.0
        rows, inputs = matrix_shape(source.shape(job.tensor))
        for block in row_blocks(rows, inputs, _BLOCK_WEIGHTS):
            values = decoded(source, job.tensor, block)
            with np.errstate(over="ignore"):
                stored = values.astype(dtype)
            back = stored.astype(np.float32)
            if bad := int(np.count_nonzero(~np.isfinite(back))):
                raise FormatError(
                    f"{source.path}: tensor {job.tensor}: {bad} values are beyond {_FLOAT16_MAX:.0f} or not "
                    f"finite, and the .cbk record {job.record.name} is {job.record.kind}",
                    hint="No .cbk can hold this tensor; export to hf instead.",
                )
            job.row.changed += int(np.count_nonzero(back != values))
            error += float(np.sum(np.square(back - values, dtype=np.float64)))
            norm += float(np.sum(np.square(values, dtype=np.float64)))
            yield stored
            source.release(job.tensor)
        if job.row.changed:
            job.row.action, job.row.relative_error = "rounded", error / norm
        if padding := shape[0] - rows if len(shape) == 2 else 0:
            yield np.zeros((padding, shape[1]), dtype)

    def _half(self, job: _Job, pool: ThreadPoolExecutor, threads: int) -> Iterator[NDArray[Any]]:
        return self._dense(job, pool, threads, np.float16)

    def _single(self, job: _Job, pool: ThreadPoolExecutor, threads: int) -> Iterator[NDArray[Any]]:
        return self._dense(job, pool, threads, np.float32)

    def _matrix(self, job: _Job, pool: ThreadPoolExecutor, threads: int) -> Iterator[NDArray[Any]]:
        """Codes and codebooks, fitted here where the artifact has none that fits."""
        source, name = job.refit or (self.request.artifact, job.tensor or "")
        rows, inputs = matrix_shape(source.shape(name))
        blocks = _even_blocks(rows, inputs)
        wide = job.refit is not None and any(self._wide(source, name, block) for block in blocks)

        def work(block: slice) -> tuple[NDArray[np.uint8], NDArray[Any], NDArray[np.float64]]:
            tensor = source.load(name, block)
            if job.refit is None and isinstance(tensor, CodebookTensor):
                return tensor.codes, tensor.codebook, np.zeros((2, 0))
            values = _values(source, name, block)
            codes, codebook = fit_codebooks(values, ENTRIES, wide=wide)
            return codes, codebook, np.stack(relative_error(values, codes, codebook))

        builder, errors = S16Builder(*job.record.shape), []
        for block, (codes, codebook, error) in ordered_map(pool, work, blocks, 2 * threads):
            builder.put(block.start, codes, codebook)
            errors.append(error)
            if codebook.dtype == np.float32 and np.abs(codebook).max(initial=0.0) > _FLOAT16_MAX:
                self.notes.append(
                    f"{name}: codebook values beyond float16; GPU runtimes would round them to inf"
                )
            source.release(name)
        if job.refit is not None:
            error, norm = np.concatenate(errors, axis=1).sum(axis=1).tolist()
            job.row.relative_error = error / norm if norm else 0.0
        return builder.parts()

    def _wide(self, source: TensorSource, name: str, block: slice) -> bool:
        values = _values(source, name, block)
        if bad := int(np.count_nonzero(~np.isfinite(values))):
            raise CheckpointError(f"{source.path}: tensor {name}: {bad} values are not finite")
        source.release(name)
        return needs_wide_codebook(values, ENTRIES)


_Parts = Callable[[CbkPlan, _Job, ThreadPoolExecutor, int], Iterator[NDArray[Any]]]
_PARTS: dict[str, _Parts] = {"f16": CbkPlan._half, "f32": CbkPlan._single, "S16": CbkPlan._matrix}


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
        If a dtype is asked for.
    """
    artifact = request.artifact
    if request.dtype is not None:
        raise RecipeError(f"dtype is {request.dtype!r}; a .cbk has none to choose", hint="Leave --dtype out.")
    if _is_file(request.out):
        for path in (request.out, manifest_paths(request.out)[0]):
            refuse_existing(path, (), overwrite=request.overwrite)
    else:
        refuse_existing(request.out, FOLDER_FILES, overwrite=request.overwrite)
    with located(artifact.path):
        config = parse_config(artifact.config)
        config.architecture.check_tensors(config, {n: artifact.shape(n) for n in artifact.names()})
    names = config.architecture.index(artifact.names())
    header = _header(artifact, config, names)
    notes = _left_out(artifact, config, names)
    jobs = [_job(record, request, config, names) for record in header.records()]
    size = header.file_bytes()
    file = request.out.name if _is_file(request.out) else MODEL_FILE
    rows = [job.row for job in jobs]
    return CbkPlan(request, size, {file: size}, rows, notes, header=header, config=config, jobs=jobs)


def _is_file(out: Path) -> bool:
    return out.suffix == ".cbk" and not out.is_dir()


def _header(artifact: TensorSource, config: ModelConfig, names: dict[Role, str]) -> CbkHeader:
    """The file's header, or one error with every reason why there is none."""
    arch = config.architecture
    if arch.cbk not in CBK_LAYOUTS:
        norms = " (its queries and keys are normed)" if arch.qk_norm else ""
        raise UnsupportedModelError(
            f"{artifact.path}: no .cbk layout holds the architecture {arch.model_type}{norms}",
            hint="Export to hf instead.",
        )
    layout = CBK_LAYOUTS[arch.cbk]
    biases = [role for role in names if role.kind == "bias"]
    values: dict[str, int | float] = {
        "n_layers": config.num_hidden_layers,
        "hidden": config.hidden_size,
        "n_heads": config.num_attention_heads,
        "n_kv": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "inter": config.intermediate_size,
        "vocab": padded_vocab(config.vocab_size),
        "eps": config.rms_norm_eps,
        "rope_base": config.rope.theta,
        "rope_scale": config.rope.factor if config.rope.type == "linear" else 1.0,
        "has_bias": int(any(role.part in _STORED_BIASES for role in biases)),
    }
    faults = layout.violations(values)
    extra = [role for role in biases if role.part not in _STORED_BIASES]
    faults += [f"there is no place for a bias of {part}" for part in sorted({role.part for role in extra})]
    reach = config.max_position_embeddings
    windows = sorted({w for w in config.windows if w is not None and (reach is None or w < reach)})
    if windows:
        faults.append(f"a sliding window of {windows[0]} positions is not computed by the runtimes of .cbk")
    if any(".q_norm." in name or ".k_norm." in name for name in artifact.names()):
        faults.append("normed queries and keys are not computed by the runtimes of .cbk")
    if faults:
        raise UnsupportedModelError(
            f"{artifact.path}: {layout.magic} cannot hold this model: {'; '.join(faults)}",
            hint="Export to hf instead.",
        )
    return CbkHeader(layout, values, config.rope.inverse_frequencies(config.head_dim))


def _left_out(artifact: TensorSource, config: ModelConfig, names: dict[Role, str]) -> list[str]:
    """What a person should know before the export."""
    used = set(names.values())
    if config.tie_word_embeddings:
        used -= {name for role, name in names.items() if role.kind == "head"}
    left = [n for n in artifact.names() if n not in used and config.architecture.role(n).kind != "buffer"]
    notes = [f"{len(left)} tensors are not part of the .cbk, the first is {left[0]}"] if left else []
    if artifact.tokenizer_file() is None:
        notes.append("there is no tokenizer.json; programs that serve a .cbk want one beside it")
    if config.vocab_size % 256:
        notes.append(f"the vocabulary of {config.vocab_size} is padded to {padded_vocab(config.vocab_size)}")
    return notes


def _job(record: Record, request: ExportRequest, config: ModelConfig, names: dict[Role, str]) -> _Job:
    arch, artifact = config.architecture, request.artifact
    role = arch.role(record.name)
    tied = role.kind == "head" and config.tie_word_embeddings
    wanted = arch.role(arch.tensor_name("embed")) if tied else role
    tensor = names.get(wanted)
    if tensor is None:
        return _Job(record, None, ExportRow(record.name, "zeros", "the model has no such bias"))
    entries = _codebook_size(artifact, tensor)
    stored = f"codebook K={entries}" if entries else str(artifact.dtype(tensor))
    if record.kind != "S16":
        return _Job(record, tensor, ExportRow(record.name, "exact", f"{stored} -> {record.kind}"))
    if entries is not None and entries <= ENTRIES:
        detail = stored if entries == ENTRIES else f"{stored} repeated to {ENTRIES}"
        return _Job(record, tensor, ExportRow(record.name, "exact", detail))
    refit, origin = (artifact, tensor), "the embedding" if tied else "the artifact"
    if request.source is not None:
        refit, origin = (
            (request.source, same_tensor(request.source, arch, wanted, artifact, tensor)),
            "the source",
        )
    detail = f"{stored} -> codebook K={ENTRIES}, fitted to {origin}"
    return _Job(record, tensor, ExportRow(record.name, "quantized", detail), refit)


def _codebook_size(source: TensorSource, name: str) -> int | None:
    """Entries of a stored codebook; None for any other layout."""
    if source.layout(name) != CodebookTensor.layout:
        return None
    tensor = source.load(name, slice(0, 1))
    return tensor.codebook_size if isinstance(tensor, CodebookTensor) else None


def _values(source: TensorSource, name: str, block: slice) -> NDArray[Any]:
    """What k-means works on: kept values as stored, anything else decoded (and a rotation undone)."""
    tensor = source.load(name, block)
    return as_float(tensor.values) if isinstance(tensor, DenseTensor) else decoded(source, name, block)


def _even_blocks(rows: int, in_features: int) -> list[slice]:
    """Blocks that start at even rows, because two rows share a byte."""
    step = max(2, _BLOCK_WEIGHTS // max(in_features, 1) // 2 * 2)
    return [slice(r, min(r + step, rows)) for r in range(0, rows, step)]


def _line(row: ExportRow) -> str:
    error = "" if row.relative_error is None else f", relative error {row.relative_error:.3e}"
    return f"{row.name}: {row.action}, {row.detail}{error}"
