"""Choosing a token: greedy, temperature, top-k, top-p, seeds, refusals."""

from __future__ import annotations

import numpy as np
import pytest

from trapetum.errors import RecipeError
from trapetum.runtime.sampling import Sampling

LOGITS = np.log(np.array([0.1, 0.4, 0.05, 0.3, 0.15], np.float32))


def test_greedy_takes_the_first_of_equals() -> None:
    rng = np.random.default_rng(0)
    assert Sampling().choose(LOGITS, rng) == 1
    assert Sampling().choose(np.array([0, 2, 2], np.float32), rng) == 1


def test_probabilities() -> None:
    np.testing.assert_allclose(Sampling(1.0).probabilities(LOGITS), np.exp(LOGITS), rtol=1e-6)
    cold = np.exp(LOGITS.astype(np.float64)) ** 2
    np.testing.assert_allclose(Sampling(0.5).probabilities(LOGITS), cold / cold.sum(), rtol=1e-6)


def test_top_k() -> None:
    p = Sampling(1.0, top_k=2).probabilities(LOGITS)
    np.testing.assert_allclose(p, [0, 4 / 7, 0, 3 / 7, 0], rtol=1e-6)
    assert np.count_nonzero(Sampling(1.0, top_k=99).probabilities(LOGITS)) == 5


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.01, {1}), (0.39, {1}), (0.5, {1, 3}), (0.8, {1, 3, 4}), (1.0, {0, 1, 2, 3, 4})]
)
def test_top_p_keeps_the_fewest_that_reach_it(top_p: float, kept: set[int]) -> None:
    p = Sampling(1.0, top_p=top_p).probabilities(LOGITS)
    assert set(np.flatnonzero(p).tolist()) == kept
    assert p.sum() == pytest.approx(1)


def test_draws_follow_the_distribution_and_the_seed() -> None:
    s = Sampling(1.0, top_k=3)
    rng = np.random.default_rng(7)
    draws = [s.choose(LOGITS, rng) for _ in range(4000)]
    counts = np.bincount(draws, minlength=5) / 4000
    np.testing.assert_allclose(counts, s.probabilities(LOGITS), atol=0.03)
    assert counts[0] == counts[2] == 0
    again = np.random.default_rng(7)
    assert draws[:50] == [s.choose(LOGITS, again) for _ in range(50)]


def test_tiny_temperature_is_greedy_without_overflow() -> None:
    assert Sampling(1e-30).choose(LOGITS, np.random.default_rng(0)) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
    ],
)
def test_values_out_of_range(options: dict[str, float]) -> None:
    with pytest.raises(RecipeError, match=next(iter(options))):
        Sampling(**options)  # type: ignore[arg-type]
