"""A feed-forward of routed experts: each token goes to a few of many, and perhaps to one that all share.

Tokens are grouped by expert, so each expert's weights are read once a call. Experts are added to a token in their
order, whatever the number of threads: the same bits every time. Threads take experts, some thousand results at a time,
and help inside each other's products where there are more threads than experts. Calibration sees one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from trapetum.errors import CheckpointError
from trapetum.kernels.cpu.pool import Pool
from trapetum.models.experts import SECTION, Routing
from trapetum.runtime.layers import GATES, GatedMlp, Linear, Observe, apply_all, logistic
from trapetum.runtime.matrix import build_matrix
from trapetum.runtime.routers import ROUTERS

if TYPE_CHECKING:
    from trapetum.runtime.weights import Weights

__all__ = ["Expert", "RoutedExperts", "build_experts"]

Floats = NDArray[np.float32]
Combine = Callable[[Floats, Floats], None]

_ROWS = 4096  # results, one a token and expert, that are held at once: 64 MiB at a hidden size of 4,096


@dataclass(frozen=True)
class Expert:
    """``down(combine(gate(x), up(x)))`` of one routed expert.

    Parameters
    ----------
    gate, up, down : Linear
    combine : callable
        (gate, up) -> their combination in ``gate``.
    number : int
    """

    gate: Linear
    up: Linear
    down: Linear
    combine: Combine
    number: int

    def __call__(self, x: Floats, observe: Observe | None = None) -> Floats:
        """Float32 [tokens, hidden] -> float32 [tokens, hidden]."""
        if observe is not None:
            observe("expert_gate", x, expert=self.number)
        gate, up = apply_all(x, self.gate, self.up)
        self.combine(gate, up)
        if observe is not None:
            observe("expert_down", gate, expert=self.number)
        return self.down(gate)


@dataclass(frozen=True)
class RoutedExperts:
    """A router, its experts, and the expert that every token takes.

    Parameters
    ----------
    routing : Routing
    router : Linear
        To one logit an expert.
    experts : sequence of Expert
    correction : ndarray of float32, shape (experts,), optional
        Added to the scores where experts are chosen, not to their weights.
    shared : GatedMlp, optional
    shared_router : Linear, optional
        To the logit of the shared expert's weight; 1 where there is none.
    """

    routing: Routing
    router: Linear
    experts: Sequence[Expert]
    correction: Floats | None = None
    shared: GatedMlp | None = None
    shared_router: Linear | None = None

    def __call__(self, x: Floats, pool: Pool, observe: Observe | None = None) -> Floats:
        """See :class:`~trapetum.runtime.layers.FeedForward`."""
        chosen, weights = ROUTERS[self.routing.router](self.router(x), self.routing, self.correction)
        each = chosen.shape[1]
        order = np.argsort(chosen.reshape(-1), kind="stable")
        counts = np.bincount(chosen.reshape(-1), minlength=len(self.experts))
        ends = np.cumsum(counts)
        busy = np.flatnonzero(counts).tolist()

        def work(expert: int) -> tuple[NDArray[np.intp], Floats]:
            picked = order[ends[expert] - counts[expert] : ends[expert]]
            tokens = picked // each
            y = self.experts[expert](x[tokens], observe)
            y *= weights.reshape(-1)[picked][:, None]
            return tokens, y

        out = np.zeros_like(x)
        found: dict[int, tuple[NDArray[np.intp], Floats]] = {}
        for group in _groups(busy, counts, _ROWS if observe is None else 1):
            pool.run(partial(_put, found, work, group), len(group))
            for expert in group:
                tokens, y = found.pop(expert)
                out[tokens] += y
        if self.shared is not None:
            y = self.shared(x, pool, observe)
            if self.shared_router is not None:
                y *= logistic(self.shared_router(x))
            out += y
        return out


def _put(found: dict[int, Any], work: Callable[[int], Any], group: list[int], number: int) -> None:
    found[group[number]] = work(group[number])


def _groups(experts: list[int], counts: NDArray[np.intp], rows: int) -> Iterator[list[int]]:
    """Experts in their order, as many together as have ``rows`` tokens; at least one."""
    group: list[int] = []
    for expert in experts:
        if group and int(counts[group].sum()) + counts[expert] > rows:
            yield group
            group = []
        group.append(expert)
    if group:
        yield group


def build_experts(weights: Weights, layer: int) -> RoutedExperts:
    """The experts of a layer, wherever a checkpoint stores them.

    Raises
    ------
    CheckpointError
        If a part is missing.
    """
    config = weights.config
    routing = config.sections[SECTION]
    if not isinstance(routing, Routing):
        raise CheckpointError(f"{weights.source.path}: config.json describes no routed experts")
    combine = _clamped(routing) if routing.activation == "clamped" else GATES[config.hidden_act]
    experts = [_expert(weights, layer, e, combine) for e in range(routing.experts)]
    shared = None
    if weights.find("shared_gate", layer) is not None:
        gate, up, down = (weights.linear(f"shared_{part}", layer) for part in ("gate", "up", "down"))
        shared = GatedMlp(gate, up, down, config.hidden_act, "shared_")
    scaled, corrected = (weights.find(part, layer) is not None for part in ("shared_router", "correction"))
    return RoutedExperts(
        routing,
        _router(weights, "router", layer),
        experts,
        correction=weights.vector("correction", layer) if corrected else None,
        shared=shared,
        shared_router=_router(weights, "shared_router", layer) if scaled else None,
    )


def _expert(weights: Weights, layer: int, number: int, combine: Combine) -> Expert:
    parts = (weights.linear(f"expert_{part}", layer, expert=number) for part in ("gate", "up", "down"))
    gate, up, down = parts
    return Expert(gate, up, down, combine, number)


def _router(weights: Weights, part: str, layer: int) -> Linear:
    """A small map whose result decides or scales; always multiplied exactly."""
    place, bias = weights.place(part, layer), weights.find(part, layer, bias=True)
    matrix = build_matrix(weights.source.load(place.name, place.rows), weights.pool)
    return Linear(matrix, None if bias is None else weights.source.load(bias.name).dequantize().reshape(-1))


def _clamped(routing: Routing) -> Combine:
    """``(clip(up) + 1) * g * sigmoid(alpha g)`` with ``g = min(gate, limit)``, in ``gate`` (gpt-oss)."""
    alpha, limit = np.float32(routing.alpha), np.float32(routing.limit)

    def combine(gate: Floats, up: Floats) -> None:
        np.minimum(gate, limit, out=gate)
        np.clip(up, -limit, limit, out=up)
        gate *= logistic(gate * alpha)
        up += 1
        gate *= up

    return combine
