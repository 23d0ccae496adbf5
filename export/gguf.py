"""Artifact -> GGUF v3 that llama.cpp loads and answers with; streaming, one block of rows in memory.

====================================  ==============================================================================
artifact has                          the file gets
====================================  ==============================================================================
ternary codes and scales              Q2_0, or PQ2_0, PTQ1_0, TQ2_0, TQ1_0 where asked for; without loss or refused
GGUF blocks                           the same bytes
codebooks                             values fitted to the smallest type that adds little, or to a named one
kept matrices                         the same values: F32, F16 or BF16
norms, biases                         F32 (engines abort on any other)
ids beyond the tokenizer              padding tokens
====================================  ==============================================================================

Rows of q and k are stored in another order in the ``llama`` family (``formats.gguf_names``); every layout here is
stored row by row, so stored rows are reordered as they are and nothing is quantized again. What a file cannot say
(rotary types, biases that the family does not read, tokenizers) is refused before work, all reasons in one message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from trapetum.blocktypes import BlockType
from trapetum.errors import CheckpointError, FormatError
from trapetum.export.gguf_ternary import pack_ternary
from trapetum.export.gguf_types import squares
from trapetum.export.plan import ExportPlan, ExportRow, new_folder
from trapetum.formats.atomic import disk_errors, require_space
from trapetum.formats.checksums import gguf_sums, write_sums
from trapetum.formats.gguf_names import stored_row_order
from trapetum.formats.gguf_values import KeyValue
from trapetum.formats.gguf_writer import GgufWriter
from trapetum.formats.source import TensorSource
from trapetum.progress import Progress
from trapetum.quantize.block_search import fit_blocks
from trapetum.quantize.blocks import ordered_map, usable_threads
from trapetum.tensors import BlockTensor, QuantizedTensor, TernaryTensor, matrix_shape

__all__ = ["ACTIONS", "GgufJob", "GgufPlan", "is_file"]

# Fixed, so that no result depends on the number of threads.
_BLOCK_WEIGHTS = 1 << 20


@dataclass
class GgufJob:
    """One tensor of the file.

    Parameters
    ----------
    name : str
        GGUF's.
    kind : BlockType
    shape : tuple of int
    row : ExportRow
    action : str
        Key of :data:`ACTIONS`.
    origin : (TensorSource, str), optional
        Where the values come from; None of what no checkpoint has.
    stored : QuantizedTensor, optional
        What the file gets, whatever the origin has.
    heads : int, optional
        Heads of a tensor whose rows change places.
    offset : float
        Added to the values: of norms that are stored less one.
    common_scale : float, optional
        Of a ternary tensor whose blocks get the scale 1, because this value is in a tensor of its own.
    """

    name: str
    kind: BlockType
    shape: tuple[int, ...]
    row: ExportRow
    action: str
    origin: tuple[TensorSource, str] | None = None
    stored: QuantizedTensor | None = None
    heads: int | None = None
    offset: float = 0.0
    common_scale: float | None = None

    @property
    def head_rows(self) -> int:
        """Rows (elements of a bias) of one head; 1 where nothing changes places."""
        return self.shape[0] // self.heads if self.heads else 1

    @property
    def nbytes(self) -> int:
        """Data bytes."""
        rows, width = matrix_shape(self.shape)
        return rows * self.kind.row_bytes(width)

    def blocks(self) -> list[slice]:
        """Blocks of rows; whole heads where rows change places."""
        rows, width = matrix_shape(self.shape)
        step = max(1, _BLOCK_WEIGHTS // max(width * self.head_rows, 1)) * self.head_rows
        return [slice(r, min(r + step, rows)) for r in range(0, rows, step)]


@dataclass(frozen=True)
class _Stored:
    """Bytes of some rows, and what they lost."""

    data: NDArray[Any]
    lost: float = 0.0
    norm: float = 0.0
    changed: int = 0


@dataclass
class GgufPlan(ExportPlan):
    """A checked GGUF export; see :class:`~trapetum.export.plan.ExportPlan`."""

    format: ClassVar[str] = "gguf"
    name: str = field(kw_only=True)
    pairs: dict[str, KeyValue] = field(kw_only=True)
    jobs: list[GgufJob] = field(kw_only=True)

    def writer(self, path: Path) -> GgufWriter:
        """A writer that knows all metadata and tensors."""
        limit = self.request.max_shard_size
        writer = GgufWriter(path, max_shard_bytes=limit, replace=self.request.overwrite)
        for key, entry in self.pairs.items():
            writer.add(key, entry.value, entry.type, entry.item_type)
        for job in self.jobs:
            writer.add_tensor(job.name, job.kind.name, job.shape)
        return writer

    def write(self, progress: Progress | None = None) -> Path:
        """Write the file or files; see :meth:`ExportPlan.write`.

        Raises
        ------
        CheckpointError
            If a value is not finite.
        FormatError
            If a value does not fit the type.
        """
        progress = progress or Progress()
        out = self.request.out
        require_space(out.parent, self.size)
        for note in self.notes:
            progress.note(note)
        if is_file(out):
            with disk_errors(out):
                out.parent.mkdir(parents=True, exist_ok=True)
                gguf_sums(out).unlink(missing_ok=True)  # never beside a file that it does not describe
            stale = [p for p in family(out) if p.name not in self.files] if self.request.overwrite else []
            self._write(out, progress)
            with disk_errors(out):
                for path in stale:
                    path.unlink(missing_ok=True)
            return out.with_name(next(iter(self.files)))
        with new_folder(out) as folder:
            self._write(folder / self.name, progress)
        return out

    def _write(self, path: Path, progress: Progress) -> None:
        progress.begin("export gguf", self.size)
        threads = usable_threads(self.request.threads)
        pool = ThreadPoolExecutor(threads)
        try:
            with self.writer(path) as writer:
                writer.begin()
                for job in self.jobs:
                    for data in _stored_rows(job, pool, 2 * threads):
                        writer.write(job.name, data)
                    progress.advance(job.nbytes, _line(job.row))
        finally:
            pool.shutdown(cancel_futures=True)
        write_sums(gguf_sums(path), [path.with_name(name) for name in self.files])
        progress.end()


def is_file(out: Path) -> bool:
    """Whether ``-o`` names a file rather than a folder."""
    return out.suffix == ".gguf" and not out.is_dir()


def family(out: Path) -> list[Path]:
    """Files under a model's name, whole or split, that are there."""
    parts = "[0-9]" * 5
    split = out.parent.glob(f"{_literal(out.stem)}-{parts}-of-{parts}.gguf")
    return sorted([*split, *([out] if out.exists() else [])])


