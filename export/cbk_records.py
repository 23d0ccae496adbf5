"""Where the values of each record of a .cbk come from: the part of the model that it holds, and how it gets there.

The walk of a layout names tensors as one canonical family does (Llama for CBK3, Gemma 2 for CBKG, DeepSeek V3 for the
others); a checkpoint may store the same part under another name, fused with its neighbours or stacked. So a record's
name becomes a part, and ``Architecture.locate`` finds its rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trapetum.errors import CheckpointError
from trapetum.export.cbk_headers import Stored
from trapetum.export.plan import ExportRequest, ExportRow
from trapetum.formats.cbk_matrix import ENTRIES
from trapetum.formats.cbk_records import CbkHeader, Record
from trapetum.formats.decoded import decoded
from trapetum.formats.source import TensorSource
from trapetum.models.architectures import ARCHITECTURES, Role
from trapetum.models.config import ModelConfig
from trapetum.quantize.plan import as_float
from trapetum.tensors import AdditiveTensor, CodebookTensor, DenseTensor, QuantizedTensor, matrix_shape

__all__ = ["Job", "Piece", "record_jobs", "stored_forms"]

_WALKS = {"CBK1": "llama", "CBK2": "llama", "CBK3": "llama", "CBKG": "gemma2"}
"""Magic -> family whose names the walk uses; DeepSeek V3 for all others."""


@dataclass(frozen=True)
class Piece:
    """Rows of a tensor of a source.

    Parameters
    ----------
    source : TensorSource
    name : str
    start, rows, inputs : int
        First row, number of rows, and their length, in the tensor's matrix form.
    columns : slice, optional
        Values of a row that count: a vector that is fused with others.
    """

    source: TensorSource
    name: str
    start: int
    rows: int
    inputs: int
    columns: slice = field(default_factory=lambda: slice(None))

    @property
    def what(self) -> str:
        """File and tensor, for messages."""
        return f"{self.source.path}: tensor {self.name}"

    def _rows(self, block: slice) -> slice:
        return slice(self.start + block.start, self.start + block.stop)

    def load(self, block: slice) -> QuantizedTensor:
        """Rows as stored."""
        return self.source.load(self.name, self._rows(block))

    def decoded(self, block: slice) -> NDArray[np.float32]:
        """Rows as float32 (a rotation undone)."""
        return decoded(self.source, self.name, self._rows(block))[:, self.columns]

    def values(self, block: slice) -> NDArray[Any]:
        """What a search works on: kept values as stored, anything else decoded."""
        tensor = self.load(block)
        return as_float(tensor.values) if isinstance(tensor, DenseTensor) else self.decoded(block)

    def release(self) -> None:
        """Let mapped pages go."""
        self.source.release(self.name)


@dataclass(frozen=True)
class Job:
    """One record.

    Parameters
    ----------
    record : Record
    piece : Piece or None
        Its values; None where the model has none and the record is zeros.
    row : ExportRow
    refit : bool
        A matrix is fitted here rather than copied.
    """

    record: Record
    piece: Piece | None
    row: ExportRow
    refit: bool = False


def stored_forms(source: TensorSource, names: Mapping[Role, str]) -> dict[Role, Stored]:
    """Codebook sizes of the quantized tensors of a source, by role."""
    found = {}
    for role, name in names.items():
        layout = source.layout(name)
        if layout == CodebookTensor.layout:
            found[role] = Stored(entries=_parameter(source, name, "codebook_size"))
        elif layout == AdditiveTensor.layout:
            found[role] = Stored(additive=_parameter(source, name, "num_codebooks"))
    return found


def _parameter(source: TensorSource, name: str, key: str) -> int:
    """A parameter of a tensor's layout, without its arrays where the source knows it."""
    known = getattr(source, "params", None)
    return int((source.load(name, slice(0, 1)).params() if known is None else known(name))[key])


