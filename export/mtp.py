"""DeepSeek's multi-token prediction block -> mtp.cbk (magic MTP1), beside the model's own .cbk.

The block is layer ``num_hidden_layers`` of the checkpoint: a norm of the hidden state and one of the next token's
embedding, a projection of the two side by side, one sparse layer, a norm. Embedding and head are the model's: what
reads the format takes no others, so a block whose own differ from the model's is refused.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from trapetum.errors import CheckpointError, UnsupportedModelError, located
from trapetum.export.cbk import CbkPlan
from trapetum.export.cbk_headers import build_header
from trapetum.export.cbk_records import Job, Piece, stored_forms
from trapetum.export.plan import ExportRequest, ExportRow, refuse_existing
from trapetum.formats.cbk_manifest import manifest_paths
from trapetum.formats.cbk_matrix import ENTRIES
from trapetum.formats.cbk_records import Record
from trapetum.formats.source import TensorSource
from trapetum.models.config import ModelConfig, parse_config
from trapetum.tensors import CodebookTensor, matrix_shape

__all__ = ["FILE", "plan_mtp"]

FILE = "mtp.cbk"
_ROWS = 64  # that two embeddings are compared by
_EQUAL = 0.02  # relative squared error of a head that is quantized beside its copy that is kept


def plan_mtp(request: ExportRequest) -> CbkPlan:
    """Check that a model has such a block, and say what each record will hold.

    Parameters
    ----------
    request : ExportRequest
        ``out`` ending in ``.cbk`` is the file; of anything else, a folder, it is ``mtp.cbk`` in it.

    Raises
    ------
    UnsupportedModelError
        If the model has no such block, or MTP1 cannot hold it.
    CheckpointError
        If a tensor of the block is missing or misshapen.
    OutputError
        If the output exists.
    """
    artifact = request.artifact
    out = request.out if request.out.suffix == ".cbk" else request.out / FILE
    for path in (out, manifest_paths(out)[0]):
        refuse_existing(path, (), overwrite=request.overwrite)
    with located(artifact.path):
        config = parse_config(artifact.config)
        if config.architecture.cbk not in ("CBKR", "CBKD"):
            raise UnsupportedModelError(
                f"architecture {config.architecture.model_type} has no block that MTP1 holds"
            )
        names = config.architecture.index(artifact.names())
        header, notes = build_header(config, artifact.names(), names, stored_forms(artifact, names), "MTP1")
        prefix = f"model.layers.{config.num_hidden_layers}."
        if f"{prefix}eh_proj.weight" not in artifact.names():
            raise UnsupportedModelError(
                f"there is no tensor {prefix}eh_proj.weight: the model has no prediction block",
                hint="Some checkpoints leave it out; the original one has it.",
            )
        _check_shared(artifact, config, prefix)
        stored = set(artifact.names())
        if missing := [r.name for r in header.records() if prefix + r.name not in stored]:
            raise CheckpointError(f"tensor {prefix}{missing[0]} is missing")
        jobs = [_job(record, request, prefix) for record in header.records()]
    size, rows = header.file_bytes(), [job.row for job in jobs]
    request = replace(request, out=out)
    return CbkPlan(request, size, {out.name: size}, rows, notes, header=header, config=config, jobs=jobs)


def _job(record: Record, request: ExportRequest, prefix: str) -> Job:
    """A record of the block is named as in the checkpoint, after the layer's prefix."""
    name, artifact = prefix + record.name, request.artifact
    piece = _piece(artifact, name)
    rows, inputs = (record.shape if len(record.shape) == 2 else (1, *record.shape))[:2]
    padded = ".experts." in name or ".shared_experts." in name
    exact = (piece.rows, piece.inputs) == (rows, inputs)
    if not exact and not (padded and piece.rows <= rows and piece.inputs <= inputs):
        raise CheckpointError(f"tensor {name} is {[piece.rows, piece.inputs]}, not {[rows, inputs]}")
    stored = str(artifact.dtype(name))
    if record.kind in ("f32", "f16"):
        return Job(record, piece, ExportRow(name, "exact", f"{stored} -> {record.kind}"))
    size = ENTRIES[record.kind]
    first = piece.load(slice(0, 1))
    if isinstance(first, CodebookTensor) and first.codebook_size <= size:
        return Job(record, piece, ExportRow(name, "exact", f"codebook K={first.codebook_size}"))
    origin = "the artifact"
    if request.source is not None:
        piece, origin = _piece(request.source, name), "the source"
    row = ExportRow(name, "quantized", f"{stored} -> codebook K={size}, fitted to {origin}")
    return Job(record, piece, row, refit=True)


def _piece(source: TensorSource, name: str) -> Piece:
    rows, inputs = matrix_shape(source.shape(name))
    return Piece(source, name, 0, rows, inputs)


def _check_shared(artifact: TensorSource, config: ModelConfig, prefix: str) -> None:
    """The block's copies of embedding and head, where it has them, are the model's."""
    arch, stored = config.architecture, set(artifact.names())
    for own, part in (("embed_tokens.weight", "embed"), ("shared_head.head.weight", "head")):
        name, whole = prefix + own, arch.tensor_name(part)
        if name not in stored or whole not in stored:
            continue
        one, two = _piece(artifact, name), _piece(artifact, whole)
        chosen = np.linspace(0, one.rows - 1, min(_ROWS, one.rows)).astype(int).tolist()
        a, b = (
            np.concatenate([piece.decoded(slice(r, r + 1)) for r in chosen if r < piece.rows]).astype(
                np.float64
            )
            for piece in (one, two)
        )
        if a.shape != b.shape or np.square(a - b).sum() > _EQUAL * np.square(b).sum():
            raise UnsupportedModelError(
                f"{name} differs from {whole}, and what reads MTP1 takes the model's own",
                hint="No .cbk holds this block.",
            )
