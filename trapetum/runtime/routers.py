"""How tokens choose their experts: one function for each rule, all of them in one table.

====================  ===============================================================================================
router                weights of the chosen experts
====================  ===============================================================================================
``softmax``           softmax over all experts, the largest are taken; made to add up to 1 where the model says so
``softmax_chosen``    the largest logits are taken, softmax over those (gpt-oss)
``softmax_groups``    softmax; experts come from the groups of neighbours that have the best ones (DeepSeek V2)
``sigmoid_groups``    sigmoid; scores plus a correction choose groups by the sum of their two best experts, and experts
                      among them; the weights know nothing of the correction (DeepSeek V3)
====================  ===============================================================================================

Equal scores go to the lower expert, so that a choice never depends on anything but the scores.

Source: DeepSeek-AI, "DeepSeek-V2" and "DeepSeek-V3" (2024), for the last two.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from trapetum.models.experts import Routing

__all__ = ["ROUTERS", "Router", "largest", "softmax"]

Floats = NDArray[np.float32]
Router = Callable[[Floats, Routing, "Floats | None"], tuple[NDArray[np.intp], Floats]]


def largest(scores: Floats, count: int) -> NDArray[np.intp]:
    """Columns of the ``count`` largest scores of each row, the largest first; equal ones in their order."""
    return np.argsort(-scores, axis=-1, kind="stable")[:, :count]


def softmax(logits: Floats) -> Floats:
    """Softmax of each row, float32."""
    weights: Floats = np.exp(logits - logits.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return weights


def _softmax(logits: Floats, routing: Routing, correction: Floats | None) -> tuple[NDArray[np.intp], Floats]:
    scores = softmax(logits)
    chosen = largest(scores, routing.chosen)
    weights = np.take_along_axis(scores, chosen, axis=-1)
    if routing.normalise:
        weights /= weights.sum(axis=-1, keepdims=True)
    return chosen, weights * np.float32(routing.scale)


def _softmax_chosen(
    logits: Floats, routing: Routing, correction: Floats | None
) -> tuple[NDArray[np.intp], Floats]:
    chosen = largest(logits, routing.chosen)
    return chosen, softmax(np.take_along_axis(logits, chosen, axis=-1)) * np.float32(routing.scale)


def _softmax_groups(
    logits: Floats, routing: Routing, correction: Floats | None
) -> tuple[NDArray[np.intp], Floats]:
    scores = softmax(logits)
    ranked = _grouped(scores, routing).max(axis=-1)
    return _weighted(scores, _only_best_groups(scores, ranked, routing), routing)


def _sigmoid_groups(
    logits: Floats, routing: Routing, correction: Floats | None
) -> tuple[NDArray[np.intp], Floats]:
    with np.errstate(over="ignore"):  # exp(-x) = inf gives 0, the right limit
        scores: Floats = np.reciprocal(np.exp(-logits) + np.float32(1))
    corrected = scores if correction is None else scores + correction
    ranked = np.sort(_grouped(corrected, routing), axis=-1)[..., -2:].sum(axis=-1)
    return _weighted(scores, _only_best_groups(corrected, ranked, routing), routing)


def _grouped(scores: Floats, routing: Routing) -> Floats:
    """Scores [tokens, experts] as [tokens, groups, experts of a group]."""
    return scores.reshape(scores.shape[0], routing.groups, -1)


def _only_best_groups(scores: Floats, ranked: Floats, routing: Routing) -> Floats:
    """Scores, -inf outside the best groups; ranked [tokens, groups]."""
    kept = np.zeros(ranked.shape, np.bool_)
    np.put_along_axis(kept, largest(ranked, routing.chosen_groups), True, axis=-1)
    found: Floats = np.where(kept[..., None], _grouped(scores, routing), np.float32(-np.inf))
    return found.reshape(scores.shape)


def _weighted(scores: Floats, chosen_by: Floats, routing: Routing) -> tuple[NDArray[np.intp], Floats]:
    chosen = largest(chosen_by, routing.chosen)
    weights = np.take_along_axis(scores, chosen, axis=-1)
    if routing.normalise:
        weights /= weights.sum(axis=-1, keepdims=True) + np.float32(1e-20)  # sigmoids may all be 0
    return chosen, weights * np.float32(routing.scale)


ROUTERS: dict[str, Router] = {
    "softmax": _softmax,
    "softmax_chosen": _softmax_chosen,
    "softmax_groups": _softmax_groups,
    "sigmoid_groups": _sigmoid_groups,
}
"""Name -> (logits float32 [tokens, experts], options, correction of the choice [experts] or None) -> (chosen experts
[tokens, chosen], their weights float32 of the same shape)."""
