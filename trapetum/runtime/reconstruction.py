"""Are these the source's weights? Every tensor against its twin in the source, in float64, by row blocks.

The relative error is ``||decoded - W||^2 / ||W||^2``. An artifact records it, and the recomputed one must agree; kept
tensors must be equal bit for bit. A ``.cbk`` and a dense folder record nothing: there an error is only judged by size.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trapetum.errors import listed
from trapetum.formats.artifact import Artifact
from trapetum.formats.decoded import decoded
from trapetum.formats.source import TensorSource
from trapetum.models.architectures import Role, resolve, text_config
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
    pairs, missing = _pairs(opened, source)
    faults, errors = [f"{name}: is not in the source" for name in missing], []
    progress.begin("comparing weights", sum(math.prod(opened.shape(a)) for a, _ in pairs), "w")
    for name, twin in pairs:
        if opened.shape(name) != source.shape(twin):
            faults.append(
                f"{name}: shape {list(opened.shape(name))}, the source has {list(source.shape(twin))}"
            )
            continue
        error = _relative_error(opened, name, source, twin, progress)
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
    return Check("reconstruction", True, mean, f"{detail}, largest {max(errors, default=0.0):.3e}")


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


def _pairs(opened: TensorSource, source: TensorSource) -> tuple[list[tuple[str, str]], list[str]]:
    """Names that mean the same tensor, by role where the architecture is known, else by name."""
    arch = resolve(opened.config, any_architecture=True)
    theirs = set(source.names())
    roles = resolve(source.config, any_architecture=True).index(theirs)
    pairs, missing = [], []
    for name in opened.names():
        role = arch.role(name)
        twin = roles.get(role) if role.part else None
        if twin is None and role.kind == "head" and text_config(source.config).get("tie_word_embeddings"):
            twin = next((n for r, n in roles.items() if r.kind == "embed"), None)
        if twin is None and name in theirs:
            twin = name
        if twin is not None:
            pairs.append((name, twin))
        elif not _is_zero_bias(opened, name, role):
            missing.append(name)
    return pairs, missing


def _is_zero_bias(opened: TensorSource, name: str, role: Role) -> bool:
    """A .cbk stores q, k and v biases together: those that the model lacks are zero."""
    return opened.kind == "cbk" and role.kind == "bias" and not opened.load(name).dequantize().any()


def _relative_error(
    opened: TensorSource, name: str, source: TensorSource, twin: str, progress: Progress
) -> float:
    """``||decoded - W||^2 / ||W||^2`` in float64; infinite where W is zero and the decoded tensor is not."""
    error = norm = 0.0
    for block in blocks(opened.shape(name)):
        mine, theirs = opened.load(name, block), source.load(twin, block)
        if (
            isinstance(mine, DenseTensor)
            and isinstance(theirs, DenseTensor)
            and _same(mine.values, theirs.values)
        ):
            progress.advance(mine.values.size)
            norm += 1.0
            continue
        expected = decoded(source, twin, block).astype(np.float64)
        error += float(np.sum(np.square(decoded(opened, name, block) - expected)))
        norm += float(np.sum(np.square(expected)))
        progress.advance(expected.size)
    opened.release(name)
    source.release(twin)
    if norm:
        return error / norm
    return math.inf if error else 0.0


def _same(a: NDArray[Any], b: NDArray[Any]) -> bool:
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()
