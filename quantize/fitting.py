"""Schemes that must be fitted to a tensor before its row blocks can be worked on: each once, by whoever comes first."""

from __future__ import annotations

from threading import Lock
from typing import TYPE_CHECKING

from trapetum.quantize.identity import tensor_seed
from trapetum.tensors import matrix_shape

if TYPE_CHECKING:
    from trapetum.quantize.plan import Plan, PlanRow
    from trapetum.quantize.scheme import Scheme

__all__ = ["Fits"]

_KEPT = 256  # far more tensors than can be in work at once; 16 KiB each


class Fits:
    """The fitted schemes of the tensors in work; used by all worker threads.

    Parameters
    ----------
    plan : Plan
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._guard = Lock()
        self._locks: dict[str, Lock] = {}
        self._found: dict[str, Scheme] = {}

    def scheme(self, row: PlanRow) -> Scheme:
        """The scheme for the blocks of ``row``; other blocks of the same tensor wait while one is fitting."""
        if row.scheme.row_independent:
            return row.scheme
        with self._guard:
            lock = self._locks.setdefault(row.name, Lock())
        with lock:
            found = self._found.get(row.name)
            if found is None:
                plan = self._plan
                seed = tensor_seed(plan.recipe.seed, row.name)
                found = row.scheme.fit(
                    matrix_shape(row.shape)[0],
                    lambda rows: plan.aimed(row, rows, plan.values(row, rows)),
                    seed,
                    plan.importance(row),
                )
                plan.source.release(row.name)
                with self._guard:
                    self._found[row.name] = found
                    for name in list(self._found)[:-_KEPT]:
                        del self._found[name], self._locks[name]
        return found
