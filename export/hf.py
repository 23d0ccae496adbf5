"""Artifact -> a dense Hugging Face folder: decoded weights that transformers, and whatever loads its folders, reads.

The default dtype is float32, which holds every decoded value exactly (codebooks are float16 or float32,
kept weights mostly bfloat16). With bf16 or f16 each tensor is rounded to nearest and the report counts the
values that changed. All floating-point tensors get the one dtype; integers and booleans travel as they are.
A tied head stays tied: no ``lm_head.weight`` is written.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from trapetum.errors import FormatError, RecipeError, UnsupportedModelError, located
from trapetum.export.cbk_folder import dense_config
from trapetum.export.deltas import fused_deltas
from trapetum.export.latents import joined_latents
from trapetum.export.plan import ExportPlan, ExportRequest, ExportRow, new_folder, refuse_existing
from trapetum.export.unstacked import unstacked
from trapetum.formats.atomic import disk_errors, require_space, write_atomic
from trapetum.formats.checksums import write_sums
from trapetum.formats.decoded import decoded, rotation_of
from trapetum.formats.manifest import SUMS
from trapetum.formats.safetensors_writer import (
    Entry,
    SafetensorsWriter,
    file_size,
    index_bytes,
    plan_shards,
    shard_names,
)
from trapetum.formats.source import TensorSource
from trapetum.models.architectures import resolve, text_config
from trapetum.models.config import parse_config
from trapetum.progress import Progress
from trapetum.quantize.blocks import row_blocks
from trapetum.tensors import matrix_shape

__all__ = ["DTYPES", "HfPlan", "plan_hf"]

DTYPES: dict[str, tuple[np.dtype[Any], str]] = {
    "f32": (np.dtype(np.float32), "float32"),
    "bf16": (np.dtype(ml_dtypes.bfloat16), "bfloat16"),
    "f16": (np.dtype(np.float16), "float16"),
}
# transformers refuses a file without it.
_METADATA = {"format": "pt"}
_INDEX = "model.safetensors.index.json"
_KNOWN = ("model*.safetensors", _INDEX, SUMS, "*.json", "*.jinja", "*.model", "*.txt", "*.py")
_BLOCK_WEIGHTS = 4 << 20


@dataclass
class HfPlan(ExportPlan):
    """A checked dense export; see :class:`~trapetum.export.plan.ExportPlan`."""

    format: ClassVar[str] = "hf"
    shards: dict[str, list[Entry]] = field(kw_only=True)
    config: dict[str, Any] = field(kw_only=True)

    def write(self, progress: Progress | None = None) -> Path:
        """Write the folder; see :meth:`ExportPlan.write`.

        Raises
        ------
        FormatError
            If a value does not fit the dtype.
        """
        progress = progress or Progress()
        request = self.request
        require_space(request.out.parent, self.size)
        for note in self.notes:
            progress.note(note)
        rows = {row.name: row for row in self.rows}
        progress.begin("export hf", self.size)
        with new_folder(request.out) as folder:
            for file, entries in self.shards.items():
                with SafetensorsWriter(folder / file, entries, _METADATA) as writer:
                    for entry in entries:
                        for values in _decoded(request.artifact, entry, rows[entry.name]):
                            writer.write(entry.name, values)
                        progress.advance(entry.nbytes, f"{entry.name}: {rows[entry.name].action}")
            if len(self.shards) > 1:
                write_atomic(folder / _INDEX, index_bytes(self.shards))
            write_atomic(folder / "config.json", (json.dumps(self.config, indent=2) + "\n").encode())
            with disk_errors(folder):
                for file_path in request.artifact.side_files():
                    if file_path.name != "config.json":
                        shutil.copyfile(file_path, folder / file_path.name)
            write_sums(folder / SUMS, sorted(folder.iterdir()))
        progress.end()
        return request.out


def plan_hf(request: ExportRequest) -> HfPlan:
    """Say which tensors go into which file, and how long each file is.

    Parameters
    ----------
    request : ExportRequest

    Raises
    ------
    RecipeError
        If the dtype is unknown, or a source is given (nothing is quantized here).
    OutputError
        If the output exists.
    """
    whole = request.artifact
    apart = (".k_b_proj.", ".linear_attn.in_proj_z.")  # what a file for engines may have in pieces
    with located(whole.path):
        known = not resolve(whole.config, any_architecture=True).any_architecture
        if known and any(mark in name for name in whole.names() for mark in apart):
            parsed = parse_config(whole.config)
            whole = fused_deltas(joined_latents(whole, parsed), parsed)
    request = replace(request, artifact=unstacked(whole))
    artifact = request.artifact
    chosen = request.dtype or "f32"
    if chosen not in DTYPES:
        raise RecipeError(f"dtype is {chosen!r}; allowed are {', '.join(DTYPES)}")
    if artifact.kind == "checkpoint" and artifact.config.get("quantization_config"):
        raise UnsupportedModelError(
            f"{artifact.path}: is quantized by another tool", hint="Run trapetum quantize on it first."
        )
    refuse_existing(request.out, _KNOWN, overwrite=request.overwrite)
    dtype, spelled = DTYPES[chosen]
    names, notes = _written(artifact)
    entries = [Entry(n, _target(artifact.dtype(n), dtype), artifact.shape(n)) for n in names]
    rows = [
        ExportRow(
            e.name,
            "exact" if rotation_of(artifact, e.name) is None else "rounded",
            f"{_stored(artifact, e.name)} -> {e.dtype}",
        )
        for e in entries
    ]
    parts = plan_shards([e.nbytes for e in entries], request.max_shard_size)
    shards = {file: [entries[i] for i in part] for file, part in zip(shard_names(len(parts)), parts)}
    files = {file: file_size(held, _METADATA) for file, held in shards.items()}
    config = _with_dtype(dense_config(artifact.config), spelled)
    return HfPlan(request, sum(files.values()), files, rows, notes, shards=shards, config=config)


def _written(artifact: TensorSource) -> tuple[list[str], list[str]]:
    """Names to write: all but a head that is the embedding again."""
    names = artifact.names()
    arch = resolve(artifact.config, any_architecture=True)
    tied = text_config(artifact.config).get("tie_word_embeddings", arch.defaults.get("tie_word_embeddings"))
    heads = [n for n in names if tied and arch.role(n).kind == "head"]
    notes = [f"{n} is tied to the embedding and not written" for n in heads]
    return [n for n in names if n not in heads], notes


def _target(stored: np.dtype[Any], dtype: np.dtype[Any]) -> np.dtype[Any]:
    return dtype if _is_float(stored) else stored


def _is_float(dtype: np.dtype[Any]) -> bool:
    """Whether a dtype is a floating-point one; the kinds of ml_dtypes types are not ``f``."""
    return dtype.kind == "f" or dtype.name.startswith(("bfloat", "float"))


def _stored(artifact: TensorSource, name: str) -> str:
    layout = artifact.layout(name)
    turned = "" if rotation_of(artifact, name) is None else ", rotation undone"
    return f"{artifact.dtype(name) if layout == 'dense' else layout}{turned}"


def _decoded(artifact: TensorSource, entry: Entry, row: ExportRow) -> Iterator[NDArray[Any]]:
    """Blocks of rows in the entry's dtype; counts what rounding changes."""
    count, width = matrix_shape(entry.shape)
    error = norm = 0.0
    for block in row_blocks(count, width, _BLOCK_WEIGHTS):
        if not _is_float(entry.dtype):
            yield artifact.load(entry.name, block).to_arrays()[""]
            continue
        values = decoded(artifact, entry.name, block)
        with np.errstate(over="ignore"):
            stored = values.astype(entry.dtype)
        back = stored.astype(np.float32)
        if bad := int(np.count_nonzero(np.isinf(back) & np.isfinite(values))):
            raise FormatError(
                f"{artifact.path}: tensor {entry.name}: {bad} values are beyond the range of {entry.dtype}",
                hint="Export with --dtype bf16 or f32.",
            )
        row.changed += int(np.count_nonzero((back != values) & ~np.isnan(values)))
        error += float(np.sum(np.square(back - values, dtype=np.float64)))
        norm += float(np.sum(np.square(values, dtype=np.float64)))
        yield stored
        artifact.release(entry.name)
    if row.changed:
        row.action, row.relative_error = "rounded", error / norm if norm else 0.0


def _with_dtype(config: dict[str, Any], spelled: str) -> dict[str, Any]:
    """State the dtype under the key that the config uses; transformers reads both."""
    keys = [k for k in ("dtype", "torch_dtype") if k in config] or ["torch_dtype"]
    changed: dict[str, Any] = {**config, **dict.fromkeys(keys, spelled)}
    if isinstance(nested := config.get("text_config"), dict):
        inner = [k for k in ("dtype", "torch_dtype") if k in nested]
        changed["text_config"] = {**nested, **dict.fromkeys(inner, spelled)}
    return changed