def _literal(text: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in text)


def _stored_rows(job: GgufJob, pool: ThreadPoolExecutor, window: int) -> Iterator[NDArray[Any]]:
    """Blocks of rows as stored, in file order; fills in what the row of the report says."""
    encode = ACTIONS[job.action]
    if job.stored is not None:
        yield encode(job, job.stored).data
        return
    if job.origin is None:
        raise TypeError(f"{job.name} has neither an origin nor values")
    source, name = job.origin
    lost = norm = 0.0

    def work(block: slice) -> _Stored:
        whole = len(job.shape) == 1
        return encode(job, source.load(name) if whole else source.load(name, block))

    for _, part in ordered_map(pool, work, job.blocks(), window):
        lost, norm, job.row.changed = lost + part.lost, norm + part.norm, job.row.changed + part.changed
        data = part.data  # of a matrix whole heads, of a bias all elements
        if job.heads:
            data = data[np.argsort(stored_row_order(len(data), len(data) // job.head_rows))]
        yield data
        source.release(name)
    if job.action == "fit":
        job.row.relative_error = lost / norm if norm else 0.0
    elif job.row.changed:
        job.row.action, job.row.relative_error = "rounded", lost / norm if norm else 0.0


# ---------------------------------------------------------------------------- what can be done with rows
def _keep(job: GgufJob, tensor: QuantizedTensor) -> _Stored:
    if not isinstance(tensor, BlockTensor):
        raise TypeError(f"{job.name} is {tensor.layout}, not blocks")
    return _Stored(tensor.blocks)


def _pack(job: GgufJob, tensor: QuantizedTensor) -> _Stored:
    if not isinstance(tensor, TernaryTensor):
        raise TypeError(f"{job.name} is {tensor.layout}, not ternary")
    return _Stored(pack_ternary(tensor, job.kind, unit=job.common_scale is not None))


def _plain(job: GgufJob, tensor: QuantizedTensor) -> _Stored:
    """Numbers as numbers; counts those that rounding changes."""
    values = _finite(job, tensor)
    with np.errstate(over="ignore"):
        stored = values.astype(job.kind.dtype)
    back = stored.astype(np.float32)
    if bad := int(np.count_nonzero(~np.isfinite(back))):
        raise FormatError(
            f"tensor {_named(job)}: {bad} values are beyond the range of {job.kind.name}",
            hint="Export with --gguf-type F32 or BF16.",
        )
    changed = int(np.count_nonzero(back != values))
    if not changed:
        return _Stored(stored)
    lost = np.square(back.astype(np.float64) - values).sum()
    return _Stored(stored, float(lost), float(np.square(values, dtype=np.float64).sum()), changed)


def _fit(job: GgufJob, tensor: QuantizedTensor) -> _Stored:
    """Values fitted to blocks."""
    values = _finite(job, tensor)
    try:
        stored = fit_blocks(values, job.kind.name)
    except ValueError as error:
        raise FormatError(f"tensor {_named(job)}: {error}", hint="Export with --gguf-type F32.") from None
    return _Stored(stored.blocks, *squares(values, stored))


def _finite(job: GgufJob, tensor: QuantizedTensor) -> NDArray[np.float32]:
    values = tensor.dequantize()
    if job.offset:
        values = values + np.float32(job.offset)
    if bad := int(np.count_nonzero(~np.isfinite(values))):
        raise CheckpointError(
            f"tensor {_named(job)}: {bad} values are not finite; engines load such a file and answer nonsense"
        )
    return values


def _named(job: GgufJob) -> str:
    return f"{job.origin[1]} of {job.origin[0].path}" if job.origin else job.name


ACTIONS: dict[str, Callable[[GgufJob, QuantizedTensor], _Stored]] = {
    "keep": _keep,
    "pack": _pack,
    "plain": _plain,
    "fit": _fit,
}


def _line(row: ExportRow) -> str:
    error = "" if row.relative_error is None else f", relative error {row.relative_error:.3e}"
    return f"{row.name}: {row.action}, {row.detail}{error}"
