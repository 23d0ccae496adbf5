"""The factor against its definition in float64, and matrices that calibration really gives: singular, dead, noisy."""

from __future__ import annotations

import numpy as np
import pytest

from trapetum.errors import RecipeError
from trapetum.quantize.hessian import Factor, Hessian, damping_for


def moment(n: int, tokens: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, n)) @ rng.standard_normal((n, n)) * np.exp(rng.standard_normal(n))
    return x.T @ x / tokens


def product(factor: Factor) -> np.ndarray:
    n, g = len(factor.upper), factor.group
    d = np.zeros((n, n))
    for b, block in enumerate(factor.pivots):
        d[b * g : (b + 1) * g, b * g : (b + 1) * g] = block
    return factor.upper.astype(np.float64) @ d @ factor.upper.T


@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("ordered", [False, True])
def test_product_is_the_damped_moment(group: int, ordered: bool) -> None:
    h = Hessian(moment(24, 200), 200)
    order = np.argsort(-h.diagonal) if ordered else None
    factor = h.factor(group, order=order)
    wanted = h.damped(order=order)
    assert np.allclose(product(factor), wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
    assert np.array_equal(np.tril(factor.upper, -1), np.zeros((24, 24)))
    for b in range(24 // group):
        cut = slice(b * group, (b + 1) * group)
        assert np.array_equal(factor.upper[cut, cut], np.eye(group))
    assert (factor.weights > 0).all()


def test_weights_are_conditional_variances() -> None:
    h = moment(6, 500)
    factor = Hessian(h, 500).factor(damping=0.0)
    for j in range(6):  # what is left of input j's variance once the inputs after it are known
        rest = h[j + 1 :, j + 1 :]
        left = h[j, j] - (h[j, j + 1 :] @ np.linalg.solve(rest, h[j + 1 :, j]) if j < 5 else 0.0)
        assert factor.weights[j] == pytest.approx(left, rel=1e-6)


def test_dead_inputs_and_too_few_tokens_are_damped() -> None:
    m = moment(32, 5)
    m[:, 7] = m[7] = 0.0
    factor = Hessian(m, 5).factor()
    assert np.isfinite(factor.upper).all()
    assert factor.weights.min() >= 0.099 * m.diagonal().mean()
    assert not np.delete(factor.upper[7], 7).any()  # an error at a dead input disturbs nobody
    assert not np.delete(factor.upper[:, 7], 7).any()


def test_zero_moment_is_the_identity() -> None:
    factor = Hessian(np.zeros((16, 16), np.float32), 0).factor(8)
    assert np.array_equal(factor.upper, np.eye(16))
    assert np.array_equal(factor.pivots, np.broadcast_to(np.eye(8), (2, 8, 8)))


def test_indefinite_matrix_ends_with_its_diagonal() -> None:
    m = np.ones((4, 4)) * 1e9
    np.fill_diagonal(m, [1.0, 2.0, 3.0, 4.0])
    factor = Hessian(m, 10**6).factor()
    assert np.array_equal(factor.upper, np.eye(4))
    assert np.allclose(factor.weights, np.array([1, 2, 3, 4]) + 0.025)


def test_more_damping_is_tried_before_the_diagonal() -> None:
    m = np.full((4, 4), 1.15)
    np.fill_diagonal(m, 1.0)  # smallest eigenvalue -0.15
    factor = Hessian(m, 10**6).factor()
    assert factor.upper[0, 3] != 0.0


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (np.full((2, 2), np.nan), "4 NaN or infinite"),
        (np.array([[1.0, np.inf], [np.inf, 1.0]]), "2 NaN or infinite"),
        (np.diag([1.0, -1.0]), "1 negative"),
        (np.ones((2, 3)), "shape"),
    ],
)
def test_refuses_what_is_no_moment(bad: np.ndarray, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        Hessian(bad, 10)


def test_groups_must_fit() -> None:
    with pytest.raises(ValueError, match="groups of 8"):
        Hessian(np.eye(12), 10).factor(8)


def test_damping_falls_with_tokens() -> None:
    values = [damping_for(t, 100) for t in (0, 100, 400, 800, 1600, 10**6)]
    assert values == sorted(values, reverse=True)
    assert values[0] == 0.1
    assert values[-1] == 0.01
