"""Choosing under a budget, against trying every combination."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from trapetum.quantize.allocation import Option, choose


def everything(groups: list[list[Option]], nbytes: int) -> float | None:
    fitting = [
        sum(o.loss for o in combination)
        for combination in itertools.product(*groups)
        if sum(o.nbytes for o in combination) <= nbytes
    ]
    return min(fitting, default=None)


@pytest.mark.parametrize("seed", range(12))
def test_least_loss_of_all_combinations(seed: int) -> None:
    rng = np.random.default_rng(seed)
    groups = [
        [Option(int(n), float(rng.random())) for n in rng.integers(0, 400, rng.integers(1, 6))]
        for _ in range(6)
    ]
    low = sum(min(o.nbytes for o in g) for g in groups)
    for nbytes in (low - 1, low, low + 50, low + 311, low + 5000):
        chosen = choose(groups, nbytes)
        best = everything(groups, nbytes)
        if best is None:
            assert chosen is None
            continue
        assert chosen is not None
        taken = [g[i] for g, i in zip(groups, chosen, strict=True)]
        assert sum(o.nbytes for o in taken) <= nbytes
        assert sum(o.loss for o in taken) == pytest.approx(best, rel=1e-12)


def test_large_sizes_stay_within_the_budget_and_near_the_bound() -> None:
    rng = np.random.default_rng(1)
    sizes = rng.integers(1 << 20, 1 << 26, 300)
    weights = rng.random(300) + 0.1
    groups = [
        [Option(int(n * b / 8), float(w * 4.0**-b)) for b in (2, 3, 4, 5, 6, 8)]
        for n, w in zip(sizes, weights, strict=True)
    ]
    budget = int(sizes.sum() * 4.1 / 8)
    chosen = choose(groups, budget)
    assert chosen is not None
    used = sum(g[i].nbytes for g, i in zip(groups, chosen, strict=True))
    assert 0.999 * budget < used <= budget
    loss = sum(g[i].loss for g, i in zip(groups, chosen, strict=True))
    # The Lagrangian bound: no choice within the budget loses less than this, for any price.
    bound = max(
        sum(min(o.loss + price * o.nbytes for o in g) for g in groups) - price * budget
        for price in np.geomspace(1e-14, 1e-6, 400)
    )
    assert bound <= loss < 1.002 * bound


def test_a_tie_takes_the_smaller_option() -> None:
    assert choose([[Option(9, 1.0), Option(3, 1.0)]], 100) == [1]


def test_nothing_to_choose() -> None:
    assert choose([], 10) == []