def record_jobs(
    header: CbkHeader,
    request: ExportRequest,
    config: ModelConfig,
    names: Mapping[Role, str],
    stored: Mapping[Role, Stored],
) -> list[Job]:
    """A job for each record of the file.

    Raises
    ------
    CheckpointError
        If ``--source`` is another model.
    """
    plan = _Sources(request, config, names, stored)
    family = ARCHITECTURES[_WALKS.get(header.layout.magic, "deepseek_v3")]
    return [plan.job(record, family.role(record.name)) for record in header.records()]


class _Sources:
    def __init__(
        self,
        request: ExportRequest,
        config: ModelConfig,
        names: Mapping[Role, str],
        stored: Mapping[Role, Stored],
    ) -> None:
        self.request, self.config, self.stored = request, config, stored
        self.indices = {id(request.artifact): names}
        if request.source is not None:
            self.indices[id(request.source)] = config.architecture.index(request.source.names())

    def job(self, record: Record, role: Role) -> Job:
        absent = role not in self.indices[id(self.request.artifact)]
        tied = role.kind == "head" and (self.config.tie_word_embeddings is True or absent)
        piece = self._piece(self.request.artifact, role, tied)
        if piece is None:
            if record.kind != "f32":
                raise CheckpointError(f"{self.request.artifact.path}: the record {record.name} has no tensor")
            return Job(record, None, ExportRow(record.name, "zeros", "the model has none"))
        form = self._form(piece)
        entries, additive = form.entries, form.additive
        stored = f"codebook K={entries}" if entries else f"additive {additive}x8" if additive else ""
        stored = stored or str(self.request.artifact.dtype(piece.name))
        size = ENTRIES.get(record.kind)
        wanted = f"codebook K={size}" if size else f"additive {record.kind[1:]}x8"
        if record.kind in ("f32", "f16"):
            detail = f"{stored} -> {record.kind}"
            if form != Stored() and self.request.source is not None:  # no reason to keep what was lost
                piece, detail = self._from_source(piece, role, tied), f"{detail}, from the source"
            return Job(record, piece, ExportRow(record.name, "exact", detail))
        if size is not None and 0 < entries <= size:
            detail = stored if entries == size else f"{stored} repeated to {size}"
            return Job(record, piece, ExportRow(record.name, "exact", detail))
        if size is None and wanted == stored:
            return Job(record, piece, ExportRow(record.name, "exact", stored))
        origin = "the embedding" if tied else "the artifact"
        if self.request.source is not None:
            piece, origin = self._from_source(piece, role, tied), "the source"
        detail = f"{stored} -> {wanted}, fitted to {origin}"
        return Job(record, piece, ExportRow(record.name, "quantized", detail), refit=True)

    def _form(self, piece: Piece) -> Stored:
        names = self.indices[id(self.request.artifact)]
        role = self.config.architecture.role(piece.name)
        return self.stored.get(role, Stored()) if role in names else Stored()

    def _piece(self, source: TensorSource, role: Role, tied: bool) -> Piece | None:
        part = "embed" if tied else role.part
        place = self.config.architecture.locate(
            self.config,
            self.indices[id(source)],
            part,
            role.layer,
            expert=role.expert,
            bias=role.kind == "bias",
        )
        if place is None:
            return None
        shape = matrix_shape(source.shape(place.name))
        if role.kind == "bias" and place.rows is not None:
            return Piece(source, place.name, 0, 1, place.rows.stop - place.rows.start, place.rows)
        rows = slice(0, shape[0]) if place.rows is None else place.rows
        return Piece(source, place.name, rows.start, rows.stop - rows.start, shape[1])

    def _from_source(self, piece: Piece, role: Role, tied: bool) -> Piece:
        source = self.request.source
        if source is None:
            return piece
        found = self._piece(source, role, tied)
        if found is None or (found.rows, found.inputs) != (piece.rows, piece.inputs):
            raise CheckpointError(
                f"{source.path}: has no tensor {piece.name} of shape {[piece.rows, piece.inputs]}",
                hint="Give the model that the artifact was made from.",
            )
        return found
