"""The artifact that a plan would make, as a source: every row block is quantized when it is asked for.

An exporter that streams can so write its file straight from the model. What it reads is what it would read from the
finished artifact, bit for bit: no result of a search depends on how rows are cut. Memory holds a few row blocks.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from trapetum.formats.checkpoint import SIDE_FILES
from trapetum.formats.view import SourceView
from trapetum.quantize.additive import Additive
from trapetum.quantize.fitting import Fits
from trapetum.quantize.plan import Plan, PlanRow
from trapetum.quantize.schemes import KMeans
from trapetum.quantize.stream import Pressed, cuts, press_block
from trapetum.rotation import HadamardRotation
from trapetum.tensors import DenseTensor, QuantizedTensor, matrix_shape

if TYPE_CHECKING:
    from trapetum.quantize.job import Job
    from trapetum.quantize.report import Report

__all__ = ["PressedSource", "Route"]

_KEPT = 8  # blocks of tensors with a second moment, which are cut by rule and not where the reader cuts


class Route(Protocol):
    """What is made of a job instead of an artifact: see ``export.direct``."""

    @property
    def settings(self) -> dict[str, Any]:
        """What the result depends on; part of the job's identity."""

    def preview(self, report: Report, job: Job) -> Report:
        """The report of a dry run, with what this route would write; refuses what cannot be done."""

    def run(self, job: Job, *, resume: bool, overwrite: bool) -> Report:
        """Do the work."""


class PressedSource(SourceView[Any]):
    """A ``TensorSource`` of quantized tensors that are made on demand; may be read by any number of threads.

    Parameters
    ----------
    plan : Plan
        Surveyed, if anything is to be loaded.
    path : Path
        Where the artifact would be; names it.
    side_files : list of Path
        What would travel with it.
    identity : mapping, optional
        What its manifest would say of the source.

    Attributes
    ----------
    manifest : dict
        The part of an artifact's manifest that exports look at.
    """

    def __init__(
        self, plan: Plan, path: Path, side_files: list[Path], identity: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(plan.source)
        self.plan, self.path, self.kind = plan, path, "artifact"
        self.config = {k: v for k, v in plan.config.items() if k != "quantization_config"}
        self.notes = []
        self.manifest = {"source": None if identity is None else dict(identity)}
        self._rows = {row.name: row for row in plan.rows}
        self._side = [file for file in side_files if SIDE_FILES.fullmatch(file.name)]
        self._fits = Fits(plan)
        self._lock = Lock()
        self._blocks: OrderedDict[tuple[str, int], Pressed] = OrderedDict()
        self._errors: dict[str, dict[int, tuple[float, float]]] = {}

    def names(self) -> list[str]:
        """In the order of the plan."""
        return list(self._rows)

    def shape(self, name: str) -> tuple[int, ...]:
        """Logical shape."""
        return self._rows[name].shape

    def dtype(self, name: str) -> np.dtype[Any]:
        """Of the source where the tensor is kept, else float32."""
        row = self._rows[name]
        return row.dtype if row.scheme.layout == DenseTensor.layout else np.dtype(np.float32)

    def layout(self, name: str) -> str:
        """Of the tensor's scheme."""
        return self._rows[name].scheme.layout

    def params(self, name: str) -> dict[str, Any]:
        """Parameters of the layout, without any work where the scheme says them."""
        scheme = self._rows[name].scheme
        if isinstance(scheme, KMeans):
            return {"codebook_size": scheme.codebook_size}
        if isinstance(scheme, Additive):
            return {"num_codebooks": scheme.num_codebooks}
        return self.load(name, slice(0, 1)).params()

    def rotation_of(self, name: str) -> HadamardRotation | None:
        """The rotation that is folded into a tensor."""
        return self.plan.rotation if self._rows[name].rotated else None

    def load(self, name: str, rows: slice | None = None) -> QuantizedTensor:
        """Quantize some rows, or all."""
        row = self._rows[name]
        count = matrix_shape(row.shape)[0]
        start, stop, _ = (rows or slice(None)).indices(count)
        by_rule = self.plan.statistics is not None and self.plan.statistics.has_moment(row)
        if not by_rule:
            return self._pressed(row, slice(start, stop)).tensor
        found = [
            (cut, self._kept(row, cut).tensor)
            for cut in cuts(self.plan, row, 1)
            if cut.start < stop and cut.stop > start
        ]
        return _joined([(t, slice(max(start - c.start, 0), min(stop, c.stop) - c.start)) for c, t in found])

    def error_of(self, name: str) -> float | None:
        """Relative error of the rows of a tensor that were loaded; None where nothing was searched."""
        blocks = self._errors.get(name)
        if not blocks:
            return None
        lost, squares = zip(*blocks.values())
        return math.fsum(lost) / total if (total := math.fsum(squares)) else 0.0

    def tokenizer_file(self) -> Path | None:
        """The source's."""
        return next((f for f in self._side if f.name == "tokenizer.json"), None)

    def side_files(self) -> list[Path]:
        """The source's."""
        return self._side

    def close(self) -> None:
        """Nothing: the plan's source belongs to someone else."""

    def _kept(self, row: PlanRow, cut: slice) -> Pressed:
        key = (row.name, cut.start)
        with self._lock:
            found = self._blocks.get(key)
        if found is None:
            found = self._pressed(row, cut)
            with self._lock:
                self._blocks[key] = found
                while len(self._blocks) > _KEPT:
                    self._blocks.popitem(last=False)
        return found

    def _pressed(self, row: PlanRow, cut: slice) -> Pressed:
        found = press_block(self.plan, self._fits, row, cut)
        if found.errors is not None:
            lost, squares = (math.fsum(part.tolist()) for part in found.errors)
            with self._lock:
                self._errors.setdefault(row.name, {})[cut.start] = (lost, squares)
        return found


def _joined(parts: list[tuple[QuantizedTensor, slice]]) -> QuantizedTensor:
    """Rows of several blocks of one tensor, one after the other."""
    first = parts[0][0]
    stored = [tensor.to_arrays() for tensor, _ in parts]
    arrays = {
        suffix: stored[0][suffix]
        if suffix in first.shared
        else np.concatenate([arrays[suffix][rows] for arrays, (_, rows) in zip(stored, parts)])
        for suffix in stored[0]
    }
    rows = sum(rows.stop - rows.start for _, rows in parts)
    return type(first).from_arrays(arrays, (rows, first.in_features), first.params())
