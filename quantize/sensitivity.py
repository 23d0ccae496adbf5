"""What a scheme would cost a tensor, and what that costs the model: measured on some of its rows, weighed by its role.

The model is linear: a tensor that is stored with relative error t adds ``weight * t`` to the distance from the original
(mean KL), and tensors add up. Measured on the 42 layers of an 18-million-parameter Llama one at a time: KL goes with
t to the power 1.06 between 3 and 4 bits, and single layers at 3 bits add up to 0.163 where all of them together cost
0.156 (on another text).

``weight`` is a *prior*, not a measurement of the model at hand: by role over that one model, and what its first block
cost more. On a sibling (3 blocks of 256, another vocabulary) its layers came out at 0.7 to 1.5 of it, apart from one
factor for all; only values and outputs of its first block were twice as sensitive, and its head 0.4 times. It says
nothing about models with other sensitive places (super weights, the last block). With a calibration text the model is
measured instead (``influence``), and priors only divide a group's loss between its tensors.

``t`` is measured: of a few runs of rows, ``sum(e H e) / sum(w H w)`` under the second moment of the inputs, under its
diagonal where only that is known, and plain squares without calibration. Under the second moment the error is that
of error feedback, measured like the model uses the inputs, so its priors are a table of their own: values, whose inputs
make up for much, count half as much there beside queries and keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from trapetum.quantize.hessian import Hessian
from trapetum.quantize.identity import tensor_seed
from trapetum.quantize.scheme import Importance, Scheme
from trapetum.tensors import matrix_shape

if TYPE_CHECKING:
    from trapetum.quantize.plan import Plan, PlanRow

__all__ = ["FIRST", "PLAIN", "UNDER_MOMENTS", "measure", "prior"]

PLAIN = {
    "q": 0.030, "k": 0.045, "v": 0.13, "qkv": 0.20, "kv": 0.17, "o": 0.090, "gate": 0.15, "up": 0.12, "gate_up": 0.27,
    "down": 0.15, "head": 1.15, "embed": 0.63, "linear": 0.10,
}  # fmt: skip
"""KL for a relative squared error of 1, by role; fused matrices are the sums of their parts."""

UNDER_MOMENTS = {
    "q": 0.062, "k": 0.11, "v": 0.096, "qkv": 0.27, "kv": 0.21, "o": 0.13, "gate": 0.29, "up": 0.19, "gate_up": 0.48,
    "down": 0.22, "head": 1.15, "embed": 0.63, "linear": 0.16,
}  # fmt: skip
"""The same for an error under the second moment of the inputs, where codes come from error feedback."""

FIRST = {"gate": 1.8, "up": 1.9, "gate_up": 1.8, "down": 3.9}
"""What the first eighth of the blocks (at least one) costs more."""

_SAMPLE_WEIGHTS = 1 << 16
_RUNS = 4  # contiguous: what rotates rows works on whole blocks of them


def prior(row: PlanRow, layers: int, experts: int, *, moments: bool) -> float:
    """The weight of a tensor's relative error.

    Parameters
    ----------
    row : PlanRow
    layers : int
        Blocks of the model.
    experts : int
        Tensors that share the work of this one: routed experts of a layer that are stored one by one, else 1.
    moments : bool
        Whether the error is taken under the second moment of the inputs.
    """
    table = UNDER_MOMENTS if moments else PLAIN
    kind, layer = row.role.kind, row.role.layer
    early = layer is not None and layer < max(1, round(layers / 8))
    return table.get(kind, table["linear"]) * (FIRST.get(kind, 1.0) if early else 1.0) / experts


def measure(plan: Plan, row: PlanRow, schemes: Sequence[Scheme]) -> list[float]:
    """Relative error of some rows of a tensor under each scheme; a pure function of plan and row.

    Parameters
    ----------
    plan : Plan
        With statistics where the inputs are known.
    row : PlanRow
    schemes : sequence of Scheme
        All of which fit the tensor.

    Returns
    -------
    list of float
        0 where the sampled rows are zero; 1 under a scheme that cannot hold their largest weight.
    """
    rows, width = matrix_shape(row.shape)
    cuts = _runs(rows, width)
    values = np.concatenate([plan.sampled(row, cut) for cut in cuts])
    plan.source.release(row.name)
    importance = plan.importance(row)
    seed = tensor_seed(plan.recipe.seed, row.name)
    with np.errstate(over="ignore", invalid="ignore"):
        norm = _loss(values.astype(np.float64), importance)
    if not np.isfinite(norm) or norm == 0:
        return [0.0] * len(schemes)
    peak = float(np.abs(values).max())
    return [
        _error(values, scheme, importance, seed, lambda part: plan.sampled(row, part), rows) / norm
        if peak <= scheme.limit
        else 1.0
        for scheme in schemes
    ]


def _runs(rows: int, width: int) -> list[slice]:
    """A few runs of neighbouring rows, spread over the tensor."""
    wanted = min(rows, max(2 * _RUNS, -(-_SAMPLE_WEIGHTS // max(width, 1))))
    if wanted == rows:
        return [slice(0, rows)]
    length = wanted // _RUNS
    return [slice(start, start + length) for start in (rows * i // _RUNS for i in range(_RUNS))]


def _error(
    values: NDArray[Any],
    scheme: Scheme,
    importance: Importance,
    seed: int,
    read: Callable[[slice], NDArray[Any]],
    rows: int,
) -> float:
    fitted = scheme if scheme.row_independent else scheme.fit(rows, read, seed, importance)
    found = fitted.quantize(values, importance, wide=scheme.wide(values), seed=seed)
    return _loss(values.astype(np.float64) - found.dequantize(slice(None)), importance)


def _loss(values: NDArray[np.float64], importance: Importance) -> float:
    """``sum(v H v)`` over the rows v; H is the identity where nothing is known."""
    if isinstance(importance, Hessian):
        rows = values.astype(importance.moment.dtype, copy=False)  # not the moment: it may be a gigabyte
        return float(np.multiply(rows @ importance.moment, rows).sum(dtype=np.float64))
    weights = 1.0 if importance is None else importance.astype(np.float64)
    return float((np.square(values) * weights).sum())
