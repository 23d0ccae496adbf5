"""Artifact -> planes: matrices in the form that GPU kernels read, everything else beside them.

Ternary matrices become planes-v1, codebooks and additive codebooks the tiles of ``formats/tiles.py``; codes, scales and
entries are those of the artifact, bit for bit. What no layout holds is stored dense: kept tensors as they are, float32
codebooks exactly, other layouts as float32. With ``fuse`` the matrices that an engine multiplies as one (q, k, v; gate,
up) are concatenated by rows first and laid out as one tensor; additive ones never are, for each has its own codebooks.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from trapetum.errors import UnsupportedModelError, listed
from trapetum.export.cbk_folder import dense_config
from trapetum.export.plan import ExportPlan, ExportRequest, ExportRow, new_folder, refuse_existing
from trapetum.formats.atomic import disk_errors, require_space, write_atomic
from trapetum.formats.checksums import write_sums
from trapetum.formats.decoded import rotation_of
from trapetum.formats.manifest import SUMS
from trapetum.formats.planes import (
    GROUP_SIZE,
    LAYOUT,
    MANIFEST,
    MatrixEntry,
    PlanesEntry,
    PlanesLayout,
    PlanesPart,
    TilesEntry,
    write_planes,
)
from trapetum.formats.source import TensorSource
from trapetum.formats.tiles import Tiles, tiles_for
from trapetum.models.architectures import resolve
from trapetum.progress import Progress
from trapetum.rotation import ROTATION_KEY, HadamardRotation
from trapetum.tensors import CodebookTensor, DenseTensor, QuantizedTensor, TernaryTensor, matrix_shape

__all__ = ["PlanesPlan", "plan_planes"]

FILE = "model.safetensors"
_KNOWN = (FILE, MANIFEST, SUMS, "*.json", "*.jinja", "*.model", "*.txt")

# Matrices that read one activation, by the kinds of their roles, and the name of what they become.
_FUSED = {("q", "k", "v"): "qkv_proj", ("gate", "up"): "gate_up_proj"}


@dataclass
class PlanesPlan(ExportPlan):
    """A checked export; see :class:`~trapetum.export.plan.ExportPlan`."""

    format: ClassVar[str] = "planes"
    layout: PlanesLayout = field(kw_only=True)

    def write(self, progress: Progress | None = None) -> Path:
        """Write the folder; see :meth:`ExportPlan.write`."""
        progress = progress or Progress()
        request = self.request
        require_space(request.out.parent, self.size)
        for note in self.notes:
            progress.note(note)
        rows = {row.name: row for row in self.rows}
        progress.begin("export planes", len(rows), "tensors")
        with new_folder(request.out) as folder:

            def wrote(name: str) -> None:
                request.artifact.release(name)
                progress.advance(1, f"{name}: {rows[name].action}, {rows[name].detail}")

            write_planes(folder / FILE, self.layout, self._load, wrote)
            config = dense_config(request.artifact.config)
            write_atomic(folder / "config.json", (json.dumps(config, indent=2) + "\n").encode())
            with disk_errors(folder):
                for path in request.artifact.side_files():
                    if path.name != "config.json":
                        shutil.copyfile(path, folder / path.name)
            write_sums(folder / SUMS, sorted(folder.iterdir()))
        progress.end()
        return request.out

    def _load(self, name: str) -> QuantizedTensor:
        tensor = self.request.artifact.load(name)
        if name not in self.layout.dense or isinstance(tensor, DenseTensor):
            return tensor
        return DenseTensor(tensor.dequantize().astype(self.layout.dense[name][0]))


def plan_planes(request: ExportRequest) -> PlanesPlan:
    """Say which matrices become planes, which of them together, and how long the file is.

    Parameters
    ----------
    request : ExportRequest

    Raises
    ------
    UnsupportedModelError
        If there is no ternary matrix, or one that the layout cannot hold; all of them in one message.
    OutputError
        If the output exists.
    """
    artifact = request.artifact
    refuse_existing(request.out, _KNOWN, overwrite=request.overwrite)
    first_rows = {
        n: artifact.load(n, slice(0, 1)) for n in artifact.names() if artifact.layout(n) != DenseTensor.layout
    }
    ternary = {n: row for n, row in first_rows.items() if isinstance(row, TernaryTensor)}
    tiled = {n: made for n, row in first_rows.items() if (made := tiles_for(row)) is not None}
    if not ternary and not tiled:
        raise UnsupportedModelError(
            f"{artifact.path}: holds no ternary, codebook or additive matrix; planes files are made of those",
            hint="Quantize with --bits 4 or --scheme ternary, or take over ternary weights with --scheme asis.",
        )
    if bad := [text for n, row in ternary.items() if (text := _misfit(n, row))]:
        raise UnsupportedModelError(
            f"{artifact.path}: {len(bad)} matrices do not fit {LAYOUT}, which holds groups of {GROUP_SIZE} with "
            f"float16 scales: {listed(bad)}",
            hint=f"Quantize with --group-size {GROUP_SIZE}.",
        )
    groups = _groups(artifact, first_rows) if request.fuse else {}
    entries = tuple(_entries(artifact, first_rows, ternary, tiled, groups))
    held = {part.name: entry for entry in entries for part in entry.parts}
    dense = {n: (_dense_dtype(artifact, n), artifact.shape(n)) for n in artifact.names() if n not in held}
    layout = PlanesLayout(entries, dense, _rotation(artifact, held))
    rows = [ExportRow(n, "exact", _told(artifact, n, entry)) for n, entry in held.items()]
    rows += [ExportRow(n, "exact", f"{artifact.layout(n)} -> {dtype}") for n, (dtype, _) in dense.items()]
    return PlanesPlan(request, layout.size, {FILE: layout.size}, rows, [], layout=layout)


def _told(artifact: TensorSource, name: str, entry: MatrixEntry) -> str:
    together = f" in {entry.name}" if len(entry.parts) > 1 else ""
    return f"{artifact.layout(name)} -> {entry.layout}{together}"


def _misfit(name: str, row: TernaryTensor) -> str | None:
    if row.group_size == GROUP_SIZE and row.scales.dtype == np.float16:
        return None
    return f"{name} has groups of {row.group_size} with {row.scales.dtype} scales"


def _dense_dtype(artifact: TensorSource, name: str) -> np.dtype[Any]:
    if artifact.layout(name) == CodebookTensor.layout:
        tensor = artifact.load(name, slice(0, 1))
        return np.dtype(tensor.to_arrays()["codebook"].dtype)
    return artifact.dtype(name)


def _rotation(artifact: TensorSource, names: Iterable[str]) -> HadamardRotation | None:
    return next((r for n in names if (r := rotation_of(artifact, n)) is not None), None)


def _entries(
    artifact: TensorSource,
    first_rows: dict[str, QuantizedTensor],
    ternary: dict[str, TernaryTensor],
    tiled: dict[str, type[Tiles]],
    groups: dict[str, tuple[str, list[str]]],
) -> Iterator[MatrixEntry]:
    """One entry a matrix, or a group of matrices."""
    done: set[str] = set()
    for name in first_rows:
        if name in done or (name not in ternary and name not in tiled):
            continue
        fused, members = groups.get(name, (name, [name]))
        done.update(members)
        parts = tuple(PlanesPart(n, artifact.shape(n)) for n in members)
        rotation = ROTATION_KEY if rotation_of(artifact, members[0]) is not None else None
        if name in ternary:
            yield PlanesEntry(fused, parts, max(ternary[n].levels for n in members), rotation)
        else:
            form = tiled[name].of([first_rows[n] for n in members])
            rows = sum(matrix_shape(part.shape)[0] for part in parts)
            yield TilesEntry(fused, parts, replace(form, rows=rows), rotation)


def _groups(
    artifact: TensorSource, first_rows: dict[str, QuantizedTensor]
) -> dict[str, tuple[str, list[str]]]:
    """For each matrix that can be fused: the name of the whole, and its members in order.

    All of the group must agree: ternary, or codebooks of one layout; row lengths; rotated or not.
    """
    arch = resolve(artifact.config)
    kinds_of = {n: row.layout for n, row in first_rows.items() if isinstance(row, TernaryTensor)}
    for n, row in first_rows.items():
        if isinstance(row, CodebookTensor) and (made := tiles_for(row)) is not None:
            kinds_of[n] = made.layout
    by_place = {(role.kind, role.layer): n for n in kinds_of if (role := arch.role(n)).expert is None}
    found: dict[str, tuple[str, list[str]]] = {}
    for layer in sorted({layer for _, layer in by_place if layer is not None}):
        for kinds, whole in _FUSED.items():
            members = [by_place[kind, layer] for kind in kinds if (kind, layer) in by_place]
            alike = {
                (kinds_of[n], matrix_shape(artifact.shape(n))[1], rotation_of(artifact, n) is None)
                for n in members
            }
            if len(members) == len(kinds) and len(alike) == 1:
                head, _, last = members[0].rpartition(".")
                name = f"{head.rpartition('.')[0]}.{whole}.{last}"
                found.update(dict.fromkeys(members, (name, members)))
    return found
