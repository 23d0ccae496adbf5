"""Are these the source's weights? Every tensor against its twin in the source, in float64, by row blocks.

The relative error is ``||decoded - W||^2 / ||W||^2``. An artifact records it, and the recomputed one must agree; kept
tensors must be equal bit for bit. A ``.cbk`` and a dense folder record nothing: there an error is only judged by size.

A stack of experts, or a fused tensor, is compared with whatever tensors of the source hold its rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trapetum.errors import listed
from trapetum.formats.artifact import Artifact
from trapetum.formats.decoded import decoded
from trapetum.formats.source import TensorSource
from trapetum.models.architectures import Role, resolve, text_config
from trapetum.models.config import parse_config
from trapetum.progress import Progress
from trapetum.runtime.checks import Check, blocks
from trapetum.tensors import DenseTensor

__all__ = ["reconstruction"]

# Recomputed and recorded errors are float64 sums in another order.
_RECORD_TOLERANCE = 1e-5
# Without a record: 2-bit codebooks on Gaussian rows have 0.12; unrelated weights have 1 and more.
_ERROR_LIMIT = 0.5
# Dense records of a .cbk: float16 of a bfloat16 tensor adds less than 1e-6.
_DENSE_LIMIT = 1e-4
_TURNED = "; what was exported from an artifact of --rotate residual has that artifact as its source"


def reconstruction(opened: TensorSource, source: TensorSource | None, progress: Progress) -> Check:
    """Compare every tensor with the source's.

    Parameters
    ----------
    opened : TensorSource
        The model to check.
    source : TensorSource or None
        What it was made from.
    progress : Progress

    Returns
    -------
    Check
        ``figure`` is the mean relative error of the quantized tensors.
    """
    if source is None:
        return Check("reconstruction", None, None, "no source was given")
    pairs, missing, otherwise = _pairs(opened, source)
    faults, errors = [f"{name}: is not in the source" for name in missing], []
    progress.begin("comparing weights", sum(math.prod(opened.shape(a)) for a, _ in pairs), "w")
    for name, twins in pairs:
        if fault := _shape_fault(opened, name, source, twins):
            faults.append(f"{name}: {fault}")
            continue
        error = _relative_error(opened, name, source, twins, progress)
        if opened.layout(name) != DenseTensor.layout:
            errors.append(error)
        if fault := _judge(opened, name, error):
            faults.append(f"{name}: {fault}")
    progress.end()
    mean = float(np.mean(errors)) if errors else 0.0
    if faults:
        turned = not isinstance(opened, Artifact) and len(faults) > len(pairs) / 2
        return Check("reconstruction", False, mean, listed(faults) + (_TURNED if turned else ""))
    detail = f"{len(pairs)} tensors; relative error of {len(errors)} quantized ones: mean {mean:.3e}"
    detail += f", largest {max(errors, default=0.0):.3e}"
    if otherwise:
        detail += f"; not compared, for the source stores them in another form: {listed(otherwise)}"
    return Check("reconstruction", True, mean, detail)


def _judge(opened: TensorSource, name: str, error: float) -> str | None:
    """What is wrong with a tensor whose relative error is ``error``."""
    if isinstance(opened, Artifact):
        recorded = opened.records[name].relative_error
        if recorded is None:
            return (
                None if error == 0 else f"is kept, but differs from the source (relative error {error:.3e})"
            )
        if not abs(error - recorded) <= _RECORD_TOLERANCE * max(recorded, 1e-12):
            return f"relative error {error:.6e}, recorded is {recorded:.6e}"
        return None
    dense = opened.kind == "cbk" and opened.layout(name) == DenseTensor.layout
    limit = _DENSE_LIMIT if dense else _ERROR_LIMIT
    if not error <= limit:
        return f"relative error {error:.3e} is above {limit}: these are not the source's weights"
    return None


@dataclass(frozen=True)
class _Twin:
    """Where the source has the values of a tensor, or of some of its rows.

    Parameters
    ----------
    name : str
        In the source.
    rows : slice, optional
        Of the source's matrix form; all of them where left out.
    own : slice, optional
        The rows that they are of the tensor; all of them where left out.
    """

    name: str
    rows: slice | None = None
    own: slice | None = None


def _pairs(
    opened: TensorSource, source: TensorSource
) -> tuple[list[tuple[str, list[_Twin]]], list[str], list[str]]:
    """Tensors with their twins, by role where the architecture is known, else by name; what the source lacks; and what
    it has in a form that rows cannot be told in."""
    arch = resolve(opened.config, any_architecture=True)
    theirs = set(source.names())
    family = resolve(source.config, any_architecture=True)
    roles = family.index(theirs)
    # Of some parts a family has several forms, of which a checkpoint has one.
    known, stored = ({m.part for m in a.modules} for a in (family, family.settled(theirs)))
    pairs: list[tuple[str, list[_Twin]]] = []
    missing, otherwise = [], []
    for name in opened.names():
        role = arch.role(name)
        twin = roles.get(role) if role.part else None
        if twin is None and role.kind == "head" and text_config(source.config).get("tie_word_embeddings"):
            twin = next((n for r, n in roles.items() if r.kind == "embed"), None)
        if twin is None and name in theirs:
            twin = name
        if twin is not None:
            pairs.append((name, [_Twin(twin)]))
        elif twins := _pieces(opened, name, role, source, roles):
            if all(twins):
                pairs.append((name, [t for t in twins if t is not None]))
            elif role.part in known - stored and not any(twins):
                otherwise.append(name)
            else:
                missing.append(name)
        elif not _is_zero_bias(opened, name, role):
            missing.append(name)
    return pairs, missing, otherwise


def _pieces(
    opened: TensorSource, name: str, role: Role, source: TensorSource, roles: Mapping[Role, str]
) -> list[_Twin | None]:
    """The twins of the parts of a matrix that the source may hold in other cuts; None where it lacks one."""
    if not role.part or role.kind == "bias" or resolve(opened.config, any_architecture=True).any_architecture:
        return []
    mine, theirs = parse_config(opened.config), parse_config(source.config)
    module = mine.architecture.module(role.part)
    twins: list[_Twin | None] = []
    for expert in range(mine.size("experts")) if module.stacked else (role.expert,):
        for part, _ in module.parts:
            own = mine.architecture.locate(mine, {role: name}, part, role.layer, expert=expert)
            its = theirs.architecture.locate(theirs, roles, part, role.layer, expert=expert)
            twins.append(_Twin(its.name, its.rows, own.rows) if own and its else None)
    return twins


def _cut(shape: tuple[int, ...], rows: slice | None) -> tuple[int, ...]:
    """Shape of some rows of a tensor's matrix form; the tensor's own where all are meant."""
    return shape if rows is None else (rows.stop - rows.start, shape[-1])


def _shape_fault(opened: TensorSource, name: str, source: TensorSource, twins: Sequence[_Twin]) -> str | None:
    for twin in twins:
        mine, theirs = opened.shape(name), source.shape(twin.name)
        if _cut(mine, twin.own) != _cut(theirs, twin.rows):
            return f"shape {list(mine)}, the source has {list(theirs)}"
    return None


def _is_zero_bias(opened: TensorSource, name: str, role: Role) -> bool:
    """A .cbk stores q, k and v biases together: those that the model lacks are zero."""
    return opened.kind == "cbk" and role.kind == "bias" and not opened.load(name).dequantize().any()


def _blocks(opened: TensorSource, name: str, twins: Sequence[_Twin]) -> Iterator[tuple[slice, str, slice]]:
    """(rows of the tensor, twin, its rows) in pieces of bounded size."""
    for twin in twins:
        for block in blocks(_cut(opened.shape(name), twin.own)):
            own, its = (
                slice(block.start + at, block.stop + at)
                for at in (0 if rows is None else rows.start for rows in (twin.own, twin.rows))
            )
            yield own, twin.name, its


def _relative_error(
    opened: TensorSource, name: str, source: TensorSource, twins: Sequence[_Twin], progress: Progress
) -> float:
    """``||decoded - W||^2 / ||W||^2`` in float64; infinite where W is zero and the decoded tensor is not."""
    error = norm = 0.0
    for block, twin, its in _blocks(opened, name, twins):
        mine, theirs = opened.load(name, block), source.load(twin, its)
        if (
            isinstance(mine, DenseTensor)
            and isinstance(theirs, DenseTensor)
            and _same(mine.values, theirs.values)
        ):
            progress.advance(mine.values.size)
            norm += 1.0
            continue
        expected = decoded(source, twin, its).astype(np.float64)
        error += float(np.sum(np.square(decoded(opened, name, block) - expected)))
        norm += float(np.sum(np.square(expected)))
        progress.advance(expected.size)
    opened.release(name)
    for twin in {t.name for t in twins}:
        source.release(twin)
    if norm:
        return error / norm
    return math.inf if error else 0.0


def _same(a: NDArray[Any], b: NDArray[Any]) -> bool:
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()
